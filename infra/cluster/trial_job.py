"""A small job that computes, communicates, saves and resumes: `python -m infra.cluster.trial_job WORK_DIR DEVICE MODE`.

Every rank adds to a vector what all ranks have summed; rank 0 saves after each step. Its last value is known, so a run
that was killed and resumed is compared with it. MODE `run` goes to the end and then measures the sum of a large vector;
`hold` waits halfway, in a start that began at 0, for somebody to kill it. Out: state.json, and result.json at the end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from configs.files.atomic_files import replace_durably

NUM_STEPS = 8
HOLD_STEP = 4
HOLD_SECONDS = 600
SUMMED_BYTES = {"cpu": 16 << 20, "cuda": 1 << 30}
"""Of the measured vector; on GPUs large enough that latency does not count."""
NUM_SUMS = {"cpu": 3, "cuda": 20}


@dataclass(frozen=True)
class TrialResult:
    """What rank 0 leaves."""

    num_ranks: int
    began_at: int
    """Step from which this start went on; 0 for a whole run."""
    value: float
    bus_bytes_per_second: float
    """Of a sum over all ranks, as nccl-tests counts it: 2 (N - 1) / N bytes over the wire for each byte summed."""


def expected_value(num_ranks: int) -> float:
    """Of every element after the last step: step s adds s times the sum of 1 .. N."""
    return float(num_ranks * (num_ranks + 1) // 2 * sum(range(1, NUM_STEPS + 1)))


def read_step(work_dir: Path) -> int:
    """The last step that was saved, 0 before the first."""
    path = work_dir / "state.json"
    return json.loads(path.read_text())["step"] if path.exists() else 0


def main() -> int:
    import torch
    import torch.distributed as dist

    work_dir, device, mode = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        if int(os.environ["LOCAL_RANK"]) >= torch.cuda.device_count():
            print(f"rank {rank} has no GPU: PyTorch sees {torch.cuda.device_count()} here", file=sys.stderr)
            return 1
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    store = dist.FileStore(os.environ["GLM46_RENDEZVOUS"], num_ranks)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=rank, world_size=num_ranks)
    saved = work_dir / "state.json"
    state = json.loads(saved.read_text()) if saved.exists() else {"step": 0, "value": 0.0}
    # float64: a sum over more than a thousand ranks is above 2**24
    began_at, vector = state["step"], torch.full((1024,), state["value"], dtype=torch.float64, device=device)
    dist.barrier()  # all have read the state before rank 0 replaces it
    for step in range(began_at + 1, NUM_STEPS + 1):
        added = torch.full_like(vector, float(step * (rank + 1)))
        dist.all_reduce(added)
        vector += added
        if rank == 0:
            replace_durably(saved, json.dumps({"step": step, "value": float(vector[0])}).encode())
        if mode == "hold" and began_at == 0 and step == HOLD_STEP:
            time.sleep(HOLD_SECONDS)
    values = vector.unique().tolist()
    assert len(values) == 1, values
    speed = _measure_sum(device, num_ranks) if mode == "run" else 0.0
    if rank == 0:
        result = TrialResult(num_ranks, began_at, values[0], speed)
        replace_durably(work_dir / "result.json", json.dumps(asdict(result)).encode())
    dist.destroy_process_group()
    return 0


def _measure_sum(device: str, num_ranks: int) -> float:
    """Bus bandwidth in bytes per second; the first sum warms up."""
    import torch
    import torch.distributed as dist

    vector = torch.ones(SUMMED_BYTES[device] // 4, device=device)
    began = 0.0
    for number in range(NUM_SUMS[device] + 1):
        if number == 1:
            dist.barrier()
            _finish(device)
            began = time.perf_counter()
        dist.all_reduce(vector)
    _finish(device)
    seconds = (time.perf_counter() - began) / NUM_SUMS[device]
    return 2 * (num_ranks - 1) / num_ranks * SUMMED_BYTES[device] / seconds


def _finish(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
