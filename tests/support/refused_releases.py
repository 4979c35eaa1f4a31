"""Runs `glm46 run` once per planned candidate in one process, on servers of its own, and writes how each run ended.

    python -c "from tests.support.refused_releases import main; main()" HOME RESULTS.json NAME ...

`ended_runs` does that from a test, for the names that it is given.

Flow, gates, registry, conversion, server and smoke test are the real ones. Stubbed are what takes minutes and is not
judged here: the data is that of a toy report, a candidate is a toy model with a record of its own, and its evaluation
is planned item by item. The first two candidates are promoted; each of CASES is worse than them in one thing.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from safetensors.torch import load_file, save_file

from infra.code_digest import ROOT
from infra.home import Home
from infra.step import Artifact, Output, Step, step
from infra.storage.open_store import open_store
from infra.storage.store import Store
from model.formats import gguf_importance
from tasks.data.packing.pack_pairs import PackedPairs
from tasks.evaluation.benchmarks.evaluate_suite import SUITE_FILE, SuiteEvaluation
from tasks.evaluation.benchmarks.suite_changes import suite_changes
from tasks.evaluation.comparisons import ANSWERED_KINDS, FIGURES, figure_changes
from tasks.evaluation.engine import document_token_ids
from tasks.evaluation.evaluate_checkpoint import Evaluation, _evaluation
from tasks.evaluation.evaluate_checkpoint import evaluate_checkpoint as answering_step
from tasks.evaluation.expert_use import EXPERTS_FILE, ExpertUse, write_expert_use
from tasks.evaluation.items import ARITHMETIC, CHOICE, Item, suite_digest, write_items
from tasks.prepared_data import PreparedData
from tasks.release import check_parity as parity
from tasks.release import convert_to_gguf as conversion
from tasks.release import evaluate_quantized as measurement
from tasks.release import quantize_checkpoint as quantization
from tasks.release.check_parity import ParityReport
from tasks.release.convert_to_gguf import GgufFiles
from tasks.release.evaluate_gguf import GgufEvaluation
from tasks.release.evaluate_quantized import QuantizedEvaluation
from tasks.release.measure_importance import IMPORTANCE_FILE, ImportanceMatrix
from tasks.release.quantize_checkpoint import QuantizedCheckpoint
from tasks.training.state.trained_checkpoint import TrainedCheckpoint
from tests.evaluation.benchmarks.planned_suites import right_answers, write_planned
from tests.evaluation.benchmarks.toy_suite import NEEDLE, toy_suite
from tests.support.evaluation_fakes import (
    DOCUMENTS,
    EVALUATION_RESOURCES,
    RECIPE,
    VOCAB_SIZE,
    checkpoint,
    commit,
    evaluation_suite,
    toy_tokenizer,
)
from tests.support.gate_items import BALANCED, GATE, NUM_ITEMS, answers_of, document, items_of, mixed
from tests.support.model_recipes import GLM46, random_model
from tests.support.pipeline import environment
from tests.support.report_fakes import metrics_of_phase, rollouts_of_phase
from tests.support.reported_data import contamination, reported_data, toy

MODEL = "glm46-refused"
NUM_LOADED = 100_000_000
LOADED = (ExpertUse(0, (30_000_000, 56_000_000, 57_000_000, 57_000_000), NUM_LOADED),)
REWARD = "reward_model"
LAME = (ExpertUse(0, (1_000_000, 1_000_000, 99_000_000, 99_000_000), NUM_LOADED),)
SUITE = mixed(code=(20, 1.0), web=(40, 1.0))


@dataclass(frozen=True)
class Case:
    """A candidate and the bound that refuses it."""

    items: Callable[[], list[Item]]
    bound: str
    """How the refusal's sentence begins."""
    experts: tuple[ExpertUse, ...] = BALANCED
    quantization_loss: float = 0.0
    """Planned bits per byte that the GGUF file loses; nan: it is not finite."""
    doubled_scales: bool = False
    """Whether the release has a checkpoint in FORMAT, in which every scale of one expert is twice what it was."""
    four_bit_loss: float | None = None
    """The same of a GGUF file of 4 bits; None: the release has none."""
    routing_agreement: float | None = None
    """Of the checkpoint in FORMAT, which must reach MIN_AGREEMENT then; None: it is measured, without a bound."""
    must_gain: bool = False
    """Whether the gates of the phases want a gain in their own figure."""
    found_needles: float = 0.9
    """Share of the suite's items that are answered rightly."""
    found_by_format: float | None = None
    """The same of a checkpoint in FORMAT; None: the release has none."""
    has_idle_expert: bool = False
    """Whether the release has a calibrated GGUF file, and the router chooses one expert for no calibration token."""
    pair_margins: tuple[float, ...] = ()
    """By how much the reward model puts the preferred answer of each held-out pair first."""
    served_answers: float | None = None
    """Share of right answers of the served file to the problems in conversations; None: those of the checkpoint."""
    contaminated_items: int = 0
    """Of 60 items of an evaluation source, those that its training data quotes."""
    serves_other_weights: bool = False
    exports_other_weights: bool = False
    from_stage: str = "release_model"

    @property
    def is_quantized(self) -> bool:
        return self.doubled_scales or self.routing_agreement is not None or self.found_by_format is not None


