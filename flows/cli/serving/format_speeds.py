"""Measures how fast the formats of a release answer, for `glm46 compare VERSION`: each GGUF file beside the F32 one.

Two servers run on this machine. In every round both answer the same prompts, one answer at a time, and take turns in
who begins: what else the machine does slows both.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import psutil
from pydantic import BaseModel

from configs.schema import served_gguf_type
from flows.cli.serving.evaluate_target import local_server
from infra.home import Home
from infra.serving.model_client import ModelClient
from infra.serving.model_server import running_model_server
from tasks.release.server_profile import measure_levels
from tasks.serving.planned_server import DIRECTORY_ENGINES

MIN_ROUNDS, MAX_ROUNDS = 3, 15
MAX_SECONDS = 60.0
"""Of a pair of files, after which no further round begins: a large model needs few rounds, and would need hours."""
TIMEOUT_SECONDS = 120.0
"""Of one answer."""
NUM_TOKENS = 32
"""Tokens of each answer by which the speed is measured."""
CONTEXT_LENGTH = 256
MEMORY_SHARE = 0.8
"""Of the free memory that two files may take: keys, values and the servers need some."""


class FormatSpeed(BaseModel):
    """One answer at a time, on this machine."""

    tokens_per_second: float
    """Median over the rounds."""
    ratio: float
    """Median over the rounds of the speed over that of the served file in the same round; 1 for that file."""
    ratio_range: tuple[float, float]
    """Of the middle half of the rounds: a round is short, and other work on the machine can hit one side of it."""


def measure_speeds(files: Mapping[str, Path], home: Home) -> dict[str, FormatSpeed | str]:
    """By type, or in words why it was not measured. Raises RuntimeError where a server does not start."""
    speeds: dict[str, FormatSpeed | str] = {}
    served = served_gguf_type(files)
    base, base_rounds = files[served], []
    for name, path in files.items():
        if name == served:
            continue
        if refusal := _too_large(base, path):
            speeds[name] = refusal
            continue
        rounds = _measure_in_turn(base, path, home)
        base_rounds += [before for before, _ in rounds]
        lower, ratio, upper = statistics.quantiles((after / before for before, after in rounds), method="inclusive")
        speeds[name] = FormatSpeed(
            tokens_per_second=statistics.median(after for _, after in rounds), ratio=ratio, ratio_range=(lower, upper)
        )
    if not base_rounds:
        speeds[served] = next(iter(speeds.values()), "there is no other file to measure it beside")
    else:
        speed = statistics.median(base_rounds)
        speeds[served] = FormatSpeed(tokens_per_second=speed, ratio=1.0, ratio_range=(1.0, 1.0))
    return speeds


def unread_checkpoint() -> str:
    """Why the speed of a quantized checkpoint is not measured here: llama.cpp does not read its layout."""
    found = [name for name in DIRECTORY_ENGINES if shutil.which(name)]
    if found:
        return f"{' and '.join(found)} reads it: serve it and compare the URLs"
    return "no engine on this machine reads it (vLLM and SGLang do, on a GPU)"


def _too_large(*paths: Path) -> str:
    needed, free = sum(path.stat().st_size for path in paths), psutil.virtual_memory().available * MEMORY_SHARE
    if needed <= free:
        return ""
    return f"both files take {needed / 1e9:,.1f} GB of {free / 1e9:,.1f} GB that are free"


def _measure_in_turn(first: Path, second: Path, home: Home) -> list[tuple[float, float]]:
    """Tokens per second of both, in each round."""
    with ExitStack() as stack:
        clients = []
        for number, path in enumerate((first, second)):
            log_path = home.run_dir / f"compare-server-{number}.log"
            server = stack.enter_context(running_model_server(path, local_server(path, CONTEXT_LENGTH), log_path))
            clients.append(ModelClient(server.url, "", TIMEOUT_SECONDS, ""))
        rounds, began = [], time.monotonic()
        while len(rounds) < MIN_ROUNDS or (len(rounds) < MAX_ROUNDS and time.monotonic() - began < MAX_SECONDS):
            speeds = {}
            for place in (len(rounds) % 2, 1 - len(rounds) % 2):
                speeds[place] = measure_levels(clients[place], (1,), NUM_TOKENS)[0].tokens_per_second
            rounds.append((speeds[0], speeds[1]))
    return rounds
