"""Posts a small JSON object to the address in GLM46_FAILURE_WEBHOOK when a run failed, crashed or was refused.

The address may hold a token: neither it nor an answer of its server is ever printed.
"""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPException
from pathlib import Path

WEBHOOK_URL = "GLM46_FAILURE_WEBHOOK"
TIMEOUT_SECONDS = 10
MAX_REASON_CHARS = 1000


def failure(state: str, name: str, flow_run_id: str, parameters: Mapping[str, object], reason: str) -> dict[str, str]:
    """What is posted; `text` is what chat servers show. Name and id of the flow run are empty where it is not known."""
    scale, short = Path(str(parameters.get("scale", ""))).stem, reason[:MAX_REASON_CHARS]
    return {
        "text": f"{f'glm46 run {name}'.rstrip()}: {state}. {short}".rstrip(),
        "state": state,
        "scale": scale,
        "flow_run": name,
        "flow_run_id": flow_run_id,
        "reason": short,
    }


def post_failure(values: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Post it, once, where the variable is set. A receiver that does not take it is said and fails nothing: the run has
    ended already."""
    url = os.environ.get(WEBHOOK_URL, "")
    if not url:
        return
    if not url.startswith(("http://", "https://")):
        say(f"{WEBHOOK_URL} does not begin with http:// or https://: nothing was posted")
        return
    try:
        request = urllib.request.Request(
            url, json.dumps(values).encode(), {"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS):
            pass
    except (OSError, ValueError, HTTPException) as error:
        answered = getattr(error, "code", "")
        say(f"{WEBHOOK_URL} was not reached ({type(error).__name__}{f' {answered}' if answered else ''})")
