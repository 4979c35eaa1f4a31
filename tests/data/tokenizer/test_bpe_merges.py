"""Merges learned from counted words are those of the reference trainer, on any text; words are cut where the library
cuts them."""

from __future__ import annotations

import gzip
import json
import os
import random
import resource
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from benchmarks.inputs.word_shuffle import count_into
from model.text.tokenizer_layout import PRETOKENIZER_PATTERN
from tasks.data.text import pretokens, text_encoder
from tasks.data.text.pretokens import LETTER, OTHER, character_classes, cut_pretokens
from tasks.data.text.text_encoder import TextEncoder
from tasks.data.tokenizer import word_counts
from tasks.data.tokenizer.bpe_merges import IN_MEMORY, NoRoomError, Room, WordTable, learn_merges
from tasks.data.tokenizer.bpe_tokenizer import train_bpe
from tasks.data.tokenizer.word_counts import count_texts, count_words, num_rows, read_words, sum_counts, word_table
from tests.conftest import ROOT
from tests.support.data_inputs import SHARED_DATA, prose

SPLIT = pre_tokenizers.Split(Regex(PRETOKENIZER_PATTERN), behavior="isolated")
CHARACTERS = (
    "abcSTMDrevlLst'",
    "''",
    "  \n\r\t",
    "12345٣",
    "!?.,({",
    "äÉß中文字かな",
    "\u00a0\u2028\x85\u3000",
    "\u0301😀𝒳\x00",
    "ſK",
)


def random_texts(seed: int, count: int, length: int = 25) -> list[str]:
    generator = random.Random(seed)
    return [
        "".join(
            generator.choices(
                "".join(generator.sample(CHARACTERS, generator.randint(1, 5))), k=generator.randrange(length)
            )
        )
        for _ in range(count)
    ]


def shared_texts(folder: str, num_chars: int) -> list[str]:
    paths = sorted((SHARED_DATA / folder).glob("*.jsonl.gz"))
    if not paths:
        pytest.skip(f"no {folder} in {SHARED_DATA}")
    texts: list[str] = []
    for path in paths:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                texts.append(max((value for value in json.loads(line).values() if isinstance(value, str)), key=len))
                if sum(map(len, texts[-50:])) > 0 and len(texts) % 50 == 0 and sum(map(len, texts)) > num_chars:
                    return texts
    return texts


def reference(texts: list[str], num_tokens: int, min_count: int = 2) -> tuple[list[tuple[str, str]], dict[str, int]]:
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([SPLIT, byte_level])
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=num_tokens,
            min_frequency=min_count,
            special_tokens=[],
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    model = json.loads(tokenizer.to_str())["model"]
    return [tuple(merge) for merge in model["merges"]], model["vocab"]


def trained(texts: list[str], num_tokens: int) -> tuple[list[tuple[str, str]], dict[str, int]]:
    model = json.loads(train_bpe(iter(texts), num_tokens).to_str())["model"]
    return [tuple(merge) for merge in model["merges"]], {
        token: number for token, number in model["vocab"].items() if number < num_tokens
    }


def cut(texts: list[str]) -> list[list[str]]:
    pretokens = []
    for chunk in cut_pretokens(pa.array(texts, pa.string())):
        words = chunk.words.to_pylist()
        pretokens += [
            words[start:end] for start, end in zip(chunk.document_starts[:-1], chunk.document_starts[1:], strict=True)
        ]
    return pretokens


def test_pretokens_are_cut_where_the_library_cuts_them(monkeypatch):
    texts = [*random_texts(1, 6000), "", "it's", "IT'LLs'x", ".\n\n\n  x", "a \n b", prose(3), "x" * 400]
    expected = [[piece for piece, _ in SPLIT.pre_tokenize_str(text)] for text in texts]
    assert cut(texts) == expected
    monkeypatch.setattr(pretokens, "CHUNK_BYTES", 64)
    assert cut(texts) == expected
    assert cut(texts[2:9]) == expected[2:9] and [
        word for chunk in cut_pretokens(pa.array(texts)[5:9]) for word in chunk.words.to_pylist()
    ] == [word for words in expected[5:9] for word in words]


def test_every_character_has_the_class_that_the_library_gives_it():
    classes = character_classes()
    points = np.concatenate([np.arange(0xD800), np.arange(0xE000, 0x110000)])
    text = "".join(map(chr, points))
    letters = np.zeros(0x110000, dtype=bool)
    for _, (start, end) in pre_tokenizers.Split(Regex(r"[^\p{L}\p{N}\s]+"), behavior="removed").pre_tokenize_str(text):
        letters[points[start:end]] = True
    assert np.array_equal(letters, classes != OTHER) and classes[ord("é")] == LETTER


