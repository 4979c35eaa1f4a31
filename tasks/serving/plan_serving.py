"""Decides how a model is served on a fleet by one of three engines, or refuses with the sum and what would fit.

Pure. Everything that starts or describes a server (`glm46 serve`, its containers, its manifests) takes this plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from tasks.serving.fleet import Fleet
from tasks.serving.plan_on_processors import plan_on_processors
from tasks.serving.planned_server import SCENARIOS, Needs, PlannedModel, ServingPlan, Wishes, gigabytes
from tasks.serving.served_bytes import BFLOAT16, FORMATS, Layout, WeightFormat, kv_bytes_per_token, weight_bytes

ONLINE_FP8, FOUR_BIT = "fp8", "W4A16"
STORED_AS = {"awq": FOUR_BIT, "gptq": FOUR_BIT}
"""Methods by the format of a checkpoint that they made."""
MEMORY_SHARE = 0.92
"""Of a GPU's memory that an engine may use: the rest is for what the driver and other programs take. Assumed."""
ROLLOUT_STATIC_SHARE = 0.7
"""Of a GPU's memory for weights, keys and values where SGLang samples for a policy phase (S3): new weights are read
beside the old ones."""
OVERHEAD_GB = 5.0
"""On each GPU beside weights, keys and values: CUDA context, NCCL's buffers, captured graphs, activations of a part of
a prompt. Assumed: this project has not run these engines on GPUs."""
MIN_CONTEXT = 1024
"""Contexts are proposed in steps of this many tokens."""


def plan_serving(model: PlannedModel, fleet: Fleet, wishes: Wishes) -> ServingPlan:
    """Raises ValueError with the sum and what would fit, or with the wish that no engine can meet."""
    context = wishes.context or model.recipe.max_position_embeddings
    if context > model.recipe.max_position_embeddings:
        raise ValueError(
            f"--context {context} exceeds max_position_embeddings of {model.name} "
            f"({model.recipe.max_position_embeddings}): lower it"
        )
    if wishes.engine == "llamacpp" or (wishes.engine == "vllm" and not fleet.num_gpus):
        return plan_on_processors(model, fleet, wishes, context)
    stored = _served_format(model, wishes)
    if not fleet.num_gpus:
        raise ValueError(
            f"{wishes.engine} is planned for GPUs, and there is {fleet}: name --hardware, or use llamacpp or vllm"
        )
    plans = list(_candidates(model, fleet, wishes, stored, context))
    if not plans:
        raise ValueError(_impossible(model, fleet, wishes, stored))
    fitting = [plan for plan in plans if plan.needs.fits]
    if not fitting:
        raise ValueError(_refusal(model, fleet, wishes, min(plans, key=lambda each: each.needs.total)))
    return max(fitting, key=_rank)


def _rank(plan: ServingPlan) -> tuple[int, ...]:
    """The best last: of many groups, or of one group as wide as a node allows."""
    layout = plan.layout
    groups = layout.dp if SCENARIOS[plan.scenario].prefers_groups else -layout.dp
    return (groups, -layout.pp, layout.tp)


def _candidates(
    model: PlannedModel, fleet: Fleet, wishes: Wishes, stored: WeightFormat, context: int
) -> Iterator[ServingPlan]:
    counts = range(1, fleet.num_gpus + 1)
    for tp in _choices(wishes.tp, range(1, fleet.gpus_per_node + 1)):
        for pp in _choices(wishes.pp, counts):
            for dp in _choices(wishes.dp, counts):
                layout = Layout(tp, pp, dp, wishes.ep or _experts_apart(model, wishes, stored, tp, dp))
                if not _objections(model, fleet, wishes, stored, layout):
                    yield _plan(model, fleet, wishes, stored, layout, context)


def _choices(wish: int | None, otherwise: range) -> list[int]:
    return [wish] if wish else list(otherwise)


def _experts_apart(model: PlannedModel, wishes: Wishes, stored: WeightFormat, tp: int, dp: int) -> int:
    """1 unless groups share experts, or an expert that is cut is no whole number of the format's groups."""
    is_cut_apart = stored.group and model.recipe.moe_intermediate_size % (tp * dp * stored.group)
    return tp * dp if dp > 1 or is_cut_apart or SCENARIOS[wishes.scenario].prefers_groups else 1


