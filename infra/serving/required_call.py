"""A chat request that requires a function call: what llama.cpp's server is asked for it, and the call in its answer.

llama.cpp's own grammar for a required call holds only the end of an answer, allows white space that its own parser
refuses with status 500, and ignores which function is named. So the call is begun for the model, in the format that
training writes (model/text/chat_template.py), and a grammar of this project holds every character of it:

    <tool_call>NAME
    <arg_key>KEY</arg_key>
    <arg_value>VALUE</arg_value>
    </tool_call>

Arguments stand in the order of `properties`; those that are not required may be left out. A value is JSON of its
schema, or bare text where the schema asks for a string. A string of an `enum` is one of it; `pattern`, `format` and
lengths of bare text are not held to, nor is `uniqueItems`. The grammar is one of llguidance, which is in llama.cpp's
server.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from infra.serving.call_schemas import Schema, accepts_kind, options_of, resolved, standing_alone, texts_of

BEGUN = "<tool_call>"
ENDED = "</tool_call>"
KEY, KEY_ENDED, VALUE_ENDED = "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"
AS_TRAINED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "coerce_one_of": True}
"""JSON as json.dumps writes it, and with it the conversations that a model was trained on; oneOf is anyOf."""
MAX_GRAMMAR_CHARS = 4 << 20
NOT_SAMPLING = {
    *("messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "chat_template_kwargs", "model"),
    *("stream", "stream_options", "max_tokens", "max_completion_tokens", "n", "logprobs", "top_logprobs", "stop"),
    *("n_cmpl", "response_fields", "thinking"),
}
"""Keys of a chat request that are answered here, or mean something else to a completion."""


@dataclass(frozen=True)
class RequiredCall:
    """A request for a call of one of some functions."""

    asked: dict[str, Any]
    parameters: dict[str, Schema]
    """The schema of each function's arguments."""

    @property
    def template(self) -> dict[str, Any]:
        """The body for /apply-template: its prompt ends where the function's name begins."""
        turn = {"role": "assistant", "content": BEGUN}
        settings = (self.asked.get("chat_template_kwargs") or {}) | {"enable_thinking": False}
        shown = [tool for tool in self.asked["tools"] if tool["function"]["name"] in self.parameters]
        return {"messages": [*self.asked["messages"], turn], "tools": shown, "chat_template_kwargs": settings}

    def completion(self, prompt: str) -> dict[str, Any]:
        """The body for /completion."""
        limits = [self.asked.get(name) for name in ("max_completion_tokens", "max_tokens")]
        most = next((limit for limit in limits if limit is not None), -1)
        sampling = {key: value for key, value in self.asked.items() if key not in NOT_SAMPLING}
        return sampling | {"prompt": prompt, "grammar": grammar(self.parameters), "n_predict": most}

    def answer(self, made: Mapping[str, Any]) -> dict[str, Any]:
        """The chat completion for an answer of /completion. Where the tokens were used up before the call ended,
        finish_reason is "length" and the content holds the beginning. Raises ValueError for text that the grammar
        cannot have made."""
        text, message = made["content"], {"role": "assistant", "content": None}
        if text.endswith(ENDED):
            name, arguments = parse(text, self.parameters)
            function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
            calls = [{"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}]
            message, reason = message | {"tool_calls": calls}, "tool_calls"
        elif made["stop_type"] == "limit" and any(_begins(text, f"{name}\n") for name in self.parameters):
            message, reason = message | {"content": BEGUN + text}, "length"
        else:
            raise ValueError(_unheld(self.parameters))
        prompted, written = made["tokens_evaluated"], made["tokens_predicted"]
        usage = {"prompt_tokens": prompted, "completion_tokens": written, "total_tokens": prompted + written}
        return {
            "id": f"chatcmpl-{secrets.token_hex(16)}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": made["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
            "usage": usage,
            "timings": made["timings"],
        }

    def events(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        """The answer as the parts of a stream: the whole call in one, since it is read only when it has ended."""
        same = {key: answer[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
        choice = answer["choices"][0]
        calls = [{"index": 0, **call} for call in choice["message"].get("tool_calls", [])]
        delta = {"role": "assistant", "content": choice["message"]["content"]} | (
            {"tool_calls": calls} if calls else {}
        )
        parts = [
            {**same, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
            {**same, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
        ]
        if (self.asked.get("stream_options") or {}).get("include_usage"):
            parts.append({**same, "choices": [], "usage": answer["usage"]})
        return parts


def required_call(asked: dict[str, Any]) -> RequiredCall | None:
    """None for a request that requires no call. Raises ValueError for a function that is not in `tools`, one that is
    described wrongly, and for what a call cannot have."""
    choice, tools = asked.get("tool_choice"), asked.get("tools")
    if not (choice == "required" or isinstance(choice, dict)):
        return None
    if not tools:
        raise ValueError("tool_choice requires a call, and tools describes no function: describe one, or leave it out")
    shown: dict[str, Schema]
    try:
        shown = {tool["function"]["name"]: dict(tool["function"].get("parameters") or {}) for tool in tools}
    except (KeyError, TypeError, ValueError):
        raise ValueError(
            'each of tools is {"type": "function", "function": {"name": ..., "parameters": SCHEMA}}'
        ) from None
    if not all(isinstance(name, str) for name in shown):
        raise ValueError(f"the names of tools are {list(shown)}: write strings")
    if not isinstance(asked.get("messages"), list):
        raise ValueError("messages is missing, or no list")
    if not isinstance(asked.get("chat_template_kwargs") or {}, dict):
        raise ValueError("chat_template_kwargs is no object")
    if isinstance(choice, dict):
        chosen = choice.get("function")
        name = str(chosen.get("name") if isinstance(chosen, dict) else chosen)
        if name not in shown:
            raise ValueError(
                f"tool_choice asks for the function {name!r}: name one of tools, {list(shown)}, as "
                f'{{"type": "function", "function": {{"name": NAME}}}}, or write auto, none or required'
            )
        shown = {name: shown[name]}
    if asked.get("logprobs") or asked.get("n") not in (None, 1):
        raise ValueError("a required call is one, without log-probabilities: leave n and logprobs out")
    if not isinstance(asked.get("stream_options") or {}, dict):
        raise ValueError("stream_options is no object")
    shown = {name: {**schema, **resolved(schema, schema)} for name, schema in shown.items()}
    for name, schema in shown.items():
        _check_parameters(name, schema)
    return RequiredCall(asked, shown)


def _check_parameters(name: str, schema: Schema) -> None:
    """Raises ValueError where a keyword that is read here has no value of its type."""
    if not isinstance(schema.get("properties") or {}, dict):
        raise ValueError(f"parameters of {name}: properties is no object")
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
        raise ValueError(f"parameters of {name}: required is {required!r}: list names of properties, or leave it out")
    checked: set[int] = set()
    for key, value in _properties(schema).items():
        _check_value(f"parameters of {name}: {key}", value, schema, (), checked)


def _check_value(place: str, schema: Any, whole: Schema, around: tuple[Schema, ...], checked: set[int]) -> None:
    """`around`: the schemas of which it is an option; `checked`: the ids of those that are right, since definitions
    that name one another twice are as many paths as 2 to the power of their number."""
    schema = resolved(schema, whole)
    if any(schema is each for each in around):
        raise ValueError(f"{place} is an option of itself in anyOf, oneOf or allOf")
    if id(schema) in checked:
        return
    if not isinstance(schema.get("enum", []), list):
        raise ValueError(f"{place}: enum is {schema['enum']!r}: write a list of values")
    if not isinstance(schema.get("type", ""), (str, list)):
        raise ValueError(f"{place}: type is {schema['type']!r}: write a name, or a list of names")
    for key in ("anyOf", "oneOf", "allOf"):
        options = schema.get(key) or []
        if not isinstance(options, list):
            raise ValueError(f"{place}: {key} is {options!r}: write a list of schemas")
        for option in options:
            _check_value(place, option, whole, (*around, schema), checked)
    checked.add(id(schema))


def grammar(parameters: Mapping[str, Schema]) -> str:
    """The grammar of a call of one of the functions, from after BEGUN to ENDED. Raises ValueError for a reference that
    leads nowhere, and for a grammar of more than MAX_GRAMMAR_CHARS."""
    calls, rules, size = [], ['text[suffix="</arg_value>\\n"]: /(?s:.*)/'], 0
    for number, (name, schema) in enumerate(parameters.items()):
        parts = [_quoted(f"{name}\n")]
        for place, (key, value) in enumerate(_properties(schema).items()):
            rule = f"value{number}_{place}"
            rules += (made := _rules(rule, value, schema))
            size += sum(map(len, made))
            if size > MAX_GRAMMAR_CHARS:
                raise ValueError(f"the schema of {name} makes a grammar of more than {MAX_GRAMMAR_CHARS >> 20} MiB")
            optional = "" if key in schema.get("required", ()) else "?"
            parts.append(f"({_quoted(f'{KEY}{key}{KEY_ENDED}')} {rule}){optional}")
        calls.append(" ".join([*parts, _quoted(ENDED)]))
    return "\n".join(["%llguidance {}", f"start: {' | '.join(calls)}", *rules, ""])


def parse(text: str, parameters: Mapping[str, Schema]) -> tuple[str, dict[str, Any]]:
    """(name, arguments) of a call that the grammar has held. Raises ValueError for another text."""
    name, _, rest = text.partition("\n")
    if name not in parameters or not rest.endswith(ENDED):
        raise ValueError(_unheld(parameters))
    schema, arguments = parameters[name], {}
    while rest != ENDED:
        key, is_key, rest = rest.removeprefix(KEY).partition(KEY_ENDED)
        written, is_value, rest = rest.partition(VALUE_ENDED)
        if not (is_key and is_value and key in _properties(schema)):
            raise ValueError(_unheld(parameters))
        arguments[key] = _read(written, _properties(schema)[key], schema)
    return name, arguments


def _unheld(parameters: Mapping[str, Schema]) -> str:
    return (
        f"llama.cpp could not hold the answer to the schemas of {', '.join(parameters)}: they ask for what its grammar "
        f"does not know, so simplify them"
    )


def _begins(text: str, whole: str) -> bool:
    return text.startswith(whole) or whole.startswith(text)


def _properties(schema: Schema) -> dict[str, Any]:
    named = dict(schema.get("properties") or {})
    return named | {key: {} for key in schema.get("required", ()) if key not in named}


def _rules(name: str, schema: Any, whole: Schema) -> list[str]:
    """The rule of this name for a value with the tag that ends it, and one for each option of which some are strings
    and others are not: a schema with many paths to it has one rule."""
    rules: list[str] = []
    known: dict[int, tuple[str, Schema]] = {}

    def rule_of(schema: Any) -> str:
        schema = resolved(schema, whole)
        if id(schema) not in known:
            known[id(schema)] = f"{name}_{len(known)}" if known else name, schema
            options = options_of(schema) if texts_of(schema, whole) == "some" else []
            written = " | ".join(map(rule_of, options)) if options else _value(schema, whole)
            rules.append(f"{known[id(schema)][0]}: {written}")
        return known[id(schema)][0]

    rule_of(schema)
    return rules


def _value(schema: Schema, whole: Schema) -> str:
    """What replaces the values of a schema without options, with the tag that ends them."""
    if texts_of(schema, whole) == "none":
        alone = standing_alone(schema, whole) | {"x-guidance": AS_TRAINED}
        return f"%json {json.dumps(alone)} {_quoted(VALUE_ENDED)}"
    accepted = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if accepted is None:
        return "text"
    written = (each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in accepted)
    return " | ".join(_quoted(each + VALUE_ENDED) for each in written)


def _read(written: str, schema: Any, whole: Schema) -> Any:
    """A value as its schema means it; one that may be a string or not is JSON where its schema accepts that."""
    texts = texts_of(schema, whole)
    if texts == "all":
        return written
    try:
        value = json.loads(written, parse_constant=_refuse_constant, parse_float=_finite)
    except ValueError:
        if texts == "none":
            raise
        return written
    if texts == "none":
        return value
    return written if isinstance(value, str) or not accepts_kind(schema, value, whole) else value


def _refuse_constant(name: str) -> None:
    """NaN and Infinity, which Python's reader takes and JSON does not have."""
    raise ValueError(name)


def _finite(written: str) -> float:
    """A number that float64 holds: JSON has larger ones, and no name for what they would become."""
    if not math.isfinite(value := float(written)):
        raise ValueError(written)
    return value


def _quoted(text: str) -> str:
    """A literal of the grammar."""
    return json.dumps(text, ensure_ascii=False)
