"""Commits of checkpoints: the newest sound one after damage, crashes and a second supervisor."""

from __future__ import annotations

import os
import resource
import signal

import pytest

from infra.jobs.supervisor import _advance_fencing
from tasks.training.state import checkpoints
from tasks.training.state.checkpoints import (
    FencedError,
    find_checkpoint,
    find_damage,
    finish_checkpoint,
    start_checkpoint,
    write_file,
)


def commit(work_dir, step: int, num_kept: int = 2):
    directory = start_checkpoint(work_dir, step)
    files = {"weights": f"weights {step}".encode() * 100, "state.json": b"{}"}
    written = {name: write_file(directory / name, data) for name, data in files.items()}
    return finish_checkpoint(work_dir, step, written, num_kept)


def steps(work_dir) -> list[str]:
    return sorted(path.name for path in (work_dir / "checkpoints").glob("step-*"))


def test_the_newest_checkpoint_is_found_and_the_kept_ones_stay(tmp_path):
    assert find_checkpoint(tmp_path) == (None, [])
    for step in (10, 20, 30):
        commit(tmp_path, step)
    newest, problems = find_checkpoint(tmp_path)
    assert (newest.name, problems) == ("step-000000030", [])
    assert steps(tmp_path) == ["step-000000020", "step-000000030"]


@pytest.mark.parametrize("damage", ["a digest changed", "cut", "missing", "no index"])
def test_a_corrupt_newest_checkpoint_falls_back_and_says_so(damage, tmp_path):
    commit(tmp_path, 10)
    path = commit(tmp_path, 20) / ("index.json" if damage in ("no index", "a digest changed") else "weights")
    if damage == "a digest changed":
        path.write_text(path.read_text().replace('"blocks":["', '"blocks":["0'))
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    newest, problems = find_checkpoint(tmp_path)
    assert newest.name == "step-000000010"
    assert len(problems) == 1 and "step-000000020 is corrupt" in problems[0]
    assert find_damage(tmp_path / "checkpoints" / "step-000000020")
    # Training goes on from 10 and saves elsewhere: the corrupt one must not outlive the good one.
    commit(tmp_path, 15, num_kept=1)
    assert steps(tmp_path) == ["step-000000015"] and find_checkpoint(tmp_path)[0].name == "step-000000015"


@pytest.mark.parametrize("window", ["before the rename", "before latest moves"])
def test_a_crash_inside_a_commit_leaves_the_one_before(window, tmp_path, monkeypatch):
    commit(tmp_path, 10)

    def crash(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "_fenced" if window == "before the rename" else "replace_durably", crash)
        with pytest.raises(KeyboardInterrupt):
            commit(tmp_path, 20)
    assert find_checkpoint(tmp_path)[0].name == "step-000000010"
    commit(tmp_path, 20)
    assert find_checkpoint(tmp_path)[0].name == "step-000000020"
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["latest", "step-000000010", "step-000000020"]


def test_a_full_disk_leaves_the_one_before(tmp_path):
    commit(tmp_path, 10)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(
        signal.SIGXFSZ, signal.SIG_IGN
    )  # the write then fails as on a full disk, half of the file being there
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
        with pytest.raises(OSError, match="File too large"):
            write_file(start_checkpoint(tmp_path, 20) / "weights", b"x" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert find_checkpoint(tmp_path)[0].name == "step-000000010" and steps(tmp_path) == ["step-000000010"]
    commit(tmp_path, 20)
    assert find_checkpoint(tmp_path)[0].name == "step-000000020"


def test_a_file_that_changed_after_the_commit_is_found_where_it_is_read(tmp_path):
    path = commit(tmp_path, 10)
    assert find_damage(path) == ""
    (path / "weights").write_bytes((path / "weights").read_bytes()[:-1] + b"x")
    assert find_damage(path) == "weights: the block at byte 0 has another digest"


def test_an_older_supervisors_rank_may_not_save(tmp_path, monkeypatch):
    monkeypatch.setenv("GLM46_FENCING", str(_advance_fencing(tmp_path)))
    commit(tmp_path, 10)
    assert _advance_fencing(tmp_path) == 2
    with pytest.raises(FencedError, match="fencing number 1"):
        commit(tmp_path, 20)
    assert find_checkpoint(tmp_path)[0].name == "step-000000010"
