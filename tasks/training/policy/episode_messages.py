"""The messages of a sampled answer or episode, as conversations have them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from model.text.tokenizer_layout import END_TOKENS
from tasks.data.prompts.function_calls import written_calls

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tasks.training.policy.episodes import Turn
    from tasks.training.policy.prompts import Prompt


def conversation(prompt: Prompt, turns: Sequence[Turn], enable_thinking: bool) -> list[Any]:
    """The messages (chat_template.Message) of a prompt and of what followed: the assistant's turns, each with the token
    that ended it, and what tools answered. The assistant's turns of the prompt are only read."""
    messages = [_message(turn["role"], turn["content"]) for turn in prompt.turns]
    messages = [turn | {"is_trained": False} if turn["role"] == "assistant" else turn for turn in messages]
    for turn in turns:
        messages.append(_message("tool", turn.text) if turn.role == "tool" else _said(turn.text, enable_thinking))
    return messages


def _said(text: str, enable_thinking: bool) -> dict[str, Any]:
    """The message of what an assistant wrote in one turn."""
    turn = next((text.removesuffix(token) for token in END_TOKENS if text.endswith(token)), text)
    reasoning, closed, said = turn.partition("</think>")
    if not enable_thinking or not closed:
        reasoning, said = "", turn
    calls = written_calls(said) or [] if "<tool_call>" in said else []
    return _message("assistant", said.split("<tool_call>")[0].strip() if calls else said.strip()) | {
        "reasoning": reasoning.partition("<think>")[2].strip(),
        "tool_calls": [{"name": name, "arguments": arguments} for name, arguments in calls],
    }


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content, "reasoning": "", "tool_calls": []}
