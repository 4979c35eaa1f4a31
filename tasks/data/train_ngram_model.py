"""Step: documents -> an n-gram language model per language, for the perplexity of documents."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infra.step import Artifact, Output, Record, canonical_json, step

if TYPE_CHECKING:
    from configs.schema import NgramModelRecipe, SparkResources
    from tasks.data.remove_boilerplate import BoilerplateFreeDocuments


class TrainedNgramModel(Record):
    languages: tuple[str, ...]


@step(content=("ngram_model.json",), distributions=("pyspark", "pyarrow", "numpy"))
def train_ngram_model(
    *, documents: Artifact[BoilerplateFreeDocuments], recipe: NgramModelRecipe, resources: SparkResources, output: Output
) -> TrainedNgramModel:
    """SEAM."""
    output.path("ngram_model.json").write_text(canonical_json({}), encoding="utf-8")
    return TrainedNgramModel(languages=())
