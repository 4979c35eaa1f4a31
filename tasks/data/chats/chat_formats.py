"""Converts the formats of conversations in public files to one: messages as the chat template renders them.

It reads `messages`, `conversation` or `history` (role, content), `conversations` (from, value), `messages_display`
(`user: ...` lines), `instruction` + `instances`, and a question and its answer (QUESTIONS, ANSWERS), with what was said
before as `history`. The functions are pure and work per record.
"""

from __future__ import annotations

import json
import re
import reprlib
from itertools import groupby
from typing import Any

from model.text.chat_template import Message, ToolCall
from tasks.data.readers.json_lines import MAX_DEPTH, is_deep

Record = dict[str, Any]
Conversation = tuple[list[Message], list[Record]]
"""(messages, tools)"""

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
}
"""Roles by their names in lower case."""
CALL_ROLES = ("function_call", "tool_call")
TURN_LISTS = ("messages", "conversations", "conversation", "history")
QUESTIONS = ("instruction", "prompt", "question", "query", "problem", "input")
ANSWERS = ("output", "response", "answer", "completion", "solution")
CONTEXTS = ("input", "context")
"""Fields of an instruction's input."""
SYSTEMS = ("system", "system_prompt")
PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "reasoning": "reasoning",
    "thinking": "reasoning",
    "tool_call": "tool_call",
    "tool_use": "tool_call",
}
"""What a content's parts are, by their type; a part of another type, such as a picture, is refused."""
FRAME = ("### Instruction:\n", "\n\n### Input:\n", "\n\n### Response:")
"""The frame that Alpaca's prompts put around an instruction: the training code of another model wrote it, not a
user."""
MAX_DETAIL_CHARS = 200
DISPLAY_TURN = re.compile(r"^(system|user|assistant|tool): ", re.MULTILINE)
DISPLAYED_CALL = "None"
"""The text that tau-bench prints for an assistant's turn whose call it leaves out."""


class MalformedChatError(ValueError):
    """A record is no conversation with an answer, for `reason`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail[:MAX_DETAIL_CHARS]


def conversations_of(record: Record) -> list[Conversation]:
    """The conversations of one record, each ending with its last assistant turn. Raises MalformedChatError."""
    tools = _tools(record.get("tools") or record.get("functions"))
    return [(_checked(messages), tools) for messages in _message_lists(record)]


def _message_lists(record: Record) -> list[list[Message]]:
    given = next((record[key] for key in SYSTEMS if isinstance(record.get(key), str) and record[key].strip()), "")
    system = [_text_message("system", given)] if given else []
    for key in TURN_LISTS:
        turns = _from_json(record.get(key))
        if isinstance(turns, list) and not _is_pairs(turns):
            return [[*system, *_messages(turns)]]
    if isinstance(record.get("messages_display"), str):
        return [_displayed(record["messages_display"])]
    question = record.get("instruction")
    if isinstance(question, str) and isinstance(record.get("instances"), list):
        instances = [_object(number, instance) for number, instance in enumerate(record["instances"])]
        return [
            [*system, *_exchange(question, instance.get("input"), instance.get("output"))] for instance in instances
        ]
    if isinstance(record.get("prompt"), list) and isinstance(record.get("completion"), list):
        return [[*system, *_messages([*record["prompt"], *record["completion"]])]]
    return [[*system, *_asked_and_answered(record)]]


def _asked_and_answered(record: Record) -> list[Message]:
    """The turns of a record with a question and an answer, and those before them. An input is one of an instruction, or
    the question itself."""
    name = next((key for key in QUESTIONS if isinstance(record.get(key), str)), "")
    if not name:
        raise MalformedChatError("no_conversation", f"fields are {', '.join(sorted(map(str, record)))}")
    question, given = _unframed(record[name]) if name == "prompt" else (record[name], "")
    if name == "instruction":
        given = next((record[key] for key in CONTEXTS if isinstance(record.get(key), str) and record[key].strip()), "")
    answer = next((record[key] for key in ANSWERS if isinstance(record.get(key), str)), None)
    before = record.get("history") or []
    earlier = [turn for asked, said in before for turn in _exchange(asked, "", said)] if _is_pairs(before) else []
    return [*earlier, *_exchange(question, given, answer)]


def _is_pairs(turns: Any) -> bool:
    """Whether a history is a list of [question, answer]."""
    return isinstance(turns, list) and all(
        isinstance(turn, list) and len(turn) == 2 and isinstance(turn[0], str) for turn in turns
    )


def role_of(turn: Record) -> str | None:
    """The role of a turn, in whatever way a file names it; None for an unknown one."""
    name = turn.get("role", turn.get("from"))
    return ROLES.get(name.lower()) if isinstance(name, str) else None


def _unframed(prompt: str) -> tuple[str, str]:
    """(instruction, input) of a prompt in the frame; any other prompt is the instruction."""
    begins, gives, ends = FRAME
    framed = prompt.rstrip()
    _, is_framed, asked = framed.removesuffix(ends).partition(begins)
    if not is_framed or not framed.endswith(ends):
        return prompt, ""
    question, _, given = asked.partition(gives)
    return question, given


def _object(number: int, turn: object) -> Record:
    if not isinstance(turn, dict):
        raise MalformedChatError("broken_turn", f"turn {number} is no object but {type(turn).__name__}")
    return turn


def _exchange(question: str, given: object, answer: object) -> list[Message]:
    if not isinstance(answer, str):
        raise MalformedChatError("no_answer", "the answer is no text")
    asked = f"{question.strip()}\n\n{given.strip()}" if isinstance(given, str) and given.strip() else question.strip()
    return [_text_message("user", asked), _text_message("assistant", answer)]


def _displayed(text: str) -> list[Message]:
    parts = DISPLAY_TURN.split(text)
    if parts[0].strip():
        raise MalformedChatError("unknown_role", f"text before the first turn: {parts[0][:60]!r}")
    turns = zip(parts[1::2], parts[2::2], strict=True)
    return [_text_message(name, "" if said.strip() == DISPLAYED_CALL else said.strip()) for name, said in turns]


def _messages(turns: list[Any]) -> list[Message]:
    """A conversation's turns, the results of calls in the order of the calls: the template writes no ids."""
    ordered: list[Any] = []
    position: dict[str, int] = {}
    for is_result, run in groupby(turns, key=lambda turn: isinstance(turn, dict) and role_of(turn) == "tool"):
        given = list(run)
        if is_result:
            given.sort(key=lambda turn: position.get(str(turn.get("tool_call_id")), len(position)))
        else:
            calls = given[-1].get("tool_calls") if isinstance(given[-1], dict) else None
            calls = calls if isinstance(calls, list) else []
            position = {str(call.get("id")): number for number, call in enumerate(calls) if isinstance(call, dict)}
        ordered += given
    return [_message(number, turn) for number, turn in enumerate(ordered)]


