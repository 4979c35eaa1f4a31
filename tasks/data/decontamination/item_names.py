"""The protected items by their numbers in an index: what an overlap is called. Runs in executors: imports no Spark."""

from __future__ import annotations

from dataclasses import dataclass

PROBLEM = "problem"


@dataclass(frozen=True)
class ProtectedItems:
    """Evaluation records by id, then the problems by id; an item's number is its index."""

    ids: list[str]
    kinds: list[str]
    sources: list[str]
    offsets: list[int]

    @property
    def count(self) -> int:
        return len(self.ids)

    @property
    def num_records(self) -> int:
        """Number of the leading items that are evaluation records."""
        return self.count - self.kinds.count(PROBLEM)

    def reason(self, number: int) -> str:
        """Why a text that overlaps with this item is dropped."""
        return f"overlaps_{self.kinds[number]}"

    def address(self, number: int) -> str:
        """Source and offset of the item, for messages."""
        return f"{self.sources[number]} at {self.offsets[number]}"
