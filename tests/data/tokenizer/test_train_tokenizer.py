"""The tokenizer step on Spark: the reference's merges for any partition count, samples by shares, SentencePiece, the
report."""

from __future__ import annotations

import hashlib
import resource

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer

from configs.load import load_scale
from configs.schema import ContractRecipe, SparkResources
from flows.stages import choose_stages
from infra.machine.spark import spark_session
from infra.step import Output, Record, step
from model.text.tokenizer_layout import END_OF_TEXT, SPECIAL_TOKENS_BY_LAYOUT
from tasks.data.records.document_files import read_documents
from tasks.data.records.documents import NUM_HASHES, document_id
from tasks.data.shards.shard_documents import shard_documents, shard_name
from tasks.data.tokenizer import tokenizer_report
from tasks.data.tokenizer.bpe_tokenizer import train_bpe
from tasks.data.tokenizer.sentencepiece_tokenizer import MODEL_FILE
from tasks.data.tokenizer.tokenizer_report import ALL
from tasks.data.tokenizer.tokenizer_sample import Slices, count_chars, drawn, hash_bounds, missing_chars, wanted_chars
from tasks.data.tokenizer.train_tokenizer import _count_sample, _learn, train_tokenizer
from tasks.data.validate_contract import validate_contract
from tasks.training.plan.plan_training import plan_training
from tests.support.data_inputs import RECIPE, RESOURCES, compute, in_partitions, prose, rows

SMALL = RECIPE.tokenizer.model_copy(update={"num_ordinary_tokens": 320, "sample_chars": 10**6})
GERMAN = (
    "Der schnelle\u3000braune\u00a0Fuchs springt über den faulen Hund, während es draußen regnet und die Straßen "
    "naß sind.\n"
)


class Texts(Record):
    num_documents: int


@step(content=("documents/*.parquet",))
def write_texts(*, output: Output) -> Texts:
    """Documents of two domains and two languages, one of them known from its source alone."""
    made = []
    for number in range(120):
        domain, language, lang = [("web", "en", ""), ("web", "", "de"), ("code", "en", "en")][number % 3]
        text = {
            "de": GERMAN * 8,
            "": prose(number),
            "en": f"def f_{number}(value):\n    return value + {number}\n" * 12,
        }[lang]
        made.append(
            {
                "id": document_id("texts", number, 0),
                "source": "texts",
                "offset": number,
                "piece": 0,
                "domain": domain,
                "lang": lang,
                "language": language,
                "text": text,
                "split": "train",
                "num_chars": len(text),
                "num_bytes": len(text.encode()),
                "quality_bucket": -1,
            }
        )
    table = pa.Table.from_pylist(made)
    index = table.schema.get_field_index("quality_bucket")
    table = table.set_column(index, "quality_bucket", table["quality_bucket"].cast(pa.int32()))
    pq.write_table(table, output.path("documents/part-00000.parquet"))
    return Texts(num_documents=len(made))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("tokenizer")


@pytest.fixture(scope="module")
def documents(root):
    return compute(write_texts, root)


@pytest.fixture(scope="module")
def trained(root, documents):
    return compute(train_tokenizer, root, documents=documents, recipe=SMALL, resources=RESOURCES)


def test_counting_on_spark_gives_the_tokenizer_of_the_same_texts(documents, trained):
    texts = [row["text"] for row in rows(documents, "documents/*.parquet")]
    assert trained.record.num_sample_documents == len(texts) and trained.record.num_sample_chars == sum(map(len, texts))
    assert Tokenizer.from_file(str(trained.path("tokenizer.json"))).to_str() == train_bpe(iter(texts), 320).to_str()


def test_the_digest_is_the_same_for_another_partition_count(documents, trained, tmp_path):
    assert (
        compute(train_tokenizer, tmp_path, documents=documents, recipe=SMALL, resources=in_partitions(5)).digest
        == trained.digest
    )


