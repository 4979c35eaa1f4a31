"""A tokenizer that others trained: taken over byte for byte, read as its library reads it, refused with the fix."""

from __future__ import annotations

import hashlib
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from configs.load import load_scale
from model.text.tokenizer_layout import PRETOKENIZER_PATTERN, PUBLISHED_PRETOKENIZER_PATTERN, SPECIAL_TOKENS
from tasks.data.text.text_encoder import TextEncoder
from tasks.data.tokenizer.bpe_tokenizer import train_bpe
from tasks.data.tokenizer.import_tokenizer import import_tokenizer, read_given_tokenizer
from tests.support.data_inputs import compute, prose

NUM_ORDINARY = 500
TEXTS = [prose(seed, 300) for seed in range(20)] + ["12 + 7 = 19 <|user|> ſ <think>\n" * 20]


@pytest.fixture(scope="module")
def published():
    """GLM's file: its spelling of the pre-tokenizer, tokens of tool calls and reasoning that are not special."""
    layout = json.loads(train_bpe(iter(TEXTS), NUM_ORDINARY).to_str())
    layout["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = PUBLISHED_PRETOKENIZER_PATTERN
    return layout


def recipe_of(path, **changes):
    own = {"kind": "given", "path": str(path), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    tokenizer = load_scale("micro").data.recipe.tokenizer
    return tokenizer.model_copy(update=own | {"num_ordinary_tokens": NUM_ORDINARY} | changes)


def written(layout, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(layout, ensure_ascii=False))
    return path


def test_the_given_file_is_kept_and_its_ids_are_known(published, tmp_path):
    path = written(published, tmp_path)
    artifact = compute(import_tokenizer, tmp_path / "home", recipe=recipe_of(path))
    record = artifact.record
    assert artifact.path("tokenizer.json").read_bytes() == path.read_bytes()
    assert (record.num_tokens, record.given_sha256) == (NUM_ORDINARY + 36, recipe_of(path).sha256)
    assert record.special_ids == {token: NUM_ORDINARY + number for number, token in enumerate(SPECIAL_TOKENS)}
    vocabulary = pq.read_table(artifact.path("vocabulary.parquet")).to_pylist()
    assert [row["token_id"] for row in vocabulary] == list(range(NUM_ORDINARY + 36))
    assert pq.read_table(artifact.path("tokenizer_report.parquet")).num_rows == 0
    config = json.loads(artifact.path("tokenizer_config.json").read_text())
    assert "[gMASK]<sop>" in config["chat_template"] and config["eos_token"] == "<|endoftext|>"


@pytest.mark.parametrize("pattern", [PRETOKENIZER_PATTERN, PUBLISHED_PRETOKENIZER_PATTERN], ids=["ours", "published"])
def test_shards_have_the_ids_that_the_library_gives(pattern, published, tmp_path):
    layout = json.loads(json.dumps(published))
    layout["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = pattern
    ids, lengths = TextEncoder(str(written(layout, tmp_path))).encode(pa.array(TEXTS), None)
    layout["added_tokens"] = []
    plain = Tokenizer.from_str(json.dumps(layout))
    expected = [plain.encode(text, add_special_tokens=False).ids for text in TEXTS]
    assert ids.tolist() == [identity for row in expected for identity in row]
    assert lengths.tolist() == list(map(len, expected))


def without_bytes(layout):
    vocabulary = layout["model"]["vocab"]
    first = min(vocabulary, key=vocabulary.__getitem__)
    vocabulary["a long token"] = vocabulary.pop(first)


def swapped(layout):
    one, other = layout["added_tokens"][6:8]
    one["content"], other["content"] = other["content"], one["content"]


def with_another(layout):
    layout["added_tokens"].append(layout["added_tokens"][-1] | {"id": NUM_ORDINARY + 36, "content": "<|mine|>"})


DAMAGES = {
    "normalizer": (lambda layout: layout.update(normalizer={"type": "NFC"}), "must be a byte-level BPE without norm"),
    "pre-tokenizer": (lambda layout: layout.update(pre_tokenizer={"type": "Whitespace"}), "the pre-tokenizer must be"),
    "truncation": (
        lambda layout: layout.update(
            truncation={"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
        ),
        "truncates or pads, which would change the data: set truncation and padding to null",
    ),
    "bytes": (without_bytes, "lacks 1 of the 256 byte tokens"),
    "special token": (
        lambda layout: layout["added_tokens"][6].update(content="<|sys|>"),
        r"has no <\|system\|> \(1 of 36 special tokens",
    ),
    "order": (swapped, "do not follow one another in the order of layout glm"),
    "more": (with_another, "has 1 tokens beside 500 ordinary ones and the 36 special ones"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_tokenizer_of_another_layout_is_refused_with_the_fix(name, published, tmp_path):
    damage, message = DAMAGES[name]
    layout = json.loads(json.dumps(published))
    damage(layout)
    with pytest.raises(ValueError, match=message) as error:
        read_given_tokenizer(recipe_of(written(layout, tmp_path)))
    assert str(error.value).startswith("tokenizer.path: ")


def test_what_the_configuration_says_of_the_file_must_be_true(published, tmp_path):
    path = written(published, tmp_path)
    assert read_given_tokenizer(recipe_of(path)).get_vocab_size() == NUM_ORDINARY + 36
    with pytest.raises(ValueError, match=r"num_ordinary_tokens is 400, .* has 500: set it to that"):
        read_given_tokenizer(recipe_of(path, num_ordinary_tokens=400))
    with pytest.raises(ValueError, match=r"tokenizer\.sha256: .* name the file that is meant, or its digest"):
        read_given_tokenizer(recipe_of(path, sha256="0" * 64))
    with pytest.raises(ValueError, match=r"is no file: name the tokenizer\.json of your checkpoint"):
        read_given_tokenizer(recipe_of(path).model_copy(update={"path": "/nowhere"}))
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"is no readable tokenizer\.json"):
        read_given_tokenizer(recipe_of(path))
