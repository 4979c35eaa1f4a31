"""Lines, paragraphs and sentences of many texts at once, over their code points. Runs in executors: imports no
Spark."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from tasks.data.text.words import NUM_CODE_POINTS, mix, span_hashes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    I64 = NDArray[np.int64]
    F64 = NDArray[np.float64]
    Bools = NDArray[np.bool_]
    Points = NDArray[np.uint32]

BULLETS = "•‣⁃◦▪●○-*"
PLAIN_BULLETS = "-*"
TERMINATORS = ".!?…。．｡！？؟۔।॥։።፧။។៕།༎᙮᠃᜶"
"""Characters that end a sentence, in all scripts that mark it; a closing mark may follow."""
WIDE_TERMINATORS = "。．｡！？"
"""Terminators that need no space after them; in Japanese, a wide or a half-wide full stop ends sentences too."""
CLOSERS = "\"'”’»)]」』"
LINE_ENDS = TERMINATORS + "\"'”’»」』"
"""Last characters of a line of prose: C4's full stop, exclamation mark, question mark and closing quotation marks, in
all scripts."""
PROSE_SENTENCES = 10
"""Sentences of a line that is a paragraph, even where a cut text ends in the middle of one."""
NEWLINE, DOT, ELLIPSIS = ord("\n"), ord("."), ord("…")
SPACE, BULLET, TERMINATOR, WIDE, CLOSER, LINE_END = 1, 2, 4, 8, 16, 32
"""Bits of a code point's kinds."""


class Lines:
    """The lines of all texts that have visible characters, without the white space around them. `text_starts` has one
    entry more than there are texts."""

    def __init__(self, points: Points, text_starts: I64) -> None:
        self.points = points
        self.kinds = kinds_of(points)
        self.line_of_point = np.cumsum(points == NEWLINE) + np.repeat(
            np.arange(len(text_starts) - 1), np.diff(text_starts)
        )
        positions = np.flatnonzero((self.kinds & SPACE) == 0)
        numbers = self.line_of_point[positions]
        is_first = np.ones(len(positions), dtype=bool)
        is_first[1:] = numbers[1:] != numbers[:-1]
        is_last = np.ones(len(positions), dtype=bool)
        is_last[:-1] = is_first[1:]
        self.starts = positions[is_first]
        self.stops = positions[is_last] + 1
        self.numbers = numbers[is_first]
        """Index of each line among all lines, including empty ones."""
        self.offsets = np.searchsorted(self.starts, text_starts)
        """Lines of text i are offsets[i]:offsets[i + 1]."""
        self.sentence_ends = sentence_ends(self.kinds, text_starts)

    def share_of(self, claims: Bools) -> F64:
        """Share of each text's lines for which a claim holds."""
        return share(sums(claims, self.offsets), np.diff(self.offsets))

    def starts_with_bullet(self) -> Bools:
        """A hyphen or asterisk with no space after it begins a speech or emphasis."""
        after = self.kinds[np.minimum(self.starts + 1, np.maximum(self.stops - 1, 0))] & SPACE
        is_plain = np.isin(self.points[self.starts], [ord(mark) for mark in PLAIN_BULLETS])
        return ((self.kinds[self.starts] & BULLET) > 0) & (~is_plain | (after > 0) | (self.stops - self.starts == 1))

    def ends_with_ellipsis(self) -> Bools:
        last = self.points[self.stops - 1]
        dots = np.ones(len(last), dtype=bool)
        for back in (1, 2, 3):
            dots &= (self.stops - back >= self.starts) & (self.points[np.maximum(self.stops - back, 0)] == DOT)
        return (last == ELLIPSIS) | dots

    def is_terminated(self) -> Bools:
        """Whether each line ends as prose does or with a full stop in brackets, or has PROSE_SENTENCES sentences."""
        ends = (self.kinds[self.stops - 1] & LINE_END) > 0
        before, third = (self.kinds[np.maximum(self.stops - back, 0)] & TERMINATOR > 0 for back in (2, 3))
        ends |= (
            (self.kinds[self.stops - 1] & CLOSER > 0) & before & ~third & (self.stops - self.starts > 2)
        )  # not "[...]"
        num_sentences = np.searchsorted(self.sentence_ends, self.stops) - np.searchsorted(
            self.sentence_ends, self.starts
        )
        return ends | (num_sentences >= PROSE_SENTENCES)

    def is_shorter_than(self, num_chars: int) -> Bools:
        return self.stops - self.starts < num_chars

    def holds(self, positions: I64) -> Bools:
        """Whether each line holds one of these positions in the joined texts."""
        return np.isin(self.numbers, self.line_of_point[positions])

    def repeated(self) -> tuple[F64, F64]:
        """Shares of lines, and of the lines' characters, that repeat an earlier line of the same text."""
        return _repeated(self.points, self.starts, self.stops, self.offsets)

    def repeated_paragraphs(self) -> tuple[F64, F64]:
        """The same shares for paragraphs: runs of lines without an empty line between them."""
        owners = np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))
        begins = np.ones(len(self.starts), dtype=bool)
        begins[1:] = (np.diff(self.numbers) > 1) | (np.diff(owners) > 0)
        firsts = np.flatnonzero(begins)
        stops = self.stops[np.append(firsts[1:], len(begins)) - 1] if len(firsts) else self.stops
        return _repeated(self.points, self.starts[firsts], stops, np.searchsorted(firsts, self.offsets))


