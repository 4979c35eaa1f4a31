"""Personal data and secrets in many texts at once: where they are, and the text without them. Runs in executors: imports no Spark.

Found by form and proven where the form has a proof: e-mail addresses, phone numbers, public IP addresses, payment cards (issuer and Luhn
digit), IBANs (length of the country and remainder 97), US social security numbers, keys of known services and private key blocks.
Names of people, street addresses, dates of birth and account names have no form, and are not found.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.documents import CODE, COMMIT, PREPARED_COLUMNS, arrow_schema, content_digest

if TYPE_CHECKING:
    import pyarrow as pa

KINDS = ("secret", "email", "iban", "credit_card", "us_ssn", "ip_address", "phone")
"""Where two overlap, the earlier one counts."""
CODE_KINDS = ("secret", "email")
"""What is masked in code and commits: their numbers are constants, versions and test data, and stay as they are."""
COUNT_COLUMNS = ", ".join(f"{kind} long" for kind in KINDS)
BETWEEN = "\0"
"""Stands between joined texts; no pattern matches it."""
CHUNK_CHARS = 1_000_000

Span = tuple[str, int, int]
"""Kind, start and end."""

LOCAL_PART = re.compile(r"[\w.%+'-]{1,64}\Z")
HOST = re.compile(r"(?:[^\W_](?:[^\W_]|-){0,62}(?<!-)\.)+(?:[^\W\d_]{2,24}|xn--[a-z0-9-]{2,40})(?![\w-])")
"""Names in all scripts (RFC 6531)."""
RESERVED_HOSTS = re.compile(r"(?:^|\.)(?:example\.(?:com|org|net)|[\w.-]*\.?(?:example|test|invalid|localhost|local))$", re.IGNORECASE)
"""RFC 2606: nobody's addresses, and what FineWeb puts in the place of real ones."""
IMAGE = re.compile(r"[\d.]+x\.(?:png|jpe?g|gif|webp|svg|pdf)\Z", re.IGNORECASE)
"""Images for screens of so many pixels per point: icon@2x.png."""
NO_PERSON = {"git", "hg", "svn"}
"""Local parts of repository URLs: git@github.com."""

NUMBER = re.compile(
    r"[+(0-9](?<![\w.@#/=+-].)(?<!\d,.)(?:(?<=\d)|(?<=\+)\d|(?<=\()\+?\d)(?:[ ().\u00a0-]{0,3}\d){6,24}"
    r"(?:\s?(?:x|ext\.?)\s?\d{1,5}\b)?(?![\w@])"
)
"""Begins with a set of characters: what stands before them is asked behind the first, so that `re` skips to it quickly. So the others."""
CARD = re.compile(
    r"4(?:\d{12}|\d{15}|\d{18})|5[1-5]\d{14}|2(?:22[1-9]|2[3-9]\d|[3-6]\d\d|7[01]\d|720)\d{12}|3[47]\d{13}|3(?:0[0-5]|[689]\d)\d{11}|"
    r"(?:2131|1800)\d{11}|35\d{14}|(?:5[06-8]|6\d)\d{10,17}"
)
"""Visa, Mastercard, American Express, Diners, JCB, Maestro and Discover, each with its lengths."""
SOCIAL_SECURITY = re.compile(r"(?!000|666|9)\d{3}-(?!00)\d{2}-(?!0000)\d{4}")
SOCIAL_SECURITY_LABEL = re.compile(r"\b(?:SSN|social security)\b[^\d\n]{0,16}$", re.IGNORECASE)
"""Behind it the hyphens may be blanks or missing."""
DATE = re.compile(r"(?:19|20)\d\d[-./]\d{1,2}[-./]\d|\d{1,2}[-./]\d{1,2}[-./](?:19|20)\d\d")
NORTH_AMERICAN = re.compile(r"(?:(?:\+|00)?1[-. ])?(?:\([2-9]\d\d\) ?|[2-9]\d\d[-. ])[2-9]\d\d[-. ]\d{4}(?:\s?(?:x|ext\.?)\s?\d{1,5})?")
TRUNK = re.compile(r"\(0\d{0,4}\)[ -]?\d[\d -]{5,}\d")
"""An area code in brackets with the trunk prefix 0."""
NATIONAL = re.compile(
    r"0[1-9](?:[ .]\d\d){4}|0[1-9]\d{1,3}[ /]\d{3,4} ?\d{3,5}|0[1-9]\d?-\d{3,4}-\d{4}|8 ?\(\d{3}\) ?\d{3}-\d\d-\d\d|"
    r"00[1-9]\d{0,2}[ -]\(?\d[\d() -]{5,}\d"
)
"""Grouped as France, Britain and Germany, Japan, and Russia write them, or with the prefix 00 and a country's code."""
PHONE_LABEL = re.compile(
    r"\b(?:phone|telephone|tel|mobile|cell|fax|desk(?=:)|office(?=:)|whatsapp|hotline|sms|call|calling|dial|reach|contact|message|messages|answering|"
    r"telefon|telefono|teléfono|téléphone|handy|móvil|celular|mobil|телефон|тел)\b[^\d\n]{0,16}\n?[^\d\n]{0,4}$",
    re.IGNORECASE,
)
PHONE_LABEL_BEHIND = re.compile(r"[ -]{1,2}(?:office|fax|mobile|home|cell|desk)\b", re.IGNORECASE)
LABEL_CHARS = 36