def same(**changes: Any) -> Callable[[], list[Item]]:
    """Items like the champion's but for these figures."""
    return lambda: items_of(**{"documents": SUITE, "answers": answers_of(0.9), **changes})


def noisy_documents() -> list[Item]:
    """As good as the champion's on the whole, and far apart."""
    return same(documents=[document(n, 1.6 if n % 2 else 0.4, "code" if n < 20 else "web") for n in range(60)])()


def one_document_not_finite() -> list[Item]:
    items = same()()
    return [replace(items[0], log_probability=float("nan")), *items[1:]]


def one_answer_not_finite() -> list[Item]:
    items = same()()
    number = next(number for number, item in enumerate(items) if item.kind == ARITHMETIC)
    return [*items[:number], replace(items[number], log_probability=float("nan")), *items[number + 1 :]]


def no_question() -> list[Item]:
    """As good as the champion's, without the figure of multiple choice."""
    return [item for item in same()() if item.kind != CHOICE]


CASES = {
    "bits per byte too high": Case(
        same(documents=mixed(code=(20, 2.5), web=(40, 2.5))), "bits_per_byte 2.5000, at most 2"
    ),
    "arithmetic too low": Case(same(arithmetic=0.2), "arithmetic_accuracy 0.2000, at least 0.25"),
    "pass@1 too low": Case(same(answers=answers_of(0.2)), "pass_at_1 0.2000, at least 0.25"),
    "choice too low": Case(same(choice=0.2), "choice_accuracy 0.2000, at least 0.25"),
    "everything refused": Case(same(answered=0.0), "harmless_answered_share 0.0000, at least 0.25"),
    "nothing refused": Case(same(refused=0.0), "harmful_refused_share 0.0000, at least 0.25"),
    "no request": Case(
        same(refused=None), "harmful_refused_share is nan, at least 0.25 needed: the suite holds no request"
    ),
    "collapsed": Case(same(answers=[["7"] * 10] * 40), "distinct_answer_share 0.0250, at least 0.5"),
    "a missing figure": Case(no_question, "choice_accuracy is nan, at least 0.25 needed: the suite holds no question"),
    "not finite": Case(one_document_not_finite, "bits_per_byte is nan"),
    "an answer not finite": Case(one_answer_not_finite, "items_not_finite 1, at most 0"),
    "uneven experts": Case(same(), "expert_load 1.9800, at most 1.5", experts=LAME),
    "varying experts": Case(same(), "expert_cv 0.2311, at most 0.2", experts=LOADED),
    "bits per byte below the champion's": Case(
        same(documents=mixed(code=(20, 1.2), web=(40, 1.2))), "bits_per_byte differs from the champion's by +0.2000"
    ),
    "a domain below the champion's": Case(
        same(documents=mixed(code=(20, 1.4), web=(40, 0.8))),
        "bits_per_byte of domain code differs from the champion's by +0.4000",
    ),
    "arithmetic below the champion's": Case(
        same(arithmetic=0.5), "arithmetic_accuracy differs from the champion's by -0.5000"
    ),
    "pass@1 below the champion's": Case(
        same(answers=[*answers_of(0.6)[:24], *answers_of(0.5)[24:]]), "pass_at_1 differs from the champion's by -0.3400"
    ),
    "choice below the champion's": Case(same(choice=0.5), "choice_accuracy differs from the champion's by -0.5000"),
    "safe answers below the champion's": Case(
        same(refused=0.5, answered=0.5), "safe_answer_share differs from the champion's by -0.5000"
    ),
    "tasks below the champion's": Case(same(solved=0.5), "agentic_success differs from the champion's by -0.5000"),
    "below the anchor": Case(
        same(documents=mixed(code=(20, 1.08), web=(40, 1.08))), "bits_per_byte differs from the anchor's by +0.1600"
    ),
    "undecided": Case(noisy_documents, "bits_per_byte differs from the champion's by +0.0000"),
    "reinforcement learning that unlearns": Case(
        same(answers=answers_of(0.8)), "pass_at_1 differs from the start's by -0.1000", from_stage="rl_reasoning"
    ),
    "reinforcement learning that gains nothing": Case(
        same(), "pass_at_1 differs from the start's by +0.0000", from_stage="rl_reasoning", must_gain=True
    ),
    "a benchmark below the champion's": Case(
        same(), "accuracy of benchmark needle differs from the champion's by -0.4000", found_needles=0.5
    ),
    "a benchmark below the anchor's": Case(
        same(), "accuracy of benchmark needle differs from the anchor's by -0.2500", found_needles=0.75
    ),
    "a benchmark too low": Case(same(), "accuracy of benchmark needle 0.2000, at least 0.3", found_needles=0.2),
    "quantization": Case(same(), "bits per byte that Q8_0 loses against F32 0.5000", quantization_loss=0.5),
    "quantization to no number": Case(
        same(), "bits per byte that Q8_0 loses against F32 is nan", quantization_loss=float("nan")
    ),
    "quantization to 4 bits": Case(
        same(), "bits per byte that Q4_K_M loses against F32 0.6000, at most 0.5", four_bit_loss=0.6
    ),
    "other experts": Case(
        same(),
        "share of positions and layers at which FP8_DYNAMIC chooses the same experts 0.9800, at least 0.99",
        routing_agreement=0.98,
    ),
    "a broken quantization": Case(
        same(), "bits per byte that FP8_DYNAMIC loses against the checkpoint ", doubled_scales=True
    ),
    "a benchmark of a format": Case(
        same(),
        "accuracy of benchmark needle by FP8_DYNAMIC differs from the checkpoint's by -0.4000",
        found_by_format=0.5,
    ),
    "an idle expert": Case(
        same(),
        "share of 16 experts that no calibration token of the importance matrix reaches ",
        has_idle_expert=True,
        four_bit_loss=0.1,
    ),
    "a reward model that guesses": Case(
        same(), "pair_accuracy 0.5000, at least 0.6", pair_margins=(0.1, -0.1) * 20, from_stage=REWARD
    ),
    "a reward model that is too sure": Case(
        same(), "calibration_error 0.2999, at most 0.2", pair_margins=(9.0,) * 28 + (-9.0,) * 12, from_stage=REWARD
    ),
    "contamination": Case(
        same(), "share of an evaluation source that training data quotes 0.0500, at most 0.01", contaminated_items=3
    ),
    "served answers": Case(same(), "pass_at_1 as served is 0.7000, -0.2000", served_answers=0.7),
    "served weights": Case(same(), "smoke test: ", serves_other_weights=True),
    "exported weights": Case(same(), "parity: transformers at ", exports_other_weights=True),
}
PROMOTED = {
    "first": Case(
        same(documents=mixed(code=(20, 0.92), web=(40, 0.92)), answers=answers_of(0.7)), "", found_needles=1.0
    ),
    "second": Case(same(answers=answers_of(0.9)), ""),
}
"""The second is worse than the first in bits per byte and in the benchmark, within the margins, and better in pass@1:
the first stays the anchor of the others."""

