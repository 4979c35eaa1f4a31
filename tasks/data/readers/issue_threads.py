"""Reads threads of issues and pull requests as one document each. Runs in executors: imports no Spark.

A record is what `gh issue list --json` and `gh pr list --json` print, what GitHub's REST API answers with the
comments put into the record, or a list of `events` as in the-stack-github-issues. Speakers become username_0,
username_1 in the order in which they first speak, also where a text calls them (@name). Turns of programs are left
out, as for StarCoder (arXiv 2305.06161, section 3.3).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tasks.data.readers.json_lines import JsonLine, json_lines
from tasks.data.readers.json_objects import json_objects
from tasks.data.readers.parsed_records import Parsed, rejection
from tasks.data.readers.source_bytes import stem_of
from tasks.data.readers.table_records import parquet_lines, record_of

if TYPE_CHECKING:
    from tasks.data.readers.source_bytes import HashingReader

ISSUES = "issues"
TURN_LISTS = ("comments", "reviews", "review_comments")
TIMES = ("createdAt", "created_at", "submittedAt", "submitted_at", "datetime")
COLUMNS = (
    "title",
    "body",
    "state",
    "stateReason",
    "state_reason",
    "labels",
    "author",
    "user",
    "url",
    "html_url",
    "id",
    "issue_id",
    "number",
    "issue_number",
    "repo",
    "pull_request",
    "merged_at",
    "mergedAt",
    "events",
    "license",
    "licence",
    *TURN_LISTS,
    *TIMES,
)
BOT_TURN, HIDDEN_TURN, NO_TURNS, NO_THREAD = "bot_turn", "hidden_turn", "no_turns", "no_thread"
APPS = frozenset(
    (
        "allcontributors",
        "cla-assistant",
        "claassistant",
        "codecov",
        "codecov-commenter",
        "codecov-io",
        "copilot-pull-request-reviewer",
        "copilot-swe-agent",
        "coveralls",
        "dependabot",
        "dependabot-preview",
        "github-actions",
        "greenkeeper",
        "linux-foundation-easycla",
        "mergify",
        "netlify",
        "pre-commit-ci",
        "renovate",
        "sonarcloud",
        "sonarqubecloud",
        "stale",
        "vercel",
    )
)
"""Logins of programs: gh marks them as authors of threads, but not as authors of comments."""
STATES = {"opened": "open", "reopened": "open", "closed": "closed", "merged": "merged"}
"""State of a thread by the action of an event."""
ADDRESS = re.compile(r"^https?://[^/]+/([^/]+/[^/]+)/(?:issues|pull)/\d+$")
CALLED = re.compile(r"[@/](?:(?<=github\.com/)|(?<=@)(?<![\w./@-].))([A-Za-z\d](?:[A-Za-z\d_-]*[A-Za-z\d])?)(?![\w/-])")
"""A speaker's name in a text. The pattern begins with a set of characters, so that `re` skips to it quickly."""
MASKED = re.compile(r"username_\d+")

Record = dict[str, Any]
"""An object of a user's file, which may hold any fields, or the row of its source."""


class _MalformedThreadError(Exception):
    """Why a record is no thread."""


@dataclass(frozen=True)
class _Turn:
    login: str
    """Empty for a deleted account."""
    masked: str
    """The name by which the source replaced the login."""
    reason: str
    """Why the turn is left out; empty for one that is kept."""
    time: float | None
    text: str


def thread_records(source: Record, file: HashingReader, max_record_bytes: int) -> Iterator[Parsed]:
    """A file's threads: the lines of .jsonl, the rows of .parquet, else the objects of its JSON, each with its
    offset."""
    name, stem = source["name"], stem_of(source["name"])
    if stem.endswith(".parquet"):
        lines = parquet_lines(
            name, source["path"], source["sha256"], max_record_bytes, lambda names: _columns(source, names)
        )
    elif stem.endswith((".jsonl", ".ndjson")):
        lines = json_lines(name, file, max_record_bytes)
    else:
        lines = json_objects(name, file, max_record_bytes)
    for line in lines:
        yield from _thread_of(source, line)


