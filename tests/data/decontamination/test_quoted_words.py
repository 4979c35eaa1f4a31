"""Documents that escape characters outside the basic plane are compared, and their shared words can be stored."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pyarrow as pa
import pytest

from tasks.data.decontamination.overlap import MIN_WORDS_OF_TEXT, ProtectedTexts, Protection, build_index, find_overlaps
from tasks.data.decontamination.quoted_words import PADDING, normalise
from tests.support.data_inputs import prose


@pytest.mark.parametrize(
    ("escaped", "plain"),
    [
        (r"a \ud83d\ude00 b", "a \U0001f600 b"),
        (r"a \uD83D\uDE00\ud83d\ude01", "a \U0001f600\U0001f601"),
        (r"a \ud83d b", "a \ufffd b"),
        (r"a \ude00\ud83d", "a \ufffd\ufffd"),
        (r"a \ud83d\ud83d\ude00", "a \ufffd\U0001f600"),
    ],
)
def test_an_escaped_pair_is_its_character_and_half_of_a_pair_is_replaced(escaped, plain):
    assert normalise([escaped]) == [f"{PADDING}{plain}{PADDING}"]


@pytest.mark.parametrize("mark", ["\U0001f600", r"\ud83d"])
def test_a_document_that_escapes_an_emoji_is_found_and_its_shared_words_are_stored(mark):
    before, after = prose(1, 6), prose(2, 6)
    item = f"{before} \U0001f600 {after}"
    index = build_index([ProtectedTexts([item], [0], Protection(MIN_WORDS_OF_TEXT, 13, False))], 10)
    text = json.dumps({"q": f"{before} {mark} {after}"}).replace(r"\\u", r"\u")
    batch = pa.RecordBatch.from_pydict({"id": ["a"], "text": [text]})
    (rows,) = find_overlaps(iter([batch]), SimpleNamespace(value=index))
    (row,) = rows.to_pylist()
    assert row["item"] == 0 and before.split()[0] in row["shared"]