IBAN = re.compile(r"[0-9](?<=[A-Za-z]{2}.)(?<![^\W_][A-Za-z]{2}.)[0-9](?: ?[A-Za-z0-9]{4}){2,7}(?: ?[A-Za-z0-9]{1,3})?(?![^\W_])")
"""From the check digits on: two letters stand before."""
IBAN_LENGTHS = {
    "AD": 24, "AE": 23, "AL": 28, "AT": 20, "AZ": 28, "BA": 20, "BE": 16, "BG": 22, "BH": 22, "BR": 29, "BY": 28, "CH": 21, "CR": 22,
    "CY": 28, "CZ": 24, "DE": 22, "DK": 18, "DO": 28, "EE": 20, "EG": 29, "ES": 24, "FI": 18, "FO": 18, "FR": 27, "GB": 22, "GE": 22,
    "GI": 23, "GL": 18, "GR": 27, "GT": 28, "HR": 21, "HU": 28, "IE": 22, "IL": 23, "IQ": 23, "IS": 26, "IT": 27, "JO": 30, "KW": 30,
    "KZ": 20, "LB": 28, "LI": 21, "LT": 20, "LU": 20, "LV": 21, "MC": 27, "MD": 24, "ME": 22, "MK": 19, "MR": 27, "MT": 31, "MU": 30,
    "NL": 18, "NO": 15, "PK": 24, "PL": 28, "PS": 29, "PT": 25, "QA": 29, "RO": 24, "RS": 22, "SA": 24, "SE": 24, "SI": 19, "SK": 24,
    "SM": 27, "TN": 24, "TR": 26, "UA": 29, "VA": 22, "VG": 24, "XK": 20,
}  # fmt: skip
PREFIX_LENGTH = r"/\d{1,3}(?![\w/-]|\.\w)"
"""Behind an address it names a network: 31.13.24.0/21."""
IP_V4 = re.compile(rf"[0-9](?<![\w.-].)[0-9]{{0,2}}(?:\.[0-9]{{1,3}}){{3}}(?![\w-]|\.\d|{PREFIX_LENGTH})")
VERSION_LABEL = re.compile(
    r"\b(?:version|ver|release|build|revision|rev|firmware|update|patch|section|sec|chapter|clause|article|paragraph|figure|table|python|openssl|"
    r"chrome|chromium|firefox|safari|opera|edge|java|kernel|windows|macos|ios|android|sdk|driver)[ .:#-]{1,2}$",
    re.IGNORECASE,
)
IP_V6 = re.compile(rf"[23](?<![\w:.].)[0-9A-Fa-f]{{3}}:[0-9A-Fa-f:]{{4,34}}(?![\w:]|{PREFIX_LENGTH})")
"""The addresses that are handed out: 2000::/3."""

SECRETS = {
    "AKIA": r"AKIA[0-9A-Z]{16}\b",
    "ASIA": r"ASIA[0-9A-Z]{16}\b",
    "gh": r"gh[pousr]_[A-Za-z0-9]{36,255}",
    "github_pat_": r"github_pat_\w{22,255}",
    "glpat-": r"glpat-[\w-]{20,}",
    "xox": r"xox[abeprs]-[\w-]{10,}",
    "AIza": r"AIza[\w-]{35}",
    "sk-": r"sk-(?=[\w-]*\d)[\w-]{32,}",
    "sk_live_": r"sk_live_\w{20,}",
    "hf_": r"hf_[A-Za-z0-9]{34}\b",
    "npm_": r"npm_[A-Za-z0-9]{36}\b",
    "pypi-": r"pypi-AgE[\w-]{50,}",
    "SG.": r"SG\.[\w-]{22}\.[\w-]{43}",
    "dop_v1_": r"dop_v1_[0-9a-f]{64}\b",
    "eyJ": r"eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}",
    "-----BEGIN ": r"-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----[^\0]{16,20000}?"
    r"-----END (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----",
}
"""Pattern by the characters it begins with."""
SECRET_PATTERNS = {start: re.compile(rf"(?<![A-Za-z0-9_]){pattern}") for start, pattern in SECRETS.items()}


