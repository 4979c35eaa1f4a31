"""The GGUF file against our own generation and tokenizer, in llama.cpp's server."""

import json
import random
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest
import torch
import xllamacpp
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from model.architecture.transformer import Glm4Moe
from model.formats.gguf_checkpoint import write_gguf
from model.generation.generation import InProcessEngine, Sampling
from model.text.tokenizer_layout import PRETOKENIZER_PATTERN, SPECIAL_TOKENS, added_tokens
from tests.support.model_recipes import GLM46, random_model
from tests.support.saved_models import save_checkpoint

pytestmark = pytest.mark.usefixtures("clear_routing")

TEXTS = [
    "Hello world, it's 12345 o'clock; we'LL see!\n\n  Done.",
    "你好，世界！今天是2024年。",
    "def f(x):\n\treturn x**2  # comment\r\n\n\nprint(f(3))   ",
    "mixed 中文 and English\u3000ſ 'S Ünïcödé ١٢٣ 🙂🙂  x=1_000_000",
    "[gMASK]<sop><|user|>\nhi<|assistant|>\n<think></think>\n",
]
RECIPE = GLM46.model_copy(update={"vocab_size": 352, "num_nextn_predict_layers": 1})


def train_tiny_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZER_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXTS * 3, trainers.BpeTrainer(vocab_size=310, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_tokens(added_tokens(SPECIAL_TOKENS))
    return tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Glm4Moe, Path]:
    directory = tmp_path_factory.mktemp("checkpoint")
    train_tiny_tokenizer().save(str(directory / "tokenizer.json"))
    model = random_model(RECIPE)
    save_checkpoint(
        model, directory, eos_token_ids=[310], pad_token_id=310, dtype=torch.float32, max_shard_bytes=200_000
    )
    (directory / "chat_template.jinja").write_text("[gMASK]<sop>{% for m in messages %}{{ m['content'] }}{% endfor %}")
    return model, directory


@pytest.fixture(scope="module")
def server_url(checkpoint: tuple[Glm4Moe, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(checkpoint[1], checkpoint[1] / "tokenizer.json", path, gguf_type="F32", name="tiny")
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.port, params.warmup = str(path), 256, 1, 0, False
    server = xllamacpp.Server(params)
    address = server.listening_address
    yield address if address.startswith("http") else f"http://{address}"
    del server


def random_texts(count: int) -> list[str]:
    """Runs of few characters, where pre-tokenizers differ: spaces, line breaks, digits, apostrophes, marks, emoji, what
    is unassigned."""
    kinds = (
        "abSTMDrevLl'",
        "  \n\r\t\x0b",
        "1234٣१Ⅷ½",
        "!?.,({’",
        "éß中かな한",
        "\u00a0\u2028\x85\u3000\u200b",
        "\u0301🏽👨\u200d🇩",
        "ſKİ",
        "ไทยำहि",
        "\ue000\ufffd\U000e0001\x01",
    )
    chance = random.Random(3)
    return ["".join(chance.choices("".join(chance.sample(kinds, 3)), k=chance.randrange(1, 30))) for _ in range(count)]


def post(url: str, body: dict) -> dict:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def test_llama_cpp_tokenizes_as_tokenizers_does(checkpoint: tuple[Glm4Moe, Path], server_url: str) -> None:
    tokenizer = Tokenizer.from_file(str(checkpoint[1] / "tokenizer.json"))
    for text in [*TEXTS, *random_texts(400), *SPECIAL_TOKENS]:
        served = post(f"{server_url}/tokenize", {"content": text, "parse_special": True})["tokens"]
        assert served == tokenizer.encode(text, add_special_tokens=False).ids, text
        assert post(f"{server_url}/detokenize", {"tokens": served})["content"] == text


def test_llama_cpp_continues_greedily_as_we_do(checkpoint: tuple[Glm4Moe, Path], server_url: str) -> None:
    model, directory = checkpoint
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    sampling = Sampling(
        max_new_tokens=16, stop_token_ids=tuple(tokenizer.token_to_id(token) for token in SPECIAL_TOKENS)
    )
    ours = InProcessEngine(model, weights_version="v", batch_sequences=4).generate(prompts, sampling, "v")
    with torch.no_grad():
        for prompt, token_ids in zip(prompts, ours.token_ids, strict=True):
            model(torch.tensor([prompt + token_ids]))  # for its routing, which neither engine shows
    num_compared = 0
    for prompt, token_ids, margins in zip(prompts, ours.token_ids, ours.top2_margins, strict=True):
        body = {"prompt": prompt, "n_predict": 16, "temperature": 0, "return_tokens": True, "cache_prompt": False}
        served = post(f"{server_url}/completion", body)["tokens"]
        clear = next((step for step, margin in enumerate(margins) if margin < 1e-2), len(margins))
        ended = next((step for step, token in enumerate(token_ids) if token in sampling.stop_token_ids), clear)
        assert served[: min(clear, ended)] == token_ids[: min(clear, ended)]
        num_compared += min(clear, ended)
    assert num_compared >= 20


@pytest.mark.parametrize("gguf_type", ["F32", "Q8_0"])
def test_gguf_bytes_are_equal_and_small_tensors_stay_float32(
    checkpoint: tuple[Glm4Moe, Path], tmp_path: Path, gguf_type
) -> None:
    directory = checkpoint[1]
    for name in ("first", "second"):
        write_gguf(directory, directory / "tokenizer.json", tmp_path / name, gguf_type=gguf_type, name="tiny")
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()
    kinds: dict[str, set[str]] = {}
    for tensor in gguf.GGUFReader(tmp_path / "first").tensors:
        kept = (".bias", "norm.weight", "ffn_gate_inp.weight", "eh_proj.weight")
        is_small = tensor.name.endswith(kept)
        kinds.setdefault("small" if is_small else "matrix", set()).add(tensor.tensor_type.name)
    assert kinds == {"small": {"F32"}, "matrix": {gguf_type}}


def test_gguf_holds_all_layers_special_tokens_and_the_template(
    checkpoint: tuple[Glm4Moe, Path], tmp_path: Path
) -> None:
    model, directory = checkpoint
    write_gguf(directory, directory / "tokenizer.json", tmp_path / "m.gguf", gguf_type="F32", name="tiny")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    types = reader.fields["tokenizer.ggml.token_type"].contents()
    assert types == [1] * 310 + [3] * 21 + [4] * 10 + [3] * 5 + [5] * 6
    assert reader.fields["tokenizer.chat_template"].contents().startswith("[gMASK]<sop>")
    assert reader.fields["glm4moe.block_count"].contents() == 4
    assert reader.fields["glm4moe.nextn_predict_layers"].contents() == 1
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    experts = model.model.layers[2].mlp.experts.up_proj.detach()
    assert torch.equal(torch.from_numpy(tensors["blk.2.ffn_up_exps.weight"].copy()), experts)
    drafting = model.model.layers[3].eh_proj.weight.detach()
    assert torch.equal(torch.from_numpy(tensors["blk.3.nextn.eh_proj.weight"].copy()), drafting)


def test_a_tokenizer_that_glm4_would_split_otherwise_is_refused(
    checkpoint: tuple[Glm4Moe, Path], tmp_path: Path
) -> None:
    tokenizer = train_tiny_tokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"tokenizer\.json: the pre-tokenizer must be Split"):
        write_gguf(checkpoint[1], tmp_path / "tokenizer.json", tmp_path / "m.gguf", gguf_type="F32", name="tiny")
