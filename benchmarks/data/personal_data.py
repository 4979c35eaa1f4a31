"""Personal data and secrets: recall and false alarms on drawn forms and traps, on labelled sentences, and on real text
that has few.

python -m benchmarks.data.personal_data [--write]   (../shared/data as in docs/data.md)

`developed` and `unseen` are the halves of personal_data_forms.py, each form drawn DRAWS times. A form counts as met if
everything between its brackets is masked as its kind. Intervals are 95 %: Wilson's over the forms (not over draws,
which are alike).
"""

from __future__ import annotations

import gzip
import json
import math
import random
import re
import string
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.inputs.personal_data_forms import DEVELOPED, DEVELOPED_TRAPS, UNSEEN, UNSEEN_TRAPS, Form, Trap
from benchmarks.results import report
from infra.code_digest import ROOT
from tasks.data.privacy.personal_data import CODE_KINDS, KINDS, find_spans

DATA = ROOT.parent / "shared" / "data"
DRAWS = 5
SEED = 46
CLASSES = {
    "A": string.ascii_uppercase + string.digits,
    "a": string.ascii_letters + string.digits,
    "c": string.ascii_letters,
    "l": string.ascii_lowercase,
    "d": string.digits,
    "h": "0123456789abcdef",
    "b": string.ascii_letters + string.digits + "+/",
    "u": string.ascii_letters + string.digits + "_-",
    "9": "23456789",
}
PASSWORD_SIGNS = "!#$&*+?^~%"
CARDS = {"visa": ("4", 16), "mastercard": ("53", 16), "discover": ("6011", 16), "amex": ("37", 15)}
REAL_TEXTS = {
    "books": ("text/gutenberg_en", False),
    "books de fr es": ("multilingual/gutenberg_de_fr_es", False),
    "peps": ("text/peps", False),
    "wikipedia": ("text/wikipedia_plain_sample", False),
    "rust_book": ("text/rust_book", False),
    "c4": ("text/c4_sample", False),
    "react_docs": ("multilingual/react_docs", False),
    "stack_exchange": ("text/stack_exchange", False),
    "maths": ("math/math_with_solutions", False),
    "patches": ("code/commit_patches", True),
    "python_repos": ("code/python_repos", True),
}
"""File, and whether it is code, of which only secrets and e-mail addresses are masked."""
LABELS = {
    "EMAIL_ADDRESS": "email",
    "PHONE_NUMBER": "phone",
    "CREDIT_CARD": "credit_card",
    "IBAN_CODE": "iban",
    "IP_ADDRESS": "ip_address",
    "US_SSN": "us_ssn",
}


def draw(text: str, generator: random.Random) -> tuple[str, int, int]:
    """(the text with values, start and end of what must be masked, both 0 for a trap)."""
    filled = re.sub(
        r"\{\{|\}\}|\{([^{}]+)\}", lambda match: _value(match[1], generator) if match[1] else match[0][0], text
    )
    start, end = filled.find("⟦"), filled.find("⟧")
    return filled.replace("⟦", "").replace("⟧", ""), max(start, 0), max(end - 1, 0)


def _value(form: str, generator: random.Random) -> str:
    def some(kind: str, count: int) -> str:
        return "".join(generator.choice(CLASSES[kind]) for _ in range(count))

    name, _, grouping = form.partition(" by")
    if name in CARDS:
        return _grouped(_card(*CARDS[name], generator), grouping or "")
    if name.startswith("iban "):
        country, pattern = name[5:7], name[7:]
        body = "".join(
            some("A" if kind == "A" else kind, int(count)) for count, kind in re.findall(r"(\d+)([dAc])", pattern)
        ).upper()
        check = 98 - int("".join(str(int(character, 36)) for character in body + country + "00")) % 97
        return _grouped(f"{country}{check:02d}{body}", grouping)
    if name.startswith("ssn"):
        return name[3:].join(
            (str(generator.randint(100, 665)), str(generator.randint(10, 99)), str(generator.randint(1000, 9999)))
        )
    if name == "ip":
        return ".".join(
            str(generator.choice(part)) for part in (range(80, 99), range(100, 250), range(256), range(1, 255))
        )
    if name.startswith("p"):
        count = int(name[1:])
        fixed = [some("l", 1), some("A", 1).upper(), some("d", 1), generator.choice(PASSWORD_SIGNS)]
        value = [*fixed, *some("a", count - len(fixed))]
        generator.shuffle(value)
        return "".join(value)
    return some(name[0], int(name[1:] or 1))


