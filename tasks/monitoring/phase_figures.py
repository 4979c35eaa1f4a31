"""Phases that train, failed or wait in a work directory, and phases whose work is committed, as samples."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from configs.files import progress_file, s3_objects
from configs.files.stored_files import StoredFile
from infra.home import Home
from infra.jobs.launchers import SUBMISSION_FILE, JobState, job_keys
from infra.jobs.supervisor import read_command, read_job_file
from infra.step import Artifact, Manifest, Record
from infra.storage.store import Store
from tasks.monitoring.job_states import JobStates
from tasks.monitoring.metric_table import Figures
from tasks.monitoring.stage_figures import RUN_DIGITS
from tasks.monitoring.stage_runs import StageRun
from tasks.monitoring.step_lines import FollowedLines, add_spikes, add_steps, add_time
from tasks.training.state.checkpoints import LATEST, latest_step
from tasks.training.state.job import JOB_FILE, METRICS_FILE, ROLLOUTS_FILE
from tasks.training.state.spikes import SPIKES_FILE
from tasks.training.watch.effective_time import TIME_FILE

NOT_UNDERSTOOD = (ValueError, KeyError, TypeError, OSError)
"""What a damaged or half-written file raises."""


class JobFigures:
    """The jobs of a home that are not committed."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self._lines: dict[str, FollowedLines] = {}
        self._states = JobStates(home)

    def add(self, figures: Figures, known: dict[str, StageRun]) -> set[str]:
        """Samples of each job; `known` are the stages by key. A job whose files are damaged is reported. Returns the
        keys of all jobs."""
        keys = set(job_keys(self.home.work_root))
        for key in sorted(keys):
            work_dir = self.home.work_dir(key)
            try:
                self._add_job(figures, key, work_dir, known.get(key))
            except NOT_UNDERSTOOD:
                if work_dir.exists():  # else committed at this moment
                    figures.unreadable(work_dir)
        for ended in self._lines.keys() - keys:
            del self._lines[ended]
        return keys

    def _add_job(self, figures: Figures, key: str, work_dir: Path, run: StageRun | None) -> None:
        stage = read_command(work_dir).name.replace(" ", "-") if run is None else run.stage
        labels = (run.scale if run else "", stage, key[:RUN_DIGITS])
        state, is_known = self._states.look(key, work_dir)
        if not is_known:
            figures.unreadable(work_dir / SUBMISSION_FILE)
        figures.add("job_state", 1.0, *labels, state)
        figures.add("job_queue_seconds", _queue_seconds(work_dir, state), *labels)
        if (work_dir / JOB_FILE).exists():
            self._add_phase(figures, key, work_dir, labels[0], state)

    def _add_phase(self, figures: Figures, key: str, work_dir: Path, scale: str, state: JobState) -> None:
        job: dict[str, Any] = json.loads((work_dir / JOB_FILE).read_text())
        recipe, resources = job["recipe"], job["resources"]
        phase = (scale, recipe["phase"], key[:RUN_DIGITS])
        figures.add("training_running", state == "running", *phase)
        figures.add("training_progress_timestamp_seconds", _last_progress(work_dir), *phase)
        figures.add("training_samples_answers", (work_dir / ROLLOUTS_FILE).exists(), *phase)
        figures.add("training_save_interval_steps", resources["save_interval_steps"], *phase)
        figures.add("training_checkpoint_step", latest_step(work_dir), *phase)
        latest = work_dir / "checkpoints" / LATEST
        if latest.exists():
            figures.add("training_checkpoint_timestamp_seconds", latest.stat().st_mtime, *phase)
        lines = self._lines.setdefault(key, FollowedLines(work_dir / METRICS_FILE)).look()
        add_steps(figures, lines, recipe["sequence_length"], *phase)
        if lines.latest:
            spent = lines.latest["tokens"] - recipe["course_start_tokens"]
            figures.add("training_progress_ratio", spent / recipe["num_tokens"], *phase)
        spikes = work_dir / SPIKES_FILE
        times = work_dir / TIME_FILE
        damaged = add_spikes(figures, spikes.read_bytes() if spikes.exists() else b"", *phase)
        unknown = add_time(figures, times.read_bytes() if times.exists() else b"", *phase)
        for path, number in ((lines.path, lines.num_unreadable), (spikes, damaged), (times, unknown)):
            if number:
                figures.unreadable(path)


def _queue_seconds(work_dir: Path, state: JobState) -> float:
    """From the submission to the start of the newest start; until now where it waits."""
    submitted = (work_dir / "command.json").stat().st_mtime
    job = read_job_file(work_dir)
    started = time.time() if state == "queued" or job is None else job.started_at
    return max(0.0, started - submitted)


def _last_progress(work_dir: Path) -> float:
    """When the newest start began, or rank 0 wrote after it: metrics.jsonl when it is ready and at logged steps,
    progress.json at steps, time.json after pauses."""
    job = read_job_file(work_dir)
    paths = [work_dir / name for name in (METRICS_FILE, progress_file.NAME, TIME_FILE)]
    return max([0.0 if job is None else job.started_at, *(path.stat().st_mtime for path in paths if path.exists())])


class CommittedPhases:
    """Phases whose work is in the store; what they logged is read once."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._read: dict[str, tuple[FollowedLines, bytes, bytes]] = {}

    def add(self, figures: Figures, run: StageRun, manifest: Manifest) -> None:
        """Samples of one phase."""
        recipe = manifest.identity["recipe"]
        phase = (run.scale, recipe["phase"], manifest.key[:RUN_DIGITS])
        if manifest.key not in self._read:
            lines = FollowedLines(Path(METRICS_FILE))
            lines.take(self._content(manifest, METRICS_FILE))
            spikes, times = self._content(manifest, SPIKES_FILE), self._content(manifest, TIME_FILE)
            self._read[manifest.key] = lines, spikes, times
        lines, spikes, times = self._read[manifest.key]
        figures.add("training_running", 0.0, *phase)
        figures.add("training_progress_ratio", 1.0, *phase)
        add_steps(figures, lines, recipe["sequence_length"], *phase)
        add_spikes(figures, spikes, *phase)
        add_time(figures, times, *phase)

    def _content(self, manifest: Manifest, name: str) -> bytes:
        """An evidence file, empty where the phase left none. It is not verified: an exporter marks nothing invalid."""
        if name not in manifest.evidence:
            return b""
        (file,) = Artifact(manifest, Record(), self.store).files(name)
        return _read_whole(file)


def _read_whole(file: StoredFile) -> bytes:
    if file.uri.startswith("s3://"):
        return s3_objects.read_range(file.uri, 0, file.size)
    return Path(file.uri).read_bytes()
