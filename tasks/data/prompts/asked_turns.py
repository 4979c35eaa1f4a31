"""Reads a prompt of several turns: what a system says, and earlier turns, before the question."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tasks.data.prompts.prompt_records import UnusablePromptError
from tasks.data.records.record_fields import SYSTEMS, with_turns
from tasks.data.seeds.seed_problems import QUESTION_FIELDS

if TYPE_CHECKING:
    from model.text.chat_template import Message
    from tasks.data.prompts.prompt_records import Given

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def turns_before(record: Given) -> tuple[list[Message], Given]:
    """(the turns before the question, the record with only the question as `prompt`). The turns are those of `prompt`,
    `messages` or BFCL's `question`, after what a field says as the system, unless they begin with that; a record with a
    question as text has none else. Raises UnusablePromptError for turns of tools, without text, and where the last one
    is not a user's."""
    record = with_turns(record)
    question = record.get("question")
    asked = question[0] if isinstance(question, list) and len(question) == 1 else None
    given = next((turns for turns in (record.get("prompt"), record.get("messages"), asked) if _is_turns(turns)), None)
    said = next((record[name].strip() for name in SYSTEMS if isinstance(record.get(name), str) and record[name]), "")
    system: list[Message] = [{"role": "system", "content": said}] if said else []
    if given is None or any(isinstance(record.get(name), str) for name in QUESTION_FIELDS):
        return system, record
    *before, last = [_message(turn) for turn in given]
    if last["role"] != "user":
        raise UnusablePromptError("no_question")
    told = [turn for turn in before if turn["content"]]
    return told if told[:1] == system else [*system, *told], {**record, "prompt": last["content"]}


def _is_turns(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(turn, dict) for turn in value)


def _message(turn: dict[str, Any]) -> Message:
    """An assistant's turn without its reasoning, of which the template keeps none before the question."""
    if turn.get("tool_calls") or turn.get("function_call") or turn.get("role") in ("tool", "function"):
        raise UnusablePromptError("turn_of_tools")
    role, content = ROLES.get(str(turn.get("role"))), turn.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    if role is None or not all(isinstance(text, str) for text in texts):
        raise UnusablePromptError("no_text_turn")
    text = "\n".join(map(str, texts))
    said = text.rpartition("</think>")[2] if role == "assistant" else text
    return {"role": role, "content": said.strip()}
