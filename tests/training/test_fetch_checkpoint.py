"""`--start hf://owner/name` against a server that answers as the Hugging Face Hub does."""

from __future__ import annotations

import shutil

import pytest
import torch

from model.formats.hf_checkpoint import read_config
from tasks.training.fetch_checkpoint import copy_model, fetch_checkpoint, fetch_model
from tasks.training.import_checkpoint import describe_checkpoint_dir
from tests.support.cluster.model_hub import COMMIT, model_hub
from tests.support.model_recipes import AIR, random_model
from tests.support.saved_models import save_checkpoint

MODEL = AIR.model_copy(update={"num_nextn_predict_layers": 0})


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A model in two shards, and beside it what no checkpoint needs; yields the names that were asked for."""
    directory = tmp_path / "model"
    save_checkpoint(
        random_model(MODEL),
        directory,
        eos_token_ids=(0,),
        pad_token_id=0,
        dtype=torch.bfloat16,
        max_shard_bytes=200_000,
    )
    (directory / "tokenizer.json").write_text("{}")
    (directory / "README.md").write_text("about it")
    (directory / "original").mkdir()
    shutil.copyfile(directory / "config.json", directory / "original" / "params.json")
    with published(directory, tmp_path / "cache", monkeypatch) as asked:
        yield directory, asked


def published(directory, cache, monkeypatch):
    """A hub that has the files of a directory as owner/name."""
    files = {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    tree = [{"type": "file", "path": path, "size": len(body), "oid": "b" * 40} for path, body in files.items()]
    described = {"id": "owner/name", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}

    def answer(path):
        if path.startswith("/api/models/owner/name/tree/"):
            return tree
        return described if path.startswith("/api/models/owner/name/") else None

    return model_hub(files, answer, cache, monkeypatch)


def test_a_model_of_the_hub_is_the_directory_that_was_published_and_is_fetched_once(hub):
    directory, asked = hub
    fetched = fetch_checkpoint("hf://owner/name", MODEL)
    assert describe_checkpoint_dir(fetched).digest == describe_checkpoint_dir(directory).digest
    assert len([name for name in asked if name.endswith(".safetensors")]) > 1
    assert not {"README.md", "original/params.json"} & set(asked)
    before = len(asked)
    assert fetch_checkpoint(f"hf://owner/name@{COMMIT}", MODEL) == fetched and len(asked) == before


def test_a_fetched_model_gets_a_directory_of_its_own(hub, tmp_path):
    directory, _ = hub
    fetched = fetch_model("hf://owner/name", read_config)
    copy_model(fetched, tmp_path / "own")
    assert describe_checkpoint_dir(tmp_path / "own").digest == describe_checkpoint_dir(directory).digest
    assert not [path for path in (tmp_path / "own").iterdir() if path.is_symlink()]
    assert not list(tmp_path.glob(".own*"))


def test_weights_of_another_architecture_are_not_fetched(hub):
    _, asked = hub
    with pytest.raises(ValueError, match=r"config\.json: n_routed_experts 8 \(the scale has 4\)"):
        fetch_checkpoint("hf://owner/name", MODEL.model_copy(update={"n_routed_experts": 4}))
    assert "config.json" in asked and not [name for name in asked if name.endswith(".safetensors")]


@pytest.mark.parametrize(
    ("address", "message"),
    [("hf://name", "names no model: write hf://owner/name"), ("hf://owner/other", "cannot be fetched .* HF_TOKEN")],
)
def test_an_address_without_a_model_is_one_message(hub, address, message):
    with pytest.raises(ValueError, match=message):
        fetch_checkpoint(address, MODEL)
