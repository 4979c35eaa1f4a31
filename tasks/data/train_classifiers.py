"""Step: records of the sources with role `classifier` -> a fastText classifier per kind; classifiers.json says how good it is.

The labels' meaning comes from the recipe, text and label fields from the sources' `glm46-data.yaml`. Every record is held out once; the
final model learns from all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from infra.step import Output, Progress, Record, canonical_json, step
from tasks.data.classifier_training import (
    LabelledText,
    area_under_curve,
    calibrated_all,
    calibration_table,
    fit_calibration,
    held_out_probabilities,
    train_model,
)  # fmt: skip
from tasks.data.json_lines import json_lines
from tasks.data.source_bytes import HashingReader, is_listed, open_source
from tasks.data.text_classifiers import features_of, words_of

if TYPE_CHECKING:
    from configs.schema import ClassifierKind, ClassifierRecipe
    from tasks.data.list_sources import SourceFile, SourceListing

KINDS: tuple[ClassifierKind, ...] = ("toxicity", "quality", "factuality")


class TrainedClassifiers(Record):
    kinds: tuple[str, ...]
    """toxicity, quality, factuality: those that score documents."""
    num_records: dict[str, int]
    """Labelled records by kind."""
    auc: dict[str, float]
    """Of held-out records, by kind."""
    unused: dict[str, str]
    """Why a kind scores nothing."""


@step(content=("classifiers.json", "models/*.bin"), distributions=("numpy", "fasttext-numpy2-wheel"))
def train_classifiers(*, sources: SourceListing, recipe: ClassifierRecipe, output: Output) -> TrainedClassifiers:
    """Raises ValueError naming file or kind for a kind or label field that is not given, a record without label, one class only, too few
    records, or a file that changed since the listing."""
    files = [file for file in sources.files if file.role == "classifier"]
    for file in files:
        _check_entry(file)
    found: dict[str, dict[str, Any]] = {}
    for number, kind in enumerate(KINDS):
        labelled = [file for file in files if file.kind == kind]
        if labelled:
            output.report(Progress(number, len(KINDS), "kinds", kind))
            found[kind] = _train(kind, _read_records(labelled, kind, recipe), recipe, output)
    output.path("classifiers.json").write_text(canonical_json(found), encoding="utf-8")
    useful = tuple(kind for kind in found if found[kind]["auc"] >= recipe.min_auc)
    poor = {kind: f"AUC {found[kind]['auc']} is below min_auc {recipe.min_auc}" for kind in found if kind not in useful}
    return TrainedClassifiers(
        kinds=useful,
        num_records={kind: values["num_records"] for kind, values in found.items()},
        auc={kind: values["auc"] for kind, values in found.items()},
        unused={kind: "no source with role classifier and this kind" for kind in KINDS if kind not in found} | poor,
    )


def _check_entry(file: SourceFile) -> None:
    if file.kind not in KINDS:
        raise ValueError(f"{file.name}: role classifier has kind {file.kind!r}, allowed are {', '.join(KINDS)}: correct glm46-data.yaml")
    if not file.label:
        raise ValueError(f"{file.name}: role classifier needs `label`, the field that holds the label: add it in glm46-data.yaml")


def _read_records(files: list[SourceFile], kind: ClassifierKind, recipe: ClassifierRecipe) -> list[LabelledText]:
    positive = frozenset(recipe.positive_labels.get(kind, ()))
    if not positive or kind not in recipe.epochs:
        raise ValueError(f"{files[0].name}: data.recipe.classifiers has no positive_labels or no epochs for {kind}: name them")
    found: list[tuple[str, str]] = []
    for file in files:
        found += _labelled_texts(file)
    labels = sorted({label for _, label in found})
    if len(found) < recipe.min_records:
        raise ValueError(
            f"{', '.join(file.name for file in files)}: {len(found)} labelled records of kind {kind}, at least "
            f"data.recipe.classifiers.min_records ({recipe.min_records}) are needed: label more, or give the files role ignore"
        )
    if len({label in positive for label in labels}) < 2:
        raise ValueError(
            f"{', '.join(file.name for file in files)}: the labels of kind {kind} are {', '.join(labels)}, positive_labels are "
            f"{', '.join(sorted(positive))}: both sides must occur; correct data.recipe.classifiers.positive_labels or the labels"
        )
    return [LabelledText(text[: recipe.max_chars], label in positive) for text, label in found]


def _labelled_texts(file: SourceFile) -> list[tuple[str, str]]:
    fields = file.text or ("text",)
    found = []
    with open_source(file.path, file.sha256) as raw:
        reader = HashingReader(raw)
        for line in json_lines(file.name, reader):
            where = f"{file.name}, byte {line.offset}"
            if line.record is None:
                raise ValueError(f"{where}: {line.reason} ({line.detail}): labelled records must be whole; repair or remove it")
            label = line.record.get(file.label)
            if label is None or isinstance(label, (list, dict)):
                raise ValueError(
                    f"{where}: field {file.label!r} holds no label (fields are {', '.join(sorted(line.record))}): "
                    "correct the record, or `label` in glm46-data.yaml"
                )
            texts = [value for value in map(line.record.get, fields) if isinstance(value, str)]
            if not texts:
                raise ValueError(f"{where}: no text in {', '.join(fields)} (fields are {', '.join(sorted(line.record))}): correct `text`")
            found.append(("\n\n".join(texts), str(label).lower() if isinstance(label, bool) else str(label)))
        if not is_listed(reader, file.sha256):
            raise ValueError(f"{file.name} changed while it was read: run again when nothing writes to it")
    return found


def _train(kind: ClassifierKind, records: list[LabelledText], recipe: ClassifierRecipe, output: Output) -> dict[str, Any]:
    is_positive = np.array([record.is_positive for record in records])
    epochs = recipe.epochs[kind]
    held_out = held_out_probabilities(records, epochs, recipe)
    slope, intercept = fit_calibration(held_out, is_positive)
    scores = calibrated_all(held_out, slope, intercept)
    features = [features_of(words_of(record.text), recipe.word_ngrams) for record in records]
    train_model(features, is_positive.tolist(), epochs, recipe, output.path(f"models/{kind}.bin"))
    return {
        "num_records": len(records),
        "num_positive": int(is_positive.sum()),
        "auc": round(area_under_curve(held_out, is_positive), 4),
        "accuracy": round(float(((scores >= 0.5) == is_positive).sum()) / len(records), 4),
        "slope": slope,
        "intercept": intercept,
        "calibration": calibration_table(scores, is_positive),
        "word_ngrams": recipe.word_ngrams,
        "max_chars": recipe.max_chars,
        "min_known_share": recipe.min_known_share,
    }
