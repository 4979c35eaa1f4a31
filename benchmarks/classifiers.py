"""Classifiers of toxicity and quality, and masking of personal data: how good, how fast, beside scikit-learn.

python -m benchmarks.classifiers [--write]   (../shared/data as in docs/data.md)

Both sides are cross-validated on the same folds (by the hash of the text): ours is what train_classifiers does, the peer is TF-IDF over
words with logistic regression. Then both toxicity models score the same documents; times are processor seconds. `clean_flagged` is the
share of documents of unsuspicious sources at or above 0.3, the full-scale bound. Personal data: spans of six kinds in 1,000 synthetic
sentences; one counts as found where what is masked overlaps it, and what is masked as right where it overlaps any labelled span.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.results import report
from configs.load import load_scale
from configs.schema import ClassifierKind, ClassifierRecipe
from tasks.data.classifier_training import (
    LabelledText,
    area_under_curve,
    calibrated_all,
    fit_calibration,
    held_out_probabilities,
    train_model,
)
from tasks.data.personal_data import find_spans
from tasks.data.text_classifiers import TextClassifier, features_of, words_of

DATA = Path(__file__).resolve().parents[1].parent / "shared" / "data"
SOURCES: dict[ClassifierKind, tuple[str, str]] = {
    "toxicity": ("safety/davidson_toxicity", "tweet"), "quality": ("quality/dclm_human_quality", "text"),
}  # fmt: skip
CLEAN = ("text/c4_sample", "text/gutenberg_en", "text/us_presidential_speeches", "text/wikipedia_plain_sample", "text/peps")
SPAN_KINDS = {
    "EMAIL_ADDRESS": "email", "PHONE_NUMBER": "phone", "IP_ADDRESS": "ip_address", "CREDIT_CARD": "credit_card", "IBAN_CODE": "iban",
    "US_SSN": "us_ssn",
}  # fmt: skip
NUM_DOCUMENTS = 300
MAX_TOXICITY = 0.3


def _records(name: str) -> list[dict[str, Any]]:
    with gzip.open(DATA / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _labelled(kind: ClassifierKind, recipe: ClassifierRecipe) -> list[LabelledText]:
    name, field = SOURCES[kind]
    return [
        LabelledText(record[field][: recipe.max_chars], str(record["label"]) in recipe.positive_labels[kind]) for record in _records(name)
    ]


def _pipeline() -> Any:
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    return make_pipeline(TfidfVectorizer(sublinear_tf=True, min_df=2), LogisticRegression(C=3, max_iter=500, class_weight="balanced"))


def _peer_probabilities(records: list[LabelledText], num_folds: int) -> np.ndarray:
    texts = np.array([record.text for record in records], dtype=object)
    labels = np.array([record.is_positive for record in records])
    folds = np.array([record.fold_hash % num_folds for record in records])
    result = np.zeros(len(records))
    for fold in range(num_folds):
        result[folds == fold] = _pipeline().fit(texts[folds != fold], labels[folds != fold]).predict_proba(texts[folds == fold])[:, 1]
    return result


def _judged(kind: ClassifierKind, recipe: ClassifierRecipe) -> tuple[dict[str, Any], tuple[float, float]]:
    """Figures of both sides, and our calibration."""
    records = _labelled(kind, recipe)
    is_positive = np.array([record.is_positive for record in records])
    found = {"records": len(records)}
    started = time.process_time()
    ours = held_out_probabilities(records, recipe.epochs[kind], recipe)
    calibration = fit_calibration(ours, is_positive)
    found["seconds"] = round(time.process_time() - started, 1)
    accuracy = ((calibrated_all(ours, *calibration) >= 0.5) == is_positive).mean()
    started = time.process_time()
    peer = _peer_probabilities(records, recipe.num_folds)
    found["peer_seconds"] = round(time.process_time() - started, 1)
    found |= {"auc": round(area_under_curve(ours, is_positive), 4), "peer_auc": round(area_under_curve(peer, is_positive), 4)}
    found["accuracy"] = round(float(accuracy), 4)
    if kind == "quality":
        unanimous = np.array([record["unanimous"] for record in _records(SOURCES[kind][0])])
        found["auc_unanimous"] = round(area_under_curve(ours[unanimous], is_positive[unanimous]), 4)
    return found, calibration


def _speeds(recipe: ClassifierRecipe, calibration: tuple[float, float]) -> dict[str, Any]:
    records = _labelled("toxicity", recipe)
    labels = [record.is_positive for record in records]
    clean = {name: [record["text"] for record in _records(name)[:NUM_DOCUMENTS]] for name in CLEAN}
    texts = [text for group in clean.values() for text in group]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "toxicity.bin"
        features = [features_of(words_of(record.text), recipe.word_ngrams) for record in records]
        train_model(features, labels, recipe.epochs["toxicity"], recipe, path)
        size = path.stat().st_size
        classifier = TextClassifier("toxicity", str(path), *calibration, recipe.word_ngrams, recipe.max_chars, recipe.min_known_share)
        classifier.scores(texts[:1])
        started = time.process_time()
        ours = classifier.scores(texts)
        seconds = time.process_time() - started
        scores = {name: [value for value in classifier.scores(group) if value is not None] for name, group in clean.items()}
    pipeline = _pipeline().fit([record.text for record in records], labels)
    started = time.process_time()
    pipeline.predict_proba(texts)
    peer_seconds = time.process_time() - started
    num_bytes = sum(len(text.encode()) for text in texts)
    return {
        "documents": len(texts), "unscored": sum(value is None for value in ours), "model_bytes": size,
        "documents_per_second": round(len(texts) / seconds, 1), "peer_documents_per_second": round(len(texts) / peer_seconds, 1),
        "megabytes_per_second": round(num_bytes / seconds / 1e6, 2), "peer_megabytes_per_second": round(num_bytes / peer_seconds / 1e6, 2),
        "clean_flagged": {name: round(float(np.mean(np.array(values) >= MAX_TOXICITY)), 4) for name, values in scores.items()},
    }  # fmt: skip


def _personal_data() -> dict[str, Any]:
    records = _records("safety/pii_spans")
    started = time.process_time()
    found = find_spans([record["text"] for record in records])
    seconds = time.process_time() - started
    wanted: dict[str, list[bool]] = {kind: [] for kind in SPAN_KINDS.values()}
    right: list[bool] = []
    for record, masked in zip(records, found, strict=True):
        for span in record["spans"]:
            if span["type"] in SPAN_KINDS:
                wanted[SPAN_KINDS[span["type"]]].append(any(start < span["end"] and span["start"] < end for _, start, end in masked))
        right += [any(start < span["end"] and span["start"] < end for span in record["spans"]) for _, start, end in masked]
    everything = [is_found for kind in wanted.values() for is_found in kind]
    return {
        "recall": round(sum(everything) / len(everything), 4), "precision": round(sum(right) / len(right), 4), "spans": len(everything),
        "recall_by_kind": {kind: round(sum(values) / len(values), 3) for kind, values in wanted.items()},
        "megabytes_per_second": round(sum(len(record["text"].encode()) for record in records) / seconds / 1e6, 2),
    }  # fmt: skip


def main() -> None:
    """Print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.parse_args()
    recipe = load_scale("full").data.recipe.classifiers
    quality, _ = _judged("quality", recipe)
    print("quality", quality, flush=True)
    toxicity, calibration = _judged("toxicity", recipe)
    print("toxicity", toxicity, flush=True)
    speeds = _speeds(recipe, calibration)
    report(
        "classifiers", ours=speeds["documents_per_second"], peer=speeds["peer_documents_per_second"], unit="documents/s",
        peer_name="scikit-learn TF-IDF + logistic regression", toxicity_auc=toxicity["auc"], quality_auc=quality["auc"],
        toxicity=toxicity, quality=quality, scoring=speeds, personal_data=_personal_data(),
        libraries={name: version(name) for name in ("fasttext-numpy2-wheel", "scikit-learn")},
    )  # fmt: skip


if __name__ == "__main__":
    main()
