"""Step: training documents -> byte-level BPE in GLM's layout: tokenizer.json, tokenizer_config.json, chat_template.jinja and
vocabulary.parquet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infra.spark import spark_session
from infra.step import Artifact, Output, Progress, Record, digest_of, step
from model.chat_template import CHAT_TEMPLATE
from model.tokenizer_layout import SPECIAL_TOKENS
from tasks.data.bpe_tokenizer import tokenizer_config, train_bpe, write_json
from tasks.data.documents import TRAIN

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import Tokenizer

    from configs.schema import SparkResources, TokenizerRecipe
    from tasks.data.decontaminate_documents import DecontaminatedDocuments


class TrainedTokenizer(Record):
    num_tokens: int
    """Ordinary and special tokens; the highest id is one less."""
    num_ordinary_tokens: int
    special_ids: dict[str, int]
    tokenizer_digest: str
    """sha256 over vocabulary, merges and special tokens."""
    num_sample_documents: int
    num_sample_chars: int


@step(
    content=("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocabulary.parquet"),
    distributions=("pyspark", "pyarrow", "tokenizers"),
)
def train_tokenizer(
    *, documents: Artifact[DecontaminatedDocuments], recipe: TokenizerRecipe, resources: SparkResources, output: Output
) -> TrainedTokenizer:
    """Learn the merges from a sample drawn by document hash. Raises ValueError if the sample is too small for the vocabulary."""
    spark = spark_session(resources)
    frame = spark.read.parquet(*(path.as_uri() for path in documents.paths("documents/*.parquet"))).where(f"split = '{TRAIN}'")
    num_bytes = sum(documents.record.train_bytes_by_domain.values())
    output.report(Progress(0, num_bytes, "bytes", "sampling"))
    texts = _sample(frame, recipe.sample_chars, num_bytes)
    output.report(Progress(0, recipe.num_ordinary_tokens, "tokens", f"learning merges from {len(texts)} documents"))
    tokenizer = train_bpe(iter(texts), recipe.num_ordinary_tokens)
    special_ids = {token: identity for token in SPECIAL_TOKENS if (identity := tokenizer.token_to_id(token)) is not None}
    expected = list(range(recipe.num_ordinary_tokens, recipe.num_ordinary_tokens + len(SPECIAL_TOKENS)))
    assert list(special_ids.values()) == expected, special_ids
    tokenizer.save(str(output.path("tokenizer.json")))
    write_json(tokenizer_config(tokenizer), output.path("tokenizer_config.json"))
    output.path("chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    _write_vocabulary(tokenizer, output.path("vocabulary.parquet"))
    return TrainedTokenizer(
        num_tokens=tokenizer.get_vocab_size(),
        num_ordinary_tokens=recipe.num_ordinary_tokens,
        special_ids=special_ids,
        tokenizer_digest=digest_of(tokenizer.to_str()),
        num_sample_documents=len(texts),
        num_sample_chars=sum(map(len, texts)),
    )


def _sample(frame: object, sample_chars: int, num_bytes: int) -> list[str]:
    """Texts whose document hash falls into the share that gives `sample_chars` on average, in the order of their ids."""
    from pyspark.sql import DataFrame
    from pyspark.sql import functions as F

    assert isinstance(frame, DataFrame)
    bound = min(sample_chars * 2**32 // max(num_bytes, 1), 2**32)
    document_hash = F.conv(F.substring(F.sha2("id", 256), 1, 8), 16, 10).cast("long")
    rows = frame.where(document_hash < bound).select("id", "text").toArrow().sort_by("id")
    return rows.column("text").to_pylist()


def _write_vocabulary(tokenizer: Tokenizer, path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    specials = set(SPECIAL_TOKENS)
    entries = sorted((identity, token) for token, identity in tokenizer.get_vocab(with_added_tokens=True).items())
    table = pa.table(
        {
            "token_id": [identity for identity, _ in entries],
            "token": [token for _, token in entries],
            "kind": ["special" if token in specials else "ordinary" for _, token in entries],
        }
    )
    pq.write_table(table, path, compression="zstd")
