"""Reads a conversation that a file holds as one text, in the marks of a chat template or with its speakers' names.

The marks are those of ChatML, Llama 2 and 3, Gemma, Zephyr and GLM; the names those of OpenAssistant-Guanaco
("### Human:"), of hh-rlhf and BELLE ("Human:") and of Glaive ("USER:"). Trained as a text, such marks would stand
beside those of this project's own template.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

STARTS = ("<|begin_of_text|>", "[gMASK]<sop>", "<bos>", "<s>")
"""What a template writes before the first turn."""


class Frame(NamedTuple):
    """How turns are written one after the other."""

    opening: re.Pattern[str]
    """Begins a turn; its group names who speaks."""
    closings: tuple[str, ...] = ()
    """What a turn may end with."""


FRAMES = (
    Frame(re.compile(r"<\|im_start\|>(\w+)\n"), ("<|im_end|>",)),
    Frame(re.compile(r"<\|start_header_id\|>(\w+)<\|end_header_id\|>\n"), ("<|eot_id|>", "<|end_of_text|>")),
    Frame(re.compile(r"<start_of_turn>(\w+)\n"), ("<end_of_turn>", "<eos>")),
    Frame(re.compile(r"<\|(system|user|assistant|observation)\|>"), ("</s>", "<|endoftext|>", "<|end|>")),
    Frame(re.compile(r"(?:<s>)?\s*(\[/?INST\])"), ("</s>",)),
    Frame(re.compile(r"### (Human|User|Assistant|System):")),
    Frame(re.compile(r"\n\n(Human|Assistant):")),
    Frame(re.compile(r"(?:^|\n)\s*(Human|Assistant|SYSTEM|USER|ASSISTANT|FUNCTION RESPONSE):"), ("<|endoftext|>",)),
)
INSTRUCTION = {"[INST]": "user", "[/INST]": "assistant"}
SYSTEM_INSIDE = re.compile(r"<<SYS>>(.*?)<</SYS>>", re.DOTALL)
"""Llama 2 writes it into the first instruction."""


def written_turns(text: object) -> list[dict[str, Any]]:
    """The turns (role as it is written, content) of a text that begins with one and has two or more; none of any other
    value."""
    if not isinstance(text, str):
        return []
    start = next((start for start in STARTS if text.lstrip().startswith(start)), "")
    for frame in FRAMES:
        before, *parts = frame.opening.split(text.lstrip().removeprefix(start) if start else text)
        if not before.strip() and len(parts) > 2:
            spoken = zip(parts[::2], parts[1::2], strict=True)
            return [turn for name, said in spoken for turn in _turns(name, _without(said, frame.closings))]
    return []


def _without(said: str, closings: tuple[str, ...]) -> str:
    for closing in closings:
        said = said.strip().removesuffix(closing)
    return said.strip()


def _turns(name: str, said: str) -> list[dict[str, Any]]:
    system = SYSTEM_INSIDE.match(said) if name == "[INST]" else None
    turn = {"role": INSTRUCTION.get(name, name), "content": said if system is None else said[system.end() :].strip()}
    return [turn] if system is None else [{"role": "system", "content": system[1].strip()}, turn]
