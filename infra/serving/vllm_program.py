"""vLLM of another environment: the program `vllm` on PATH, and a server of it that computes in float32.

vLLM pins other versions than this project, so nothing of it is imported. `make env-vllm` installs its build for CPUs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.child_process import free_port
from infra.serving.engine_process import ENGINE_ENVIRONMENT, running_engine
from infra.serving.model_server import LOOPBACK, MODEL_ALIAS, ModelServer

VLLM = "vllm"
CPU_BUILD = "cpu"
"""A part of the version of every build for CPUs, as 0.32.0+cpu; vLLM itself knows it by this."""
VERSION_SECONDS = 300
"""The program imports PyTorch before it says its version: 8 s on a free core."""
CACHE_BYTES = 2**30
"""Keys and values of 1,400 tokens of GLM-4.6 in float32."""


def vllm_program() -> str | None:
    """The path of the program, None where there is none on PATH."""
    return shutil.which(VLLM)


def vllm_version(program: str) -> str:
    """What the program says. Raises ValueError for a program that does not start."""
    environment = {**os.environ, **ENGINE_ENVIRONMENT}
    asked = subprocess.run(
        [program, "--version"], capture_output=True, text=True, timeout=VERSION_SECONDS, env=environment
    )
    if asked.returncode or not asked.stdout.split():
        reason = (asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"])[-1]
        raise ValueError(
            f"{program} --version fails ({reason}): take it off PATH, or put one there that starts (`make env-vllm` "
            f"makes .venv-vllm/bin/vllm)"
        )
    return asked.stdout.split()[-1]


@contextmanager
def running_vllm(program: str, hf_dir: Path, context_length: int, log_path: Path) -> Iterator[ModelServer]:
    """A server of an exported directory on loopback for the length of a block. It computes in float32, without
    compilation and without the keys and values of other requests. Raises RuntimeError with the end of its log when it
    stops or does not answer."""
    port = free_port()
    command = [program, "serve", str(hf_dir), "--served-model-name", MODEL_ALIAS]
    command += ["--host", LOOPBACK[0], "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", str(context_length), "--kv-cache-memory-bytes", str(CACHE_BYTES)]
    command += ["--enforce-eager", "--no-enable-prefix-caching"]
    with running_engine(command, LOOPBACK[0], port, log_path, {}) as server:
        yield server
