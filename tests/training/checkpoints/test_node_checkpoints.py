"""Checkpoints that are written and uploaded while training goes on: kills in mid-upload, disks that are gone or full.
On one rank, and on the two stages of a pipeline."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.training.state import node_checkpoints
from tasks.training.state.checkpoints import checkpoint_dir_of, find_checkpoint, unfinished_dir_of
from tasks.training.state.job import TrainingJob
from tests.support.rank_processes import on_ranks
from tests.support.training_dynamics import metrics, state_digest, trained
from tests.support.training_inputs import RESOURCES, TrainingInputs
from tests.training.test_dynamics import job_of

KILLED_STEP = 4
TOPOLOGIES = {1: {"num_ranks": 1}, 2: {"num_ranks": 2, "ranks_per_node": 2, "pipeline_parallel": 2}}
"""By number of ranks; the last one is killed."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return TrainingInputs(tmp_path_factory.mktemp("node") / "home")


def described(inputs: TrainingInputs, tmp_path: Path, num_ranks: int) -> dict[str, Any]:
    resources = RESOURCES.model_copy(
        update={"micro_batch_sequences": 2, "node_dir": str(tmp_path / "disk"), **TOPOLOGIES[num_ranks]}
    )
    return job_of(inputs, tmp_path / "job", resources).model_dump(mode="json")


def wait_until(is_true: Callable[[], bool]) -> bool:
    """Whether it was true within a minute."""
    deadline = time.monotonic() + 60
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return time.monotonic() < deadline


def upload_by(job: TrainingJob, upload: Callable[[Path, Path], None]) -> None:
    """Bring files of KILLED_STEP into its checkpoint by another function."""
    plain = node_checkpoints.link_or_copy

    def of_step(source: Path, target: Path) -> None:
        (upload if source.parent.name == checkpoint_dir_of(Path(), KILLED_STEP).name else plain)(source, target)

    node_checkpoints.link_or_copy = of_step


def write_no_part(job: TrainingJob) -> None:
    """The part file of KILLED_STEP finds the disk full too."""
    plain = node_checkpoints.replace_durably

    def full(path: Path, data: bytes) -> None:
        if path.parent == unfinished_dir_of(Path(job.work_dir), KILLED_STEP):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        plain(path, data)

    node_checkpoints.replace_durably = full


def train(rank: int, num_ranks: int, values: dict[str, Any], fencing: int, deed: str) -> dict[str, Any]:
    """One start of the job, in which something may happen to an upload."""
    os.environ["GLM46_FENCING"] = str(fencing)
    job = TrainingJob.model_validate(values)
    seen: dict[str, Any] = {}

    def kill(source: Path, target: Path) -> None:
        node = Path(job.resources.node_dir)
        wait_until(lambda: len(list(node.glob(f"*/*/step-{KILLED_STEP:09d}/upload.json"))) == num_ranks)
        target.write_bytes(source.read_bytes()[: source.stat().st_size // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    def fail(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    def wait_for_the_next_step(source: Path, target: Path) -> None:
        seen["went_on"] = wait_until(lambda: KILLED_STEP + 1 in [line["step"] for line in metrics(job)])
        shutil.copyfile(source, target)

    deeds = {"kill": kill, "fail": fail, "no part": fail, "wait": wait_for_the_next_step}
    if deed == "no part" and rank == num_ranks - 1:
        write_no_part(job)
    if deed in deeds and rank == num_ranks - 1:
        upload_by(job, deeds[deed])
    try:
        trained(job)
    except OSError as error:
        return {"error": str(error)}
    return {**seen, "digest": state_digest(job)}


@pytest.fixture(scope="module", params=TOPOLOGIES)
def uninterrupted(request, inputs, tmp_path_factory):
    """Number of ranks, and the digest."""
    directory = tmp_path_factory.mktemp("uninterrupted")
    values = described(inputs, directory, request.param)
    return request.param, on_ranks(train, request.param, directory, values, 1, "")[0]["digest"]


def newest_step(tmp_path: Path) -> str:
    found, problems = find_checkpoint(tmp_path / "job")
    assert found is not None and not problems
    return found.name


@pytest.mark.parametrize("then", [pytest.param("nothing else", marks=pytest.mark.long), "the disk is gone"])
def test_a_kill_in_mid_upload_loses_nothing_and_leaves_nothing_half_written(then, uninterrupted, inputs, tmp_path):
    num_ranks, digest = uninterrupted
    values = described(inputs, tmp_path, num_ranks)
    with pytest.raises(AssertionError):
        on_ranks(train, num_ranks, tmp_path, values, 1, "kill")
    checkpoints = tmp_path / "job" / "checkpoints"
    assert newest_step(tmp_path) == "step-000000002", "what is half uploaded is no checkpoint"
    assert (checkpoints / ".step-000000004").exists()
    (on_node,) = (tmp_path / "disk").glob(f"*/rank-{num_ranks - 1}/step-000000004")
    if then == "the disk is gone":
        shutil.rmtree(on_node.parent)
    again = on_ranks(train, num_ranks, tmp_path, values, 2, "")[0]
    step = KILLED_STEP if then == "nothing else" else 2
    log = (tmp_path / "rank-0.log").read_text()
    assert f"s at step {step}\n" in log
    assert ("checkpoint of step 4 was whole on the nodes: uploaded" in log) == (then == "nothing else")
    assert again["digest"] == digest
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step-000000004", "step-000000006"]
    assert not any((tmp_path / "disk").rglob("*.*")), "nothing is left on the node"


def test_training_goes_on_while_a_checkpoint_is_uploaded(uninterrupted, inputs, tmp_path):
    num_ranks, digest = uninterrupted
    results = on_ranks(train, num_ranks, tmp_path, described(inputs, tmp_path, num_ranks), 1, "wait")
    assert results[-1]["went_on"] and results[0]["digest"] == digest


@pytest.mark.parametrize("deed", ["fail", "no part"])
def test_an_upload_that_fails_ends_the_training_on_all_ranks_and_keeps_the_checkpoint_before(
    deed, uninterrupted, inputs, tmp_path
):
    num_ranks, _ = uninterrupted
    for result in on_ranks(train, num_ranks, tmp_path, described(inputs, tmp_path, num_ranks), 1, deed):
        assert result["error"].startswith(
            f"checkpoint of step {KILLED_STEP}: rank {num_ranks - 1} could not write it ([Errno 28] No space left"
        )
    assert newest_step(tmp_path) == "step-000000002"


def test_a_node_directory_that_cannot_be_made_says_which_key_to_set(inputs, tmp_path):
    values = described(inputs, tmp_path, 1)
    (tmp_path / "disk").write_text("a file")
    (result,) = on_ranks(train, 1, tmp_path, values, 1, "")
    assert result["error"].endswith("set node_dir to a directory on a disk of each node, or to ''")
