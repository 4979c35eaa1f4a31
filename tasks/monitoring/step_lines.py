"""The lines that a phase's ranks wrote about its steps, as samples: metrics.jsonl and spikes.jsonl."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tasks.monitoring.metric_table import Figures
from tasks.training.watch.effective_time import effective_time

GAUGES = {
    "loss": "training_loss",
    "learning_rate": "training_learning_rate",
    "tokens_per_second": "training_tokens_per_second",
    "grad_norm": "training_gradient_norm",
    "mfu": "training_mfu",
    "memory_bytes": "training_memory_bytes",
    "validation_bits_per_byte": "training_validation_bits_per_byte",
    "reward_mean": "training_reward",
    "reward_std": "training_reward_deviation",
    "pass_rate": "training_pass_rate",
    "clip_fraction": "training_clip_fraction",
    "informative_groups": "training_informative_groups",
    "answer_tokens": "training_answer_tokens",
    "entropy_estimate": "training_entropy_estimate",
}
"""Metric by the name in a line; a line has those of its objective."""
BY_LAYER = {
    "expert_cv_": "expert_balance_cv",
    "expert_load_": "training_expert_load",
    "dead_experts_": "training_dead_experts",
}
SUMS = {
    "optimizer_seconds": "training_optimizer_seconds_total",
    "pause_seconds": "training_pause_seconds_total",
    "skipped_steps": "training_skipped_steps_total",
}
KL = {"rollout_kl": "rollout", "reference_kl": "reference"}
PARTS = ("lm", "mtp", "balance")
STEP_PARTS = ("weight_sync", "rollout", "reward", "training")


class FollowedLines:
    """The whole lines of a file that grows. One that was replaced, as by a resumed phase, is read from its start.

    `latest` has the newest value of every name, `sums` what SUMS adds up, `num_unreadable` counts lines that are no
    JSON objects. Half a line at the end is left for the next look.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begin(0)

    def _begin(self, inode: int) -> None:
        self._inode, self._offset = inode, 0
        self.latest: dict[str, Any] = {}
        self.sums = dict.fromkeys(SUMS, 0.0)
        self.num_unreadable = 0

    def look(self) -> FollowedLines:
        """Read what was added; no file is no lines."""
        try:
            with open(self.path, "rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:
                    self._begin(status.st_ino)
                file.seek(self._offset)
                self._offset += self.take(file.read())
        except FileNotFoundError:
            self._begin(0)
        return self

    def take(self, data: bytes) -> int:
        """Add the whole lines; how many bytes they are."""
        complete, newline, _ = data.rpartition(b"\n")
        for line in complete.splitlines():
            try:
                values = json.loads(line)
                numbers = {name: float(value) for name, value in values.items()}
            except (ValueError, TypeError, AttributeError):
                self.num_unreadable += 1
                continue
            self.latest.update(numbers)
            for name in self.sums:
                self.sums[name] += numbers.get(name, 0.0)
        return len(complete) + len(newline)


def add_steps(figures: Figures, lines: FollowedLines, sequence_length: int, *phase: str) -> None:
    """Samples of a phase that has logged a step; `phase` are its labels."""
    latest = lines.latest
    if not latest:
        return
    for name, metric in GAUGES.items():
        if name in latest:
            figures.add(metric, latest[name], *phase)
    for part in PARTS:
        if part in latest:
            figures.add("training_loss_part", latest[part], *phase, part)
    for part in STEP_PARTS:
        if f"{part}_seconds" in latest:
            figures.add("training_step_seconds", latest[f"{part}_seconds"], *phase, part)
    for name, against in KL.items():
        if name in latest:
            figures.add("training_kl", latest[name], *phase, against)
    for name, value in latest.items():
        for prefix, metric in BY_LAYER.items():
            if name.startswith(prefix):
                figures.add(metric, value, *phase, name.removeprefix(prefix))
    for name, metric in SUMS.items():
        figures.add(metric, lines.sums[name], *phase)
    figures.add("training_steps_total", latest["step"], *phase)
    figures.add("training_tokens_total", latest["tokens"], *phase)
    if latest.get("tokens_per_second"):
        seconds = latest["batch_tokens"] / latest["tokens_per_second"]
        figures.add("training_step_duration_seconds", seconds, *phase)
    if latest.get("rollout_seconds"):
        num_answers = latest["batch_tokens"] / sequence_length
        sampled = latest["answer_tokens"] * num_answers
        figures.add("training_rollout_tokens_per_second", sampled / latest["rollout_seconds"], *phase)


def add_time(figures: Figures, data: bytes, *phase: str) -> int:
    """Samples of time.json, none where the phase left none; 1 where it is not understood, else 0."""
    try:
        measured = effective_time(data) if data else None
    except (ValueError, TypeError, KeyError):
        return 1
    if measured is not None:
        for part in ("productive", "paused", "waiting", "lost"):
            figures.add("training_seconds", getattr(measured, part), *phase, part)
        figures.add("training_effective_ratio", measured.share, *phase)
        figures.add("training_data_wait_seconds_total", measured.data_wait, *phase)
    return 0


def add_spikes(figures: Figures, data: bytes, *phase: str) -> int:
    """Samples of spikes.jsonl, zeros where there was none; the number of lines that are no JSON objects. A spike and
    the rollback because of it are two lines of one step."""
    spiked, nonfinite, num_unreadable = set(), set(), 0
    for line in data.rpartition(b"\n")[0].splitlines():
        try:
            spike = json.loads(line)
            spiked.add(spike["step"])
            if isinstance(spike["loss"], str) or isinstance(spike["grad_norm"], str):
                nonfinite.add(spike["step"])
        except (ValueError, TypeError, KeyError):
            num_unreadable += 1
    figures.add("training_spikes_total", len(spiked), *phase)
    figures.add("training_nonfinite_steps_total", len(nonfinite), *phase)
    return num_unreadable
