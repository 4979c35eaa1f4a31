"""Environment `search`: a question about passages that only a search shows, ranked by BM25 (Robertson and Zaragoza,
2009)."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from random import Random

from tasks.data.environments.environment import Environment, Parameter, Tool, ToolError
from tasks.data.environments.task import Task

KIND = "search"
UNSPACED = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
WORD = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+")
"""A word, or a character of a script that puts no space between words: Chinese, Japanese, Thai, Lao, Burmese, Khmer."""
NUM_SHOWN = 2
"""Passages that one search shows."""
SATURATION, LENGTH_SHARE = 1.2, 0.75
"""k1 and b of BM25."""
TOOLS = (
    Tool(
        "search",
        f"Shows the {NUM_SHOWN} passages that fit the words best.",
        (Parameter("query", "string", "Words to look for"),),
    ),
)
FIRST = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivo", "June", "Kofi", "Lena")
LAST = ("Brook", "Hale", "Marsh", "Stone", "Rivers", "Wells", "Ford", "Lake", "Field", "Moor")
TOWNS = ("Larden", "Mosby", "Nelwick", "Orrin", "Pellham", "Quarley", "Rosten", "Selby", "Tarnow", "Ulmen", "Verrin")
CRAFTS = ("painter", "baker", "composer", "surveyor", "printer", "gardener", "weaver", "glazier")


def open_search(expected: str) -> Environment:
    """`expected` is JSON: `passages`, and `answers`, any of which is right."""
    given = json.loads(expected)
    passages, right = given["passages"], {normalized(answer) for answer in given["answers"]}
    return Environment(
        {TOOLS[0].name: (TOOLS[0], lambda query: search(passages, query))}, lambda answer: normalized(answer) in right
    )


def normalized(text: str) -> str:
    """Lower-case words without articles and punctuation, as in SQuAD (arXiv 1606.05250)."""
    return " ".join(word for word in words_of(text) if word not in ("a", "an", "the"))


def words_of(text: str) -> list[str]:
    return WORD.findall(text.lower())


def search(passages: Sequence[str], query: str) -> str:
    """The best passages, a line each; equally good ones in their order. Raises ToolError where no word occurs."""
    counts = [Counter(words_of(passage)) for passage in passages]
    mean_length = sum(count.total() for count in counts) / len(counts) or 1.0  # where no passage has a word
    scores = [0.0] * len(passages)
    for word in sorted(set(words_of(query))):
        holders = sum(word in count for count in counts)
        rarity = math.log(1 + (len(counts) - holders + 0.5) / (holders + 0.5))
        for number, count in enumerate(counts):
            length = 1 - LENGTH_SHARE + LENGTH_SHARE * count.total() / mean_length
            scores[number] += rarity * count[word] * (SATURATION + 1) / (count[word] + SATURATION * length)
    best = sorted(range(len(passages)), key=lambda number: (-scores[number], number))[:NUM_SHOWN]
    shown = [passages[number] for number in best if scores[number] > 0]
    if not shown:
        raise ToolError("no passage has any of these words")
    return "\n".join(shown)


def make_task(draw: Random) -> Task:
    """Where the teacher of an invented person was born: the name of one passage leads to another."""
    people = draw.sample([f"{first} {last}" for first in FIRST for last in LAST], 6)
    towns, crafts = draw.sample(TOWNS, 6), draw.choices(CRAFTS, k=6)
    # Each is taught by the next, so that every person is named twice.
    passages = [
        f"{person} was a {craft} and learned with {teacher}. The birthplace of {person} is {town}."
        for person, teacher, craft, town in zip(people, [*people[1:], people[0]], crafts, towns, strict=True)
    ]
    draw.shuffle(passages)
    question = f"In which town was the teacher of {people[0]} born?"
    calls = [("search", {"query": f"{people[0]} learned with"}), ("search", {"query": f"birthplace of {people[1]}"})]
    expected = json.dumps({"passages": passages, "answers": [towns[1]]})
    return Task(question, expected, calls, towns[1], f"{question} {passages}")
