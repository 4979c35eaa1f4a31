"""What each rank writes, hashes and reads of a checkpoint, counted on gloo ranks: its share, whatever ZeRO and experts
divide; and what any topology wrote is read by any other, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from configs.files import stored_files
from tasks.training.state import checkpoints
from tasks.training.state.checkpoints import DamagedCheckpointError, read_index
from tasks.training.state.state import load_checkpoint
from tests.support.rank_processes import on_ranks
from tests.support.saved_states import flip_a_bit, save_state, state_tensors, whole_tensors
from tests.training.test_zero import build, position_after, train

BLOCK = 16_384
"""Bytes: so small that a rank's file has several."""
CASES = {
    4: {
        **{f"ZeRO {stage}": {"zero_stage": stage} for stage in (0, 3)},
        "experts": {"zero_stage": 1, "expert_parallel": 2},
        "tensor and stages": {"zero_stage": 1, "tensor_parallel": 2, "pipeline_parallel": 2},
    },
    2: {
        **{f"ZeRO {stage}": {"zero_stage": stage} for stage in (1, 2)},
        "bfloat16": {"zero_stage": 1, "dtype": "bfloat16"},
        "experts": {"zero_stage": 0, "expert_parallel": 2},
    },
}


class Counts:
    """Bytes that this rank hashed to write and to read since the last look."""

    def __init__(self) -> None:
        self.written = self.read = 0
        stored_files.BLOCK_BYTES = checkpoints.BLOCK_BYTES = BLOCK
        hashing, reading = checkpoints.write_file, stored_files.read_block

        def write_file(path, data, runs=()):
            file = hashing(path, data, runs)
            self.written += file.size
            return file

        def read_block(file, number, descriptor):
            data = reading(file, number, descriptor)
            self.read += len(data)
            return data

        from tasks.training.state import node_checkpoints

        node_checkpoints.write_file, stored_files.read_block = write_file, read_block

    def look(self) -> list[int]:
        counted = [self.written, self.read]
        self.written = self.read = 0
        return counted


def save_and_load(rank: int, num_ranks: int, cases: dict[str, dict[str, Any]], directory: str, others: list[str]):
    """By case the bytes of this rank, and whether what was loaded is what was saved."""
    counts, results = Counts(), {}
    for number, (name, case) in enumerate(cases.items()):
        target = Path(directory) / f"{num_ranks} {name}"
        trainable = build(num_ranks, **case)
        train(trainable, 0, 1)
        counts.look()
        save_state(trainable, position_after(1), target)
        written, _ = counts.look()
        del trainable
        fresh = build(num_ranks, **case)
        load_checkpoint(fresh, target)
        _, read = counts.look()
        saved = whole_tensors(target)
        results[name] = {
            "written": written,
            "read": read,
            "is_equal": is_equal(saved, state_tensors(fresh, position_after(1))),
            "num_bytes": sum(4 * tensor.numel() for tensor in saved.values()),
        }
        if others:
            other = Path(directory) / others[number % len(others)]
            load_checkpoint(fresh, other)
            results[name]["reads_others"] = is_equal(whole_tensors(other), state_tensors(fresh, position_after(1)))
    return results


def is_equal(saved: dict[str, torch.Tensor], loaded: dict[str, torch.Tensor]) -> bool:
    return saved.keys() == loaded.keys() and all(torch.equal(saved[key], loaded[key]) for key in saved)


def load_damaged(rank: int, num_ranks: int, directory: str) -> dict[str, str]:
    Counts()  # blocks as small as they were written
    trainable = build(num_ranks, zero_stage=1)
    try:
        load_checkpoint(trainable, Path(directory))
    except DamagedCheckpointError as error:
        return {"error": str(error)}
    return {}


def test_a_rank_writes_hashes_and_reads_its_share_and_every_topology_reads_every_other(tmp_path):
    for num_ranks, others in ((4, []), (2, [f"4 {name}" for name in CASES[4]])):
        by_rank = on_ranks(save_and_load, num_ranks, tmp_path, CASES[num_ranks], str(tmp_path), others)
        for name in CASES[num_ranks]:
            results = [result[name] for result in by_rank]
            share = results[0]["num_bytes"] / num_ranks
            if "stages" in name:  # stages hold different numbers of layers: a rank's share is that of its stage
                pairs = [results[:2], results[2:]]
                assert sum(each["written"] for each in results) == pytest.approx(4 * share, rel=0.01)
            else:
                pairs = [results]
            for pair in pairs:
                share = sum(each["written"] for each in pair) / len(pair)
                for each in pair:
                    assert each["written"] <= 1.2 * share and each["read"] <= 1.2 * share, (num_ranks, name, results)
            assert share * num_ranks < 1.02 * results[0]["num_bytes"] or "stages" in name, (name, "written twice")
            assert all(each["is_equal"] and each.get("reads_others", True) for each in results), (num_ranks, name)


def test_damage_that_one_rank_reads_is_an_error_on_all_ranks(tmp_path):
    on_ranks(save_and_load, 2, tmp_path, {"ZeRO 1": {"zero_stage": 1}}, str(tmp_path), [])
    directory = tmp_path / "2 ZeRO 1"
    assert {"rank-00000.bin", "rank-00001.bin", "state.json"} == set(read_index(directory))
    flip_a_bit(directory / "rank-00001.bin")
    damaged = directory.rename(tmp_path / "step-000000001")
    for result in on_ranks(load_damaged, 2, tmp_path, str(damaged)):
        assert "rank-00001.bin: the block at byte" in result["error"], result
