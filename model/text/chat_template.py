"""The GLM-4.6 chat template, in two forms: as Jinja for everything that serves the model, and as segments for training.

Both give the same text for the same conversation. The segments say what is trained. They also keep special tokens apart
from what people wrote: `<|user|>` in a user's text stays eight characters. Pure: runs in executors and ranks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from model.text.tokenizer_layout import END_TOKENS, SPECIAL_TOKENS

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class ToolCall(TypedDict):
    name: str
    arguments: Mapping[str, Any]


class Message(TypedDict):
    role: str
    """system, user, assistant or tool."""
    content: str
    reasoning: NotRequired[str]
    """What an assistant thought before its content; Jinja calls it `reasoning_content`, as servers do."""
    tool_calls: NotRequired[Sequence[ToolCall]]
    is_trained: NotRequired[bool]
    """False for an assistant's turn that is only read, which files mark by `weight: 0`."""


@dataclass(frozen=True)
class Segment:
    """A run of text that is encoded as a whole: a special token, or ordinary characters."""

    text: str
    is_special: bool
    is_trained: bool
    """Whether a model writes it: an assistant's text, and the role token that closes its turn (GLM has no end-of-turn
    token)."""


NO_THINK = "/nothink"
TOOLS_BEFORE = (
    "<|system|>\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
TOOLS_AFTER = (
    "</tools>\n\nFor each function call, output the function name and arguments within the following XML format:\n"
    "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n"
    "<arg_key>{arg-key-2}</arg_key>\n<arg_value>{arg-value-2}</arg_value>\n...\n</tool_call>"
)
"""The words that GLM-4.5/4.6 were trained with; another wording is another prompt."""

CHAT_TEMPLATE = (
    r"""
{%- macro text_of(content) -%}
  {%- if content is string -%}{{- content -}}
  {%- elif content is iterable and content is not mapping -%}
    {%- for part in content -%}
      {%- if part is string -%}{{- part -}}{%- elif part.type == 'text' -%}{{- part.text -}}{%- endif -%}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- set thinks = enable_thinking is not defined or enable_thinking -%}
{%- set last = namespace(user=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{{- '[gMASK]<sop>' -}}
{%- if tools -%}
  {{- TOOLS_BEFORE -}}
  {%- for tool in tools -%}{{- tool | tojson(ensure_ascii=False) -}}{{- '\n' -}}{%- endfor -%}
  {{- TOOLS_AFTER -}}
{%- endif -%}
{%- for message in messages -%}
  {%- set text = text_of(message.content) -%}
  {%- if message.role == 'system' -%}
    {{- '<|system|>\n' + text -}}
  {%- elif message.role == 'user' -%}
    {{- '<|user|>\n' + text -}}
    {%- if not thinks and not text.endswith('/nothink') -%}{{- '/nothink' -}}{%- endif -%}
  {%- elif message.role == 'tool' -%}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|observation|>' -}}{%- endif -%}
    {{- '\n<tool_response>\n' + text + '\n</tool_response>' -}}
  {%- elif message.role == 'assistant' -%}
    {%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' -%}
    {%- if message.reasoning_content is not string and '</think>' in text -%}
      {%- set reasoning = text.split('</think>')[0].split('<think>')[-1] -%}
      {%- set text = text.split('</think>')[-1] -%}
    {%- endif -%}
    {{- '<|assistant|>\n<think>' -}}
    {%- if loop.index0 > last.user -%}{{- reasoning.strip() -}}{%- endif -%}
    {{- '</think>' -}}
    {%- if text.strip() -%}{{- '\n' + text.strip() -}}{%- endif -%}
    {%- for call in message.tool_calls or [] -%}
      {%- set function = call.function or call -%}
      {{- '\n<tool_call>' + function.name + '\n' -}}
      {%- for key, value in (function.arguments or {}).items() -%}
        {{- '<arg_key>' + key + '</arg_key>\n<arg_value>' -}}
        {%- if value is string -%}{{- value -}}{%- else -%}{{- value | tojson(ensure_ascii=False) -}}{%- endif -%}
        {{- '</arg_value>\n' -}}
      {%- endfor -%}
      {{- '</tool_call>' -}}
    {%- endfor -%}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|assistant|>' -}}
  {%- if not thinks -%}{{- '\n<think></think>' -}}{%- endif -%}
{%- endif -%}
""".strip()
    .replace("TOOLS_BEFORE", repr(TOOLS_BEFORE))
    .replace("TOOLS_AFTER", repr(TOOLS_AFTER))
)
"""Goes into tokenizer_config.json, chat_template.jinja and the GGUF. Every line break is written out: no whitespace
option changes it."""

_SPECIALS = re.compile("(" + "|".join(re.escape(token) for token in SPECIAL_TOKENS) + ")")


def render(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    *,
    enable_thinking: bool,
    add_generation_prompt: bool,
) -> list[Segment]:
    """The conversation as the model reads it. Of the reasoning only what follows the last user message is kept.

    A think block that the template adds (thinking off, or history) is not the assistant's text and is not trained."""
    last_user = max((number for number, message in enumerate(messages) if message["role"] == "user"), default=-1)
    segments = _template("[gMASK]<sop>")
    if tools:
        described = "".join(json.dumps(tool, ensure_ascii=False) + "\n" for tool in tools)
        segments += [*_template(TOOLS_BEFORE), Segment(described, False, False), *_template(TOOLS_AFTER)]
    before, closes_turn = "", False
    for number, message in enumerate(messages):
        role = message["role"]
        if role == "assistant":
            segments += _assistant_turn(message, is_current=number > last_user, enable_thinking=enable_thinking)
        elif role == "tool":
            segments += _template("<|observation|>", closes_turn) if before != "tool" else []
            segments += [
                *_template("\n<tool_response>\n"),
                Segment(message["content"], False, False),
                *_template("\n</tool_response>"),
            ]
        elif role == "user":
            text = message["content"] if enable_thinking else message["content"].removesuffix(NO_THINK)
            segments += [*_template("<|user|>", closes_turn), Segment("\n" + text, False, False)]
            segments += [] if enable_thinking else _template(NO_THINK)
        else:
            assert role == "system", role
            segments += [*_template("<|system|>"), Segment("\n" + message["content"], False, False)]
        before, closes_turn = role, role == "assistant" and message.get("is_trained", True)
    if add_generation_prompt:
        segments += _template("<|assistant|>" if enable_thinking else "<|assistant|>\n<think></think>")
    return segments


def render_to_train(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Segment]:
    """A conversation that ends with the assistant, and the role token that closes its last turn.

    Where no reasoning follows the last user message, the user counts as having asked for none."""
    return render_closed(messages, tools, enable_thinking=is_thinking(messages))


def render_closed(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, enable_thinking: bool
) -> list[Segment]:
    """A conversation that ends with the assistant, and the role token that closes its last turn."""
    assert messages[-1]["role"] == "assistant", messages[-1]["role"]
    closing = "<|observation|>" if messages[-1].get("tool_calls") else "<|user|>"
    segments = render(messages, tools, enable_thinking=enable_thinking, add_generation_prompt=False)
    return [*segments, *_template(closing, is_trained=True)]


def is_thinking(messages: Sequence[Message]) -> bool:
    """Whether the assistant reasons after the last user message."""
    last_user = max((number for number, message in enumerate(messages) if message["role"] == "user"), default=-1)
    return any(message.get("reasoning", "").strip() for message in messages[last_user + 1 :])


def problem_prompt(question: str, enable_thinking: bool, tools: Sequence[Mapping[str, Any]] = ()) -> list[Segment]:
    """One question, up to where the assistant begins to write."""
    return render(
        [{"role": "user", "content": question}], tools, enable_thinking=enable_thinking, add_generation_prompt=True
    )


def observation(texts: Sequence[str], enable_thinking: bool) -> list[Segment]:
    """What tools answered to an assistant that closed its turn with `<|observation|>`, from there up to where it writes
    again."""
    messages: list[Message] = [{"role": "tool", "content": text} for text in texts]
    segments = render(messages, (), enable_thinking=enable_thinking, add_generation_prompt=True)
    opening = next(number for number, segment in enumerate(segments) if segment.text == "<|observation|>")
    return segments[opening + 1 :]


def answer_of(text: str) -> str:
    """The answer in what an assistant wrote: after its reasoning and before the token that closes the turn; "" for
    unfinished reasoning."""
    turn = re.split("|".join(map(re.escape, END_TOKENS)), text, maxsplit=1)[0]
    reasoning, closed, answer = turn.partition("</think>")
    if closed:
        return answer.strip()
    return "" if "<think>" in reasoning else turn.strip()


def encode(tokenizer: Tokenizer, segments: Sequence[Segment]) -> tuple[list[int], list[bool]]:
    """(token ids, whether each is trained), by a tokenizer of `tokenizer_for_text`. Neighbouring ordinary segments are
    encoded as one text, as a server does."""
    assert tokenizer.encode_special_tokens, "a tokenizer that takes tokens in people's text for tokens"
    token_ids: list[int] = []
    trained: list[bool] = []
    for (is_special, is_trained), run in groupby(
        segments, key=lambda segment: (segment.is_special, segment.is_trained)
    ):
        if is_special:
            ids = [_special_id(tokenizer, segment.text) for segment in run]
        else:
            ids = tokenizer.encode("".join(segment.text for segment in run), add_special_tokens=False).ids
        token_ids += ids
        trained += [is_trained] * len(ids)
    return token_ids, trained


def _special_id(tokenizer: Tokenizer, token: str) -> int:
    identity = tokenizer.token_to_id(token)
    assert identity is not None, f"the tokenizer has no {token}"
    return identity


def _assistant_turn(message: Message, *, is_current: bool, enable_thinking: bool) -> list[Segment]:
    is_trained = message.get("is_trained", True)
    writes_thinking = is_current and enable_thinking and is_trained
    reasoning, content = message.get("reasoning", "").strip() if is_current else "", message["content"].strip()
    segments = [
        *_template("<|assistant|>"),
        *_template("\n<think>", writes_thinking),
        Segment(reasoning, False, writes_thinking),
        *_template("</think>", writes_thinking),
        Segment("\n" + content if content else "", False, is_trained),
    ]
    for call in message.get("tool_calls", ()):
        segments += [*_template("\n<tool_call>", is_trained), Segment(call["name"] + "\n", False, is_trained)]
        for key, value in call["arguments"].items():
            written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            segments += [
                *_template("<arg_key>", is_trained),
                Segment(key, False, is_trained),
                *_template("</arg_key>\n<arg_value>", is_trained),
            ]
            segments += [Segment(written, False, is_trained), *_template("</arg_value>\n", is_trained)]
        segments += _template("</tool_call>", is_trained)
    return [segment for segment in segments if segment.text]


def _template(text: str, is_trained: bool = False) -> list[Segment]:
    """The template's own text: the special tokens in it are tokens."""
    parts = ((part, bool(number % 2)) for number, part in enumerate(_SPECIALS.split(text)))
    return [Segment(part, is_special, is_trained) for part, is_special in parts if part]
