"""Refuses topologies that no engine can train: numbers that do not divide, and what DeepSpeed and Megatron exclude.

`tasks/training/plan/launch_rules.py` holds the other list: what could be trained but has no code yet.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from configs.schema import ModelRecipe, PolicyObjective, TrainingRecipe, TrainingResources
from tasks.training.plan.answer_batches import answer_cache_bytes
from tasks.training.schedule.phase_steps import PhaseSteps, summarize_steps


def data_parallel(resources: TrainingResources) -> int:
    """Copies of the model that share a step's rows: ranks / (tensor x pipeline x context parallel)."""
    return max(
        1, resources.num_ranks // (resources.tensor_parallel * resources.pipeline_parallel * resources.context_parallel)
    )


def rows_at_once(recipe: TrainingRecipe, resources: TrainingResources) -> int:
    """Rows of a micro-batch; of a policy's token budget those of full length that fit, at least one. The two rows of a
    pair are in one pass: pairs take two where one is configured, and an even number."""
    if resources.micro_batch_tokens:
        return max(1, resources.micro_batch_tokens * resources.context_parallel // recipe.sequence_length)
    configured = resources.micro_batch_sequences
    return max(2, configured - configured % 2) if recipe.reads_pairs else configured


def impossible_topology(recipe: TrainingRecipe, resources: TrainingResources) -> list[str]:
    """Every reason why the phase cannot be trained on these ranks, with the values and the fix; empty where it can."""
    return [
        *_world(recipe.model, resources),
        *_model(recipe.model, resources),
        *_experts(recipe.model, resources),
        *_scorer(recipe, resources),
        *_engine(resources),
        *_rows(recipe, resources, summarize_steps(recipe)),
    ]


def _world(model: ModelRecipe, resources: TrainingResources) -> Iterator[str]:
    """One reason for all that the number of ranks must divide by, so that one number mends it."""
    pipeline, experts = resources.pipeline_parallel, resources.expert_parallel
    divisors = {
        "tensor x pipeline x context parallel": resources.tensor_parallel * pipeline * resources.context_parallel,
        "ranks_per_node": resources.ranks_per_node,
    }
    if model.n_routed_experts % experts == 0:  # else expert_parallel is what has to change
        divisors["expert x pipeline parallel"] = experts * pipeline
    broken = [f"{name} ({number})" for name, number in divisors.items() if resources.num_ranks % number]
    if broken:
        multiple = math.lcm(*divisors.values())
        yield (
            f"num_ranks ({resources.num_ranks}) is no multiple of {', nor of '.join(broken)}: set it to "
            f"{max(1, resources.num_ranks // multiple) * multiple}, a multiple of {multiple}"
        )


def _model(model: ModelRecipe, resources: TrainingResources) -> Iterator[str]:
    stages, tensor = resources.pipeline_parallel, resources.tensor_parallel
    if stages > model.num_hidden_layers:
        yield (
            f"pipeline_parallel ({stages}) exceeds num_hidden_layers ({model.num_hidden_layers}): a stage holds at "
            f"least one, lower it"
        )
    sizes = {
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "intermediate_size": model.intermediate_size,
        "n_shared_experts x moe_intermediate_size": model.n_shared_experts * model.moe_intermediate_size,
        "vocab_size": model.vocab_size,
    }
    for name, size in sizes.items():
        if size % tensor:
            yield f"{name} ({size}) does not divide by tensor_parallel ({tensor}): lower tensor_parallel"
    yield from _heads(model, tensor, resources.context_parallel)


def _heads(model: ModelRecipe, tensor: int, context: int) -> Iterator[str]:
    """Context ranks divide the heads of a tensor rank among them while they attend."""
    query, key = model.num_attention_heads // tensor, model.num_key_value_heads // tensor
    if query % context:
        yield (
            f"num_attention_heads / tensor_parallel ({query}) does not divide by context_parallel ({context}): in "
            f"attention each context "
            "rank takes a share of the heads over all positions; lower context_parallel"
        )
    if key and key % context and context % key:
        yield (
            f"num_key_value_heads / tensor_parallel ({key}) can neither be divided among nor repeated on {context} "
            f"context-parallel ranks: "
            f"set context_parallel to a divisor or a multiple of {key}"
        )


def _experts(model: ModelRecipe, resources: TrainingResources) -> Iterator[str]:
    experts = resources.expert_parallel
    if model.n_routed_experts % experts:
        yield (
            f"n_routed_experts ({model.n_routed_experts}) does not divide by expert_parallel ({experts}): "
            f"set it to one of {_divisors(model.n_routed_experts)}"
        )


def _scorer(recipe: TrainingRecipe, resources: TrainingResources) -> Iterator[str]:
    """A critic and a reward model of an architecture of their own are divided as the policy is."""
    if recipe.scorer is not None:
        known = {*_model(recipe.model, resources), *_experts(recipe.model, resources)}
        reasons = (*_model(recipe.scorer, resources), *_experts(recipe.scorer, resources))
        yield from (f"of the reward model: {reason}" for reason in reasons if reason not in known)


def _engine(resources: TrainingResources) -> Iterator[str]:
    if resources.zero_stage >= 2 and resources.pipeline_parallel > 1:
        yield (
            f"zero_stage {resources.zero_stage} with pipeline_parallel {resources.pipeline_parallel}: a pipeline "
            f"keeps the gradients of "
            "many micro-batches, which ZeRO >= 2 would have to gather for each: DeepSpeed refuses it. Set zero_stage "
            "1, or "
            "pipeline_parallel 1"
        )
    if resources.zero_stage == 3 and resources.recompute == "full" and resources.recompute_every_layers > 1:
        yield (
            f"zero_stage 3 with recompute full and recompute_every_layers {resources.recompute_every_layers}: ZeRO 3 "
            f"gathers the weights "
            "of one layer and releases them when the layer was computed again, before its gradients exist. Set "
            "recompute_every_layers 1"
        )
    if resources.offload_optimizer != "none" and resources.zero_stage == 0:
        yield (
            f"offload_optimizer {resources.offload_optimizer} needs zero_stage >= 1: DeepSpeed offloads the shards "
            f"that ZeRO makes"
        )
    if resources.offload_parameters != "none" and resources.zero_stage != 3:
        yield (
            f"offload_parameters {resources.offload_parameters} needs zero_stage 3, it is {resources.zero_stage}: "
            f"only there are weights "
            "divided. Set 3, or offload_parameters none"
        )
    if "nvme" in (resources.offload_optimizer, resources.offload_parameters):
        yield (
            "offloading to nvme: DeepSpeed swaps partitions out between steps, so the hand-over state cannot be "
            "written from them nor "
            "read into them. Set cpu"
        )


def _rows(recipe: TrainingRecipe, resources: TrainingResources, steps: PhaseSteps) -> Iterator[str]:
    copies = data_parallel(resources)
    if steps.min_rows < copies:
        yield (
            f"{copies} data-parallel copies ({resources.num_ranks} ranks) cannot share the step at "
            f"{steps.smallest_at_tokens} tokens, it "
            f"has {steps.min_rows} sequences: lower num_ranks, widen another axis, or change num_tokens or the batch"
        )
    if recipe.reads_pairs and (steps.common_rows % 2 or steps.min_rows < 2 * copies):
        yield (
            f"a step of {steps.min_rows} to {steps.max_rows} answers does not give each of {copies} data-parallel "
            f"copies a pair: make batch tokens and num_tokens multiples of 2 x sequence_length, and at least "
            f"{2 * copies} x sequence_length"
        )
    slices = resources.tensor_parallel * resources.context_parallel
    if slices > 1 and (recipe.sequence_length % slices or recipe.sequence_length < 2 * slices):
        yield (
            f"sequence_length ({recipe.sequence_length}) does not divide by tensor x context parallel ({slices}) into "
            f"slices of two or "
            "more positions: between attention and MLPs ranks hold slices of one size, and the MTP layer leaves out a "
            "row's last one"
        )
    if isinstance(recipe.objective, PolicyObjective):
        one_answer = answer_cache_bytes(recipe, resources)
        if recipe.objective.rollouts == "in_process" and resources.rollout_cache_bytes < one_answer:
            yield (
                f"rollout_cache_bytes ({resources.rollout_cache_bytes}) hold no answer of sequence_length "
                f"({recipe.sequence_length}): "
                f"its keys and values take {one_answer} bytes of a rank; raise it to that"
            )
        group = recipe.objective.samples_per_prompt
        if steps.common_rows % group:
            yield (
                f"a step of {steps.min_rows} to {steps.max_rows} answers does not divide into groups of "
                f"samples_per_prompt ({group}): make "
                "batch tokens and num_tokens multiples of samples_per_prompt x sequence_length"
            )


def _divisors(number: int) -> str:
    return ", ".join(str(part) for part in range(1, number + 1) if number % part == 0)
