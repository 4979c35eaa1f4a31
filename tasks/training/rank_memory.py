"""Memory of the fullest rank of a phase, by formula: state by topology and ZeRO stage, activations, the KV cache of sampled answers.

Tensor parallelism divides what is no routed expert (with sequence parallelism also the activations), expert parallelism the routed
experts, the pipeline the layers. The first stage holds the embedding and the activations of as many micro-batches as there are stages;
the last one the unembedding, the MTP layer and the logits. The framework's own buffers and fragmentation come on top.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from configs.schema import PolicyObjective, TrainingRecipe, TrainingResources
from model.counts import activation_elements_per_token, count_parameters, count_trained, kv_cache_bytes_per_token
from tasks.training.phase_steps import summarize_steps
from tasks.training.topology import data_parallel

GRADIENT_BYTES, MASTER_BYTES, MOMENT_BYTES = 4, 4, 4
"""All fp32; with fp32 weights there is no second master copy."""


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

    @property
    def device(self) -> int:
        """All that lies on the accelerator."""
        return sum(getattr(self, field.name) for field in fields(self)) - self.host_optimizer


@dataclass(frozen=True)
class _Stage:
    """Parameters of one pipeline stage before they are divided."""

    dense: int
    experts: int
    trained_dense: int
    trained_experts: int
    embedding: int
    """Trained by AdamW under Muon: a second moment more."""
    in_flight: int
    """Micro-batches whose activations are held at once."""
    holds_logits: bool


def rank_memory(recipe: TrainingRecipe, resources: TrainingResources) -> RankMemory:
    """Of the first or the last pipeline stage, whichever holds more."""
    return max((_stage_memory(stage, recipe, resources) for stage in _stages(recipe, resources)), key=lambda memory: memory.device)


def _stages(recipe: TrainingRecipe, resources: TrainingResources) -> list[_Stage]:
    model, counts, trained = recipe.model, count_parameters(recipe.model), count_trained(recipe.model, recipe.adapter)
    num_layers = -(-model.num_hidden_layers // resources.pipeline_parallel)
    num_dense = min(model.first_k_dense_replace, num_layers)
    rows_per_copy = max(1, summarize_steps(recipe).max_rows // data_parallel(resources))
    in_flight = min(resources.pipeline_parallel, -(-rows_per_copy // resources.micro_batch_sequences))
    embedding = counts.embeddings // 2
    mtp_extra = counts.mtp_layers - model.num_nextn_predict_layers * counts.moe_layer
    head = embedding + model.hidden_size + mtp_extra
    is_full = recipe.adapter.kind == "none"

    def stage(num_dense: int, num_moe: int, *, is_first: bool, is_last: bool) -> _Stage:
        num_mtp, num_trained_mtp = model.num_nextn_predict_layers * is_last, trained.num_mtp * is_last
        outside = embedding * is_first + head * is_last
        moe = counts.moe_layer - model.n_routed_experts * counts.expert
        return _Stage(
            dense=num_dense * counts.dense_layer + (num_moe + num_mtp) * moe + outside,
            experts=(num_moe + num_mtp) * model.n_routed_experts * counts.expert,
            trained_dense=num_dense * trained.dense_layer + (num_moe + num_trained_mtp) * trained.moe_layer + outside * is_full,
            trained_experts=(num_moe + num_trained_mtp) * model.n_routed_experts * trained.expert,
            embedding=embedding * is_first * is_full, in_flight=1 if is_last else in_flight, holds_logits=is_last,
        )  # fmt: skip

    if resources.pipeline_parallel == 1:
        return [stage(num_dense, num_layers - num_dense, is_first=True, is_last=True)]
    return [stage(num_dense, num_layers - num_dense, is_first=True, is_last=False), stage(0, num_layers, is_first=False, is_last=True)]


def _stage_memory(stage: _Stage, recipe: TrainingRecipe, resources: TrainingResources) -> RankMemory:
    tensor, expert, zero = resources.tensor_parallel, resources.expert_parallel, resources.zero_stage
    copies = data_parallel(resources) * resources.context_parallel
    expert_copies = max(1, tensor * copies // expert)
    element = 2 if recipe.dtype == "bfloat16" else 4

    def divided(dense: float, experts: float, from_zero: int) -> int:
        """Bytes of one rank; ZeRO stages from `from_zero` on divide them among the copies as well."""
        sharded = zero >= from_zero
        return int(dense / tensor / (copies if sharded else 1) + experts / expert / (expert_copies if sharded else 1))

    moments = MOMENT_BYTES * (1 if recipe.optimizer.kind == "muon" else 2)
    per_trained = moments + (MASTER_BYTES if element == 2 else 0)
    second_moment = MOMENT_BYTES * stage.embedding if recipe.optimizer.kind == "muon" else 0
    optimizer = divided(stage.trained_dense * per_trained + second_moment, stage.trained_experts * per_trained, 1)
    offloaded = resources.offload_optimizer != "none"
    return RankMemory(
        weights=divided(stage.dense * element, stage.experts * element, 3),
        gradients=divided(stage.trained_dense * GRADIENT_BYTES, stage.trained_experts * GRADIENT_BYTES, 2),
        optimizer=0 if offloaded else optimizer,
        activations=_activations(stage, recipe, resources, element),
        kv_cache=_kv_cache(recipe, resources, element),
        host_optimizer=optimizer if offloaded else 0,
    )


def _activations(stage: _Stage, recipe: TrainingRecipe, resources: TrainingResources, element: int) -> int:
    model = recipe.model
    tokens = resources.micro_batch_sequences * recipe.sequence_length / resources.context_parallel / resources.tensor_parallel
    num_layers = -(-model.num_hidden_layers // resources.pipeline_parallel) + (model.num_nextn_predict_layers if stage.holds_logits else 0)
    elements = num_layers * stage.in_flight * activation_elements_per_token(model, resources.recompute)
    if resources.recompute == "full":
        elements += activation_elements_per_token(model, "none")
    logits = (element + 4) * model.vocab_size * (1 + model.num_nextn_predict_layers) if stage.holds_logits else 0
    return int(tokens * (elements * element + logits))


def _kv_cache(recipe: TrainingRecipe, resources: TrainingResources, element: int) -> int:
    if not isinstance(recipe.objective, PolicyObjective):
        return 0
    positions = resources.micro_batch_sequences * recipe.sequence_length
    return positions * kv_cache_bytes_per_token(recipe.model, element) // (resources.tensor_parallel * resources.pipeline_parallel)