def find_spans(texts: Sequence[str], kinds: Sequence[str] = KINDS) -> list[list[Span]]:
    """(kind, start, end) of what is found in each text, in order and without overlaps."""
    joined = BETWEEN.join(texts)
    numbers = list(NUMBER.finditer(joined)) if set(kinds) & set(NUMBER_FINDERS) else []
    found = [(start, KINDS.index(kind), end) for kind in kinds if kind in FINDERS for start, end in FINDERS[kind](joined)]
    found += [(start, KINDS.index(kind), end) for kind in kinds if kind in NUMBER_FINDERS for start, end in NUMBER_FINDERS[kind](numbers)]
    found.sort(key=lambda span: (span[1], span[0]))
    starts = np.cumsum([0, *(len(text) + 1 for text in texts)])
    spans: list[list[Span]] = [[] for _ in texts]
    for start, kind, end in found:
        number = int(np.searchsorted(starts, start, side="right")) - 1
        first = start - int(starts[number])
        last = end - int(starts[number])
        if all(last <= other[1] or first >= other[2] for other in spans[number]):
            spans[number].append((KINDS[kind], first, last))
    return [sorted(own, key=lambda span: span[1]) for own in spans]


def mask_text(text: str, spans: Sequence[Span]) -> str:
    """The text with each span replaced by its kind: <EMAIL>, <IP_ADDRESS>."""
    parts, end = [], 0
    for kind, start, stop in spans:
        parts += [text[end:start], f"<{kind.upper()}>"]
        end = stop
    return "".join([*parts, text[end:]])


