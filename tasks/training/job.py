"""The description of one training job: what the launching step writes and every rank reads."""

from __future__ import annotations

from configs.schema import Frozen, TrainingRecipe, TrainingResources


class TrainingJob(Frozen):
    """JOB.json of `python -m tasks.training.worker`. Paths are absolute."""

    recipe: TrainingRecipe
    resources: TrainingResources
    work_dir: str
    """Checkpoints, metrics and logs of the run; a second start continues what lies there."""
    packed_dir: str
    """The packed order of the phase."""
    shards_dir: str
    """The token shards that the order points into."""
    start_dir: str
    """Hand-over state to start from; empty for random weights."""
    eos_token_ids: tuple[int, ...]
    """For config.json of the export."""
    pad_token_id: int