def _message(number: int, given: object) -> Message:
    turn = _object(number, given)
    role, content = role_of(turn), turn.get("content", turn.get("value"))
    name = turn.get("role", turn.get("from"))
    if role is None:
        raise MalformedChatError(
            "unknown_role", f"turn {number} has role {reprlib.repr(name)}, known are {', '.join(ROLES)}"
        )
    message = _text_message(role, "")
    if str(name).lower() in CALL_ROLES:
        message["tool_calls"] = _calls(number, content)
        return message
    if role == "tool" and isinstance(content, dict):
        content = json.dumps(content, ensure_ascii=False)
    parts = content if isinstance(content, list) else [] if content is None else [{"type": "text", "text": content}]
    kinds = [_kind(number, part) for part in parts]
    texts = {
        kind: "\n".join(_text(number, part) for part, own in zip(parts, kinds, strict=True) if own == kind)
        for kind in ("text", "reasoning")
    }
    message["content"] = texts["text"]
    if role == "assistant":
        reasoning = next(
            (turn[key] for key in ("reasoning_content", "reasoning") if isinstance(turn.get(key), str)),
            texts["reasoning"],
        )
        message["reasoning"], message["content"] = _thought_and_said(number, texts["text"], reasoning)
        called = [_value(part) for part, kind in zip(parts, kinds, strict=True) if kind == "tool_call"]
        called += [turn[key] for key in ("tool_calls", "function_call") if turn.get(key)]
        message["tool_calls"] = [call for value in called for call in _calls(number, value)]
        if turn.get("weight") == 0:
            message["is_trained"] = False
    return message


def _thought_and_said(number: int, text: str, reasoning: str) -> tuple[str, str]:
    """The reasoning of an assistant's turn, which may be in its text, and the rest of the text."""
    thought, closed, said = text.strip().rpartition("</think>")
    if closed and not thought.startswith("<think>"):
        raise MalformedChatError("broken_reasoning", f"turn {number}: </think> without <think> at the start")
    return (thought.removeprefix("<think>") if closed else reasoning).strip(), said.strip()


def _text_message(role: str, content: str) -> Message:
    return {"role": role, "content": content, "reasoning": "", "tool_calls": []}


