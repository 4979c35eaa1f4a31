"""The description of one training job: what the launching step writes and every rank reads."""

from __future__ import annotations

from configs.files.stored_files import StoredFile
from configs.schema import Frozen, TrainingRecipe, TrainingResources

JOB_FILE = "training.json"
"""The description, in the job's work directory."""
METRICS_FILE = "metrics.jsonl"
"""Figures of the logged steps."""
ROLLOUTS_FILE = "rollouts.jsonl"
"""Sampled answers and rewards, for people: the first groups of each step."""

MERGE_FILE, MERGE_KEY = "merge.json", "largest_logit_difference"
"""In adapter/: how exact the merge of an adapter was (merge_check.py)."""
WORLDS_FILE = "worlds.jsonl"
"""With how many nodes each start of the job was submitted, and why, where nodes may be missing."""


class TrainingJob(Frozen):
    """JOB.json of `python -m tasks.training.worker`. Paths are absolute; files of the store may be in S3."""

    recipe: TrainingRecipe
    resources: TrainingResources
    work_dir: str
    """Checkpoints, metrics and logs of the run; a second start continues from them."""
    packed: tuple[StoredFile, ...]
    """The packed order of the phase; none for a policy objective, which samples its rows, and for pairs."""
    shards: tuple[StoredFile, ...]
    """The token shards that the order points into, with their indexes, masks and sidecars."""
    validation: tuple[StoredFile, ...]
    """Token shards of held-out documents, measured while the phase trains; none where none are measured."""
    validation_domains: dict[str, str]
    """Domain of each of their shards."""
    prompts_path: str
    """prompts.parquet of a policy objective, else empty."""
    solved_path: str
    """solved.parquet, the pass rates of the prompts where objective.difficulty asks for some, else empty."""
    pairs_dir: str
    """Directory of train.parquet and validation.parquet, the pairs of a reward or DPO objective, else empty."""
    reference_dir: str
    """Hugging Face directory of the model that PPO is held to; empty where that is the start."""
    reward_model_dir: str
    """Hugging Face directory of the reward model that scores answers; empty where none does."""
    tokenizer_path: str
    """tokenizer.json: prompts and answers as text, and how many bytes a validation token stands for."""
    start_dir: str
    """Hand-over state to start from; empty for random weights."""
    start_weights_dir: str
    """Hugging Face directory of the start, read where its hand-over state holds no weights; likewise."""
    start_weights_sha256: str
    """sha256 over the names and bytes of its weights: an adapter names the model that it belongs to; likewise."""
    eos_token_ids: tuple[int, ...]
    """For config.json of the export; they also end a sampled answer."""
    pad_token_id: int
