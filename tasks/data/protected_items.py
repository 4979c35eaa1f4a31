"""What may not be trained on: the evaluation files of the data directory, and the very problems that gate promotion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks.data.overlap import MIN_WORDS_OF_PROBLEM, MIN_WORDS_OF_TEXT, OverlapIndex, build_index

if TYPE_CHECKING:
    from infra.step import Artifact
    from tasks.data.ingest_documents import IngestedDocuments
    from tasks.data.synthesize_problems import SynthesizedProblems

OVERLAPS_TEXT, OVERLAPS_PROBLEM = "overlaps_evaluation_text", "overlaps_problem"


@dataclass(frozen=True)
class ProtectedItems:
    """Texts of evaluation records, then of the problems: each stated (`12 + 7 = 19`) and asked (`What is 12 + 7?`)."""

    ids: list[str]
    """Of the item that each text belongs to."""
    texts: list[str]
    num_records: int
    """Of the leading texts that are evaluation records."""

    @property
    def count(self) -> int:
        """Items, however often a text speaks of them."""
        return len(set(self.ids))

    def index(self, ngram_size: int) -> OverlapIndex:
        """What texts are looked up in; its numbers are places in `ids`."""
        records, problems = self.texts[: self.num_records], self.texts[self.num_records :]
        return build_index([(records, MIN_WORDS_OF_TEXT), (problems, MIN_WORDS_OF_PROBLEM)], ngram_size)

    def reason(self, number: int) -> str:
        """Why a text that overlaps with this one is dropped."""
        return OVERLAPS_TEXT if number < self.num_records else OVERLAPS_PROBLEM


def protected_items(ingested: Artifact[IngestedDocuments], synthetic: Artifact[SynthesizedProblems]) -> ProtectedItems:
    """Records and problems, each sorted by id."""
    import pyarrow.dataset as dataset
    import pyarrow.parquet as pq

    paths = [str(path) for path in ingested.paths("evaluation/*.parquet")]
    records = dataset.dataset(paths).to_table(columns=["id", "text"]).sort_by("id")
    problems = pq.read_table(synthetic.path("problems.parquet")).sort_by("id").to_pylist()
    stated = [(row["id"], text) for row in problems for text in (row["prompt"] + row["answer"], row["question"])]
    return ProtectedItems(
        ids=[*records.column("id").to_pylist(), *(identity for identity, _ in stated)],
        texts=[*records.column("text").to_pylist(), *(text for _, text in stated)],
        num_records=records.num_rows,
    )
