"""Every rule of the heuristic filter, one document on each side of its bound."""

from __future__ import annotations

import numpy as np
import pytest

from tasks.data.heuristics import REASONS, measure, name_reasons
from tests.data_inputs import prose

BOUNDS = {
    "min_words": 5, "max_words": 40, "min_mean_word_length": 3.0, "max_mean_word_length": 10.0, "max_symbol_word_ratio": 0.1,
    "max_bullet_line_share": 0.5, "max_ellipsis_line_share": 0.25, "min_alphabetic_word_share": 0.8, "max_duplicate_line_share": 0.3,
    "max_top_bigram_share": 0.2,
}  # fmt: skip
TEN = "alpha bravo charlie delta echo foxtrot golf hotel india juliet"
LINES = ["green apples fall down", "seven boats sail home", "old clocks tick slowly", "my cat sleeps outside", "three birds sing loud"]
SIDES = {
    # reason: (a document just inside the bound, one just outside)
    "too_few_words": ("alpha bravo charlie delta echo", "alpha bravo charlie delta"),
    "too_many_words": (" ".join(f"word{n:03d}" for n in range(40)), " ".join(f"word{n:03d}" for n in range(41))),
    "words_too_short": ("abc def ghi jkl mno", "abc def ghi jkl mn"),
    "words_too_long": ("abcdefghij bcdefghijk cdefghijkl defghijklm efghijklmn", "abcdefghij bcdefghijk cdefghijkl defghijklm efghijklmno"),
    "too_many_symbols": (f"# {TEN}", f"# # {TEN}"),
    "too_many_bullet_lines": (
        "- alpha bravo\n• charlie delta\necho foxtrot\ngolf hotel",
        "- alpha bravo\n• charlie delta\n* echo foxtrot\ngolf hotel",
    ),
    "too_many_ellipsis_lines": (
        "\n".join([f"{LINES[0]}...", *LINES[1:4], "", ""]),
        "\n".join([f"{LINES[0]} {LINES[4]}...", f"{LINES[1]} {TEN}…", *LINES[2:4]]),
    ),
    "too_few_alphabetic_words": (
        "alpha bravo charlie delta echo foxtrot golf hotel 1234 5678",
        "alpha bravo charlie delta echo foxtrot golf 9012 1234 5678",
    ),
    "repeated_lines": ("\n".join(["once", *LINES, "once"]), "\n".join([*LINES[:3], *LINES[:2]])),
    "repeated_bigram": (f"good day {TEN} good day", f"good day {TEN} good day good day"),
}


def reason(text: str, is_code: bool = False) -> str:
    return name_reasons([text], np.array([is_code]), BOUNDS)[0]


def test_every_reason_has_a_case():
    assert set(SIDES) == set(REASONS)


@pytest.mark.parametrize("name", REASONS)
def test_each_rule_holds_on_one_side_and_breaks_on_the_other(name):
    inside, outside = SIDES[name]
    assert (reason(inside), reason(outside)) == ("", name)


@pytest.mark.parametrize("name", REASONS)
def test_code_is_held_to_the_word_counts_alone(name):
    assert reason(SIDES[name][1], is_code=True) == (name if name in ("too_few_words", "too_many_words") else "")


def test_the_first_broken_rule_in_order_is_the_reason():
    assert reason("# # #") == "too_few_words"


def test_scripts_without_spaces_are_not_held_to_word_lengths():
    assert reason("学而时习之不亦说乎有朋自远方来") == ""
    assert np.isnan(measure(["学而时习之不亦说乎 and"]).mean_word_length[0])


def test_measures_of_a_text_do_not_depend_on_its_neighbours():
    texts = [
        "",
        *[side for sides in SIDES.values() for side in sides],
        "...",
        "#",
        *[prose(seed) for seed in range(5)],
        "中文",
        "\n\n",
        "a\n...",
    ]
    together, backwards = measure(texts), measure(texts[::-1])
    for name, values in vars(together).items():
        alone = np.array([getattr(measure([text]), name)[0] for text in texts])
        np.testing.assert_array_equal(values, alone, err_msg=name)
        np.testing.assert_array_equal(values, getattr(backwards, name)[::-1], err_msg=name)


def test_repeated_lines_are_weighed_by_characters():
    text = "long line of some words\nx\nx\nx\n"
    assert measure([text]).duplicate_line_share[0] == pytest.approx(2 / (len("long line of some words") + 3))


def test_three_dots_are_one_symbol_and_six_are_two():
    assert measure(["alpha... bravo...... charlie …#"]).symbol_word_ratio[0] == pytest.approx(5 / 3)
