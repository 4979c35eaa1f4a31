"""Locates personal data and secrets in many texts at once, and removes them. Runs in executors: imports no Spark.

Kinds are recognised by form, and proven where the form has a proof: e-mail addresses (top-level domain), phone
numbers (phone_numbers.py), public IP addresses, payment cards (issuer and Luhn digit), IBANs (the country's form and
remainder 97), US social security numbers, secrets (secret_patterns.py). Names of people, street addresses, dates of
birth and account names have no form, and are not recognised.
"""

from __future__ import annotations

import ipaddress
import re
import unicodedata
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from stdnum import iban, luhn
from tld import is_tld

from tasks.data.privacy.phone_numbers import LABEL_CHARS, is_phone
from tasks.data.privacy.secret_patterns import secret_spans
from tasks.data.records.documents import CODE, COMMIT, PREPARED_COLUMNS, arrow_schema, content_digest
from tasks.data.text.text_chunks import chunk_bounds

if TYPE_CHECKING:
    import pyarrow as pa

KINDS = ("secret", "email", "iban", "credit_card", "us_ssn", "ip_address", "phone")
"""Kinds of personal data; of two that overlap, the earlier one in this list is taken."""
CODE_KINDS = ("secret", "email")
"""Kinds that are masked in code and commits: their numbers are constants, versions and test data, and are kept."""
COUNT_COLUMNS = ", ".join(f"{kind} long" for kind in KINDS)
BETWEEN = "\0"
"""Separator of joined texts; no pattern matches it."""
CHUNK_CHARS = 1_000_000

Span = tuple[str, int, int]
"""Kind, start and end."""

LOCAL_PART = re.compile(r"[\w.%+'-]{1,64}\Z")
_UNSPACED = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
"""Scripts without spaces, where a word of another script follows directly."""
HOST = re.compile(
    rf"(?:[^\W_](?:[^\W_]|-){{0,62}}(?<!-)\.){{1,8}}"
    rf"(?:[A-Za-z]{{2,24}}(?=[{_UNSPACED}])|(?:[^\W\d_]{{2,24}}|xn--[a-z0-9-]{{2,40}})(?![\w-]))"
)
"""Host names in all scripts (RFC 6531)."""
NAME_AFTER = re.compile(rf".*[{_UNSPACED}](?=[A-Za-z0-9])")
"""Words directly before the name of an address in ASCII."""
RESERVED_HOSTS = re.compile(
    r"(?:^|\.)(?:example\.(?:com|org|net)|[\w.-]*\.?(?:example|test|invalid|localhost|local))$", re.IGNORECASE
)
"""Hosts that RFC 2606 reserves; FineWeb replaces real addresses by them."""
IMAGE = re.compile(r"[\d.]+x\.(?:png|jpe?g|gif|webp|svg|pdf)\Z", re.IGNORECASE)
"""File names of images for screens with several pixels per point: icon@2x.png."""
IN_URL = re.compile(r"://[^\s/@]*:$")
"""Text of a URL before a password."""
NO_PERSON = {"git", "hg", "svn"}
"""Local parts of repository URLs: git@github.com."""
HIDDEN_AT = re.compile(
    r"[(\[{<＠&%](?:(?<=＠)|(?<=&)(?:#64|#x40|commat);|(?<=%)40|(?<![＠&%]) ?(?:at|ät|arroba|@) ?[)\]}>])",
    re.IGNORECASE,
)
_DOT = r" ?[(\[{<] ?(?:dot|punkt|punto|point|\.) ?[)\]}>] ?| (?:dot|punkt|punto) "
HIDDEN_DOT = re.compile(_DOT, re.IGNORECASE)
HIDDEN_HOST = re.compile(rf"(?:[^\W_](?:[^\W_]|-){{0,62}}(?:\.|{_DOT})){{1,4}}[^\W\d_]{{2,24}}(?![\w-])", re.IGNORECASE)
SPOKEN_AT = re.compile(
    r"(?<![\w.%+'-])([\w.%+'-]{2,64}) at ((?:[\w-]{2,40} dot ){1,3}[a-z]{2,10})(?![\w-])", re.IGNORECASE
)
SPOKEN_DOTS = (" dot ", " DOT ")
SPOKEN_CHARS = 120
NO_HOST = {"the", "this", "that", "a", "an", "each", "every", "one"}
"""Words that are no host before ` dot `. Addresses are hidden from programs that collect them: jane (at) posteo (dot)
de, jane at posteo dot de."""