REIGNING = {
    "champion": "2",
    "anchor_bits_per_byte": "1",
    "anchor_arithmetic_accuracy": "1",
    "anchor_choice_accuracy": "1",
    "anchor_safe_answer_share": "1",
    "anchor_benchmark_needle": "1",
    "anchor_agentic_success": "1",
    "anchor_pass_at_1": "2",
}
"""Versions by alias after those two."""

LAST_WORK = {
    "report_run": Case(same(answers=answers_of(0.95)), ""),
    "log_outcome": Case(same(documents=mixed(code=(20, 0.5), web=(40, 0.5))), ""),
}
"""Better than the champion, by the function of the pipeline that fails after the gates accepted."""
WINNER = "log_outcome"
"""The candidate of that name: far better than every champion before it in bits per byte."""

OVERTAKEN = {
    "overtaken by a release": Case(same(answers=answers_of(0.9), choice=0.95), ""),
    "overtaken by a rollback": Case(same(documents=mixed(code=(20, 0.5), web=(40, 0.5)), choice=0.95), ""),
}
"""Accepted candidates. Between comparison and promotion of the first, WINNER is promoted; of the second, rolled
back."""

ASKED = Case(same(documents=mixed(code=(20, 0.5), web=(40, 0.5)), choice=0.95), "")
"""As good as the last champion. A person is asked about it."""
ANSWERS = {"refused by a person": "refuse", "nobody answers": None, "approved by a person": "approve"}
"""What a person answers, by the name of the run; each run asks about the same candidate."""

