"""Every rule of the heuristic filter, one document on each side of its bound; every measure beside a plain one over
real and odd texts."""

from __future__ import annotations

import pydoc_data.topics
import random
import re
import zipfile

import numpy as np
import pytest

from configs.load import load_scale
from tasks.data.filtering.heuristics import RULES, flat_bounds, measure, name_reasons
from tasks.data.scoring.language_id import identify_languages
from tests.data.filtering.text_oracle import measures_of, repeated_ngrams_share, top_ngram_share
from tests.support.data_inputs import RECIPE, SHARED_DATA, prose

OPEN = {
    "min_words": 0,
    "min_math_words": 0,
    "min_code_words": 0,
    "max_words": 40,
    "min_mean_word_length": 0.0,
    "max_mean_word_length": 99.0,
    "max_symbol_word_ratio": 9.0,
    "max_bullet_line_share": 1.0,
    "max_ellipsis_line_share": 1.0,
    "min_alphabetic_word_share": 0.0,
    "min_math_alphabetic_word_share": 0.0,
    "min_stop_words": 0,
    "max_repeated_line_share": 1.0,
    "max_repeated_line_char_share": 1.0,
    "max_repeated_paragraph_share": 1.0,
    "max_repeated_paragraph_char_share": 1.0,
    **{f"max_top_ngram_shares.{n}": 1.0 for n in range(3)},
    **{f"max_repeated_ngram_shares.{n}": 1.0 for n in range(6)},
    "min_sentences": 0,
    "max_curly_bracket_share": 1.0,
    "max_lorem_ipsum": 9,
    "max_policy_line_share": 1.0,
    "min_terminated_line_share": 0.0,
    "max_short_line_share": 1.0,
}
"""Only max_words could refuse something: each case sets the bound of its own rule."""
TEN = "alpha bravo charlie delta echo foxtrot golf hotel india juliet"
LINES = [
    "green apples fall down",
    "seven boats sail home",
    "old clocks tick slowly",
    "my cat sleeps outside",
    "three birds sing loud",
]
LONG = "this line has more than thirty characters in it"
SIDES = {
    # reason: (bound, a document just inside it, one just outside)
    "too_few_words": (5, "alpha bravo charlie delta echo", "alpha bravo charlie delta"),
    "too_many_words": (40, " ".join(f"word{n:03d}" for n in range(40)), " ".join(f"word{n:03d}" for n in range(41))),
    "words_too_short": (3.0, "abc def ghi jkl mno", "abc def ghi jkl mn"),
    "words_too_long": (5.0, "abcde fghij klmno", "abcde fghij klmnop"),
    "too_many_hash_signs": (0.1, f"{TEN} #", f"{TEN} # #"),
    "too_many_ellipses": (0.1, f"{TEN}...", f"{TEN}... …"),
    "too_many_bullet_lines": (0.5, "- alpha\n• charlie\necho\ngolf", "- alpha\n• charlie\n* echo\ngolf"),
    "too_many_ellipsis_lines": (
        0.25,
        "\n".join(["one...", *LINES[1:4], "", ""]),
        "\n".join(["one...", "two…", *LINES[2:4]]),
    ),
    "too_few_alphabetic_words": (
        0.8,
        "alpha bravo charlie delta echo foxtrot golf hotel 1234 5678",
        "alpha bravo charlie 4 5678",
    ),
    "too_few_stop_words": (2, "The end of alpha", "the alpha the bravo"),
    "repeated_lines": (0.25, "\n".join(["x", *LINES[:2], "x"]), "\n".join(["x", LINES[1], "x"])),
    "repeated_line_characters": (0.2, "aaaa\nbbbb\ncccc\ndddd\naaaa", "aaaa\nbbbb\ncccc\naaaa"),
    "repeated_paragraphs": (0.25, "x\ny\n\nz\n\nw\n\nx\ny", "x\ny\n \nz\n\nx\ny"),
    "repeated_paragraph_characters": (0.25, "aa\n\nbb\n\ncc\n\naa", "aa\n\nbb\n\naa"),
    "frequent_2gram": (0.2, f"good day {TEN} good day", f"good day {TEN} good day good day"),
    "frequent_3gram": (0.35, f"a good day {TEN} a good day", f"a good day {TEN} a good day a good day a good day"),
    "frequent_4gram": (
        0.35,
        f"such a good day {TEN} such a good day",
        f"such a good day {TEN} such a good day such a good day",
    ),
    **{
        f"repeated_{size}grams": (
            0.3,
            f"{' '.join(TEN.split()[: size - 1])} {LINES[1]} {' '.join(TEN.split()[: size - 1])}",
            f"{' '.join(TEN.split()[:size])} x {' '.join(TEN.split()[:size])}",
        )
        for size in range(5, 11)
    },
    "too_few_sentences": (3, "One is 3.14 e. Two! And three", "One is 3.14 e... Two."),
    "curly_brackets": (0.1, "{345678901", "{34567890"),
    "lorem_ipsum": (0, "lorem\nipsum", "Lorem Ipsum dolor"),
    "policy_lines": (0.25, f"{LONG}\nb\nc\nour Privacy Policy", f"{LONG}\nb\nYou must enable JavaScript"),
    "unterminated_lines": (0.5, "one\ntwo.", "one.\ntwo\nthree"),
    "short_lines": (0.5, f"short\n{'x' * 30}", f"short\n{'x' * 29}\n{LONG}"),
}
REASONS = tuple(dict.fromkeys(rule.reason for rule in RULES))
BOUND_OF = {rule.reason: rule.bound for rule in reversed(RULES)}


