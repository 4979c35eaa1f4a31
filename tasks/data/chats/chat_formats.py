"""Converts the formats of conversations in public files to one: messages as the chat template renders them.

It reads `messages`, `conversation`, `history` or `trajectory` (role, content), `conversations` (from, value), with the
last answer among the turns or in a field beside them (ANSWERS), bare texts in turn
(also `data`), `messages_display` (`user: ...` lines), `instruction` + `instances`, a whole conversation in one `text`
(written_turns.py), and a question and its answer with its reasoning (QUESTIONS, ANSWERS, REASONINGS), with what was
said before as `history`. The functions are pure and work per record.
"""

from __future__ import annotations

import re
from typing import Any

from model.text.chat_template import Message
from tasks.data.chats.chat_messages import are_texts, message_of, messages_of, object_of, reasoning_of, text_message
from tasks.data.chats.chat_roles import role_of
from tasks.data.chats.chat_tools import MalformedChatError, Record, calls_of, from_json, functions_of
from tasks.data.chats.written_thoughts import is_explaining
from tasks.data.chats.written_tools import take_written
from tasks.data.chats.written_turns import answered_turns, written_turns
from tasks.data.records.record_fields import SYSTEMS, media_of, with_turns

Conversation = tuple[list[Message], list[Record]]
"""(messages, tools)"""

TURN_LISTS = ("messages", "conversations", "conversation", "history", "trajectory")
QUESTIONS = ("instruction", "prompt", "question", "Question", "query", "problem", "input", "inputs")
ANSWERS = ("output", "response", "Response", "generated_solution", "r1_generation", "attempt", "deepseek_attempt")
ANSWERS += ("solution", "answer", "completion", "target", "targets", "content")
"""The first one counts: of a worked solution and its bare result the solution; of s1K the model's attempt, which its
reasoning led to."""
NOT_GIVEN = "-"
"""OpenCodeReasoning's question where the record leaves it to another dataset."""
JUDGEMENTS = ("label", "kto_tag")
"""Fields of KTO's records that say by false that the answer is unwanted: TRL's and ms-swift's, LLaMA-Factory's."""
CONTEXTS = ("input", "context")
"""Fields of an instruction's input."""
WRITTEN = ("text", "chat")  # a whole conversation in one text
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
    if judged := next((key for key in JUDGEMENTS if record.get(key) is False), ""):
        raise MalformedChatError("unwanted_answer", f"{judged} is false: it is an answer not to learn")
    settings = record.get("chat_template_kwargs")
    record = {**(settings if isinstance(settings, dict) else {}), **with_turns(record)}
    if record.get("python_tools"):
        raise MalformedChatError("unsupported_tool_call", "python_tools are called by programs, which are not read")
    turns = next((record[key] for key in TURN_LISTS if isinstance(record.get(key), list)), [])
    given = functions_of(record, turns)
    taken = [take_written(messages, given) for messages in _message_lists(record, is_calling=bool(given))]
    return [(_checked(messages), tools) for messages, tools in taken]


def _message_lists(record: Record, *, is_calling: bool) -> list[list[Message]]:
    given = next((record[key] for key in SYSTEMS if isinstance(record.get(key), str | list) and record[key]), "")
    given = given.removeprefix("SYSTEM:").strip() if isinstance(given, str) else given
    system = [message_of(0, {"role": "system", "content": given})] if given else []
    for key in TURN_LISTS:
        turns = from_json(record.get(key))
        if isinstance(turns, list) and not _is_pairs(turns):
            named = _named_in_turn(turns)
            if key == "history" and not _is_asking(named) and _has_question_and_answer(record):
                return [[*system, *messages_of(named), *_asked_and_answered(record, is_calling=is_calling)]]
            return [[*system, *messages_of([*named, *(_answer_of(record) if _is_asking(named) else [])])]]
    if are_texts(record.get("data")):
        return [[*system, *messages_of(_named_in_turn(record["data"]))]]
    if isinstance(record.get("messages_display"), str):
        return [_displayed(record["messages_display"])]
    question = record.get("instruction")
    if isinstance(question, str) and isinstance(record.get("instances"), list):
        instances = [object_of(number, instance) for number, instance in enumerate(record["instances"])]
        return [
            [*system, *_exchange(question, instance.get("input"), instance.get("output"))] for instance in instances
        ]
    asked = next((record[key] for key in ("prompt", "input") if isinstance(record.get(key), list)), None)
    if asked is not None:
        return [[*system, *messages_of([*asked, *_answer_of(record)])]]
    written = next(filter(None, (written_turns(record.get(key)) for key in WRITTEN)), [])
    if written and not _has_question_and_answer(record):
        return [[*system, *messages_of(written)]]
    return [[*system, *_asked_and_answered(record, is_calling=is_calling)]]


