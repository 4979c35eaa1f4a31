"""A phase whose store is a bucket: the weights of one whose store is a directory. The ranks read the shards, the driver
does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.storage.manifest_store import CorruptArtifactError
from tests.support.training_inputs import TrainingInputs, compute, shard_toy_documents, small_recipe


@pytest.fixture
def inputs(s3_server, tmp_path, monkeypatch):
    """In a bucket; the ranks keep their blocks below tmp."""
    (tmp_path / "node").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "node"))
    return TrainingInputs(tmp_path / "home", f"s3://glm46/{tmp_path.name}")


def blocks_of_the_node(tmp_path: Path) -> set[str]:
    (directory,) = (tmp_path / "node").glob("glm46-blocks-*")
    return {path.name.partition("-")[0] for path in (directory / "blocks").iterdir()}


def test_ranks_read_a_bucket_by_block_and_leave_the_weights_of_a_directory(inputs, tmp_path):
    local = TrainingInputs(tmp_path / "local")
    expected = local.train(local.arguments(small_recipe(num_steps=2)))
    arguments = inputs.arguments(small_recipe(num_steps=2))
    requests: list[tuple[str, str]] = []
    events = inputs.store.client.meta.events
    events.register("before-call.s3", lambda model, params, **_: requests.append((model.name, params["url_path"])))
    trained = inputs.train(arguments)
    assert trained.digest == expected.digest
    opened = {path.rpartition("/")[2] for operation, path in requests if operation == "GetObject"}
    assert not {name for name in opened if name.startswith(("toy", "order", "packing"))}
    shards = {file.sha256 for file in inputs.shards.files("shards/*")}
    assert shards < blocks_of_the_node(tmp_path)
    order = arguments["packed"].file("order-00000.npy")
    assert order.sha256 in blocks_of_the_node(tmp_path)


@pytest.mark.parametrize("where", ["directory", "s3"])
def test_a_shard_that_changed_after_its_commit_stops_the_phase_and_is_made_anew(where, inputs, tmp_path):
    chosen = inputs if where == "s3" else TrainingInputs(tmp_path / "local")
    name = f"objects/{chosen.shards.key}/{chosen.shards.manifest.attempt}/shards/toy.bin"
    if where == "s3":
        store = chosen.store
        store.client.put_object(Bucket=store.bucket, Key=store.prefix + name, Body=b"\1" * 768)
    else:
        path = Path(chosen.store.uri) / name
        path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(CorruptArtifactError, match=rf"{name} is corrupt: the block at byte 0 .*computed anew"):
        chosen.train(chosen.arguments(small_recipe(num_steps=1)))
    again = compute(chosen.store, shard_toy_documents)
    assert (again.digest, again.manifest.generation) == (chosen.shards.digest, 1)
