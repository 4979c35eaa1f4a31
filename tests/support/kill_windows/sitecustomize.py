"""Put on PYTHONPATH by the kill tests: stops a process of a run inside a named window, so that the test can kill one
there.

The plan {"window": NAME, "occurrence": N} is in $GLM46_KILL_DIR/plan.json. The process that makes the Nth passage
through that window writes the file `reached` and waits until the test removes it. The product knows nothing of this:
the windows are calls of the standard library that commits, saves and alias moves make.
"""

import http.client
import json
import os
import time
from pathlib import Path

KILL_DIR = os.environ.get("GLM46_KILL_DIR")


def pause(window: str) -> None:
    """Count a passage through a window and wait if it is the planned one."""
    plan = json.loads(Path(KILL_DIR, "plan.json").read_text())
    if plan["window"] != window:
        return
    for number in range(10_000):
        try:
            os.close(os.open(os.path.join(KILL_DIR, f"passage-{number}"), os.O_CREAT | os.O_EXCL))
            break
        except FileExistsError:
            continue
    if number == plan["occurrence"]:
        reached = os.path.join(KILL_DIR, "reached")
        with open(reached, "w") as file:
            file.write(str(os.getpid()))
        while os.path.exists(reached):
            time.sleep(0.02)


def wrap(owner: object, name: str, before: str, after: str, applies) -> None:
    """Put windows before and after a call where `applies` says so."""
    original = getattr(owner, name)

    def wrapped(*arguments, **named):
        inside = applies(*arguments, **named)
        if inside and before:
            pause(before)
        result = original(*arguments, **named)
        if inside and after:
            pause(after)
        return result

    setattr(owner, name, wrapped)


def is_commit(source, target, **named) -> bool:
    """The conditional create of a manifest."""
    return "/manifests/" in os.fspath(target) and os.fspath(target).endswith(".json")


def is_save(source, target, **named) -> bool:
    """A checkpoint that is renamed into place, or `latest` that is moved."""
    return "/checkpoints/" in os.fspath(target)


def is_alias_move(connection, method, url, *rest, **named) -> bool:
    """The request that sets an alias of a registered model."""
    return method == "POST" and "registered-models/alias" in url


def is_served_request(connection, method, url, *rest, **named) -> bool:
    """A request to the model server that scores a token."""
    return method == "POST" and url == "/completion"


if KILL_DIR:
    wrap(os, "link", "before a commit", "after a commit", is_commit)
    for rename in ("rename", "replace"):
        wrap(os, rename, "in a save", "in a save", is_save)
    wrap(http.client.HTTPConnection, "putrequest", "before an alias move", "after an alias move", is_alias_move)
    wrap(http.client.HTTPConnection, "putrequest", "in a served request", "", is_served_request)
