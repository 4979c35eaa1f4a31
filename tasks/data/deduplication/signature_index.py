"""Looks up single documents among deduplicated ones: stored signatures in a datasketch.MinHashLSH.

It uses the bands and rows of the Spark job. So a text has the same candidates as in the job, and each has the same
verdict. (The job does not compare all pairs of a large bucket; a look-up compares all candidates.)

    index = SignatureIndex.open([deduplicated_dir], recipe.deduplicate)
    index.lookup("some text")  # [Neighbour(id="...", num_shared=..., num_union=...)], best first
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from tasks.data.deduplication.duplicate_candidates import read_signatures
from tasks.data.deduplication.earlier_documents import list_earlier_documents
from tasks.data.deduplication.minhash import banding, jaccard_counts, permutations, shingle_sets, signatures
from tasks.data.records.documents_by_id import read_by_id
from tasks.data.records.parcels import id_numbers, id_strings

if TYPE_CHECKING:
    from datasketch import MinHash, MinHashLSH

    from configs.files.stored_files import StoredFile
    from configs.schema import DeduplicationRecipe

SCHEME = "affine32"


@dataclass(frozen=True)
class Neighbour:
    """A stored document and its true similarity to the text that was looked up."""

    id: str
    num_shared: int
    num_union: int

    @property
    def similarity(self) -> float:
        return self.num_shared / self.num_union


@dataclass(frozen=True)
class SignatureIndex:
    """Signatures in memory (about 1 KB per document), documents in their files."""

    recipe: DeduplicationRecipe
    lsh: MinHashLSH
    document_files: list[StoredFile]

    @classmethod
    def open(cls, directories: list[Path], recipe: DeduplicationRecipe) -> Self:
        """The documents that these outputs of deduplicate_documents kept. Raises ValueError for signatures of another
        recipe."""
        from datasketch import MinHashLSH

        earlier = list_earlier_documents(tuple(str(directory) for directory in directories))
        earlier.check_signatures(recipe)
        lsh = MinHashLSH(num_perm=recipe.num_permutations, params=banding(recipe.threshold, recipe.num_permutations))
        with lsh.insertion_session() as session:
            for path in earlier.signature_paths:
                for ids, signed in read_signatures(path):
                    for identity, values in zip(id_strings(ids).to_pylist(), signed, strict=True):
                        session.insert(identity, _sketch(values))
        return cls(recipe, lsh, earlier.document_files)

    def candidates(self, text: str) -> list[str]:
        """Ids of the stored documents that share a band with the text, sorted."""
        shingles, offsets = shingle_sets([text], self.recipe.ngram_size)
        if not len(shingles):
            return []
        (values,) = signatures(shingles, offsets, permutations(self.recipe.num_permutations))
        return sorted(str(identity) for identity in self.lsh.query(_sketch(values)))

    def lookup(self, text: str) -> list[Neighbour]:
        """The stored documents whose similarity to the text reaches the threshold, the most similar first."""
        import pyarrow as pa

        candidates, compared = self.candidates(text), []
        for batch in read_by_id(
            self.document_files, np.sort(id_numbers(pa.array(candidates, pa.string()))), ["id", "text"]
        ):
            others = np.arange(1, batch.num_rows + 1)
            sets = shingle_sets([text, *batch.column("text").to_pylist()], self.recipe.ngram_size)
            counts = (column.tolist() for column in jaccard_counts(*sets, np.zeros_like(others), others))
            compared += [Neighbour(*row) for row in zip(batch.column("id").to_pylist(), *counts, strict=True)]
        assert sorted(one.id for one in compared) == candidates, (
            "signatures and documents of the directories belong together"
        )
        near = (neighbour for neighbour in compared if neighbour.similarity >= self.recipe.threshold)
        return sorted(near, key=lambda neighbour: (-neighbour.similarity, neighbour.id))


def _sketch(values: np.ndarray) -> MinHash:
    from datasketch import MinHash

    return MinHash(num_perm=len(values), hashvalues=values, scheme=SCHEME, seed=1)
