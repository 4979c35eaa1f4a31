"""Vectors by a named model: against transformers' own mean pooling, whatever stands beside a text; what it finds, and
what it refuses."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, PreTrainedTokenizerFast, T5Config, T5Model

from configs.schema import SemanticRecipe
from infra.machine.spark import _zip_packages
from tasks.data.deduplication.remove_semantic_duplicates import SIMILAR, remove_semantic_duplicates
from tasks.data.embedding.embedding_model import (
    EmbeddingModel,
    _opened,
    check_files,
    directory_digest,
    encode,
    named_model,
    probe_batches,
)
from tasks.data.embedding.semantic_vectors import BUCKET_BITS, project, squared_norms, widened
from tasks.data.tokenizer.bpe_tokenizer import train_bpe
from tests.conftest import ROOT
from tests.support.data_inputs import RECIPE, RESOURCES, compute, in_partitions, prose, rows
from tests.support.document_tables import document_row, documents_artifact
from tests.support.model_recipes import GLM46, random_model
from tests.support.saved_models import save_checkpoint

NUM_CONCEPTS, WORDS_PER_TEXT, CONCEPTS_PER_TEXT = 60, 60, 12
WORDS = [
    f"{prefix}{''.join(letters)}"
    for prefix in "xy"
    for letters in itertools.islice(itertools.product("abcd", "klmn", "opqr"), 60)
]
"""Two for each concept: the second is NUM_CONCEPTS positions after the first."""
PARAPHRASED = (
    "The council voted on Monday to close the swimming pool at the end of the summer, since repairs would cost two "
    "million pounds.",
    "Councillors decided at the start of the week that the public baths will shut after the summer; fixing them was "
    "priced at two million.",
    "Bees tell each other where the flowers are by a dance in the shape of an eight, whose angle shows the direction "
    "of the sun.",
)
"""The first two say the same."""
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def bert_tokenizer() -> Tokenizer:
    """Words of one letter up, as BERT splits them; unknown ones are one id."""
    vocabulary = {token: number for number, token in enumerate([*SPECIALS, *WORDS, *"abcdefghijklmnopqrstuvwxyz.,"])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


def save_bert(directory: Path, encoder: BertModel) -> Path:
    """As published: with the padding of its training in tokenizer.json, which we do not want."""
    encoder.save_pretrained(directory)
    tokenizer = bert_tokenizer()
    tokenizer.enable_padding(length=128)
    special = {
        f"{name}_token": token for name, token in zip(("pad", "unk", "cls", "sep", "mask"), SPECIALS, strict=True)
    }
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(directory)
    return directory


def new_bert(seed: int, vocab_size: int = 5 + 2 * NUM_CONCEPTS + 28) -> BertModel:
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=vocab_size,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=128,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertModel(config).eval()


def written_twice(generator: np.random.Generator) -> tuple[str, str]:
    """A text of a few concepts, and the same in other words throughout."""
    concepts = generator.choice(generator.permutation(NUM_CONCEPTS)[:CONCEPTS_PER_TEXT], WORDS_PER_TEXT)
    sides = generator.integers(0, 2, NUM_CONCEPTS)[concepts] * NUM_CONCEPTS
    first, second = concepts + sides, concepts + (NUM_CONCEPTS - sides)
    return tuple(" ".join(WORDS[number] for number in numbers) for numbers in (first, second))  # pyright: ignore


def train_on_paraphrases(encoder: BertModel) -> None:
    """Contrastive, as sentence encoders are trained: a text lies nearer to its paraphrase than to others."""
    tokenizer, generator = bert_tokenizer(), np.random.Generator(np.random.Philox(1))
    optimizer = torch.optim.Adam(encoder.parameters(), lr=3e-3)
    for _ in range(80):
        pairs = [written_twice(generator) for _ in range(16)]
        ids = torch.tensor([tokenizer.encode(text).ids for side in zip(*pairs, strict=True) for text in side])
        pooled = torch.nn.functional.normalize(encoder(input_ids=ids).last_hidden_state.mean(dim=1), dim=-1)
        loss = torch.nn.functional.cross_entropy(pooled[:16] @ pooled[16:].T / 0.05, torch.arange(16))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def named(directory: Path, passage_tokens: int = 64, max_passages: int = 3, min_words: int = 4) -> EmbeddingModel:
    return EmbeddingModel(str(directory), directory_digest(directory), passage_tokens, max_passages, min_words)


def cosines(vectors) -> np.ndarray:
    wide = np.asarray(vectors, dtype=float)
    wide /= np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-9)
    return wide @ wide.T


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    encoder = new_bert(3)
    train_on_paraphrases(encoder)
    return save_bert(tmp_path_factory.mktemp("models") / "trained", encoder)


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """A checkpoint as this pipeline exports and registers it: mixture of experts, MTP layer, GLM's tokenizer."""
    directory = tmp_path_factory.mktemp("models") / "exported"
    save_checkpoint(
        random_model(GLM46),
        directory,
        eos_token_ids=[300],
        pad_token_id=300,
        dtype=torch.float32,
        max_shard_bytes=100_000,
    )
    train_bpe(iter([prose(seed) for seed in range(20)]), 284).save(str(directory / "tokenizer.json"))
    return directory