def _objections(model: PlannedModel, fleet: Fleet, wishes: Wishes, stored: WeightFormat, layout: Layout) -> list[str]:
    """Why no engine can divide the model so."""
    recipe, shared, reasons = model.recipe, layout.tp * layout.dp, []
    for name, value in (("num_attention_heads", recipe.num_attention_heads), ("vocab_size", recipe.vocab_size)):
        if value % layout.tp:
            reasons.append(f"tp {layout.tp} does not divide {name} ({value})")
    if recipe.num_key_value_heads % layout.tp and layout.tp % recipe.num_key_value_heads:
        reasons.append(f"tp {layout.tp} and num_key_value_heads ({recipe.num_key_value_heads}) do not divide")
    if layout.pp > recipe.num_hidden_layers:
        reasons.append(f"pp {layout.pp} exceeds num_hidden_layers ({recipe.num_hidden_layers})")
    if layout.num_gpus > fleet.num_gpus:
        reasons.append(f"{layout} needs {layout.num_gpus} GPUs of {fleet.num_gpus}")
    elif layout.tp > fleet.gpus_per_node:
        reasons.append(f"tp {layout.tp} exceeds the {fleet.gpus_per_node} GPUs of a node")
    elif layout.num_gpus > fleet.gpus_per_node and layout.num_gpus % fleet.gpus_per_node:
        reasons.append(f"{layout} is no whole number of nodes of {fleet.gpus_per_node} GPUs")
    elif layout.num_gpus > fleet.gpus_per_node and layout.dp > 1 and not _samples_by_sglang(wishes):
        reasons.append(f"{layout} has groups on several nodes, planned for rollouts of sglang only: set dp to 1")
    if layout.ep not in ((1, shared) if wishes.engine == "vllm" else range(1, shared + 1)) or shared % layout.ep:
        allowed = f"1 or tp x dp ({shared})" if wishes.engine == "vllm" else f"a divisor of tp x dp ({shared})"
        reasons.append(f"ep {layout.ep} must be {allowed} in {wishes.engine}")
    elif recipe.n_routed_experts % layout.ep:
        reasons.append(f"ep {layout.ep} does not divide n_routed_experts ({recipe.n_routed_experts})")
    if recipe.moe_intermediate_size * layout.ep % (shared * max(1, stored.group)):
        rows = recipe.moe_intermediate_size * layout.ep / shared
        reasons.append(
            f"{rows:g} rows of an expert on a GPU are no multiple of {max(1, stored.group)} ({stored.name}): raise ep"
        )
    if wishes.drafts and not recipe.num_nextn_predict_layers:
        reasons.append("there is no MTP layer to draft with")
    if wishes.drafts and layout.pp > 1:
        reasons.append(f"drafts with pp {layout.pp} are not planned: set pp to 1")
    return reasons


