"""A manifest of many files as it is stored: the files are in a listing beside them, which the manifest names by its
digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

from infra.step import Manifest, canonical_json

MAX_LISTED_IN_PLACE = 2000
"""Files that a manifest lists itself: above, it would be megabytes that every look at the store reads."""
LISTING = "listing"
FILES = ("content", "evidence")


def split_manifest(manifest: Manifest) -> tuple[bytes, tuple[str, bytes] | None]:
    """The manifest's JSON, and name and content of its listing where it has one."""
    if len(manifest.content) + len(manifest.evidence) <= MAX_LISTED_IN_PLACE:
        return manifest.model_dump_json(indent=1).encode(), None
    listing = canonical_json(manifest.model_dump(mode="json", include=set(FILES))).encode()
    digest = hashlib.sha256(listing).hexdigest()
    name = f"objects/{manifest.object_key}/{manifest.attempt}/.{LISTING}-{digest[:16]}"
    head = manifest.model_dump(mode="json", exclude=set(FILES))
    return json.dumps({**head, LISTING: {"name": name, "sha256": digest}}, indent=1).encode(), (name, listing)


def join_manifest(data: bytes, read: Callable[[str], bytes | None]) -> dict[str, Any]:
    """The values of a manifest with all its files. Raises ValueError where the JSON or the listing is not whole."""
    values = json.loads(data)
    if isinstance(values, dict) and (named := values.pop(LISTING, None)) is not None:
        listing = read(named["name"])
        if listing is None or hashlib.sha256(listing).hexdigest() != named["sha256"]:
            raise ValueError(f"its listing {named['name']} is {'missing' if listing is None else 'damaged'}")
        values |= json.loads(listing)
    return values
