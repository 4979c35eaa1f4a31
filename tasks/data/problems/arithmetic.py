"""Verified arithmetic problems as NumPy arrays: a fixed walk over all of them.

A problem is (operation, a, b) with 0 <= a, b <= max_operand. The unordered pair {a, b} decides whether it is trained
on or evaluated, for all three operations together: neither `7 + 12` nor `19 - 12` ... of an evaluated `12 + 7` and
its operands is ever trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.text.words import mix

if TYPE_CHECKING:
    from numpy.typing import NDArray

    I64 = NDArray[np.int64]

OPERATIONS = ("+", "-", "*")
EVALUATION_SHARE = 8
"""Number of operand pairs of which one is kept for evaluation."""
WALK_BLOCK = 1 << 16
SALT = np.uint64(46)


def is_evaluation_pair(a: I64, b: I64) -> NDArray[np.bool_]:
    """Whether a pair of operands, in either order, belongs to evaluation."""
    low, high = np.minimum(a, b).astype(np.uint64), np.maximum(a, b).astype(np.uint64)
    return mix(mix(low + SALT) + high) % np.uint64(EVALUATION_SHARE) == 0


def choose_problems(
    count: int, max_operand: int, operations: Sequence[str], for_evaluation: bool
) -> tuple[I64, I64, I64]:
    """(index in OPERATIONS, a, b) of `count` different problems of one side, in hashed order. Raises ValueError if
    there are fewer."""
    base = max_operand + 1
    space = len(operations) * base * base
    stride = _coprime_near(int(space * 0.6180339887498949), space)
    chosen: list[I64] = []
    num_chosen = 0
    for start in range(0, space, WALK_BLOCK):
        steps = np.arange(start, min(start + WALK_BLOCK, space), dtype=object if space > 2**31 else np.int64)
        numbers = ((steps * stride) % space).astype(np.int64)
        numbers = numbers[is_evaluation_pair(numbers // base % base, numbers % base) == for_evaluation]
        chosen.append(numbers[: count - num_chosen])
        num_chosen += len(chosen[-1])
        if num_chosen == count:
            break
    else:
        side = "evaluation" if for_evaluation else "training"
        raise ValueError(
            f"synthesize: {count} {side} problems are asked for, but {' '.join(operations)} on operands up to "
            f"{max_operand} give only "
            f"{num_chosen}: raise synthesize.max_operand, or lower the number of problems (training: and of prompts) "
            f"to {num_chosen}"
        )
    numbers = np.concatenate(chosen)
    numbers = numbers[np.lexsort((numbers, mix(numbers.astype(np.uint64) + SALT)))]
    indices = np.array([OPERATIONS.index(operation) for operation in operations])
    return indices[numbers // (base * base)], numbers // base % base, numbers % base


def answers(operation: I64, a: I64, b: I64) -> I64:
    """The results, computed for all problems at once."""
    return np.choose(operation, (a + b, a - b, a * b))


def terms(operation: I64, a: I64, b: I64) -> NDArray[np.str_]:
    """`12 + 7` for each problem."""
    signs = np.array([f" {sign} " for sign in OPERATIONS])[operation]
    return np.strings.add(np.strings.add(a.astype(np.str_), signs), b.astype(np.str_))


def verify_lines(lines: NDArray[np.str_]) -> NDArray[np.bool_]:
    """Whether each text `a op b = c` is a true equation: it is read from the text and checked by the inverse
    operation."""
    import pyarrow as pa
    import pyarrow.compute as pc

    parts = pc.split_pattern(pa.array(lines.tolist()), " ")  # pyright: ignore[reportAttributeAccessIssue]
    left, sign, right, equals, result = (
        parts.flatten().to_numpy(zero_copy_only=False).reshape(-1, 5)[:, column] for column in range(5)
    )
    a, b, c = (np.asarray(values).astype(np.int64) for values in (left, right, result))
    divisor = np.where(b == 0, 1, b)
    product = (c // divisor == a) & (c % divisor == 0)
    holds = np.select(
        [sign == "+", sign == "-", sign == "*"], [c - b == a, c + b == a, np.where(b == 0, c == 0, product)]
    )
    return (equals == "=") & holds.astype(bool)


def _coprime_near(value: int, modulus: int) -> int:
    """The next number from `value` on that shares no divisor with `modulus`: its multiples visit every residue once."""
    value = max(value, 1)
    while np.gcd(value, modulus) != 1:
        value += 1
    return value
