"""Verified arithmetic problems as NumPy arrays: a fixed walk over all of them.

A problem is (operation, a, b) with 0 <= a, b <= max_operand. The unordered pair {a, b} decides whether it is trained
on or evaluated, for all three operations together: neither `7 + 12` nor `19 - 12` ... of an evaluated `12 + 7` and
its operands is ever trained on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
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
    """Whether a pair of operands, in either order, belongs to evaluation. None does that is a column of a longer sum or
    difference: those are worked out in training."""
    low, high = np.minimum(a, b).astype(np.uint64), np.maximum(a, b).astype(np.uint64)
    is_column = (low < np.uint64(10)) & (high < np.uint64(20))
    return (mix(mix(low + SALT) + high) % np.uint64(EVALUATION_SHARE) == 0) & ~is_column


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


def worked(operation: I64, a: I64, b: I64) -> NDArray[np.str_]:
    """Each problem worked out in lines, one true equation a line.

    Sums and differences go by columns from the ones, with what is carried or borrowed last: 47 + 38 is `7+8=15` and
    `4+3+1=8`. A difference below zero is turned around first: `-(47-38)`. A product is the sum of those with each digit
    of the second factor."""
    texts = np.full(len(a), "", dtype=np.str_)
    for index, work in ((0, _add_columns), (1, _subtract_columns), (2, _multiply_digits)):
        chosen = operation == index
        if chosen.any():
            lines = work(a[chosen], b[chosen])
            texts = texts.astype(f"U{max(texts.dtype.itemsize, lines.dtype.itemsize) // 4}")
            texts[chosen] = lines
    return texts


def _add_columns(a: I64, b: I64) -> NDArray[np.str_]:
    carry, texts = np.zeros_like(a), np.full(len(a), "", dtype=np.str_)
    for power, is_written in _columns(np.maximum(a, b)):
        x, y = a // power % 10, b // power % 10
        total = x + y + carry
        line = _joined(x, "+", y, np.where(carry > 0, "+1", ""), "=", total, "\n")
        texts = np.strings.add(texts, np.where(is_written, line, ""))
        carry = total // 10
    return np.strings.rstrip(texts)


def _subtract_columns(a: I64, b: I64) -> NDArray[np.str_]:
    large, small = np.maximum(a, b), np.minimum(a, b)
    borrow = np.zeros_like(a)
    texts = np.where(a < b, _joined("-(", large, "-", small, ")\n"), "")
    for power, is_written in _columns(large):
        x, y = large // power % 10, small // power % 10
        lent = np.where(x - borrow < y, 10, 0)
        left = x + lent - y - borrow
        line = _joined(x + lent, "-", y, np.where(borrow > 0, "-1", ""), "=", left, "\n")
        texts = np.strings.add(texts, np.where(is_written, line, ""))
        borrow = lent // 10
    return np.strings.rstrip(texts)


def _multiply_digits(a: I64, b: I64) -> NDArray[np.str_]:
    texts, addends = np.full(len(a), "", dtype=np.str_), np.full(len(a), "", dtype=np.str_)
    for power, is_written in _columns(b):
        factor = b // power % 10 * power
        line = _joined(a, "*", factor, "=", a * factor, "\n")
        texts = np.strings.add(texts, np.where(is_written, line, ""))
        sign = np.where(addends == "", "", "+")
        addends = np.strings.add(addends, np.where(is_written, _joined(sign, a * factor), ""))
    total = np.where(b >= 10, _joined(addends, "=", a * b), "")
    return np.strings.rstrip(np.strings.add(texts, total))


def _columns(numbers: I64) -> Iterator[tuple[int, NDArray[np.bool_]]]:
    """(power of ten, which numbers have a digit there) from the ones to the longest number's first digit."""
    power = 1
    while power == 1 or (numbers >= power).any():
        yield power, (numbers >= power) | (power == 1)
        power *= 10


def _joined(*parts: I64 | NDArray[np.str_] | str) -> NDArray[np.str_]:
    """Numbers and texts one after the other."""
    text = np.asarray("")
    for part in parts:
        text = np.strings.add(text, np.asarray(part).astype(np.str_))
    return text


def verify_worked(lines: NDArray[np.str_], works: NDArray[np.str_]) -> NDArray[np.bool_]:
    """Whether each work, read from its text, has only true equations and ends in the result of its line `a op b =
    c`."""
    pairs = zip(lines.tolist(), works.tolist(), strict=True)
    return verify_lines(lines) & np.array([_is_work_of(line, work) for line, work in pairs], dtype=bool)


def _is_work_of(line: str, work: str) -> bool:
    a, sign, b, _, result = line.split(" ")
    turned, equations = f"-({b}-{a})", work.split("\n")
    if is_turned := equations[0] == turned:
        equations = equations[1:]
    results = []
    for equation in equations:
        if not (parts := re.fullmatch(r"(?:(\d+)\*(\d+)|(\d+(?:[+-]\d+)*))=(\d+)", equation)):
            return False
        first, factor, total, right = parts.groups()
        left = sum(map(int, re.findall(r"[+-]?\d+", total))) if total else int(first) * int(factor)
        if left != int(right) or first not in (None, a):
            return False
        results.append(left)
    last, before = results[-1], results[:-1]
    if sign != "*":  # every column but the last leaves its ones
        last = last * 10 ** len(before) + sum(value % 10 * 10**column for column, value in enumerate(before))
    return last == (-int(result) if is_turned else int(result))


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
