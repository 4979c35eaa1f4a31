"""Two toy steps and a program that runs them: what the store's tests and kill tests commit."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from infra.home import open_home
from infra.step import Artifact, Output, Progress, Record, Step, step
from infra.storage import lease
from infra.storage.open_store import open_store
from infra.storage.store import Store, step_key

if TYPE_CHECKING:
    from pathlib import Path


class Numbers(Record):
    """A file of numbers."""

    num_lines: int


class Total(Record):
    """Their sum."""

    total: int


@step(content=("numbers/*.txt",), evidence=("log.txt",))
def write_numbers(*, output: Output) -> Numbers:
    """Writes two files slowly enough to be killed between them."""
    output.path("log.txt").write_text(str(time.time()))
    for part in range(2):
        output.path(f"numbers/part-{part:05d}.txt").write_text("\n".join(str(part * 10 + n) for n in range(10)))
        time.sleep(float(os.environ.get("TOY_SECONDS", "0")))
    while (gate := os.environ.get("TOY_GATE")) and not os.path.exists(gate):
        time.sleep(0.02)
    return Numbers(num_lines=20)


@step(content=("total.txt",))
def sum_numbers(*, numbers: Artifact[Numbers], output: Output) -> Total:
    """Adds up what the first step wrote."""
    total = sum(int(line) for path in numbers.paths("numbers/*.txt") for line in path.read_text().split("\n"))
    output.path("total.txt").write_text(str(total))
    return Total(total=total)


def ensure(store: Store, toy: Step, computed: list[str] | None = None, **inputs: Artifact) -> Artifact:
    """The wrapper's contract without Prefect: find, or compute and commit."""
    identity = {
        "step": toy.name,
        "recipe": None,
        "inputs": {name: value.digest for name, value in inputs.items()},
        "code": "",
        "distributions": {},
    }
    key = step_key(identity)
    with store.locked(key, lambda message: print(message, file=sys.stderr, flush=True)):
        artifact = store.find(toy, key)
        if artifact is not None:
            return artifact
        if computed is not None:
            computed.append(toy.name)
        return store.compute(
            toy,
            key,
            identity,
            lambda output: toy(**inputs, output=output),
            lambda p: None,
            print,
            lambda rows: None,
            time.monotonic,
        )


def run_both(store: Store, computed: list[str] | None = None) -> tuple[Artifact, Artifact]:
    """Both toy steps in order."""
    numbers = ensure(store, write_numbers, computed)
    return numbers, ensure(store, sum_numbers, computed, numbers=numbers)


def main(store_dir: Path | str) -> None:
    """Run as a program that a test kills: TOY_SECONDS=0.2 python -m tests.support.toy_steps STORE_DIR.

    TOY_GATE names a file that the first step waits for. TOY_LEASE_SECONDS shortens its leases; TOY_MACHINE makes it a
    process of another machine for those who wait."""
    lease.LEASE_SECONDS = float(os.environ.get("TOY_LEASE_SECONDS", lease.LEASE_SECONDS))
    if machine := os.environ.get("TOY_MACHINE"):
        lease._kernel = lambda: machine
    computed: list[str] = []
    try:
        print(run_both(open_store(str(store_dir), open_home()), computed)[1].digest, flush=True)
    finally:
        print(f"computed {computed}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])


def local_output(directory: Path, report: Callable[[Progress], None] = lambda progress: None) -> Output:
    """Everything is written below `directory`."""

    def remove(name: str) -> None:
        shutil.rmtree(directory / name, ignore_errors=True)

    return Output(directory, str(directory), directory, "key", report, print, lambda rows: None, remove)
