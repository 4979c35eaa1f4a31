"""Tasks of the environment `search` about the run's own documents: which word one of their passages has in a gap.

A task's index has passages of INDEX_PASSAGES documents. The answer is a word that only one of them has, and the words
around the gap find it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tasks.data.environments.environment import signatures
from tasks.data.environments.environments import TOOLS
from tasks.data.environments.passages import KIND, search, words_of
from tasks.data.environments.task import Task
from tasks.data.records.documents import AGENTIC, document_id

SOURCE = "synthetic/document-searches"
INDEX_PASSAGES = 32
MIN_ANSWER_CHARS = 5
WORDS_BEFORE, WORDS_AFTER = 6, 4
GAP = "____"


def document_search_rows(passages: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of prompts.parquet: at most one task of each passage, in their order."""
    tools = signatures(TOOLS[KIND])
    tasks: dict[str, Task] = {}
    for start in range(0, len(passages), INDEX_PASSAGES):
        for task in document_searches(passages[start : start + INDEX_PASSAGES]):
            tasks.setdefault(task.question, task)
    return [
        {
            "id": document_id(SOURCE, number, 0),
            "source": SOURCE,
            "offset": number,
            "collection": SOURCE,
            "licence": "",
            "domain": AGENTIC,
            "kind": KIND,
            "prompt": task.question,
            "tools": tools,
            "answer": task.expected,
        }
        for number, task in enumerate(tasks.values())
    ]


def document_searches(passages: Sequence[str]) -> list[Task]:
    """A task of each passage that has a word of its own, and that its other words find in this index. A single passage
    is no index."""
    if len(passages) == 1:
        return []
    holders = Counter(word for passage in passages for word in set(words_of(passage)))
    tasks = []
    for passage in passages:
        words = passage.split(" ")
        times = Counter(words_of(passage))
        own = [
            number
            for number, word in enumerate(words)
            if word.isalpha() and len(word) >= MIN_ANSWER_CHARS and times[word.lower()] == holders[word.lower()] == 1
        ]
        if not own:
            continue
        gap = max(own, key=lambda number: (len(words[number]), -number))
        before, after = words[max(0, gap - WORDS_BEFORE) : gap], words[gap + 1 : gap + 1 + WORDS_AFTER]
        query = " ".join([*before, *after])
        if not words_of(query) or passage not in search(passages, query).split("\n"):
            continue
        question = f"Search the documents. Which word is in the gap? {' '.join([*before, GAP, *after])}"
        expected = json.dumps({"passages": list(passages), "answers": [words[gap]]}, ensure_ascii=False)
        tasks.append(Task(question, expected, [("search", {"query": query})], words[gap], question))
    return tasks