def _kind(number: int, part: object) -> str:
    named = part.get("type") or "text" if isinstance(part, dict) else "text"
    if named not in PARTS:
        raise MalformedChatError("unsupported_part", f"turn {number} has a part of type {named}: only text is read")
    return PARTS[named]


def _text(number: int, part: object) -> str:
    value = _value(part)
    if not isinstance(value, str | int | float):
        raise MalformedChatError("broken_turn", f"turn {number}: its text is {type(value).__name__}, not a string")
    return str(value)


def _value(part: object) -> object:
    """What a part holds; a part of type tool_use is the call itself."""
    if not isinstance(part, dict):
        return part
    if part.get("type") == "tool_use":
        return {"name": part.get("name"), "arguments": part.get("input")}
    return next((part[key] for key in ("value", "text", "thinking") if key in part), "")


def _calls(number: int, value: object) -> list[ToolCall]:
    """Tool calls from JSON text or objects; a call's arguments may themselves be JSON text."""
    parsed = _from_json(value)
    calls: list[ToolCall] = []
    for call in parsed if isinstance(parsed, list) else [parsed]:
        given = call.get("function", call) if isinstance(call, dict) else {}
        arguments = _from_json(given.get("arguments") or {}) if isinstance(given, dict) else None
        if not isinstance(arguments, dict) or not isinstance(given.get("name"), str):
            raise MalformedChatError(
                "broken_tool_call", f"turn {number}: {reprlib.repr(value)} needs a name and an object of arguments"
            )
        if is_deep(arguments):
            raise MalformedChatError(
                "broken_tool_call", f"turn {number}: arguments nest more than {MAX_DEPTH} levels deep"
            )
        calls.append({"name": given["name"], "arguments": arguments})
    return calls


def _tools(value: object) -> list[Record]:
    """Function descriptions, each as {"type": "function", "function": {...}}."""
    parsed = _from_json(value or [])
    if not isinstance(parsed, list) or not all(isinstance(tool, dict) for tool in parsed):
        raise MalformedChatError("broken_tools", f"{reprlib.repr(value)} is no list of objects")
    if is_deep(parsed):
        raise MalformedChatError("broken_tools", f"they nest more than {MAX_DEPTH} levels deep")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in parsed]


def _from_json(value: object) -> Any:
    """The value of JSON text; anything else is returned as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _checked(messages: list[Message]) -> list[Message]:
    """Join neighbouring assistant turns, leave out systems that say nothing, and cut what follows the last answer
    that is trained on. Raises MalformedChatError for missing calls, results or answers."""
    joined: list[Message] = []
    for message in messages:
        if message["role"] == "system" and not message["content"].strip():
            continue
        if joined and joined[-1]["role"] == message["role"] == "assistant":
            joined[-1] = _join(joined[-1], message)
        else:
            joined.append(message)
    trained = [message.get("is_trained", True) and _says_or_calls(message) for message in joined]
    answers = [number for number, is_answer in enumerate(trained) if is_answer]
    if not answers or not any(message["role"] == "user" for message in joined[: answers[-1]]):
        raise MalformedChatError("no_answer", f"roles are {', '.join(message['role'] for message in joined)}")
    kept = joined[: answers[-1] + 1]
    for number, (before, message) in enumerate(zip([None, *kept], kept, strict=False)):
        has_call = before is not None and bool(before.get("tool_calls"))
        if message["role"] == "tool" and not has_call and not (before and before["role"] == "tool"):
            raise MalformedChatError(
                "tool_result_without_call", f"turn {number}: no call before {message['content'][:60]!r}"
            )
        if message["role"] != "tool" and has_call:
            raise MalformedChatError(
                "call_without_result", f"turn {number} is of the {message['role']}, before it stands a call"
            )
    for number, message in enumerate(kept):
        if message["role"] == "assistant" and not _says_or_calls(message):
            raise MalformedChatError("no_answer", f"turn {number}: the assistant neither says nor calls anything")
    return kept


def _says_or_calls(message: Message) -> bool:
    return message["role"] == "assistant" and bool(message["content"] or message.get("tool_calls"))


def _join(before: Message, message: Message) -> Message:
    """Join two turns of the assistant: a text and the call that follows it, or several calls."""
    texts = {key: "\n\n".join(filter(None, (before.get(key), message.get(key)))) for key in ("content", "reasoning")}
    calls = [*before.get("tool_calls", ()), *message.get("tool_calls", ())]
    joined: Message = {"role": "assistant", "content": texts["content"], "reasoning": texts["reasoning"]}
    joined["tool_calls"] = calls
    if not (before.get("is_trained", True) and message.get("is_trained", True)):
        joined["is_trained"] = False
    return joined
