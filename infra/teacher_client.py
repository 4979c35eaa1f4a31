"""The client of a teacher: any server with OpenAI's chat completions.

Its key comes from the environment and is written nowhere.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from openai import OpenAI

KEY_VARIABLE = "GLM46_TEACHER_API_KEY"


def teacher_client(base_url: str, timeout_seconds: float) -> OpenAI:
    """A client that retries nothing by itself. Servers without keys get none. Raises ValueError for a URL that holds a
    password: it is written into manifests."""
    from openai import OpenAI

    if "@" in urlsplit(base_url).netloc:
        raise ValueError(
            f"teacher.request.base_url names a user or a password before @: give the key only in {KEY_VARIABLE}"
        )

    return OpenAI(
        base_url=base_url, api_key=os.environ.get(KEY_VARIABLE) or "none", timeout=timeout_seconds, max_retries=0
    )
