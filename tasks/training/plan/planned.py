"""What a plan says: figures of phases, memory and parameters, as values and as tables for the terminal."""

from __future__ import annotations

from pydantic import BaseModel

from tasks.training.plan.choose_setting import PlannedChoice
from tasks.training.plan.planned_needs import NEEDS_TITLES, PlannedCost, PlannedNeeds, needs_row, size, table

_ROW_TITLES = (
    "phase",
    "objective",
    "trained",
    "tokens",
    "steps",
    "sequence",
    "attends",
    "batch tokens",
    "learning rate",
    "FLOPs",
    "ranks",
    "of peak",
    "tokens/s",
    "hours",
    "known by",
)
_MEMORY_TITLES = (
    "phase",
    "data x tensor x pipeline x context",
    "expert",
    "ZeRO",
    "layers by stage",
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "buckets",
    "update",
    "KV cache",
    "sampling weights",
    "most at once",
    "of",
    "host",
    "measured",
)


class PlannedParameters(BaseModel):
    """Counts under the rules that public numbers use (model/architecture/counts.py)."""

    attention_per_layer: int
    expert: int
    moe_layer: int
    dense_layer: int
    body: int
    """Trunk layers and final norm."""
    mtp: int
    embeddings: int
    body_and_mtp: int
    total: int
    active_body: int
    active_body_and_mtp: int
    active: int
    """Body and unembedding: what one predicted token costs."""


class PlannedMemory(BaseModel):
    """Bytes on the fullest rank (tasks/training/plan/rank_memory.py)."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    buckets: int
    update: int
    kv_cache: int
    sampling_weights: int
    total: int
    """The most at once: not the sum."""
    host_optimizer: int
    """Per rank in host memory or on NVMe."""
    host_weights: int
    """Likewise, where parameters are offloaded."""
    available: int


class PlannedPhase(BaseModel):
    """One phase on its course."""

    name: str
    objective: str
    adapter: str
    trained_parameters: int
    num_tokens: int
    num_steps: int
    sequence_length: int
    first_batch_tokens: int
    max_batch_tokens: int
    first_learning_rate: float
    peak_learning_rate: float
    """The highest of the phase's steps."""
    last_learning_rate: float
    rope_theta: float
    start: str
    """The phase that it starts from; empty for the first."""
    schedule: str
    """Its start, position on the course and what changes inside the phase, in words."""
    mixture: str
    """Share of tokens per domain, at every waypoint where there are several, and the weights of quality buckets."""
    attended_tokens: int
    """Length of the stretch inside which attention stays: a row, or documents as long as assumed_document_tokens where
    packing is best_fit."""
    trains_mtp: bool
    training_flops: float
    """Floating-point operations of the whole phase, forward and backward; sampling of answers and recomputation come on
    top."""
    num_ranks: int
    data_parallel: int
    tensor_parallel: int
    pipeline_parallel: int
    stage_layers: str
    """Trunk layers by pipeline stage: 11 + 6 x 12 + 9; empty where there are more stages than layers."""
    context_parallel: int
    expert_parallel: int
    zero_stage: int
    mfu: float
    """Share of the ranks' peak: measured, else derived for accelerators and assumed for CPUs; 0 where no engine can
    train the phase, as are hours and cost."""
    hours: float
    """At that share of the peak, or as long as a run measured for such tokens: with the sampling of answers and their
    padding, measurements and saves; `not_counted` says what they leave out."""
    tokens_per_second: float
    """Of all ranks together, over these hours."""
    known_by: str
    """What share and hours follow from: `run KEY` of a phase that was trained on this kind of machine, `derived` or
    `assumed`; empty where there are none."""
    measured_memory: int
    """Bytes that its rank 0 held at most, beside tensors also libraries; 0 where none was measured."""
    needs: PlannedNeeds
    choice: PlannedChoice | None
    """The setting that the plan would choose instead; None where none was searched or none fits."""
    no_choice: str
    """Why there is none, in words; empty where there is one or none was searched."""
    rank_memory: PlannedMemory
    impossible: tuple[str, ...]
    """Why no engine can train it like this; empty where one can."""
    not_available: tuple[str, ...]
    """What this version of glm46 refuses; empty where it trains the phase."""
    not_counted: tuple[str, ...]
    """What hours and cost leave out of the sampling of answers, in words; empty where nothing is sampled."""
    warnings: tuple[str, ...]

    @property
    def sentences(self) -> list[str]:
        """Why the phase does not run or needs care, in words."""
        return [
            *(f"impossible, {reason}" for reason in self.impossible),
            *(f"does not run yet, {reason}" for reason in self.not_available),
            *self.not_counted,
            *self.warnings,
        ]


