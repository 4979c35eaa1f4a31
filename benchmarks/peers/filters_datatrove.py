"""datatrove's Gopher and FineWeb filters over texts, run by the peers' Python: python filters_datatrove.py INPUT.jsonl.
Last line: JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def main(source: Path) -> None:
    """CPU seconds of all filters, and the reason of each for each document, empty where it passes."""
    from datatrove.data import Document
    from datatrove.pipeline.filters import FineWebQualityFilter, GopherQualityFilter, GopherRepetitionFilter

    documents = [
        Document(text=text, id=str(number))
        for number, text in enumerate(json.loads(source.read_text(encoding="utf-8")))
    ]
    filters = {
        "gopher_repetition": GopherRepetitionFilter(),
        "gopher_quality": GopherQualityFilter(),
        "fineweb": FineWebQualityFilter(char_duplicates_ratio=0.1),
    }
    reasons, seconds = {}, {}
    for name, given in filters.items():
        given.filter(documents[0])
        started = time.process_time()
        verdicts = [given.filter(document) for document in documents]
        seconds[name] = time.process_time() - started
        reasons[name] = ["" if verdict is True else verdict[1] for verdict in verdicts]
    print(json.dumps({"seconds": seconds, "reasons": reasons}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
