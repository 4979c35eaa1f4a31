"""Derives the time of an optimizer step from what its ranks compute, read, write and send. Pure arithmetic.

Nothing overlaps here, because the engine overlaps nothing but the shared expert: a step is the sum of its parts. Work
of one micro-batch is that of the fullest pipeline stage. Experts are used evenly. What a rank reads and writes beside
matrix products follows from the tensors that a layer keeps: tests/training/size/test_step_time.py counts it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from configs.schema import ModelRecipe, TrainingRecipe, TrainingResources
from model.architecture.counts import count_parameters, four_bit_bytes
from tasks.training.plan.activation_memory import layer_bytes_per_token
from tasks.training.plan.machine import (
    ATTENTION_SHARE,
    FREE_ATTENTION_SHARE,
    LINK_SHARE,
    MATRIX_SHARE,
    MEMORY_SHARE,
    Machine,
)
from tasks.training.plan.phase_flops import phase_flops_per_token
from tasks.training.plan.pipeline_stages import stage_layers
from tasks.training.plan.rank_memory import four_bit_matrices, stage_parts
from tasks.training.plan.topology import data_parallel, rows_at_once
from tasks.training.schedule.phase_steps import summarize_steps
from tasks.training.schedule.schedules import trains_mtp

TRAFFIC_PER_SAVED_BYTE = 10.0
"""Bytes that a layer's passes read and write beside matrix products and attention, per byte that it keeps: norms,
rotation, gates, sorting, sums, conversions, each a kernel of its own."""
TRAFFIC_PER_LOGIT = 67.0
"""Likewise at the unembedding, per position and entry of the vocabulary."""
COMPILED_SHARE = 0.33
"""Of that traffic, what is left where layers are compiled: fitted to the steps that
tests/training/size/test_step_time.py lists. It holds what those steps lose beside, such as waiting for the host."""
FLOAT32_BYTES = 4
UPDATE_BYTES = 83
"""Read and written per element of a partition by Muon beside its products: counted, as the traffic of layers."""
GRADIENT_BYTES = 18
"""Read and written per element and micro-batch where bfloat16 gradients are summed in float32; without ZeRO weights are
converted too."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step of the largest batch, and bytes that a rank sends in it."""

    matrices: float
    elementwise: float
    tensor: float
    context: float
    expert: float
    stages: float
    """Activations between pipeline stages."""
    waiting: float
    """The pipeline's fill and drain."""
    gradients: float
    """Their sum over the copies, and the weights back."""
    update: float
    tensor_bytes: int
    context_bytes: int
    expert_bytes: int
    stage_bytes: int
    gradient_bytes: int
    mfu: float
    """FLOPs that the model needs over what the ranks' peaks give in this time; recomputation is not counted."""

    @property
    def seconds(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self) if _is_time(field.name))

    def shares(self) -> dict[str, float]:
        """Part of the step that each kind of work takes."""
        names = [field.name for field in fields(self) if _is_time(field.name)]
        return {name: getattr(self, name) / self.seconds for name in names}


def _is_time(name: str) -> bool:
    return not name.endswith("_bytes") and name != "mfu"


