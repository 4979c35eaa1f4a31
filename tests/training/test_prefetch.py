"""What is read ahead: the same, in the same order, whatever is asked for; errors come with the step that has them."""

import threading

import pytest

from tasks.training.loop.prefetch import Prefetcher


def test_the_next_step_is_read_before_it_is_asked_for():
    loaded: dict[int, threading.Event] = {number: threading.Event() for number in range(5)}

    def load(number: int) -> int:
        loaded[number].set()
        return number * 10

    ahead = Prefetcher(load, lambda number: number + 1 if number < 4 else None)
    for number in range(5):
        assert ahead.read(number) == number * 10
        if number < 4:
            assert loaded[number + 1].wait(20)
    ahead.close()


def test_a_step_that_was_not_foreseen_is_read_then():
    ahead = Prefetcher(lambda number: [number], lambda number: number + 1)
    assert [ahead.read(number) for number in (0, 1, 5, 6, 2, 2)] == [[0], [1], [5], [6], [2], [2]]
    ahead.close()


def test_an_error_surfaces_at_its_own_step():
    def load(number: int) -> int:
        if number == 2:
            raise ValueError("step 2 cannot be read")
        return number

    ahead = Prefetcher(load, lambda number: number + 1)
    assert (ahead.read(0), ahead.read(1)) == (0, 1)
    with pytest.raises(ValueError, match="step 2 cannot be read"):
        ahead.read(2)
    assert ahead.read(3) == 3
    ahead.close()
    assert not any(thread.name.startswith("prefetch") for thread in threading.enumerate())
