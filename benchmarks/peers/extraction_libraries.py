"""Every library that was tried for main content, run by the peers' Python: python extraction_libraries.py PAGES.jsonl
NAME...

PAGES has one JSON object with `html` per line. Prints one JSON line per library: its name, seconds, texts (empty where
it raised) and how many pages it raised on.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path


def trafilatura(**options: bool) -> Callable[[str], str | None]:
    from trafilatura import extract

    return lambda page: extract(page, include_comments=False, **options)


def readability() -> Callable[[str], str]:
    from lxml.html import fromstring
    from readability import Document

    return lambda page: "\n".join(fromstring(Document(page).summary(html_partial=True)).itertext())


def resiliparse(main_content: bool, **options: bool) -> Callable[[str], str]:
    from resiliparse.extract.html2text import extract_plain_text

    return lambda page: extract_plain_text(
        page, main_content=main_content, alt_texts=False, preserve_formatting=True, **options
    )


def justext() -> Callable[[str], str]:
    from justext import justext as classify

    options = {"length_low": 30, "length_high": 100, "stopwords_low": 0, "stopwords_high": 0, "encoding": "utf-8"}
    return lambda page: "\n".join(
        part.text for part in classify(page.encode(), frozenset(), **options) if not part.is_boilerplate
    )


def boilerpy3(kind: str) -> Callable[[str], str]:
    from boilerpy3 import extractors

    return getattr(extractors, kind)(raise_on_failure=False).get_content


def goose3() -> Callable[[str], str]:
    from goose3 import Goose

    return lambda page: Goose({"enable_image_fetching": False}).extract(raw_html=page).cleaned_text


LIBRARIES: dict[str, Callable[[], Callable[[str], str | None]]] = {
    "trafilatura": lambda: trafilatura(),
    "trafilatura precision": lambda: trafilatura(favor_precision=True),
    "trafilatura recall": lambda: trafilatura(favor_recall=True),
    "trafilatura fast": lambda: trafilatura(fast=True),
    "trafilatura precision, fast": lambda: trafilatura(favor_precision=True, fast=True),
    "readability-lxml": readability,
    "resiliparse main content": lambda: resiliparse(True),
    "resiliparse, no comments": lambda: resiliparse(True, comments=False, post_meta=False),
    "resiliparse all text": lambda: resiliparse(False),
    "justext": justext,
    "boilerpy3 article": lambda: boilerpy3("ArticleExtractor"),
    "boilerpy3 default": lambda: boilerpy3("DefaultExtractor"),
    "goose3": goose3,
}


def main(pages_path: Path, names: list[str]) -> None:
    """One JSON line per library."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    pages = [json.loads(line)["html"] for line in pages_path.open(encoding="utf-8")]
    for name in names or list(LIBRARIES):
        extract = LIBRARIES[name]()
        num_raised = 0
        texts = []
        started = time.process_time()
        for page in pages:
            try:
                texts.append(extract(page) or "")
            except Exception:  # a library's own failure is a page without text, and is counted
                num_raised += 1
                texts.append("")
        seconds = time.process_time() - started
        print(json.dumps({"name": name, "seconds": seconds, "num_raised": num_raised, "texts": texts}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
