"""Numbers in a word problem: their positions, how they are written, and which of them must not change."""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

NUMBER = re.compile(r"\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|(?<![\w)])\.\d+")
PERCENT = re.compile(r"\s?(?:%|percent\b)")
CENTS = re.compile(r"\s?(?:¢|cents?\b)")
SHARE = re.compile(rf"{PERCENT.pattern}|{CENTS.pattern}")
FRACTION = re.compile(r"(?<![\d.,/])(\d+)/(\d+)(?![\d/])")
MAX_DECIMALS = 6
TOO_LONG = re.compile(rf"(?:\d,?){{16}}|\.\d{{{MAX_DECIMALS + 1}}}")
"""Matches numbers that are too long to be quantities of a story."""

MEANINGS = {
    1: "one once single",
    2: "two twice double doubles doubled doubling half halves halved pair pairs couple both twin twins second weekend "
    "weekends",
    3: "three thrice triple triples tripled tripling triplets third thirds trio",
    4: "four quadruple quadrupled quarter quarters fourth fourths quartet",
    5: "five fifth fifths weekday weekdays",
    6: "six sixth sixths",
    7: "seven seventh",
    8: "eight eighth eighths",
    9: "nine ninth",
    10: "ten tenth tenths decade decades",
    11: "eleven",
    12: "twelve dozen dozens",
    13: "thirteen",
    14: "fourteen fortnight",
    15: "fifteen",
    16: "sixteen",
    17: "seventeen",
    18: "eighteen",
    19: "nineteen",
    20: "twenty",
    30: "thirty",
    40: "forty",
    50: "fifty",
    60: "sixty",
    70: "seventy",
    80: "eighty",
    90: "ninety",
    100: "hundred century",
    1000: "thousand",
    10**6: "million",
}
WORDS = {word: number for number, words in MEANINGS.items() for word in words.split()}
"""Number by word. A number of a problem that is also written as a word in it stays as it is: the word may mean it."""
CONSTANTS = {
    "half|halves|halved": "0.5 50 1.5",
    "quarters?": "0.25 0.75 25",
    "thirds?": "2",
    "fourths?": "0.25 0.75 3",
    "tenths?": "0.1",
    "fifths?": "0.2 0.4 0.6 0.8 2 3 4",
    "days?|daily": "7 24 30 31 365",
    "weeks?|weekly": "7 52 4",
    "months?|monthly": "12 30 4",
    "years?|yearly|annual|annually": "12 52 365",
    "hours?|hourly": "24 60",
    "minutes?|seconds?": "60",
    "feet|foot": "12 3",
    "inch|inches": "12",
    "yards?": "3",
    "pounds?|ounces?|cups?": "16",
    "gallons?": "4 16",
    "quarts?": "2 4",
    "pints?": "2",
    "nickels?": "0.05 5",
    "dimes?": "0.1 10",
    "penny|pennies": "0.01",
    "cents?|¢": "100",
    "%|percent|percentage": "100",
    "average": "2",
    "km|kilometers?|kg|kilograms?|kilos?|liters?|ml|milliliters?|grams?|meters?": "1000",
    "cm|centimeters?|m|meters?": "100",
    "morning|afternoon|evening|night": "24",
    "round ?trip|there and back|and back|return": "2",
    "squares?": "4",
    "rectang(?:le|ular)": "2",
    "triang(?:le|ular)": "2 3",
}
"""Numbers that a calculation may use although the question does not state them, by the words that imply them."""
CLOCK = r"\s?(?:[ap]\.?\s?m\b|o[’']?\s?clock\b|noon\b)"
FACTS = (
    "legs?|wheels?|tires?|eyes?|ears?|fingers?|toes?|arms?|wings?|sides?|sided|corners?|angles?|faces?|edges?|tentacles?|strings?|innings?|quarters?|halves|"
    "states?|continents?|planets?|degrees?|seasons?|suits?|bills?|coins?|notes?|thousand|million|billion|hundred|dozen|dozens"
)
MEASURE = (
    "seconds?|minutes?|hours?|days?|weeks?|months?|years?|inch|inches|foot|feet|yards?|miles?|ounces?|oz|pounds?|lbs?|cups?|pints?|quarts?|gallons?|cents?|"
    "grams?|kilograms?|kg|meters?|centimeters?|cm|kilometers?|km|liters?|ml|milliliters?|millimeters?|mm|tons?|teaspoons?|tablespoons?|decades?|centur(?:y|ies)"
)
STAYS_BEFORE = re.compile(
    r"(?:[\w#'’/:^.,-]|\b(?:grade|chapter|page|pages|day|week|month|year|number|no\.|room|level|part|step|round|phase|route|highway|section|unit|lesson|"
    r"apartment|size|ages?|aged|version|episode|season|volume|until|till|at exactly|noon to|=)\s)$",
    re.IGNORECASE,
)
STAYS_AFTER = re.compile(
    rf"(?:[A-Za-z:^/]\w|[A-Za-z]|/\d|-\d|\s\d|\s?[x×*]\s?\d|{CLOCK}|[\s-](?:\w+[\s-])?(?:{FACTS})\b|"
    rf"[\s-](?:{MEASURE})[\s-](?:tall|in height)\b|"
    rf"[\s-](?:{MEASURE})\s(?:in|=|is|are|equals?|makes?)\s(?:(?:a|an|one|1|each|every)\s)?(?:{MEASURE})\b)",
    re.IGNORECASE,
)
DATES = (
    "(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)days?|January|February|March|April|May|June|July|August|September|October|November|December|weekends?|"
    "weekdays?|Christmas|summers?|springs?|autumns?|fall|winters?"
)
CALENDAR = re.compile(rf"\b(?:{DATES})\b")
ORDINAL = re.compile(r"\b(\d+)(?:st|nd|rd|th)\b")
ORDINAL_WORDS = {
    "first": 1,
    "second": 2,
    "third": 3,
    "fourth": 4,
    "fifth": 5,
    "sixth": 6,
    "seventh": 7,
    "eighth": 8,
    "ninth": 9,
    "tenth": 10,
}


