"""Keeps what was found in a source file beside its bytecode: a run does not parse four hundred files again.

As of bytecode, nothing is kept where that cannot be written (a read-only installation) or shall not
(PYTHONDONTWRITEBYTECODE).
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

from configs.files.atomic_files import replacing

SUFFIX = ".found.json"
"""In place of .pyc."""
FINDERS = ("code_digest.py", "source_files.py", "parsed_sources.py")
"""Modules beside this one whose code decides what is found."""
FOUND_BY = sys.version.encode() + b"".join(Path(__file__).with_name(name).read_bytes() for name in FINDERS)
"""Read with the code: an update while this process runs must not take what it finds for its own."""


def found_once(path: Path, contents: Sequence[bytes], find: Callable[[], Any]) -> Any:
    """What `find` says of a source file, a JSON value. It is asked once for these contents: the file's and those of
    what it includes."""
    key, kept = _key(contents), Path(cache_from_source(str(path))).with_suffix(SUFFIX)
    with suppress(OSError, ValueError):  # none yet, or damaged: it is found anew
        recorded = json.loads(kept.read_bytes())
        if isinstance(recorded, dict) and recorded.get("key") == key:
            return recorded["found"]
    found = find()
    if not sys.dont_write_bytecode:
        with suppress(OSError):
            kept.parent.mkdir(exist_ok=True)
            with replacing(kept) as new:
                new.write_text(json.dumps({"key": key, "found": found}))
    return found


def _key(contents: Sequence[bytes]) -> str:
    digest = hashlib.sha256(FOUND_BY)
    for content in contents:
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()
