"""Converts the formats of conversations in public files to one: messages as the chat template renders them.

It reads `messages`, `conversation` or `history` (role, content), `conversations` (from, value), bare texts in turn
(also `data`), `messages_display` (`user: ...` lines), `instruction` + `instances`, a whole conversation in one `text`
(written_turns.py), and a question and its answer with its reasoning (QUESTIONS, ANSWERS, REASONINGS), with what was
said before as `history`. The functions are pure and work per record.
"""

from __future__ import annotations

import json
import re
import reprlib
from itertools import groupby
from typing import Any, TypeGuard

from model.text.chat_template import Message
from tasks.data.chats.chat_roles import ROLES, is_only_read, is_reasoning, role_of
from tasks.data.chats.chat_tools import MalformedChatError, Record, calls_of, from_json, functions_of, take_written
from tasks.data.chats.written_thoughts import EXPLAINED, thought_and_said
from tasks.data.chats.written_turns import answered_turns, written_turns
from tasks.data.records.record_fields import SYSTEMS, media_of, with_turns

Conversation = tuple[list[Message], list[Record]]
"""(messages, tools)"""

CALL_ROLES = ("function_call", "tool_call")
TURN_LISTS = ("messages", "conversations", "conversation", "history")
QUESTIONS = ("instruction", "prompt", "question", "Question", "query", "problem", "input", "inputs")
ANSWERS = ("output", "response", "Response", "generated_solution", "attempt", "deepseek_attempt", "solution", "answer")
ANSWERS += ("completion", "target", "targets", "content")
"""The first one counts: of a worked solution and its bare result the solution; of s1K the model's attempt, which its
reasoning led to."""
REASONINGS = ("reasoning_content", "reasoning", "thinking", "Complex_CoT")
REASONINGS += ("thinking_trajectories", "deepseek_thinking_trajectory")
SWITCHES = ("on", "off")
"""Values of Nemotron's field `reasoning`, which says whether there is some."""
CONTEXTS = ("input", "context")
"""Fields of an instruction's input."""
WRITTEN = ("text", "chat")  # a whole conversation in one text
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
EXCHANGES = (("input", "output"), ("human", "assistant"))
"""Fields of a turn with its answer."""
DISPLAY_TURN = re.compile(r"^(system|user|assistant|tool): ", re.MULTILINE)
DISPLAYED_CALL = "None"
"""The text that tau-bench prints for an assistant's turn whose call it leaves out."""


def conversations_of(record: Record) -> list[Conversation]:
    """The conversations of one record, each ending with its last assistant turn. Raises MalformedChatError."""
    if media := media_of(record):
        raise MalformedChatError("unsupported_part", f"field {media} belongs to the text, and only text is read")
    settings = record.get("chat_template_kwargs")
    record = {**(settings if isinstance(settings, dict) else {}), **with_turns(record)}
    turns = next((record[key] for key in TURN_LISTS if isinstance(record.get(key), list)), [])
    given = functions_of(record, turns)
    taken = [take_written(messages, given) for messages in _message_lists(record, is_calling=bool(given))]
    return [(_checked(messages), tools) for messages, tools in taken]


def _message_lists(record: Record, *, is_calling: bool) -> list[list[Message]]:
    given = next((record[key] for key in SYSTEMS if isinstance(record.get(key), str | list) and record[key]), "")
    given = given.removeprefix("SYSTEM:").strip() if isinstance(given, str) else given
    system = [_message(0, {"role": "system", "content": given})] if given else []
    for key in TURN_LISTS:
        turns = from_json(record.get(key))
        if isinstance(turns, list) and not _is_pairs(turns):
            return [[*system, *_messages(_named_in_turn(turns))]]
    if _are_texts(record.get("data")):
        return [[*system, *_messages(_named_in_turn(record["data"]))]]
    if isinstance(record.get("messages_display"), str):
        return [_displayed(record["messages_display"])]
    question = record.get("instruction")
    if isinstance(question, str) and isinstance(record.get("instances"), list):
        instances = [_object(number, instance) for number, instance in enumerate(record["instances"])]
        return [
            [*system, *_exchange(question, instance.get("input"), instance.get("output"))] for instance in instances
        ]
    asked = next((record[key] for key in ("prompt", "input") if isinstance(record.get(key), list)), None)
    if asked is not None:
        said = next((record[key] for key in ANSWERS if isinstance(record.get(key), str | list)), [])
        thought = _reasoning_of(record)
        answered = [{"role": "assistant", "content": said, "reasoning": thought}] if isinstance(said, str) else said
        return [[*system, *_messages([*asked, *answered])]]
    written = next(filter(None, (written_turns(record.get(key)) for key in WRITTEN)), [])
    if written and not all(any(isinstance(record.get(key), str) for key in keys) for keys in (QUESTIONS, ANSWERS)):
        return [[*system, *_messages(written)]]
    return [[*system, *_asked_and_answered(record, is_calling=is_calling)]]


