"""Memory of loading a checkpoint of many files on two ranks: what comes on top of the rank's own share of the model."""

import ctypes
import gc
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model.architecture.transformer import Glm4Moe
from model.formats.hf_checkpoint import CheckpointTensors
from tasks.training.loop.build_model import build_trainable, divide_model, make_weights
from tasks.training.parallel.partitions import pieces_of
from tasks.training.parallel.ranks import connect_ranks
from tasks.training.parallel.trainable import Trainable
from tasks.training.state.state import load_master
from tasks.training.state.tensor_sources import StateFiles
from tests.support.model_recipes import GLM46
from tests.support.parallel_steps import resources_of
from tests.support.rank_processes import on_ranks
from tests.support.saved_models import save_checkpoint
from tests.support.training_inputs import small_recipe

SMALL = GLM46
LARGE = GLM46.model_copy(
    update={"hidden_size": 256, "moe_intermediate_size": 192, "n_routed_experts": 16, "num_hidden_layers": 12}
)
CASES = [{"zero_stage": 3}, {"zero_stage": 0, "expert_parallel": 2}, {"zero_stage": 0, "tensor_parallel": 2}]
SOURCES = {
    "hugging face": lambda directory, recipe: CheckpointTensors(directory, recipe),
    "handover": lambda directory, _: StateFiles(
        directory, "model"
    ),  # its files are named by kind; these are of the kind "model"
}
M_MMAP_THRESHOLD = -3
"""Of glibc's malloc.h."""
CLEAR_REFS, RESET_PEAK = Path("/proc/self/clear_refs"), "5"


def status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def fill_share(trainable: Trainable) -> int:
    """Make resident what a rank holds of the weights and their masters, and return its bytes."""
    pieces = pieces_of(trainable.engine, trainable.model, trainable.ranks)
    held: list[Tensor] = [
        *trainable.model.parameters(),
        *trainable.model.buffers(),
        *(piece.master for piece in pieces.values()),
    ]
    held += [
        part
        for parameter in trainable.model.parameters()
        if (part := getattr(parameter, "ds_tensor", None)) is not None
    ]
    for tensor in held:
        tensor.data.zero_()
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held}.values())


def excess_of_loading(rank, num_ranks, directory):
    """Per case and source the peak during loading over what was resident before, as a share of what the rank holds."""
    excess = {}
    # Memory of a freed tensor goes back at once: what glibc keeps for itself differs from machine to machine.
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65_536)
    for case in CASES:
        resources = resources_of(num_ranks=num_ranks, micro_batch_sequences=1, bucket_elements=20_000, **case)
        ranks = connect_ranks(resources)
        for name, source in SOURCES.items():
            for folder, recipe in (("small", SMALL), ("large", LARGE)):  # what loading needs once is not counted
                with torch.device("meta"):
                    model = Glm4Moe(recipe)
                divide_model(model, ranks, resources)
                make_weights(model, "float32", resources, ranks)
                trainable = build_trainable(model, small_recipe().optimizer, "float32", resources, ranks)
                share = fill_share(trainable)
                gc.collect()
                ctypes.CDLL(None).malloc_trim(0)
                CLEAR_REFS.write_text(RESET_PEAK)
                before = status_bytes("VmRSS")
                load_master(trainable, source(Path(directory) / folder, recipe), folder)
                excess[f"{case} {name}"] = (status_bytes("VmHWM") - before) / share
                del trainable, model
    return excess


@pytest.mark.skipif(not os.access(CLEAR_REFS, os.W_OK), reason="peak memory is reset and read through Linux's /proc")
def test_a_rank_needs_little_more_than_its_share_to_load_a_checkpoint_of_many_files(tmp_path: Path) -> None:
    for folder, recipe, shard_bytes in (("small", SMALL, 100_000), ("large", LARGE, 2_400_000)):
        save_checkpoint(
            Glm4Moe(recipe),
            tmp_path / folder,
            eos_token_ids=[300],
            pad_token_id=300,
            dtype=torch.float32,
            max_shard_bytes=shard_bytes,
        )
    assert len(list((tmp_path / "large").glob("*.safetensors"))) > 30
    for rank, by_case in enumerate(on_ranks(excess_of_loading, 2, tmp_path, str(tmp_path))):
        assert {case: excess for case, excess in by_case.items() if excess > 0.1} == {}, rank
