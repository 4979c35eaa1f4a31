"""Megatron-Core directories that others wrote: in parts, with a padded vocabulary, optimizers, a foreign index."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tasks.release.checkpoint_source import open_source
from tests.release.test_conversion import SHAPES, convert, digests, saved
from tests.support.rank_processes import on_ranks


def write_by_ranks(rank, num_ranks, one, two):
    """By torch's own reader and writer: of each tensor every rank writes a part along its first axis."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    stored = FileSystemReader(one).read_metadata().state_dict_metadata
    held = {
        key: torch.empty(each.size, dtype=each.properties.dtype)
        for key, each in stored.items()
        if isinstance(each, TensorStorageMetadata)
    }
    load(held, checkpoint_id=one)
    mesh = init_device_mesh("cpu", (num_ranks,))
    whole = {key: DTensor.from_local(tensor, mesh, [Replicate()]) for key, tensor in held.items()}
    save({key: tensor.redistribute(placements=[Shard(0)]) for key, tensor in whole.items()}, checkpoint_id=two)
    return {}


def test_a_megatron_directory_that_two_ranks_wrote_is_read(tmp_path):
    first = saved(tmp_path / "first", SHAPES["Air"])
    convert(first, tmp_path / "one", "megatron")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    below = tmp_path / "two" / "iter_0000000"
    for path in [below / ".metadata", *below.glob("*.distcp")]:
        path.unlink()
    on_ranks(write_by_ranks, 2, tmp_path, str(tmp_path / "one" / "iter_0000000"), str(below))
    assert {path.name.split("_")[2] for path in below.glob("*.distcp")} == {"0", "1"}, "a file of each rank"
    cards = [convert(tmp_path / each, tmp_path / f"{each}-hf", "hf") for each in ("one", "two")]
    assert cards[0].tensors_sha256 == cards[1].tensors_sha256
    assert digests(tmp_path / "one-hf") == digests(tmp_path / "two-hf")
    (below / min(path.name for path in below.glob("*.distcp"))).unlink()
    with pytest.raises((ValueError, FileNotFoundError)):
        convert(tmp_path / "two", tmp_path / "lost", "hf")


def fill_up_vocabulary(directory: Path, num_rows: int) -> None:
    """Write a checkpoint again with the rows that Megatron adds to a vocabulary, here of ones."""
    metadata = FileSystemReader(directory).read_metadata().state_dict_metadata
    held = {key: torch.empty(each.size, dtype=each.properties.dtype) for key, each in metadata.items()}
    load(held, checkpoint_id=directory)
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        held[key] = torch.cat([held[key], held[key].new_ones(num_rows, held[key].shape[1])])
    for path in [directory / ".metadata", *directory.glob("*.distcp")]:
        path.unlink()
    save(held, checkpoint_id=directory)


@pytest.mark.parametrize(("num_rows", "is_read"), [(32, True), (31, False), (192, False)])
def test_a_vocabulary_that_megatron_padded_is_cut(num_rows, is_read, tmp_path):
    """352 tokens are 384 rows where these are a multiple of 128. Nothing pads to 383 rows, or from 352 to 544: both are
    multiples of 32."""
    first = saved(tmp_path / "first", SHAPES["Air"])
    for each in ("one", "padded"):
        convert(first, tmp_path / each, "megatron")
    fill_up_vocabulary(tmp_path / "padded" / "iter_0000000", num_rows)
    if is_read:
        cards = [convert(tmp_path / each, tmp_path / f"{each}-hf", "hf") for each in ("one", "padded")]
        assert cards[0].tensors_sha256 == cards[1].tensors_sha256
        assert digests(tmp_path / "one-hf") == digests(tmp_path / "padded-hf")
    else:
        with pytest.raises(ValueError, match=rf"word_embeddings.weight has shape \({352 + num_rows}, .*model wants"):
            open_source(tmp_path / "padded")


def test_the_optimizers_of_a_megatron_directory_are_left_out(tmp_path):
    """A model with experts has several, whose tensors Megatron-Core numbers."""
    card = convert(saved(tmp_path / "first", SHAPES["Air"]), tmp_path / "m", "megatron")
    index = tmp_path / "m" / "iter_0000000" / ".metadata"
    metadata = pickle.loads(index.read_bytes())  # noqa: S301  (written above)
    held = metadata.state_dict_metadata
    weight = held["output_layer.weight"]
    for beginning in ("optimizer.", "chained_0.optimizer.", "chained_1.optimizer."):
        held[f"{beginning}state.exp_avg.output_layer.weight"] = weight
    index.write_bytes(pickle.dumps(metadata))
    assert convert(tmp_path / "m", tmp_path / "back", "hf").tensors_sha256 == card.tensors_sha256
    held["chained_0.other.weight"] = weight
    index.write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"tensor chained_0\.other\.weight is unexpected"):
        open_source(tmp_path / "m")


def test_an_index_that_would_run_code_is_not_read(tmp_path):
    convert(saved(tmp_path / "first", SHAPES["Air"]), tmp_path / "m", "megatron")
    index = tmp_path / "m" / "iter_0000000" / ".metadata"
    for module, name in (("os", "system"), ("torch.distributed.checkpoint.filesystem", "os.system")):
        words = [b"\x80\x04"] + [b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name)]
        index.write_bytes(b"".join(words) + b"\x93.")
        with pytest.raises(ValueError, match=f"{name} is no part of an index"):
            open_source(tmp_path / "m")
