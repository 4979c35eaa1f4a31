"""What ranks agree on beside the passes: objects of rank 0, objects of all, the end of a wait.

They may wait for a disk: of a checkpoint of hundreds of gigabytes one file is hashed for seconds, all of them for many
minutes. So they have a process group of their own with a time-out of their own; that of NCCL's collectives is ten
minutes, after which it ends the process.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

Result = TypeVar("Result")
CONTROL_TIMEOUT = timedelta(hours=12)
"""Longer than the slowest save. A rank that has died ends the job at once: its launcher sees it."""


def on_first_rank(function: Callable[[], Result]) -> Result:
    """What rank 0 got, on all ranks; its error is raised there, and the others wait for their end."""
    results: list[Result | None] = [function() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(results, src=0, group=_control_group())
    result = results[0]
    return result  # pyright: ignore[reportReturnType]


def gathered(value: Result) -> list[Result]:
    """Everyone's value, by rank."""
    by_rank: list[Result] = [value] * dist.get_world_size()
    dist.all_gather_object(by_rank, value, group=_control_group())
    return by_rank


def wait_for_all() -> None:
    """Returns when every rank has called it."""
    gathered(None)


def leave_together() -> None:
    """Ends the process groups when every rank has called it. A group that outlived its world would be torn down by the
    interpreter's end, while its threads run: that aborts the process."""
    wait_for_all()
    _group_beside.cache_clear()
    dist.destroy_process_group()


def _control_group() -> ProcessGroup:
    """The same ranks as the world; all make it together, at their first agreement."""
    world = dist.group.WORLD
    assert world is not None, "the process group is not up"
    return _group_beside(world)


@cache
def _group_beside(world: ProcessGroup) -> ProcessGroup:
    group = dist.new_group(list(range(world.size())), timeout=CONTROL_TIMEOUT)
    assert group is not None and not isinstance(group, int), group
    return group
