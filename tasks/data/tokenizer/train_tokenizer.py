"""Step: training documents -> tokenizer in GLM's layout, with vocabulary and report.

It writes tokenizer.json, tokenizer_config.json, chat_template.jinja, vocabulary.parquet, tokenizer_report.parquet
(fertility per domain and language), and tokenizer.model where SentencePiece made it.

Byte-level BPE: executors count words, Spark sums the counts in 64 bits, the driver learns the merges from the table
of distinct words, read in batches. It keeps them in memory up to half of resources.driver_memory, beyond that in
files of the step's directory.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from infra.machine.spark import spark_session
from infra.step import Artifact, Output, Progress, Record, digest_of, step
from model.text.chat_template import CHAT_TEMPLATE
from model.text.tokenizer_layout import SPECIAL_TOKENS_BY_LAYOUT
from tasks.data.records.document_files import read_documents
from tasks.data.records.documents import NUM_HASHES, TRAIN
from tasks.data.tokenizer.bpe_merges import NoRoomError, Room
from tasks.data.tokenizer.bpe_tokenizer import bpe_of_words, tokenizer_config, write_json
from tasks.data.tokenizer.sentencepiece_tokenizer import MODEL_FILE, train_sentencepiece
from tasks.data.tokenizer.tokenizer_report import REPORT_CHARS, write_report
from tasks.data.tokenizer.tokenizer_sample import (
    Cell,
    count_chars,
    drawn,
    hash_bounds,
    language_of,
    missing_chars,
    wanted_chars,
)
from tasks.data.tokenizer.word_counts import WORD_COLUMNS, count_words, num_rows, pack_words, read_words, write_words

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from tokenizers import Tokenizer

    from configs.schema import SparkResources, TokenizerRecipe
    from tasks.data.decontamination.decontaminate_documents import DecontaminatedDocuments


SIZE_COLUMNS = ("id", "domain", "lang", "language", "num_chars", "split")


class TrainedTokenizer(Record):
    num_tokens: int
    """Ordinary and special tokens; the highest id is one less."""
    num_ordinary_tokens: int
    special_ids: dict[str, int]
    tokenizer_digest: str
    """sha256 over vocabulary, merges and special tokens."""
    num_sample_documents: int
    num_sample_chars: int
    num_distinct_words: int = 0
    """Distinct words of the sample; 0 for SentencePiece, which does not report them."""
    sample_chars_by_domain: dict[str, int] = Field(default_factory=dict)
    sample_chars_by_language: dict[str, int] = Field(default_factory=dict)
    missing_chars: dict[str, int] = Field(default_factory=dict)
    """Characters that are missing for the sample's shares, by `domain X` or `language X`. Other text does not replace
    them."""
    compared_with: str = ""
    """sha256 of the tokenizer.json that the report compares with."""
    given_sha256: str = ""
    """sha256 of the tokenizer.json that was given; empty where it was learned here."""


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "vocabulary.parquet",
    "tokenizer_report.parquet",
)
"""Of every tokenizer, learned or given."""


@step(
    content=(*TOKENIZER_FILES, MODEL_FILE), distributions=("pyspark", "pyarrow", "tokenizers", "numpy", "sentencepiece")
)
def train_tokenizer(
    *, documents: Artifact[DecontaminatedDocuments], recipe: TokenizerRecipe, resources: SparkResources, output: Output
) -> TrainedTokenizer:
    """Learn from a sample drawn by document hash. Raises ValueError if the sample is too small for the vocabulary, if
    the shares name nothing that the corpus has, or if the distinct words fit neither into memory nor onto the disk."""
    files = documents.files("documents/*.parquet")
    read = partial(read_documents, spark_session(resources), files, resources)
    is_training = f"split = '{TRAIN}'"
    sized = read(*SIZE_COLUMNS).where(is_training)
    slices = count_chars(sized)
    sizes = {cell: counted.total for cell, counted in slices.items()}
    wanted = wanted_chars(sizes, recipe)
    missing = missing_chars(sizes, wanted, recipe)
    bounds = hash_bounds(slices, wanted)
    frame = read(*SIZE_COLUMNS, "num_bytes", "text").where(is_training)
    sample = drawn(frame, bounds)
    output.report(Progress(0, sum(sizes.values()), "characters", "drawing the sample"))
    counted = _count_sample(drawn(sized, bounds))
    num_documents = sum(count for count, _ in counted.values())
    shortage = "".join(f", {num_chars:,} characters short of {name}" for name, num_chars in missing.items())
    output.report(
        Progress(0, recipe.num_ordinary_tokens, "tokens", f"learning from {num_documents} documents{shortage}")
    )
    specials = SPECIAL_TOKENS_BY_LAYOUT[recipe.special_tokens]
    num_words = 0
    if recipe.kind == "bpe":
        directory = output.path("words")
        num_words = _count_words(sample, recipe, directory)
        tokenizer = _learn(directory, recipe.num_ordinary_tokens, specials, resources.driver_array_bytes)
        shutil.rmtree(directory)
    else:
        texts = sample.select("id", "text").toArrow().sort_by("id").column("text").to_pylist()
        tokenizer = train_sentencepiece(texts, recipe, specials, output.path(MODEL_FILE))
    tokenizer.save(str(output.path("tokenizer.json")))
    write_companions(tokenizer, specials, output)
    # Drawn from the other end of the hashes: text outside the sample, unless the sample is the whole corpus.
    few = min(REPORT_CHARS * NUM_HASHES // max(sum(sizes.values()), 1), NUM_HASHES)
    measured = drawn(frame, dict.fromkeys(sizes, few), from_the_end=True)
    write_report(measured, output.share("tokenizer.json"), recipe.compare_with, output.path("tokenizer_report.parquet"))
    return TrainedTokenizer(
        num_tokens=tokenizer.get_vocab_size(),
        num_ordinary_tokens=recipe.num_ordinary_tokens,
        special_ids=_special_ids(tokenizer, specials, recipe.num_ordinary_tokens),
        tokenizer_digest=digest_of(tokenizer.to_str()),
        num_sample_documents=num_documents,
        num_sample_chars=sum(num_chars for _, num_chars in counted.values()),
        num_distinct_words=num_words,
        sample_chars_by_domain=_chars_by(counted, 0),
        sample_chars_by_language=_chars_by(counted, 1),
        missing_chars=missing,
        compared_with=digest_of(Path(recipe.compare_with).read_text(encoding="utf-8")) if recipe.compare_with else "",
    )


def _count_sample(sample: DataFrame) -> dict[Cell, tuple[int, int]]:
    """(documents, characters) per domain and language."""
    from pyspark.sql import functions as F

    counted = sample.groupBy("domain", language_of().alias("of")).agg(
        F.count("*").alias("documents"), F.sum("num_chars").alias("chars")
    )
    return {(row["domain"], row["of"]): (row["documents"], row["chars"]) for row in counted.collect()}


def _chars_by(counted: dict[Cell, tuple[int, int]], axis: int) -> dict[str, int]:
    names = sorted({cell[axis] for cell in counted})
    return {name: sum(num_chars for cell, (_, num_chars) in counted.items() if cell[axis] == name) for name in names}


def _count_words(sample: DataFrame, recipe: TokenizerRecipe, directory: Path) -> int:
    """Write distinct words and their counts into a directory, in any order: merges do not depend on it. Numbers are
    words of their own: where digits are split, they give no merge."""
    from pyspark.sql import functions as F

    counted = sample.select("text").mapInArrow(partial(count_words), WORD_COLUMNS)
    summed = counted.groupBy("word").agg(F.sum("num_words").alias("num_words"))
    summed = summed.where(F.col("num_words") >= recipe.min_word_count)
    if recipe.split_digits:
        summed = summed.where(~F.col("word").rlike(r"^\p{N}+$"))
    directory.mkdir()
    parcels = summed.mapInArrow(pack_words, "words binary").toLocalIterator(prefetchPartitions=True)
    write_words((bytes(row["words"]) for row in parcels), directory)
    return num_rows(directory)


def _learn(directory: Path, num_ordinary_tokens: int, specials: tuple[str, ...], memory_bytes: int) -> Tokenizer:
    try:
        return bpe_of_words(read_words(directory), num_ordinary_tokens, specials, Room(memory_bytes, directory))
    except NoRoomError as error:
        raise ValueError(
            f"no room to learn merges from {num_rows(directory):,} distinct words: {error}: raise "
            f"tokenizer.min_word_count, "
            "lower tokenizer.sample_chars, or free space on that disk"
        ) from error


def _special_ids(tokenizer: Tokenizer, specials: tuple[str, ...], num_ordinary_tokens: int) -> dict[str, int]:
    ids = {token: identity for token in specials if (identity := tokenizer.token_to_id(token)) is not None}
    assert list(ids.values()) == list(range(num_ordinary_tokens, num_ordinary_tokens + len(specials))), ids
    return ids


def write_companions(tokenizer: Tokenizer, specials: tuple[str, ...], output: Output) -> None:
    """The files beside tokenizer.json: its configuration, the chat template and the vocabulary."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    write_json(tokenizer_config(tokenizer), output.path("tokenizer_config.json"))
    output.path("chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    entries = sorted((identity, token) for token, identity in tokenizer.get_vocab(with_added_tokens=True).items())
    kinds = ["special" if token in set(specials) else "ordinary" for _, token in entries]
    columns = {
        "token_id": [identity for identity, _ in entries],
        "token": [token for _, token in entries],
        "kind": kinds,
    }
    pq.write_table(pa.table(columns), output.path("vocabulary.parquet"), compression="zstd")
