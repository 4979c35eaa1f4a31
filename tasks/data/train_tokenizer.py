"""Step: training documents -> a byte-level BPE tokenizer in the GLM layout: ordinary tokens, then 36 special ones, then unused rows.

Out: tokenizer.json and tokenizer_config.json as Hugging Face reads them, vocabulary.parquet (id, token, kind) for the contract.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from infra.step import Artifact, Output, Progress, Record, step
from model.tokenizer_layout import END_OF_TEXT, PRETOKENIZER_PATTERN, SPECIAL_TOKENS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from configs.schema import TokenizerRecipe
    from tasks.data.decontaminate_documents import DecontaminatedDocuments

BATCH_ROWS = 1024
ORDINARY, SPECIAL = "ordinary", "special"


class TrainedTokenizer(Record):
    num_ordinary_tokens: int
    num_tokens: int
    """Ordinary and special ones; rows of the embedding beyond them are unused."""
    num_merges: int
    num_sample_documents: int
    num_sample_chars: int
    special_token_ids: dict[str, int]


@step(content=("tokenizer.json", "tokenizer_config.json", "vocabulary.parquet"), distributions=("tokenizers", "pyarrow"))
def train_tokenizer(*, documents: Artifact[DecontaminatedDocuments], recipe: TokenizerRecipe, output: Output) -> TrainedTokenizer:
    """Raises ValueError where the sample yields fewer tokens than asked for: ids of the special tokens would move."""
    texts = sample_texts(documents.paths("documents/*.parquet"), recipe.sample_chars)
    output.report(Progress(0, 0, "documents", f"learning {recipe.num_ordinary_tokens} tokens from {len(texts)} documents"))
    tokenizer = learn_tokens(texts, recipe.num_ordinary_tokens)
    found = tokenizer.get_vocab_size()
    if found < recipe.num_ordinary_tokens:
        raise ValueError(
            f"{sum(map(len, texts)):,} characters yield {found} tokens, tokenizer.num_ordinary_tokens asks for "
            f"{recipe.num_ordinary_tokens}: lower it, or raise tokenizer.sample_chars or the amount of text"
        )
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    assert list(ids.values()) == list(range(recipe.num_ordinary_tokens, recipe.num_ordinary_tokens + len(SPECIAL_TOKENS))), ids
    tokenizer.save(str(output.path("tokenizer.json")))
    _write_config(output.path("tokenizer_config.json"))
    _write_vocabulary(tokenizer, output.path("vocabulary.parquet"))
    return TrainedTokenizer(
        num_ordinary_tokens=recipe.num_ordinary_tokens,
        num_tokens=tokenizer.get_vocab_size(with_added_tokens=True),
        num_merges=len(json.loads(tokenizer.to_str())["model"]["merges"]),
        num_sample_documents=len(texts),
        num_sample_chars=sum(map(len, texts)),
        special_token_ids=ids,
    )


def sample_texts(paths: list[Path], sample_chars: int) -> list[str]:
    """Texts in the order of the sha256 of their ids until there are `sample_chars` characters."""
    import hashlib

    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    index = pa.concat_tables(pq.read_table(path, columns=["id", "num_chars"]) for path in paths)
    ranked = sorted(
        zip(index["id"].to_pylist(), index["num_chars"].to_pylist(), strict=True), key=lambda row: hashlib.sha256(row[0].encode()).digest()
    )
    chosen, total = [], 0
    for identity, num_chars in ranked:
        if total >= sample_chars:
            break
        chosen.append(identity)
        total += num_chars
    wanted = pa.array(chosen)
    texts: list[str] = []
    for path in paths:
        for batch in pq.ParquetFile(path).iter_batches(BATCH_ROWS, columns=["id", "text"]):
            texts += batch.filter(pc.is_in(batch["id"], value_set=wanted))["text"].to_pylist()
    return texts


def learn_tokens(texts: list[str], num_tokens: int) -> Tokenizer:
    """Byte-level BPE behind GLM's pre-tokenization; every byte is a token, so any text round-trips."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Split(Regex(PRETOKENIZER_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=[], show_progress=False
    )
    tokenizer.train_from_iterator(_batches(texts), trainer, length=len(texts))
    return tokenizer


def _batches(texts: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(texts), BATCH_ROWS):
        yield texts[start : start + BATCH_ROWS]


def _write_config(path: Path) -> None:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": list(SPECIAL_TOKENS),
        "clean_up_tokenization_spaces": False,
    }
    path.write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_vocabulary(tokenizer: Tokenizer, path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = sorted((number, token) for token, number in tokenizer.get_vocab(with_added_tokens=True).items())
    kinds = [SPECIAL if token in SPECIAL_TOKENS else ORDINARY for _, token in rows]
    columns = {"id": [number for number, _ in rows], "token": [token for _, token in rows], "kind": kinds}
    pq.write_table(pa.table(columns), path, compression="zstd")
