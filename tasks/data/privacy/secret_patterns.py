"""Locates secrets in many texts at once: keys of services, passwords in URLs and assignments, private keys.

There are three ways, and none of them knows a secret itself. First, forms that a service documents: FORMS, and the
rules of the installed detect-secrets. Second, the value of an assignment whose name means a secret (`password = "..."`,
with detect-secrets' list of names), if the value looks random. Third, blocks of private keys, also where the end
is cut off. Patterns are run only where there is a long word with a digit, or a name: NumPy locates those. Runs in
executors: imports no Spark.
"""

from __future__ import annotations

import base64
import importlib
import math
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache

import numpy as np

from tasks.data.privacy.secret_forms import FORMS

Span = tuple[int, int]
"""Start and end."""

RULE_SETS = (
    "artifactory.ArtifactoryDetector",
    "aws.AWSKeyDetector",
    "azure_storage_key.AzureStorageKeyDetector",
    "cloudant.CloudantDetector",
    "discord.DiscordBotTokenDetector",
    "ibm_cos_hmac.IbmCosHmacDetector",
    "mailchimp.MailchimpDetector",
    "npm.NpmDetector",
    "openai.OpenAIDetector",
    "softlayer.SoftlayerDetector",
    "stripe.StripeDetector",
    "telegram_token.TelegramBotTokenDetector",
    "twilio.TwilioKeyDetector",
)
"""Rules of detect_secrets.plugins for forms that are not in FORMS. IBM's IAM rule is left out: it matches any `key = `
with 44 characters."""
OTHER_NAMES = (
    "(?:auth|access|api|bot|refresh|session|bearer|private|deploy|personal)[_-]?token",
    "secret[_-]?(?:access[_-]?)?key",
    "passphrase",
    "access[_-]?key",
    "(?:encryption|signing|master|storage)[_-]?key",
    "passwort",
    "mot de passe",
    "senha",
    "пароль",
    "密码",
    "パスワード",
    "비밀번호",
    "api-key",
    "x-api-key",
    "auth_?pass",
    "credential",
    "[a-z0-9][ _-]?token(?![a-z])",
    "api key",
)
"""Names of secrets besides those of detect-secrets."""
NAME_LITERALS = (
    "pass",
    "pwd",
    "secret",
    "token",
    "api",
    "key",
    "credential",
    "contrase",
    "senha",
    "пароль",
    "密码",
    "パスワード",
    "비밀번호",
)
NAME_CHARS = 48
SIGNS_AFTER_NAME = r"\w{0,20}[\"'\]]{0,2}\s{0,3}(?:value)?:?$"
VALUE_AHEAD = r"(?=[=>]?\s{0,3}[\"'`]?[^\s\0\"'`,;()\[\]]{8})"
SIGNS = (
    re.compile(rf"[:=：]{VALUE_AHEAD}"),
    re.compile(rf"\(\s{{0,3}}[\"'][\w.-]{{3,40}}[\"'](,)(?=\s{{0,3}}[\"']){VALUE_AHEAD}"),
    re.compile(rf" is:?(?=\s){VALUE_AHEAD}"),
)
"""Between a name and its value: `key: value`, `name="key" value="..."`, `set("key", "value")`, `the key is value`."""
ASSIGNED = re.compile(
    r"[=>]?\s{0,3}(?:\"([^\"\s\0]{8,200})\"|'([^'\s\0]{8,200})'|`([^`\s\0]{8,200})`|([^\s\0\"'`,;()\[\]]{8,200}(?<!\.)))"
)
"""A value after a sign."""
OPTION = re.compile(
    r"--(?:[a-z]{1,12}-){0,2}(?:pass(?:word|wd|phrase)?|token|secret|api-?key) {1,3}[\"']?([^\s\0\"'`,;()\[\]]{8,200})"
)
"""The value of a program's option."""
IN_ELEMENT = re.compile(r">([^\s\0<>]{8,200})</")
"""A value between tags: <password>...</password>."""
BASIC = re.compile(r"(?<![^\W_])[Bb]asic ([A-Za-z0-9+/]{16,200}={0,2})(?![A-Za-z0-9+/=])")
"""A name and a password in a header: Authorization: Basic ..."""
BEARER = re.compile(r"(?<![^\W_])[Bb]earer ([\w.~+/-]{20,500}={0,2})(?![\w.~+/=-])")
IN_URL = re.compile(r"://[^\s\0/:@\"'<>]{0,64}:([^\s\0/@\"'<>\[\]]{4,200})@(?![\w.-]{0,64}\bexample\b)(?=[\w.\[-])")
AWS_SECRET = re.compile(r"(?<![A-Za-z0-9/+=_-])[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+=_-])")
AZURE_KEY = re.compile(r"(?<![A-Za-z0-9/+])(?<!sha512[-:])[A-Za-z0-9/+]{86}==(?!=)")
BLOCK_START = re.compile(r"-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----|PuTTY-User-Key-File-\d: ")
BLOCK_END = re.compile(r"-----END (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----")
BLOCK_LINE = re.compile(r"[\"'+\s]*(?:[A-Za-z0-9+/=]{4,}|[A-Z][\w-]+: .*)?[\\\"'+,;\s]*")
BLOCK_CHARS = 20_000
MIN_BLOCK_BODY = 16
PLACEHOLDER = re.compile(
    r"your|example|change|replace|insert|placeholder|dummy|redacted|todo|enter|xxx|\*\*\*|\.\.\.|…|[<>{}]|\$\(|%[sd(]",
    re.IGNORECASE,
)
"""Matches values that documentation writes instead of a secret."""
MIN_CHARACTERS = 5
"""Least number of different characters in a random value."""
MIN_PASSWORD = 10
"""Least characters of a password in quotes with digits and letters of only one case."""
BETWEEN_KINDS = re.compile(r"(?<=[A-Za-z])(?=\d)|(?<=\d)(?=[A-Za-z])")
MAX_LETTERS_AND_DIGITS = 6
"""Most characters for each change between letters and digits in a value that is no name: in a random one of letters and
digits there is one in 2.5."""
MIN_HUMPS = 6
"""Least number of capitals after small letters in a key without a digit."""
MIN_LETTERS = 40
MIN_WORD = 16
"""Characters of the shortest word that a form describes."""
BEFORE, AFTER = 64, 4
"""Characters around such a word that patterns see."""
PIECE_CHARS, OVERLAP_CHARS = 2048, 512
"""Runs are searched in pieces: some rules of the package look ahead from every position, which takes quadratic time in
a run's length."""