def _columns(source: Record, names: list[str]) -> tuple[list[str], str]:
    if source["role"] == "evaluation" or {"title", "events"} & {*names}:
        return (names if source["role"] == "evaluation" else [name for name in names if name in COLUMNS]), ""
    return (
        [],
        f"{source['name']} has neither a column title nor events, but {', '.join(names)}: threads cannot be read from "
        f"it",
    )


def _thread_of(source: Record, line: JsonLine) -> Iterator[Parsed]:
    """The document, and a rejection for every turn that is not in it."""
    name, record = source["name"], line.record
    if record is None:
        yield rejection(name, line.offset, line.reason, line.detail)
    elif source["role"] == "evaluation":
        yield record_of(source, line.offset, record)
    else:
        try:
            turns = _turns_of(record)
            yield _document(name, line.offset, record, [turn for turn in turns if turn.text and not turn.reason])
        except _MalformedThreadError as error:
            yield rejection(name, line.offset, NO_THREAD, f"{error}; fields are {', '.join(sorted(record))}")
            return
        left_out = [(number, turn) for number, turn in enumerate(turns) if turn.text and turn.reason]
        yield from (
            rejection(name, line.offset, turn.reason, f"turn {number} of the thread") for number, turn in left_out
        )


def _document(name: str, offset: int, record: Record, turns: list[_Turn]) -> Parsed:
    if not turns:
        return rejection(name, offset, NO_TURNS, "nobody wrote a text in it but programs")
    number = record.get("number", record.get("issue_number"))
    url = next((record[key] for key in ("html_url", "url") if isinstance(record.get(key), str)), "")
    marks = ("pull_request", "reviews", "merged_at", "mergedAt")
    is_pull_request = "/pull/" in url or any(record.get(key) is not None for key in marks)
    if not url and isinstance(record.get("repo"), str) and isinstance(number, int):
        url = f"https://github.com/{record['repo']}/{'pull' if is_pull_request else 'issues'}/{number}"
    address = ADDRESS.match(url)
    repository = address[1] if address else record["repo"] if isinstance(record.get("repo"), str) else ""
    speakers = _speakers(turns)
    head = [f"{'Pull request' if is_pull_request else 'Issue'}: {_title_of(record)}", *_state_lines(record)]
    said = [f"{speakers[turn.masked or turn.login.lower()]}:\n{turn.text}" for turn in turns]
    text = "\n\n".join(["\n".join(head), *said]) + "\n"
    key = next((record[key] for key in ("id", "issue_id") if isinstance(record.get(key), str | int)), url)
    licence = next((record[key] for key in ("licence", "license") if isinstance(record.get(key), str)), "")
    return Parsed(name, offset, _rename(text, speakers), url, licence, None, repository, "", key=str(key))


def _turns_of(record: Record) -> list[_Turn]:
    """The opening text and the answers, in order of time; an answer without a time stays after its predecessor."""
    if record.get("events") is not None:
        answers = [_turn(event, "events", "text") for event in _objects(record, "events")]
        opening = answers[:0]
    elif isinstance(record.get("title"), str):
        opening = [_turn(record, "the record", "body")]
        answers = [
            _turn(turn, name, "body")
            for name in TURN_LISTS
            if not isinstance(record.get(name), int)
            for turn in _objects(record, name)
        ]
    else:
        raise _MalformedThreadError(
            "neither title, a string, nor events: comments must lie in the record of their thread"
        )
    times: list[float] = []
    for turn in answers:
        times.append(turn.time if turn.time is not None else times[-1] if times else float("-inf"))
    return opening + [answers[index] for index in sorted(range(len(answers)), key=lambda index: times[index])]


