"""Makes the items of long-context retrieval: documents in which one sentence states the code that is asked for.

Every item is decided by its number: the same documents, names and codes on every machine.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from configs.schema import RetrievalBenchmark

SYLLABLES = ("ba", "cor", "den", "fi", "gal", "hu", "jan", "ker", "lo", "mi", "nor", "pel", "ras", "tu", "vo", "zel")
PLACES = ("harbour", "valley", "market", "library", "orchard", "station", "bridge", "garden", "mill", "square")
TIMES = ("in the morning", "at noon", "in the evening", "on Sundays", "in winter", "after the rain")
DEEDS = (
    "the boats come back with little fish",
    "people talk about the weather",
    "a clerk counts the parcels twice",
    "children look for chestnuts",
    "the bells are quieter than they were",
    "somebody paints a fence",
    "the baker sells what is left",
    "letters wait for their readers",
)
CODE_DIGITS = 5
CODE = re.compile(rf"(?<!\d)\d{{{CODE_DIGITS}}}(?!\d)")
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
NOTE = "The code of {name} is {code}."
CHAT_QUESTION = "What is the code of {name}? Answer with the code only."
PLAIN_QUESTION = "The code of {name} is"


def retrieval_items(benchmark: RetrievalBenchmark, text: str | None) -> Iterator[tuple[str, str, str, str]]:
    """(part, document, question, code) of every item; the part names its length. `text` is cut into documents; None
    takes sentences that are made. Raises ValueError for a text that is shorter than the longest document."""
    longest = max(benchmark.document_chars)
    if text is not None and len(text) < longest:
        raise ValueError(
            f"{benchmark.file} has {len(text):,} characters, benchmark {benchmark.name} asks for documents of "
            f"{longest:,}: lower document_chars, or name a longer text"
        )
    for num_chars in benchmark.document_chars:
        for depth in benchmark.depths:
            for number in range(benchmark.items_per_depth):
                chance = random.Random(f"{num_chars} {depth} {number}")
                names = _different(chance, benchmark.num_distractors + 1, _name)
                codes = _different(chance, benchmark.num_distractors + 1, _code)
                notes = [NOTE.format(name=name, code=code) for name, code in zip(names, codes, strict=True)]
                room = num_chars - sum(len(note) + 1 for note in notes)
                filler = _filler(chance, room) if text is None else _cut(chance, text, room)
                document = _hidden(chance, filler, notes, depth)
                question = CHAT_QUESTION if benchmark.is_chat else PLAIN_QUESTION
                yield f"{num_chars} characters", document, question.format(name=names[0]), codes[0]


def states_code(text: str, code: str) -> bool:
    """Whether the first code in an answer is the right one: naming every code of the document is no answer."""
    first = CODE.search(text)
    return first is not None and first[0] == code


def _hidden(chance: random.Random, filler: str, notes: list[str], depth: float) -> str:
    """The filler with the first note at its depth, counted in sentences, and the others anywhere."""
    sentences = SENTENCE_END.split(filler)
    places = [(round(depth * len(sentences)), 0, notes[0])]
    places += [(chance.randint(0, len(sentences)), number, note) for number, note in enumerate(notes[1:], 1)]
    for place, _, note in sorted(places, reverse=True):
        sentences.insert(place, note)
    return " ".join(sentences)


def _cut(chance: random.Random, text: str, num_chars: int) -> str:
    start = chance.randint(0, len(text) - num_chars)
    return CODE.sub("", text[start : start + num_chars]).strip()


def _filler(chance: random.Random, num_chars: int) -> str:
    text = ""
    while len(text) < num_chars:
        text += f"By the {chance.choice(PLACES)} {chance.choice(DEEDS)} {chance.choice(TIMES)}. "
    return text[:num_chars].strip()


def _different(chance: random.Random, count: int, make: Callable[[random.Random], str]) -> list[str]:
    made: dict[str, None] = {}
    while len(made) < count:
        made[make(chance)] = None
    return list(made)


def _name(chance: random.Random) -> str:
    return "".join(chance.choices(SYLLABLES, k=3)).capitalize()


def _code(chance: random.Random) -> str:
    return str(chance.randrange(10 ** (CODE_DIGITS - 1), 10**CODE_DIGITS))
