"""How a phase trains, and where: optimizer, spikes, validation, adapters, resources."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from configs.schema.base import Frozen
from configs.schema.jobs import JobResources, QueueResources


class OptimizerRecipe(Frozen):
    """muon: Muon on all matrices except the embedding, AdamW on the rest. adamw: AdamW on all (S2, S4)."""

    kind: Literal["muon", "adamw"]
    muon_momentum: float = Field(ge=0, lt=1)
    """Report: 0.95."""
    muon_newton_schulz_steps: Literal[5]
    """Report: 5, which the coefficients of the quintic are tuned for."""
    muon_update_rms: float = Field(gt=0)
    """Report: 0.2."""
    adam_beta1: float = Field(ge=0, lt=1)
    adam_beta2: float = Field(ge=0, lt=1)
    adam_eps: float = Field(gt=0)
    weight_decay: float = Field(ge=0)
    """Report: 0.1 on matrices; biases, norms and the embedding are not decayed."""
    max_grad_norm: float = Field(ge=0)
    """Gradients of a step whose norm over the whole model is larger are scaled down to it, before the optimizer (S2:
    1.0, and Megatron's default, which S3 and S4 run with; the report names none). 0: no clipping. The size of a Muon
    update does not depend on the gradient's, but its momentum does: a step with a large gradient weighs more in it than
    its neighbours."""
    adam_rate_ratio: float = Field(ge=0)
    """Learning rate of what is no matrix (norms, biases, the embedding) over that of matrices (S1: 3e-4 over 0.02; the
    report has one rate, 1.0)."""
    router_rate_ratio: float = Field(ge=0)
    """Learning rate of the routers over that of other matrices; 0 freezes them. Muon's updates are as large for a small
    gradient as for a large one. At a high rate, scores reach 0 or 1 within some hundred steps; then only the selection
    biases choose, and they send nearly all text of one kind to one expert."""
    state_dtype: Literal["float32", "bfloat16"]
    """Dtype of momentum and moments; master weights are float32 either way."""


class SpikeRecipe(Frozen):
    """What counts as a spike and what is done about it: roll back to the last good checkpoint and skip rows. A step
    whose loss or gradient norm is not finite always counts."""

    window_steps: int = Field(gt=1)
    """Steps whose losses and gradient norms a step is compared with; before that many were taken only non-finite ones
    count."""
    max_loss_deviations: float = Field(gt=0)
    """A loss is a spike where it is above the window's median by more than so many standard deviations, estimated as
    1.4826 x the median absolute deviation, which no single spike moves."""
    min_loss_ratio: float = Field(ge=1)
    """And only where it is above this many medians: where losses hardly differ, every batch is many deviations away."""
    max_grad_norm_ratio: float = Field(gt=1)
    """Largest ratio of our own gradient norm, before the optimizer, to the median."""
    skip_steps: int = Field(gt=0)
    """Steps whose rows are left out, up to and with the one that spiked."""
    max_rollbacks: int = Field(ge=0)
    """Rollbacks within `rollback_window_steps`, after which training stops and says where the evidence is."""
    rollback_window_steps: int = Field(gt=0)
    """Steps before a spike within which earlier rollbacks count: a long run may have many that are far apart."""


class ValidationRecipe(Frozen):
    """Bits per byte of held-out documents per domain, measured while the phase trains."""

    interval_tokens: int = Field(gt=0)
    """Tokens of the phase between two measurements; the last step is always measured."""
    num_tokens: int = Field(gt=0)
    """Tokens that are scored per domain; documents in the order of the held-out shards."""
    keep: Literal["last", "best"]
    """Which weights are the result of the phase: those of its end, or of the measurement with the lowest mean over
    domains."""


AdapterTarget = Literal["attention", "dense_mlp", "shared_experts", "routed_experts"]


class AdapterRecipe(Frozen):
    """Which weights are trained: all of them, or low-rank additions to matrices of the trunk (model/architecture/
    adapters.py). Router, norms, embeddings and the MTP layer then stay as they are."""

    kind: Literal["none", "lora", "dora", "qlora"]
    """dora also trains a magnitude per output, of attention only: PEFT loads no others into this architecture. qlora is
    lora while all matrices of the trunk's attention, MLPs and experts, adapted or not, are held in 4 bits (NF4, arXiv
    2305.14314); it needs bitsandbytes (`pip install 'glm46[qlora]'`)."""
    rank: int = Field(gt=0)
    alpha: float = Field(gt=0)
    """The addition is scaled by alpha / rank."""
    dropout: float = Field(ge=0, lt=1)
    """Share of an adapter's inputs that training leaves out, the rest is scaled up. Which ones is decided by seed, row,
    position and matrix, so a restart and other micro-batches leave out the same. Not for lora on routed experts, nor
    dora."""
    targets: tuple[AdapterTarget, ...] = Field(min_length=1)
    """Which matrices have an adapter; dense_mlp are the MLPs of layers without experts."""


class ProfileResources(Frozen):
    """DeepSpeed's FLOP profiler and torch.profiler on some steps; table and trace become MLflow artifacts."""

    steps: int = Field(ge=0)
    """Steps that are profiled, after two that warm up; 0 turns both off."""
    flops: bool
    trace: bool


