"""Benchmarks end with one record; the GPU's walks its whole path at toy size on a CPU, and says so where there is no GPU."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import results, train_step_gpu
from benchmarks.results import report
from model.counts import count_parameters

RECORD = {"ours", "peer", "ratio", "unit", "versions"}


def test_gpu_benchmark_walks_its_path_at_toy_size(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--device cpu --size toy --sequences 2 --warmup 1 --steps 1 --peak-tflops 0.2 --no-compile"
    train_step_gpu.main(arguments.split())
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["ours", "transformers"]
    record = json.loads(lines[-1])
    assert set(record) >= RECORD | {"mfu", "peer_mfu", "peak_gib", "peer_peak_gib"}
    # Both train the same architecture from the same distribution: the first losses are near log(vocabulary).
    assert all(float(line.rsplit(" ", 1)[1]) == pytest.approx(6.24, abs=0.3) for line in lines[:2])


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it says without a GPU")
def test_gpu_benchmark_refuses_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train_step_gpu.main([])
    assert "no CUDA device here" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        train_step_gpu.main(["--device", "cpu", "--size", "toy"])
    assert "give --peak-tflops" in capsys.readouterr().err


def test_the_large_model_has_about_three_billion_parameters() -> None:
    assert 2.8e9 < count_parameters(train_step_gpu.LARGE).total < 3.5e9


def test_a_record_is_one_line_and_is_stored_on_demand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "RESULTS_DIR", tmp_path / "results")
    monkeypatch.setattr("sys.argv", ["x"])
    record = report("speed", ours=30.0, peer=10.0, unit="tokens/s", rounds=3)
    assert json.loads(capsys.readouterr().out) == record
    assert (record["ratio"], record["rounds"], set(record) >= RECORD) == (3.0, 3, True)
    assert not (tmp_path / "results").exists()
    monkeypatch.setattr("sys.argv", ["x", "--write", "--rounds", "3"])
    assert report("time", ours=5.0, peer=10.0, unit="s", lower_is_better=True)["ratio"] == 2.0
    stored = json.loads((tmp_path / "results" / "time.json").read_text())
    assert stored["command"] == "python -m benchmarks.time --write --rounds 3" and stored["hardware"]["cores"] > 0