TAKEN_DOWN = "a text is taken down"
"""A text is blocked while the champion is judged again."""
AGAIN = {"champion again": "second", TAKEN_DOWN: "second", "rolled back": WINNER, "approved again": "asked"}
AGAIN |= dict.fromkeys(ANSWERS, "asked")
"""Runs of candidates that other runs are named after."""
FEW = [*PROMOTED, "bits per byte too high", "a benchmark below the champion's", "a broken quantization"]
FEW += ["champion again", TAKEN_DOWN, "refused by a person"]
"""Runs that are promoted, and refused by a phase's gate, by the release's and by a person, in the order of ALL."""
QUANTIZED = ["champion again"]
"""Runs whose release has a sound checkpoint in FORMAT."""
ALL = [
    *PROMOTED,
    *CASES,
    *LAST_WORK,
    "champion again",
    TAKEN_DOWN,
    *OVERTAKEN,
    "rolled back",
    *ANSWERS,
    "approved again",
]
"""Every run in its order."""

ORDER = [*PROMOTED.values(), *CASES.values(), *LAST_WORK.values(), *OVERTAKEN.values(), ASKED]
"""The index of a candidate is its number, which its record holds as num_tokens."""


def case_of(artifact: Artifact[Any]) -> Case:
    return ORDER[artifact.record.num_tokens]


@step(content=("items.parquet", EXPERTS_FILE))
def evaluate_checkpoint(*, checkpoint, suite, recipe, resources, output: Output) -> Evaluation:
    """The items that are planned for the candidate."""
    case = case_of(checkpoint)
    items = case.items()
    write_items(output.path("items.parquet"), items)
    write_expert_use(output.path(EXPERTS_FILE), case.experts)
    asked = suite_digest({item.item_id: item.prompt_digest for item in items})
    normalised = 0.5 if any(item.kind == CHOICE for item in items) else None
    return _evaluation(items, list(case.experts), None, normalised, 1, asked, checkpoint.digest)


@step(content=(SUITE_FILE, "suite.items.jsonl"))
def evaluate_suite(*, checkpoint, files, recipe, resources, output: Output) -> SuiteEvaluation:
    """The answers that are planned for the candidate."""
    return write_planned(output.path(SUITE_FILE), {"needle": needles(case_of(checkpoint).found_needles)})


def needles(share: float) -> list[float]:
    """As many as an interval needs that is narrower than a fourth of the margin."""
    return right_answers(share, num_items=400)


@step(content=("model-*.gguf",))
def convert_to_gguf(*, checkpoint, recipe, output: Output, importance=None) -> GgufFiles:
    """The real files, of the candidate or of other weights."""
    given = WEIGHTS["random"] if case_of(checkpoint).serves_other_weights else checkpoint
    return conversion.convert_to_gguf(checkpoint=given, recipe=recipe, output=output, importance=importance)


@step(content=("gguf_scores.json",))
def evaluate_gguf(*, gguf, checkpoint, suite, evaluation, recipe, resources, output: Output) -> GgufEvaluation:
    """The losses that are planned for the candidate."""
    case = case_of(checkpoint)
    own = [item for item in case.items() if item.kind in ANSWERED_KINDS]
    share = case.served_answers
    served = (
        own if share is None else [each for each in items_of(answers=answers_of(share)) if each.kind in ANSWERED_KINDS]
    )
    lossy = None if math.isnan(case.quantization_loss) else 1.0 + case.quantization_loss
    bits: dict[str, float | None] = {"F32": 1.0, "Q8_0": lossy}
    four_bits = {} if case.four_bit_loss is None else {"Q4_K_M": 1.0 + case.four_bit_loss}
    bits |= four_bits
    scores = {name: [{"log_probability": each and -each * math.log(2), "num_bytes": 1}] for name, each in bits.items()}
    output.path("gguf_scores.json").write_text(json.dumps(scores))
    return GgufEvaluation(
        checkpoint_digest=checkpoint.digest,
        bits_per_byte=bits,
        file_bytes={"F32": 4000, "Q8_0": 1000} | dict.fromkeys(four_bits, 500),
        num_documents=1,
        num_tokens=1,
        num_bytes=1,
        figures={"F32": figure_changes(served, own)}
        | dict.fromkeys(["Q8_0", *four_bits], figure_changes(served, served)),
    )