def reason(text: str, bounds: dict[str, float], domain: str = "web") -> str:
    return name_reasons([text], ["en"], [domain], bounds)[0]


def test_every_reason_has_a_case_and_every_bound_of_the_recipe_a_rule():
    assert list(SIDES) == list(REASONS)
    assert {rule.bound for rule in RULES} == set(OPEN) == set(flat_bounds(RECIPE.filter.heuristics))


@pytest.mark.parametrize("name", REASONS)
def test_each_rule_holds_on_one_side_and_breaks_on_the_other(name):
    bound, inside, outside = SIDES[name]
    bounds = OPEN | {BOUND_OF[name]: bound}
    assert (reason(inside, bounds), reason(outside, bounds)) == ("", name)


@pytest.mark.parametrize("domain", ["code", "issue"])
@pytest.mark.parametrize("name", REASONS)
def test_code_and_threads_are_held_to_the_word_counts_alone(name, domain):
    bound, _, outside = SIDES[name]
    held = {"too_many_words"} if domain == "code" else {"too_few_words", "too_many_words"}
    assert reason(outside, OPEN | {BOUND_OF[name]: bound}, domain) == (name if name in held else "")


def test_the_first_broken_rule_in_order_is_the_reason():
    assert reason("# # #", OPEN | {"min_words": 1, "max_symbol_word_ratio": 0.0, "min_sentences": 3}) == "too_few_words"


def test_scripts_without_spaces_are_not_held_to_word_lengths():
    assert reason("学而时习之不亦说乎有朋自远方来", OPEN | {"min_mean_word_length": 3.0}) == ""
    assert np.isnan(measure(["学而时习之不亦说乎 and"], ["zh"])["mean_word_length"][0])


def test_stop_words_are_those_of_the_documents_language_and_a_language_without_a_list_passes():
    measures = measure(
        ["Der Hund und die Katze sind im Haus", "the dog and the cat", "the dog and the cat"], ["de", "de", "xx"]
    )
    np.testing.assert_array_equal(measures["num_stop_words"], [3, 0, np.nan])


@pytest.mark.parametrize(
    ("first", "num_chars"), [("ก", 5), ("ກ", 5), ("က", 5), ("ក", 5), ("あ", 2), ("一", 1), ("а", 1)]
)
def test_ngrams_of_scripts_without_spaces_are_as_long_as_words(first, num_chars):
    """Taken for words, characters repeat themselves everywhere: every Thai, Lao, Burmese and Khmer page was dropped."""
    generator = random.Random(46)
    letters = [chr(ord(first) + number) for number in range(20)]
    runs = ["".join(generator.choices(letters, k=generator.randint(4, 60))) for _ in range(8)]
    space = " " if num_chars == 1 else ""
    texts = [space.join("".join(generator.choices(runs, k=6))) for _ in range(5)]
    measures = measure(["a b a b", *texts, "the end"], ["xx"] * 7)
    for name, values in measures.items():
        if (size := re.search(r"(\d+)grams?_share", name)) is not None:
            plain = top_ngram_share if name.startswith("top") else repeated_ngrams_share
            assert values[1:6] == pytest.approx([plain(text, int(size[1]) * num_chars) for text in texts]), name


