"""Writes artifacts to Prefect's UI: tables, pictures and links, under keys that stay the same from run to run."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from typing import Any

from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact

PNG_START = b"\x89PNG"


def show_table(key: str, rows: Sequence[dict[str, Any]], description: str) -> None:
    """A table; its columns are the keys of the rows."""
    create_table_artifact(table=list(rows), key=_allowed(key), description=description)


def show_picture(key: str, picture: bytes, description: str) -> None:
    """A PNG or SVG with a background of its own (the UI's may be black), held in the artifact: the UI asks no other
    server for it.

    It is a Markdown artifact, not an image artifact: below the latter the UI prints the whole address, which here is
    the picture.
    """
    kind = "png" if picture.startswith(PNG_START) else "svg+xml"
    address = f"data:image/{kind};base64,{base64.b64encode(picture).decode()}"
    create_markdown_artifact(markdown=f"![{description}]({address})", key=_allowed(key), description=description)


def show_link(key: str, url: str, text: str) -> None:
    """A link to another page, for example a run in MLflow."""
    create_link_artifact(link=url, link_text=text, key=_allowed(key), description=url)


def _allowed(key: str) -> str:
    """Prefect's keys hold lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", key.lower()).strip("-")