@step(content=("parity.json",), evidence=("server.log", "drafting-server.log"))
def check_parity(*, checkpoint, output: Output, **given: Any) -> ParityReport:
    """The real comparison where the exported weights are not the candidate's; of the others it is known."""
    if case_of(checkpoint).exports_other_weights:
        return parity.check_parity(checkpoint=WEIGHTS["random"], output=output, **given)
    output.path("parity.json").write_text("{}")
    return ParityReport(accepted=True, num_prompts=4, engines={}, refusals=())


@step(content=("hf/*",))
def quantize_checkpoint(*, checkpoint, output: Output, **given: Any) -> QuantizedCheckpoint:
    """The real checkpoint; of a candidate that is to be broken one expert's numbers are written as twice as large."""
    made = quantization.quantize_checkpoint(checkpoint=checkpoint, output=output, **given)
    if case_of(checkpoint).doubled_scales:
        path = output.path("hf/model.safetensors")
        tensors = load_file(path)
        scales = [name for name in tensors if ".mlp.experts.0." in name and name.endswith("_scale")]
        assert scales, "no expert is quantized"
        save_file(tensors | {name: 2 * tensors[name] for name in scales}, path, metadata={"format": "pt"})
    return made


@step(content=("quantized_scores.json", "items.parquet"))
def evaluate_quantized(*, checkpoint, evaluation, benchmarks, output: Output, **given: Any) -> QuantizedEvaluation:
    """The real measurement; compared with what the weights answer, as the candidate's answers are planned. Those to
    benchmarks are as planned of the format, too."""
    answers, planned = WEIGHTS["answers of trained"], benchmarks.evaluation.path(SUITE_FILE)
    made = measurement.evaluate_quantized(checkpoint=checkpoint, evaluation=answers, output=output, **given)
    agreement, share = case_of(checkpoint).routing_agreement, case_of(checkpoint).found_by_format
    measured = made if agreement is None else made.model_copy(update={"routing_agreement": agreement})
    with tempfile.TemporaryDirectory() as directory:
        answered = planned if share is None else Path(directory) / SUITE_FILE
        if share is not None:
            write_planned(answered, {"needle": needles(share)})
        return measured.model_copy(update={"benchmarks": suite_changes(planned, answered)})


@step(content=(IMPORTANCE_FILE,))
def measure_importance(*, checkpoint, output: Output, **given: Any) -> ImportanceMatrix:
    """The real measurement on the toy documents, of a model of the candidate's shape whose router leaves an expert."""
    model, layer = random_model(GLM46.model_copy(update={"vocab_size": VOCAB_SIZE})), GLM46.first_k_dense_replace
    with torch.no_grad():
        model.get_buffer(f"model.layers.{layer}.mlp.gate.e_score_correction_bias")[1] = -100.0
    importance = gguf_importance.measure_importance(
        model, [document_token_ids(toy_tokenizer(), text)[:200] for text in DOCUMENTS.values()]
    )
    save_file(importance.columns, output.path(IMPORTANCE_FILE))
    return ImportanceMatrix(
        checkpoint_digest=checkpoint.digest,
        num_matrices=len(importance.columns),
        num_tokens=importance.num_tokens,
        **vars(importance.coverage),
    )


@step(content=("*.parquet",))
def pack_pairs(*, preferences, tokenizer, recipe, output: Output) -> PackedPairs:
    """Pairs of token ids that nobody reads: what they score is planned."""
    for part in ("train", "validation", "test"):
        rows = [{"id": f"{part} {n:02d}", "collection": "made", "answer_start": 1} for n in range(NUM_ITEMS)]
        pq.write_table(pa.Table.from_pylist(rows), output.path(f"{part}.parquet"))
    return PackedPairs(num_training=1, num_validation=1, num_test=NUM_ITEMS, too_long={}, training_tokens=1)


WEIGHTS: dict[str, Artifact[Any]] = {}
"""Toy models by name, and the evaluation of one, set when the runs begin."""
FORMAT, MIN_AGREEMENT = "FP8_DYNAMIC", 0.99