class PhaseQueue(QueueResources):
    """Where a phase's job gets its nodes, and what happens where some cannot be had."""

    max_missing_nodes: int = Field(ge=0)
    """Nodes without which the phase goes on where they cannot be had: on fewer copies of the model, with the same
    batch, until its next start finds them again. 0 waits for all."""
    patience_minutes: float = Field(gt=0)
    """After which a job that waits in the queue gives way to one of fewer nodes, where max_missing_nodes allows that.
    Not asked by the launcher `ssh`, which sees at once what answers."""


class TrainingResources(JobResources):
    """Where and how wide a phase trains; what cannot run is refused before launch, by name
    (tasks/training/plan/launch_rules.py)."""

    num_ranks: int = Field(gt=0)
    """Processes, one per accelerator (or per CPU share): data x tensor x pipeline x context parallel."""
    ranks_per_node: int = Field(gt=0)
    """A job has num_ranks / ranks_per_node nodes; with the launcher `local` it has one."""
    queue: PhaseQueue
    tensor_parallel: int = Field(gt=0)
    pipeline_parallel: int = Field(gt=0)
    context_parallel: int = Field(gt=0)
    expert_parallel: int = Field(gt=0)
    """Ranks among which a layer's experts are divided; carved out of data x tensor x context parallel, no axis of its
    own."""
    zero_stage: Literal[0, 1, 2, 3]
    offload_optimizer: Literal["none", "cpu", "nvme"]
    offload_parameters: Literal["none", "cpu", "nvme"]
    """ZeRO 3 only."""
    node_dir: str
    """Directory on a disk of each node: checkpoints are written there first and uploaded to the work directory while
    training goes on, and offloading to NVMe writes there. Empty: the work directory's own disk."""
    bucket_elements: int = Field(gt=0)
    """Elements per bucket of ZeRO's collectives (S2: 5e8)."""
    recompute: Literal["none", "selective", "full"]
    """Activations computed again in the backward pass: none, those of attention and experts, or whole layers."""
    recompute_every_layers: int = Field(gt=0)
    """For `full`: how many layers are computed again as one block."""
    compile_layers: bool
    """Whether torch.compile fuses what is between the matrix products of a layer's training pass, on an accelerator.
    Costs a minute when the ranks start."""
    deterministic: bool
    """Whether every kernel of an accelerator adds in one order, so that a run repeats its digests; those of CPUs always
    do. What it costs is in docs/scale.md."""
    overlap_shared_expert: bool
    """Whether the shared expert computes while routed tokens travel; acts where expert_parallel is above 1."""
    peak_flops_per_second: float = Field(gt=0)
    """Peak of one rank, dense, in the phase's dtype; MFU is measured against it (H100/H800 BF16: 9.89e14). For a CPU
    rank of two threads the scales state 6.4e11, which no x86 core of today exceeds: 2 cores x 64 float32 operations per
    cycle (two AVX-512 multiply-adds) x 5 GHz. On a slower core MFU is a share of that too."""
    device_memory_bytes: int = Field(gt=0)
    """Memory of one rank (H100/H800: 80 GB): `glm46 plan` says what does not fit."""
    assumed_document_tokens: int = Field(gt=0)
    """Length of a document by which `glm46 plan` counts attention where packing is best_fit, as if all were equally
    long. For a real corpus it is the sum of squared lengths over the sum of lengths, attended_tokens in
    metrics.jsonl."""
    rollout_cache_bytes: int = Field(gt=0)
    """Memory of a rank for the keys and values of answers that are sampled at once; a policy phase samples a step's
    answers in batches that fit. In float32 on a CPU the batches change no bit of the answers."""
    rollout_server: str
    """URL of the server that samples answers where objective.rollouts names one, empty for in_process. It sees the work
    directory, and for solutions the store, under the same path."""
    micro_batch_sequences: int = Field(gt=0)
    micro_batch_tokens: int = Field(ge=0)
    """Positions that a rank takes of a policy's micro-batch, which is filled with answers of alike lengths (S3:
    max_tokens_per_gpu); a longer answer has one of its own. 0: micro_batch_sequences answers, as wide as the step's
    longest."""
    save_interval_steps: int = Field(gt=0)
    log_interval_steps: int = Field(gt=0)
    num_kept_checkpoints: int = Field(gt=0)
    """Newest checkpoints that are kept, besides the best one where validation.keep is best."""
    profile: ProfileResources
    tensorboard: bool
    """Event files beside MLflow."""
    wandb: Literal["off", "offline", "online"]
    """Weights & Biases; its key comes from the environment."""
