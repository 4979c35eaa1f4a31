"""Reads a conversation that a file holds as one text, or a prompt that holds its beginning, in the marks of a chat
template or with its speakers' names.

The marks are those of ChatML, Kimi, Llama 2 and 3, Gemma, Zephyr, GLM, DeepSeek, HelpSteer2 and gpt-oss's Harmony; the
names those of OpenAssistant-Guanaco ("### Human:"), of hh-rlhf and BELLE ("Human:") and of Glaive and Vicuna ("USER:").
Trained as a text, such marks would stand beside those of this project's own template. A mark within a line, where a
template writes none, is quoted by who speaks.
"""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple

from tasks.data.chats.chat_roles import role_of

STARTS = ("<|begin_of_text|>", "[gMASK]<sop>", "<bos>", "<s>", "<｜begin▁of▁sentence｜>")
"""What a template writes before the first turn."""
ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>", "<eos>", "</s>", "<s>", "<|end|>")
ENDS += ("<|endoftext|>", "<｜end▁of▁sentence｜>", "<|return|>")
"""What a template writes after a turn; several may follow each other."""
FREE = r"(?:\A|(?<=[\n>])|(?<=> ))"
"""Where a mark opens a turn: at the start, in a new line, or after another mark."""


class Frame(NamedTuple):
    """How turns are written one after the other."""

    opening: re.Pattern[str]
    """Begins a turn; its group names who speaks."""
    again: Literal["turn", "said", "other frame"] = "turn"
    """What a speaker's second opening in a row is: a turn, part of what he says, or the sign of another frame."""
    unmarked: str = ""
    """Who speaks before the first opening; empty where a text begins with one."""
    is_marked: bool = True
    """Whether a text that is a single turn is known by its mark; a name is no such sign."""


def _named(separator: str, names: str, again: Literal["turn", "other frame"]) -> Frame:
    return Frame(re.compile(rf"(?:\A|{separator})({names})[:：]"), again, is_marked=False)


FRAMES = (
    Frame(re.compile(FREE + r"<\|im_start\|>([\w-]+)(?:[ \t][^\n<]*)?(?:\n|<\|im_sep\|>|\Z)")),
    Frame(re.compile(r"<\|im_(?:system|user|assistant)\|>([\w-]+)<\|im_middle\|>")),
    Frame(re.compile(FREE + r"<\|start_header_id\|>([\w-]+)<\|end_header_id\|>")),
    Frame(re.compile(FREE + r"<start_of_turn>(\w+)(?:\n|\Z)")),
    Frame(re.compile(r"<\|(system|user|assistant|observation)\|>(?:\n|\Z)")),
    Frame(re.compile(r"<｜(User|Assistant)｜>")),
    Frame(re.compile(r"<\|start\|>([\w.]+(?: to=[\w.]+)?)(?:<\|message\|>|(?=<\|channel\|>)|\Z)")),
    Frame(re.compile(r"(\[/?INST\])"), "said"),
    Frame(re.compile(r"\n<extra_id_1>(User|Assistant)(?:\n|\Z)"), unmarked="user"),
    *(
        Frame(re.compile(rf"(?<!#)### ({name}|Assistant|(?<=\A### )System):"), is_marked=False)
        for name in ("Human", "User")
    ),
    _named(r"\n\n", "Human|Assistant", "other frame"),
    _named(r"\n", "Human|Assistant", "turn"),
    _named(r"\n\n\n", "SYSTEM|USER|ASSISTANT|FUNCTION RESPONSE", "other frame"),
    _named(r"\n", "SYSTEM|USER|ASSISTANT|FUNCTION RESPONSE", "turn"),
)
INSTRUCTION = {"[INST]": "user", "[/INST]": "assistant"}
SYSTEM_INSIDE = re.compile(r"<<SYS>>(.*?)<</SYS>>", re.DOTALL)
"""Llama 2 writes it into the first instruction."""

Turn = dict[str, Any]
"""role as it is written, content"""


def written_turns(text: object) -> list[Turn]:
    """The turns of a text that begins with one and has two or more; none of any other value."""
    if not isinstance(text, str):
        return []
    return next((turns for _, turns in _readings(text) if len(turns) > 1), [])


def answered_turns(prompt: str, answer: str) -> list[Turn]:
    """The turns of a prompt in a template's marks, or with its speakers' names up to who is to answer, and the answer,
    which may be in marks too; none where the prompt is neither."""
    if _opens_with_assistant(answer) and (whole := written_turns(f"{prompt.rstrip()}\n\n{answer.lstrip()}")):
        return whole
    for frame, turns in _readings(prompt):
        is_begun = role_of(turns[-1]) == "assistant" and not turns[-1]["content"]
        before = turns[:-1] if is_begun else turns
        if before and role_of(before[-1]) != "assistant" and (is_begun or frame.is_marked):
            return [*before, {"role": "assistant", "content": _without_ends(answer)}]
    return []


def _opens_with_assistant(answer: str) -> bool:
    openings = filter(None, (frame.opening.match(answer.strip()) for frame in FRAMES))
    return any(role_of({"role": opening[1]}) == "assistant" for opening in openings)


def _readings(text: str) -> list[tuple[Frame, list[Turn]]]:
    """Every frame in which the text can be read, with its turns, one at least."""
    text = text.replace("\r\n", "\n").strip()
    while start := next((start for start in STARTS if text.startswith(start)), ""):
        text = text.removeprefix(start).lstrip()
    return [(frame, turns) for frame in FRAMES if (turns := _read(text, frame))]


def _read(text: str, frame: Frame) -> list[Turn]:
    if not frame.unmarked and not frame.opening.match(text):
        return []
    openings: list[re.Match[str]] = []
    for opening in frame.opening.finditer(text):
        if openings and openings[-1][1] == opening[1] and frame.again != "turn":
            if frame.again == "other frame":
                return []
            continue
        openings.append(opening)
    if not openings:
        return []
    ends = [*(opening.start() for opening in openings[1:]), len(text)]
    before = [(frame.unmarked, text[: openings[0].start()])] if frame.unmarked else []
    spoken = [*before, *((each[1], text[each.end() : end]) for each, end in zip(openings, ends, strict=True))]
    return [turn for name, said in spoken for turn in _turns(name, _without_ends(said))]


def _without_ends(said: str) -> str:
    said = said.strip()
    while end := next((end for end in ENDS if said.endswith(end)), ""):
        said = said.removesuffix(end).rstrip()
    return said


def _turns(name: str, said: str) -> list[Turn]:
    system = SYSTEM_INSIDE.match(said) if name == "[INST]" else None
    turn = {"role": INSTRUCTION.get(name, name), "content": said if system is None else said[system.end() :].strip()}
    return [turn] if system is None else [{"role": "system", "content": system[1].strip()}, turn]