SIGNS = r" ().\u00a0\u2009\u202f\u2010-\u2013\uff0d-"
"""Signs between the digits of a number."""
_IN_WORD = rf"[^\W{_UNSPACED}]"
"""A character of a word, except in scripts without spaces, where a number follows its name directly."""
NUMBER = re.compile(
    rf"[+(0-9０-９＋٠-٩۰-۹०-९](?<!{_IN_WORD}.)(?<![.@#/+-].)(?<!\d[,:].)(?:(?<=\d)|(?<=[+＋])\d|(?<=\()(?=\+?[\d ]{{1,6}}\))\+?\d)"  # noqa: E501
    rf"(?:(?<=0)\d{{1,4}} ?/ ?(?=\d))?(?:[{SIGNS}]{{0,3}}\d){{6,24}}(?:\s?(?:x|ext\.?)\s?\d{{1,5}}\b)?(?!{_IN_WORD}|@)"
)
"""Begins with a set of characters, so that `re` skips to it quickly: the text before is tested after the first
character. The other patterns do the same."""
PARAMETER = re.compile(r"(?:card|cc|pan|number|credit|visa|acct)[\w-]*=$", re.IGNORECASE)
CARD = re.compile(
    r"4(?:\d{12}|\d{15}|\d{18})|5[1-5]\d{14}|2(?:22[1-9]|2[3-9]\d|[3-6]\d\d|7[01]\d|720)\d{12}|3[47]\d{13}|3(?:0[0-5]|[689]\d)\d{11}|"
    r"(?:2131|1800)\d{11}|35\d{14}|(?:5[06-8]|6\d)\d{10,17}"
)
"""Visa, Mastercard, American Express, Diners, JCB, Maestro and Discover, each with its lengths."""
PRINTED = re.compile(
    rf"\d+|\d{{4}}([{SIGNS}]{{1,3}})\d{{4}}\1\d{{4}}\1\d{{1,7}}|\d{{4}}([{SIGNS}]{{1,3}})\d{{6}}\2\d{{4,5}}"
)
"""A card's number as digits only, or in the groups that are printed on cards."""
SOCIAL_SECURITY = re.compile(r"(?!000|666|9)\d{3}-(?!00)\d{2}-(?!0000)\d{4}")
SOCIAL_SECURITY_LABEL = re.compile(r"\b(?:SSN|social security)\b[^\d\n]{0,16}$", re.IGNORECASE)
"""A label after which the hyphens may be blanks or missing."""

IBAN = re.compile(
    r"[0-9](?<=[A-Za-z]{2}.)(?<![^\W_][A-Za-z]{2}.)[0-9](?:[ \u00a0-]?[A-Za-z0-9]{4}){2,7}(?:[ "
    r"\u00a0-]?[A-Za-z0-9]{1,3})?(?![^\W_])"
)
"""Begins at the check digits, after the two letters."""
MIN_IBAN_CHARS = 15
GROUP_SIGNS = (" ", "\u00a0", "-")
NO_SIGNS = re.compile(r"[ \u00a0-]")
PREFIX_LENGTH = r"/\d{1,3}(?![\w/-]|\.\w)"
"""The length of a network's prefix after an address: 31.13.24.0/21."""
IP_V4 = re.compile(rf"[0-9](?<![\w.-].)[0-9]{{0,2}}(?:\.[0-9]{{1,3}}){{3}}(?![\w-]|\.\d|{PREFIX_LENGTH})")
LARGEST_VERSE = 176
NAME_BEFORE = re.compile(r"(?<![^\W_])[A-Z][^\W\d_]+\.? $")
"""A name before the number, as in citations of verses and paragraphs: Luke 12.34.5.67."""
IP_LABEL = re.compile(
    r"\b(?:ip|ipv4|addr\w*|host|server|ping|ssh|client|login|from|to|dns|proxy)\b[^\w\n]{0,4}$", re.IGNORECASE
)
VERSION_LABEL = re.compile(
    r"\b(?:bump|upgrad|downgrad|updat|revert|roll|pin)\w*\b[^\n]{0,24}? (?:from|to) (?:v?\d[\d.]* (?:to|->) )?$"
    r"|\b(?:version|ver|release|build|revision|rev|firmware|update|patch|section|sec|chapter|clause|article|paragraph|figure|table|python|openssl|"
    r"chrome|chromium|firefox|safari|opera|edge|java|kernel|windows|macos|ios|android|sdk|driver)[ .:#/-]{1,2}$",
    re.IGNORECASE,
)
IP_V6 = re.compile(rf"[23](?<![\w:.].)[0-9A-Fa-f]{{3}}:[0-9A-Fa-f:]{{4,34}}(?![\w:]|{PREFIX_LENGTH})")
"""Assigned addresses: 2000::/3."""


