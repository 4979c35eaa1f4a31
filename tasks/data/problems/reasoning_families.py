"""Families of problems with their reasoning under one protocol, chosen deterministically, for training or evaluation.

A family draws rows of parameters from hashed numbers and writes a row in words. To check a problem, it reads it back
from its words, by another route than it was made. Problems with one key are the same problem in other words, and only
one of them is made. The hash of the key, or of what it shares with related problems, decides the side.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.problems import (
    bracket_problems,
    code_problems,
    equation_problems,
    logic_problems,
    quadratic_problems,
    system_problems,
)
from tasks.data.problems.arithmetic import EVALUATION_SHARE, SALT
from tasks.data.text.words import mix

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tasks.data.problems.reasoned_problem import ReasonedProblem

    I64 = NDArray[np.int64]

BLOCK_ROWS = 1 << 14
NUM_DRAWS = 24
"""Hashed numbers from which a row is made."""
MAX_BARREN_ROWS = 1 << 18
"""Rows in succession without a new problem after which a family counts as exhausted."""


@dataclass(frozen=True)
class Family:
    """One kind of problem."""

    draw: Callable[[I64, int], I64]
    """(rows x NUM_DRAWS of hashed numbers from 0, difficulty 1 to 5) -> rows of parameters; rows without a valid
    problem are left out."""
    write: Callable[[list[int]], ReasonedProblem]
    verify: Callable[[Sequence[ReasonedProblem]], list[bool]]
    """Whether question, reasoning and answer, read from the text, are right."""


FAMILIES = {
    "brackets": Family(bracket_problems.draw, bracket_problems.write, bracket_problems.verify),
    "equations": Family(equation_problems.draw, equation_problems.write, equation_problems.verify),
    "systems": Family(system_problems.draw, system_problems.write, system_problems.verify),
    "quadratics": Family(quadratic_problems.draw, quadratic_problems.write, quadratic_problems.verify),
    "logic": Family(logic_problems.draw, logic_problems.write, logic_problems.verify),
    "code": Family(code_problems.draw, code_problems.write, code_problems.verify),
}


def is_evaluation_key(key: str) -> bool:
    """Whether problems with this key are kept for evaluation."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % EVALUATION_SHARE == 0


def choose_reasoned(
    name: str, family: Family, count: int, difficulty: int, for_evaluation: bool
) -> tuple[list[ReasonedProblem], int]:
    """(`count` different verified problems of one side, number of problems that the verifier refused). Raises
    ValueError if the family has fewer."""
    chosen: list[ReasonedProblem] = []
    num_rejected = 0
    waiting = _new_problems(name, family, difficulty, for_evaluation)
    while len(chosen) < count:
        problems = [problem for problem, _ in zip(waiting, range(min(count - len(chosen), BLOCK_ROWS)), strict=False)]
        if not problems:
            side = "evaluation" if for_evaluation else "training"
            raise ValueError(
                f"synthesize: {count} {side} problems of family {name} are asked for, difficulty {difficulty} gives "
                f"only "
                f"{len(chosen)}: raise synthesize.difficulty or lower synthesize.families.{name}"
            )
        verdicts = family.verify(problems)
        chosen += [problem for problem, is_right in zip(problems, verdicts, strict=True) if is_right]
        num_rejected += verdicts.count(False)
    return chosen, num_rejected


def _new_problems(name: str, family: Family, difficulty: int, for_evaluation: bool) -> Iterator[ReasonedProblem]:
    salt = SALT + np.uint64(int.from_bytes(name.encode()[:7], "big"))
    seen: set[str] = set()
    start = barren = 0
    while barren < MAX_BARREN_ROWS:
        numbers = np.arange(start, start + BLOCK_ROWS, dtype=np.uint64)[:, None] * np.uint64(NUM_DRAWS) + np.arange(
            NUM_DRAWS, dtype=np.uint64
        )
        rows = family.draw((mix(mix(numbers) + salt) >> np.uint64(1)).astype(np.int64), difficulty)
        start += BLOCK_ROWS
        barren += BLOCK_ROWS
        for row in rows.tolist():
            problem = family.write(row)
            if problem.key not in seen:
                seen.add(problem.key)
                if is_evaluation_key(problem.kin or problem.key) == for_evaluation:
                    barren = 0
                    yield problem
