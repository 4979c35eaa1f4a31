"""Checks instructions about the form of an answer: those of IFEval (arXiv 2311.07911, table 4) but the language.

Each check has the arguments that a record of IFEval gives it, by name. All are pure and linear in the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from inspect import signature

from tasks.data.text.text_lines import kinds_of, sentence_ends
from tasks.data.text.words import code_points

AT_LEAST, LESS_THAN = "at least", "less than"
TYPES = {"str": str, "int": int, "list[str]": list}
RELATIONS = ("relation", "let_relation", "capital_relation")
RESPONSES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
EMPHASIS = re.compile(r"[*_`]")
PARAGRAPH_MARK, RESPONSE_MARK, FENCE = "***", "******", "```"

Arguments = Mapping[str, object]


def constraint_problem(name: str, arguments: Arguments) -> str:
    """Why an instruction cannot be checked, as a reason; empty where it can."""
    if name not in CHECKS:
        return "unsupported_constraint"
    wanted = {key: TYPES[str(each.annotation)] for key, each in list(signature(CHECKS[name]).parameters.items())[1:]}
    is_typed = set(arguments) == set(wanted) and all(type(arguments[key]) is kind for key, kind in wanted.items())
    if not is_typed or any(arguments[key] not in (AT_LEAST, LESS_THAN) for key in RELATIONS if key in wanted):
        return "malformed_constraint"
    listed = [part for value in arguments.values() if isinstance(value, list) for part in value or [None]]
    is_said = all(isinstance(part, str) for part in listed) and "" not in [*arguments.values(), *listed]
    return "" if is_said else "malformed_constraint"


def satisfies(text: str, name: str, arguments: Arguments) -> bool:
    """Whether an answer follows an instruction that `constraint_problem` has no objection to; an empty one follows
    none."""
    return bool(text.strip()) and CHECKS[name](text, **arguments)


def _holds(number: int, relation: str, bound: int) -> bool:
    return number >= bound if relation == AT_LEAST else number < bound


def _without_blanks(text: str) -> str:
    return "".join(text.split()).upper()


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def _has_word(text: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE) is not None


def has_keywords(text: str, keywords: list[str]) -> bool:
    return all(keyword.lower() in text.lower() for keyword in keywords)


def has_keyword_often(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return _holds(text.lower().count(keyword.lower()), relation, frequency)


def has_no_forbidden_word(text: str, forbidden_words: list[str]) -> bool:
    return not any(_has_word(text, word) for word in forbidden_words)


def has_letter_often(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _holds(text.lower().count(letter.lower()), let_relation, let_frequency)


def has_words(text: str, num_words: int, relation: str) -> bool:
    return _holds(len(_words(text)), relation, num_words)


def has_sentences(text: str, num_sentences: int, relation: str) -> bool:
    """Sentences end as the filters' do (text_lines), so 3.14 ends none; one has a word. Markdown's marks may stand
    after the end."""
    plain = EMPHASIS.sub("", text)
    points, starts = code_points([plain])
    stops = [*(sentence_ends(kinds_of(points), starts) + 1).tolist(), len(plain)]
    parts = (plain[start:stop] for start, stop in zip([0, *stops], stops, strict=False))
    return _holds(sum(1 for part in parts if _words(part)), relation, num_sentences)


def has_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Divided by `***`; one at the start or the end divides nothing."""
    parts = [part.strip() for part in text.split(PARAGRAPH_MARK)]
    return all(parts[1:-1]) and len([part for part in parts if part]) == num_paragraphs


