"""Which documents are alike, and how clusters of them are divided between training and measuring."""

from __future__ import annotations

from typing import Self, get_args

from pydantic import Field, model_validator

from configs.schema.base import Frozen, PackagedEncoder


class SemanticRecipe(Frozen):
    """Code and commits are left out: the threshold is measured on prose."""

    embedding_model: str
    """all-MiniLM-L6-v2, which an installed package holds, or a directory with a model that gives texts their vectors,
    on a file system that executors see: config.json, tokenizer.json and *.safetensors of an encoder (MiniLM, E5 ...) or
    of a checkpoint that this pipeline exported. A vector is the mean of the last hidden states. Empty: a projection of
    word weights, which needs no model and does not capture meaning."""
    embedding_sha256: str = Field(pattern="^([0-9a-f]{64})?$")
    """sha256 of that directory's files: a run with other files stops; empty for a packaged encoder. `cd DIR && LC_ALL=C
    sh -c 'sha256sum *' | sha256sum` prints it."""
    passage_tokens: int = Field(gt=2)
    """With a model: tokens that it reads at once, special ones included; at most its positions."""
    max_passages: int = Field(gt=0)
    """With a model: most passages that are read of a document, at equal distances from its first to its last."""
    dimensions: int = Field(gt=0, le=1024)
    """Entries of a document's vector, one byte each. At 256 unrelated texts have cosines up to 0.3. Only of the
    projection: a model's vectors have its hidden size."""
    min_words: int = Field(gt=0)
    """Shorter documents are not judged: a few words have too little meaning."""
    max_cosine: float = Field(gt=0, le=1)
    """Of two documents of one cluster whose vectors are more alike than this, one stays. At 0.95 the judged collections
    of docs/data.md lose no document that differs from its neighbour; lower values take pages that share their template.
    That was measured without a model. With one, a cosine is whatever that model makes of it (unrelated texts are at 0.1
    in one, at 0.8 in the next): choose the bound by reading similar.parquet of a sample."""
    cluster_documents: int = Field(gt=1)
    """Desired number of documents per cluster; SemDedup compares inside a cluster only."""
    window: int = Field(gt=1)
    """Each document is compared with this many before it in its cluster: it bounds memory and time where a cluster is
    larger."""
    sample_documents: int = Field(gt=0)
    """Documents, chosen by the hash of their ids, that word weights and centroids are fitted on; bounds the driver's
    memory."""
    iterations: int = Field(gt=0)
    """Iterations of k-means on the sample."""
    max_removed_share: float = Field(gt=0, le=1)
    """Share of one source's documents above which the run stops and shows examples."""
    seed: int

    @model_validator(mode="after")
    def _has_a_digest(self) -> SemanticRecipe:
        is_directory = bool(self.embedding_model) and self.embedding_model not in get_args(PackagedEncoder)
        if is_directory != bool(self.embedding_sha256):
            raise ValueError(
                f"embedding_model ({self.embedding_model!r}) and embedding_sha256 ({self.embedding_sha256!r}): a "
                f"directory needs its "
                f"digest, {' or '.join(get_args(PackagedEncoder))} and the built-in vectors (both empty) have none; "
                "`cd DIR && LC_ALL=C sh -c 'sha256sum *' | sha256sum` prints the digest"
            )
        return self


class DeduplicationRecipe(Frozen):
    ngram_size: int = Field(gt=0)
    """Words per shingle."""
    num_permutations: int = Field(gt=0)
    threshold: float = Field(gt=0, lt=1)
    """True Jaccard similarity from which two documents are near-duplicates (S0: 0.7)."""
    max_removed_share: float = Field(gt=0, le=1)
    """Share of one source's documents above which the run stops and shows examples."""
    max_cluster_share: float = Field(gt=0, le=1)
    """Share of one source's documents that one cluster of near-duplicates may remove; above it the run stops and shows
    the cluster: pages of one template with other facts look like that. The largest clusters are in the record and the
    report in any case."""
    previous: tuple[str, ...]
    """Directories that earlier runs of deduplicate_documents left (documents/ and signatures/): new documents are
    compared with those kept there, by their stored signatures, and dropped where one of them is a duplicate. Empty:
    none."""

    @property
    def signing(self) -> dict[str, object]:
        """How signatures are made, as their files state it: only signatures that were made alike can be compared."""
        return {
            "ngram_size": self.ngram_size,
            "num_permutations": self.num_permutations,
            "scheme": "datasketch affine32, seed 1",
        }


class SplitRecipe(Frozen):
    """Membership is decided by the hash of a document's duplicate cluster."""

    validation_share: float = Field(gt=0, lt=1)
    """Expected share of duplicate clusters that is measured while a phase trains, and by which `validation.keep: best`
    chooses."""
    test_share: float = Field(gt=0, lt=1)
    """Expected share of duplicate clusters that gates judge by; a comparison needs documents of at least 20 records."""

    @model_validator(mode="after")
    def _leaves_training_text(self) -> Self:
        if self.validation_share + self.test_share >= 1:
            raise ValueError(
                f"validation_share ({self.validation_share}) and test_share ({self.test_share}) must add up to less "
                f"than 1"
            )
        return self
