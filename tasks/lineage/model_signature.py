"""States what OpenSSF's model-signing signs of a model: every file of one directory with its sha256.

The digests come from the statement on the release, so no weights are read. Layout:
https://github.com/ossf/model-signing-spec, predicate https://model_signing/signature/v1.0.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from tasks.lineage.provenance import STATEMENT_TYPE

PREDICATE_TYPE = "https://model_signing/signature/v1.0"
WEIGHTS = "hf"


def signature_file(directory: str) -> str:
    """The name of the signature of one format's directory."""
    return "model.sig" if directory == WEIGHTS else f"model-{directory}.sig"


def model_payloads(model: str, subjects: Mapping[str, str]) -> dict[str, bytes]:
    """What is signed, by the name of the signature's file; `subjects` are those of a statement on a release: sha256 by
    directory/name."""
    by_directory: dict[str, dict[str, str]] = {}
    for subject, sha256 in subjects.items():
        directory, _, name = subject.partition("/")
        by_directory.setdefault(directory, {})[name] = sha256
    return {
        signature_file(directory): json.dumps(model_statement(model, files), sort_keys=True).encode()
        for directory, files in by_directory.items()
    }


def model_statement(model: str, files: Mapping[str, str]) -> dict[str, Any]:
    """The in-toto statement on the files of a directory. Its digest is that of all digests in the order of the
    paths."""
    names = sorted(files, key=PurePosixPath)
    whole = hashlib.sha256(b"".join(bytes.fromhex(files[name]) for name in names)).hexdigest()
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": model, "digest": {"sha256": whole}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "serialization": {"method": "files", "hash_type": "sha256", "allow_symlinks": False},
            "resources": [{"name": name, "algorithm": "sha256", "digest": files[name]} for name in names],
        },
    }
