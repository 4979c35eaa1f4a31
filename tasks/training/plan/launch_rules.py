"""Refuses phases before anything starts: what has no code yet, then topologies that no engine could train.

Each refusal names the fix.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from configs.schema import (
    AdapterTarget,
    JobResources,
    ModelRecipe,
    PolicyObjective,
    SolutionObjective,
    TrainingRecipe,
    TrainingResources,
    unserved_rollouts,
)
from tasks.training.plan.topology import impossible_topology
from tasks.training.plan.worlds import refuse_no_smaller_world

NEEDED_QUEUE = {"ssh": ("hostfile",), "kubernetes": ("image", "volume_claim")}
"""Settings without which a launcher cannot start a job."""
HEEDED_QUEUE = {
    "slurm": ("image", "environment"),
    "pbs": ("environment",),
    "kubernetes": ("environment",),
    "ssh": ("environment",),
}
"""Settings that not every launcher carries to a job."""
BITSANDBYTES = "0.50.2"
"""The version that holds weights in 4 bits: exact, since it decides how they are rounded. Here, so that it enters the
key of a phase by the code, although only qlora needs the package."""
ALIGNED_BYTES = 16
"""Of the rows that torch's grouped product takes on GPUs."""
MODEL_AXES = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")
"""Axes that divide the model or its rows."""


def refuse_impossible_training(recipe: TrainingRecipe, resources: TrainingResources) -> None:
    """Raises ValueError with every reason."""
    reasons = [*unavailable_training(recipe, resources), *impossible_topology(recipe, resources)]
    if reasons:
        raise ValueError(f"phase {recipe.phase}: {'; '.join(reasons)}")


def unavailable_training(recipe: TrainingRecipe, resources: TrainingResources) -> list[str]:
    """Every reason why this version has no code for the phase, with the values and the fix; empty where it has code."""
    reasons: list[str] = []
    if recipe.adapter.kind != "none":
        reasons += untrainable_adapter(recipe, resources)
    reasons += incomplete_queue(resources)
    if isinstance(recipe.objective, PolicyObjective):
        reasons += untrainable_policy(recipe, resources)
        reasons += unserved_rollouts(recipe.objective.rollouts, resources.rollout_server)
        reasons += unreplayed_routes(recipe.objective, resources)
    elif isinstance(recipe.objective, SolutionObjective):
        reasons += unserved_rollouts(recipe.objective.rollouts, resources.rollout_server)
    if resources.micro_batch_tokens and not isinstance(recipe.objective, PolicyObjective):
        reasons.append(
            f"micro_batch_tokens {resources.micro_batch_tokens} with objective {recipe.objective.kind}, whose rows are "
            f"all of one length: set it to 0, and micro_batch_sequences"
        )
    if recipe.reads_pairs:
        reasons += untrainable_pairs(recipe)
    if resources.compile_layers:
        reasons += uncompiled_layers(recipe, resources)
    if resources.device == "cpu" and not resources.deterministic:
        reasons.append("deterministic false: kernels of a CPU always add in one order: set deterministic to true")
    return [*reasons, *refuse_no_smaller_world(recipe, resources)]


def uncompiled_layers(recipe: TrainingRecipe, resources: TrainingResources) -> list[str]:
    """Every reason against compiling the layers: what divides a layer into several graphs, or was not seen to work."""
    reasons = [
        f"{axis} {getattr(resources, axis)} exchanges data inside layers: set {axis} to 1"
        for axis in MODEL_AXES
        if getattr(resources, axis) > 1
    ]
    if resources.device == "cpu":
        reasons.append("a CPU gains nothing: set device to cuda")
    if recipe.dtype == "float32":
        reasons.append("torch compiles grouped products only of bfloat16: set dtype to bfloat16")
    if resources.zero_stage == 3:
        reasons.append("zero_stage 3 gathers weights inside layers: set zero_stage to 2 or less")
    if resources.recompute == "selective":
        reasons.append("recompute selective computes parts of layers again: set it to none or full")
    if recipe.adapter.kind != "none":
        reasons.append(f"adapter.kind {recipe.adapter.kind} was not tried: set it to none")
    return [f"compile_layers: {reason}, or compile_layers to false" for reason in reasons]


def untrainable_policy(recipe: TrainingRecipe, resources: TrainingResources) -> list[str]:
    """Every reason against training a policy on these ranks: a divided model does not sample."""
    objective = recipe.objective
    assert isinstance(objective, PolicyObjective), objective
    mtp = taught_mtp(recipe, "wrong answers as well as right ones")
    if objective.rollouts != "in_process":
        return mtp
    why = f"cannot train {objective.kind}, whose answers each rank samples with the whole model"
    instead = "or rollouts to sglang or vllm"
    reasons = [
        f"{axis} {getattr(resources, axis)} {why}: set {axis} to 1, {instead}"
        for axis in MODEL_AXES
        if getattr(resources, axis) > 1
    ]
    if resources.zero_stage == 3:
        reasons.append(f"zero_stage 3 {why}: set zero_stage to 2 or less, {instead}")
    return [*reasons, *mtp]


