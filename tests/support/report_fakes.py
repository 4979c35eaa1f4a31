"""A small run for the report: real items of toy models, metrics and rollouts of four phases; its data are those of
reported_data."""

from __future__ import annotations

import json
import math

from configs.load import load_prices
from configs.schema import GateRecipe, MarginRecipe, ReleaseRecipe, ServingResources
from infra.step import Artifact, Output
from infra.storage.store import Store
from tasks.data.filtering.blocked_documents import BlockedDocuments
from tasks.data.packing.pack_phase import PackedPhase
from tasks.evaluation.decide_gate import decide_gate
from tasks.evaluation.evaluate_checkpoint import evaluate_checkpoint
from tasks.prepared_data import PreparedData
from tasks.release.convert_to_gguf import convert_to_gguf
from tasks.release.decide_contamination import decide_contamination
from tasks.release.decide_promotion import Approval, PromotionDecision
from tasks.release.decide_quantization import Calibrations, QuantizedEvaluations, decide_quantization
from tasks.release.evaluate_gguf import evaluate_gguf
from tasks.report.report_inputs import NamedRelease, ReportedPhase, ReportedPhases
from tasks.report.write_report import Report, write_report
from tasks.training.state.trained_checkpoint import TrainedCheckpoint
from tests.support.evaluation_fakes import EVALUATION_RESOURCES, RECIPE, commit, evaluation_suite, toy_checkpoint_step
from tests.support.reported_data import toy

RELEASE = ReleaseRecipe(
    gguf_types=("F32", "Q8_0"),
    smoke_prompts=("The",),
    smoke_prompt_tokens=8,
    smoke_new_tokens=4,
    smoke_min_margin=0.01,
    parity_prompts=2,
    parity_calls=2,
    max_parity_log_probability=0.001,
    max_served_log_probability=0.001,
    max_quantization_bits_per_byte=0.05,
    max_4_bit_bits_per_byte=0.5,
    max_contaminated_share=0.01,
    quantized_formats=(),
    min_routing_agreement={},
    calibration_rows=8,
    max_idle_expert_share=0.0,
    num_quantization_documents=2,
    max_quantization_document_tokens=8,
    num_answered_problems=2,
)
SERVING = ServingResources(host="127.0.0.1", port=0, context_length=256, num_threads=1, startup_timeout_seconds=30)
MARGINS = MarginRecipe(
    bits_per_byte=0.5,
    domain_bits_per_byte=9.0,
    arithmetic_accuracy=1.0,
    pass_at_1=1.0,
    choice_accuracy=1.0,
    agentic_success=1.0,
    safe_answer_share=1.0,
)
GATE = GateRecipe(
    max_bits_per_byte=12.0,
    min_arithmetic_accuracy=0.0,
    min_pass_at_1=0.0,
    min_choice_accuracy=0.0,
    min_formed_answer_share=0.0,
    min_distinct_answer_share=0.0,
    min_harmful_refused_share=0.0,
    min_harmless_answered_share=0.0,
    min_pair_accuracy=0.0,
    max_calibration_error=1.0,
    own_figure="pass_at_1",
    must_gain=False,
    start=MARGINS,
    champion=MARGINS,
    max_expert_load=9.0,
    max_expert_cv=9.0,
)
STEPS = {"pretrain_general": 60, "mid_reasoning": 30, "sft": 30, "rl_reasoning": 20}
TOKENS_PER_STEP = 8192


def metrics_of_phase(name: str) -> list[dict[str, float]]:
    """Lines as the worker writes them; the first is of a measured step that a spike left out."""
    lines = []
    for step in range(1, STEPS[name] + 1):
        wave = math.sin(step * 1.7)
        line = {
            "step": step,
            "tokens": step * TOKENS_PER_STEP,
            "lm": 2 + 5 * math.exp(-step / 20) + 0.05 * wave,
            "mtp": 2.4 + 5 * math.exp(-step / 25),
            "expert_load_0": 1.2 + math.exp(-step / 10),
            "expert_load_1": 1.6 + 0.3 * wave,
            "validation_bits_per_byte_web": 3 - 0.02 * step,
            "validation_bits_per_byte_code": 2 - 0.01 * step,
            "skipped_steps": 0,
            "tokens_per_second": 3000.0 + 10 * step,
            "mfu": 0.21,
            "memory_bytes": 1.5 * 2**30,
        }
        parts = {"pass_rate": 0.25, "reward_format": 0.5, "reward_length": -0.125, "unverified": 1.0}
        rewarded = {"reward_mean": 0.3 + 0.02 * step + 0.05 * wave, **parts}
        lines.append(line | (rewarded if name == "rl_reasoning" else {}))
    measured = {key: value for key, value in lines[0].items() if key in ("step", "tokens") or "validation" in key}
    lines[0] = {**measured, "skipped_steps": 2, "rollbacks": 1}
    return lines


def rollouts_of_phase() -> list[dict[str, object]]:
    return [
        {
            "step": step,
            "prompt_id": f"q{number}",
            "question": f"What is {number} + 7?",
            "answer": str(number + 7),
            "samples": [f"\n{number + 7}<|user|>", "\n<i>12</i><|user|>", ""],
            "rewards": [1.0, 0.0, 0.0],
        }
        for step in (1, 20)
        for number in range(2)
    ]


