"""Where documents are split for fill-in-the-middle."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from configs.files.block_reader import BlockReader
from tasks.data.packing.fill_in_middle import Rearrangement, read_inside
from tasks.data.shards.stored_shard import open_shards
from tasks.data.shards.token_shard import append_tokens, token_dtype, write_index
from tests.support.training_inputs import files_in

TEXTS = ["x = '日本語' # naïve 🎉🎉 — ок\n" * 6, "def f(a):\n    return '�' + a\n" * 5, "🎉" * 40, "plain\n" * 30]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["plain def return naïve 日本"] * 9, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet)
    )
    return tokenizer


def with_bytes(model: str) -> Tokenizer:
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"abcdefnrtu ()=¬é日"]
    if model == "bpe":
        tokenizer = Tokenizer(
            models.BPE(
                {token: number for number, token in enumerate(tokens)}, [], byte_fallback=True, unk_token="<unk>"
            )
        )
    else:
        tokenizer = Tokenizer(
            models.Unigram(
                [(token, -1.0 - number / 1000) for number, token in enumerate(tokens)], 0, byte_fallback=True
            )
        )
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, lambda: with_bytes("bpe"), lambda: with_bytes("unigram")])
def test_no_split_falls_inside_a_character(tmp_path, make):
    """Held against the decoder: both sides of every split give the text, and every position where they do is
    reached."""
    tokenizer = make()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    sequences = [tokenizer.encode(text).ids for text in TEXTS]
    dtype = token_dtype(512)
    with open(tmp_path / "code.bin", "wb") as file:
        lengths = append_tokens(file, sequences, dtype)
    write_index(tmp_path / "code.idx", lengths, dtype)
    is_inside = read_inside(tmp_path / "tokenizer.json", 512)
    shard = open_shards(files_in(tmp_path), BlockReader())["code"]
    ids = {3: np.arange(len(TEXTS), dtype=np.uint64)}
    whole = [
        {n for n in range(len(own) + 1) if tokenizer.decode(own[:n]) + tokenizer.decode(own[n:]) == text}
        for own, text in zip(sequences, TEXTS, strict=True)
    ]
    seen = [set() for _ in TEXTS]
    units = np.array([[3, number, 0, len(own), 1] for number, own in enumerate(sequences)])
    for seed in range(1500):
        splits = Rearrangement(1.0, seed, ids.__getitem__, {3: shard}, is_inside).splits(
            units, np.array([len(own) for own in sequences])
        )
        assert (splits[:, 0] <= splits[:, 1]).all()
        for number, positions in enumerate(splits.tolist()):
            seen[number] |= {*positions}
    assert seen == whole and any(len(own) + 1 > len(positions) for own, positions in zip(sequences, whole, strict=True))
    part = np.array([[3, 0, 5, 9, 1]])
    for seed in range(200):
        splits = Rearrangement(1.0, seed, ids.__getitem__, {3: shard}, is_inside).splits(part, np.array([9]))
        assert {*splits[0].tolist()} <= {position - 5 for position in whole[0]} | {0, 9}