@pytest.mark.parametrize("language", ["th", "lo"])
def test_languages_without_sentence_marks_are_not_held_to_them(language):
    bounds = OPEN | {"min_sentences": 3, "min_terminated_line_share": 0.5}
    broken = name_reasons(["one two\nthree"] * 2, [language, "en"], ["web"] * 2, bounds)
    assert broken == ["", "too_few_sentences"]


def test_korean_syllables_are_no_short_words():
    bounds = OPEN | {"min_mean_word_length": 3.0}
    assert name_reasons(["모든 인간은 태어날"] * 2, ["ko", "en"], ["web"] * 2, bounds) == ["", "words_too_short"]


@pytest.mark.parametrize("mark", "។៕།༎᙮᠃።॥။")
def test_marks_of_all_scripts_end_sentences_and_lines(mark):
    measures = measure([f"ab{mark} cd{mark}\nef{mark}"], ["xx"])
    assert (measures["num_sentences"][0], measures["terminated_line_share"][0]) == (3, 1)


@pytest.mark.skipif(not SHARED_DATA.exists(), reason="the Declaration of Human Rights is not here")
def test_no_language_is_lost_to_rules_made_for_english():
    """One text in all languages: what a rule of the papers drops of it, it drops for its script."""
    full = flat_bounds(load_scale("full").data.recipe.filter.heuristics)
    codes = (
        "eng deu fra rus arb heb hin ben tam tel mal kor jpn cmn_hans cmn_hant tha lao khm mya bod amh hye kat "
        "vie tur fin haw"
    )
    with zipfile.ZipFile(SHARED_DATA / "multilingual" / "udhr2.zip") as archive:
        names = [name for code in codes.split() if (name := f"udhr2/{code}.txt") in archive.namelist()]
        texts = [archive.read(name).decode() for name in names]
    languages, _ = identify_languages(texts, 2000, "")
    dropped = name_reasons(texts, languages, ["multilingual"] * len(texts), full)
    assert not {name: reason for name, reason in zip(names, dropped, strict=True) if reason} and len(names) > 20


TEXTS = [
    "",
    "...",
    "#",
    "\n\n",
    "a\n...",
    "中文",
    "a a a a a a a a a a a a",
    "  \n x \n\n\n x \n x",
    'Wait... what?! "Yes." (No.) 3.14 e.g. Dr',
    "甲。乙！丙",
    "one.\n\ntwo.\n\none.\n\ntwo.",
    "use cookies\njava\nscript",
    "…",
    ". a . b .",
    "x." + "\u2003" + "y",
    "One. " * 9 + "and on",
    "One. " * 10 + "and on",
    "(In brackets.)",
    "a teaser [...]",
    "-Yes.\n- no\n*\n- it is.",
    *[side for _, *sides in SIDES.values() for side in sides],
    *[prose(seed) for seed in range(5)],
    *[prose(1, 60) + prose(2, 30) + prose(1, 40)],
    *[text[:5000] for _, text in sorted(pydoc_data.topics.topics.items())[:40]],
]


def test_every_measure_equals_the_plain_one():
    languages = ["en" if number % 3 else "de" for number in range(len(TEXTS))]
    measures = measure(TEXTS, languages)
    for number, (text, language) in enumerate(zip(TEXTS, languages, strict=True)):
        expected = measures_of(text, language)
        if any(ord(character) >= 0x2E80 for character in text):
            expected["mean_word_length"] = measures["mean_word_length"][number]
        assert set(expected) == set(measures)
        for name, value in expected.items():
            assert measures[name][number] == pytest.approx(value, nan_ok=True), (name, text[:200])


def test_measures_of_a_text_do_not_depend_on_its_neighbours():
    languages = ["en"] * len(TEXTS)
    together, backwards = measure(TEXTS, languages), measure(TEXTS[::-1], languages)
    alone = [measure([text], ["en"]) for text in TEXTS]
    for name, values in together.items():
        np.testing.assert_array_equal(values, [one[name][0] for one in alone], err_msg=name)
        np.testing.assert_array_equal(values, backwards[name][::-1], err_msg=name)