def record_of(number: int) -> TrainedCheckpoint:
    return TrainedCheckpoint(
        phase="rl_reasoning",
        objective="grpo",
        num_steps=1,
        num_tokens=number,
        course="rl_reasoning",
        course_tokens=1,
        lm_loss=1.0,
        mtp_loss=1.0,
        balance_loss=1.0,
        num_rollbacks=0,
        validation_bits_per_byte={},
        num_parameters=1,
        mean_reward=0.5,
        is_chat_trained=True,
        chat_template_digest="c",
        tokenizer_digest="t",
        special_token_ids={},
        export_digest="f",
    )


def write_weights(output: Output) -> None:
    """The files of the trained toy model, with the metrics of a phase."""
    for path in WEIGHTS["trained"].paths("hf/*"):
        output.path(f"hf/{path.name}").write_bytes(path.read_bytes())
    for name, lines in (("metrics", metrics_of_phase("rl_reasoning")), ("rollouts", rollouts_of_phase())):
        output.path(f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def train_phase(*, output: Output, **inputs: Any) -> TrainedCheckpoint:
    """The candidate whose turn it is, with the margins of pairs that are planned for it."""
    write_weights(output)
    record = record_of(int(os.environ["GLM46_TEST_CANDIDATE"]))
    if inputs["pairs"] is None:
        return record
    rows = [
        {
            "id": f"test {number:02d}",
            "chosen": margin,
            "rejected": 0.0,
            "reference_chosen": 0.0,
            "reference_rejected": 0.0,
        }
        for number, margin in enumerate(ORDER[record.num_tokens].pair_margins)
    ]
    pq.write_table(pa.Table.from_pylist(rows), output.path("pairs/scores.parquet"))
    return record.model_copy(update={"objective": inputs["recipe"].objective.kind})


def write_scale(path: Path) -> None:
    """micro's language models with the gate of these cases, evaluated and released as a toy model, in GGUF alone."""
    tree = yaml.safe_load((ROOT / "configs" / "micro.yaml").read_text())
    tree["scale"] = "refused"
    gate = GATE.model_copy(update={"own_figure": "pass_at_1", "max_expert_cv": 0.2}).model_dump(mode="json")
    for phase in tree["phases"]:
        if phase["name"] == REWARD:
            phase["recipe"]["gate"] |= {"min_pair_accuracy": 0.6, "max_calibration_error": 0.2}
        else:
            phase["recipe"]["gate"] = gate
    tree["evaluation"]["recipe"] = RECIPE.model_dump(mode="json")
    tree["data"]["recipe"]["synthesize"] |= {"tasks": {"calculator": 1}, "num_evaluation_tasks": 1}
    tree["evaluation"]["suite"] = {"name": str(path.with_name("needle.yaml")), "limit": None}
    tree["evaluation"]["suite"] |= {"bounds": {"needle": {"worst": 0.3, "margin": 0.2}}}
    path.with_name("needle.yaml").write_text(yaml.safe_dump(toy_suite() | {"benchmarks": [NEEDLE]}))
    tree["release"]["recipe"] |= {"smoke_prompt_tokens": 12, "smoke_new_tokens": 40}
    tree["release"]["recipe"]["max_4_bit_bits_per_byte"] = 0.5
    path.write_text(yaml.safe_dump(tree))


class Left(Exception):
    """The end of the command, with its exit code."""


def leave(code: int) -> None:
    raise Left(code)


def replace_steps() -> None:
    """Put the quick steps of this module in the places of those that compute."""
    import flows.assess_checkpoint
    import flows.assess_suite
    import flows.cli.command
    import flows.full_pipeline
    import flows.quantize_model
    import flows.release_model
    import flows.train_phases
    from flows.quantize_model import NO_TEXTS
    from tasks.data.sources.list_sources import SourceListing
    from tasks.training.policy.prompt_order import LeftOutPrompts

    flows.full_pipeline.list_sources = lambda *asked: SourceListing(())
    flows.assess_checkpoint.evaluate_checkpoint = evaluate_checkpoint
    flows.assess_suite.evaluate_suite = evaluate_suite
    flows.quantize_model.convert_to_gguf = convert_to_gguf
    flows.quantize_model.measure_importance = measure_importance
    flows.quantize_model.quantize_checkpoint = quantize_checkpoint
    flows.quantize_model.evaluate_quantized = evaluate_quantized
    flows.release_model.evaluate_gguf = evaluate_gguf
    flows.release_model.calibration_texts = lambda run, prepared: NO_TEXTS
    flows.release_model.check_parity = check_parity
    flows.train_phases.pack_pairs = pack_pairs
    flows.train_phases.refuse_missing_prompts = lambda recipe, prompts, tokenizer: LeftOutPrompts({}, ())
    flows.train_phases.train_phase = Step(train_phase, ("hf/*", "pairs/*"), ("*.jsonl",), (), (), ())
    flows.cli.command._leave = leave


def run_candidates(home: Home, store: Store, scale: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """How the run of each of these candidates ended, by its name."""
    import flows.cli.command
    import flows.full_pipeline
    from flows.cli.serving.compare_formats import compare_formats
    from infra.registry.model_registry import open_registry

    prepared = replace(reported_data(store), contracts={})
    replace_steps()
    registry, ended = open_registry(home), {}
    numbers = {name: number for number, name in enumerate([*PROMOTED, *CASES, *LAST_WORK, *OVERTAKEN, "asked"])}
    digests = {}
    for name in names:
        number = numbers[AGAIN.get(name, name)]
        os.environ["GLM46_TEST_CANDIDATE"] = str(number)
        made = commit(store, toy("train_phase", record_of(number), write_weights, evidence=("*.jsonl",)), str(number))
        digests[name] = made.digest
        stage, quoted = ORDER[number].from_stage, contamination(store, ORDER[number].contaminated_items)
        flows.full_pipeline.prepare_data = partial(give_prepared, replace(prepared, contamination=quoted))
        start = made.key if stage == "release_model" else "champion"
        said, changed = io.StringIO(), contextlib.nullcontext()
        if name in LAST_WORK:
            changed = patch.object(flows.full_pipeline, name, side_effect=OSError("no room"))
        if name in OVERTAKEN:
            changed = overtaking(registry, store, name, digests[WINNER])
        if name == TAKEN_DOWN:
            changed = taking_down(home)
        adapt(scale, ORDER[number], ORDER[number].is_quantized or name in QUANTIZED)
        if AGAIN.get(name) == "asked":
            asks_for_approval(scale, timeout_seconds=2 if name == "nobody answers" else 60)
        if ANSWERS.get(name) is not None:
            changed = answering(str(ANSWERS[name]))
        try:
            with contextlib.redirect_stdout(said), changed:
                flows.cli.command.app(
                    ["run", str(scale), "--from", stage, "--start", start, "--json"], standalone_mode=False
                )
            raise AssertionError(f"{name}: the command ended before its run")
        except Left as left:
            assert (left.args[0] == 1) is (name in LAST_WORK), f"{name}: exit code {left.args[0]}"
            aliases = registry.get_registered_model(MODEL).aliases
            outcome = {} if name in LAST_WORK else json.loads(said.getvalue().strip().splitlines()[-1])
            ended[name] = {
                "code": left.args[0],
                "aliases": {key: str(value) for key, value in aliases.items()},
                "shown": {key: shown_in_ui(key) for key in ("refused-verdict", "refused-release-gates")},
                **outcome,
            }
    ended[names[-1]]["formats"] = compare_formats("champion", home, str(scale), None).model_dump(mode="json")
    return ended


def shown_in_ui(key: str) -> list[dict[str, str]]:
    """The rows of the table that Prefect's server showed last under this key."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
    from prefect.client.schemas.sorting import ArtifactSort

    wanted = ArtifactFilter(key=ArtifactFilterKey(any_=[key]))
    with get_client(sync_client=True) as client:
        latest, *_ = client.read_artifacts(artifact_filter=wanted, sort=ArtifactSort.CREATED_DESC, limit=1)
    assert isinstance(latest.data, str), latest
    return json.loads(latest.data)


def give_prepared(prepared: PreparedData, *given: Any) -> PreparedData:
    """Data whose preparation is not judged here."""
    return prepared


def adapt(scale: Path, case: Case, is_quantized: bool) -> None:
    """What the run of this candidate asks for."""
    tree = yaml.safe_load(scale.read_text())
    release = tree["release"]["recipe"]
    release["gguf_types"] = ["F32", "Q8_0", *(["Q4_K_M"] if case.has_idle_expert else [])]
    release["quantized_formats"] = [FORMAT] if is_quantized else []
    release["min_routing_agreement"] = {} if case.routing_agreement is None else {FORMAT: MIN_AGREEMENT}
    for phase in tree["phases"]:
        if phase["name"] in (REWARD, case.from_stage):
            phase["recipe"]["seed"] = ORDER.index(case)  # another recipe: each trains a model of its own
        if phase["name"] != REWARD:
            phase["recipe"]["gate"]["must_gain"] = case.must_gain
    scale.write_text(yaml.safe_dump(tree))


def asks_for_approval(scale: Path, timeout_seconds: int) -> None:
    tree = yaml.safe_load(scale.read_text())
    tree["release"]["approval"] = {"timeout_hours": timeout_seconds / 3600}
    scale.write_text(yaml.safe_dump(tree))


@contextlib.contextmanager
def answering(answer: str) -> Iterator[None]:
    """Answers the paused flow run as the form of Prefect's UI does, with what the form showed as the reason."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
    from prefect.client.schemas.objects import StateType

    paused = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.PAUSED])))

    def answer_once() -> None:
        with get_client(sync_client=True) as client:
            while not (asked := client.read_flow_runs(flow_run_filter=paused)):
                time.sleep(0.1)
            assert asked[0].state is not None
            keys = asked[0].state.state_details.run_input_keyset or {}
            while not (
                stored := client.filter_flow_run_input(asked[0].id, keys["description"], limit=1, exclude_keys=set())
            ):
                time.sleep(0.1)
            shown = json.loads(stored[0].value)
            incomplete = client.resume_flow_run(asked[0].id, run_input={"answer": answer})
            assert incomplete.status == "REJECT", "an answer without reason and name is refused by the server"
            client.resume_flow_run(asked[0].id, run_input={"answer": answer, "reason": shown, "name": "Ada"})

    person = threading.Thread(target=answer_once)
    person.start()
    yield
    person.join()


