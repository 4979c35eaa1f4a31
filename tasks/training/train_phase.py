"""Step: trains one phase: submits the job to a launcher, follows it, collects weights and hand-over state.

In: packed rows and shards, preference pairs, or the prompts of a policy objective; the tokenizer, the state to start
from. Out: hf/ (Hugging Face glm4_moe directory with tokenizer), handover/ (what the next phase continues from),
adapter/ in PEFT's format where one was trained (hf/ has it merged in); pairs/ with the scores of the pairs to judge by
(loop/pair_scores.py) after training on pairs; metrics.jsonl, rollouts.jsonl and logs as
evidence. The job runs detached in work/<key>/. A flow that is killed and started again finds the job there and follows
it further.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.files.atomic_files import link_or_copy
from infra.jobs.follow_job import follow
from infra.jobs.open_launcher import open_launcher
from infra.jobs.scheduled_jobs import SUBMITTED_FILES
from infra.jobs.supervisor import write_json
from infra.step import Artifact, Output, Record, digest_of, step
from infra.storage.store import hash_file
from model.architecture.counts import count_parameters, unembedding_saved
from model.text.tokenizer_layout import END_OF_TEXT, END_TOKENS, tokenizer_for_text
from tasks.training.input_rules import refuse_foreign_inputs, refuse_wrong_reward_model
from tasks.training.plan.launch_rules import refuse_impossible_training, refuse_too_few_pairs
from tasks.training.policy.prompt_difficulty import SOLVED_FILE
from tasks.training.policy.prompt_order import PromptOrder
from tasks.training.schedule.schedules import trains_mtp
from tasks.training.state.checkpoints import latest_step
from tasks.training.state.job import MERGE_FILE, MERGE_KEY, METRICS_FILE, ROLLOUTS_FILE, WORLDS_FILE, TrainingJob
from tasks.training.state.spikes import SPIKES_FILE
from tasks.training.state.trained_checkpoint import (
    CHAT_TEMPLATE_FILE,
    CHAT_TEMPLATE_KEY,
    TrainedCheckpoint,
    chat_template_digest,
    weights_sha256,
)
from tasks.training.state.unreached_tensors import unreached_tensors
from tasks.training.submission import Submission
from tasks.training.watch.effective_time import TIME_FILE
from tasks.training.watch.trackers import refuse_missing_tracker

if TYPE_CHECKING:
    from configs.schema import TrainingRecipe, TrainingResources
    from tasks.data.decontamination.decontaminate_documents import DecontaminatedDocuments
    from tasks.data.packing.pack_pairs import PackedPairs
    from tasks.data.packing.pack_phase import PackedPhase
    from tasks.data.shards.shard_chats import ChatShards
    from tasks.data.shards.shard_documents import TokenShards
    from tasks.data.tokenizer.train_tokenizer import TrainedTokenizer

FORWARD_SECONDS = 3.0
"""Seconds between two requests to the tracker."""
EVIDENCE = (
    *(METRICS_FILE, ROLLOUTS_FILE, SPIKES_FILE, WORLDS_FILE, TIME_FILE, "job.json", *SUBMITTED_FILES),
    *("logs/*", "tensorboard/*", "wandb/*", "profile/*"),
)


@step(
    content=("hf/*", "handover/*", "adapter/*", "pairs/*"),
    evidence=EVIDENCE,
    distributions=("torch", "deepspeed", "safetensors", "numpy", "tokenizers"),
    roots=("tasks.training.worker",),
)
def train_phase(
    *,
    packed: Artifact[PackedPhase] | None,
    shards: Artifact[TokenShards] | None,
    chats: Artifact[ChatShards] | None,
    prompts: Artifact[DecontaminatedDocuments] | None,
    validation: Artifact[TokenShards] | None,
    tokenizer: Artifact[TrainedTokenizer],
    start: Artifact[TrainedCheckpoint] | None,
    recipe: TrainingRecipe,
    resources: TrainingResources,
    output: Output,
    pairs: Artifact[PackedPairs] | None = None,
    reward_model: Artifact[TrainedCheckpoint] | None = None,
    reference_model: Artifact[TrainedCheckpoint] | None = None,
    pass_rates: Artifact[Record] | None = None,
) -> TrainedCheckpoint:
    """`packed`, `shards` and `chats` (where conversations were packed) belong to objectives on rows, `prompts` to
    policy objectives, `pairs` to reward and DPO, `reference_model` to DPO and policy objectives that name one,
    `reward_model` and `pass_rates` (what sample_solutions measured of the prompts) to policy objectives that name one,
    or a difficulty; each is None for the other kinds. `validation` are
    shards of held-out documents; None measures nothing while training. Raises ValueError for what cannot be trained,
    JobFailedError with the failing rank's last lines when training fails, JobLostError when it was taken away: then the
    same call continues from the latest checkpoint."""
    refuse_impossible_training(recipe, resources)
    refuse_missing_tracker(resources)
    order = None if prompts is None else _order_prompts(prompts, tokenizer, recipe, pass_rates)
    if pairs is not None:
        refuse_too_few_pairs(recipe, pairs.record.num_training)
    _refuse_missing_weights(recipe, start)
    refuse_foreign_inputs(
        recipe,
        tokenizer,
        start,
        {"shards": shards, "conversations": chats, "held-out shards": validation, "pairs": pairs},
    )
    refuse_wrong_reward_model(recipe, tokenizer, reward_model)
    job = describe_job(
        recipe,
        resources,
        output.work_dir,
        packed=packed,
        shards=shards,
        chats=chats,
        prompts=prompts,
        validation=validation,
        tokenizer=tokenizer,
        start=start,
        pairs=pairs,
        reward_model=reward_model,
        reference_model=reference_model,
        pass_rates=pass_rates,
    )
    train(job, output)
    reads_chats = recipe.objective.kind in ("sft", "rejection_sampling", "distillation")
    is_chat_trained = reads_chats or (start is not None and start.record.is_chat_trained)
    return collect(job, tokenizer, is_chat_trained, order, output)


def _refuse_missing_weights(recipe: TrainingRecipe, start: Artifact[TrainedCheckpoint] | None) -> None:
    if recipe.adapter.kind != "none" and start is None:
        raise ValueError(
            f"phase {recipe.phase}: adapter.kind {recipe.adapter.kind} has no weights to adapt: start with "
            f"`--from {recipe.phase} --start DIR`, or after a phase whose adapter.kind is none"
        )


def _order_prompts(
    prompts: Artifact[DecontaminatedDocuments],
    tokenizer: Artifact[TrainedTokenizer],
    recipe: TrainingRecipe,
    pass_rates: Artifact[Record] | None,
) -> PromptOrder:
    """The prompts as the ranks will ask them, for the counts of those that are left out; ValueError if none is
    left."""
    opened = tokenizer_for_text(str(tokenizer.path("tokenizer.json")))
    solved_path = None if pass_rates is None else pass_rates.path(SOLVED_FILE)
    return PromptOrder(prompts.path("prompts.parquet"), opened, recipe, solved_path)


def describe_job(
    recipe: TrainingRecipe,
    resources: TrainingResources,
    work_dir: Path,
    *,
    packed: Artifact[PackedPhase] | None,
    shards: Artifact[TokenShards] | None,
    chats: Artifact[ChatShards] | None,
    prompts: Artifact[DecontaminatedDocuments] | None,
    validation: Artifact[TokenShards] | None,
    tokenizer: Artifact[TrainedTokenizer],
    start: Artifact[TrainedCheckpoint] | None,
    pairs: Artifact[PackedPairs] | None = None,
    reward_model: Artifact[TrainedCheckpoint] | None = None,
    reference_model: Artifact[TrainedCheckpoint] | None = None,
    pass_rates: Artifact[Record] | None = None,
) -> TrainingJob:
    """What the ranks read: rows and shards by address and digests, which the ranks verify; the rest as local paths,
    their checksums verified."""
    token_ids = tokenizer.record.special_ids
    return TrainingJob(
        recipe=recipe,
        resources=resources,
        work_dir=str(work_dir),
        packed=() if packed is None else tuple(packed.files("*")),
        shards=tuple(file for each in (shards, chats) if each is not None for file in each.files("shards/*")),
        validation=() if validation is None else tuple(validation.files("shards/*")),
        validation_domains={} if validation is None else validation.record.domains,
        prompts_path="" if prompts is None else str(prompts.path("prompts.parquet")),
        solved_path="" if pass_rates is None else str(pass_rates.path(SOLVED_FILE)),
        pairs_dir="" if pairs is None else str(pairs.path("train.parquet").parent),
        reference_dir="" if reference_model is None else str(reference_model.directory("hf")),
        reward_model_dir="" if reward_model is None else str(reward_model.directory("hf")),
        tokenizer_path=str(tokenizer.path("tokenizer.json")),
        start_dir="" if start is None else str(start.directory("handover")),
        start_weights_dir="" if start is None else str(start.directory("hf")),
        start_weights_sha256="" if start is None else weights_sha256(_hashes_of_export(start)),
        eos_token_ids=tuple(token_ids[name] for name in END_TOKENS),
        pad_token_id=token_ids[END_OF_TEXT],
    )


def _hashes_of_export(checkpoint: Artifact[TrainedCheckpoint]) -> dict[str, str]:
    """sha256 of each file of hf/, as its manifest has them."""
    content = checkpoint.manifest.content
    return {name.removeprefix("hf/"): entry.sha256 for name, entry in content.items() if name.startswith("hf/")}


def train(job: TrainingJob, output: Output) -> None:
    """Submit the job or find it running, and forward progress and metrics until it succeeds."""
    launcher = open_launcher(job.resources.launcher, output.work_dir.parent)
    follow(
        launcher,
        Submission(launcher, job, output),
        output,
        look=MetricsTail(output).forward,
        saved_step=lambda: latest_step(output.work_dir),
    )


class MetricsTail:
    """Forwards each step of metrics.jsonl once, also over restarts of flow and worker: the last forwarded step is kept
    on disk."""

    def __init__(self, output: Output) -> None:
        self.path = output.work_dir / METRICS_FILE
        self.cursor_path = output.work_dir / "metrics_cursor.json"
        self.log_metrics = output.log_metrics
        self.last_step: int = json.loads(self.cursor_path.read_text())["step"] if self.cursor_path.exists() else 0
        self.offset = 0
        self.inode = 0
        self.forwarded_at = 0.0

    def forward(self, is_last: bool) -> None:
        """Send what is new, unless that was done FORWARD_SECONDS ago or less and more will come.

        Steps at or before the cursor are passed over: a resumed worker writes them again with equal values.
        """
        if not is_last and time.monotonic() - self.forwarded_at < FORWARD_SECONDS:
            return
        self.forwarded_at = time.monotonic()
        lines = [json.loads(line) for line in self._new_lines()]
        rows = [(values.pop("step"), values) for values in lines if values["step"] > self.last_step]
        if rows:
            self.log_metrics(rows)
            self.last_step = rows[-1][0]
            write_json(self.cursor_path, {"step": self.last_step})

    def _new_lines(self) -> list[str]:
        if not self.path.exists():
            return []
        with open(self.path, "rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self.inode:  # a resumed worker replaced the file by its truncated self
                self.inode, self.offset = inode, 0
            file.seek(self.offset)
            complete, newline, _ = file.read().rpartition(b"\n")
        self.offset += len(complete) + len(newline)
        return complete.decode().splitlines()


def collect(
    job: TrainingJob,
    tokenizer: Artifact[TrainedTokenizer],
    is_chat_trained: bool,
    order: PromptOrder | None,
    output: Output,
) -> TrainedCheckpoint:
    """Put the worker's files into the artifact; large ones are linked, not copied."""
    final_dir = output.work_dir / "final"
    for path in sorted(final_dir.glob("*/*")):
        link_or_copy(path, output.path(f"{path.parent.name}/{path.name}"))
    copy_tokenizer(tokenizer.paths("*"), is_chat_trained, output.directory / "hf")
    for pattern in EVIDENCE:
        for path in sorted(output.work_dir.glob(pattern.replace("/*", "/**/*"))):
            if path.is_file() and not path.is_symlink():  # Weights & Biases links to its newest run
                shutil.copyfile(path, output.path(path.relative_to(output.work_dir).as_posix()))
    position: dict[str, Any] = json.loads((final_dir / "handover" / "state.json").read_text())
    export = {path.name: hash_file(path) for path in sorted((output.directory / "hf").iterdir())}
    losses, policy = position["losses"], position["policy"]
    measured = position["best"] if job.recipe.validation.keep == "best" else position["last"]
    return TrainedCheckpoint(
        phase=job.recipe.phase,
        objective=job.recipe.objective.kind,
        course=job.recipe.course.name,
        course_tokens=position["course_tokens"],
        num_steps=position["step"],
        num_tokens=position["num_tokens"],
        lm_loss=losses["lm"],
        mtp_loss=losses["mtp"],
        balance_loss=losses["balance"],
        num_rollbacks=len(position["skipped"]),
        unreached_tensors=_unreached(job.recipe, final_dir / "handover"),
        merge_error=_merge_error(final_dir / "adapter"),
        validation_bits_per_byte={} if measured is None else measured["bits_per_byte"],
        mean_reward=None if policy is None else _mean_of_last_tenth(policy["mean_rewards"]),
        num_long_prompts=0 if order is None else order.num_too_long,
        num_easy_prompts=0 if order is None else order.num_too_easy,
        num_hard_prompts=0 if order is None else order.num_too_hard,
        is_chat_trained=is_chat_trained,
        chat_template_digest=chat_template_digest(),
        num_parameters=_num_parameters(job.recipe),
        tokenizer_digest=tokenizer.digest,
        special_token_ids=tokenizer.record.special_ids,
        export_digest=digest_of(export),
    )


