"""A line of the checklist, and what the lines judge."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from infra.cluster.cluster_settings import ClusterSettings
from infra.cluster.probe_node import NodeReport
from infra.home import Home
from infra.machine.network import Network

MAX_PROBLEMS = 3
"""That an item shows."""
GB = 1e9


@dataclass(frozen=True)
class Item:
    """One line. `measured` is the reason where it was skipped; `fix` is empty unless it failed."""

    id: str
    threshold: str
    measured: str
    state: Literal["passed", "failed", "skipped"]
    fix: str = ""


@dataclass(frozen=True)
class Cluster:
    """What the items judge."""

    home: Home
    settings: ClusterSettings
    network: Network | None
    reports: tuple[NodeReport, ...]
    """Of the nodes that could be looked at; none where the job that asks them failed."""
    unreached: str
    """Why some or all are missing, empty where none is."""


def judged(id_: str, threshold: str, measured: str, problems: Sequence[str], fix: str) -> Item:
    """Failed where there are problems, of which the first are shown."""
    if not problems:
        return Item(id_, threshold, measured, "passed")
    return Item(id_, threshold, first_of(problems), "failed", fix)


def first_of(problems: Sequence[str]) -> str:
    """Those that a line shows, and how many more there are."""
    more = f"; and {len(problems) - MAX_PROBLEMS} more" if len(problems) > MAX_PROBLEMS else ""
    return "; ".join(problems[:MAX_PROBLEMS]) + more


def skipped(id_: str, threshold: str, reason: str) -> Item:
    return Item(id_, threshold, reason, "skipped")


def has_passed(items: Iterable[Item]) -> bool:
    """Skipped items fail nothing."""
    return all(item.state != "failed" for item in items)


def as_json(items: Sequence[Item]) -> str:
    """One JSON document; `passed` as the exit code says."""
    return json.dumps({"passed": has_passed(items), "items": [asdict(item) for item in items]}, indent=1)
