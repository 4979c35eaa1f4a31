"""The tokenizer: GLM's layout, any bytes there and back, the same each time, refused where the text is too small for
it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys

import pytest
from tokenizers import Tokenizer

from model.text.tokenizer_layout import END_OF_TEXT, END_TOKENS, SHOWN_TOKENS, SPECIAL_TOKENS, tokenizer_for_text
from tasks.data.tokenizer.bpe_tokenizer import tokenizer_config, train_bpe, write_json
from tests.conftest import ROOT
from tests.support.data_inputs import prose

TEXTS = [prose(seed, 300) for seed in range(20)] + ["def f(x):\n    return x * 2\n" * 20, "12 + 7 = 19\n" * 20]
NUM_ORDINARY = 500


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(iter(TEXTS), NUM_ORDINARY)


def test_special_tokens_follow_the_ordinary_ones_in_glm_order(tokenizer):
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(NUM_ORDINARY, NUM_ORDINARY + 36))
    assert tokenizer.get_vocab_size() == NUM_ORDINARY + 36
    ids = {token: tokenizer.token_to_id(token) - NUM_ORDINARY for token in SPECIAL_TOKENS}
    published = {
        "<|endoftext|>": 151329,
        "[gMASK]": 151331,
        "<|user|>": 151336,
        "<|observation|>": 151338,
        "<think>": 151350,
        "<|video|>": 151364,
    }
    assert all(ids[token] == identity - 151329 for token, identity in published.items())
    assert END_TOKENS[0] == END_OF_TEXT


def test_any_text_comes_back_as_it_was(tokenizer):
    generator = random.Random(1)
    alphabets = [
        "abc \n\t.,'1234567890",
        "äöüß€çñ",
        "中文字かな",
        "😀𝒳\u200d\u0301",
        "".join(map(chr, range(32))),
        "\r\n \u00a0\u3000",
    ]
    for _ in range(300):
        text = "".join(generator.choices("".join(generator.sample(alphabets, 3)), k=generator.randrange(60)))
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


def test_every_byte_is_a_token(tokenizer):
    from tokenizers.pre_tokenizers import ByteLevel

    assert all(tokenizer.token_to_id(symbol) is not None for symbol in ByteLevel.alphabet())


def test_digits_are_split_as_llama_cpp_splits_them(tokenizer):
    pieces = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("It's 12345 words,  here\n\n  x")]
    assert pieces == ["It", "'s", "Ġ", "123", "45", "Ġwords", ",", "Ġ", "Ġhere", "ĊĊ", "Ġ", "Ġx"]


def test_a_special_token_in_a_text_is_plain_characters_where_documents_are_encoded(tokenizer, tmp_path):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    plain = tokenizer_for_text(str(tmp_path / "tokenizer.json"))
    assert plain.get_vocab() == tokenizer.get_vocab()
    for special in SPECIAL_TOKENS:
        text = f"a page about {special} and{special}"
        ids = plain.encode(text, add_special_tokens=False).ids
        assert max(ids) < NUM_ORDINARY and plain.decode(ids) == text
        assert tokenizer.encode(text, add_special_tokens=False).ids.count(tokenizer.token_to_id(special)) == 2


def test_a_vocabulary_larger_than_the_text_gives_is_refused_with_the_size_that_fits():
    with pytest.raises(
        ValueError, match=r"holds only (\d+) ordinary tokens.*asks for 100000: lower it to at most \1, raise"
    ) as refused:
        train_bpe(iter(TEXTS), 100000)
    fits = int(str(refused.value).split("at most ")[1].split(",")[0])
    assert train_bpe(iter(TEXTS), fits).token_to_id(END_OF_TEXT) == fits


def test_transformers_reads_the_files_and_gives_the_same_ids(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write_json(tokenizer_config(tokenizer), tmp_path / "tokenizer_config.json")
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    text = f"<|user|>\n{TEXTS[0]}{TEXTS[-2]}"
    assert theirs(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text, add_special_tokens=False).ids
    assert (theirs.eos_token, theirs.pad_token) == (END_OF_TEXT, END_OF_TEXT)
    assert theirs.decode(theirs(TEXTS[0])["input_ids"]) == TEXTS[0]


def test_servers_see_the_marks_of_reasoning_and_tool_calls_in_what_they_decode(tokenizer, tmp_path):
    """SGLang's and transformers' parsers read text that was decoded without special tokens."""
    from transformers import AutoTokenizer

    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write_json(tokenizer_config(tokenizer), tmp_path / "tokenizer_config.json")
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    answer = (
        "\n<think>why</think>\nSo.\n<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
        "\n<tool_response>\n2\n</tool_response>"
    )
    for opened in (tokenizer, theirs):
        ids = opened.encode(f"<|assistant|>{answer}<|observation|>", add_special_tokens=False)
        ids = ids if isinstance(ids, list) else ids.ids
        assert opened.decode(ids, skip_special_tokens=True) == answer
    assert all(tokenizer.token_to_id(token) in ids for token in SHOWN_TOKENS) and len(SHOWN_TOKENS) == 10


def test_training_gives_the_same_bytes_in_another_process_with_another_number_of_threads(tokenizer):
    code = (
        "import json, sys; from tasks.data.tokenizer.bpe_tokenizer import train_bpe; "
        f"sys.stdout.write(train_bpe(iter(json.load(sys.stdin)), {NUM_ORDINARY}).to_str())"
    )
    for threads in ("1", "3"):
        environment = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": threads}
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=json.dumps(TEXTS),
            capture_output=True,
            text=True,
            env=environment,
            check=True,
        )
        assert done.stdout == tokenizer.to_str()
