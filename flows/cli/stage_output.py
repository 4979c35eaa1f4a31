"""Writes a single stage's result into a user's directory: files, what earlier steps left out, the tokenizer of token
shards, and the funnel in words.

The directory is locked while a stage runs. Files appear in it when all are there, so no part of a failed or killed run
looks like the whole.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from infra.step import Artifact
from tasks.data.deduplication.duplicate_clusters import DuplicateCluster

UNFINISHED = ".unfinished"
"""Directory below --output in which files wait until all are there."""
NAMES = ".names"
"""File in that directory, written when all are there: the names that are being moved, so that a run after a kill may
replace them."""
EARLIER = "earlier"
EARLIER_FILES = (
    "dropped.parquet",
    "rejected.parquet",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
"""Files of earlier steps that a reader of the output needs: what they left out, and the tokenizer of its ids."""
UNREAD = "num_unsampled_documents"
NUM_FIGURES = 4


class StageOutcome(BaseModel):
    """The result of a single stage."""

    stage: str
    output: str
    digest: str
    record: dict[str, Any]
    earlier: dict[str, dict[str, Any]]
    """Records of the earlier steps that left something out or made the tokenizer, by their names; their files are in
    `output`/earlier."""

    def describe(self) -> str:
        """The funnel: what each step kept and left out, and where the files are."""
        lines = []
        for name, record in {**self.earlier, self.stage: self.record}.items():
            clusters = [DuplicateCluster.model_validate(cluster) for cluster in record.get("largest_clusters", ())]
            lines += [_funnel(name, record), *(f"  {cluster.describe()}" for cluster in clusters)]
        left = ", ".join(
            sorted(f"{path.name}/" if path.is_dir() else path.name for path in Path(self.output).iterdir())
        )
        return "\n".join([*lines, f"{self.output}: {left}", f"digest {self.digest}"])


def _funnel(name: str, record: dict[str, Any]) -> str:
    """One line: documents that remain and those that were dropped or unreadable, by reason; for other records their
    first figures."""
    said = []
    if "num_documents" in record and {"dropped", "rejected"} & set(record):
        said.append(f"{record['num_documents']:,} documents left")
    else:
        figures = [(key, value) for key, value in record.items() if key.startswith("num_") and isinstance(value, int)][
            :NUM_FIGURES
        ]
        said += [f"{key.removeprefix('num_').replace('_', ' ')} {value:,}" for key, value in figures]
    if num_unread := record.get(UNREAD):
        said.append(f"{num_unread:,} left out by ingest.max_source_bytes")
    for word in ("dropped", "rejected"):
        if word in record:
            reasons = sorted(
                ((reason, count) for reason, count in record[word].items() if count),
                key=lambda item: (-item[1], item[0]),
            )
            listed = ", ".join(f"{reason} {count:,}" for reason, count in reasons)
            said.append(f"{sum(count for _, count in reasons):,} {word}{f' ({listed})' if listed else ''}")
    return f"{name}: {', '.join(said)}"


def check_output(output_dir: Path, address: str | Path | None) -> None:
    """Before hours of work: raises ValueError for a directory that cannot take the output, or that the next run would
    read as input."""
    existing = next(path for path in (output_dir.absolute(), *output_dir.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        why = "cannot be written" if existing.is_dir() else "is a file"
        raise ValueError(f"--output {output_dir}: {existing} {why}: name a new directory elsewhere")
    _refuse_files(output_dir)
    if address is not None and Path(address).is_dir() and output_dir.resolve().is_relative_to(Path(address).resolve()):
        raise ValueError(
            f"--output {output_dir} is in --input {address}, which would be read again with it: name a directory "
            f"elsewhere"
        )


def _refuse_files(output_dir: Path) -> None:
    if not output_dir.exists():
        return
    ours = output_dir / UNFINISHED / NAMES
    allowed = {UNFINISHED, *(json.loads(ours.read_text()) if ours.exists() else ())}
    if {path.name for path in output_dir.iterdir()} - allowed:
        raise ValueError(
            f"--output {output_dir} is not empty: name a new directory, so that no file of another run stays in it"
        )


@contextmanager
def locked_output(output_dir: Path) -> Iterator[None]:
    """The output's directory, created and locked against a second run; removed where the stage writes nothing into
    it."""
    output_dir.mkdir(parents=True, exist_ok=True)
    held = os.open(output_dir, os.O_RDONLY)  # by flock, not filelock: a lock file would be one of the user's files
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise ValueError(
            f"--output {output_dir}: another run writes there now: wait for it, or name another directory"
        ) from None
    try:
        yield
    finally:
        if output_dir.is_dir() and not any(output_dir.iterdir()):
            output_dir.rmdir()
        os.close(held)


def explains_output(artifact: Artifact[Any]) -> bool:
    """Whether an earlier step dropped documents, did not or could not read some, or made the tokenizer."""
    values = artifact.record.model_dump()
    return any(values.get(word) for word in ("dropped", "rejected", UNREAD, "tokenizer_digest"))


def write_output(
    artifact: Artifact[Any], earlier: dict[str, Artifact[Any]], outcome: StageOutcome, output_dir: Path
) -> None:
    """Every file of the artifact under its name, EARLIER_FILES of earlier steps, and the records. They are moved
    into the directory when all are there, so that no part looks like the whole."""
    # Looked at again: something else may have been put there meanwhile.
    _refuse_files(output_dir)
    files = {name: artifact.path(name) for name in sorted({**artifact.manifest.content, **artifact.manifest.evidence})}
    for step, other in earlier.items():
        names = [name for name in EARLIER_FILES if name in other.manifest.content]
        files |= {f"{EARLIER}/{step}/{name}": other.path(name) for name in names}
    waiting = output_dir / UNFINISHED
    try:
        _clear(output_dir)
        waiting.mkdir()
        for name, path in files.items():
            target = waiting / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        (waiting / "record.json").write_text(outcome.model_dump_json(indent=1) + "\n", encoding="utf-8")
        waiting_names = sorted(path.name for path in waiting.iterdir())
        (waiting / NAMES).write_text(json.dumps(waiting_names))
    except OSError as error:
        shutil.rmtree(waiting, ignore_errors=True)
        raise ValueError(
            f"--output {output_dir}: cannot be written ({error.strerror}): make room or name another directory, then "
            f"run again; what was "
            "computed is kept"
        ) from error
    for name in waiting_names:
        (waiting / name).rename(output_dir / name)
    shutil.rmtree(waiting)


def _clear(output_dir: Path) -> None:
    """Removes the files that a killed run had begun to move."""
    ours = output_dir / UNFINISHED / NAMES
    for name in json.loads(ours.read_text()) if ours.exists() else ():
        path = output_dir / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    shutil.rmtree(output_dir / UNFINISHED, ignore_errors=True)