def unreplayed_routes(objective: PolicyObjective, resources: TrainingResources) -> list[str]:
    """The reason against replaying routes in stages that compute activations again: by then their routers have the
    routes of a later micro-batch."""
    if objective.routes != "replay" or resources.pipeline_parallel == 1 or resources.recompute == "none":
        return []
    return [
        f"routes replay with pipeline_parallel {resources.pipeline_parallel} and recompute {resources.recompute}, "
        f"which would use the routes of a later micro-batch: set recompute to none, or routes to compare"
    ]


def untrainable_pairs(recipe: TrainingRecipe) -> list[str]:
    """Every reason against training on preference pairs in this phase."""
    reasons = taught_mtp(recipe, "the rejected answers")
    if recipe.adapter.kind != "none" and recipe.is_scored:
        reasons.append(
            f"adapter.kind {recipe.adapter.kind} cannot train {recipe.objective.kind}, whose head is new and has no "
            f"adapter: set adapter.kind to none"
        )
    return reasons


def taught_mtp(recipe: TrainingRecipe, answers: str) -> list[str]:
    """The reason against a loss of the MTP layer: its cross-entropy has no weights, and reaches the trunk."""
    if not any(point.value for point in recipe.course.mtp_loss_weight):
        return []
    return [
        f"objective {recipe.objective.kind} with an mtp_loss_weight above 0 would teach the MTP layer {answers}: set "
        f"mtp_loss_weight to 0 in course {recipe.course.name}"
    ]


def incomplete_queue(resources: JobResources) -> list[str]:
    """What the launcher of a phase, or of another section, still has to know, and what it would not heed."""
    needed, heeded = NEEDED_QUEUE.get(resources.launcher, ()), HEEDED_QUEUE.get(resources.launcher, ())
    all_names = {name for table in (NEEDED_QUEUE, HEEDED_QUEUE) for names in table.values() for name in names}
    return [
        *(
            f"launcher {resources.launcher} needs queue.{name}: set it in the same resources"
            for name in needed
            if not getattr(resources.queue, name)
        ),
        *(
            f"launcher {resources.launcher} heeds no queue.{name}: empty it"
            for name in sorted(all_names - {*needed, *heeded})
            if getattr(resources.queue, name)
        ),
    ]


def untrainable_adapter(recipe: TrainingRecipe, resources: TrainingResources) -> list[str]:
    """Every reason against training an adapter in this phase."""
    adapter, reasons = recipe.adapter, []
    if adapter.kind == "qlora":
        reasons += untrainable_in_four_bits(recipe, resources)
    if adapter.kind == "dora" and adapter.targets != ("attention",):
        reasons.append(
            "adapter.kind dora with MLPs or experts: PEFT loads no magnitudes of theirs into this architecture. Set "
            "adapter.targets to [attention], or adapter.kind to lora"
        )
    if not adapted_parts(recipe.model) & {*adapter.targets}:
        reasons.append(
            f"adapter.targets {', '.join(adapter.targets)}: the model has none of these (first_k_dense_replace "
            f"{recipe.model.first_k_dense_replace} of {recipe.model.num_hidden_layers} layers, n_shared_experts "
            f"{recipe.model.n_shared_experts}). Name some of {', '.join(sorted(adapted_parts(recipe.model)))}"
        )
    if any(point.value for point in recipe.course.router_bias_rate):
        reasons.append(
            f"adapter.kind {adapter.kind} with a router_bias_rate above 0: an adapter file cannot hold the moved "
            f"router biases. Set router_bias_rate to 0"
        )
    if resources.pipeline_parallel > 1 and "attention" not in adapter.targets:
        reasons.append(
            f"pipeline_parallel {resources.pipeline_parallel} without attention in adapter.targets: a stage may have "
            f"nothing to train. Add attention, or set pipeline_parallel to 1"
        )
    if resources.expert_parallel > 1 and resources.zero_stage == 3 and "routed_experts" not in adapter.targets:
        reasons.append(
            f"expert_parallel {resources.expert_parallel} with zero_stage 3 and no routed_experts in adapter.targets: "
            f"ZeRO 3 would divide frozen experts among ranks that hold others. Set zero_stage to 2 or less, or "
            f"expert_parallel to 1"
        )
    if _has_unaligned_rank(recipe, resources):
        reasons.append(
            f"adapter.rank {adapter.rank} on routed experts in bfloat16 with device cuda: the grouped "
            f"product wants rows of {ALIGNED_BYTES} bytes or multiples. Set adapter.rank to a multiple of "
            f"{ALIGNED_BYTES // 2}, or take routed_experts out of adapter.targets"
        )
    return [*reasons, *impossible_dropout(recipe, resources)]


