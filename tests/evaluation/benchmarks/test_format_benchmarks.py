"""The benchmarks of a release, asked of its formats: the change of each, and what the gate says to a broken format."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file, save_file

from configs.load import load_scale, load_suite
from configs.schema import QuantizationRecipe, RetrievalBenchmark, SuiteRecipe
from flows.cli.serving.compare_formats import _quantized_format
from infra.home import Home
from infra.step import Output, Record, step
from infra.storage.open_store import open_store
from tasks.data.sources.list_sources import list_named
from tasks.evaluation.benchmarks.evaluate_suite import evaluate_suite
from tasks.evaluation.benchmarks.suite_changes import suite_changes
from tasks.evaluation.comparisons import FigureChange, ServedFigures
from tasks.evaluation.evaluate_checkpoint import evaluate_checkpoint
from tasks.release.decide_quantization import Calibrations, QuantizedEvaluations, SuiteBounds, decide_quantization
from tasks.release.evaluate_quantized import AnsweredSuite, QuantizedEvaluation, evaluate_quantized
from tasks.release.quantize_checkpoint import QuantizedCheckpoint, quantize_checkpoint
from tasks.report.report_formats import quantized_table
from tests.evaluation.benchmarks.planned_suites import right_answers, write_planned
from tests.evaluation.benchmarks.toy_suite import NEEDLE, write_suite
from tests.support.data_inputs import write_jsonl
from tests.support.evaluation_fakes import DOCUMENTS, EVALUATION_RESOURCES, RECIPE, checkpoint, commit, evaluation_suite
from tests.support.report_fakes import RELEASE

JOB = load_scale("micro").release.resources
NO_TEXTS = {"packed": None, "shards": None, "chats": None}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Of the trained toy in FP8, and of a copy whose first expert has other numbers: what each lost. Asked are 24
    needles, none of which it finds, and 40 texts."""
    home = tmp_path_factory.mktemp("formats")
    store = open_store(None, Home(home))
    texts = [{"text": text[start : start + 40]} for text in DOCUMENTS.values() for start in range(0, 40, 5)]
    write_jsonl(home / "texts.jsonl", texts)
    (home / "glm46-data.yaml").write_text('version: 1\nentries:\n  - {files: "*.jsonl", role: evaluation}\n')
    toy = load_suite(str(write_suite(home / "toy")[0]))
    asked = [benchmark for benchmark in toy.benchmarks if benchmark.name == "texts"]
    asked.append(RetrievalBenchmark(**NEEDLE | {"document_chars": [100], "items_per_depth": 12}))  # pyright: ignore
    recipe = SuiteRecipe(
        suite=toy.model_copy(update={"benchmarks": asked}), limit=None, num_threads=1, rollouts="in_process"
    )
    files, weights = list_named(str(home), {"texts.jsonl": "texts"}), checkpoint(store, "trained")
    given = {"checkpoint": weights, "resources": EVALUATION_RESOURCES}
    answers = commit(store, evaluate_suite, files=files, recipe=recipe, **given)
    suite = evaluation_suite(store)
    evaluation = commit(store, evaluate_checkpoint, suite=suite, recipe=RECIPE, **given)

    @step(content=("hf/*",))
    def doubled(*, checkpoint, recipe, resources, output: Output, **texts) -> QuantizedCheckpoint:
        made = quantize_checkpoint(checkpoint=checkpoint, recipe=recipe, resources=resources, output=output, **NO_TEXTS)
        path = output.path("hf/model.safetensors")
        tensors = load_file(path)
        scales = [name for name in tensors if ".experts.0." in name and name.endswith("_scale")]
        save_file(tensors | {name: 4 * tensors[name] for name in scales}, path, metadata={"format": "pt"})
        return made

    def evaluate(quantize):
        given = {"checkpoint": weights, "resources": JOB}
        fp8 = QuantizationRecipe(quantized_format="FP8_DYNAMIC", calibration_rows=0)
        quantized = commit(store, quantize, recipe=fp8, **NO_TEXTS, **given)
        return commit(
            store,
            evaluate_quantized,
            quantized=quantized,
            suite=suite,
            evaluation=evaluation,
            recipe=RELEASE.format_recipe(RECIPE),
            benchmarks=AnsweredSuite(answers, files, recipe),
            **given,
        )

    return store, evaluate(quantize_checkpoint), evaluate(doubled)


