"""What a request asks for and llama.cpp's server would leave out with status 200: written as it reads it, or refused.

A client that wanted JSON of a schema, or an answer of at least so many tokens, would otherwise get any answer and no
sign of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FORMAT = "write response_format with json_schema"
GRAMMAR = "write grammar, in GBNF"
UNREAD = {
    "functions": "describe them in tools",
    "function_call": "write tool_choice",
    "guided_json": FORMAT,
    "structured_outputs": FORMAT,
    "guided_choice": GRAMMAR,
    "guided_regex": GRAMMAR,
    "guided_grammar": GRAMMAR,
    "stop_token_ids": "write their texts in stop",
    "best_of": "ask for n answers and choose",
    "min_tokens": "leave it out",
    "suffix": "leave it out",
    "prompt_logprobs": "leave it out",
    "web_search_options": "leave it out",
    "audio": "leave it out",
}
"""OpenAI's older names, and those of vLLM and SGLang, with what to do about each."""
WITHOUT_EFFECT = (None, 0, 1, "", "auto", "none", [], {})
"""Values by which such a setting asks for nothing."""
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""Of an answer; of 0 the server would make 1."""
Asked = Mapping[str, Any]
"""A request's body."""


def refuse_unread(asked: Asked) -> None:
    """Raises ValueError for a setting that the server does not know, for a limit of no tokens, and for stop sequences
    that are no texts."""
    for name, instead in UNREAD.items():
        if asked.get(name) not in WITHOUT_EFFECT:
            raise ValueError(f"{name} is not supported: {instead}")
    for name in LIMITS:
        if asked.get(name) == 0:
            raise ValueError(f"{name} is 0: an answer has at least 1 token")
    for name in ("stop", "stop_sequences"):
        stop = asked.get(name)
        texts = stop if isinstance(stop, list) else [] if stop is None else [stop]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{name} is {stop!r}: write a text, or a list of texts")


def refuse_broken_format(asked: Asked) -> None:
    """Raises ValueError for a chat's response_format that the server would take for none."""
    wanted = asked.get("response_format")
    if wanted is None:
        return
    described = wanted.get("json_schema") if isinstance(wanted, dict) else None
    is_schema = isinstance(described, dict) and isinstance(described.get("schema"), dict)
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if not isinstance(kind, str) or (kind == "json_schema" and not is_schema):
        raise ValueError(
            f'response_format is {str(wanted)[:200]}: write {{"type": "json_object"}}, or {{"type": "json_schema", '
            '"json_schema": {"name": NAME, "schema": SCHEMA}}'
        )


def refuse_formats(asked: Asked, *names: str) -> None:
    """Raises ValueError for a form of the answer, at an address that has none; `names` are those of its API."""
    for name in names:
        given = asked.get(name)
        if given and (name != "output_config" or (isinstance(given, dict) and given.get("format"))):
            raise ValueError(f"{name} has an effect at /v1/chat/completions only, as response_format: ask there")


def with_format(asked: dict[str, Any]) -> dict[str, Any]:
    """A request for a response, with its `text.format` as a chat has it: llama.cpp reads that one in both."""
    text = asked.get("text")
    wanted = text.get("format") if isinstance(text, dict) else None
    if not isinstance(wanted, dict):
        return asked
    kind = wanted.get("type")
    told = {"json_schema": {key: value for key, value in wanted.items() if key != "type"}}
    written = {"type": kind} | (told if kind == "json_schema" else {})
    refuse_broken_format({"response_format": written})
    return asked | {"response_format": written}


def with_chosen_token(asked: dict[str, Any], name: str) -> dict[str, Any]:
    """A request for log-probabilities with 0 alternatives (the setting `name`), which llama.cpp takes for none at all,
    with one."""
    number = asked.get(name)
    is_none = isinstance(number, int) and not isinstance(number, bool) and number == 0
    return asked | {name: 1} if is_none else asked
