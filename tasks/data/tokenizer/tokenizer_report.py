"""Measures a tokenizer on a corpus: fertility and vocabulary share per domain and language, and those of a public
one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.files.stored_files import StoredFile, given_file, local_copy
from tasks.data.tokenizer.token_use import USE_COLUMNS, count_token_use
from tasks.data.tokenizer.tokenizer_sample import language_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

REPORT_CHARS = 4_000_000
"""Characters of the text on which the report is measured."""
OURS, PEER = "ours", "compared"
ALL = "*"
"""Value of a column that means every domain, or every language."""


def write_report(frame: DataFrame, tokenizer: StoredFile, compare_with: str, path: Path) -> None:
    """Write one row per tokenizer, domain and language, with sums over all of either. Words are what white space
    divides.

    Raises ValueError where `compare_with` is no readable tokenizer.json."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyspark.sql import functions as F

    files = {OURS: tokenizer} | ({PEER: given_file(Path(compare_with))} if compare_with else {})
    sizes = {name: vocabulary_size(Path(local_copy(file))) for name, file in files.items()}
    texts = frame.withColumn("language", language_of()).select("domain", "language", "text", "num_chars", "num_bytes")
    words = F.regexp_count("text", F.lit(r"(?U)\S+")).cast("long")
    totals = (
        texts.withColumn("num_words", words)
        .groupBy("domain", "language")
        .agg(
            F.count("*").alias("num_documents"),
            F.sum("num_chars").alias("num_chars"),
            F.sum("num_bytes").alias("num_bytes"),
            F.sum("num_words").alias("num_words"),
        )
    )
    count = partial(count_token_use, tokenizers=files)
    keys = ("tokenizer", "domain", "language", "token_id")
    used = texts.select("domain", "language", "text").mapInArrow(count, USE_COLUMNS)
    use = used.groupBy(*keys).agg(F.sum("num_tokens").alias("num_tokens")).toArrow()
    pq.write_table(
        pa.Table.from_pylist(figures(totals.toArrow().to_pylist(), use, sizes), schema=_schema()),
        path,
        compression="zstd",
    )


def write_no_report(path: Path) -> None:
    """Write the table without rows: no text is read for a tokenizer that was given."""
    import pyarrow.parquet as pq

    pq.write_table(_schema().empty_table(), path, compression="zstd")


def figures(totals: list[dict[str, Any]], use: pa.Table, sizes: Mapping[str, int]) -> list[dict[str, Any]]:
    """Rows of the report from the size of every (domain, language) and the use of every token in it."""
    rows = []
    domains, languages = (sorted({row[key] for row in totals}) for key in ("domain", "language"))
    pairs = sorted((row["domain"], row["language"]) for row in totals)
    for name, size in sizes.items():
        for domain, language in [
            (ALL, ALL),
            *((one, ALL) for one in domains),
            *((ALL, one) for one in languages),
            *pairs,
        ]:
            part = [row for row in totals if domain in (ALL, row["domain"]) and language in (ALL, row["language"])]
            amounts = {
                key: sum(row[key] for row in part) for key in ("num_documents", "num_chars", "num_bytes", "num_words")
            }
            num_tokens, num_used = _tokens(use, {"tokenizer": name, "domain": domain, "language": language})
            rows.append(
                {
                    "tokenizer": name,
                    "domain": domain,
                    "language": language,
                    **amounts,
                    "num_tokens": num_tokens,
                    "tokens_per_word": round(num_tokens / max(amounts["num_words"], 1), 6),
                    "bytes_per_token": round(amounts["num_bytes"] / max(num_tokens, 1), 6),
                    "vocabulary_share": round(num_used / size, 6),
                }
            )
    return rows


def vocabulary_size(path: Path) -> int:
    """Ordinary tokens of a tokenizer.json."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(str(path)).get_vocab_size(with_added_tokens=False)
    except Exception as error:  # the library raises Exception itself
        raise ValueError(
            f'tokenizer.compare_with: {path} is no readable tokenizer.json ({error}): name one, or "" for none'
        ) from error


def _tokens(use: pa.Table, wanted: Mapping[str, str]) -> tuple[int, int]:
    """(tokens, different tokens) of the rows that have these values."""
    import pyarrow.compute as pc

    for column, value in wanted.items():
        if value != ALL:
            use = use.filter(pc.field(column) == value)
    return int(use["num_tokens"].to_numpy().sum()), len(use["token_id"].unique())


def _schema() -> pa.Schema:
    import pyarrow as pa

    counts = ("num_documents", "num_chars", "num_bytes", "num_words", "num_tokens")
    ratios = ("tokens_per_word", "bytes_per_token", "vocabulary_share")
    names = [(name, pa.string()) for name in ("tokenizer", "domain", "language")]
    return pa.schema([*names, *((name, pa.int64()) for name in counts), *((name, pa.float64()) for name in ratios)])