def toy_checkpoint(name: str) -> TrainedCheckpoint:
    num_steps = STEPS[name]
    return TrainedCheckpoint(
        phase=name,
        objective={"sft": "sft", "rl_reasoning": "grpo"}.get(name, "pretrain"),
        num_steps=num_steps,
        num_tokens=num_steps * TOKENS_PER_STEP,
        course=name,
        course_tokens=num_steps * TOKENS_PER_STEP,
        lm_loss=2.25,
        mtp_loss=2.5,
        balance_loss=1.01,
        num_rollbacks=int(name == "sft"),
        validation_bits_per_byte={"web": 1.5},
        num_parameters=123_456,
        mean_reward=0.61 if name == "rl_reasoning" else None,
        is_chat_trained=name in ("sft", "rl_reasoning"),
        chat_template_digest="c" * 64,
        tokenizer_digest="t" * 64,
        special_token_ids={},
        export_digest="f" * 64,
    )


def reported_phase(store: Store, name: str, model: str, start: ReportedPhase | None, gate: GateRecipe) -> ReportedPhase:
    is_policy, record = name == "rl_reasoning", toy_checkpoint(name)

    def write(output: Output) -> None:
        toy_checkpoint_step(model)(output=output)
        files = {
            "metrics.jsonl": metrics_of_phase(name),
            **({"rollouts.jsonl": rollouts_of_phase()} if is_policy else {}),
        }
        for file, lines in files.items():
            output.path(file).write_text("".join(json.dumps(line) + "\n" for line in lines))

    given_start = None if start is None else start.checkpoint
    checkpoint = commit(store, toy("train_phase", record, write, evidence=("*.jsonl",)), name, start=given_start)
    packed = PackedPhase(
        num_rows=60,
        num_tokens=15360,
        sequence_length=256,
        packing="stream",
        num_pieces=70,
        fill_share=1.0,
        num_too_long=12,
        tokens_by_domain={"web": 9000, "code": 6360},
        epochs_by_domain={"web": 1.5, "code": 2.0},
        course_tokens_by_domain={"web": 12000, "code": 6360},
        course_epochs_by_domain={"web": 2.25, "code": 2.0},
        num_rearranged=13,
        absent_domains=("commit",),
    )
    given = {"suite": evaluation_suite(store), "recipe": RECIPE, "resources": EVALUATION_RESOURCES}
    evaluation = commit(store, evaluate_checkpoint, checkpoint=checkpoint, **given)
    before = None if start is None else start.evaluation
    judged = {"evaluation": evaluation, "start_evaluation": before, "champion_evaluation": None, "anchors": None}
    rows = (
        None
        if is_policy
        else commit(store, toy("pack_phase", packed, lambda output: output.path("order-00000.npy").touch()), name)
    )
    quoted = 0.4 if name == "sft" else None
    return ReportedPhase(name, rows, checkpoint, evaluation, commit(store, decide_gate, recipe=gate, **judged), quoted)


def reported_phases(store: Store, names: tuple[str, ...], not_reached: tuple[str, ...] = ()) -> ReportedPhases:
    """The first phase as initialised, the others trained; the gate of the last one refuses."""
    phases: list[ReportedPhase] = []
    for name in names:
        gate = GATE if name != names[-1] else GATE.model_copy(update={"max_bits_per_byte": 0.5})
        phases.append(
            reported_phase(store, name, "trained" if phases else "random", phases[-1] if phases else None, gate)
        )
    return ReportedPhases(tuple(phases), not_reached)


def write_toy_report(
    store: Store,
    data: PreparedData,
    phases: ReportedPhases,
    approval: Approval | None = None,
    replaced: str = "3",
    blocked: BlockedDocuments | None = None,
) -> Artifact[Report]:
    """Of a run that was released; a person may have answered."""
    last = phases.last
    gguf = commit(store, convert_to_gguf, checkpoint=last.checkpoint, recipe=RELEASE.conversion_recipe())
    given = {"checkpoint": last.checkpoint, "suite": data.suite, "evaluation": last.evaluation, "resources": SERVING}
    scored = commit(store, evaluate_gguf, gguf=gguf, recipe=RELEASE.format_recipe(RECIPE), **given)
    released = commit(
        store,
        decide_quantization,
        gguf_evaluation=scored,
        quantized=QuantizedEvaluations({}),
        calibrations=Calibrations({}),
        recipe=RELEASE,
    )
    unquoted = commit(
        store, decide_contamination, contamination=data.contamination, recipe=RELEASE.contamination_bound()
    )
    reasons = (*last.decision.record.refusals, *released.record.refusals)
    if approval is not None and approval.answer != "approved":
        reasons = (*reasons, approval.sentence)
    digests = dict.fromkeys(("comparison", "benchmarks", "quantization", "contamination", "parity", "smoke"), "")
    decided = PromotionDecision(
        accepted=not reasons,
        refusals=reasons,
        approval=approval,
        **{f"{name}_digest": digest for name, digest in digests.items()},
    )
    write_decision = lambda output: output.path("decision.json").write_text(decided.model_dump_json())  # noqa: E731
    promotion = commit(store, toy("decide_promotion", decided, write_decision), decided.model_dump_json())
    return commit(
        store,
        write_report,
        data=data,
        blocked=blocked,
        phases=phases,
        gguf_evaluation=scored,
        quantized=QuantizedEvaluations({}),
        quantization_decision=released,
        contamination_decision=unquoted,
        decision=last.decision,
        suite_evaluation=None,
        suite_decision=None,
        promotion=promotion,
        released=NamedRelease(model="glm46-toy", version="7", replaced=replaced),
        recipe=load_prices("guide"),
    )


def write_unreleased_report(store: Store, data: PreparedData, phases: ReportedPhases) -> Artifact[Report]:
    """Of a run that ended before the release."""
    return commit(
        store,
        write_report,
        data=data,
        blocked=None,
        phases=phases,
        gguf_evaluation=None,
        quantized=None,
        quantization_decision=None,
        contamination_decision=None,
        decision=None,
        suite_evaluation=None,
        suite_decision=None,
        promotion=None,
        released=None,
        recipe=load_prices("guide"),
    )
