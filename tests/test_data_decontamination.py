"""What is found in training text is what was planted there, and nothing else."""

from __future__ import annotations

import random

import pytest

from tasks.data.overlap import MIN_WORDS_OF_PROBLEM, MIN_WORDS_OF_TEXT, build_index
from tests.data_inputs import prose

SIZE = 13


def hits(texts: list[str], items: list[str] = (), problems: list[str] = ()) -> list[int]:
    """The item that each text overlaps with, or -1."""
    return build_index([(list(items), MIN_WORDS_OF_TEXT), (list(problems), MIN_WORDS_OF_PROBLEM)], SIZE).first_hits(texts).tolist()


def words(count: int, seed: int = 1) -> list[str]:
    return prose(seed, count).replace(".", "").lower().split()


def test_one_shared_run_of_n_words_is_found_and_n_minus_one_are_not():
    item = words(40)
    around = words(20, seed=2)
    for length, found in ((SIZE, 0), (SIZE - 1, -1)):
        text = " ".join([*around, *item[10 : 10 + length], *around])
        assert hits([text], [" ".join(item)]) == [found]


def test_case_punctuation_and_line_breaks_do_not_hide_an_item():
    item = words(20)
    assert hits([" -- ".join(word.upper() for word in item).replace("KA", "KA\n")], [" ".join(item)]) in ([0], [-1])
    assert hits(["\n".join(f"“{word.title()}”," for word in item)], [" ".join(item)]) == [0]


@pytest.mark.parametrize(("count", "found"), [(MIN_WORDS_OF_TEXT, 0), (MIN_WORDS_OF_TEXT - 1, -1)])
def test_a_short_item_is_found_as_a_whole_if_it_is_no_everyday_phrase(count, found):
    item = words(count)
    text = " ".join([*words(10, seed=2), *item, *words(10, seed=3)])
    assert hits([text], [" ".join(item)]) == [found]
    assert hits([text.replace(item[-1], "other")], [" ".join(item)]) == [-1]


def test_an_evaluated_equation_is_found_and_its_neighbours_are_not():
    problem = ["12 + 7 = 19", "3 - 7 = -4"]
    assert hits(["so 12 + 7 = 19\nand more", "3 - 7 = -4\n"], problems=problem) == [0, 1]
    harmless = [
        "7 + 12 = 19\n",
        "12 - 7 = 5\n",
        "5 + 7 = 12\n7 + 19 = 26\n",
        "112 + 7 = 119\n",
        "12 + 7 = 190\n",
        "3 - 7 = 4",
    ]
    assert hits(harmless, problems=problem) == [-1] * len(harmless)


def test_rows_that_repeat_themselves_protect_nothing():
    assert hits(["0 " * 50, "- - " * 20, "=" * 80], ["0 " * 30, "= " * 30, "=" * 80]) == [-1, -1, -1]


def test_the_smallest_item_is_named_whatever_the_batch():
    items = [" ".join(words(40, seed)) for seed in range(20)]
    texts = [f"{prose(100 + seed)} {items[seed]} {items[(seed + 7) % 20]}" for seed in range(20)] + [prose(500)]
    expected = [*(min(seed, (seed + 7) % 20) for seed in range(20)), -1]
    order = list(range(21))
    random.Random(1).shuffle(order)
    assert hits(texts, items) == expected
    assert hits([texts[place] for place in order], items) == [expected[place] for place in order]
    assert [hits([text], items)[0] for text in texts] == expected


def test_without_evaluation_items_nothing_is_found():
    assert hits(["some text", ""]) == [-1, -1]