def begins_nth_paragraph(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Divided by empty lines."""
    parts = [part for part in re.split(r"\n\s*\n", text) if part.strip()]
    if len(parts) != num_paragraphs or not 1 <= nth_paragraph <= len(parts):
        return False
    return [word.lower() for word in _words(parts[nth_paragraph - 1])[:1]] == [first_word.lower()]


def has_placeholders(text: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]\n]+\]", text)) >= num_placeholders


def has_postscript(text: str, postscript_marker: str) -> bool:
    """At the start of a line, after Markdown's marks if there are any; `P. S.` is `P.S.`."""
    marker = _without_blanks(postscript_marker)
    return any(_without_blanks(line).lstrip("*_#>-").startswith(marker) for line in text.splitlines())


def has_bullets(text: str, num_bullets: int) -> bool:
    return len(re.findall(r"^[ \t]*(?:\*(?!\*)|-)[ \t]*\S", text, re.MULTILINE)) == num_bullets


def is_one_of_the_responses(text: str) -> bool:
    return any(response in text for response in RESPONSES)


def has_highlights(text: str, num_highlights: int) -> bool:
    marked = re.findall(r"\*\*([^*\n]+)\*\*|\*([^*\n]+)\*", text)
    return sum(1 for two, one in marked if _words(two or one)) >= num_highlights


def has_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"{re.escape(section_spliter)}[ \t]*\d+", text)) >= num_sections


def is_json(text: str) -> bool:
    """By itself, or as the only block."""
    written = text.strip()
    if written.startswith(FENCE) and written.endswith(FENCE):
        _, _, written = written.removesuffix(FENCE).partition("\n")
    try:
        json.loads(written)
    except (ValueError, RecursionError):
        return False
    return True


def has_title(text: str) -> bool:
    return any(_words(title) for title in re.findall(r"<<([^\n<>]+)>>", text))


def has_two_responses(text: str) -> bool:
    """Divided by `******`; one at the start or the end divides nothing."""
    first, *others = [part.strip() for part in text.split(RESPONSE_MARK)]
    inner, responses = others[:-1], [part for part in (first, *others) if part]
    return all(inner) and len(responses) == 2 and responses[0] != responses[1]


def repeats_prompt(text: str, prompt_to_repeat: str) -> bool:
    """At the start, and goes on after it."""
    begun, wanted = text.strip().lower(), prompt_to_repeat.strip().lower()
    return begun.startswith(wanted) and len(begun) > len(wanted)


def ends_with(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def is_quoted(text: str) -> bool:
    quoted = text.strip()
    return len(quoted) > 2 and quoted[0] == quoted[-1] == '"'


def is_upper_case(text: str) -> bool:
    return text.isupper()


def is_lower_case(text: str) -> bool:
    return text.islower()


def has_capital_words(text: str, capital_frequency: int, capital_relation: str) -> bool:
    return _holds(sum(word.isupper() for word in _words(text)), capital_relation, capital_frequency)


def has_no_comma(text: str) -> bool:
    return "," not in text


CHECKS: dict[str, Callable[..., bool]] = {
    "keywords:existence": has_keywords,
    "keywords:frequency": has_keyword_often,
    "keywords:forbidden_words": has_no_forbidden_word,
    "keywords:letter_frequency": has_letter_often,
    "length_constraints:number_words": has_words,
    "length_constraints:number_sentences": has_sentences,
    "length_constraints:number_paragraphs": has_paragraphs,
    "length_constraints:nth_paragraph_first_word": begins_nth_paragraph,
    "detectable_content:number_placeholders": has_placeholders,
    "detectable_content:postscript": has_postscript,
    "detectable_format:number_bullet_lists": has_bullets,
    "detectable_format:constrained_response": is_one_of_the_responses,
    "detectable_format:number_highlighted_sections": has_highlights,
    "detectable_format:multiple_sections": has_sections,
    "detectable_format:json_format": is_json,
    "detectable_format:title": has_title,
    "combination:two_responses": has_two_responses,
    "combination:repeat_prompt": repeats_prompt,
    "startend:end_checker": ends_with,
    "startend:quotation": is_quoted,
    "change_case:english_capital": is_upper_case,
    "change_case:english_lowercase": is_lower_case,
    "change_case:capital_word_frequency": has_capital_words,
    "punctuation:no_comma": has_no_comma,
}
"""Checks by the name that IFEval gives an instruction."""
