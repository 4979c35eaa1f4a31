"""Decides how llama.cpp or vLLM's build for CPUs serves a model on the processors of one node, or refuses with the sum
and what would fit. Pure."""

from __future__ import annotations

from tasks.serving.fleet import Fleet
from tasks.serving.planned_server import SCENARIOS, Needs, PlannedModel, ServingPlan, Wishes
from tasks.serving.served_bytes import BFLOAT16, FORMATS, Layout, kv_bytes_per_token, weight_bytes

MEMORY_SHARE = 0.8
"""Of a node's memory. Assumed."""
LLAMACPP_OVERHEAD_GB = 0.1
"""The server of `tiny` took 141 MB with 41 MB of weights. Logits of a batch of 512 tokens come on top."""
LLAMACPP_BATCH = 512
VLLM_OVERHEAD_GB = 2.5
"""Of its three processes. Assumed."""
ONE = Layout(1, 1, 1, 1)


def plan_on_processors(model: PlannedModel, fleet: Fleet, wishes: Wishes, context: int) -> ServingPlan:
    """Both engines compute in float32. Raises ValueError."""
    _refuse_wishes(model, fleet, wishes)
    scenario, is_drafting = SCENARIOS[wishes.scenario], bool(wishes.drafts)
    num_slots = wishes.slots or scenario.num_slots_cpu
    if wishes.engine == "vllm":
        weights, overhead = 2 * weight_bytes(model.recipe, FORMATS[BFLOAT16], ONE, with_mtp=False), VLLM_OVERHEAD_GB
    else:
        weights, overhead = model.file_bytes, LLAMACPP_OVERHEAD_GB + 4 * LLAMACPP_BATCH * model.recipe.vocab_size / 1e9
    needs = Needs(
        weights=weights / 1e9,
        kv_per_token=kv_bytes_per_token(model.recipe, ONE, 4, with_mtp=is_drafting) / 1e9,
        context=context,
        num_contexts=num_slots,
        overhead=overhead,
        usable=MEMORY_SHARE * fleet.host_memory_gb,
        of=f"{MEMORY_SHARE:.0%} of {fleet.host_memory_gb:.1f} GB",
    )
    if not needs.fits:
        fitting = needs.cached_tokens // context
        fix = f"--slots {fitting}" if fitting else f"--context {needs.cached_tokens} --slots 1"
        smaller = "a smaller GGUF type may fit" if wishes.engine == "llamacpp" else "plan it for GPUs with --hardware"
        raise ValueError(
            f"{model.name} does not fit {fleet}: {needs}; {f'it fits with {fix}' if needs.cached_tokens else smaller}"
        )
    return ServingPlan(
        model=model,
        fleet=fleet,
        engine=wishes.engine,
        scenario=wishes.scenario,
        layout=ONE,
        num_nodes=1,
        context=context,
        num_slots=num_slots,
        is_drafting=is_drafting,
        quantization="",
        memory_share=MEMORY_SHARE,
        needs=needs,
        samples_rollouts=wishes.rollouts,
        names_experts=wishes.routes,
    )


def _refuse_wishes(model: PlannedModel, fleet: Fleet, wishes: Wishes) -> None:
    for name in ("tp", "pp", "dp", "ep", "quantization"):
        if getattr(wishes, name) not in (None, 1):
            raise ValueError(f"--{name} divides GPUs, and {wishes.engine} serves on processors here: leave it out")
    if not fleet.host_memory_gb:
        raise ValueError(
            f"host_memory_gb of {fleet} is not known, and {wishes.engine} uses it: name a fleet file, or leave "
            f"--hardware out"
        )
    if wishes.engine == "vllm" and model.stored_format != BFLOAT16:
        raise ValueError(
            f"{model.name} is stored in {model.stored_format}, which vllm serves on GPUs: name --hardware, or leave "
            f"--format out"
        )
    if wishes.engine == "vllm" and wishes.drafts:
        raise ValueError("--drafts of vllm are planned for GPUs: leave it out, or serve with llamacpp")