def secret_spans(text: str) -> Iterator[Span]:
    """Spans of secrets, in no order; they can overlap."""
    for start, end in _windows(text):
        for low in range(start, max(end - OVERLAP_CHARS, start + 1), PIECE_CHARS - OVERLAP_CHARS):
            for first, last in _formed(text[low : min(low + PIECE_CHARS, end)]):
                yield low + first, low + last
    yield from _assigned(text)
    yield from _in_urls(text)
    yield from _blocks(text)


def looks_random(value: str, is_quoted: bool) -> bool:
    """Whether the value of a name for a secret may be one: no placeholder, no name or expression of a program, no
    everyday word."""
    from detect_secrets.filters import heuristic

    if PLACEHOLDER.search(value) or heuristic.is_sequential_string(value) or heuristic.is_potential_uuid(value):
        return False
    if (
        len(set(value)) < MIN_CHARACTERS
        or value.startswith(("$", "/", "http", "./", "~/"))
        or heuristic.is_templated_secret(value)
    ):
        return False
    signs = re.sub(r"[\w.:/-]" if is_quoted else r"[\w.:/=+-]", "", value)
    kinds = [any(map(test, value)) for test in (str.islower, str.isupper, str.isdecimal)] + [bool(signs)]
    if sum(kinds) >= 3 and any(map(str.isdecimal, value)):
        return is_quoted or len(value) >= 10 or bool(signs)
    if not (any(map(str.isdecimal, value)) and any(map(str.isalpha, value))):
        return False
    if len(value) < MIN_WORD:
        return is_quoted and len(value) >= MIN_PASSWORD and value.isalnum()
    is_mixed = len(BETWEEN_KINDS.findall(value)) * MAX_LETTERS_AND_DIGITS >= len(value)
    return entropy(value) >= 3.0 and (is_mixed or max(map(len, re.findall(r"[a-z]*|[A-Z]*", value))) < 8)