def sentence_ends(kinds: NDArray[np.uint8], text_starts: I64) -> I64:
    """Positions of the terminators that are wide, or that white space or the text's end follows."""
    ends = np.flatnonzero(kinds & TERMINATOR)
    text_stops = text_starts[np.searchsorted(text_starts, ends, side="right")]
    others = np.append(np.flatnonzero((kinds & (TERMINATOR | CLOSER)) == 0), len(kinds))
    after = np.minimum(others[np.searchsorted(others, ends + 1)], text_stops)
    is_wide = (kinds[ends] & WIDE) > 0
    return ends[is_wide | (after == text_stops) | ((kinds[np.minimum(after, len(kinds) - 1)] & SPACE) > 0)]


def count_sentences(kinds: NDArray[np.uint8], text_starts: I64, ends: I64) -> I64:
    """Number of sentences per text: runs of visible characters up to one of `ends` (sentence_ends) or the text's
    end."""
    body = np.concatenate(([0], np.cumsum((kinds & (TERMINATOR | CLOSER | SPACE)) == 0)))
    marks = np.sort(np.concatenate((ends, text_starts[1:])), kind="stable")
    before = np.sort(np.concatenate((ends, text_starts[:-1])), kind="stable")
    grows = body[marks] > body[before]
    owners = np.searchsorted(text_starts, marks, side="left") - 1
    return np.bincount(owners[grows], minlength=len(text_starts) - 1).astype(np.int64)


def find_phrases(points: Points, text_starts: I64, phrases: tuple[str, ...]) -> I64:
    """Positions in the joined texts at which a phrase (ASCII, in lower case) begins, in any case; matches across the
    end of a text do not count."""
    lower = np.where((points >= ord("A")) & (points <= ord("Z")), points + np.uint32(32), points)
    joined = lower.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass")
    spans = []
    for phrase in phrases:
        position = joined.find(phrase)
        while position >= 0:
            spans.append((position, len(phrase)))
            position = joined.find(phrase, position + 1)
    if not spans:
        return np.zeros(0, dtype=np.int64)
    positions, lengths = np.array(sorted(spans), dtype=np.int64).T
    stops = text_starts[np.searchsorted(text_starts, positions, side="right")]
    return positions[positions + lengths <= stops]


def kinds_of(points: Points) -> NDArray[np.uint8]:
    """Bits SPACE to LINE_END of each code point."""
    return _kinds()[points]


@cache
def _kinds() -> NDArray[np.uint8]:
    kinds = np.zeros(NUM_CODE_POINTS, dtype=np.uint8)
    kinds[[*range(33), 0x85, 0xA0, *range(0x2000, 0x200B), 0x3000]] |= SPACE
    members = {BULLET: BULLETS, TERMINATOR: TERMINATORS, WIDE: WIDE_TERMINATORS, CLOSER: CLOSERS, LINE_END: LINE_ENDS}
    for bit, characters in members.items():
        kinds[[ord(character) for character in characters]] |= bit
    return kinds


def sums(values: NDArray[Any], offsets: I64) -> I64:
    """Integer sums of values[offsets[i]:offsets[i + 1]]."""
    totals = np.concatenate(([0], np.cumsum(values, dtype=np.int64)))
    return totals[offsets[1:]] - totals[offsets[:-1]]


def share(part: NDArray[Any], whole: NDArray[Any], empty: float = 0.0) -> F64:
    """part / whole, `empty` where whole is 0."""
    return np.divide(part, whole, out=np.full(len(part), empty), where=whole > 0)


def _repeated(points: Points, starts: I64, stops: I64, offsets: I64) -> tuple[F64, F64]:
    lengths = stops - starts
    hashes = mix(span_hashes(points, starts, stops))
    owners = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    order = np.argsort(hashes, kind="stable")  # owners ascend already, so they ascend among equal hashes
    is_again = np.zeros(len(order), dtype=bool)
    is_again[order[1:]] = (hashes[order[1:]] == hashes[order[:-1]]) & (owners[order[1:]] == owners[order[:-1]])
    by_count = share(sums(is_again, offsets), np.diff(offsets))
    return by_count, share(sums(np.where(is_again, lengths, 0), offsets), sums(lengths, offsets))