def _card(prefix: str, length: int, generator: random.Random) -> str:
    body = prefix + "".join(generator.choice(string.digits) for _ in range(length - len(prefix) - 1))
    doubled = [sum(divmod(2 * int(digit), 10)) for digit in body[::-2]]
    return body + str(-(sum(doubled) + sum(map(int, body[-2::-2]))) % 10)


def _grouped(value: str, grouping: str) -> str:
    """`4-`: groups of four with hyphens; `465 `: groups of four, six and five with blanks."""
    if not grouping:
        return value
    sizes, sign = [int(size) for size in re.findall(r"\d", grouping)], re.sub(r"\d", "", grouping)
    sizes = sizes if len(sizes) > 1 else sizes * (len(value) // sizes[0] + 1)
    parts, at = [], 0
    for size in sizes:
        parts.append(value[at : at + size])
        at += size
    return sign.join(part for part in parts if part)


def interval(hits: int, count: int) -> tuple[float, float]:
    """Wilson's, 95 %."""
    share, z = hits / count, 1.96
    middle, width = (
        share + z * z / (2 * count),
        z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)),
    )
    return tuple(round((middle + sign * width) / (1 + z * z / count), 3) for sign in (-1, 1))  # pyright: ignore[reportReturnType]


def missed_forms(forms: Sequence[Form], seed: int = SEED) -> list[Form]:
    """Forms of which a drawn value stays, at least in part."""
    generator, missed = random.Random(seed), []
    for kind, language, text in forms:
        for _ in range(DRAWS):
            drawn, start, end = draw(text, generator)
            spans = find_spans([drawn], KINDS, [language])[0]
            if not any(name == kind and first <= start and last >= end for name, first, last in spans):
                missed.append((kind, language, drawn))
                break
    return missed


def sprung_traps(traps: Sequence[Trap], seed: int = SEED) -> list[tuple[str, str]]:
    """(kind, trap) of those where something is masked."""
    generator, sprung = random.Random(seed), []
    for language, text in traps:
        for _ in range(DRAWS):
            drawn, _, _ = draw(text, generator)
            spans = find_spans([drawn], KINDS, [language])[0]
            if spans:
                sprung.append((spans[0][0], drawn))
                break
    return sprung


def labelled_sentences() -> dict[str, Any]:
    """Recall and precision on the labelled spans of kinds that have a form."""
    records = _records("safety/pii_spans")
    counts: Counter[str] = Counter()
    for record, spans in zip(records, find_spans([record["text"] for record in records]), strict=True):
        labelled = {
            (LABELS[span["type"]], span["start"], span["end"]) for span in record["spans"] if span["type"] in LABELS
        }
        counts.update(labelled=len(labelled), detected=len(spans), both=len(labelled & set(spans)))
    return {
        **counts,
        "recall": interval(counts["both"], counts["labelled"]),
        "precision": interval(counts["both"], counts["detected"]),
    }


def hits_in_real_text() -> dict[str, dict[str, float]]:
    """What is masked per million characters, by kind; nobody has looked at each."""
    table = {}
    for name, (path, is_code) in REAL_TEXTS.items():
        records = _records(path)
        texts = [
            next(record[field] for field in ("text", "content", "patch", "problem") if field in record)
            for record in records
        ]
        languages = [record.get("lang", "en") for record in records]
        started = time.process_time()
        spans = find_spans(texts, CODE_KINDS if is_code else KINDS, languages)
        seconds, millions = time.process_time() - started, sum(map(len, texts)) / 1e6
        counts = Counter(kind for own in spans for kind, _, _ in own)
        table[name] = {"millions": round(millions, 2), "seconds_per_million": round(seconds / millions, 3), **counts}
    return table


def _records(name: str) -> list[dict[str, Any]]:
    with gzip.open(DATA / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def main() -> None:
    """Print what is missed and the JSON line."""
    shares = {}
    for name, forms, traps in (("developed", DEVELOPED, DEVELOPED_TRAPS), ("unseen", UNSEEN, UNSEEN_TRAPS)):
        missed, sprung = missed_forms(forms), sprung_traps(traps)
        for row in (*missed, *sprung):
            print(name, *row, sep="\t")
        shares[name] = {
            "met": len(forms) - len(missed),
            "forms": len(forms),
            "recall": interval(len(forms) - len(missed), len(forms)),
            "sprung": len(sprung),
            "traps": len(traps),
            "false_alarms": interval(len(sprung), len(traps)),
        }
        print(name, shares[name], flush=True)
    report(
        "personal_data",
        ours=round(shares["unseen"]["met"] / shares["unseen"]["forms"], 3),
        unit="share of unseen forms",
        peer=None,
        peer_name="",
        shares=shares,
        labelled=labelled_sentences(),
        real_text=hits_in_real_text(),
    )


if __name__ == "__main__":
    main()
