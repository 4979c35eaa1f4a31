"""Step: records of the sources with role `classifier` -> a fastText classifier per kind; classifiers.json says how good it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infra.step import Output, Record, canonical_json, step

if TYPE_CHECKING:
    from configs.schema import ClassifierRecipe
    from tasks.data.list_sources import SourceListing


class TrainedClassifiers(Record):
    kinds: tuple[str, ...]
    """toxicity, quality, factuality: those for which the sources hold labelled records."""


@step(content=("classifiers.json",))
def train_classifiers(*, sources: SourceListing, recipe: ClassifierRecipe, output: Output) -> TrainedClassifiers:
    """SEAM."""
    output.path("classifiers.json").write_text(canonical_json({}), encoding="utf-8")
    return TrainedClassifiers(kinds=())
