"""Perplexities by KenLM, run by the peers' Python: python kenlm_scores.py MODEL.arpa TEXTS.jsonl

TEXTS has one JSON object per line: `text`, and `words`, its words joined by spaces. Prints one JSON line with the
perplexities. For every line that it then reads it scores all texts again and prints processor seconds: `words`, from
joined words, and `text`, from text, where the words are what a regular expression finds.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

LONGEST_NUMBER = 8
WORD = re.compile(r"\w+")


def joined_words(text: str) -> str:
    """Numbers by their length, as in tasks/data/scoring/ngram_model.py."""
    words = WORD.findall(text.lower())
    return " ".join(f"#{min(len(word), LONGEST_NUMBER)}" if word.isdecimal() else word for word in words)


def main() -> None:
    """Score once, then again for every line read."""
    import kenlm

    model = kenlm.Model(sys.argv[1])
    rows = [json.loads(line) for line in Path(sys.argv[2]).read_text(encoding="utf-8").splitlines()]
    texts, joined = [row["text"] for row in rows], [row["words"] for row in rows]

    def perplexity(words: str) -> float:
        return 10 ** (-model.score(words, bos=False, eos=False) / max(1, words.count(" ") + 1))

    print(json.dumps([perplexity(words) for words in joined]), flush=True)
    for _ in sys.stdin:
        started = time.process_time()
        for words in joined:
            perplexity(words)
        between = time.process_time()
        for text in texts:
            perplexity(joined_words(text))
        print(json.dumps({"words": between - started, "text": time.process_time() - between}), flush=True)


if __name__ == "__main__":
    main()
