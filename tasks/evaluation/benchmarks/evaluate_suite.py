"""Step: asks a checkpoint every benchmark of a suite, for a release.

In: a trained checkpoint (hf/ with tokenizer.json), the suite, its data files. Out: suite.json with every figure and
what decided it, suite.items.jsonl with every item's outcome, and the predictions of benchmarks of kind patch: the files
of `glm46 eval`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from infra.step import Artifact, Output, Record, step
from tasks.evaluation.benchmarks.run_suite import PACKAGES, read_listed_items, run_suite
from tasks.evaluation.engine import reproducible_arithmetic

if TYPE_CHECKING:
    from configs.schema import EvaluationResources, SuiteRecipe
    from tasks.data.sources.list_sources import SourceListing
    from tasks.training.state.trained_checkpoint import TrainedCheckpoint

SUITE_FILE = "suite.json"


class SuiteEvaluation(Record):
    """A checkpoint's figures on a suite; each benchmark's over all of its items."""

    checkpoint_digest: str
    figures: dict[str, dict[str, float]]
    """By benchmark, then by name of the figure."""
    num_items: dict[str, int]
    """By benchmark."""


@step(
    content=(SUITE_FILE, "suite.items.jsonl", "suite.*.predictions.jsonl"),
    distributions=("safetensors", "numpy", "scipy", "datasets", "pyarrow", *PACKAGES),
)
def evaluate_suite(
    *,
    checkpoint: Artifact[TrainedCheckpoint],
    files: SourceListing,
    recipe: SuiteRecipe,
    resources: EvaluationResources,
    output: Output,
) -> SuiteEvaluation:
    """Raises ValueError for a log-probability that is not finite."""
    from tasks.evaluation.benchmarks.checkpoint_model import checkpoint_model
    from tasks.evaluation.benchmarks.suite_results import write_result

    asked = read_listed_items("release", recipe.suite, files, recipe.limit)
    with reproducible_arithmetic(recipe.num_threads):
        model = checkpoint_model(
            checkpoint.directory("hf"), recipe.suite, checkpoint.digest, resources.device, output.report
        )
        result, items = run_suite(model, asked, checkpoint.digest, "glm46", output.report)
    write_result(output.path(SUITE_FILE), result, items)
    return SuiteEvaluation(
        checkpoint_digest=checkpoint.digest,
        figures={
            each.name: {figure.name: round(figure.value, 6) for figure in each.figures if not figure.part}
            for each in result.benchmarks
        },
        num_items={each.name: each.num_items for each in result.benchmarks},
    )