class GgufScores(Record):
    bits_per_byte: dict[str, float | None] = {"F32": 1.0}  # noqa: RUF012
    shares: dict[str, float] = {}  # noqa: RUF012

    @property
    def served(self) -> ServedFigures:
        values = {"value": 0.5, "interval": None, "before": 0.5, "change": 0.0, "change_interval": None}
        rest = {"noise_floor": 0.0, "num_items": 40, "num_answers": 40, "is_worse": False}
        return ServedFigures(
            figures={name: FigureChange(disagreement=each, **values, **rest) for name, each in self.shares.items()}
        )


def decide(store, evaluations, margins, disagreement=None):
    @step(content=("none",))
    def evaluate_gguf(*, recipe: GgufScores, output: Output) -> GgufScores:
        return recipe

    recipe = RELEASE.model_copy(update={"max_quantization_bits_per_byte": 99.0})
    return commit(
        store,
        decide_quantization,
        gguf_evaluation=commit(store, evaluate_gguf, recipe=GgufScores(shares=disagreement or {})),
        quantized=QuantizedEvaluations(evaluations),
        calibrations=Calibrations({}),
        recipe=recipe,
        benchmarks=SuiteBounds(margins),
    ).record


def test_a_format_is_asked_the_benchmarks_of_the_release_and_a_broken_one_is_refused_by_them(measured):
    store, sound, broken = measured
    assert sound.record.benchmarks.keys() == {"texts", "needle"}
    texts, needle = (sound.record.benchmarks[name] for name in ("texts", "needle"))
    assert (texts.figure, needle.figure, needle.answered_as) == ("bits_per_byte", "accuracy", "arithmetic_accuracy")
    assert 0 < abs(texts.change.change) < 0.05 and needle.change.num_items == 24
    margins = {"texts": 0.1, "needle": 0.2}
    assert decide(store, {"FP8_DYNAMIC": sound}, margins).accepted
    (reason,) = decide(store, {"FP8_DYNAMIC": broken}, margins).refusals
    assert reason.startswith("bits_per_byte of benchmark texts by FP8_DYNAMIC differs from the checkpoint's by +")
    assert decide(store, {"FP8_DYNAMIC": broken}, {}).accepted, "a scale without a suite bounds no benchmark"


def test_tables_of_formats_have_the_benchmarks_beside_the_other_figures(measured):
    record = measured[1].record
    shown = quantized_table([record])
    assert ">texts</td>" in shown and ">needle</td>" in shown and "to the benchmarks of the release" in shown
    assert f"{record.benchmarks['texts'].change.before:.3f}" in shown
    assert list(_quantized_format(measured[1]).figures)[-2:] == ["texts", "needle"]
    without = record.model_copy(update={"benchmarks": {}})
    assert "needle" not in quantized_table([without])


@pytest.mark.parametrize(("share", "floor", "accepted"), [(0.7, 0.0, False), (0.95, 0.0, True), (0.7, 0.4, True)])
def test_a_loss_of_a_format_counts_beyond_interval_noise_floor_and_margin(tmp_path, share, floor, accepted):
    """Of 40 greedy answers all were right before. The floor is what another engine decides otherwise."""
    write_planned(tmp_path / "before.json", {"gsm8k": right_answers(1.0)})
    write_planned(tmp_path / "after.json", {"gsm8k": right_answers(share)})
    change = suite_changes(tmp_path / "before.json", tmp_path / "after.json")
    made = QuantizedEvaluation(
        **dict.fromkeys(("quantized_format", "checkpoint_digest", "quantized_digest"), "FP8_DYNAMIC"),
        **dict.fromkeys(("num_bits", "num_documents", "num_tokens", "num_bytes", "num_original_bytes"), 8),
        **dict.fromkeys(("bits_per_byte", "original_bits_per_byte", "token_agreement", "routing_agreement"), 1.0),
        figures={},
        benchmarks=change,
    )

    @step(content=("quantized_scores.json",))
    def measure(*, output: Output) -> QuantizedEvaluation:
        output.path("quantized_scores.json").write_text("[]")
        return made

    store = open_store(None, Home(tmp_path))
    decision = decide(store, {"FP8_DYNAMIC": commit(store, measure)}, {"gsm8k": 0.1}, {"arithmetic_accuracy": floor})
    assert decision.accepted is accepted
    assert decision.bounds[-1].noise_floor == floor and decision.bounds[-1].against == "checkpoint"
    with pytest.raises(ValueError, match=r"benchmark mmlu has a bound .* and FP8_DYNAMIC was not asked it"):
        decide(store, {"FP8_DYNAMIC": commit(store, measure)}, {"mmlu": 0.1})
