"""Computes by formula the memory of the fullest rank of a phase: its state, and the most beside it in a step.

The state depends on topology and ZeRO stage. Tensor parallelism divides matrices of attention, MLPs and vocabulary,
expert parallelism the routed experts, the pipeline the layers. Norms and routers are whole on every rank of a stage.
Weights, gradients and optimizer are exact: a test compares them with live tensors, and also activations, DeepSpeed's
buckets and what an update takes. Padding and fragmentation are added.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from configs.schema import ModelRecipe, PolicyObjective, PpoObjective, TrainingRecipe, TrainingResources
from model.architecture.counts import count_parameters, count_trained, four_bit_bytes
from tasks.training.plan.activation_memory import activation_bytes
from tasks.training.plan.answer_batches import answer_cache_bytes, answers_at_once
from tasks.training.plan.bucket_memory import bucket_bytes
from tasks.training.plan.pipeline_stages import stage_layers
from tasks.training.plan.topology import data_parallel, rows_at_once
from tasks.training.schedule.phase_steps import summarize_steps
from tasks.training.schedule.schedules import trains_mtp

FLOAT32_BYTES = 4


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the fullest rank."""

    weights: int
    gradients: int
    optimizer: int
    """Master weights and moments; 0 where they are offloaded."""
    activations: int
    buckets: int
    """What DeepSpeed gathers and reduces in, while activations live."""
    update: int
    """What the optimizer takes for its largest tensor beside gradients and state."""
    kv_cache: int
    """Of the answers that are sampled at once; 0 outside policy phases, as is `sampling_weights`."""
    sampling_weights: int
    """The copy of the weights that answers are sampled with, in bfloat16 of an adapter only."""
    host_optimizer: int
    """Master weights and moments in host memory or on NVMe, per rank."""
    host_weights: int
    """Weights in host memory or on NVMe, per rank."""

    @property
    def device(self) -> int:
        """The most that is on the accelerator at once: answers are sampled before the passes, and updates follow
        them."""
        state = self.weights + self.gradients + self.optimizer
        return state + max(self.activations + self.buckets, self.update, self.kv_cache + self.sampling_weights)


@dataclass(frozen=True)
class Part:
    """Elements of one pipeline stage that are divided alike."""

    divided_over: Literal["tensor", "expert", "nothing"]
    weights: int
    trained: int
    two_moments: int
    """Of the trained ones those that AdamW updates under Muon: embedding, norms, biases."""
    buffers: int = 0
    """Router biases: float32 on every rank, not trained."""
    in_four_bits: int = 0
    """Of the weights those that qlora freezes in 4 bits."""
    four_bit_bytes: int = 0
    """Their bytes, scales included."""


def rank_memory(recipe: TrainingRecipe, resources: TrainingResources) -> RankMemory:
    """Memory of a rank of the fullest pipeline stage."""
    num_stages = min(resources.pipeline_parallel, recipe.model.num_hidden_layers)
    return max(
        (stage_memory(stage, num_stages, recipe, resources) for stage in range(num_stages)),
        key=lambda memory: memory.device,
    )