def test_words_that_find_no_room_are_an_error_that_says_what_helps(tmp_path):
    words = tmp_path / "words"
    words.mkdir()
    table = pa.table(
        {"word": [f"word{number}" for number in range(5000)], "num_words": pa.array([3] * 5000, pa.int64())}
    )
    pq.write_table(table, words / "part-0.parquet")
    assert _learn(words, 290, (), 0).to_str() == _learn(words, 290, (), 2**30).to_str()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
    try:
        with pytest.raises(
            ValueError,
            match=r"from 5,000 distinct words: 0 MiB of memory and the disk of .* do not hold .*raise "
            r"tokenizer.min_word_count",
        ):
            _learn(words, 290, (), 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_memory_given_to_the_driver_decides_what_it_holds():
    given = {"512m": 2**28, "2g": 2**30, "3G": 3 * 2**29, "100k": 51200}
    assert {
        memory: RESOURCES.model_copy(update={"driver_memory": memory}).driver_array_bytes for memory in given
    } == given
    for wrong in ("2 GB", "2", "g", ""):
        with pytest.raises(ValidationError, match="driver_memory"):
            SparkResources.model_validate({**RESOURCES.model_dump(), "driver_memory": wrong})


def test_shares_decide_what_is_drawn(root, documents):
    recipe = SMALL.model_copy(update={"domain_shares": {"code": 1.0}, "num_ordinary_tokens": 290})
    record = compute(train_tokenizer, root, documents=documents, recipe=recipe, resources=RESOURCES).record
    code = [row["num_chars"] for row in rows(documents, "documents/*.parquet") if row["domain"] == "code"]
    assert record.sample_chars_by_domain == {"code": sum(code)} and record.num_sample_documents == len(code)


def test_domain_and_language_shares_both_hold_where_the_corpus_allows():
    sizes = {("web", "en"): 8000, ("web", "de"): 1000, ("code", "en"): 4000, ("code", "de"): 3000, ("math", "fr"): 500}
    slices = {
        cell: Slices(np.arange(size) * (NUM_HASHES // size), np.ones(size, np.int64)) for cell, size in sizes.items()
    }
    recipe = SMALL.model_copy(
        update={
            "domain_shares": {"web": 3.0, "code": 1.0},
            "language_shares": {"en": 0.5, "de": 0.5},
            "sample_chars": 800,
        }
    )
    bounds = hash_bounds(slices, wanted_chars(sizes, recipe))
    drawn = {cell: int((slices[cell].starts < bound).sum()) for cell, bound in bounds.items()}
    by = [
        {name: sum(n for cell, n in drawn.items() if cell[axis] == name) for name in {cell[axis] for cell in sizes}}
        for axis in (0, 1)
    ]
    assert by[0] == pytest.approx({"web": 600, "code": 200, "math": 0}, abs=2)
    assert by[1] == pytest.approx({"en": 400, "de": 400, "fr": 0}, abs=2)
    with pytest.raises(ValueError, match=r"name none of the corpus's documents.*'code', 'math', 'web'"):
        wanted_chars(sizes, recipe.model_copy(update={"domain_shares": {"chat": 1.0}}))
    with pytest.raises(ValueError, match="there is no text to learn a tokenizer from"):
        wanted_chars({}, recipe)


def test_a_language_whose_first_document_is_longer_than_its_share_is_in_the_sample():
    slices = {
        ("web", "en"): Slices(np.arange(100) * (NUM_HASHES // 100), np.full(100, 10)),
        ("web", "de"): Slices(np.array([5, NUM_HASHES // 2]), np.array([1000, 1000])),
        ("code", "und"): Slices(np.array([7]), np.array([1000])),
    }
    sizes = {cell: counted.total for cell, counted in slices.items()}
    recipe = SMALL.model_copy(update={"domain_shares": {"web": 1.0}, "sample_chars": 300})
    bounds = hash_bounds(slices, wanted_chars(sizes, recipe))
    drawn = {cell: int((slices[cell].starts < bound).sum()) for cell, bound in bounds.items()}
    assert drawn == {("web", "en"): 10, ("web", "de"): 1, ("code", "und"): 0}


def test_a_share_that_the_corpus_cannot_fill_is_reported_and_the_others_keep_theirs():
    sizes = {("web", "en"): 8000, ("web", "de"): 1000, ("code", "en"): 100}
    recipe = SMALL.model_copy(update={"domain_shares": {"web": 0.5, "code": 0.3, "math": 0.2}, "sample_chars": 1000})
    wanted = wanted_chars(sizes, recipe)
    assert missing_chars(sizes, wanted, recipe) == {"domain code": 200, "domain math": 200}
    asked = recipe.model_copy(
        update={"domain_shares": {"web": 0.9, "code": 0.1}, "language_shares": {"en": 0.5, "sw": 0.5}}
    )
    assert missing_chars(sizes, wanted_chars(sizes, asked), asked) == {"language sw": 500}
    full = recipe.model_copy(update={"domain_shares": {"web": 0.9, "code": 0.1}})
    assert missing_chars(sizes, wanted_chars(sizes, full), full) == {}


def test_a_sample_is_as_large_as_asked_for_to_a_document(documents):
    """120 documents: at a rate by hash alone, 30 of them would be 22 as soon as 38."""
    frame = read_documents(spark_session(RESOURCES), documents.files("documents/*.parquet"), RESOURCES)
    longest = max(row["num_chars"] for row in rows(documents, "documents/*.parquet"))
    slices = count_chars(frame)
    sizes = {cell: counted.total for cell, counted in slices.items()}
    assert sizes == {cell: num_chars for cell, (_, num_chars) in _count_sample(frame).items()}
    for share in (4, 15):
        recipe = SMALL.model_copy(update={"sample_chars": sum(sizes.values()) // share})
        for asked in (recipe, recipe.model_copy(update={"domain_shares": {"web": 0.25, "code": 0.75}})):
            wanted = wanted_chars(sizes, asked)
            counted = _count_sample(drawn(frame, hash_bounds(slices, wanted)))
            assert all(abs(counted[cell][1] - wanted[cell]) <= longest for cell in sizes)
            assert sum(wanted.values()) == pytest.approx(asked.sample_chars)


def test_the_record_tells_what_was_drawn_and_what_is_missing(root, documents):
    recipe = SMALL.model_copy(
        update={"domain_shares": {"web": 0.5, "math": 0.5}, "sample_chars": 30_000, "num_ordinary_tokens": 270}
    )
    record = compute(train_tokenizer, root, documents=documents, recipe=recipe, resources=RESOURCES).record
    assert record.missing_chars == {"domain math": 15_000}
    assert set(record.sample_chars_by_language) == {"de", "en"} and set(record.sample_chars_by_domain) == {"web"}
    assert sum(record.sample_chars_by_language.values()) == record.num_sample_chars == pytest.approx(30_000, rel=0.1)


def test_rare_words_are_left_out_where_asked(root, documents, trained):
    recipe = SMALL.model_copy(update={"min_word_count": 3, "num_ordinary_tokens": 290})
    record = compute(train_tokenizer, root, documents=documents, recipe=recipe, resources=RESOURCES).record
    assert 0 < record.num_distinct_words < trained.record.num_distinct_words


@pytest.mark.parametrize("kind", ["bpe", "sentencepiece_bpe"])
def test_every_digit_is_a_token_where_asked(root, documents, kind):
    text = "def f_118(value): return value + 118"
    for split_digits in (True, False):
        recipe = SMALL.model_copy(update={"kind": kind, "num_ordinary_tokens": 420, "split_digits": split_digits})
        made = compute(train_tokenizer, root, documents=documents, recipe=recipe, resources=RESOURCES)
        tokenizer = Tokenizer.from_file(str(made.path("tokenizer.json")))
        tokens = tokenizer.encode(text).tokens
        is_split = all(sum(map(str.isdigit, token)) <= 1 for token in tokens)
        assert is_split or not split_digits, tokens
        assert split_digits or kind != "bpe" or not is_split, "numbers of the text are tokens"
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_256_special_tokens_are_glms_and_reserved_ones(root, documents):
    recipe = SMALL.model_copy(update={"special_tokens": "s1_256"})
    record = compute(train_tokenizer, root, documents=documents, recipe=recipe, resources=RESOURCES).record
    assert len(record.special_ids) == 256 and record.num_tokens == 320 + 256 and record.special_ids[END_OF_TEXT] == 320
    assert list(record.special_ids)[:36] == list(SPECIAL_TOKENS_BY_LAYOUT["glm"])


@pytest.mark.parametrize("kind", ["sentencepiece_bpe", "sentencepiece_unigram"])
def test_sentencepiece_gives_the_ids_of_its_own_processor(root, documents, tmp_path, kind):
    from sentencepiece import SentencePieceProcessor
    from transformers import AutoTokenizer

    recipe = SMALL.model_copy(update={"kind": kind, "num_ordinary_tokens": 360})
    made = compute(train_tokenizer, root, documents=documents, recipe=recipe, resources=RESOURCES)
    tokenizer = Tokenizer.from_file(str(made.path("tokenizer.json")))
    processor = SentencePieceProcessor(model_file=str(made.path(MODEL_FILE)))
    texts = [row["text"] for row in rows(documents, "documents/*.parquet")][:12]
    texts += [" two  blanks ", "\t\r\n\x01", "naïve 中文 😀", "", "<0x41> <unk>", "x" * 50, "IIIVIIII"]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == processor.encode(text) and tokenizer.decode(ids, skip_special_tokens=False) == text
    assert made.record.special_ids[END_OF_TEXT] == 360 and made.record.num_tokens == 360 + 36
    theirs = AutoTokenizer.from_pretrained(made.path("tokenizer.json").parent)
    assert theirs(texts[0], add_special_tokens=False)["input_ids"] == processor.encode(texts[0])


def test_the_report_counts_what_the_tokenizers_make_of_the_text(root, documents, trained, monkeypatch):
    monkeypatch.setattr(tokenizer_report, "REPORT_CHARS", 10**9)
    path = str(trained.path("tokenizer.json"))
    recipe = SMALL.model_copy(update={"compare_with": path, "num_ordinary_tokens": 300})
    made = compute(train_tokenizer, root, documents=documents, recipe=recipe, resources=RESOURCES)
    tokenizer = Tokenizer.from_file(path)
    report = {(row["tokenizer"], row["domain"], row["language"]): row for row in rows(made, "tokenizer_report.parquet")}
    german = [row["text"] for row in rows(documents, "documents/*.parquet") if row["lang"] == "de"]
    ids = [item.ids for item in tokenizer.encode_batch(german)]
    row = report["compared", "web", "de"]
    assert row["num_documents"] == len(german) and row["num_tokens"] == sum(map(len, ids))
    assert row["tokens_per_word"] == pytest.approx(
        sum(map(len, ids)) / sum(len(text.split()) for text in german), abs=1e-6
    )
    assert row["bytes_per_token"] == pytest.approx(
        sum(len(text.encode()) for text in german) / sum(map(len, ids)), abs=1e-6
    )
    assert row["vocabulary_share"] == pytest.approx(len({token for part in ids for token in part}) / 320, abs=1e-6)
    assert (
        report["ours", ALL, ALL]["num_documents"]
        == 120
        == sum(report["ours", one, ALL]["num_documents"] for one in ("web", "code"))
    )
    assert report["ours", ALL, "de"]["num_tokens"] >= row["num_tokens"] and len(made.record.compared_with) == 64
    with pytest.raises(ValueError, match=r"tokenizer\.compare_with: /nowhere is no readable tokenizer.json"):
        tokenizer_report.vocabulary_size(tokenizer_report.Path("/nowhere"))


def test_the_contract_holds(root, trained):
    files = ("data_contracts/tokenizer.yaml",)
    result = compute(
        validate_contract,
        root,
        subject=trained,
        recipe=ContractRecipe(name="tokenizer"),
        resources=RESOURCES,
        data_files=files,
    )
    assert result.record.num_expectations > 8


def test_more_than_a_hundred_thousand_shards_have_different_names():
    """As the web of `full` has: two tasks that write one name would each replace the other's shard."""
    numbers = spark_session(RESOURCES).createDataFrame(
        [("web", n) for n in (7, 99_999, 100_000, 100_001)], "domain string, n long"
    )
    names = [row["name"] for row in numbers.select(shard_name(numbers["n"]).alias("name")).collect()]
    assert names == ["web-00007", "web-99999", "web-100000", "web-100001"]


def test_shards_are_a_multiple_of_what_is_asked(root, documents, trained):
    bytes_of = {}
    for multiple in (1, 3):
        recipe = RECIPE.shards.model_copy(update={"multiple_of": multiple})
        made = compute(
            shard_documents,
            root,
            documents=documents,
            tokenizer=trained,
            recipe=recipe,
            resources=in_partitions(multiple + 1),
        )
        assert len(made.record.shards) == 2 * multiple and set(made.record.domains.values()) == {"web", "code"}
        order = [(row["id"], row["num_tokens"]) for row in rows(made, "shards/*.parquet")]
        data = b"".join(made.path(f"shards/{name}.bin").read_bytes() for name in made.record.shards)
        bytes_of[multiple] = (order, hashlib.sha256(data).hexdigest())
    assert bytes_of[1] == bytes_of[3]
    with pytest.raises(ValueError, match=r"domain code fills \d+ shards, not a multiple of shards.multiple_of \(60\)"):
        recipe = RECIPE.shards.model_copy(update={"multiple_of": 60})
        compute(shard_documents, root, documents=documents, tokenizer=trained, recipe=recipe, resources=RESOURCES)


def test_a_release_refuses_sentencepiece_before_anything_runs():
    scale = load_scale("micro")
    other = scale.data.recipe.tokenizer.model_copy(update={"kind": "sentencepiece_bpe"})
    data = scale.data.model_copy(update={"recipe": scale.data.recipe.model_copy(update={"tokenizer": other})})
    scale = scale.model_copy(update={"data": data})
    with pytest.raises(
        ValueError, match=r"tokenizer\.kind sentencepiece_bpe: the release converts to GGUF.*--until rl_reasoning"
    ):
        choose_stages(scale, None, None, None)
    assert not choose_stages(scale, None, None, "sft").releases


def test_the_plan_names_the_phase_whose_readers_the_shards_do_not_divide_among():
    scale = load_scale("scaled_down")
    assert not any("multiple_of" in sentence for phase in plan_training(scale).phases for sentence in phase.sentences)
    recipe = scale.data.recipe.model_copy(update={"shards": RECIPE.shards.model_copy(update={"multiple_of": 3})})
    planned = plan_training(scale.model_copy(update={"data": scale.data.model_copy(update={"recipe": recipe})}))
    assert all(
        any("multiple_of (3) is no multiple" in sentence for sentence in phase.sentences) for phase in planned.phases
    )