@pytest.mark.parametrize(("folder", "num_tokens"), [("multilingual", 1500), ("code", 3000), ("text", 900)])
def test_merges_are_those_of_the_reference_trainer(folder, num_tokens):
    texts = shared_texts(folder, 600_000)
    assert trained(texts, num_tokens) == reference(texts, num_tokens)


def test_merges_are_those_of_the_reference_trainer_where_pairs_overlap_and_tie():
    generator = random.Random(5)
    for _ in range(60):
        alphabet = generator.choice(["ab", "abc", "aaab"])
        texts = [
            "".join(generator.choices(alphabet + " ", k=generator.randrange(4, 60)))
            for _ in range(generator.randrange(2, 30))
        ]
        _, vocabulary = reference(texts, 400)
        assert trained(texts, len(vocabulary)) == reference(texts, len(vocabulary))


@pytest.mark.parametrize("min_count", [1, 2, 7])
def test_learning_ends_where_the_reference_ends(min_count, tmp_path):
    """Also where pairs too rare to be learned are the last ones left, and where all arrays lie in files."""
    generator = random.Random(min_count)
    for number in range(40):
        alphabet = generator.choice(["ab", "abc", "aaab", "abcdefgh"])
        texts = [
            "".join(generator.choices(alphabet + " ", k=generator.randrange(4, 90)))
            for _ in range(generator.randrange(2, 40))
        ]
        expected, _ = reference(texts, 500, min_count)
        room = [IN_MEMORY, Room(0, tmp_path)][number % 2]
        learned = [(left, right) for left, right, _ in learn_merges([count_texts(texts)], 500, min_count, room)]
        # A pair can be learned twice, where its token came back by another way: in the reference the last one counts.
        assert list(reversed(dict.fromkeys(reversed(learned)))) == expected


def test_arrays_in_files_give_the_same_merges_and_leave_none(tmp_path):
    words = count_texts(shared_texts("multilingual", 600_000))
    batches = [
        words._replace(starts=words.starts[at : at + 1001], counts=words.counts[at : at + 1000])
        for at in range(0, len(words.counts), 1000)
    ]
    learned = learn_merges([words], 4000, 2)
    for memory_bytes in (0, 200_000, 2_000_000):
        assert learn_merges(iter(batches), 4000, 2, Room(memory_bytes, tmp_path)) == learned
    assert not list(tmp_path.iterdir())


LIMITED = """
import resource, sys
from pathlib import Path
import numpy as np
from tasks.data.tokenizer.bpe_merges import IN_MEMORY, NoRoomError, Room, WordTable, learn_merges

def tables():
    generator = np.random.Generator(np.random.Philox(3))
    for _ in range(40):
        letters = (97 + np.minimum(generator.geometric(0.2, (5000, 12)), 26)).astype(np.uint8)
        yield WordTable(letters.reshape(-1), np.arange(5001) * 12, generator.integers(1, 100, 5000))

learn_merges([next(tables())], 260, 2)
(data,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData:")]
limit = int(data.split()[1]) * 1024 + int(sys.argv[3]) * 2**20
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
room = Room(int(sys.argv[2]) * 2**20, Path(sys.argv[1])) if sys.argv[1] else IN_MEMORY
try:
    print(hash(tuple(learn_merges(tables(), 400, 2, room))))
except (NoRoomError, MemoryError):
    print("no room")
"""


def test_with_less_memory_than_the_words_take_it_learns_the_same(tmp_path):
    """The system holds the process to it: without files the same limit is an error."""

    def run(folder: str, room_mib: int, limit_mib: int) -> str:
        settings = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-c", LIMITED, folder, str(room_mib), str(limit_mib)]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=settings, cwd=ROOT).stdout

    unlimited = run("", 0, 1000)
    assert int(unlimited) and run(str(tmp_path), 2, 5) == unlimited
    assert run("", 0, 5) == "no room\n"


