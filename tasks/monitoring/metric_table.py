"""Every metric that the exporter serves: name, kind, labels and meaning. Names of the training metrics are those of the
infrastructure guide (docs/monitoring.md)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

PHASE = ("scale", "phase", "run")
STAGE = ("scale", "stage", "run")
LAYER = (*PHASE, "layer")
FIGURE = ("scale", "phase", "figure")


@dataclass(frozen=True)
class Described:
    """A metric. Counters have names that end in _total. Those of steps begin again where a resumed phase goes back; the
    wait for data counts all starts."""

    kind: Literal["gauge", "counter"]
    labels: tuple[str, ...]
    meaning: str


METRICS = {
    "training_loss": Described("gauge", PHASE, "loss that the last logged step minimised"),
    "training_loss_part": Described("gauge", (*PHASE, "part"), "its parts: lm, mtp, balance, in nats"),
    "training_learning_rate": Described("gauge", PHASE, "learning rate of the last logged step"),
    "training_tokens_per_second": Described("gauge", PHASE, "tokens per second of all ranks, without pauses"),
    "training_steps_total": Described("counter", PHASE, "optimizer steps"),
    "training_step_duration_seconds": Described(
        "gauge", PHASE, "seconds of a step, mean of those that the last line logged, without pauses"
    ),
    "training_tokens_total": Described("counter", PHASE, "tokens of the course"),
    "expert_balance_cv": Described("gauge", LAYER, "coefficient of variation of the experts' loads"),
    "training_expert_load": Described("gauge", LAYER, "load of the fullest expert, as a multiple of the mean"),
    "training_dead_experts": Described("gauge", LAYER, "experts that no token chose in the last logged step"),
    "training_gradient_norm": Described("gauge", PHASE, "norm of the whole gradient before clipping"),
    "training_mfu": Described("gauge", PHASE, "share of the ranks' stated peak FLOP/s"),
    "training_memory_bytes": Described("gauge", PHASE, "peak memory of rank 0: the GPU's, else resident"),
    "training_data_wait_seconds_total": Described(
        "counter", PHASE, "seconds in which rank 0 waited for data, over all starts; sampling of answers is work"
    ),
    "training_optimizer_seconds_total": Described("counter", PHASE, "seconds in the optimizer's update"),
    "training_pause_seconds_total": Described("counter", PHASE, "seconds in measurements and checkpoints"),
    "training_seconds": Described(
        "gauge", (*PHASE, "part"), "wall time of the phase by part: productive, paused, waiting, lost"
    ),
    "training_effective_ratio": Described("gauge", PHASE, "productive share of that wall time"),
    "training_skipped_steps_total": Described("counter", PHASE, "steps that were passed over after spikes"),
    "training_spikes_total": Described("counter", PHASE, "steps that spiked, those that are no number included"),
    "training_nonfinite_steps_total": Described("counter", PHASE, "steps whose loss or gradient was no finite number"),
    "training_validation_bits_per_byte": Described("gauge", PHASE, "last measurement of held-out documents"),
    "training_reward": Described("gauge", PHASE, "mean reward of the answers of the last logged step"),
    "training_reward_deviation": Described("gauge", PHASE, "standard deviation of these rewards"),
    "training_pass_rate": Described("gauge", PHASE, "share of answers that a verifier accepted"),
    "training_kl": Described("gauge", (*PHASE, "against"), "KL divergence against rollout (arithmetic) or reference"),
    "training_clip_fraction": Described("gauge", PHASE, "share of tokens whose ratio was clipped"),
    "training_informative_groups": Described("gauge", PHASE, "groups of answers with unequal rewards"),
    "training_answer_tokens": Described("gauge", PHASE, "mean tokens of an answer"),
    "training_entropy_estimate": Described("gauge", PHASE, "mean -log p of sampled tokens in nats"),
    "training_step_seconds": Described(
        "gauge", (*PHASE, "part"), "seconds of a policy's step by part: weight_sync, rollout, reward, training"
    ),
    "training_rollout_tokens_per_second": Described("gauge", PHASE, "tokens sampled per second of sampling"),
    "training_running": Described("gauge", PHASE, "1 while the job of the phase runs, else 0"),
    "training_progress_timestamp_seconds": Described(
        "gauge", PHASE, "when rank 0 last began, took a step or ended a pause"
    ),
    "training_samples_answers": Described(
        "gauge", PHASE, "1 where the phase trains on answers it samples itself, else 0"
    ),
    "training_checkpoint_step": Described("gauge", PHASE, "step of the newest verified checkpoint, 0 before it"),
    "training_checkpoint_timestamp_seconds": Described("gauge", PHASE, "when that checkpoint was committed"),
    "training_save_interval_steps": Described("gauge", PHASE, "steps between two checkpoints, as configured"),
    "training_progress_ratio": Described("gauge", PHASE, "share of the phase's token budget that is spent"),
    "job_state": Described("gauge", (*STAGE, "state"), "1 for the present state of a job that is not committed"),
    "job_queue_seconds": Described("gauge", STAGE, "seconds between submission and start, or now while it waits"),
    "stage_seconds": Described("gauge", STAGE, "wall time of the run that computed the stage"),
    "stage_rows": Described("gauge", STAGE, "documents, chats, prompts or rows that the stage read"),
    "stage_rows_per_second": Described("gauge", STAGE, "these by its wall time"),
    "stage_read_bytes": Described("gauge", STAGE, "stored bytes that the stage's own process read"),
    "stage_written_bytes": Described("gauge", STAGE, "bytes that the stage's own process wrote"),
    "gate_accepted": Described("gauge", STAGE, "1 where the gate accepted, 0 where it refused"),
    "evaluation_figure": Described("gauge", FIGURE, "figure of the newest evaluation of a phase"),
    "evaluation_low": Described("gauge", FIGURE, "lower end of its interval"),
    "evaluation_high": Described("gauge", FIGURE, "upper end of its interval"),
    "evaluation_previous_low": Described("gauge", FIGURE, "the same of the evaluation before it, on equal items"),
    "evaluation_previous_high": Described("gauge", FIGURE, "the same of the evaluation before it, on equal items"),
    "nccl_allreduce_time_ms": Described("gauge", ("test", "size_bytes"), "time of an all-reduce by nccl-tests"),
    "nccl_bandwidth_gbps": Described("gauge", ("test", "size_bytes"), "its algorithm bandwidth in GB/s"),
    "nccl_busbw_gbps": Described("gauge", ("test", "size_bytes"), "its bus bandwidth in GB/s"),
    "exporter_unreadable_file": Described("gauge", ("file",), "1 for a file that could not be understood"),
}


class Figures:
    """The samples of one scrape."""

    def __init__(self) -> None:
        self._families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}

    def add(self, name: str, value: float, *labels: str) -> None:
        """One sample of a metric of the table; `labels` in the table's order."""
        described = METRICS[name]
        assert len(labels) == len(described.labels), (name, labels)
        if name not in self._families:
            family = GaugeMetricFamily if described.kind == "gauge" else CounterMetricFamily
            self._families[name] = family(name, described.meaning, labels=described.labels)
        self._families[name].add_metric(labels, value)

    def unreadable(self, file: object) -> None:
        self.add("exporter_unreadable_file", 1.0, str(file))

    def families(self) -> Iterator[Metric]:
        yield from self._families.values()
