"""The first process of a sandbox: it puts up the walls, then forks two processes for each job.

Only the judge's process reads the job. Both are forked before the job arrives, and the process that forks them never
reads one: no solution has the tests of another in its memory. Runs inside the sandbox: imports only the standard
library.
"""

from __future__ import annotations

import json
import os
import signal
from itertools import pairwise
from typing import Any

from tasks.data.sandbox.judge_process import run_judge
from tasks.data.sandbox.sandbox_walls import confine, enter_namespaces, hide_memory
from tasks.data.sandbox.solution_process import run_solution

MAX_DESCRIPTORS = 64


def start(walls: dict[str, Any] | None, limits: tuple[int, int]) -> None:
    """Answer each job, a line of JSON on standard input, with a line; end after a job without an answer, and at the end
    of input.

    `walls` are enter_namespaces' arguments, None where bubblewrap made them; `limits` are seconds and bytes of each
    process.
    """
    if walls is not None:
        enter_namespaces(**walls)
    hide_memory()
    while line := _next_line(limits):
        with open(1, "wb", closefd=False) as answers:
            answers.write(line + b"\n")


def _next_line(limits: tuple[int, int]) -> bytes:
    to_solution, to_judge, to_start, input_of_solution = os.pipe(), os.pipe(), os.pipe(), os.pipe()
    solution = os.fork()
    if solution == 0:
        os.dup2(input_of_solution[0], 0)
        _close_all_but(0, to_solution[0], to_judge[1])
        confine(*limits)
        run_solution(to_solution[0], to_judge[1])
    judge = os.fork()
    if judge == 0:
        _close_all_but(0, to_judge[0], to_solution[1], to_start[1], input_of_solution[1])
        confine(*limits)
        with open(0, "rb") as given:
            job = json.loads(given.readline())
        run_judge(to_judge[0], to_solution[1], to_start[1], input_of_solution[1], job)
        os._exit(0)
    for end in (*to_solution, *to_judge, *input_of_solution, to_start[1]):
        os.close(end)
    with open(to_start[0], "rb") as answer:  # until the judge's process ends
        line = answer.read()
    for process in (solution, judge):
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    return line


def _close_all_but(*kept: int) -> None:
    for before, after in pairwise((-1, *sorted(kept), MAX_DESCRIPTORS)):
        if before + 1 < after:  # for an empty range the C library closes everything
            os.closerange(before + 1, after)