def _num_parameters(recipe: TrainingRecipe) -> int:
    return count_parameters(recipe.model).total - unembedding_saved(recipe.model) * recipe.is_scored


def _unreached(recipe: TrainingRecipe, handover_dir: Path) -> tuple[str, ...]:
    """What should have been trained: not the MTP layer where its loss weighs nothing."""
    mtp = f"model.layers.{recipe.model.num_hidden_layers}."
    return tuple(name for name in unreached_tensors(handover_dir) if trains_mtp(recipe) or not name.startswith(mtp))


def _merge_error(adapter_dir: Path) -> float | None:
    return json.loads((adapter_dir / MERGE_FILE).read_text())[MERGE_KEY] if adapter_dir.exists() else None


def copy_tokenizer(paths: list[Path], is_chat_trained: bool, checkpoint_dir: Path) -> None:
    """Copy the tokenizer's files into a Hugging Face directory. The chat template only where the model was trained with
    it: servers would otherwise prompt a base model with it."""
    for path in paths:
        if path.name == "tokenizer_config.json" and not is_chat_trained:
            values = {name: value for name, value in json.loads(path.read_text()).items() if name != CHAT_TEMPLATE_KEY}
            (checkpoint_dir / path.name).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n")
        elif path.name != CHAT_TEMPLATE_FILE or is_chat_trained:
            shutil.copyfile(path, checkpoint_dir / path.name)


def _mean_of_last_tenth(values: list[float]) -> float:
    last = values[-max(1, len(values) // 10) :]
    return sum(last) / len(last)
