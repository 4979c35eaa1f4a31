"""What a run shows in Prefect's UI beside its states: tables, pictures and links, under keys that stay the same from run to run."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from typing import Any

from prefect.artifacts import create_image_artifact, create_link_artifact, create_table_artifact

PNG_START = b"\x89PNG"


def show_table(key: str, rows: Sequence[dict[str, Any]], description: str) -> None:
    """A table; its columns are the keys of the rows."""
    create_table_artifact(table=list(rows), key=_allowed(key), description=description)


def show_picture(key: str, picture: bytes, description: str) -> None:
    """A PNG or SVG, held in the artifact itself: the UI asks no other server for it."""
    kind = "png" if picture.startswith(PNG_START) else "svg+xml"
    create_image_artifact(
        image_url=f"data:image/{kind};base64,{base64.b64encode(picture).decode()}", key=_allowed(key), description=description
    )


def show_link(key: str, url: str, text: str) -> None:
    """A link to another page, for example a run in MLflow."""
    create_link_artifact(link=url, link_text=text, key=_allowed(key), description=text)


def _allowed(key: str) -> str:
    """Prefect's keys hold lower-case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", key.lower()).strip("-")