def _has_question_and_answer(record: Record) -> bool:
    return all(any(isinstance(record.get(key), str) for key in keys) for keys in (QUESTIONS, ANSWERS))


def _is_asking(turns: list[Any]) -> bool:
    """Whether a user has the last turn."""
    return bool(turns) and isinstance(turns[-1], dict) and role_of(turns[-1]) == "user"


def _answer_of(record: Record) -> list[Any]:
    """The turns of the answer in a field beside those before it; none where there is no such field."""
    said = next((record[key] for key in ANSWERS if isinstance(record.get(key), str | list)), [])
    thought = reasoning_of(record)
    return [{"role": "assistant", "content": said, "reasoning": thought}] if isinstance(said, str) else said


def _asked_and_answered(record: Record, *, is_calling: bool) -> list[Message]:
    """The turns of a record with a question and an answer, and those before them. An input is one of an instruction, or
    the question itself. Where tools are described, `answers` are calls."""
    name = next((key for key in QUESTIONS if isinstance(record.get(key), str)), "")
    if not name:
        raise MalformedChatError("no_conversation", f"fields are {', '.join(sorted(map(str, record)))}")
    if record[name].strip() == NOT_GIVEN:
        raise MalformedChatError(
            "no_question", f"{name} is {NOT_GIVEN!r}, which leaves the question to another dataset"
        )
    question, given = _unframed(record[name]) if name == "prompt" else (record[name], "")
    if name == "instruction":
        given = next((record[key] for key in CONTEXTS if isinstance(record.get(key), str) and record[key].strip()), "")
    answer = next((record[key] for key in ANSWERS if isinstance(record.get(key), str)), None)
    reasoning = reasoning_of(record)
    if answer is None and is_calling and record.get("answers"):
        called = text_message("assistant", "")
        called["tool_calls"] = calls_of(1, record["answers"])
        return [text_message("user", question.strip()), called]
    before = record.get("history") or []
    earlier = [turn for asked, said in before for turn in _exchange(asked, "", said)] if _is_pairs(before) else []
    if isinstance(answer, str) and (turns := answered_turns(question, answer)):
        *begun, asked, said = turns
        asked["content"] = _with_input(asked["content"], given)
        return [*earlier, *messages_of([*begun, asked, said | {"reasoning": reasoning}])]
    return [*earlier, *_exchange(question, given, answer, reasoning)]


def _named_in_turn(turns: list[Any]) -> list[Any]:
    """Turns that are bare texts, or objects of a question and its answer, as what a user and an assistant say in turn;
    any others as they are."""
    for asked, said in EXCHANGES:
        if turns and all(isinstance(turn, dict) and {asked, said} <= turn.keys() for turn in turns):
            return _named_in_turn([turn[name] for turn in turns for name in (asked, said)])
    if not are_texts(turns):
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


def _exchange(question: str, given: object, answer: object, reasoning: str = "") -> list[Message]:
    if not isinstance(answer, str):
        raise MalformedChatError("no_answer", "the answer is no text")
    said = message_of(1, {"role": "assistant", "content": answer, "reasoning": reasoning})
    return [text_message("user", _with_input(question, given)), said]


def _with_input(question: str, given: object) -> str:
    return "\n\n".join(filter(None, (question.strip(), given.strip() if isinstance(given, str) else "")))


def _displayed(text: str) -> list[Message]:
    parts = DISPLAY_TURN.split(text)
    if parts[0].strip():
        raise MalformedChatError("unknown_role", f"text before the first turn: {parts[0][:60]!r}")
    turns = zip(parts[1::2], parts[2::2], strict=True)
    return [text_message(name, "" if said.strip() == DISPLAYED_CALL else said.strip()) for name, said in turns]


def _checked(messages: list[Message]) -> list[Message]:
    """Join neighbouring assistant turns, leave out systems that say nothing, repeat or explain marks, and cut
    what follows the last answer that is trained on. Raises MalformedChatError for missing calls, results or answers."""
    joined: list[Message] = []
    for message in messages:
        is_repeated = joined[-1:] == [message]
        if message["role"] == "system" and (
            is_explaining(message["content"]) or is_repeated or not message["content"].strip()
        ):
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
