"""Tells what an assistant thought from what it said, where a file holds both in one text: in `<think>`, in the marks of
other models for the same (THOUGHTS), or in the channels of gpt-oss's Harmony.

Trained as text, such marks would stand beside those of this project's own template. A call in a channel of Harmony is
refused: the functions that it calls are described in a language that is not read.
"""

from __future__ import annotations

import re

from tasks.data.chats.chat_tools import MalformedChatError

THOUGHTS = (
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<seed:think>", "</seed:think>"),
)
"""Marks of OpenThoughts and Bespoke-Stratos, Magistral, Kimi and Seed-OSS, where a text begins with them."""
SOLUTION = re.compile(r"<\|(?:begin|end)_of_solution\|>")
"""OpenThoughts' marks of the rest."""
EXPLAINED = (THOUGHTS[0][0], "# Valid channels: analysis, commentary, final.")
"""What a system says that explains the marks of OpenThoughts, or the channels of Harmony."""
ANSWERED = re.compile(r"<answer>(.*)</answer>", re.DOTALL)
"""R1-Zero's, Open-R1's and AM-DeepSeek-R1's marks of what follows the reasoning."""
CHANNELLED = re.compile(
    r"(?:<\|start\|>assistant)?<\|channel\|>(?:analysis|commentary|final)|<\|start\|>assistant<\|message\|>"
)
CHANNEL = re.compile(
    r"(?:<\|start\|>assistant)?(?:<\|channel\|>(analysis|commentary|final))?<\|message\|>(.*?)"
    r"(?:<\|end\|>|<\|return\|>|\Z)",
    re.DOTALL,
)


def is_explaining(system: str) -> bool:
    """Whether a system's text explains marks that are not trained."""
    return any(explained in system for explained in EXPLAINED) or ("<think>" in system and "<answer>" in system)


def thought_and_said(number: int, text: str, reasoning: str) -> tuple[str, str]:
    """The reasoning of an assistant's turn, which may be in its text, and the rest of the text. `reasoning` is that of
    fields beside it. Raises MalformedChatError where reasoning has no end, or no beginning."""
    text = text.strip()
    if CHANNELLED.match(text):
        return _channels(number, text, reasoning)
    for begins, ends in THOUGHTS:
        if text.startswith(begins):
            text = SOLUTION.sub("", text.replace(begins, "<think>", 1).replace(ends, "</think>", 1))
    thought, closed, said = text.rpartition("</think>")
    if closed and not thought.startswith("<think>"):
        raise MalformedChatError("broken_reasoning", f"turn {number}: </think> without <think> at the start")
    if said.startswith("<think>"):
        raise MalformedChatError("broken_reasoning", f"turn {number}: reasoning without an end, of {len(said)} letters")
    thought, said = (thought.removeprefix("<think>") if closed else reasoning).strip(), said.strip()
    if "<think>" in thought.partition("</think>")[2]:
        raise MalformedChatError("broken_reasoning", f"turn {number}: two blocks of reasoning with a text between them")
    answered = ANSWERED.fullmatch(said) if thought else None
    return thought, said if answered is None else answered[1].strip()


def _channels(number: int, text: str, reasoning: str) -> tuple[str, str]:
    if rest := CHANNEL.sub("", text).strip():
        raise MalformedChatError(
            "unsupported_channel", f"turn {number} has {rest[:60]!r} in Harmony's marks: give calls as tool_calls"
        )
    told = [(name, said.strip()) for name, said in CHANNEL.findall(text)]
    thought = "\n\n".join(said for name, said in told if name == "analysis")
    return thought or reasoning.strip(), "\n\n".join(said for name, said in told if name != "analysis")
