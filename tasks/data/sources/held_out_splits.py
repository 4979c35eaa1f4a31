"""Tells by their names the files of a dataset's test and validation splits, which must not be trained on."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tasks.data.readers.record_lines import TABLES
from tasks.data.readers.source_bytes import stem_of

TRAINING = frozenset({"train", "training"})
HELD_OUT = re.compile(r"(?:test|testing|validation|valid|val|dev|eval|evaluation|heldout|holdout)(?:set)?\d*")
WORD = re.compile(r"[^_.-]+")
SHARD = re.compile(r"\d+-of-\d+")


def is_held_out(name: str) -> bool:
    """Whether the file's name has a word for such a split, or a folder's name ends with one. The innermost name with
    such a word decides: a file `train` in a folder `dev` is for training."""
    *folders, file = (WORD.findall(part) for part in name.lower().split("/"))
    for words in (file, *(folder[-1:] for folder in reversed(folders))):
        if TRAINING.intersection(words):
            return False
        if any(HELD_OUT.fullmatch(word) for word in words):
            return True
    return False


def subject_of(name: str) -> str:
    """What the innermost name says besides the split and the shard: `anatomy` of `test/anatomy_test.csv` and of
    `anatomy/test-00000-of-00001.parquet`; empty where no name says anything."""
    *folders, file = name.split("/")
    stem = SHARD.sub("", file.partition(".")[0])
    for part in (stem, *reversed(folders)):
        words = [
            word for word in WORD.findall(part) if word.lower() not in TRAINING and not HELD_OUT.fullmatch(word.lower())
        ]
        if words:
            return "_".join(words)
    return ""


def held_out_names(formats: Mapping[str, str]) -> set[str]:
    """Those of a directory's files, by name and format, that are named as held out beside files to train on: tables
    beside any other table, .txt beside one of a training split. Names of code say nothing: its tests are code."""
    tables = {name for name, form in formats.items() if form in TABLES}
    texts = {name for name in formats if stem_of(name).endswith(".txt")}
    beside = (
        (tables, not all(map(is_held_out, tables))),
        (texts, any(TRAINING.intersection(WORD.findall(name.lower().rpartition("/")[2])) for name in texts)),
    )
    return {name for names, is_beside in beside if is_beside for name in names if is_held_out(name)}
