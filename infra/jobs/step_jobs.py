"""A step as a job: its function runs in one process on a node of a launcher, not in the process of the flow.

`python -m infra.jobs.step_jobs MODULE NAME CALL.json` is that process. In work/<key>/, beside the files of the job:
call.json (store and arguments), and for start N of the job output-N/ with the files of the step in files/ and, written
last, record.json. The flow takes both over into its own attempt and commits. A step keeps nothing over a lost job: it
begins again in a directory of its own.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from configs.files.atomic_files import link_or_copy, replace_durably
from configs.files.progress_file import ProgressFile
from infra.home import Home
from infra.jobs.follow_job import JobSubmission, follow
from infra.jobs.launchers import Job
from infra.jobs.open_launcher import open_launcher
from infra.jobs.scheduled_jobs import SUBMITTED_FILES
from infra.jobs.supervisor import read_job_file, write_json
from infra.step import JOB_EVIDENCE_DIR, Artifact, Manifest, MetricRows, Output, Progress, R, Step
from infra.storage.open_store import open_store
from infra.storage.store import Store

if TYPE_CHECKING:
    from configs.schema import JobResources

CALL_FILE = "call.json"
RECORD_FILE = "record.json"


class Argument(BaseModel):
    """An argument of a step: settings, or an artifact by its manifest."""

    type: str
    """MODULE:NAME of the settings, or of the artifact's record."""
    settings: dict[str, Any] | None = None
    manifest: Manifest | None = None


class Call(BaseModel):
    """What the process is to do."""

    home: str
    store: str
    key: str
    arguments: dict[str, Argument | None]


def run_as_job(
    step: Step[R], arguments: Mapping[str, Any], resources: JobResources, store: Store, name: str, output: Output
) -> R:
    """The record of a step whose function runs as a job of one node; its files are in `output`. `name` is the
    stage's."""
    call_path = output.work_dir / CALL_FILE
    call = Call(
        home=str(store.home.root),
        store=store.uri,
        key=output.key,
        arguments={key: _describe(value) for key, value in arguments.items()},
    )
    module = step.function.__module__
    job = Job(
        output.key,
        "infra.jobs.step_jobs",
        (module, step.name, str(call_path)),
        num_ranks=1,
        environment={},
        queue=resources.queue,
        device=resources.device,
        name=name,
        roots=(module, *step.roots),
    )
    launcher = open_launcher(resources.launcher, output.work_dir.parent)
    submission = JobSubmission(
        launcher, job, output, prepare=lambda: write_json(call_path, call.model_dump(mode="json"))
    )
    follow(launcher, submission, output)
    return step.record_type.model_validate_json(_collect(output))


def _describe(value: BaseModel | Artifact[Any] | None) -> Argument | None:
    if isinstance(value, Artifact):
        return Argument(type=_address(type(value.record)), manifest=value.manifest)
    return None if value is None else Argument(type=_address(type(value)), settings=value.model_dump(mode="json"))


def _address(kind: type) -> str:
    assert "." not in kind.__qualname__, f"a process elsewhere cannot import {kind.__qualname__}"
    return f"{kind.__module__}:{kind.__qualname__}"


def _collect(output: Output) -> bytes:
    """Take over what the start that succeeded has left; its record."""
    job = read_job_file(output.work_dir)
    assert job is not None and job.exit_code == 0, job
    done = _output_dir(output.work_dir, job.fencing)
    files = done / "files"
    for path in sorted(path for path in files.rglob("*") if path.is_file()):
        link_or_copy(path, output.path(path.relative_to(files).as_posix()))
    for pattern in ("job.json", *SUBMITTED_FILES, "logs/*"):
        for path in sorted(output.work_dir.glob(pattern)):
            shutil.copyfile(path, output.path(f"{JOB_EVIDENCE_DIR}/{path.name}"))
    return (done / RECORD_FILE).read_bytes()


def _output_dir(work_dir: Path, fencing: int) -> Path:
    return work_dir / f"output-{fencing}"


def run_call(step: Step[Any], call: Call, work_dir: Path, fencing: int) -> None:
    """Run the step's function and leave files and record. Raises ValueError where this machine does not see the
    store."""
    store = _open_store(call)
    for abandoned in work_dir.glob("output-*"):
        shutil.rmtree(abandoned, ignore_errors=True)
    done, progress = _output_dir(work_dir, fencing), ProgressFile(work_dir)
    files = done / "files"
    files.mkdir(parents=True)

    def report(shown: Progress) -> None:
        progress.write(shown.done, shown.total, shown.unit, shown.message)

    def log_metrics(rows: MetricRows) -> None:
        raise AssertionError(f"{step.name} logs metrics, which a job does not forward")

    def remove_below(name: str) -> None:
        shutil.rmtree(files / name, ignore_errors=True)

    output = Output(files, str(files), work_dir, call.key, report, print, log_metrics, remove_below)
    record = step(**{name: _open(value, store) for name, value in call.arguments.items()}, output=output)
    assert not output.written, f"{step.name} has executors, which a job does not start"
    replace_durably(done / RECORD_FILE, record.model_dump_json().encode())


def _open_store(call: Call) -> Store:
    is_seen = call.store.startswith("s3://") or Path(call.store).is_dir()
    store = open_store(call.store, Home(Path(call.home)), writes=False) if is_seen else None
    manifests = [value.manifest for value in call.arguments.values() if value is not None and value.manifest]
    if store is None or not all(store.read_manifest(manifest.key) for manifest in manifests):
        raise ValueError(
            f"{os.uname().nodename} does not see what store {call.store} holds: name a directory that all nodes mount, "
            f"or s3://bucket/prefix, with --store"
        )
    return store


def _open(argument: Argument | None, store: Store) -> Any:
    if argument is None:
        return None
    module, _, name = argument.type.partition(":")
    kind = getattr(importlib.import_module(module), name)
    if argument.manifest is None:
        return kind.model_validate(argument.settings)
    return Artifact(argument.manifest, kind.model_validate(argument.manifest.record), store)


def main() -> int:
    module, name, call_path = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    step = getattr(importlib.import_module(module), name)
    call = Call.model_validate_json(call_path.read_bytes())
    try:
        run_call(step, call, call_path.parent, int(os.environ["GLM46_FENCING"]))
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