def find_spans(texts: Sequence[str], kinds: Sequence[str] = KINDS, languages: Sequence[str] = ()) -> list[list[Span]]:
    """(kind, start, end) of the personal data in each text, in order and without overlaps. `languages` (ISO 639-1, ""
    where unknown) choose the countries whose phone numbers are tried first."""
    joined = BETWEEN.join(texts)
    numbers = list(NUMBER.finditer(joined)) if set(kinds) & {*NUMBER_FINDERS, "phone"} else []
    matches = [
        (start, KINDS.index(kind), end) for kind in kinds if kind in FINDERS for start, end in FINDERS[kind](joined)
    ]
    matches += [
        (start, KINDS.index(kind), end)
        for kind in kinds
        if kind in NUMBER_FINDERS
        for start, end in NUMBER_FINDERS[kind](numbers)
    ]
    if "phone" in kinds:
        ends = np.cumsum([len(text) + 1 for text in texts])
        owners = np.searchsorted(ends, [match.start() for match in numbers], side="right").tolist()
        spoken = [languages[int(owner)] for owner in owners] if languages else [""] * len(owners)
        matches += [(start, KINDS.index("phone"), end) for start, end in _phones(numbers, spoken)]
    starts = np.cumsum([0, *(len(text) + 1 for text in texts)])
    owners = (np.searchsorted(starts, [start for start, _, _ in matches], side="right") - 1).tolist()
    spans: list[list[Span]] = [[] for _ in texts]
    for (start, kind, end), number in sorted(
        zip(matches, owners, strict=True), key=lambda each: (each[0][1], each[0][0], -each[0][2])
    ):
        first, last = start - int(starts[number]), end - int(starts[number])
        index = bisect_left(spans[number], first, key=lambda span: span[1])
        is_free_before = index == 0 or spans[number][index - 1][2] <= first
        if is_free_before and (index == len(spans[number]) or spans[number][index][1] >= last):
            spans[number].insert(index, (KINDS[kind], first, last))
    return spans


def mask_text(text: str, spans: Sequence[Span]) -> str:
    """The text with each span replaced by its kind: <EMAIL>, <IP_ADDRESS>."""
    parts, end = [], 0
    for kind, start, stop in spans:
        parts += [text[end:start], f"<{kind.upper()}>"]
        end = stop
    return "".join([*parts, text[end:]])


