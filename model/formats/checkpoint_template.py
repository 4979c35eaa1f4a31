"""Finds the chat template of a Hugging Face checkpoint directory: a file of its own, or a key of tokenizer_config.json,
where older versions of transformers write it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.formats.weight_files import read_json
from model.text.chat_template import CHAT_TEMPLATE, Message, render

TEMPLATE_FILE, TOKENIZER_CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
DEFAULT = "default"
"""Name of the template that answers where a directory has several."""


def checkpoint_template(checkpoint_dir: Path) -> str | None:
    """The template, None where the directory has none. The file wins, as in transformers."""
    path = checkpoint_dir / TEMPLATE_FILE
    if path.is_file():
        return path.read_text(encoding="utf-8")
    if not (checkpoint_dir / TOKENIZER_CONFIG_FILE).is_file():
        return None
    given = read_json(checkpoint_dir / TOKENIZER_CONFIG_FILE).get("chat_template")
    if isinstance(given, list):
        named = {each.get("name"): each.get("template") for each in given if isinstance(each, dict)}
        given = named.get(DEFAULT)
    return given if isinstance(given, str) and given else None


EXAMPLE_TOOLS = [{"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}]
EXAMPLE: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "What time is it?"},
    {"role": "assistant", "content": "", "tool_calls": [{"name": "time", "arguments": {"zone": "UTC", "digits": 4}}]},
    {"role": "tool", "content": "12:07"},
]
"""A conversation by which two templates are compared."""


@dataclass(frozen=True)
class GivenTemplate:
    """A chat template that is not the project's, as its checkpoint brings it."""

    template: str
    special_tokens: Mapping[str, str]
    """By the names that templates use, as `bos_token`."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        enable_thinking: bool,
        add_generation_prompt: bool,
    ) -> str:
        """The conversation as transformers renders it, in Jinja's sandbox. Raises ValueError with the template's own
        words where it refuses the conversation."""
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        settings: dict[str, Any] = {
            **self.special_tokens,
            "tools": list(tools) or None,
            "enable_thinking": enable_thinking,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            rendered = render_jinja_template([[*map(dict, messages)]], chat_template=self.template, **settings)[0]
        except TemplateError as error:
            raise ValueError(f"the checkpoint's chat template cannot render the conversation: {error}") from error
        return rendered[0]


def given_template(checkpoint_dir: Path) -> GivenTemplate | None:
    """The directory's template where it is another than CHAT_TEMPLATE, by which model/text/chat_template.py renders."""
    template = checkpoint_template(checkpoint_dir)
    if template is None or template.strip() == CHAT_TEMPLATE.strip():
        return None
    path, tokens = checkpoint_dir / TOKENIZER_CONFIG_FILE, {}
    for name, token in (read_json(path) if path.is_file() else {}).items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return GivenTemplate(template, tokens)


def renders_otherwise(template: GivenTemplate) -> bool:
    """Whether the template writes a conversation in other words than render: with a system, tools, a call, its result
    and earlier turns, with reasoning and without."""
    for enable_thinking in (True, False):
        how = {"enable_thinking": enable_thinking, "add_generation_prompt": True}
        ours = "".join(segment.text for segment in render(EXAMPLE, EXAMPLE_TOOLS, **how))
        try:
            if template.render(EXAMPLE, EXAMPLE_TOOLS, **how) != ours:
                return True
        except ValueError:
            return True
    return False
