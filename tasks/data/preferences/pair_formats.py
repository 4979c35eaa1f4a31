"""Converts the layouts of preference pairs in public files to one: a shared prompt, and two answers to it.

It reads `chosen` and `rejected`: answers to a `prompt`, an `instruction` + `input`, `conversations` or `messages`;
whole conversations with a shared beginning, as lists of messages or as transcripts ("\\n\\nHuman: ...\\n\\nAssistant:
..."); and `instruction` with two `output`s, the better one first. The functions are pure and work per record.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.data.chats.chat_formats import MalformedChatError, conversations_of

if TYPE_CHECKING:
    from model.text.chat_template import Message

Record = dict[str, Any]
TRANSCRIPT_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")
TRANSCRIPT_ROLES = {"Human": "user", "Assistant": "assistant"}


class Pair(NamedTuple):
    prompt: list[Message]
    chosen: Message
    rejected: Message
    tools: list[Record]


def pair_of(record: Record) -> Pair:
    """The pair of one record. Raises MalformedChatError for a record that is none."""
    chosen, rejected = _answers(record)
    (better, tools), (worse, _) = _conversation(record, chosen), _conversation(record, rejected)
    if better[:-1] != worse[:-1]:
        raise MalformedChatError("no_shared_prompt", f"{len(better) - 1} and {len(worse) - 1} turns before the answers")
    if better[-1] == worse[-1]:
        raise MalformedChatError("equal_answers", better[-1]["content"][:60])
    return Pair(better[:-1], better[-1], worse[-1], tools)


def _answers(record: Record) -> tuple[object, object]:
    """What stands for the preferred and for the rejected answer."""
    if "chosen" in record and "rejected" in record:
        return record["chosen"], record["rejected"]
    outputs = record.get("output")
    if isinstance(outputs, list) and len(outputs) == 2:
        return outputs[0], outputs[1]
    raise MalformedChatError("no_pair", f"fields are {', '.join(sorted(map(str, record)))}")


def _conversation(record: Record, answer: object) -> tuple[list[Message], list[Record]]:
    """The whole conversation that ends with this answer."""
    lists = (record[key] for key in ("conversations", "messages", "prompt") if isinstance(record.get(key), list))
    asked = next(lists, _asked(record))
    if isinstance(answer, list):
        turns = answer if _begins_with(answer, asked) else [*asked, *answer]
    elif isinstance(answer, str):
        turns = [*asked, {"role": "assistant", "content": answer}] if asked else _transcript(answer)
    else:
        turns = [*asked, answer]
    if not turns or not _answers_in_text(turns[-1]):
        raise MalformedChatError("no_answer", "the last turn is not the assistant's, or it is empty")
    shared = {key: record[key] for key in ("tools", "system") if key in record}
    ((messages, tools),) = conversations_of({**shared, "messages": turns})
    return messages, tools


def _begins_with(answer: list[object], turns: list[Record]) -> bool:
    return answer[: len(turns)] == turns


def _asked(record: Record) -> list[Record]:
    """The user's turn of a record with `prompt` or `instruction` + `input`; none where it has neither."""
    for key in ("prompt", "instruction", "question"):
        if isinstance(record.get(key), str) and record[key].strip():
            given = record.get("input") if key == "instruction" else None
            parts = [record[key].strip(), given.strip() if isinstance(given, str) else ""]
            return [{"role": "user", "content": "\n\n".join(filter(None, parts))}]
    return []


def _transcript(text: str) -> list[Record]:
    """The turns of a text with the speakers "Human:" and "Assistant:"."""
    parts = TRANSCRIPT_TURN.split(text)
    if len(parts) < 3 or parts[0].strip():
        raise MalformedChatError("no_shared_prompt", f"an answer without a prompt: {text[:60]!r}")
    return [
        {"role": TRANSCRIPT_ROLES[speaker], "content": said.strip()}
        for speaker, said in zip(parts[1::2], parts[2::2], strict=True)
    ]


def _answers_in_text(turn: object) -> bool:
    """Whether a turn is the assistant's and says something."""
    if not isinstance(turn, dict) or turn.get("role", turn.get("from")) not in ("assistant", "gpt"):
        return False
    said = turn.get("content", turn.get("value"))
    return bool(said.strip()) if isinstance(said, str) else bool(said or turn.get("tool_calls"))
