"""Runs a test's function on several gloo ranks, each a process of its own: `on_ranks(function, num_ranks, tmp_path, *arguments)`.

The function is called as `function(rank, num_ranks, *arguments)` with the process group up (DeepSpeed's launcher variables are set, one
thread per rank) and returns a dict of tensors, numbers and strings, which comes back per rank. Arguments are JSON values.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from infra.code_digest import ROOT
from infra.jobs.build_ops import op_environment

TIMEOUT_SECONDS = 240


def on_ranks(function: Callable[..., dict[str, Any]], num_ranks: int, tmp_path: Path, *arguments: Any) -> list[dict[str, Any]]:
    """Results by rank. Fails with the first failing rank's output."""
    import torch

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    call = json.dumps([function.__module__, function.__qualname__, str(tmp_path), arguments])
    shared = os.environ | op_environment() | {
        "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    processes = []
    for rank in range(num_ranks):
        with open(tmp_path / f"rank-{rank}.log", "w") as log:
            own = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, "-m", "tests.support.rank_processes", call]
            processes.append(subprocess.Popen(command, env=own, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(TIMEOUT_SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, code in enumerate(codes):
        assert code == 0, f"rank {rank} exited with {code}:\n{(tmp_path / f'rank-{rank}.log').read_text()[-4000:]}"
    return [torch.load(tmp_path / f"rank-{rank}.pt", weights_only=True) for rank in range(num_ranks)]


def main() -> None:
    module, name, directory, arguments = json.loads(sys.argv[1])
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    from datetime import timedelta

    import torch

    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_SECONDS))
    torch.use_deterministic_algorithms(True)
    result = getattr(importlib.import_module(module), name)(rank, num_ranks, *arguments)
    torch.save(result, Path(directory) / f"rank-{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