def _asked_and_answered(record: Record, *, is_calling: bool) -> list[Message]:
    """The turns of a record with a question and an answer, and those before them. An input is one of an instruction, or
    the question itself. Where tools are described, `answers` are calls."""
    name = next((key for key in QUESTIONS if isinstance(record.get(key), str)), "")
    if not name:
        raise MalformedChatError("no_conversation", f"fields are {', '.join(sorted(map(str, record)))}")
    question, given = _unframed(record[name]) if name == "prompt" else (record[name], "")
    if name == "instruction":
        given = next((record[key] for key in CONTEXTS if isinstance(record.get(key), str) and record[key].strip()), "")
    answer = next((record[key] for key in ANSWERS if isinstance(record.get(key), str)), None)
    reasoning = _reasoning_of(record)
    if answer is None and is_calling and record.get("answers"):
        called = _text_message("assistant", "")
        called["tool_calls"] = calls_of(1, record["answers"])
        return [_text_message("user", question.strip()), called]
    before = record.get("history") or []
    earlier = [turn for asked, said in before for turn in _exchange(asked, "", said)] if _is_pairs(before) else []
    if isinstance(answer, str) and (turns := answered_turns(question, answer)):
        *begun, asked, said = turns
        asked["content"] = _with_input(asked["content"], given)
        return [*earlier, *_messages([*begun, asked, said | {"reasoning": reasoning}])]
    return [*earlier, *_exchange(question, given, answer, reasoning)]


def _reasoning_of(fields: Record) -> str:
    """What an assistant thought, in a field beside what it said."""
    told = [fields.get(key) for key in REASONINGS]
    given = ["\n\n".join(each) if _are_texts(each) else each for each in told]
    details = fields.get("reasoning_details")  # OpenRouter's
    parts = [part.get("text") for part in details if isinstance(part, dict)] if isinstance(details, list) else []
    said = "\n".join(part for part in parts if isinstance(part, str))
    return next((text for text in [*given, said] if isinstance(text, str) and text and text not in SWITCHES), "")


def _are_texts(turns: Any) -> TypeGuard[list[str]]:
    return isinstance(turns, list) and bool(turns) and all(isinstance(turn, str) for turn in turns)


def _named_in_turn(turns: list[Any]) -> list[Any]:
    """Turns that are bare texts, or objects of a question and its answer, as what a user and an assistant say in turn;
    any others as they are."""
    for asked, said in EXCHANGES:
        if turns and all(isinstance(turn, dict) and {asked, said} <= turn.keys() for turn in turns):
            return _named_in_turn([turn[name] for turn in turns for name in (asked, said)])
    if not _are_texts(turns):
        return turns
    return [{"role": "assistant" if number % 2 else "user", "content": text} for number, text in enumerate(turns)]


def _is_pairs(turns: Any) -> bool:
    """Whether a history is a list of [question, answer]."""
    return isinstance(turns, list) and all(
        isinstance(turn, list) and len(turn) == 2 and isinstance(turn[0], str) for turn in turns
    )


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


def _exchange(question: str, given: object, answer: object, reasoning: str = "") -> list[Message]:
    if not isinstance(answer, str):
        raise MalformedChatError("no_answer", "the answer is no text")
    said = _message(1, {"role": "assistant", "content": answer, "reasoning": reasoning})
    return [_text_message("user", _with_input(question, given)), said]