def step_time(
    recipe: TrainingRecipe, resources: TrainingResources, attended_tokens: float, machine: Machine
) -> StepTime:
    """Of a phase in a topology that `impossible_topology` accepts."""
    model, element = recipe.model, 2 if recipe.dtype == "bfloat16" else FLOAT32_BYTES
    tensor, context, stages = resources.tensor_parallel, resources.context_parallel, resources.pipeline_parallel
    rows = summarize_steps(recipe).max_rows
    copies, batch = data_parallel(resources), rows_at_once(recipe, resources)
    num_batches = -(-rows // (copies * batch))
    tokens = batch * recipe.sequence_length  # of a micro-batch, on all ranks of a copy
    own_tokens = tokens / (tensor * context)
    fullest = _fullest_stage(model, stages) * stages  # over a mean stage
    flops = phase_flops_per_token(recipe, attended_tokens, recipe.adapter.kind != "none")
    again = _recomputed_share(model, resources, attended_tokens)
    passes = 2 + (3 * again > 0.5)  # forward, backward, and forward again where layers are recomputed
    attention = flops - phase_flops_per_token(recipe, 0, recipe.adapter.kind != "none")
    attention_share = ATTENTION_SHARE if resources.deterministic else FREE_ATTENTION_SHARE
    at_peak = (flops - attention) / MATRIX_SHARE + attention / attention_share  # per token
    matrices = fullest * at_peak * (1 + again) * tokens / (tensor * context * stages) / resources.peak_flops_per_second
    held = max(sum(elements for elements, _ in parts) for parts in _held_parts(recipe, resources))
    elementwise = _traffic(recipe, resources, element) * own_tokens * fullest / stages * (1 + again)
    elementwise += passes * _whole_again(recipe, element) + GRADIENT_BYTES * held
    elementwise *= COMPILED_SHARE if resources.compile_layers else 1
    elementwise /= machine.memory_bytes_per_second * MEMORY_SHARE
    in_node = machine.node_bytes_per_second * LINK_SHARE
    outside = machine.network_bytes_per_second * LINK_SHARE
    layers = fullest * (model.num_hidden_layers + model.num_nextn_predict_layers * trains_mtp(recipe)) / stages
    hidden = own_tokens * model.hidden_size * element
    tensor_bytes = layers * passes * 4 * (tensor - 1) * hidden  # gather and sum around attention and MLP
    # Ulysses: queries, keys, values and outputs change between slices of positions and of heads.
    heads = 2 * (model.num_attention_heads + model.num_key_value_heads) * model.head_dim
    context_bytes = layers * passes * heads * own_tokens * element * (context - 1) / context
    expert_bytes, expert_time = _experts_traffic(resources, machine)
    copies_bytes = layers * passes * 2 * model.num_experts_per_tok * hidden
    stage_bytes = 2 * hidden * (stages > 1)
    per_batch = {
        "matrices": matrices,
        "elementwise": elementwise,
        "tensor": tensor_bytes / (in_node if tensor <= resources.ranks_per_node else outside),
        "context": context_bytes / (in_node if tensor * context <= resources.ranks_per_node else outside),
        "expert": copies_bytes * expert_time,
        "stages": stage_bytes / outside,
    }
    gradient_bytes, update = _update(recipe, resources, machine, element, num_batches, passes)
    once = {"gradients": gradient_bytes / outside, "update": update}
    waiting = sum(per_batch.values()) * (stages - 1)
    seconds = sum(per_batch.values()) * (num_batches + stages - 1) + sum(once.values())
    return StepTime(
        **{name: time * num_batches for name, time in per_batch.items()},
        **once,
        waiting=waiting,
        tensor_bytes=int(tensor_bytes * num_batches),
        context_bytes=int(context_bytes * num_batches),
        expert_bytes=int(copies_bytes * expert_bytes * num_batches),
        stage_bytes=int(stage_bytes * num_batches),
        gradient_bytes=int(gradient_bytes),
        mfu=flops * rows * recipe.sequence_length / (seconds * resources.num_ranks * resources.peak_flops_per_second),
    )


def _fullest_stage(model: ModelRecipe, num_stages: int) -> float:
    """Share of the layers, unembedding and MTP counted as layers, that the fullest stage has."""
    depths = [len(layers) for layers in stage_layers(model, num_stages)]
    depths[-1] += 1 + 2 * model.num_nextn_predict_layers
    return max(depths) / sum(depths)


def _recomputed_share(model: ModelRecipe, resources: TrainingResources, attended_tokens: float) -> float:
    """FLOPs computed again over those of a step without recomputation."""
    if resources.recompute == "none":
        return 0.0
    counts = count_parameters(model)
    num_moe = model.num_hidden_layers - model.first_k_dense_replace
    attention = 2 * model.num_attention_heads * model.head_dim * attended_tokens / 2 * model.num_hidden_layers
    if resources.recompute == "full":
        again = counts.active_body + attention
    else:
        experts = num_moe * (model.num_experts_per_tok + model.n_shared_experts) * counts.expert
        again = model.num_hidden_layers * counts.attention_per_layer + experts + attention
    return again / (3 * (counts.active + attention))


def _traffic(recipe: TrainingRecipe, resources: TrainingResources, element: int) -> float:
    """Bytes per token that all layers and the unembedding read and write beside products."""
    model = recipe.model
    num_dense = model.first_k_dense_replace
    num_moe = model.num_hidden_layers - num_dense + model.num_nextn_predict_layers * trains_mtp(recipe)
    saved = sum(
        number * layer_bytes_per_token(model, element, resources.device, is_dense=is_dense)
        for number, is_dense in ((num_dense, True), (num_moe, False))
    )
    passes = 1 + model.num_nextn_predict_layers * trains_mtp(recipe)
    return TRAFFIC_PER_SAVED_BYTE * saved + TRAFFIC_PER_LOGIT * model.vocab_size * passes


def _whole_again(recipe: TrainingRecipe, element: int) -> int:
    """Bytes that a pass reads and writes to make the frozen matrices of qlora whole: a micro-batch uses all experts."""
    model = recipe.model
    of_dense, of_moe, of_expert = four_bit_matrices(recipe)
    num_moe = model.num_hidden_layers - model.first_k_dense_replace
    sizes = model.first_k_dense_replace * of_dense + num_moe * (of_moe + model.n_routed_experts * of_expert)
    return sum(map(four_bit_bytes, sizes)) + element * sum(sizes)


def _experts_traffic(resources: TrainingResources, machine: Machine) -> tuple[float, float]:
    """Of a byte of routed copies: the share that leaves its rank, and the seconds that the slower link takes."""
    experts, node = resources.expert_parallel, min(resources.expert_parallel, resources.ranks_per_node)
    outside, inside = 1 - node / experts, (node - 1) / experts
    seconds = max(outside / machine.network_bytes_per_second, inside / machine.node_bytes_per_second) / LINK_SHARE
    return outside + inside, seconds


def _held_parts(recipe: TrainingRecipe, resources: TrainingResources) -> list[list[tuple[float, int]]]:
    """Per pipeline stage the trained elements of a rank, and how many ranks hold the same."""
    layers = stage_layers(recipe.model, resources.pipeline_parallel)
    replicas = data_parallel(resources) * resources.context_parallel
    over = {"tensor": resources.tensor_parallel, "expert": resources.expert_parallel, "nothing": 1}
    among_experts = replicas * resources.tensor_parallel // resources.expert_parallel
    return [
        [
            (part.trained / over[part.divided_over], among_experts if part.divided_over == "expert" else replicas)
            for part in stage_parts(
                recipe,
                recipe.model,
                own,
                is_first=number == 0,
                is_last=number == len(layers) - 1,
                is_scored=recipe.is_scored,
            )
        ]
        for number, own in enumerate(layers)
    ]


def _update(
    recipe: TrainingRecipe, resources: TrainingResources, machine: Machine, element: int, num_batches: int, passes: int
) -> tuple[float, float]:
    """Bytes that a rank sends to sum gradients and to give back weights, and seconds of the optimizer. ZeRO 2 sums
    after every micro-batch, ZeRO 3 also gathers weights for every pass."""
    zero = resources.zero_stage
    per_element = 2 * FLOAT32_BYTES + element * (zero > 0)
    if zero >= 2:
        per_element = FLOAT32_BYTES * num_batches + element * (1 if zero == 2 else num_batches * passes)
    sent = seconds = 0.0
    for parts in _held_parts(recipe, resources):
        bytes_sent = sum(held * per_element * (among - 1) / among for held, among in parts)
        elements = sum(held / (among if zero else 1) for held, among in parts)
        # Muon's five steps cost about 20 products per element and unit of a matrix' short side.
        side = min(recipe.model.moe_intermediate_size, recipe.model.hidden_size)
        products = 20 * side * elements * (recipe.optimizer.kind == "muon")
        time = products / (resources.peak_flops_per_second * MATRIX_SHARE)
        time += UPDATE_BYTES * elements / (machine.memory_bytes_per_second * MEMORY_SHARE)
        sent, seconds = max(sent, bytes_sent), max(seconds, time)
    return sent, seconds
