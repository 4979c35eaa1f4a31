"""What a sandbox starts with: the walls, then two processes, of which only the judge's reads the job.

Runs inside the sandbox: imports the standard library only.
"""

from __future__ import annotations

import json
import os
from typing import Any

from tasks.data.judge_process import run_judge
from tasks.data.sandbox_walls import confine, enter_namespaces, hide_memory
from tasks.data.solution_process import run_solution


def start(walls: dict[str, Any] | None, limits: tuple[int, int]) -> None:
    """`walls` are enter_namespaces' arguments, None where bubblewrap made them; `limits` are seconds and bytes of each process."""
    if walls is not None:
        enter_namespaces(**walls)
    hide_memory()
    to_solution, to_judge = os.pipe(), os.pipe()
    if os.fork() == 0:
        for end in (0, 1, 2, to_solution[1], to_judge[0]):
            os.close(end)
        confine(*limits)
        run_solution(to_solution[0], to_judge[1])
    for end in (2, to_solution[0], to_judge[1]):
        os.close(end)
    confine(*limits)
    with open(0, "rb", closefd=False) as given:
        job = json.load(given)
    run_judge(to_judge[0], to_solution[1], job)
    os._exit(0)
