"""Step: trains one phase: submits the job to a launcher, follows it, collects weights and hand-over state.

In: packed rows and shards, or the prompts of a policy objective; the tokenizer, the state to start from. Out: hf/
(Hugging Face glm4_moe directory with tokenizer), handover/ (what the next phase continues from), adapter/ in PEFT's
format where one was trained (hf/ has it merged in); metrics.jsonl, rollouts.jsonl and logs as evidence. The job runs
detached in work/<key>/. A flow that is killed and started again finds the job there and follows it further.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.files.atomic_files import link_or_copy
from infra.jobs.launchers import Job, JobFailedError, JobLostError, Launcher
from infra.jobs.open_launcher import open_launcher
from infra.jobs.scheduled_jobs import SUBMITTED_FILES
from infra.jobs.supervisor import write_json
from infra.step import Artifact, Output, Progress, digest_of, step
from infra.storage.store import hash_file
from model.architecture.counts import count_parameters
from model.text.tokenizer_layout import END_OF_TEXT, END_TOKENS
from tasks.training.input_rules import refuse_foreign_inputs
from tasks.training.plan.launch_rules import refuse_impossible_training, refuse_too_few_prompts
from tasks.training.state.checkpoints import latest_step
from tasks.training.state.job import JOB_FILE, ROLLOUTS_FILE, TrainingJob
from tasks.training.state.spikes import SPIKES_FILE
from tasks.training.state.trained_checkpoint import (
    CHAT_TEMPLATE_FILE,
    CHAT_TEMPLATE_KEY,
    TrainedCheckpoint,
    chat_template_digest,
)
from tasks.training.watch.trackers import refuse_missing_tracker

if TYPE_CHECKING:
    from configs.schema import TrainingRecipe, TrainingResources
    from tasks.data.decontamination.decontaminate_documents import DecontaminatedDocuments
    from tasks.data.packing.pack_phase import PackedPhase
    from tasks.data.shards.shard_chats import ChatShards
    from tasks.data.shards.shard_documents import TokenShards
    from tasks.data.tokenizer.train_tokenizer import TrainedTokenizer

POLL_SECONDS = 0.2
FORWARD_SECONDS = 3.0
"""Seconds between two requests to the tracker."""
EVIDENCE = (
    *("metrics.jsonl", ROLLOUTS_FILE, SPIKES_FILE, "job.json", *SUBMITTED_FILES),
    *("logs/*", "tensorboard/*", "wandb/*", "profile/*"),
)


class TrainingStoppedError(RuntimeError):
    """The training did not fail and did not end: run again to continue."""


@step(
    content=("hf/*", "handover/*", "adapter/*"),
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
) -> TrainedCheckpoint:
    """`packed`, `shards` and `chats` (where conversations were packed) belong to objectives on rows, `prompts` to
    policy objectives; each is None for the other kind. `validation` are shards of held-out documents; None measures
    nothing while training. Raises ValueError for what cannot be trained, JobFailedError with the failing rank's last
    lines when training fails, JobLostError when it was taken away: then the same call continues from the latest
    checkpoint."""
    refuse_impossible_training(recipe, resources)
    refuse_missing_tracker(resources)
    if prompts is not None:
        refuse_too_few_prompts(recipe, prompts.record.num_prompts)
    if recipe.adapter.kind != "none" and start is None:
        raise ValueError(
            f"phase {recipe.phase}: adapter.kind {recipe.adapter.kind} has no weights to adapt: start with "
            f"`--from {recipe.phase} --start DIR`, or after a phase whose adapter.kind is none"
        )
    refuse_foreign_inputs(
        recipe, tokenizer, start, {"shards": shards, "conversations": chats, "held-out shards": validation}
    )
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
    )
    follow(open_launcher(resources.launcher, output.work_dir.parent), job, output)
    is_chat_trained = recipe.objective.kind == "sft" or (start is not None and start.record.is_chat_trained)
    return collect(job, tokenizer, is_chat_trained, output)


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
        tokenizer_path=str(tokenizer.path("tokenizer.json")),
        start_dir="" if start is None else str(start.directory("handover")),
        start_weights_dir="" if start is None else str(start.directory("hf")),
        eos_token_ids=tuple(token_ids[name] for name in END_TOKENS),
        pad_token_id=token_ids[END_OF_TEXT],
    )


def follow(launcher: Launcher, job: TrainingJob, output: Output) -> None:
    """Submit the job or find it running, and forward progress and metrics until it succeeds."""
    name = f"training of phase {job.recipe.phase}"
    job_path = output.work_dir / JOB_FILE
    environment = {"OMP_NUM_THREADS": str(job.recipe.num_threads)}
    resources = job.resources
    submission = Job(
        output.key,
        "tasks.training.worker",
        (str(job_path),),
        resources.num_ranks,
        environment,
        num_nodes=1 if resources.launcher == "local" else resources.num_ranks // resources.ranks_per_node,
        queue=resources.queue,
    )
    handle = launcher.find(output.key)
    if handle is None or launcher.poll(handle).state in ("lost", "failed", "interrupted"):
        write_json(job_path, job.model_dump(mode="json"))
        handle = launcher.submit(submission)
    metrics, waits_for = MetricsTail(output), ""
    while True:
        status = launcher.poll(handle)
        metrics.forward(is_last=status.state not in ("queued", "running"))
        if status.state == "queued" and status.reason != waits_for:
            waits_for = status.reason
            output.report(Progress(0, 0, "jobs", f"waits in the queue ({waits_for})"))
        if status.progress is not None:
            output.report(status.progress)
        if status.state == "succeeded":
            return
        if status.state == "failed":
            raise JobFailedError(name, status)
        if status.state == "interrupted":
            raise TrainingStoppedError(f"{name} was asked to stop and has saved: run again to continue")
        if status.state == "lost":
            raise JobLostError(name, status, latest_step(output.work_dir))
        time.sleep(POLL_SECONDS)


class MetricsTail:
    """Forwards each step of metrics.jsonl once, also over restarts of flow and worker: the last forwarded step is kept
    on disk."""

    def __init__(self, output: Output) -> None:
        self.path = output.work_dir / "metrics.jsonl"
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
    job: TrainingJob, tokenizer: Artifact[TrainedTokenizer], is_chat_trained: bool, output: Output
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
        validation_bits_per_byte={} if measured is None else measured["bits_per_byte"],
        mean_reward=None if policy is None else _mean_of_last_tenth(policy["mean_rewards"]),
        is_chat_trained=is_chat_trained,
        chat_template_digest=chat_template_digest(),
        num_parameters=count_parameters(job.recipe.model).total,
        tokenizer_digest=tokenizer.digest,
        special_token_ids=tokenizer.record.special_ids,
        export_digest=digest_of(export),
    )


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
