"""Sends rank 0's metrics to TensorBoard event files and Weights & Biases, beside metrics.jsonl.

All of it is evidence. MLflow is not among them: the step that launched the worker forwards metrics.jsonl there.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from configs.schema import TrainingResources
from tasks.training.state.job import TrainingJob

TENSORBOARD_DIR, WANDB_DIR = "tensorboard", "wandb"
WANDB_KEY = "WANDB_API_KEY"


class Tracker(Protocol):
    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def refuse_missing_tracker(resources: TrainingResources) -> None:
    """Raises ValueError where Weights & Biases is asked for and not installed, or has no key to send with."""
    if resources.wandb == "off":
        return
    if importlib.util.find_spec("wandb") is None:
        raise ValueError(
            f"resources.wandb is {resources.wandb}, but wandb is not installed: pip install 'glm46[wandb]', or set it "
            f"to off"
        )
    if resources.wandb == "online" and not os.environ.get(WANDB_KEY):
        raise ValueError(
            f"resources.wandb is online, but {WANDB_KEY} is not in the environment: set it, or set resources.wandb to "
            f"offline"
        )


def open_trackers(job: TrainingJob, last_step: int) -> list[Tracker]:
    """The trackers that the resources name. Points after `last_step`, from before a kill or a rollback, are hidden
    where the tracker can do that."""
    trackers: list[Tracker] = []
    if job.resources.tensorboard:
        trackers.append(TensorBoard(Path(job.work_dir) / TENSORBOARD_DIR, last_step))
    if job.resources.wandb != "off":
        trackers.append(WeightsAndBiases(job))
    return trackers


class TensorBoard:
    """Event files, one per start of the worker."""

    def __init__(self, directory: Path, last_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), purge_step=last_step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """One run per phase, named by the job's key, so that a resumed worker continues it. The key comes only from the
    environment."""

    def __init__(self, job: TrainingJob) -> None:
        import wandb

        work_dir = Path(job.work_dir)
        (work_dir / WANDB_DIR).mkdir(exist_ok=True)
        is_online = job.resources.wandb == "online"
        self._run: Any = wandb.init(
            project="glm46",
            name=job.recipe.phase,
            id=work_dir.name,
            dir=str(work_dir),
            mode="online" if is_online else "offline",
            resume="allow" if is_online else None,
            config=job.recipe.model_dump(mode="json"),
            save_code=False,
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, x_disable_meta=True, x_disable_stats=True
            ),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()