def test_a_disk_without_room_is_an_error_that_names_it(tmp_path):
    words = count_texts([prose(seed) for seed in range(20)])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
    try:
        with pytest.raises(
            NoRoomError, match=rf"0 MiB of memory and the disk of {tmp_path}, which took 0 MiB, do not hold"
        ):
            learn_merges([words], 400, 2, Room(0, tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(NoRoomError, match="the memory of this process does not hold"):
        learn_merges([words], 400, 2, Room(0, None))
    with pytest.raises(NoRoomError, match="absent"):
        learn_merges([words], 400, 2, Room(0, tmp_path / "absent"))


def test_counts_beyond_32_bits_give_the_same_merges():
    words = count_texts([prose(seed) for seed in range(20)])
    few = learn_merges([words], 420, 2)
    many = learn_merges([words._replace(counts=words.counts * 10**11)], 420, 2 * 10**11)
    assert words.counts.max() * 10**11 > 2**40 and many == few and len(few) == 420 - 256


def test_merges_do_not_depend_on_the_order_of_the_words():
    table = [
        (word.as_py(), count.as_py())
        for word, count in zip(*sum_counts_of([prose(seed) for seed in range(9)]), strict=True)
    ]
    learned = []
    for seed in range(3):
        random.Random(seed).shuffle(table)
        words = word_table(pa.table({"word": [word for word, _ in table], "num_words": [count for _, count in table]}))
        learned.append(learn_merges([words], 400, 2))
    assert learned[0] == learned[1] == learned[2]


def sum_counts_of(texts: list[str]) -> list[pa.ChunkedArray]:
    table = sum_counts([pa.Table.from_batches(count_words(iter([pa.record_batch({"text": texts})])))])
    return [table["word"], table["num_words"]]


def test_a_partition_hands_its_counts_on_before_they_fill_its_memory(monkeypatch):
    monkeypatch.setattr(word_counts, "MAX_WORDS", 50)
    batches = [pa.record_batch({"text": [prose(seed), prose(seed + 1)]}) for seed in range(20)]
    parts = list(count_words(iter(batches)))
    whole = sum_counts([pa.Table.from_batches(parts)]).sort_by("word")
    monkeypatch.undo()
    once = sum_counts([pa.Table.from_batches(count_words(iter(batches)))]).sort_by("word")
    assert len(parts) > 5 and sum(map(len, parts)) > len(whole) and whole.to_pylist() == once.to_pylist()


def test_words_summed_by_parts_on_disk_are_those_of_one_table(tmp_path, monkeypatch):
    """The benchmark's replacement of Spark's shuffle, read again in batches like the driver does."""
    texts = [*random_texts(4, 400), *(prose(seed) for seed in range(8))]
    monkeypatch.setattr(word_counts, "MAX_WORDS", 200)
    monkeypatch.setattr(word_counts, "BATCH_WORDS", 7)
    count_into(tmp_path / "words", (pa.record_batch({"text": texts[at : at + 20]}) for at in range(0, len(texts), 20)))
    pairs = [pair for table in read_words(tmp_path / "words") for pair in pairs_of(table)]
    assert sorted(pairs) == sorted(pairs_of(count_texts(texts))) and num_rows(tmp_path / "words") == len(pairs) > 200


def pairs_of(table: WordTable) -> list[tuple[bytes, int]]:
    text = table.text.tobytes()
    bounds = zip(table.starts[:-1], table.starts[1:], strict=True)
    return [(text[start:end], int(count)) for (start, end), count in zip(bounds, table.counts, strict=True)]


def test_documents_get_the_ids_that_the_library_gives_them(tmp_path, monkeypatch):
    texts = [*random_texts(2, 500), *(prose(seed) for seed in range(5)), "<|user|> says <think>", ""]
    tokenizer = train_bpe(iter(texts), 500)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    encoder = TextEncoder(str(tmp_path / "tokenizer.json"))
    expected = [item.ids for item in encoder.tokenizer.encode_batch(texts, add_special_tokens=False)]
    for known in (text_encoder.MAX_KNOWN_WORDS, 10):
        monkeypatch.setattr(text_encoder, "MAX_KNOWN_WORDS", known)
        for end in (None, 500):
            ids, lengths = encoder.encode(pa.array(texts), end)
            parts = np.split(ids, np.cumsum(lengths)[:-1])
            assert [part.tolist() for part in parts] == [[*part, *([] if end is None else [end])] for part in expected]


def test_another_pretokenizer_is_left_to_the_library(tmp_path):
    tokenizer = Tokenizer.from_str(train_bpe(iter([prose(1), prose(2)]), 300).to_str())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids, lengths = TextEncoder(str(tmp_path / "tokenizer.json")).encode(pa.array(["one 12345 two", "x"]), None)
    assert np.split(ids, lengths[:1])[0].tolist() == tokenizer.encode("one 12345 two").ids


def test_any_bytes_have_ids_and_come_back(tmp_path):
    """Also those that are no UTF-8: a byte is a token."""
    from model.text.tokenizer_layout import byte_characters
    from tasks.release.token_bytes import token_bytes

    tokenizer = train_bpe(iter([prose(1), prose(2)]), 300)
    generator = np.random.Generator(np.random.Philox(7))
    for _ in range(50):
        data = generator.bytes(40)
        ids = [tokenizer.token_to_id(byte_characters()[byte]) for byte in data]
        assert b"".join(token_bytes(tokenizer, token_id) for token_id in ids) == data
        assert tokenizer.decode(ids) == data.decode("utf-8", errors="replace")
