"""Masks personal data in conversations. Runs in executors: imports no Spark.

Contents, reasoning and the texts among a call's arguments are masked; names of functions and of arguments stay. A
text that is JSON, as tools answer, is masked value by value, so that it stays JSON. A number among its values has no
form to go by, and stays.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tasks.data.privacy.personal_data import find_in_chunks, mask_text
from tasks.data.readers.json_lines import is_deep

if TYPE_CHECKING:
    from model.text.chat_template import Message

NUMBER_KINDS = ("math", "code", "code_with_tests")
"""Kinds of conversations whose numbers are not masked, as in program code: problems and programs are about numbers."""


def mask_chats(
    chats: Sequence[list[Message]], keeps_numbers: Sequence[bool], kinds: Sequence[str]
) -> Iterator[tuple[list[Message], Counter[str]]]:
    """Each conversation's messages, masked, and the number of replaced spans by kind. A conversation without any is
    returned unchanged."""
    texts = [list(_texts([_parts(message) for message in messages])) for messages in chats]
    is_code = [keeps for own, keeps in zip(texts, keeps_numbers, strict=True) for _ in own]
    spans = iter(find_in_chunks([text for own in texts for text in own], is_code, kinds))
    for messages, own in zip(chats, texts, strict=True):
        located = [next(spans) for _ in own]
        counts = Counter(kind for own_spans in located for kind, _, _ in own_spans)
        if counts:
            masked = iter([mask_text(text, own_spans) for text, own_spans in zip(own, located, strict=True)])
            messages = [_with_parts(message, _replaced(_parts(message), masked)) for message in messages]
        yield messages, counts


def _parts(message: Message) -> dict[str, Any]:
    """The parts of a message that hold text, by field."""
    calls = [call["arguments"] for call in message.get("tool_calls", ())]
    return {"reasoning": message.get("reasoning", ""), "content": message["content"], "arguments": calls}


def _with_parts(message: Message, parts: dict[str, Any]) -> Message:
    calls = [
        {**call, "arguments": given}
        for call, given in zip(message.get("tool_calls", ()), parts["arguments"], strict=True)
    ]
    changed = {"reasoning": parts["reasoning"], "content": parts["content"], "tool_calls": calls}
    return {**message, **{key: value for key, value in changed.items() if key in message}}  # pyright: ignore[reportReturnType]


def _texts(value: Any) -> Iterator[str]:
    """The texts inside a value, in order; those inside a text that is JSON as well."""
    if isinstance(value, str):
        inside = _json_inside(value)
        if inside is None:
            yield value
        else:
            yield from _texts(inside)
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


def _replaced(value: Any, texts: Iterator[str]) -> Any:
    """The value with its texts replaced by `texts`, in order."""
    if isinstance(value, str):
        inside = _json_inside(value)
        if inside is None:
            return next(texts)
        changed = _replaced(inside, texts)
        return value if changed == inside else json.dumps(changed, ensure_ascii=False)
    if isinstance(value, dict):
        return {key: _replaced(part, texts) for key, part in value.items()}
    return [_replaced(part, texts) for part in value] if isinstance(value, list) else value


def _json_inside(text: str) -> Any:
    """The object or list that a text is; None for every other text."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # prose in brackets, or nested too deep to be read: plain text
        return None
    return None if is_deep(value) else value
