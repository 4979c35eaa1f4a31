"""Records how far the phases of a course have read every domain: the next phase of the course continues there.

A domain has one order of documents per epoch, the same for all phases of a course. A visit is an index into these
orders laid end to end: the number of the epoch x documents + the index in its order. Each quality bucket advances
along them at its own pace, so a position is a visit per bucket. A document counts as read if any of its tokens was
read. So a phase begins with a document that the phases before it left whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from configs.schema import Frozen

if TYPE_CHECKING:
    from pathlib import Path

POSITION_FILE = "position.json"


class DomainPosition(Frozen):
    """The position up to which the phases of a course have read one domain."""

    num_documents: int
    next_visits: tuple[int, ...]
    """Next visit by quality bucket, the last entry for documents without a bucket; one entry where no phase has
    distinguished buckets."""
    waiting: tuple[int, ...]
    """Earlier visits that were not read, ascending: those that did not fit into the last row of best fit."""
    epochs: float
    """Passes over the domain, each document counted as often as its bucket weighs."""

    def by_bucket(self, num_buckets: int) -> DomainPosition:
        """The same position with an entry per bucket."""
        if len(self.next_visits) == num_buckets:
            return self
        assert len(self.next_visits) == 1, (self.next_visits, num_buckets)
        return self.model_copy(update={"next_visits": self.next_visits * num_buckets})


@dataclass(frozen=True)
class CoursePosition:
    """The positions up to which the phases of a course have read all domains."""

    seed: int
    domains: dict[str, DomainPosition]

    @property
    def num_buckets(self) -> int:
        """Number of entries per domain: the quality buckets that earlier phases distinguished, or 1."""
        return max((len(position.next_visits) for position in self.domains.values()), default=1)

    def of(self, domain: str, num_documents: int, num_buckets: int) -> DomainPosition:
        """The position in one domain. Raises ValueError where earlier phases read a domain with other documents."""
        position = self.domains.get(domain)
        if position is None:
            return DomainPosition(num_documents=num_documents, next_visits=(0,) * num_buckets, waiting=(), epochs=0.0)
        if position.num_documents != num_documents:
            raise ValueError(
                f"domain {domain} has {num_documents} documents, the phases before on the course read "
                f"{position.num_documents}: pack all "
                "phases of a course from the same shards"
            )
        return position.by_bucket(num_buckets)

    def with_domains(self, domains: Mapping[str, DomainPosition]) -> CoursePosition:
        return replace(self, domains={**self.domains, **domains})

    def dump(self) -> str:
        domains = {name: position.model_dump(mode="json") for name, position in sorted(self.domains.items())}
        return json.dumps({"seed": self.seed, "domains": domains}, indent=1) + "\n"


def read_position(path: Path | None, seed: int) -> CoursePosition:
    """The position at which the phase before on the course stopped (its position.json); the course's start for None.
    Raises ValueError for another seed, which gives other orders."""
    if path is None:
        return CoursePosition(seed, {})
    stored = json.loads(path.read_text())
    if stored["seed"] != seed:
        raise ValueError(
            f"the phase has seed {seed}, the phase before it on the course {stored['seed']}: one seed orders the "
            f"documents of a whole "
            "course: give all its phases the same seed"
        )
    return CoursePosition(
        seed, {name: DomainPosition.model_validate(values) for name, values in stored["domains"].items()}
    )
