"""Language identification by one library, run by the peers' Python: python language_id_libraries.py TEXTS.jsonl NAME

TEXTS has one JSON string per line. Prints one JSON line: processor seconds, and the library's code per text; loading is
not timed. (heliport, which is GPL, was tried by hand: accuracy 0.920 at 3.4 MB/s on the same sentences; langidentify
0.918 at 0.2.)
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path


def lingua(low_accuracy: bool) -> Callable[[str], str]:
    from lingua import LanguageDetectorBuilder

    builder = LanguageDetectorBuilder.from_all_languages().with_preloaded_language_models()
    detector = (builder.with_low_accuracy_mode() if low_accuracy else builder).build()

    def detect(text: str) -> str:
        language = detector.detect_language_of(text)
        return language.iso_code_639_1.name.lower() if language else ""

    return detect


def py3langid() -> Callable[[str], str]:
    from py3langid import classify

    return lambda text: classify(text)[0]


def cld3() -> Callable[[str], str]:
    from gcld3 import NNetLanguageIdentifier

    detector = NNetLanguageIdentifier(0, 1000)
    return lambda text: detector.FindLanguage(text).language


LIBRARIES: dict[str, Callable[[], Callable[[str], str]]] = {
    "lingua": lambda: lingua(low_accuracy=False),
    "lingua low accuracy": lambda: lingua(low_accuracy=True),
    "py3langid": py3langid,
    "cld3": cld3,
}


def main() -> None:
    """Run one library over all texts."""
    texts = [json.loads(line) for line in Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()]
    detect = LIBRARIES[sys.argv[2]]()
    detect(texts[0])
    started = time.process_time()
    codes = [str(detect(text) or "") for text in texts]
    print(json.dumps({"seconds": time.process_time() - started, "codes": codes}))


if __name__ == "__main__":
    main()
