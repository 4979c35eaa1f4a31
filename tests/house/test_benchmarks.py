"""Every benchmark walks its whole path at toy size and ends with one record; the GPU's says so where there is no GPU.

Those that need Spark, the peers' environment or the shared data do so under `long`, in processes of their own, after
`make env-peers`.
"""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import results
from benchmarks.peers.environment import PEERS_PYTHON
from benchmarks.results import report
from benchmarks.training import train_step_gpu
from model.architecture.counts import count_parameters
from tests.conftest import ROOT
from tests.support.data_inputs import write_jsonl

RECORD = {"ours", "peer", "ratio", "unit", "versions"}
GPU = "--device cpu --size toy --sequences 2 --warmup 1 --steps 1 --peak-tflops 0.2 --no-compile"
SMALL = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
"""Values of a model recipe."""
Toy = tuple[str, dict[str, Any]]
"""Command line, and constants of the module; those of a model recipe are changed in SMALL."""
TOYS: dict[str, Toy] = {
    "data.embedding": ("", {"NUM_DOCUMENTS": 2, "NUM_ROUNDS": 1}),
    "training.collapse": ("--steps 1 --seeds 1", {"WARM_STEPS": 1, "STALE_STEPS": 1}),
    "training.checkpoint_pause": ("--rounds 1 --steps 2 --interval 1", {"BATCH": 1, "LENGTH": 16, "RECIPE": SMALL}),
    "training.checkpoint_shares": ("scaled_down", {}),
    "training.generate": ("--rounds 1 --new-tokens 4 --training-steps 2", {"BATCHES": (1, 2), "RECIPE": SMALL}),
    "training.likelihood": ("--questions 3 --shots 1", {"RECIPE": SMALL}),
    "training.muon": (
        "--steps 2",
        {"LENGTHS": (1.0, 2.0), "VALIDATION_ROWS": 4, "SAMPLE_CHARS": 40_000, "MODEL": {"hidden_size": 32}},
    ),
    "training.recompute": ("", {"BATCH": 1, "LENGTH": 64, "ROUNDS": 1, "RECIPE": SMALL}),
    "training.roofline": ("", {"NUM_ROWS": 1, "LENGTH": 64, "RECIPE": SMALL}),
    "training.phase_order": ("--documents 400 800", {"SHARD_DOCUMENTS": 100}),
    "training.row_reading": ("--shards 6 --shard-tokens 20000 --rows 1 --steps 2 --step-seconds 0.01 --wait-ms 1", {}),
    "training.train_step": ("--rounds 1 --steps 1", {"BATCH": 1, "LENGTH": 64, "RECIPE": SMALL}),
    "data.corpus_cost": ("--terabytes 1", {}),
    "data.lineage": ("--documents 300", {"NUM_QUERIES": 1}),
    "data.store_objects": ("--bucket 20 --directory 20 --peer-objects 5", {}),
    "data.train_tokenizer": ("--input INPUT --tokens 300", {}),
}
SLOW_TOYS = ("training.checkpoint_pause", "training.phase_order", "training.roofline")
"""They run with the long tests."""
LONG_TOYS: dict[str, Toy] = {
    "data.archive_bodies": ("", {"COPIES": 1, "ROUNDS": 1}),
    "data.classifiers": ("", {"NUM_DOCUMENTS": 20}),
    "data.decontamination": ("", {"ITEMS_PER_FILE": 1, "INDEXED_PER_FILE": 1, "CLEAN": {"prose": ["text/c4_sample"]}}),
    "data.dedup": ("--documents 400", {"WARM_UP_DOCUMENTS": 20}),
    "data.extraction": ("", {"COPIES": 1}),
    "data.filters": ("", {"MAX_CHARS": 60_000, "NUM_ROUNDS": 1}),
    "training.compute_match": ("--seconds 0.2 0.4", {"NUM_ROWS": 40}),
    "training.drafts": ("--rounds 1 --new-tokens 8", {"SIZES": {"nightly": {}}}),
    "training.forgetting": ("--steps 1", {}),
    "training.generate_llama": ("--rounds 1 --new-tokens 4", {"BATCHES": (1, 2)}),
    "goodput": ("--tokens 409600 --compression 600", {}),  # a kill each 19 s: a busy machine must save between two
    "kills": ("--scale micro --kills 3 --mean-seconds 10", {}),
    "data.language_id": ("--sentences 3", {}),
    "data.ngram_model": ("", {"MAX_TEXTS": 40, "ROUNDS": 1}),
    "data.page_urls": ("", {"MAX_LINKS": 50, "ROUNDS": 1}),
    "phases": ("--seeds 1 --scale micro", {}),
    "training.plan_accuracy": ("", {}),
    "data.personal_data": ("", {"DRAWS": 1, "REAL_TEXTS": {"peps": ("text/peps", False)}}),
    "data.stages": ("--documents 400", {}),
    "data.tokenization": ("", {}),
    "data.web_archives": ("", {"COPIES": 1, "ROUNDS": 1}),
}
OTHER_RECORDS = {
    "data.corpus_cost": {"ours", "table", "unit", "hours", "dollars"},
    "data.lineage": {"ours", "unit", "seconds_by_url", "num_documents", "versions"},
    "data.personal_data": {"labelled", "unit"},
    "data.stages": {"ours", "table", "unit", "versions"},
    "goodput": {"ours", "unit", "undisturbed", "interruptions", "versions"},
    "kills": {"ours", "unit", "kills", "ends", "versions"},
    "phases": {"ours", "unit", "figures", "versions"},
    "training.phase_order": {"ours", "unit", "table", "corpus", "versions"},
    "training.plan_accuracy": {"ours", "unit", "assumed", "memory", "phases", "versions"},
    "training.roofline": {"ours", "unit", "tokens", "passes", "update", "versions"},
}
"""Benchmarks of what no library does, and what their records hold."""
RUN_TOY = """
import importlib, json, sys
module = importlib.import_module(sys.argv.pop(1))
vars(module).update(json.loads(sys.argv.pop(1)))
module.main()
"""