def stage_memory(stage: int, num_stages: int, recipe: TrainingRecipe, resources: TrainingResources) -> RankMemory:
    """Memory of every rank of one pipeline stage."""
    zero, element = resources.zero_stage, 2 if recipe.dtype == "bfloat16" else FLOAT32_BYTES
    layers, is_first, is_last = stage_layers(recipe.model, num_stages)[stage], stage == 0, stage == num_stages - 1
    # Without a pass through it the MTP layer keeps nothing, and without ZeRO, whose partitions hold all, it has no
    # gradient.
    running = recipe.model if trains_mtp(recipe) else recipe.model.model_copy(update={"num_nextn_predict_layers": 0})
    place = {"is_first": is_first, "is_last": is_last, "is_scored": recipe.is_scored}
    held = stage_parts(recipe, recipe.model, layers, **place)
    trained = held if zero else stage_parts(recipe, running, layers, **place)
    beside = _models_beside(recipe, stage, num_stages, layers, is_first=is_first, is_last=is_last)
    weights = gradients = optimizer = 0.0
    for part, moved in [*zip(held, trained, strict=True), *beside]:
        over = _over(part, resources)
        copies = _copies(part, resources)
        held_bytes = element * (part.weights - part.in_four_bits) + part.four_bit_bytes
        weights += held_bytes / over / (copies if zero == 3 else 1) + FLOAT32_BYTES * part.buffers
        gradients += FLOAT32_BYTES * moved.trained / over / (copies if zero >= 2 else 1)
        optimizer += _optimizer_bytes(moved, recipe, zero, element) / over / (copies if zero >= 1 else 1)
    moving = sum(part.weights / _over(part, resources) for part in held)
    is_offloaded, parameters_are = (
        resources.offload_optimizer != "none",
        resources.offload_parameters != "none" and zero == 3,
    )
    rows_per_copy = max(1, summarize_steps(recipe).max_rows // data_parallel(resources))
    num_rows = rows_at_once(recipe, resources)
    num_tokens = num_rows * recipe.sequence_length // resources.context_parallel
    num_batches = -(-rows_per_copy // num_rows)
    is_adapted = recipe.adapter.kind != "none" and recipe.dtype == "bfloat16"  # frozen weights are sampled as they are
    copied = sum((part.trained if is_adapted else part.weights) / _over(part, resources) for part in held)
    kv_cache, sampling_weights = _sampling(recipe, resources, rows_per_copy, element * copied)
    return RankMemory(
        weights=0 if parameters_are else int(weights),
        gradients=int(gradients),
        optimizer=0 if is_offloaded else int(optimizer),
        activations=activation_bytes(
            running,
            resources,
            num_tokens,
            element,
            layers,
            in_flight=min(num_stages - stage, num_batches),
            is_last=is_last,
        )
        + element * _largest_whole(recipe),
        buckets=bucket_bytes(resources, int(moving), element),
        update=_update_bytes(recipe, resources, trained, is_last=is_last, is_first=is_first),
        kv_cache=kv_cache,
        sampling_weights=sampling_weights,
        host_optimizer=int(optimizer) if is_offloaded else 0,
        host_weights=int(weights) if parameters_are else 0,
    )


def _models_beside(
    recipe: TrainingRecipe, stage: int, num_stages: int, layers: range, *, is_first: bool, is_last: bool
) -> list[tuple[Part, Part]]:
    """What a policy phase holds beside its policy, and what it trains of that: the critic and the reference of PPO, the
    reward model of either. With an adapter the reference is the policy without it."""
    objective, beside = recipe.objective, []
    if not isinstance(objective, PolicyObjective):
        return []
    scored = recipe.scorer or recipe.model.model_copy(update={"num_nextn_predict_layers": 0})
    divided = stage_layers(scored, min(num_stages, scored.num_hidden_layers))
    own_layers = divided[stage] if stage < len(divided) else range(0)
    whole = recipe.model_copy(update={"adapter": recipe.adapter.model_copy(update={"kind": "none"})})
    scorer = stage_parts(whole, scored, own_layers, is_first=is_first, is_last=is_last, is_scored=True)
    if isinstance(objective, PpoObjective):
        beside = [(part, part) for part in scorer]
    if isinstance(objective, PpoObjective) and recipe.adapter.kind == "none":
        reference = stage_parts(recipe, recipe.model, layers, is_first=is_first, is_last=is_last)
        beside += [(part, _frozen(part)) for part in reference]
    return beside + [(part, _frozen(part)) for part in scorer if objective.reward_model is not None]


def four_bit_matrices(recipe: TrainingRecipe) -> tuple[list[int], list[int], list[int]]:
    """Elements of each matrix that qlora holds in 4 bits: of a dense layer, of a MoE layer without its routed experts,
    of one such expert. Empty for other phases."""
    model = recipe.model
    if recipe.adapter.kind != "qlora":
        return [], [], []
    hidden, shared = model.hidden_size, model.moe_intermediate_size * model.n_shared_experts
    heads = (model.num_attention_heads, model.num_key_value_heads) * 2
    attention = [hidden * number * model.head_dim for number in heads]
    return (
        attention + 3 * [hidden * model.intermediate_size],
        attention + 3 * [hidden * shared] * (shared > 0),
        3 * [hidden * model.moe_intermediate_size],
    )


def _largest_whole(recipe: TrainingRecipe) -> int:
    """Elements of the largest matrix that is made whole for a product."""
    return max((size for sizes in four_bit_matrices(recipe) for size in sizes), default=0)


def _frozen(part: Part) -> Part:
    return replace(part, trained=0, two_moments=0)


def _over(part: Part, resources: TrainingResources) -> int:
    """Ranks over which the part's elements are divided, ZeRO aside."""
    return {"tensor": resources.tensor_parallel, "expert": resources.expert_parallel, "nothing": 1}[part.divided_over]


def _copies(part: Part, resources: TrainingResources) -> int:
    """Ranks that hold the same elements, among which ZeRO divides."""
    replicas = data_parallel(resources) * resources.context_parallel
    if part.divided_over == "expert" and resources.expert_parallel > 1:
        return max(1, replicas * resources.tensor_parallel // resources.expert_parallel)
    return replicas


def _optimizer_bytes(part: Part, recipe: TrainingRecipe, zero: int, element: int) -> float:
    """A master copy where the weights are bfloat16, and under ZeRO, whose flat partitions are copies in any case; one
    moment or two."""
    has_master = element < FLOAT32_BYTES or zero >= 1
    moment = 2 if recipe.optimizer.state_dtype == "bfloat16" else FLOAT32_BYTES
    num_moments = part.trained + (part.two_moments if recipe.optimizer.kind == "muon" else part.trained)
    return FLOAT32_BYTES * part.trained * has_master + moment * num_moments


def _update_bytes(
    recipe: TrainingRecipe, resources: TrainingResources, parts: list[Part], *, is_first: bool, is_last: bool
) -> int:
    """Muon: three float32 tensors of the largest matrix, however it is divided (gathered, orthogonalised, scaled).
    AdamW: one of what is stepped at once, which under ZeRO is all of a partition; float32 copies of bfloat16 state, and
    DeepSpeed's of the gradients."""
    model, zero, is_muon = recipe.model, resources.zero_stage, recipe.optimizer.kind == "muon"
    over = {"tensor": resources.tensor_parallel, "expert": resources.expert_parallel, "nothing": 1}
    vocabulary, stack = (
        model.vocab_size * model.hidden_size,
        model.n_routed_experts * model.moe_intermediate_size * model.hidden_size,
    )
    matrices = [vocabulary * is_last, stack // resources.expert_parallel, model.intermediate_size * model.hidden_size]
    at_once = [max(vocabulary * (is_first or is_last) // resources.tensor_parallel, *matrices[1:])]
    if zero:
        at_once = [part.trained // over[part.divided_over] // _copies(part, resources) for part in parts]
    flattened = {0: 0, 1: int(recipe.dtype == "float32"), 2: 1, 3: 2}[zero]
    num_copies = flattened + (1 if is_muon else 2) * (recipe.optimizer.state_dtype == "bfloat16") + (not is_muon)
    on_device = resources.offload_optimizer == "none"
    return FLOAT32_BYTES * (num_copies * max(at_once) * on_device + 3 * max(matrices) * is_muon)


def _sampling(
    recipe: TrainingRecipe, resources: TrainingResources, num_answers: int, weights: float
) -> tuple[int, int]:
    """Caches of the answers sampled at once, and the copied weights they are sampled with: in bfloat16, or packed on a
    CPU. A server's are not the rank's."""
    if not isinstance(recipe.objective, PolicyObjective) or recipe.objective.rollouts != "in_process":
        return 0, 0
    is_copied = recipe.dtype == "bfloat16" or resources.device == "cpu"
    return answers_at_once(recipe, resources, num_answers) * answer_cache_bytes(recipe, resources), int(
        weights
    ) if is_copied else 0


def stage_parts(
    recipe: TrainingRecipe, model: ModelRecipe, layers: range, *, is_first: bool, is_last: bool, is_scored: bool = False
) -> list[Part]:
    """What one stage of the model holds, by how it is divided; `is_scored`: with a scalar head in place of the
    unembedding."""
    trained = count_trained(model, recipe.adapter)
    is_full = recipe.adapter.kind == "none"
    hidden, num_dense = model.hidden_size, sum(number < model.first_k_dense_replace for number in layers)
    num_moe = len(layers) - num_dense + model.num_nextn_predict_layers * is_last
    matrix, expert = _layer_matrices(model), count_parameters(model).expert
    num_query, num_kv = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    biases = (num_dense + num_moe) * (num_query + 2 * num_kv) * model.attention_bias
    embedding = model.vocab_size * hidden
    mtp = model.num_nextn_predict_layers * is_last
    divided = (
        num_dense * (matrix + 3 * hidden * model.intermediate_size)
        + biases
        + embedding * is_first
        + embedding * (is_last and not is_scored)
        + mtp * 2 * hidden**2
    )
    divided += num_moe * (matrix + 3 * hidden * model.moe_intermediate_size * model.n_shared_experts)
    norms = (
        (num_dense + num_moe) * (2 * hidden + 2 * model.head_dim * model.use_qk_norm)
        + is_last * hidden
        + mtp * 3 * hidden
    )
    routers, experts = num_moe * model.n_routed_experts * hidden, num_moe * model.n_routed_experts * expert
    whole = norms + routers + hidden * (is_last and is_scored)
    buffers = num_moe * model.n_routed_experts
    if is_full:
        return [
            Part("tensor", divided, divided, biases + embedding * is_first),
            Part("nothing", whole, whole, norms, buffers),
            Part("expert", experts, experts, 0),
        ]
    num_trained_moe = num_moe - mtp + trained.num_mtp * is_last
    added = num_dense * trained.dense_layer + num_trained_moe * trained.moe_layer
    of_dense, of_moe, of_expert = four_bit_matrices(recipe)
    plain = num_dense * of_dense + (num_moe - mtp) * of_moe
    routed = (num_moe - mtp) * model.n_routed_experts
    return [
        Part("tensor", divided, added, 0, 0, sum(plain), sum(map(four_bit_bytes, plain))),
        Part("nothing", whole, 0, 0, buffers),
        Part(
            "expert",
            experts,
            num_trained_moe * model.n_routed_experts * trained.expert,
            0,
            0,
            routed * sum(of_expert),
            routed * sum(map(four_bit_bytes, of_expert)),
        ),
    ]


def _layer_matrices(model: ModelRecipe) -> int:
    """Elements of the matrices of one layer's attention."""
    return 2 * model.hidden_size * (model.num_attention_heads + model.num_key_value_heads) * model.head_dim