def mask_batches(batches: Iterator[pa.RecordBatch], kinds: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """PREPARED_COLUMNS of the masked documents, and COUNT_COLUMNS of what was found in each."""
    import pyarrow as pa

    schema = arrow_schema(f"{PREPARED_COLUMNS}, {COUNT_COLUMNS}")
    for batch in batches:
        texts = batch.column("text").to_pylist()
        is_code = [domain in (CODE, COMMIT) for domain in batch.column("domain").to_pylist()]
        spans = find_in_chunks(texts, is_code, kinds)
        columns = {name: batch.column(name).to_pylist() for name in ("content_digest", "num_chars", "num_bytes")}
        for number, own in enumerate(spans):
            if own:
                texts[number] = mask_text(texts[number], own)
                columns["content_digest"][number] = content_digest(texts[number])
                columns["num_chars"][number], columns["num_bytes"][number] = len(texts[number]), len(texts[number].encode())
        counts = {kind: [sum(found == kind for found, _, _ in own) for own in spans] for kind in KINDS}
        replaced = {"text": texts, **columns, **counts}
        arrays = [
            pa.array(replaced[field.name], field.type) if field.name in replaced else batch.column(field.name).cast(field.type)
            for field in schema
        ]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def find_in_chunks(texts: Sequence[str], is_code: Sequence[bool], kinds: Sequence[str]) -> list[list[Span]]:
    """Spans of texts, code apart from prose, about CHUNK_CHARS at a time."""
    spans: list[list[Span]] = [[] for _ in texts]
    for wanted, code in ((kinds, False), ([kind for kind in kinds if kind in CODE_KINDS], True)):
        own = [number for number in range(len(texts)) if is_code[number] == code]
        chunks = np.cumsum([len(texts[number]) for number in own]) // CHUNK_CHARS
        edges = [*np.flatnonzero(np.diff(chunks, prepend=-1)).tolist(), len(own)]
        for start, stop in pairwise(edges):
            for number, found in zip(own[start:stop], find_spans([texts[number] for number in own[start:stop]], wanted), strict=True):
                spans[number] = found
    return spans


def _emails(text: str) -> Iterator[tuple[int, int]]:
    place = text.find("@")
    while place >= 0:
        window = text[max(0, place - 64) : place]
        local, host = LOCAL_PART.search(window), HOST.match(text, place + 1)
        if local and host and not RESERVED_HOSTS.search(host[0]) and not IMAGE.match(host[0]):
            name = local[0].lstrip(".'-%+")
            if name and name.lower() not in NO_PERSON and not name.endswith("."):
                yield place - len(name), host.end()
        place = text.find("@", place + 1)


def _cards(numbers: list[re.Match[str]]) -> Iterator[tuple[int, int]]:
    for match in numbers:
        digits = _digits(match[0])
        if CARD.fullmatch(digits) and _is_plain(match[0]) and _has_luhn_digit(digits):
            yield match.span()


def _is_plain(number: str) -> bool:
    """Digits alone, or the groups that are printed on cards."""
    return re.fullmatch(r"\d+|\d{4}([ -])\d{4}\1\d{4}\1\d{1,7}|\d{4}([ -])\d{6}\2\d{4,5}", number) is not None


def _has_luhn_digit(digits: str) -> bool:
    doubled = [sum(divmod(2 * int(digit), 10)) for digit in digits[-2::-2]]
    return len(set(digits)) > 1 and (sum(map(int, digits[-1::-2])) + sum(doubled)) % 10 == 0


def _social_security(numbers: list[re.Match[str]]) -> Iterator[tuple[int, int]]:
    for match in numbers:
        digits = match[0].replace(" ", "-")
        hyphenated = f"{digits[:3]}-{digits[3:5]}-{digits[5:]}" if digits.isdecimal() and len(digits) == 9 else digits
        is_written = hyphenated == match[0] or SOCIAL_SECURITY_LABEL.search(_before(match))
        if is_written and SOCIAL_SECURITY.fullmatch(hyphenated):
            yield match.span()


def _phones(numbers: list[re.Match[str]]) -> Iterator[tuple[int, int]]:
    for match in numbers:
        number = match[0].rstrip("( ")
        num_digits = len(_digits(re.split("x|e", number)[0]))
        if not 7 <= num_digits <= 15 or DATE.match(number) or number.count("(") != number.count(")") or IP_V4.fullmatch(number):
            continue
        is_international = number.startswith(("+", "(+")) and num_digits >= 8 and number.lstrip("(+")[0] != "0"
        written = NORTH_AMERICAN.fullmatch(number) or TRUNK.fullmatch(number) or NATIONAL.fullmatch(number)
        if is_international or written or _is_labelled(match):
            yield match.start(), match.start() + len(number)


def _is_labelled(match: re.Match[str]) -> bool:
    return PHONE_LABEL.search(_before(match)) is not None or PHONE_LABEL_BEHIND.match(match.string, match.end()) is not None


def _before(match: re.Match[str]) -> str:
    """What stands before it in its own text, as far as a label reaches."""
    return match.string[max(0, match.start() - LABEL_CHARS) : match.start()].rpartition(BETWEEN)[2]


def _ibans(text: str) -> Iterator[tuple[int, int]]:
    for match in IBAN.finditer(text):
        start, end = match.start() - 2, match.end()
        length = IBAN_LENGTHS.get(text[start : start + 2].upper(), 0)
        while end - start - text.count(" ", start, end) > length and " " in text[start:end]:
            end = text.rindex(" ", start, end)  # a word behind it was taken for its last group
        compact = text[start:end].replace(" ", "").upper()
        if len(compact) == length and int("".join(str(int(character, 36)) for character in compact[4:] + compact[:4])) % 97 == 1:
            yield start, end


def _addresses(text: str) -> Iterator[tuple[int, int]]:
    """Public addresses; four one-digit numbers are a version or a section, and so are four that are called one."""
    for match in IP_V4.finditer(text):
        if len(match[0]) > len("1.2.3.4") and _is_public(match[0]) and not VERSION_LABEL.search(_before(match)):
            yield match.span()
    for match in IP_V6.finditer(text):
        address = match[0] if match[0].endswith("::") else match[0].rstrip(":")
        if _is_public(address):
            yield match.start(), match.start() + len(address)


def _is_public(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:  # a number above 255, or too many groups: no address
        return False
    return found.is_global and not found.is_multicast


def _secrets(text: str) -> Iterator[tuple[int, int]]:
    for start, pattern in SECRET_PATTERNS.items():
        place = text.find(start)
        while place >= 0:
            match = pattern.match(text, place)
            if match:
                yield match.span()
            place = text.find(start, match.end() if match else place + 1)


def _digits(number: str) -> str:
    return "".join(character for character in number if character.isdecimal())


FINDERS: dict[str, Callable[[str], Iterator[tuple[int, int]]]] = {
    "secret": _secrets, "email": _emails, "iban": _ibans, "ip_address": _addresses,
}  # fmt: skip
NUMBER_FINDERS: dict[str, Callable[[list[re.Match[str]]], Iterator[tuple[int, int]]]] = {
    "credit_card": _cards, "us_ssn": _social_security, "phone": _phones,
}  # fmt: skip
