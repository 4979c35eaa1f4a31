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
    from tasks.evaluation.harness import EngineModel
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
    """Raises ValueError for a log-probability that is not finite, EngineError for a server that does not answer."""
    from tasks.evaluation.benchmarks.suite_results import write_result

    asked = read_listed_items("release", recipe.suite, files, recipe.limit)
    who = "glm46" if recipe.rollouts == "in_process" else recipe.rollouts
    with reproducible_arithmetic(recipe.num_threads):
        model = _open_model(checkpoint, recipe, resources, output)
        result, items = run_suite(model, asked, checkpoint.digest, who, output.report)
    write_result(output.path(SUITE_FILE), result, items)
    return SuiteEvaluation(
        checkpoint_digest=checkpoint.digest,
        figures={
            each.name: {figure.name: round(figure.value, 6) for figure in each.figures if not figure.part}
            for each in result.benchmarks
        },
        num_items={each.name: each.num_items for each in result.benchmarks},
    )


def _open_model(
    checkpoint: Artifact[TrainedCheckpoint], recipe: SuiteRecipe, resources: EvaluationResources, output: Output
) -> EngineModel:
    from model.formats.hf_checkpoint import read_config
    from tasks.evaluation.benchmarks.checkpoint_model import checkpoint_model, engine_model
    from tasks.evaluation.open_engine import open_engine

    weights_dir, suite = checkpoint.directory("hf"), recipe.suite
    if recipe.rollouts == "in_process":
        return checkpoint_model(weights_dir, suite, checkpoint.digest, resources.device, output.report)
    engine = open_engine(checkpoint, recipe.rollouts, suite.dtype, resources)
    positions = read_config(weights_dir).max_position_embeddings
    return engine_model(lambda: engine, weights_dir, suite, engine.weights_version, positions, output.report)