LIMITS = {
    "minute": (60,),
    "second": (60,),
    "hour": (24,),
    "day": (7, 31, 365),
    "week": (4, 52),
    "month": (12,),
    "year": (100,),
}
"""Upper limits by unit: a quantity below what the next unit holds (an age: below 100) stays below it."""


class Style(NamedTuple):
    """The style of a written number, in which another can be written."""

    num_fixed_decimals: int
    """Number of decimals that are always written, as in $2.50; 0 where only necessary ones are."""
    is_bare: bool
    """Whether the 0 before the point is missing: .5"""
    is_separated: bool
    """Whether thousands are separated: 1,000"""


class Written(NamedTuple):
    start: int
    end: int
    value: Fraction
    style: Style
    num_decimals: int


def written_numbers(text: str) -> list[Written]:
    """The numbers of a text that are written in digits."""
    return [_written(match, text) for match in NUMBER.finditer(text)]


def _written(match: re.Match[str], text: str) -> Written:
    plain = match[0].replace(",", "")
    decimals = plain.partition(".")[2]
    is_money = text[: match.start()].endswith("$") and len(decimals) == 2
    style = Style(len(decimals) if decimals.endswith("0") or is_money else 0, plain.startswith("."), "," in match[0])
    return Written(match.start(), match.end(), Fraction(f"0{plain}"), style, len(decimals))


def num_decimals(value: Fraction) -> int:
    """Number of decimals that write a number exactly; MAX_DECIMALS + 1 for any larger number."""
    return next((count for count in range(MAX_DECIMALS + 1) if (value * 10**count).denominator == 1), MAX_DECIMALS + 1)


def write_number(value: Fraction, style: Style) -> str:
    """The inverse of reading: a number that was read with a style is written exactly as it was."""
    count = max(style.num_fixed_decimals, num_decimals(value))
    assert count <= MAX_DECIMALS, value
    whole, part = divmod(int(abs(value) * 10**count), 10**count)
    text = f"{whole:,}" if style.is_separated else str(whole)
    text = "" if style.is_bare and not whole and count else text
    return ("-" if value < 0 else "") + text + (f".{part:0{count}d}" if count else "")


def words_of(text: str) -> set[Fraction]:
    """The numbers that a text's words mean; ordinals also mean their neighbours: the third of 3 days implies the 3."""
    words = re.findall(r"[a-z]+", text.lower())
    numbers = {WORDS[word] for word in words if word in WORDS}
    for one, other in pairwise(words):
        first, second = WORDS.get(one, 0), WORDS.get(other, 0)
        if (first in range(20, 100, 10) and second in range(1, 10)) or (first and other == "hundred"):
            numbers.add(first * 100 if other == "hundred" else first + second)
    ordinals = [int(number) for number in ORDINAL.findall(text)] + [
        ORDINAL_WORDS[word] for word in words if word in ORDINAL_WORDS
    ]
    return {Fraction(number) for number in numbers | {number + step for number in ordinals for step in (-1, 0, 1)}}


def constants_of(question: str) -> set[Fraction]:
    """Numbers that a solution may use because the question's words or fractions imply them."""
    constants = {Fraction(1)} | words_of(question)
    for words, numbers in CONSTANTS.items():
        if re.search(rf"(?<![A-Za-z])(?:{words})(?![A-Za-z])", question, re.IGNORECASE):
            constants |= {Fraction(number) for number in numbers.split()}
    for top, bottom in FRACTION.findall(question):
        if int(bottom):
            share = Fraction(int(top), int(bottom))
            constants |= {
                Fraction(int(top)),
                Fraction(int(bottom)),
                abs(Fraction(int(bottom) - int(top))),
                share,
                1 + share,
                abs(1 - share),
            }
    return constants


def must_stay(question: str, number: Written) -> bool:
    """Whether a number must not be varied: a year, time, name, fact (4 legs), unit (60 minutes in an hour), 0 or 1."""
    before, after = question[: number.start], question[number.end :]
    if number.value <= 1 and not number.num_decimals:
        return True
    if STAYS_BEFORE.search(before.removesuffix("$")) or STAYS_AFTER.match(after):
        return True
    if 1900 <= number.value <= 2100 and not before.endswith("$") and not number.style.is_separated:
        return True
    unit = re.match(r"[\s-](\w+?)s?\b", after)
    if unit and number.value in LIMITS.get(unit[1].lower(), ()):
        return True
    return bool(CALENDAR.search(question) and re.match(rf"[\s-](?:\w+\s)?(?:{MEASURE}|{DATES})\b", after))
