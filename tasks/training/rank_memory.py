"""Memory of the fullest rank of a phase, by formula: state by topology and ZeRO stage, activations, the KV cache of sampled answers.

Tensor parallelism divides matrices of attention, MLPs and vocabulary, expert parallelism the routed experts, the pipeline the layers; norms
and routers are whole on every rank of a stage. Weights, gradients and optimizer are exact, held against live tensors by a test. On top come
buckets of collectives (bucket_elements), parameters that ZeRO 3 has gathered (small ones always), padding and fragmentation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from configs.schema import ModelRecipe, PolicyObjective, TrainingRecipe, TrainingResources
from model.counts import count_parameters, count_trained, kv_cache_bytes_per_token
from tasks.training.activation_memory import activation_bytes
from tasks.training.phase_steps import summarize_steps
from tasks.training.pipeline_stages import stage_layers
from tasks.training.topology import data_parallel

FLOAT32_BYTES = 4


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the fullest rank."""

    weights: int
    gradients: int
    optimizer: int
    """Master weights and moments; 0 where they are offloaded."""
    activations: int
    kv_cache: int
    """Of micro_batch_sequences sampled answers of full length; 0 outside policy phases."""
    host_optimizer: int
    """Master weights and moments in host memory or on NVMe, per rank."""
    host_weights: int
    """Weights in host memory or on NVMe, per rank."""

    @property
    def device(self) -> int:
        """All that lies on the accelerator."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.kv_cache


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


def rank_memory(recipe: TrainingRecipe, resources: TrainingResources) -> RankMemory:
    """Of the pipeline stage that holds most."""
    num_stages = min(resources.pipeline_parallel, recipe.model.num_hidden_layers)
    return max((stage_memory(stage, num_stages, recipe, resources) for stage in range(num_stages)), key=lambda memory: memory.device)


def stage_memory(stage: int, num_stages: int, recipe: TrainingRecipe, resources: TrainingResources) -> RankMemory:
    """Of every rank of one pipeline stage."""
    zero, element = resources.zero_stage, 2 if recipe.dtype == "bfloat16" else FLOAT32_BYTES
    layers, is_last = stage_layers(recipe.model, num_stages)[stage], stage == num_stages - 1
    parts = stage_parts(recipe, layers, is_first=stage == 0, is_last=is_last)
    weights = gradients = optimizer = 0.0
    for part in parts:
        over = {"tensor": resources.tensor_parallel, "expert": resources.expert_parallel, "nothing": 1}[part.divided_over]
        copies = _copies(part, resources)
        weights += element * part.weights / over / (copies if zero == 3 else 1) + FLOAT32_BYTES * part.buffers
        gradients += _gradient_bytes(zero, element) * part.trained / over / (copies if zero >= 2 else 1)
        optimizer += _optimizer_bytes(part, recipe, zero, element) / over / (copies if zero >= 1 else 1)
    is_offloaded, parameters_are = resources.offload_optimizer != "none", resources.offload_parameters != "none" and zero == 3
    rows_per_copy = max(1, summarize_steps(recipe).max_rows // data_parallel(resources))
    num_tokens = resources.micro_batch_sequences * recipe.sequence_length // resources.context_parallel
    num_batches = -(-rows_per_copy // resources.micro_batch_sequences)
    return RankMemory(
        weights=0 if parameters_are else int(weights),
        gradients=int(gradients),
        optimizer=0 if is_offloaded else int(optimizer),
        activations=activation_bytes(
            recipe.model, resources, num_tokens, element, layers,
            in_flight=min(num_stages - stage, num_batches), is_last=is_last,
        ),
        kv_cache=_kv_cache(recipe, resources, element),
        host_optimizer=int(optimizer) if is_offloaded else 0,
        host_weights=int(weights) if parameters_are else 0,
    )  # fmt: skip


def _copies(part: Part, resources: TrainingResources) -> int:
    """Ranks that hold the same elements, among which ZeRO divides."""
    replicas = data_parallel(resources) * resources.context_parallel
    if part.divided_over == "expert" and resources.expert_parallel > 1:
        return max(1, replicas * resources.tensor_parallel // resources.expert_parallel)
    return replicas


def _gradient_bytes(zero: int, element: int) -> int:
    """Summed in float32; ZeRO 1 in bfloat16 keeps the sum beside the gradients of the last micro-batch."""
    return FLOAT32_BYTES + (element if zero == 1 and element < FLOAT32_BYTES else 0)


def _optimizer_bytes(part: Part, recipe: TrainingRecipe, zero: int, element: int) -> float:
    """A master copy where the weights are bfloat16, and under ZeRO, whose flat partitions are copies in any case; one moment or two."""
    has_master = element < FLOAT32_BYTES or zero >= 1
    moment = 2 if recipe.optimizer.state_dtype == "bfloat16" else FLOAT32_BYTES
    num_moments = part.trained + (part.two_moments if recipe.optimizer.kind == "muon" else part.trained)
    return FLOAT32_BYTES * part.trained * has_master + moment * num_moments


def stage_parts(recipe: TrainingRecipe, layers: range, *, is_first: bool, is_last: bool) -> list[Part]:
    """What one stage holds, by how it is divided."""
    model, trained = recipe.model, count_trained(recipe.model, recipe.adapter)
    is_full = recipe.adapter.kind == "none"
    hidden, num_dense = model.hidden_size, sum(number < model.first_k_dense_replace for number in layers)
    num_moe = len(layers) - num_dense + model.num_nextn_predict_layers * is_last
    matrix, expert = _layer_matrices(model), count_parameters(model).expert
    num_query, num_kv = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    biases = (num_dense + num_moe) * (num_query + 2 * num_kv) * model.attention_bias
    embedding = model.vocab_size * hidden
    mtp = model.num_nextn_predict_layers * is_last
    divided = num_dense * (matrix + 3 * hidden * model.intermediate_size) + biases + embedding * (is_first + is_last) + mtp * 2 * hidden**2
    divided += num_moe * (matrix + 3 * hidden * model.moe_intermediate_size * model.n_shared_experts)
    norms = (num_dense + num_moe) * (2 * hidden + 2 * model.head_dim * model.use_qk_norm) + is_last * hidden + mtp * 3 * hidden
    routers, experts = num_moe * model.n_routed_experts * hidden, num_moe * model.n_routed_experts * expert
    buffers = num_moe * model.n_routed_experts
    if is_full:
        return [
            Part("tensor", divided, divided, biases + embedding * is_first),
            Part("nothing", norms + routers, norms + routers, norms, buffers),
            Part("expert", experts, experts, 0),
        ]
    num_trained_moe = num_moe - mtp + trained.num_mtp * is_last
    added = num_dense * trained.dense_layer + num_trained_moe * trained.moe_layer
    return [
        Part("tensor", divided, added, 0),
        Part("nothing", norms + routers, 0, 0, buffers),
        Part("expert", experts, num_trained_moe * model.n_routed_experts * trained.expert, 0),
    ]


def _layer_matrices(model: ModelRecipe) -> int:
    """Of one layer's attention."""
    return 2 * model.hidden_size * (model.num_attention_heads + model.num_key_value_heads) * model.head_dim


def _kv_cache(recipe: TrainingRecipe, resources: TrainingResources, element: int) -> int:
    if not isinstance(recipe.objective, PolicyObjective):
        return 0
    positions = resources.micro_batch_sequences * recipe.sequence_length
    return positions * kv_cache_bytes_per_token(recipe.model, element) // (resources.tensor_parallel * resources.pipeline_parallel)
