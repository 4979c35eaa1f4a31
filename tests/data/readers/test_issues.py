"""Threads of issues and pull requests, as gh, GitHub's REST API and the-stack-github-issues give them."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infra.machine.spark import spark_session
from tasks.data.filtering.heuristics import filter_batches, flat_bounds, name_reasons
from tasks.data.filtering.score_bounds import score_reason
from tasks.data.readers.issue_threads import thread_records
from tasks.data.readers.json_objects import json_objects
from tasks.data.readers.source_bytes import BLOCK_BYTES, HashingReader
from tasks.data.sources.ingest_documents import ingest_documents
from tasks.data.sources.list_sources import list_sources
from tests.support.data_inputs import RECIPE, RESOURCES, compute, prose, rows, write_jsonl

MANIFEST = "version: 1\nentries:\n  - {files: '**', role: pretrain, format: issues, licence: CC0-1.0}\n"
INGEST = RECIPE.ingest.model_copy(update={"max_source_bytes": 10**9})
LENIENT = INGEST.model_copy(update={"max_rejected_share": 1.0})
ADDRESS = "https://github.com/owner/tools"


def account(login: str, is_bot: bool = False) -> dict[str, Any]:
    return {"id": "MDQ6", "is_bot": is_bot, "login": login, "name": "A Person"}


def comment(login: str, body: str, created: str, **more: Any) -> dict[str, Any]:
    """As gh prints it: of its author the login alone."""
    return {
        "author": {"login": login},
        "authorAssociation": "NONE",
        "body": body,
        "createdAt": created,
        "isMinimized": False,
        **more,
    }


GH_ISSUE = {
    "number": 7,
    "title": "Crash on  an empty\tfile",
    "state": "CLOSED",
    "stateReason": "NOT_PLANNED",
    "url": f"{ADDRESS}/issues/7",
    "author": account("Alice"),
    "body": 'It crashes.\r\n\r\n```\r\nError: {"a"}\r\n```\r\n',
    "createdAt": "2024-01-01T10:00:00Z",
    "labels": [{"id": "LA", "name": "bug", "description": "", "color": "d73a4a"}, {"id": "LB", "name": "help wanted"}],
    "comments": [
        comment(
            "bob-b",
            "Thanks @alice, see github.com/alice. Not @alicent, not a@alice.org, not @alice/package.",
            "2024-01-03T10:00:00Z",
        ),
        comment("carol", "I see it too, [@Bob-B](https://github.com/bob-b).", "2024-01-02T10:00:00+02:00"),
        comment("github-actions", "This issue is stale.", "2024-02-01T10:00:00Z"),
        comment("spammer", "Buy this.", "2024-02-02T10:00:00Z", isMinimized=True, minimizedReason="spam"),
        comment("Alice", "", "2024-02-03T10:00:00Z"),
        comment("", "I deleted my account.", "2024-02-04T10:00:00Z"),
    ],
}
GH_TEXT = """Issue: Crash on an empty file
State: closed (not planned)
Labels: bug, help wanted

username_0:
It crashes.

```
Error: {"a"}
```