def command_of(toy: Toy, directory: Path) -> list[str]:
    """Its arguments, with texts where it reads some."""
    texts = [
        f"Line {number} of a small text: {number * 37} words, {'and more, ' * (number % 7)}end."
        for number in range(200)
    ]
    write_jsonl(directory / "texts.jsonl.gz", [{"id": str(number), "text": text} for number, text in enumerate(texts)])
    return toy[0].replace("INPUT", str(directory)).split()


def test_every_benchmark_has_a_toy() -> None:
    programs = [path for path in (ROOT / "benchmarks").rglob("*.py") if '__name__ == "__main__"' in path.read_text()]
    names = {".".join(path.relative_to(ROOT / "benchmarks").with_suffix("").parts) for path in programs}
    assert {name for name in names if not name.startswith("peers.")} == {*TOYS, *LONG_TOYS, "training.train_step_gpu"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name in SLOW_TOYS)) for name in TOYS])
def test_benchmark_runs_at_toy_size(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    for constant, value in TOYS[name][1].items():
        before = getattr(module, constant)
        monkeypatch.setattr(
            module, constant, before.model_copy(update=value) if hasattr(before, "model_copy") else value
        )
    monkeypatch.setattr("sys.argv", [name, *command_of(TOYS[name], tmp_path)])
    module.main()
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(record) >= OTHER_RECORDS.get(name, RECORD)


@pytest.mark.long
@pytest.mark.parametrize("name", LONG_TOYS)
def test_benchmark_with_peers_runs_at_toy_size(name: str, tmp_path: Path) -> None:
    sizes = json.dumps(LONG_TOYS[name][1])
    command = [sys.executable, "-c", RUN_TOY, f"benchmarks.{name}", sizes, *command_of(LONG_TOYS[name], tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if "make env-peers" in done.stderr and not PEERS_PYTHON.is_file():
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert set(json.loads(done.stdout.splitlines()[-1])) >= OTHER_RECORDS.get(name, RECORD)


def test_gpu_benchmark_walks_its_path_at_toy_size() -> None:
    command = [sys.executable, "-m", "benchmarks.training.train_step_gpu", *GPU.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)  # it is a rank of its own
    assert done.returncode == 0, done.stderr[-4000:]
    record = json.loads(done.stdout.splitlines()[-1])
    assert set(record) >= RECORD | {"mfu", "peer_mfu", "training_mfu", "peak_gib", "peer_peak_gib", "training_peak_gib"}
    names = ("ours", "transformers", "training")
    (ours, peer, training) = (line for line in done.stdout.splitlines() if line.split(":")[0] in names)
    # All train the same architecture from the same distribution: the first losses are near log(vocabulary).
    losses = [float(line.rsplit(" ", 1)[1]) for line in (ours, peer, training)]
    assert losses == pytest.approx([6.24] * 3, abs=0.3)


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
    assert stored["command"].endswith(" --write --rounds 3") and stored["hardware"]["cores"] > 0
