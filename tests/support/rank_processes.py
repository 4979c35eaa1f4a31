"""Runs a test's function on several gloo ranks, each a process of its own: `on_ranks(function, num_ranks, tmp_path,
*arguments)`.

The function is called as `function(rank, num_ranks, *arguments)` with the process group up (DeepSpeed's launcher
variables are set, one thread per rank) and returns a dict of tensors, numbers and strings, which comes back per rank.
Arguments are JSON values.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from infra.code_digest import ROOT
from infra.jobs.build_ops import op_environment

TIMEOUT_SECONDS = 240


def on_ranks(
    function: Callable[..., dict[str, Any]], num_ranks: int, tmp_path: Path, *arguments: Any
) -> list[dict[str, Any]]:
    """Results by rank. Fails with the first failing rank's output."""
    import torch

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    call = json.dumps([function.__module__, function.__qualname__, str(tmp_path), arguments])
    environment = (
        os.environ
        | op_environment()
        | {
            "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "PYTHONPATH": str(ROOT),
        }
    )
    command = [sys.executable, "-m", "tests.support.rank_processes", call]
    with open(tmp_path / "ranks.log", "w") as log:
        parent = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        code = parent.wait(TIMEOUT_SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
    logs = [path.read_text()[-4000:] for path in sorted(tmp_path.glob("rank*.log"))]
    assert code == 0, "\n".join(logs)
    return [torch.load(tmp_path / f"rank-{rank}.pt", weights_only=True) for rank in range(num_ranks)]


def main() -> None:
    """Imports what all ranks need, once, and forks them. They end by os._exit: Python's own end would copy and free
    every page that they share, which takes seconds in each."""
    module, name, directory, arguments = json.loads(sys.argv[1])
    import deepspeed  # noqa: F401

    function = getattr(importlib.import_module(module), name)
    ranks = {}
    for rank in range(int(os.environ["WORLD_SIZE"])):
        ranks[os.fork()] = rank
        if 0 in ranks:
            _run_rank(rank, function, Path(directory), arguments)
    for _ in ranks:
        pid, status = os.wait()
        if status:
            sys.stderr.write(f"rank {ranks[pid]} ended with status {status}\n")
            os._exit(1)
    os._exit(0)


def _run_rank(rank: int, function: Callable[..., dict[str, Any]], directory: Path, arguments: list[Any]) -> NoReturn:
    log = os.open(directory / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    import torch

    try:
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_SECONDS))
        torch.use_deterministic_algorithms(True)
        torch.save(function(rank, int(os.environ["WORLD_SIZE"]), *arguments), directory / f"rank-{rank}.pt")
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