def text_of(seed: int, num_words: int) -> str:
    """Known words of the trained model, and made-up ones between them."""
    generator = np.random.Generator(np.random.Philox(seed))
    words = [word for _ in range(num_words // WORDS_PER_TEXT + 1) for word in written_twice(generator)[0].split()]
    words[4::5] = prose(seed, len(words[4::5])).split()
    return " ".join(words[:num_words])


TEXTS = [text_of(seed, 5 + 13 * seed) for seed in range(12)]


def test_vectors_are_transformers_mean_pooling(trained):
    """In one padded batch with a mask, as model cards show it."""
    short = [text_of(seed, 10 + 4 * seed) for seed in range(10)]
    tokens = AutoTokenizer.from_pretrained(trained)(short, padding="longest", return_tensors="pt")
    with torch.no_grad():
        states = AutoModel.from_pretrained(trained)(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1)
    expected = (states * mask).sum(dim=1) / mask.sum(dim=1)
    vectors = encode(short, named(trained))
    scaled = expected.numpy() * (127 / np.abs(expected.numpy()).max(axis=1, keepdims=True))
    assert np.abs(vectors - scaled).max() < 0.51 and np.abs(vectors).max(axis=1).tolist() == [127] * 10


def test_of_a_long_text_passages_from_its_first_to_its_last_are_read(trained):
    text = text_of(5, 460)
    ids = AutoTokenizer.from_pretrained(trained)(text, add_special_tokens=False)["input_ids"]
    passages = [[2, *ids[start : start + 62], 3] for start in range(0, len(ids), 62)]
    assert len(passages) > 6
    encoder = AutoModel.from_pretrained(trained)
    for max_passages, chosen in (
        (1, [0]),
        (3, [0, (len(passages) - 1) // 2, len(passages) - 1]),
        (99, range(len(passages))),
    ):
        with torch.no_grad():
            states = torch.cat([encoder(torch.tensor([passages[number]])).last_hidden_state[0] for number in chosen])
        mean = states.mean(dim=0).numpy()
        vector = encode([text], named(trained, max_passages=max_passages))[0]
        assert np.abs(vector - mean * (127 / np.abs(mean).max())).max() < 0.51


@pytest.mark.parametrize("fixture", ["trained", "exported"])
def test_a_vector_depends_on_its_text_alone(fixture, request):
    """Bit by bit: a mixture of experts multiplies other shapes for other neighbours, were they in one batch."""
    model = named(request.getfixturevalue(fixture))
    together = encode(TEXTS, model)
    assert np.array_equal(together, np.concatenate([encode([text], model) for text in TEXTS]))
    assert np.array_equal(together, encode(TEXTS[::-1], model)[::-1])
    assert encode([], model).shape == (0, together.shape[1])


def test_a_checkpoint_of_this_pipeline_gives_its_trunks_hidden_states(exported):
    model, text = random_model(GLM46), prose(3, 30)
    ids = Tokenizer.from_file(str(exported / "tokenizer.json")).encode(text).ids[:300]
    with torch.no_grad():
        mean = model.hidden_states(torch.tensor([ids]))[0].mean(dim=0).numpy()
    (probe,) = next(probe_batches(iter([None]), named(exported, 300))).to_pylist()  # pyright: ignore
    assert probe == {"num_dimensions": GLM46.hidden_size, "problem": ""}
    vectors = encode([text, "a b c"], named(exported, 300))
    assert np.abs(vectors[0] - mean * (127 / np.abs(mean).max())).max() < 0.6 and not vectors[1].any()


def test_more_dimensions_than_float32_can_sum_stay_exact():
    vectors = np.random.Generator(np.random.Philox(1)).integers(100, 128, (8, 5000)).astype(np.int8)
    exact = vectors.astype(np.int64) @ vectors.astype(np.int64).T
    assert np.array_equal(widened(vectors) @ widened(vectors).T, exact) and np.array_equal(
        squared_norms(vectors), np.diag(exact)
    )
    assert not np.array_equal(vectors.astype(np.float32) @ vectors.astype(np.float32).T, exact)


def semantic_recipe(directory: Path, **changed) -> SemanticRecipe:
    model = {
        "embedding_model": str(directory),
        "embedding_sha256": directory_digest(directory),
        "passage_tokens": 64,
        "max_passages": 3,
    }
    return RECIPE.semantic.model_copy(
        update={**model, "max_cosine": 0.82, "cluster_documents": 1000, "min_words": 10, **changed}
    )


def paraphrased_corpus() -> list[dict]:
    """16 documents, the first five of them again in other words, worse; and one too short to be judged."""
    generator = np.random.Generator(np.random.Philox(77))
    pairs = [written_twice(generator) for _ in range(16)]
    texts = [first for first, _ in pairs] + [second for _, second in pairs[:5]]
    corpus = [document_row(text, number, quality=0.9 if number < 16 else 0.1) for number, text in enumerate(texts)]
    return [*corpus, document_row("few words", 30)]


@pytest.mark.long
def test_a_trained_model_finds_paraphrases_that_share_no_word(trained, tmp_path):
    corpus = paraphrased_corpus()
    texts = [row["text"] for row in corpus]
    assert not any(set(texts[number].split()) & set(texts[16 + number].split()) for number in range(5))
    flat = np.ones(1 << BUCKET_BITS, dtype=np.float32)
    assert np.triu(cosines(project(texts, flat, 256, 46, 10)), 16).max() < 0.5
    recipe, artifact = semantic_recipe(trained), documents_artifact(corpus, tmp_path / "documents.parquet")
    result = compute(
        remove_semantic_duplicates, tmp_path / "home", documents=artifact, recipe=recipe, resources=RESOURCES
    )
    shown = {row["id"]: row["kept_id"] for row in rows(result, "similar.parquet")}
    assert shown == {corpus[16 + number]["id"]: corpus[number]["id"] for number in range(5)}
    assert result.record.dropped == {SIMILAR: 5} and result.record.num_sampled == len(corpus)
    again = compute(
        remove_semantic_duplicates, tmp_path / "again", documents=artifact, recipe=recipe, resources=in_partitions(5)
    )
    assert again.digest == result.digest


def test_a_model_that_does_not_run_stops_the_step_in_one_sentence(trained, tmp_path):
    artifact = documents_artifact(paraphrased_corpus(), tmp_path / "documents.parquet")
    too_long = semantic_recipe(trained, passage_tokens=129)
    with pytest.raises(
        ValueError,
        match=r"gives no vectors: ValueError: semantic.passage_tokens \(129\) is more than the 128 positions",
    ):
        compute(remove_semantic_duplicates, tmp_path / "long", documents=artifact, recipe=too_long, resources=RESOURCES)


def test_what_executors_elsewhere_get_as_a_zip_encodes_the_same(trained, tmp_path):
    model = named(trained)
    code = (
        f"import sys; sys.path[:0] = [{str(_zip_packages(tmp_path))!r}]; import tasks.data.embedding.embedding_model "
        f"as shipped\n"
        f"import numpy as np\n"
        f"assert '.zip' in shipped.__file__\n"
        f"vectors = shipped.encode({TEXTS!r}, shipped.EmbeddingModel(*{(model.directory, model.sha256, 64, 3, 4)!r}))\n"
        "'infra' not in sys.modules\n"
        f"np.save({str(tmp_path / 'vectors.npy')!r}, vectors)"
    )
    subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, check=True)
    assert np.array_equal(np.load(tmp_path / "vectors.npy"), encode(TEXTS, model))


def copied(directory: Path, target: Path) -> Path:
    target.mkdir()
    for path in directory.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def without(name: str):
    return lambda directory: (directory / name).unlink()


def pickled(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("config.json"), "holds no config.json"),
        (without("tokenizer.json"), "holds no tokenizer.json"),
        (without("model.safetensors"), r"holds no \*\.safetensors: pickled"),
        (pickled, r"holds no \*\.safetensors, only \['pytorch_model.bin'\]: pickled weights can run code"),
        (lambda directory: (directory / "adapter_config.json").write_text("{}"), "is an adapter"),
        (
            lambda directory: (directory / "README.md").write_text("x"),
            r"has digest [0-9a-f]{64}, embedding_sha256 is [0-9a-f]{64}",
        ),
    ],
)
def test_a_directory_that_is_not_the_one_meant_is_refused_before_any_work(
    damage, message, trained, tmp_path, monkeypatch
):
    directory = copied(trained, tmp_path / "model")
    recipe = semantic_recipe(directory)
    damage(directory)
    monkeypatch.setattr(
        "tasks.data.deduplication.remove_semantic_duplicates.spark_session",
        lambda resources: pytest.fail("Spark was started"),
    )
    artifact = documents_artifact([document_row(prose(1), 0)], tmp_path / "documents.parquet")
    with pytest.raises(ValueError, match=rf"data.recipe.semantic.embedding_model {directory} {message}"):
        compute(remove_semantic_duplicates, tmp_path / "home", documents=artifact, recipe=recipe, resources=RESOURCES)


def missing_weight(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    save_file(
        {name: value for name, value in tensors.items() if "layer.1.output.dense" not in name},
        directory / "model.safetensors",
    )


def no_pooler(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    save_file(
        {name: value for name, value in tensors.items() if not name.startswith("pooler.")},
        directory / "model.safetensors",
    )


def edited_config(**values):
    def edit(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return edit


def small_vocabulary(directory: Path) -> None:
    new_bert(1, vocab_size=100).save_pretrained(directory)


def decoder_needed(directory: Path) -> None:
    T5Model(T5Config(vocab_size=200, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)).save_pretrained(directory)


def not_finite(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    save_file({name: value * float("nan") for name, value in tensors.items()}, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (no_pooler, ""),
        (missing_weight, "2 weights are not in its files, for example .*they would be random"),
        (small_vocabulary, "tokenizer.json has id 152, the model embeds 100 tokens"),
        (decoder_needed, "T5Model is an encoder with a decoder"),
        (not_finite, "not finite"),
        (lambda directory: (directory / "model.safetensors").write_bytes(b"\x00" * 100), "Safetensor"),
        (edited_config(model_type="own", auto_map={"AutoModel": "code.Model"}), "model type `own`"),
    ],
)
def test_a_model_that_does_not_run_is_refused_before_any_document_is_encoded(damage, problem, trained, tmp_path):
    directory = copied(trained, tmp_path / "model")
    damage(directory)
    (probe,) = next(probe_batches(iter([None]), named(directory))).to_pylist()  # pyright: ignore
    assert bool(probe["problem"]) == bool(problem) and bool(probe["num_dimensions"]) != bool(problem)
    if problem:
        assert re.search(problem, probe["problem"])


def test_executors_refuse_a_directory_that_changed_after_it_was_checked(trained, tmp_path):
    directory = copied(trained, tmp_path / "model")
    model = named(directory)
    check_files(model)
    edited_config(layer_norm_eps=0.5)(directory)
    _opened.cache_clear()
    with pytest.raises(ValueError, match="has digest"):
        encode(TEXTS, model)


def test_the_digest_is_what_the_shell_prints(trained, tmp_path):
    directory = copied(trained, tmp_path / "model")
    for name in ("Zoo.txt", "a b.txt", ".hidden"):
        (directory / name).write_text(name)
    (directory / "1_Pooling").mkdir()
    command = "cd DIR && LC_ALL=C sh -c 'sha256sum *' | sha256sum".replace("DIR", str(directory))
    printed = subprocess.run(command, shell=True, capture_output=True, text=True).stdout  # noqa: S602
    assert printed.split()[0] == directory_digest(directory)


def test_model_and_digest_go_together():
    given = RECIPE.semantic.model_dump()
    packaged = {"embedding_model": "all-MiniLM-L6-v2"}
    for changed in (
        {"embedding_model": "/models/minilm"},
        {"embedding_sha256": "0" * 64},
        packaged | {"embedding_sha256": "0" * 64},
    ):
        with pytest.raises(
            ValueError, match=r"embedding_model .* and embedding_sha256 .*: a directory needs its digest, .*; `cd DIR"
        ):
            SemanticRecipe.model_validate(given | changed)
    SemanticRecipe.model_validate(given | {"embedding_model": "/models/minilm", "embedding_sha256": "0" * 64})
    SemanticRecipe.model_validate(given | packaged)


def test_the_packaged_encoder_is_found_by_its_name_and_knows_a_paraphrase():
    recipe = SemanticRecipe.model_validate(
        RECIPE.semantic.model_dump() | {"embedding_model": "all-MiniLM-L6-v2", "min_words": 4}
    )
    model = named_model(recipe)
    assert model is not None
    likeness = cosines(encode(list(PARAPHRASED), model))
    assert likeness[0, 1] > 0.5 > 0.2 > likeness[:2, 2].max()


def test_without_a_model_no_model_library_is_imported():
    code = (
        "import sys, numpy as np, tasks.data.deduplication.remove_semantic_duplicates\n"
        "from tasks.data.embedding.embedding_model import encode, named_model\n"
        "from tasks.data.embedding.semantic_vectors import project, BUCKET_BITS\n"
        "from configs.load import load_scale\n"
        "assert named_model(load_scale('micro').data.recipe.semantic) is None\n"
        "project(['some words here'], np.ones(1 << BUCKET_BITS, np.float32), 8, 1, 1)\n"
        "print(sorted({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