def _with_input(question: str, given: object) -> str:
    return "\n\n".join(filter(None, (question.strip(), given.strip() if isinstance(given, str) else "")))


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
    apart = [piece for turn in turns for piece in _results_apart(turn)]
    for is_result, run in groupby(apart, key=lambda turn: isinstance(turn, dict) and role_of(turn) == "tool"):
        given = list(run)
        if is_result:
            given.sort(key=lambda turn: position.get(str(turn.get("tool_call_id")), len(position)))
        else:
            position = {identity: number for number, identity in enumerate(_ids_of_calls(given[-1]))}
        ordered += given
    return [_message(number, turn) for number, turn in enumerate(ordered)]


def _results_apart(turn: Any) -> list[Any]:
    """A turn whose parts hold results of calls (type tool_result), as one turn for each result and one for the rest."""
    parts = turn.get("content") if isinstance(turn, dict) else None
    if not isinstance(parts, list):
        return [turn]
    is_result = [isinstance(part, dict) and part.get("type") == "tool_result" for part in parts]
    results = [
        {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": part.get("content")}
        for part, found in zip(parts, is_result, strict=True)
        if found
    ]
    rest = [part for part, found in zip(parts, is_result, strict=True) if not found]
    return [*results, {**turn, "content": rest}] if rest or not results else results


def _ids_of_calls(turn: Any) -> list[str]:
    """The ids of the calls of a turn, in their order."""
    lists = [turn.get(key) for key in ("tool_calls", "content")] if isinstance(turn, dict) else []
    calls = [call for given in lists if isinstance(given, list) for call in given if isinstance(call, dict)]
    return [str(call["id"]) for call in calls if call.get("id") is not None]


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
        message["tool_calls"] = calls_of(number, content)
        return message
    if role == "user" and content is None:
        raise MalformedChatError("broken_turn", f"turn {number} of the user has no content, its fields are {[*turn]}")
    if role == "tool" and _is_value(content):
        content = json.dumps(content, ensure_ascii=False)
    parts = content if isinstance(content, list) else [] if content is None else [{"type": "text", "text": content}]
    kinds = [_kind(number, part) for part in parts]
    texts = {
        kind: "\n".join(_text(number, part) for part, own in zip(parts, kinds, strict=True) if own == kind)
        for kind in ("text", "reasoning")
    }
    message["content"] = texts["text"]
    if role == "assistant":
        reasoning = _reasoning_of(turn) or texts["reasoning"]
        message["reasoning"], message["content"] = thought_and_said(number, texts["text"], reasoning)
        if is_reasoning(turn):
            message["reasoning"], message["content"] = message["content"] or message.get("reasoning", ""), ""
        called = [_value(part) for part, kind in zip(parts, kinds, strict=True) if kind == "tool_call"]
        called += [turn[key] for key in ("tool_calls", "function_call") if turn.get(key)]
        message["tool_calls"] = [call for value in called for call in calls_of(number, value)]
        if is_only_read(turn):
            message["is_trained"] = False
    return message


def _is_value(content: object) -> bool:
    """Whether a tool's result is an object, or a list with one that is no part of a text."""
    if isinstance(content, list):
        return any(isinstance(part, dict) and "type" not in part for part in content)
    return isinstance(content, dict)


def _text_message(role: str, content: str) -> Message:
    return {"role": role, "content": content, "reasoning": "", "tool_calls": []}


def _kind(number: int, part: object) -> str:
    named = part.get("type") or "text" if isinstance(part, dict) else "text"
    if not isinstance(named, str) or named not in PARTS:
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
        return part
    return next((part[key] for key in ("value", "text", "thinking") if key in part), None)


def _checked(messages: list[Message]) -> list[Message]:
    """Join neighbouring assistant turns, leave out systems that say nothing, repeat or explain marks, and cut
    what follows the last answer that is trained on. Raises MalformedChatError for missing calls, results or answers."""
    joined: list[Message] = []
    for message in messages:
        is_explaining = any(explained in message["content"] for explained in EXPLAINED)
        is_repeated = joined[-1:] == [message]
        if message["role"] == "system" and (is_explaining or is_repeated or not message["content"].strip()):
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
                "call_without_result", f"turn {number} is of the {message['role']} and follows a call"
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