def _plan(
    model: PlannedModel, fleet: Fleet, wishes: Wishes, stored: WeightFormat, layout: Layout, context: int
) -> ServingPlan:
    scenario = SCENARIOS[wishes.scenario]
    can_draft = bool(model.recipe.num_nextn_predict_layers) and layout.pp == 1
    is_drafting = can_draft and (scenario.is_drafting if wishes.drafts is None else wishes.drafts)
    usable = MEMORY_SHARE * fleet.gpu_memory_gb
    if _samples_by_sglang(wishes):
        usable = min(usable, ROLLOUT_STATIC_SHARE * fleet.gpu_memory_gb + OVERHEAD_GB)
    needs = Needs(
        weights=weight_bytes(model.recipe, stored, layout, with_mtp=is_drafting) / 1e9,
        kv_per_token=kv_bytes_per_token(model.recipe, layout, with_mtp=is_drafting) / 1e9,
        context=context,
        num_contexts=1,
        overhead=OVERHEAD_GB,
        usable=usable,
        of=f"{usable / fleet.gpu_memory_gb:.0%} of {fleet.gpu_memory_gb:g} GB",
    )
    static = math.floor(round(100 * (usable - OVERHEAD_GB) / fleet.gpu_memory_gb, 6)) / 100
    return ServingPlan(
        model=model,
        fleet=fleet,
        engine=wishes.engine,
        scenario=wishes.scenario,
        layout=layout,
        num_nodes=max(1, layout.num_gpus // fleet.gpus_per_node),
        context=context,
        num_slots=wishes.slots or scenario.num_slots,
        is_drafting=is_drafting,
        quantization="" if stored.name == model.stored_format else stored.name,
        memory_share=MEMORY_SHARE if wishes.engine == "vllm" else static,
        needs=needs,
        samples_rollouts=wishes.rollouts,
        names_experts=wishes.routes,
    )


def _samples_by_sglang(wishes: Wishes) -> bool:
    return wishes.rollouts and wishes.engine == "sglang"


def _served_format(model: PlannedModel, wishes: Wishes) -> WeightFormat:
    asked = wishes.quantization
    if asked is None or STORED_AS.get(asked, asked) == model.stored_format:
        return FORMATS[model.stored_format]
    if asked == ONLINE_FP8 and model.stored_format == BFLOAT16:
        return FORMATS[ONLINE_FP8]
    if model.stored_format != BFLOAT16:
        raise ValueError(f"{model.name} is stored in {model.stored_format} already: leave --quantization {asked} out")
    raise ValueError(
        f"--quantization {asked}: engines round to {ONLINE_FP8} while they load; for another format write a checkpoint "
        f"by quantized_formats of a scale (AWQ_W4A16, GPTQ_W4A16, FP8_BLOCK, ...) and name it with --checkpoint"
    )


def _impossible(model: PlannedModel, fleet: Fleet, wishes: Wishes, stored: WeightFormat) -> str:
    """Why what the user fixed cannot be; the rest is taken as 1."""
    tp, dp = wishes.tp or 1, wishes.dp or 1
    layout = Layout(tp, wishes.pp or 1, dp, wishes.ep or _experts_apart(model, wishes, stored, tp, dp))
    reasons = _objections(model, fleet, wishes, stored, layout) or [f"no division of {fleet} has {layout}"]
    return f"{model.name} cannot be divided so: {'; '.join(reasons)}"


def _refusal(model: PlannedModel, fleet: Fleet, wishes: Wishes, closest: ServingPlan) -> str:
    stored = closest.quantization or model.stored_format
    options = list(_what_would_fit(model, fleet, wishes, closest))
    return (
        f"{model.name} in {stored} does not fit {fleet} with {closest.layout}: {closest.needs}. "
        f"{'It fits with ' + '; or '.join(options) if options else 'Nothing that this plan knows would fit'}"
    )


def _what_would_fit(model: PlannedModel, fleet: Fleet, wishes: Wishes, closest: ServingPlan) -> Iterator[str]:
    """Changes of one wish after which the model fits, with the sum of each."""
    cached = closest.needs.cached_tokens
    if cached >= MIN_CONTEXT:
        yield f"--context {cached // MIN_CONTEXT * MIN_CONTEXT}"
    free = replace(wishes, tp=None, pp=None, dp=None, ep=None)
    if (wishes.tp, wishes.pp, wishes.dp, wishes.ep) != (None,) * 4:
        yield from _if_fits("no --tp, --pp, --dp, --ep", model, fleet, free)
    if model.stored_format == BFLOAT16 and wishes.quantization is None:
        yield from _if_fits("--quantization fp8", model, fleet, replace(free, quantization=ONLINE_FP8))
        four_bit = replace(model, stored_format=FOUR_BIT)
        yield from _if_fits("a checkpoint of AWQ_W4A16 or GPTQ_W4A16", four_bit, fleet, free)
    for num_nodes in range(2, 17):
        larger = fleet.model_copy(update={"num_nodes": num_nodes})
        if num_nodes > fleet.num_nodes and (found := list(_if_fits(str(larger), model, larger, free))):
            yield found[0]
            return


def _if_fits(change: str, model: PlannedModel, fleet: Fleet, wishes: Wishes) -> Iterator[str]:
    context = wishes.context or model.recipe.max_position_embeddings
    plans = _candidates(model, fleet, wishes, _served_format(model, wishes), context)
    fitting = [plan for plan in plans if plan.needs.fits]
    if fitting:
        best = max(fitting, key=_rank)
        yield f"{change} ({best.layout}: {gigabytes(best.needs.total)} of {gigabytes(best.needs.usable)})"