class Plan(BaseModel):
    """The whole scale."""

    scale: str
    parameters: PlannedParameters
    kv_cache_bytes_per_token: int
    cpu_mfu: float
    machine: str
    cost: PlannedCost
    phases: tuple[PlannedPhase, ...]
    evaluation: str
    """Who evaluates a phase's checkpoint, and what a device must hold for it, in words."""
    release: str
    """What a release computes on one device, what it is asked, and where the files of that come from, in words."""

    @property
    def is_possible(self) -> bool:
        """Whether an engine can train every phase as it is configured."""
        return not any(phase.impossible for phase in self.phases)

    def _without_hours(self) -> list[str]:
        names = [phase.name for phase in self.phases if phase.impossible]
        return [f"  no engine can train {', '.join(names)} as configured: no hours and no cost"] if names else []

    def describe(self) -> str:
        """The plan in lines for a terminal."""
        counts = self.parameters
        lines = [
            f"scale {self.scale}",
            f"  parameters   {counts.total:,} in all: body {counts.body:,}, MTP {counts.mtp:,}, embeddings "
            f"{counts.embeddings:,}",
            f"  one layer    attention {counts.attention_per_layer:,}, expert {counts.expert:,}, with experts "
            f"{counts.moe_layer:,}",
            f"  active       {counts.active:,} per predicted token (body {counts.active_body:,}; with MTP "
            f"{counts.active_body_and_mtp:,})",
            f"  KV cache     {self.kv_cache_bytes_per_token:,} bytes per token in bf16",
            "",
            *table([_ROW_TITLES, *(_row(phase) for phase in self.phases)]),
            "",
            *table([_MEMORY_TITLES, *(_memory_row(phase) for phase in self.phases)]),
            "",
            "  hours: measured by a run on this kind of machine, with sampling, padding, measurements and saves; else "
            "at the share `of peak`,",
            f"  derived for {self.machine} or assumed for CPUs ({self.cpu_mfu:.0%}; docs/scale.md), without sampling; "
            "attention sees `attends` tokens:",
            "  a row, or assumed_document_tokens where rows hold whole documents; memory of the fullest rank, its "
            "experts evenly used; measured with libraries",
            "",
            *table([NEEDS_TITLES, *(needs_row(phase.name, phase.needs) for phase in self.phases)]),
            "",
            f"  cost         {self.cost.describe(self.scale)}",
            "  rank-hours include what is lost to failures and saves on accelerators; smallest world: by --search",
            *self._without_hours(),
            f"  evaluation   {self.evaluation}",
            f"  release      {self.release}",
            "",
            *table([(phase.name, phase.schedule) for phase in self.phases]),
            "",
            *table([(phase.name, phase.mixture) for phase in self.phases]),
            "",
        ]
        for phase in self.phases:
            if phase.choice is not None:
                lines += [f"  {phase.name}: {line}" for line in phase.choice.describe(self.cost.currency)]
        for reason in dict.fromkeys(phase.no_choice for phase in self.phases if phase.no_choice):
            names = [phase.name for phase in self.phases if phase.no_choice == reason]
            lines.append(f"  {', '.join(names)}: {reason}")
        said: dict[str, list[str]] = {}
        for phase in self.phases:
            for sentence in phase.sentences:
                said.setdefault(sentence, []).append(phase.name)
        return "\n".join([*lines, *(f"  {', '.join(names)}: {sentence}" for sentence, names in said.items())])


def _row(phase: PlannedPhase) -> tuple[str, ...]:
    batches = [f"{size:,}" for size in (phase.first_batch_tokens, phase.max_batch_tokens)]
    rates = [f"{rate:.2g}" for rate in (phase.first_learning_rate, phase.peak_learning_rate, phase.last_learning_rate)]
    speed = (
        f"{phase.mfu:.1%}",
        f"{phase.tokens_per_second:,.0f}",
        f"{phase.hours:,.1f}" if phase.hours >= 1 else f"{phase.hours:.3f}",
        phase.known_by,
    )
    objective = phase.objective if phase.adapter == "none" else f"{phase.objective} ({phase.adapter})"
    return (
        phase.name,
        objective,
        f"{phase.trained_parameters:,}",
        f"{phase.num_tokens:,}",
        f"{phase.num_steps:,}",
        f"{phase.sequence_length:,}",
        f"{phase.attended_tokens:,}",
        " .. ".join(dict.fromkeys(batches)),
        " .. ".join(dict.fromkeys(rates)),
        f"{phase.training_flops:.3g}",
        f"{phase.num_ranks:,}",
        *(("-",) * 4 if phase.impossible else speed),
    )


def _memory_row(phase: PlannedPhase) -> tuple[str, ...]:
    memory = phase.rank_memory
    axes = (phase.data_parallel, phase.tensor_parallel, phase.pipeline_parallel, phase.context_parallel)
    parts = (
        memory.weights,
        memory.gradients,
        memory.optimizer,
        memory.activations,
        memory.buckets,
        memory.update,
        memory.kv_cache,
        memory.sampling_weights,
        memory.total,
        memory.available,
        memory.host_optimizer + memory.host_weights,
    )
    return (
        phase.name,
        " x ".join(map(str, axes)),
        str(phase.expert_parallel),
        str(phase.zero_stage),
        phase.stage_layers,
        *map(size, parts),
        size(phase.measured_memory) if phase.measured_memory else "-",
    )