def _objects(record: Record, name: str) -> list[Record]:
    """A list of objects in a record; empty where it is absent or null."""
    items = record.get(name)
    if items is None:
        return []
    if not isinstance(items, list):
        raise _MalformedThreadError(f"{name} is {type(items).__name__}, not a list of objects")
    wrong = next((index for index, item in enumerate(items) if not isinstance(item, dict)), None)
    if wrong is not None:
        raise _MalformedThreadError(f"{name}[{wrong}] is {type(items[wrong]).__name__}, not an object")
    return items


def _turn(record: Record, where: str, field: str) -> _Turn:
    text = record.get(field)
    if text is not None and not isinstance(text, str):
        raise _MalformedThreadError(f"{field} in {where} is {type(text).__name__}, not a string")
    author = record.get("author", record.get("user"))
    account: Record = author if isinstance(author, dict) else {"login": author}
    login = account["login"] if isinstance(account.get("login"), str) else ""
    bare = login.lower().removeprefix("app/").removesuffix("[bot]")
    is_program = account.get("is_bot") is True or account.get("type") == "Bot" or bare != login.lower() or bare in APPS
    reason = BOT_TURN if is_program else HIDDEN_TURN if record.get("isMinimized") is True else ""
    masked = record.get("masked_author")
    is_masked = isinstance(masked, str) and MASKED.fullmatch(masked)
    time = next((record[key] for key in TIMES if record.get(key) is not None), None)
    lines = (text or "").replace("\r\n", "\n").strip("\n")
    return _Turn(login, str(masked) if is_masked else "", reason, _seconds(time), lines if lines.strip() else "")


def _seconds(time: object) -> float | None:
    """Seconds since 1970 of a time in ISO 8601, or in seconds or milliseconds since 1970; None for anything else."""
    try:
        if isinstance(time, int | float):
            return time / 1000 if time > 1e11 else float(time)
        moment = time if isinstance(time, datetime) else datetime.fromisoformat(str(time))
    except (ValueError, OverflowError):
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _speakers(turns: list[_Turn]) -> dict[str, str]:
    """username_N by the login in lower case, in the order of speaking. Names of this form in the source stay: texts
    hold them."""
    speakers = {turn.masked or turn.login.lower(): turn.masked for turn in turns}
    taken = {*speakers.values()}
    free = (name for number in range(2 * len(speakers)) if (name := f"username_{number}") not in taken)
    return {key: masked or next(free) for key, masked in speakers.items()}


def _rename(text: str, speakers: dict[str, str]) -> str:
    """The text with the speakers' new names where it calls them @name or links to their pages."""
    return CALLED.sub(lambda match: match[0][: -len(match[1])] + speakers.get(match[1].lower(), match[1]), text)


def _title_of(record: Record) -> str:
    titles = [record.get("title"), *(event.get("title") for event in record.get("events") or [])]
    return next((" ".join(title.split()) for title in titles if isinstance(title, str) and title.strip()), "(no title)")


def _state_lines(record: Record) -> list[str]:
    """The lines with a thread's state (open, or how it ended) and its labels."""
    done = [event.get("action") for event in record.get("events") or []]
    actions = [STATES[action] for action in done if isinstance(action, str) and action in STATES]
    state = record["state"].lower() if isinstance(record.get("state"), str) else actions[-1] if actions else ""
    linked = record.get("pull_request")
    if record.get("mergedAt") or record.get("merged_at") or (isinstance(linked, dict) and linked.get("merged_at")):
        state = "merged"
    reason = record.get("stateReason") or record.get("state_reason")
    if state == "closed" and isinstance(reason, str) and reason.lower() not in ("completed", ""):
        state += f" ({reason.lower().replace('_', ' ')})"
    given = record.get("labels")
    labels = (
        [label.get("name") if isinstance(label, dict) else label for label in given] if isinstance(given, list) else []
    )
    named = ", ".join(label for label in labels if isinstance(label, str))
    return [f"State: {state}"] * bool(state) + [f"Labels: {named}"] * bool(named)