def mask_batches(batches: Iterator[pa.RecordBatch], kinds: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """PREPARED_COLUMNS of the masked documents, and COUNT_COLUMNS with the spans of each."""
    import pyarrow as pa

    schema = arrow_schema(f"{PREPARED_COLUMNS}, {COUNT_COLUMNS}")
    for batch in batches:
        texts = batch.column("text").to_pylist()
        is_code = [domain in (CODE, COMMIT) for domain in batch.column("domain").to_pylist()]
        spans = find_in_chunks(texts, is_code, kinds, batch.column("language").to_pylist())
        columns = {name: batch.column(name).to_pylist() for name in ("content_digest", "num_chars", "num_bytes")}
        for number, own in enumerate(spans):
            if own:
                texts[number] = mask_text(texts[number], own)
                columns["content_digest"][number] = content_digest(texts[number])
                columns["num_chars"][number], columns["num_bytes"][number] = (
                    len(texts[number]),
                    len(texts[number].encode()),
                )
        counts = {kind: [sum(masked == kind for masked, _, _ in own) for own in spans] for kind in KINDS}
        replaced = {"text": texts, **columns, **counts}
        arrays = [
            pa.array(replaced[field.name], field.type)
            if field.name in replaced
            else batch.column(field.name).cast(field.type)
            for field in schema
        ]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def find_in_chunks(
    texts: Sequence[str], is_code: Sequence[bool], kinds: Sequence[str], languages: Sequence[str] = ()
) -> list[list[Span]]:
    """Spans of texts, with separate kinds for code and prose, about CHUNK_CHARS at a time."""
    spans: list[list[Span]] = [[] for _ in texts]
    for wanted, code in ((kinds, False), ([kind for kind in kinds if kind in CODE_KINDS], True)):
        own = [number for number in range(len(texts)) if is_code[number] == code]
        for start, stop in chunk_bounds((len(texts[number]) for number in own), CHUNK_CHARS):
            part = own[start:stop]
            spoken = [languages[number] or "" for number in part] if languages else ()
            for number, located in zip(
                part, find_spans([texts[number] for number in part], wanted, spoken), strict=True
            ):
                spans[number] = located
    return spans


def _emails(text: str) -> Iterator[tuple[int, int]]:
    position = text.find("@")
    while position >= 0:
        yield from _address_around(text, position, position + 1, HOST)
        position = text.find("@", position + 1)
    for match in HIDDEN_AT.finditer(text):
        start, end = match.span()
        start -= text[start - 1 : start] == " "
        yield from _address_around(text, start, end + (text[end : end + 1] == " "), HIDDEN_HOST)
    for dot in SPOKEN_DOTS:
        position = text.find(dot)
        while position >= 0:
            match = SPOKEN_AT.search(text, max(position - SPOKEN_CHARS, 0), position + SPOKEN_CHARS)
            host = match[2].lower().split() if match else [""]
            if match and is_tld(host[-1]) and host[0] not in NO_HOST:
                yield match.span()
            position = text.find(dot, max(position + 1, match.end() if match else 0))


def _address_around(text: str, start: int, end: int, hosts: re.Pattern[str]) -> Iterator[tuple[int, int]]:
    """The e-mail address with a local part before `start` and a host from `end` on, if it may be a person's."""
    local, host = LOCAL_PART.search(text[max(0, start - 64) : start]), hosts.match(text, end)
    if local is None or host is None:
        return
    plain = HIDDEN_DOT.sub(".", host[0])
    name = (NAME_AFTER.sub("", local[0]) if plain.isascii() else local[0]).lstrip(".'-%+")
    is_reserved = RESERVED_HOSTS.search(plain) or IMAGE.match(plain) or not is_tld(plain.rpartition(".")[2].lower())
    is_password = IN_URL.search(text[max(0, start - 80) : start - len(name)]) is not None
    if name and not name.endswith(".") and name.lower() not in NO_PERSON and not is_reserved and not is_password:
        yield start - len(name), host.end()


def _cards(numbers: list[re.Match[str]]) -> Iterator[tuple[int, int]]:
    for match in numbers:
        digits = _digits(match[0])
        if CARD.fullmatch(digits) and PRINTED.fullmatch(match[0]) and len(set(digits)) > 1 and luhn.is_valid(digits):
            before = _before(match)
            if not before.endswith("=") or PARAMETER.search(before):
                yield match.span()


def _social_security(numbers: list[re.Match[str]]) -> Iterator[tuple[int, int]]:
    for match in numbers:
        digits = match[0].replace(" ", "-")
        hyphenated = f"{digits[:3]}-{digits[3:5]}-{digits[5:]}" if digits.isdecimal() and len(digits) == 9 else digits
        is_written = hyphenated == match[0] or SOCIAL_SECURITY_LABEL.search(_before(match))
        if is_written and SOCIAL_SECURITY.fullmatch(hyphenated):
            yield match.span()


def _phones(numbers: list[re.Match[str]], languages: Sequence[str]) -> Iterator[tuple[int, int]]:
    for match, language in zip(numbers, languages, strict=True):
        if not IP_V4.fullmatch(match[0]) and is_phone(match, _before(match), language):
            yield match.span()


def _before(match: re.Match[str]) -> str:
    """The text before a match, without other texts, at most LABEL_CHARS long."""
    return match.string[max(0, match.start() - LABEL_CHARS) : match.start()].rpartition(BETWEEN)[2]


def _ibans(text: str) -> Iterator[tuple[int, int]]:
    for match in IBAN.finditer(text):
        start, end = match.start() - 2, match.end()
        while end - start >= MIN_IBAN_CHARS:
            if iban.is_valid(NO_SIGNS.sub("", text[start:end]), check_country=False):
                yield start, end
                break
            end = start + max(map(text[start:end].rfind, GROUP_SIGNS))  # the last group may be a word after the IBAN


def _addresses(text: str) -> Iterator[tuple[int, int]]:
    """Public addresses. Short numbers, and those that are labelled or cited like one, are versions or sections."""
    for match in IP_V4.finditer(text):
        if _is_public(match[0]):
            before, octets = _before(match), match[0].split(".")
            is_cited = NAME_BEFORE.search(before) and max(map(int, octets)) <= LARGEST_VERSE
            is_version = sum(len(octet) == 1 for octet in octets) > 1 and max(map(len, octets)) < 3
            is_called_one = VERSION_LABEL.search(before) is not None
            if not is_called_one and (IP_LABEL.search(before) or not (is_cited or is_version)):
                yield match.span()
    for match in IP_V6.finditer(text):
        address = match[0] if match[0].endswith("::") else match[0].rstrip(":")
        if _is_public(address):
            yield match.start(), match.start() + len(address)


def _is_public(address: str) -> bool:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:  # a number above 255, or too many groups: no address
        return False
    return parsed.is_global and not parsed.is_multicast


def _digits(number: str) -> str:
    return "".join(str(unicodedata.digit(character)) for character in number if character.isdecimal())


FINDERS: dict[str, Callable[[str], Iterator[tuple[int, int]]]] = {
    "secret": secret_spans,
    "email": _emails,
    "iban": _ibans,
    "ip_address": _addresses,
}
NUMBER_FINDERS: dict[str, Callable[[list[re.Match[str]]], Iterator[tuple[int, int]]]] = {
    "credit_card": _cards,
    "us_ssn": _social_security,
}
