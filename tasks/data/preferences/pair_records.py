"""Reads source files of preference pairs, and makes pairs of verified problems, inside Spark executors.

Rows are kept, dropped or rejected, as those of conversations are (tasks/data/chats/chat_records.py). Overlap with
evaluation items is looked up in the text of prompt and both answers; personal data is masked after that, in all three
alike. A pair whose answers are equal after masking is dropped.

Problems give pairs where no file does: the right answer, and one that the verifier refuses: the result of another
operation on the same numbers, or one that is 1 to 9 off.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from tasks.data.chats.chat_records import (
    BATCH_ROWS,
    DROPPED,
    KEPT,
    REJECTED,
    TOO_LONG,
    Judging,
    source_rows,
    strings_of,
    to_json,
)
from tasks.data.chats.chat_tools import MalformedChatError
from tasks.data.preferences.pair_formats import NO_PREFERENCE, Pair, pair_of
from tasks.data.privacy.masked_chats import NUMBER_KINDS, mask_chats
from tasks.data.readers.json_lines import JsonLine
from tasks.data.records.documents import PAIR_COLUMNS, arrow_schema, content_digest, document_id, sampling_hash

if TYPE_CHECKING:
    import pyarrow as pa

    from model.text.chat_template import Message

PAIR_ROW_COLUMNS = (
    f"stream string, {PAIR_COLUMNS}, origin string, messages string, digest string, reason string, kept_id string, "
    "detail string"
)
"""origin: digest of the prompt; messages: the whole preferred conversation, by which near-duplicates are found."""
EQUAL_ANSWERS = "equal_answers"
PROBLEM = re.compile(r"What is (-?\d+) ([-+*]) (-?\d+)\?")
RESULTS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}

Row = dict[str, Any]


def read_pairs(batches: Iterator[pa.RecordBatch], judging: Judging) -> Iterator[pa.RecordBatch]:
    """Rows of PAIR_ROW_COLUMNS for source rows."""
    rows = (row for batch in batches for source in batch.to_pylist() for row in source_rows(source, _line_rows, _empty))
    yield from _judged(rows, judging)


def make_pairs(batches: Iterator[pa.RecordBatch], judging: Judging) -> Iterator[pa.RecordBatch]:
    """Rows of PAIR_ROW_COLUMNS for problems (source, id, question, answer); those that are no operation on two numbers
    give none."""
    rows = (row for batch in batches for problem in batch.to_pylist() for row in _made_rows(problem))
    yield from _judged(rows, judging)


def wrong_result(question: str, answer: str, identity: str) -> str | None:
    """A result that the problem does not have, decided by its id; None where the problem is not of this form or its
    answer is not verified."""
    problem = PROBLEM.fullmatch(question)
    if problem is None:
        return None
    a, sign, b = int(problem[1]), problem[2], int(problem[3])
    right, draw = RESULTS[sign](a, b), sampling_hash(identity)
    if answer != str(right):
        return None
    wrong = (
        RESULTS["-" if sign == "+" else "+"](a, b)
        if draw % 2
        else right + (draw // 2 % 9 + 1) * (1 - draw // 18 % 2 * 2)
    )
    return str(wrong if wrong != right else right + 1)


def _made_rows(problem: Row) -> Iterator[Row]:
    wrong = wrong_result(problem["question"], problem["answer"], problem["id"])
    if wrong is None:
        return
    said: list[Message] = [
        {"role": role, "content": text, "reasoning": "", "tool_calls": []}
        for role, text in (("user", problem["question"]), ("assistant", problem["answer"]), ("assistant", wrong))
    ]
    source = f"{problem['source']}-pairs"
    identity = {"id": document_id(source, problem["offset"], 0), "source": source, "offset": problem["offset"]}
    identity |= {"piece": 0, "collection": source, "licence": "", "kind": "math"}
    yield _pair_row(identity, Pair(said[:1], said[1], said[2], []))


def _line_rows(source: Row, line: JsonLine) -> Iterator[Row]:
    if line.record is None:
        yield _empty(source, line.offset, stream=REJECTED, reason=line.reason, detail=line.detail)
        return
    identity = {"id": document_id(source["name"], line.offset, 0), "source": source["name"], "offset": line.offset}
    identity |= {"piece": 0, **{key: source[key] for key in ("collection", "licence", "kind")}}
    try:
        yield _pair_row(identity, pair_of(line.record))
    except MalformedChatError as error:
        stream = DROPPED if error.reason == NO_PREFERENCE else REJECTED
        yield _empty(source, line.offset, stream=stream, reason=error.reason, detail=error.detail)
    except (UnicodeEncodeError, TypeError) as error:
        yield _empty(source, line.offset, stream=REJECTED, reason="not_utf8", detail=str(error)[:200])


def _pair_row(identity: Row, pair: Pair) -> Row:
    """A row with stream KEPT. Raises UnicodeEncodeError for characters that UTF-8 cannot encode."""
    return {**identity, "tools": to_json(pair.tools), **_texts(pair), "stream": KEPT, **dict.fromkeys(_LEFT_OUT, "")}


_LEFT_OUT = ("reason", "kept_id", "detail")


def _texts(pair: Pair) -> Row:
    prompt, chosen, rejected, tools = (to_json(part) for part in pair)
    return {
        "prompt": prompt,
        "chosen": chosen,
        "rejected": rejected,
        "num_bytes": sum(len(text.encode()) for text in (prompt, chosen, rejected, tools)),
        "origin": content_digest(prompt),
        "messages": to_json([*pair.prompt, pair.chosen]),
        "digest": content_digest(f"{prompt}\n{chosen}\n{rejected}\n{tools}"),
    }


def _judged(rows: Iterator[Row], judging: Judging) -> Iterator[pa.RecordBatch]:
    while waiting := list(islice(rows, BATCH_ROWS)):
        yield _batch(waiting, judging)


def _batch(rows: list[Row], judging: Judging) -> pa.RecordBatch:
    import pyarrow as pa

    index, protected = judging.items.value
    kept = [row for row in rows if row["stream"] == KEPT]
    # Both answers as turns of one conversation: what is masked in one is masked in the other.
    turns = [[*json.loads(row["prompt"]), json.loads(row["chosen"]), json.loads(row["rejected"])] for row in kept]
    texts = ["\n".join(strings_of(messages)) for messages in turns]
    for row, text, hit in zip(kept, texts, index.first_hits(texts).tolist(), strict=True):
        if len(text) > judging.max_chat_chars:
            row.update(stream=DROPPED, reason=TOO_LONG)
        elif hit >= 0:
            row.update(stream=DROPPED, reason=protected.reason(hit), kept_id=protected.ids[hit])
    masked = mask_chats(turns, [row["kind"] in NUMBER_KINDS for row in kept], judging.masked_kinds)
    for row, (messages, counts) in zip(kept, masked, strict=True):
        if counts:
            row.update(_texts(Pair(messages[:-2], messages[-2], messages[-1], json.loads(row["tools"]))))
            if row["chosen"] == row["rejected"] and row["stream"] == KEPT:
                row.update(stream=DROPPED, reason=EQUAL_ANSWERS)
    return pa.RecordBatch.from_pylist(rows, schema=arrow_schema(PAIR_ROW_COLUMNS))


def _empty(source: Row, offset: int, **values: str) -> Row:
    identity = {"id": document_id(source["name"], offset, 0), "source": source["name"], "offset": offset, "piece": 0}
    texts = ("prompt", "chosen", "rejected", "tools", "origin", "messages", "digest", *_LEFT_OUT)
    described = {key: source[key] for key in ("collection", "licence", "kind")}
    return {**identity, **described, "num_bytes": 0, **dict.fromkeys(texts, ""), **values}
