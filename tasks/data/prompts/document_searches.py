"""Tasks of the environment `search` about the run's own documents: which word one of their passages has in a gap.

A task's index has passages of INDEX_PASSAGES documents. The answer is a word that only one of them has, and the words
around the gap find it. Of held-out documents nothing is asked and nothing is shown.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

from configs.files.stored_files import StoredFile
from tasks.data.environments.environment import signatures
from tasks.data.environments.environments import TOOLS
from tasks.data.environments.passages import KIND, search, words_of
from tasks.data.environments.task import Task
from tasks.data.records.documents import AGENTIC, TRAIN, document_id
from tasks.data.records.stored_tables import BATCH_ROWS, open_parquet

SOURCE = "synthetic/document-searches"
INDEX_PASSAGES = 32
MIN_PASSAGE_CHARS, MAX_PASSAGE_CHARS = 80, 300
MIN_ANSWER_CHARS = 5
WORDS_BEFORE, WORDS_AFTER = 6, 4
GAP = "____"


def document_search_rows(files: Sequence[StoredFile], count: int) -> list[dict[str, Any]]:
    """Rows of prompts.parquet, at most `count`. Files of documents are read only as far as they are needed; documents
    are in the order of their hashes, so their beginning is a sample."""
    passages = chain.from_iterable(_passages(file) for file in files)
    tools, rows = signatures(TOOLS[KIND]), []
    asked: set[str] = set()
    while len(rows) < count and (index := list(islice(passages, INDEX_PASSAGES))):
        for task in document_searches(index)[: count - len(rows)]:
            if task.question not in asked:
                asked.add(task.question)
                number = len(rows)
                place = {"id": document_id(SOURCE, number, 0), "source": SOURCE, "offset": number}
                place |= {"collection": SOURCE, "licence": "", "domain": AGENTIC, "kind": KIND}
                rows.append({**place, "prompt": task.question, "tools": tools, "answer": task.expected})
    return rows


def document_searches(passages: Sequence[str]) -> list[Task]:
    """A task of each passage that has a word of its own, and that its other words find in this index."""
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


def _passages(file: StoredFile) -> Iterator[str]:
    """A passage of each training document that has one: its first paragraph that is long enough, on one line."""
    with open_parquet(file) as opened:
        for batch in opened.iter_batches(BATCH_ROWS, columns=["text", "split"]):
            for text, split in zip(batch["text"].to_pylist(), batch["split"].to_pylist(), strict=True):
                paragraphs = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
                fitting = (each for each in paragraphs if len(each) >= MIN_PASSAGE_CHARS)
                if split == TRAIN and (passage := next(fitting, "")):
                    yield passage[:MAX_PASSAGE_CHARS].rpartition(" ")[0] or passage[:MAX_PASSAGE_CHARS]
