"""Runs a test's function on several gloo ranks, each a process of its own: `on_ranks(function, num_ranks, tmp_path,
*arguments)`.

The function is called as `function(rank, num_ranks, *arguments)` with the process group up (DeepSpeed's launcher
variables are set, one thread per rank) and returns a dict of tensors, numbers and strings, which comes back per rank.
Arguments are JSON values. The ranks are forks of one process per test session that has imported torch, DeepSpeed and
the modules of earlier calls: their import takes longer than most functions. Nothing runs in that process itself.
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
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from infra.child_process import die_with_parent
from infra.code_digest import ROOT
from infra.jobs.build_ops import op_environment

TIMEOUT_SECONDS = 240
SETTINGS = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "PYTHONPATH": str(ROOT)}


def on_ranks(
    function: Callable[..., dict[str, Any]], num_ranks: int, tmp_path: Path, *arguments: Any
) -> list[dict[str, Any]]:
    """Results by rank. Fails with the first failing rank's output."""
    import torch

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launched = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    call = {
        "function": [function.__module__, function.__qualname__],
        "directory": str(tmp_path),
        "arguments": arguments,
        "environment": os.environ | op_environment() | SETTINGS | launched,
    }
    code = _ask_forker(call)
    logs = [path.read_text()[-4000:] for path in sorted(tmp_path.glob("rank*.log"))]
    assert code == 0, "\n".join(logs)
    return [torch.load(tmp_path / f"rank-{rank}.pt", weights_only=True) for rank in range(num_ranks)]


def _ask_forker(call: dict[str, Any]) -> int:
    """The exit status of the call's ranks. They are killed after TIMEOUT_SECONDS."""
    forker = _forker()
    assert forker.stdin is not None and forker.stdout is not None
    forker.stdin.write(json.dumps(call) + "\n")
    forker.stdin.flush()
    answer = forker.stdout.readline()
    assert answer, "the process that forks ranks has ended"
    return int(answer)


@cache
def _forker() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.rank_processes"],
        env=os.environ | op_environment() | SETTINGS,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent,
    )


def main() -> None:
    """Answers every call with the exit status of its ranks. The ranks end by os._exit: Python's own end would copy and
    free every page that they share, which takes seconds in each."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.modules["mlflow"] = None  # type: ignore[assignment]  # DeepSpeed's autotuner alone would import it, for seconds
    import deepspeed  # noqa: F401
    import torch._dynamo
    import torch._inductor.config  # noqa: F401  # both of every optimizer step's first call, for two seconds

    del sys.modules["mlflow"]
    for line in sys.stdin:
        call = json.loads(line)
        with suppress(Exception):  # the ranks import it too, and say what is wrong
            importlib.import_module(call["function"][0])
        log = os.open(Path(call["directory"]) / "ranks.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        leader = os.fork()
        if leader == 0:
            _run_ranks(call, log)
        os.close(log)
        _, status = os.waitpid(leader, 0)
        with suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)
        print(status, file=answers, flush=True)


def _run_ranks(call: dict[str, Any], log: int) -> NoReturn:
    """Forks the ranks in a process group of their own, and ends with 0 if all of them do."""
    os.setsid()
    die_with_parent()
    signal.alarm(TIMEOUT_SECONDS)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(call["environment"])
    ranks = {}
    for rank in range(int(os.environ["WORLD_SIZE"])):
        ranks[os.fork()] = rank
        if 0 in ranks:
            _run_rank(rank, call)
    for _ in ranks:
        pid, status = os.wait()
        if status:
            os.write(2, f"rank {ranks[pid]} ended with status {status}\n".encode())
            os._exit(1)
    os._exit(0)


def _run_rank(rank: int, call: dict[str, Any]) -> NoReturn:
    directory = Path(call["directory"])
    log = os.open(directory / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    import torch

    try:
        module, name = call["function"]
        function = getattr(importlib.import_module(module), name)
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_SECONDS))
        torch.use_deterministic_algorithms(True)
        result = function(rank, int(os.environ["WORLD_SIZE"]), *call["arguments"])
        torch.save(result, directory / f"rank-{rank}.pt")
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