def entropy(value: str) -> float:
    """Bits per character."""
    return -sum(count / len(value) * math.log2(count / len(value)) for count in Counter(value).values())


def _windows(text: str) -> Iterator[Span]:
    """Runs of at least MIN_WORD key characters that are no plain words, with the characters around them."""
    kinds = _key_characters()[np.frombuffer(text.encode("ascii", "replace"), dtype=np.uint8)]
    edges = np.flatnonzero(np.diff(kinds > 0, prepend=False, append=False))
    starts, ends = edges[::2], edges[1::2]
    long = np.flatnonzero(ends - starts >= MIN_WORD)
    starts, ends = starts[long], ends[long]
    humps = np.concatenate(([0], (kinds[1:] == 3) & (kinds[:-1] == 1)))
    judged = ((kinds == 2, 1), (humps, MIN_HUMPS), (kinds == 3, MIN_WORD), (kinds == 1, MIN_LETTERS))
    likely = np.logical_or.reduce([_counts_between(marked, starts, ends) >= least for marked, least in judged])
    last = -1
    pending: Span | None = None
    for start, end in zip(starts[likely].tolist(), ends[likely].tolist(), strict=True):
        low = max(start - BEFORE, 0)
        if pending is not None and low <= last:
            pending = (pending[0], end)
        else:
            if pending is not None:
                yield pending[0], min(last, len(text))
            pending = (low, end)
        last = end + AFTER
    if pending is not None:
        yield pending[0], min(last, len(text))