username_1:
I see it too, [@username_2](https://github.com/username_2).

username_2:
Thanks @username_0, see github.com/username_0. Not @alicent, not a@alice.org, not @alice/package.

username_3:
I deleted my account.
"""
GH_PULL = {
    "number": 8,
    "title": "Bump x",
    "state": "MERGED",
    "url": f"{ADDRESS}/pull/8",
    "author": account("app/dependabot", True),
    "body": "Bumps x from 1 to 2.",
    "mergedAt": "2024-01-05T00:00:00Z",
    "labels": [],
    "comments": [comment("carol", "Second.", "2024-01-03T00:00:00Z")],
    "reviews": [
        {"author": {"login": "dave"}, "body": "First.", "submittedAt": "2024-01-02T00:00:00Z", "state": "APPROVED"},
        {"author": {"login": "carol"}, "body": "", "submittedAt": "2024-01-04T00:00:00Z", "state": "APPROVED"},
    ],
}
PULL_TEXT = "Pull request: Bump x\nState: merged\n\nusername_0:\nFirst.\n\nusername_1:\nSecond.\n"
REST_ISSUE = {
    "url": "https://api.github.com/repos/owner/tools/issues/9",
    "html_url": f"{ADDRESS}/issues/9",
    "id": 99,
    "number": 9,
    "title": "How?",
    "user": {"login": "eve", "id": 5, "type": "User"},
    "labels": [],
    "state": "open",
    "state_reason": None,
    "comments": 3,
    "body": "How does it work, @frank?",
    "created_at": "2024-01-01T00:00:00Z",
}
REST_TEXT = "Issue: How?\nState: open\n\nusername_0:\nHow does it work, @frank?\n"
JOINED = REST_ISSUE | {
    "id": 100,
    "html_url": f"{ADDRESS}/pull/10",
    "pull_request": {"url": "...", "merged_at": None},
    "state": "closed",
    "comments": [
        {"user": {"login": "ci[bot]", "type": "Bot"}, "body": "Passed.", "created_at": "2024-01-01T01:00:00Z"},
        {"user": None, "body": "A ghost's.", "created_at": "2024-01-02T00:00:00Z"},
        {"user": {"login": "eve", "type": "User"}, "body": "Mine.", "created_at": "2024-01-01T02:00:00Z"},
    ],
}
JOINED_TEXT = (
    "Pull request: How?\nState: closed\n\nusername_0:\nHow does it work, "
    "@frank?\n\nusername_0:\nMine.\n\nusername_1:\nA ghost's.\n"
)
STACK = {
    "repo": "owner/tools",
    "org": "owner",
    "issue_id": 5,
    "issue_number": 11,
    "pull_request": None,
    "events": [
        {
            "action": "opened",
            "author": "mona",
            "comment_id": None,
            "datetime": 1619096777000,
            "masked_author": "username_1",
            "text": "Hello username_2.",
            "title": "Masked",
            "type": "issue",
        },
        {
            "action": "created",
            "author": "lisa",
            "comment_id": 2.0,
            "datetime": 1619096779000,
            "masked_author": "username_2",
            "text": "So.",
            "title": None,
            "type": "comment",
        },
        {
            "action": "created",
            "author": "stale[bot]",
            "comment_id": 1.0,
            "datetime": 1619096778000,
            "masked_author": "username_0",
            "text": "Stale.",
            "title": None,
            "type": "comment",
        },
        {
            "action": "closed",
            "author": "mona",
            "comment_id": None,
            "datetime": 1619096780000,
            "masked_author": "username_1",
            "text": "",
            "title": None,
            "type": "issue",
        },
    ],
}
STACK_TEXT = "Issue: Masked\nState: closed\n\nusername_1:\nHello username_2.\n\nusername_2:\nSo.\n"


def ingest(directory: Path, root: Path, recipe=INGEST):
    (directory / "glm46-data.yaml").write_text(MANIFEST)
    return compute(ingest_documents, root, sources=list_sources(directory), recipe=recipe, resources=RESOURCES)


@pytest.fixture(scope="module")
def threads(tmp_path_factory):
    directory = tmp_path_factory.mktemp("threads") / "data"
    directory.mkdir()
    (directory / "gh.json").write_text(json.dumps([GH_ISSUE, GH_PULL], indent=2))
    (directory / "pages.json.gz").write_bytes(gzip.compress((json.dumps([REST_ISSUE]) + json.dumps([JOINED])).encode()))
    write_jsonl(directory / "lines.jsonl.gz", [STACK])
    unmasked = {
        **STACK,
        "events": [{key: value for key, value in event.items() if key != "masked_author"} for event in STACK["events"]],
    }
    pq.write_table(
        pa.Table.from_pylist([STACK | {"content": "x"}, unmasked | {"issue_id": 6}]), directory / "rows.parquet"
    )
    return directory, ingest(directory, directory.parent)


def test_every_shape_becomes_the_written_text_with_its_address_url_and_licence(threads):
    directory, result = threads
    documents = {(row["source"], row["offset"]): row for row in rows(result, "documents/*.parquet")}
    gh = (directory / "gh.json").read_bytes()
    pages = gzip.decompress((directory / "pages.json.gz").read_bytes())
    second = {"gh.json": gh.index(b'{\n    "number": 8'), "pages.json.gz": pages.index(b'{"url"', 5)}
    unmasked = STACK_TEXT.replace("username_1:", "username_0:").replace("username_2:", "username_1:")
    expected = {
        ("gh.json", gh.index(b"{")): (GH_TEXT, f"{ADDRESS}/issues/7"),
        ("gh.json", second["gh.json"]): (PULL_TEXT, f"{ADDRESS}/pull/8"),
        ("pages.json.gz", 1): (REST_TEXT, f"{ADDRESS}/issues/9"),
        ("pages.json.gz", second["pages.json.gz"]): (JOINED_TEXT, f"{ADDRESS}/pull/10"),
        ("lines.jsonl.gz", 0): (STACK_TEXT, f"{ADDRESS}/issues/11"),
        ("rows.parquet", 0): (STACK_TEXT, f"{ADDRESS}/issues/11"),
        ("rows.parquet", 1): (unmasked, f"{ADDRESS}/issues/11"),
    }
    assert {address: (row["text"], row["url"]) for address, row in documents.items()} == expected
    assert {(row["domain"], row["licence"], row["repository"]) for row in documents.values()} == {
        ("issue", "CC0-1.0", "owner/tools")
    }


def test_turns_of_programs_and_hidden_ones_are_counted_with_their_number_and_are_no_damage(threads):
    directory, result = threads
    assert result.record.rejected == {"bot_turn": 6, "hidden_turn": 1}
    (hidden,) = [row for row in rows(result, "rejected.parquet") if row["reason"] == "hidden_turn"]
    first = (directory / "gh.json").read_bytes().index(b"{")
    assert (hidden["source"], hidden["offset"], hidden["detail"]) == ("gh.json", first, "turn 4 of the thread")


def parsed(record: object, role: str = "pretrain") -> list[Any]:
    data = json.dumps(record).encode() + b"\n"
    source = {"name": "a.jsonl", "format": "issues", "role": role, "domain": "issue", "text": ()}
    return list(thread_records(source, HashingReader(io.BytesIO(data)), 10**6))


@pytest.mark.parametrize(
    ("record", "reason", "detail"),
    [
        (
            {"body": "A comment.", "issue_url": "u"},
            "no_thread",
            "neither title, a string, nor events: comments must lie in the record of their",
        ),
        (
            {"title": "T", "comments": {"nodes": []}},
            "no_thread",
            "comments is dict, not a list of objects; fields are comments, title",
        ),
        ({"title": "T", "comments": ["text"]}, "no_thread", "comments[0] is str, not an object"),
        ({"title": "T", "body": {"text": "x"}}, "no_thread", "body in the record is dict, not a string"),
        ({"title": 5, "body": "x"}, "no_thread", "neither title, a string, nor events"),
        ({"events": "x"}, "no_thread", "events is str, not a list of objects"),
        ({"title": "T", "body": " \n", "comments": []}, "no_turns", "nobody wrote a text in it but programs"),
        ({"title": "T", "events": []}, "no_turns", "nobody wrote a text in it but programs"),
        ([1], "broken_json", "a record must be an object, is list"),
    ],
)
def test_what_is_no_thread_is_kept_aside_by_reason(record, reason, detail):
    (rejected,) = parsed(record)
    assert rejected.text is None and rejected.reason == reason and rejected.detail.startswith(detail)


@pytest.mark.parametrize(
    ("author", "is_program"),
    [
        ({"login": "app/renovate", "is_bot": True}, True),
        ({"login": "own", "is_bot": True}, True),
        ({"login": "own", "type": "Bot"}, True),
        ({"login": "own[bot]"}, True),
        ({"login": "Dependabot"}, True),
        ("stale[bot]", True),
        ({"login": "abbot", "is_bot": False, "type": "User"}, False),
        ("robot", False),
        (None, False),
    ],
)
def test_programs_are_recognized_by_their_marks_and_names(author, is_program):
    records = parsed({"title": "T", "body": "Text.", "author": author})
    assert [record.reason for record in records] == (["no_turns", "bot_turn"] if is_program else [""])


def test_a_thread_of_evaluation_is_its_record_and_one_that_comes_twice_is_named(tmp_path):
    (item,) = parsed(GH_ISSUE, "evaluation")
    assert json.loads(item.text) == GH_ISSUE and item.markup == "json"
    write_jsonl(tmp_path / "data" / "a.jsonl", [GH_ISSUE, GH_ISSUE, GH_PULL])
    result = ingest(tmp_path / "data", tmp_path, LENIENT)
    assert result.record.num_documents == 2 and result.record.rejected["duplicate_id"] == 1


def test_a_parquet_file_without_threads_stops_the_run_by_name(tmp_path):
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "data" / "a.parquet")
    with pytest.raises(
        ValueError, match=r"a\.parquet has neither a column title nor events, but text: threads cannot be read from it"
    ):
        ingest(tmp_path / "data", tmp_path)


def test_threads_are_held_to_the_word_counts_and_to_toxicity_alone():
    bounds = flat_bounds(RECIPE.filter.heuristics)
    log = "".join(f"#{n} 0x{n:08x} {{}} frame\n" for n in range(60))
    assert name_reasons([log], ["en"], ["web"], bounds) != [""]
    identity = {"id": ["a", "b"], "collection": ["x", "x"]}
    columns = identity | {"domain": ["issue", "issue"], "language": ["en", "en"], "text": [log, "two words"]}
    batch = pa.RecordBatch.from_pydict(
        columns | {"score_reason": ["", ""], "millionths": pa.array([None, None], pa.int32())}
    )
    (verdicts,) = filter_batches(iter([batch]), bounds)
    assert verdicts.column("reason").to_pylist() == ["", "too_few_words"]
    scored = (
        "domain string, language string, language_score double, toxicity double, perplexity_percentile double, "
        "factuality double"
    )
    given = [(domain, "xx", 0.0, toxicity, 1.0, 0.0) for domain in ("issue", "commit") for toxicity in (0.0, 1.0)]
    frame = spark_session(RESOURCES).createDataFrame(given, scored)
    assert [row[0] for row in frame.select(score_reason(RECIPE.filter.scores)).collect()] == ["", "toxic", "", ""]


def read(data: bytes, name: str = "a.json", max_bytes: int = 10**6) -> list[tuple[int, Any]]:
    lines = json_objects(name, HashingReader(io.BytesIO(data)), max_bytes)
    return [(line.offset, line.reason or line.record) for line in lines]


class Drops(io.BytesIO):
    """Gives a few bytes at a time, so that every offset of a file is once the end of a block."""

    def __init__(self, data: bytes, size: int) -> None:
        super().__init__(data)
        self._size = size

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(self._size)


OBJECTS = [
    {"a": "\\", "b": '"', "c": '\\\\"{', "d": {"e": [{}, {"f": "}{]["}]}},
    {},
    {"ü": "日本\u2028", "n": [1.5, None, True, -2e9]},
    {"x": "\\" * 7 + '"'},
]
LAYOUTS = {
    "array": json.dumps(OBJECTS),
    "indented": json.dumps(OBJECTS, indent=1, ensure_ascii=False),
    "lines": "\n".join(map(json.dumps, OBJECTS)),
    "pages": json.dumps(OBJECTS[:2]) + json.dumps(OBJECTS[2:]),
    "slurped": json.dumps([OBJECTS[:3], [], OBJECTS[3:]]),
    "objects": "\n\n".join(json.dumps(item, indent=2) for item in OBJECTS),
    "marked": "\ufeff" + json.dumps(OBJECTS),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_objects_are_those_of_the_json_reader_wherever_a_block_ends(layout, size):
    data = LAYOUTS[layout].encode()
    lines = list(json_objects("a.json", HashingReader(Drops(data, size)), 10**6))
    assert [line.record for line in lines] == OBJECTS
    for line in lines:
        assert json.JSONDecoder().raw_decode(data[line.offset :].decode())[0] == line.record


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", []),
        (b"[]\n", []),
        (b"<html>{}</html>", [(0, "broken_json")]),
        (b'[{"a": 1}, "text", {"b": 2}]', [(1, {"a": 1}), (11, "broken_json")]),
        (b'[{"a": 1}, {"b": "x\ny"}, {"c": 3}]', [(1, {"a": 1}), (11, "broken_json")]),
        (b'[{"a": 1}, {"b": ', [(1, {"a": 1}), (11, "broken_json")]),
        (b'[{"a": 1}}, {"b": 2}]', [(1, {"a": 1}), (9, "broken_json")]),
        (b'[{"a": nul}, {"b": 2}]', [(1, "broken_json"), (13, {"b": 2})]),
        (b'[{"a": "\xff"}, {"b": 2}]', [(1, "not_utf8"), (13, {"b": 2})]),
        (b'[{"a": "\\ud800"}, {"b": 2}]', [(1, "not_utf8"), (18, {"b": 2})]),
    ],
)
@pytest.mark.parametrize("size", [1, 1000])
def test_broken_json_is_named_by_its_offset_and_the_objects_before_it_stay(data, expected, size):
    lines = json_objects("a.json", HashingReader(Drops(data, size)), 10**6)
    assert [(line.offset, line.reason or line.record) for line in lines] == expected


def test_an_object_above_the_bound_costs_itself_and_is_not_held():
    large = json.dumps({"a": prose(1) + '\\"' * (3 * BLOCK_BYTES)}).encode()
    data = b"[" + large + b', {"b": 1}]'
    assert read(data, max_bytes=BLOCK_BYTES) == [(1, "record_too_long"), (len(large) + 3, {"b": 1})]
    tracemalloc.start()
    read(data, max_bytes=BLOCK_BYTES)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 * BLOCK_BYTES < len(large)
    assert [reason for _, reason in read(data, max_bytes=len(large))] != ["record_too_long", {"b": 1}]


@pytest.mark.parametrize(("compress", "ending"), [(gzip.compress, ".gz"), (bz2.compress, ".bz2")])
def test_a_cut_file_is_rejected_as_truncated(compress, ending):
    data = compress(json.dumps([{"number": n, "text": prose(n)} for n in range(300)]).encode())
    lines = read(data[: len(data) // 2], "a.json" + ending)
    assert lines[-1][1] == {".gz": "truncated_gzip", ".bz2": "truncated_bz2"}[ending]
