"""Instructions about form: one answer on each side of every check, and the records of IFEval."""

from __future__ import annotations

import gzip
import json
import time

import pytest

from tasks.data.prompts.constraints import CHECKS, constraint_problem, satisfies
from tests.support.data_inputs import SHARED_DATA

CASES = {
    "keywords:existence": ({"keywords": ["oak", "Elm"]}, "An OAK and an elm.", "An oak."),
    "keywords:frequency": ({"keyword": "story", "frequency": 2, "relation": "at least"}, "Story, story", "a story"),
    "keywords:forbidden_words": ({"forbidden_words": ["rain"]}, "the train", "The Rain fell"),
    "keywords:letter_frequency": (
        {"letter": "!", "let_frequency": 2, "let_relation": "less than"},
        "one!",
        "one! two!",
    ),
    "length_constraints:number_words": ({"num_words": 3, "relation": "at least"}, "one two three", "one two"),
    "length_constraints:number_sentences": (
        {"num_sentences": 2, "relation": "less than"},
        "One is one...",
        "One. Two!",
    ),
    "length_constraints:number_paragraphs": ({"num_paragraphs": 2}, "one\n***\ntwo", "one\n\ntwo"),
    "length_constraints:nth_paragraph_first_word": (
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "weekend"},
        "One.\n\nWeekend, at last.",
        "Weekend.\n\nOne.",
    ),
    "detectable_content:number_placeholders": ({"num_placeholders": 2}, "[name] at [place]", "[name] at [\n1]"),
    "detectable_content:postscript": ({"postscript_marker": "P.P.S"}, "Bye\nP.P.S. more", "Bye. P.S. more"),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, "* one\n- two", "* one\n**two**"),
    "detectable_format:constrained_response": ({}, "My answer is no.", "No."),
    "detectable_format:number_highlighted_sections": ({"num_highlights": 2}, "*one* and **two**", "*one* and ** **"),
    "detectable_format:multiple_sections": (
        {"section_spliter": "PART", "num_sections": 2},
        "PART 1\na\nPART 2\nb",
        "PART 1\na",
    ),
    "detectable_format:json_format": ({}, '```json\n{"a": [1]}\n```', "{'a': 1}"),
    "detectable_format:title": ({}, "<<on oaks>>\ntext", "<on oaks>"),
    "combination:two_responses": ({}, "one\n******\ntwo", "one\n******\none"),
    "combination:repeat_prompt": ({"prompt_to_repeat": "Say hello."}, "say hello. Hello!", "Hello! Say hello."),
    "startend:end_checker": ({"end_phrase": "Any questions?"}, 'Yes. "Any questions?"', "Any questions? No."),
    "startend:quotation": ({}, '"yes"', 'yes"'),
    "change_case:english_capital": ({}, "ALL 3 OF US", "All 3 of us"),
    "change_case:english_lowercase": ({}, "all 3 of us", "All 3 of us"),
    "change_case:capital_word_frequency": (
        {"capital_frequency": 2, "capital_relation": "at least"},
        "NO and YES",
        "NO and yes",
    ),
    "punctuation:no_comma": ({}, "one and two", "one, two"),
}


@pytest.mark.parametrize("name", CHECKS)
def test_every_check_has_an_answer_on_each_side(name):
    arguments, follows, fails = CASES[name]
    assert constraint_problem(name, arguments) == ""
    assert satisfies(follows, name, arguments) and not satisfies(fails, name, arguments)
    assert not satisfies("", name, arguments) and not satisfies(" \n", name, arguments)


@pytest.mark.parametrize("text", ["Bye\n**P.S.** more", "Bye\n> P. S. more", "Bye\n  p.s. more"])
def test_a_postscript_may_stand_in_markdown(text):
    assert satisfies(text, "detectable_content:postscript", {"postscript_marker": "P.S."})


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ("******\none\n******\ntwo\n******", True),
        ("one\n******\n******\ntwo", False),
        ("******\none", False),
        ("one******", False),
        ("one\n******\ntwo\n******\nthree", False),
    ],
)
def test_a_mark_at_an_end_divides_no_responses(text, is_right):
    assert satisfies(text, "combination:two_responses", {}) is is_right


@pytest.mark.parametrize(
    ("text", "num_sentences"),
    [
        ("Pi is 3.14159. It costs 2.50 dollars.", 2),
        ("Version 1.2.3.4 of Foo.", 1),
        ("你好。今天天气很好。我们去公园吧。", 3),
        ("क्या हाल है? सब ठीक है।", 2),
        ("So... it is?! Yes", 3),
        ('He said "No." Then (he left.) And **now.** We `wait.` *', 4),
        ("One\nline. --- \n...", 1),
        ("***", 0),
        ("a\ud800. b.", 2),
    ],
)
def test_a_sentence_ends_where_white_space_follows_or_its_mark_is_wide(text, num_sentences):
    name = "length_constraints:number_sentences"
    assert satisfies(text, name, {"num_sentences": num_sentences, "relation": "at least"})
    assert satisfies(text, name, {"num_sentences": num_sentences + 1, "relation": "less than"})
    assert not satisfies(text, name, {"num_sentences": num_sentences + 1, "relation": "at least"})


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        ("language:response_language", {"language": "kn"}, "unsupported_constraint"),
        ("length_constraints:number_words", {"num_words": 3}, "malformed_constraint"),
        ("length_constraints:number_words", {"num_words": "3", "relation": "at least"}, "malformed_constraint"),
        ("length_constraints:number_words", {"num_words": True, "relation": "at least"}, "malformed_constraint"),
        ("length_constraints:number_words", {"num_words": 3, "relation": "around"}, "malformed_constraint"),
        ("punctuation:no_comma", {"more": 1}, "malformed_constraint"),
        ("keywords:existence", {"keywords": []}, "malformed_constraint"),
        ("keywords:existence", {"keywords": [1]}, "malformed_constraint"),
        ("startend:end_checker", {"end_phrase": ""}, "malformed_constraint"),
    ],
)
def test_an_instruction_that_cannot_be_checked_has_a_reason(name, arguments, reason):
    assert constraint_problem(name, arguments) == reason


@pytest.mark.parametrize("part", ["*", "**a", "[", "<<a", "\n", " ", "a.", "``` ", "***", "- ", "\n\n ", '"'])
def test_checks_of_a_long_answer_take_no_time(part):
    text = part * (200_000 // len(part)) + "a"
    started = time.process_time()
    for name, (arguments, _, _) in CASES.items():
        satisfies(text, name, arguments)
    assert time.process_time() - started < 5.0


@pytest.mark.skipif(not SHARED_DATA.exists(), reason="no shared data here")
def test_all_instructions_of_ifeval_but_the_language_can_be_checked():
    with gzip.open(SHARED_DATA / "bench" / "ifeval.jsonl.gz", "rt", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    problems = {
        (name, constraint_problem(name, arguments))
        for record in records
        for name, arguments in zip(record["instruction_id_list"], record["kwargs"], strict=True)
    }
    assert {name for name, problem in problems if problem} == {"language:response_language"}
    assert {name for name, _ in problems} - {"language:response_language"} == set(CHECKS) == set(CASES)