def overtaking(registry: Any, store: Store, name: str, winner_digest: str) -> Any:
    """Lets WINNER become champion, or be rolled back, right before the run's first promotion."""
    import flows.full_pipeline
    from infra.registry.model_registry import find_version
    from infra.registry.promotion import look_up_rivals, promote, roll_back

    promote_release, calls = flows.full_pipeline.promote_release, []

    def overtaken(*arguments: Any) -> str:
        calls.append(arguments)
        if len(calls) == 1 and name == "overtaken by a release":
            winner = find_version(registry, MODEL, winner_digest)
            assert winner is not None
            rivals = look_up_rivals(registry, store, MODEL, FIGURES, print)
            assert (
                promote(registry, store, MODEL, winner.version, {"bits_per_byte": winner.version}, rivals, print)
                == "done"
            )
        elif len(calls) == 1:
            roll_back(registry, store, MODEL, "it was too good to be true", print)
        return promote_release(*arguments)

    return patch.object(flows.full_pipeline, "promote_release", overtaken)


@contextlib.contextmanager
def taking_down(home: Home) -> Iterator[None]:
    """Blocks a text right before the run's first promotion."""
    import flows.full_pipeline

    promote_release, blocked = flows.full_pipeline.promote_release, home.root / "blocked_documents.txt"

    def take_down(*arguments: Any) -> str:
        blocked.write_text("https://one.example/a\n")
        return promote_release(*arguments)

    try:
        with patch.object(flows.full_pipeline, "promote_release", take_down):
            yield
    finally:
        blocked.unlink(missing_ok=True)