def adapted_parts(model: ModelRecipe) -> set[AdapterTarget]:
    """The parts of this architecture that an adapter may target."""
    parts: set[AdapterTarget] = {"attention"}
    if model.first_k_dense_replace:
        parts.add("dense_mlp")
    if model.first_k_dense_replace < model.num_hidden_layers:
        parts |= {"routed_experts", "shared_experts"} if model.n_shared_experts else {"routed_experts"}
    return parts


def _has_unaligned_rank(recipe: TrainingRecipe, resources: TrainingResources) -> bool:
    """Whether the product by A, whose rows have `rank` numbers, is no input of torch's grouped product."""
    is_grouped = resources.device == "cuda" and "routed_experts" in recipe.adapter.targets
    return is_grouped and recipe.dtype == "bfloat16" and recipe.adapter.rank * 2 % ALIGNED_BYTES != 0


def untrainable_in_four_bits(recipe: TrainingRecipe, resources: TrainingResources) -> list[str]:
    """Every reason against frozen weights in 4 bits, which each rank holds whole."""
    reasons = []
    installed = distribution_version("bitsandbytes")
    if installed != BITSANDBYTES:
        found = f"bitsandbytes {installed} is installed" if installed else "which is not installed"
        reasons.append(
            f"adapter.kind qlora needs bitsandbytes {BITSANDBYTES} for its weights in 4 bits, {found}: pip install "
            f"'glm46[qlora]', or set adapter.kind to lora"
        )
    reasons += divided_four_bits(resources)
    if isinstance(recipe.objective, PolicyObjective) or recipe.reads_pairs:
        reasons.append(
            f"adapter.kind qlora cannot train {recipe.objective.kind}, which compares it with weights that are not "
            f"in 4 bits: set adapter.kind to lora"
        )
    return reasons


def divided_four_bits(resources: TrainingResources) -> list[str]:
    """Every reason against a topology for qlora."""
    reasons = [
        f"adapter.kind qlora with {axis} {getattr(resources, axis)}, which would divide matrices in 4 bits: set {axis} "
        f"to 1, or adapter.kind to lora"
        for axis in MODEL_AXES
        if getattr(resources, axis) > 1
    ]
    if resources.zero_stage > 1:
        reasons.append(
            f"adapter.kind qlora with zero_stage {resources.zero_stage}: set zero_stage to 1 or less, or adapter.kind "
            f"to lora"
        )
    return reasons


def distribution_version(name: str) -> str:
    """The installed version of a package, empty where there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def impossible_dropout(recipe: TrainingRecipe, resources: TrainingResources) -> list[str]:
    """Why an adapter's inputs cannot be left out by their position."""
    adapter = recipe.adapter
    if not adapter.dropout:
        return []
    named, reasons = f"adapter.dropout {adapter.dropout:g}", []
    if isinstance(recipe.objective, PolicyObjective):
        reasons.append(
            f"{named} cannot train {recipe.objective.kind}: the policy in training would be another one than that "
            f"which sampled. Set adapter.dropout to 0"
        )
    if adapter.kind == "dora":
        reasons.append(f"{named} with adapter.kind dora, whose norms know of none: set adapter.dropout to 0")
    if "routed_experts" in adapter.targets:
        reasons.append(
            f"{named} with routed_experts, to which tokens come without their position, and for which PEFT has none "
            f"either: take routed_experts out of adapter.targets, or set adapter.dropout to 0"
        )
    reasons += [
        f"{named} with {axis} {getattr(resources, axis)}, where a rank holds a part of an input: set {axis} to 1, or "
        f"adapter.dropout to 0"
        for axis in ("tensor_parallel", "pipeline_parallel", "context_parallel")
        if getattr(resources, axis) > 1
    ]
    return reasons


def refuse_too_few_pairs(recipe: TrainingRecipe, num_pairs: int) -> None:
    """Raises ValueError where a phase would read its preference pairs more often than max_epochs."""
    wanted = recipe.num_tokens // recipe.sequence_length // 2
    if wanted > recipe.max_epochs * num_pairs:
        raise ValueError(
            f"phase {recipe.phase}: {wanted} pairs need {wanted / max(1, num_pairs):.1f} passes over {num_pairs} "
            f"pairs of at most sequence_length ({recipe.sequence_length}) tokens, max_epochs is {recipe.max_epochs}: "
            f"raise it or sequence_length, lower num_tokens, or bring more files of role preference"
        )
