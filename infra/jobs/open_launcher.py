"""Chooses the launcher of a job."""

from __future__ import annotations

from pathlib import Path

from infra.jobs.launchers import Launcher, LocalLauncher
from infra.jobs.slurm_launcher import SlurmLauncher

LAUNCHERS = {"local": LocalLauncher, "slurm": SlurmLauncher}


def open_launcher(name: str, work_root: Path) -> Launcher:
    """By the name in a phase's resources."""
    return LAUNCHERS[name](work_root)


def launcher_of(key: str, work_root: Path) -> Launcher:
    """Of a job that was submitted."""
    slurm = SlurmLauncher(work_root)
    return slurm if slurm.find(key) else LocalLauncher(work_root)