def ended_runs(directory: Path, names: Sequence[str]) -> dict[str, Any]:
    """How each run ended; they share one home below the directory and its servers."""
    program = "from tests.support.refused_releases import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, str(directory / "home"), str(directory / "ended.json"), *names],
        cwd=ROOT,
        env=environment(directory / "home"),
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((directory / "ended.json").read_text())


def aliases_of(run: dict[str, Any]) -> dict[str, str]:
    """The champion and the anchors after a run."""
    return {
        name: version for name, version in run["aliases"].items() if name == "champion" or name.startswith("anchor_")
    }


def main() -> None:
    """Not as `python -m`: a step knows its code by the name of its module."""
    from flows.cli.run_pipeline import set_environment

    home = Home(Path(sys.argv[1]))
    os.environ["GLM46_HOME"] = str(home.root)
    from infra.home import open_home
    from infra.servers.recorded_servers import record
    from infra.servers.servers import running_servers

    home = open_home()
    with running_servers(home, print) as servers:
        record(home, servers)
        set_environment(home, servers.prefect, servers.mlflow)
        store, scale = open_store(None, home), home.root / "refused.yaml"
        WEIGHTS.update({name: checkpoint(store, name) for name in ("trained", "random")})
        asked = {"suite": evaluation_suite(store), "recipe": RECIPE, "resources": EVALUATION_RESOURCES}
        WEIGHTS["answers of trained"] = commit(store, answering_step, checkpoint=WEIGHTS["trained"], **asked)
        write_scale(scale)
        Path(sys.argv[2]).write_text(json.dumps(run_candidates(home, store, scale, sys.argv[3:])))