def _counts_between(marked: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Number of true values in marked[start:end], for runs in order."""
    if not len(starts):
        return np.zeros(0, dtype=np.int64)
    return np.add.reduceat(np.append(marked, False).astype(np.int32), np.column_stack((starts, ends)).ravel())[::2]


@cache
def _key_characters() -> np.ndarray:
    """Classes of key characters: 1 for small letters, 2 for digits, 3 for capitals, 4 for signs; 0 for others."""
    kinds = np.zeros(128, dtype=np.uint8)
    kinds[0x61:0x7B], kinds[0x30:0x3A], kinds[0x41:0x5B] = 1, 2, 3
    kinds[[ord(sign) for sign in "_-+/=.:"]] = 4
    return kinds


def _formed(window: str) -> Iterator[Span]:
    """Spans with a documented form."""
    for match in _forms().finditer(window):
        if not PLACEHOLDER.search(match[0]):
            yield match.span()
    for rule in _rules():
        for match in rule.finditer(window):
            start, end = match.span(match.lastindex or 0)
            before = window[start - 1 : start]
            is_whole = not (
                before.isdecimal() or (before.isalpha() and window[start].isalpha()) or window[end : end + 1].isalnum()
            )
            if (
                is_whole
                and any(map(str.isdecimal, match[0]))
                and entropy(window[start:end]) >= 3.0
                and not PLACEHOLDER.search(match[0])
            ):
                yield start, end
    for pattern in (AWS_SECRET, AZURE_KEY):
        for match in pattern.finditer(window):
            classes = (str.islower, str.isupper, str.isdecimal)
            has_all = all(any(map(test, match[0])) for test in classes)
            if has_all and entropy(match[0]) >= 4.3 and not re.search(r"[a-z]{6}|[A-Z]{6}", match[0]):
                yield match.span()

    for match in BASIC.finditer(window):
        password = _decoded(match[1]).partition(":")[2]
        if password and looks_random(password, True):
            yield match.span(1)
    for match in BEARER.finditer(window):
        if looks_random(match[1], True):
            yield match.span(1)


def _decoded(value: str) -> str:
    """The ASCII text that is encoded as base64; "" for anything else."""
    try:
        return base64.b64decode(value, validate=True).decode("ascii")
    except ValueError:  # of both: no base64, or bytes that are no ASCII
        return ""


@cache
def _forms() -> re.Pattern[str]:
    return re.compile(rf"(?<![A-Za-z0-9_])(?:{'|'.join(FORMS)})(?![A-Za-z0-9_])")


@cache
def _rules() -> tuple[re.Pattern[str], ...]:
    """The patterns of RULE_SETS, from the installed package."""
    rules: list[re.Pattern[str]] = []
    for name in RULE_SETS:
        module, detector = name.split(".")
        rules += getattr(importlib.import_module(f"detect_secrets.plugins.{module}"), detector).denylist
    return tuple(rules)


@cache
def _names() -> re.Pattern[str]:
    from detect_secrets.plugins.keyword import DENYLIST

    return re.compile(rf"(?:{'|'.join((*OTHER_NAMES, *DENYLIST))}){SIGNS_AFTER_NAME}", re.IGNORECASE)


def _assigned(text: str) -> Iterator[Span]:
    """Spans of values whose name means a secret."""
    for signs in SIGNS:
        yield from _after(signs, text)
    for match in OPTION.finditer(text):
        if looks_random(match[1], False):
            yield match.span(1)
    for match in IN_ELEMENT.finditer(text):
        name = text[max(match.start() - NAME_CHARS, 0) : match.start()].lower().rpartition("<")[2]
        if any(literal in name for literal in NAME_LITERALS) and _names().search(name) and looks_random(match[1], True):
            yield match.span(1)


def _after(signs: re.Pattern[str], text: str) -> Iterator[Span]:
    last = 0
    for sign in signs.finditer(text):
        end = sign.start(sign.lastindex or 0)
        before = text[max(end - NAME_CHARS, last) : end].lower()
        if end < last or not any(literal in before for literal in NAME_LITERALS) or not _names().search(before):
            continue
        match = ASSIGNED.match(text, sign.end())
        if match and match.lastindex and looks_random(match[match.lastindex], match.lastindex < 4):
            yield match.span(match.lastindex)
            last = match.end()


def _in_urls(text: str) -> Iterator[Span]:
    """Passwords between a user and a host."""
    at = text.find("://")
    while at >= 0:
        match = IN_URL.match(text, at)
        if (
            match
            and not re.fullmatch(r"(?i)(?:my|user)?_?-?(?:pass(?:word|wd)?|pw|pwd|secret|token)|\W*", match[1])
            and not PLACEHOLDER.search(match[1])
        ):
            yield match.span(1)
        at = text.find("://", at + 3)


def _blocks(text: str) -> Iterator[Span]:
    """Private keys, from their first line to their last, or to the last line that can belong to one."""
    at = text.find("PRIVATE KEY")
    while at >= 0:
        match = BLOCK_START.search(text, max(at - 40, 0), at + 40)
        if match is None:
            at = text.find("PRIVATE KEY", at + 1)
            continue
        end, num_chars = match.end(), 0
        for line in re.finditer(
            r"(?:(?!\\n)[^\n\0])*(?:\\n|\n|$|(?=\0))", text[match.end() : match.end() + BLOCK_CHARS]
        ):
            if closing := BLOCK_END.search(line[0]):
                end = match.end() + line.start() + closing.end()
                break
            body = line[0].removesuffix("\\n")
            if not line[0] or not BLOCK_LINE.fullmatch(body):
                break
            num_chars += len(body.strip())
            end = match.end() + line.start() + len(body.rstrip())
        if num_chars >= MIN_BLOCK_BODY:
            yield match.start(), end
        at = text.find("PRIVATE KEY", max(end, at + 1))
