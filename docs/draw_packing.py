"""packing.svg: the two packings and fill-in-the-middle, placed by the functions that pack a phase."""

from __future__ import annotations

import numpy as np

from docs.svg import COLOURS, INK, LEFT, LINE, RIGHT, SOFT, WIDTH, box, svg, text
from tasks.data.packing.best_fit import place_pieces, row_shapes

LENGTHS = (37, 12, 58, 21, 44, 9, 30, 16, 25, 33, 7, 19)
"""Of the documents in packing.svg."""
ROW = 64
UNIT = (WIDTH - LEFT - RIGHT) / ROW
ROW_HEIGHT, SECTION_GAP = 32, 44
FIRST, SECOND, LENGTH = 18, 36, 58
"""Where fill-in-the-middle cuts its document, and how long that is."""
WHOLE = (("prefix", FIRST), ("middle", SECOND - FIRST), ("suffix", LENGTH - 1 - SECOND), ("end", 1))
MOVED = (
    ("P", 1),
    ("prefix", FIRST),
    ("S", 1),
    ("suffix", LENGTH - 1 - SECOND),
    ("M", 1),
    ("middle", SECOND - FIRST),
    ("end", 1),
)
SHADES = {"prefix": COLOURS[0], "middle": COLOURS[1], "suffix": COLOURS[2], "end": INK, "P": SOFT, "S": SOFT, "M": SOFT}


def draw_packing() -> str:
    """The same documents as a stream and in best-fit rows, and one of them rearranged."""
    stream, y = _stream(34)
    best_fit, y = _best_fit(y)
    return svg(y + 100, "How rows are packed", [*stream, *best_fit, *_fill_in_middle(y)])


def _stream(y: int) -> tuple[list[str], int]:
    """The rows of a stream from `y` on, and where the next rows begin."""
    parts = [_heading(y, "stream (pre-training): cut where rows end, attention over document ends")]
    lengths = np.array(LENGTHS)
    slots = np.cumsum(lengths) - lengths
    for number, (slot, length) in enumerate(zip(slots.tolist(), LENGTHS, strict=True)):
        parts += _piece(slot, length, number, y)
    num_rows = -(-int(lengths.sum()) // ROW)
    parts += [_row_name(row, y) for row in range(num_rows)]
    return parts, y + num_rows * ROW_HEIGHT + SECTION_GAP


def _best_fit(y: int) -> tuple[list[str], int]:
    """The rows of best_fit from `y` on, and where the next rows begin."""
    parts = [_heading(y, "best_fit (mid-training, SFT): whole documents, gaps not trained, attention inside documents")]
    lengths = np.array(LENGTHS)
    pieces, slots = place_pieces(lengths, row_shapes(lengths, ROW), ROW)
    for piece, slot in zip(pieces.tolist(), slots.tolist(), strict=True):
        parts += _piece(slot, LENGTHS[piece], piece, y)
    num_rows = int(slots.max()) // ROW + 1
    for row in range(num_rows):
        parts.append(_row_name(row, y))
        used = max(
            slot % ROW + LENGTHS[piece]
            for piece, slot in zip(pieces.tolist(), slots.tolist(), strict=True)
            if slot // ROW == row
        )
        if used < ROW:
            parts.append(box(LEFT + used * UNIT, y + row * ROW_HEIGHT, (ROW - used) * UNIT, "none", LINE))
    return parts, y + num_rows * ROW_HEIGHT + SECTION_GAP


def _fill_in_middle(y: int) -> list[str]:
    """A document in its shard and in the order in which it is read."""
    parts = [
        _heading(
            y, "fill-in-the-middle: a document of code is read as prefix, suffix, middle; the shard stays as it is"
        )
    ]
    for label, pieces, top in (("in the shard", WHOLE, y), ("in the order", MOVED, y + 40)):
        parts.append(text(LEFT - 10, top + 19, label, "end"))
        position = 0
        for name, count in pieces:
            parts += _named(name, LEFT + position * UNIT, top, count * UNIT, SHADES[name])
            position += count
    legend = (
        "P, S, M: <|code_prefix|>, <|code_suffix|>, <|code_middle|>; black: <|endoftext|>. All runs are one document."
    )
    return [*parts, text(LEFT, y + 86, legend)]


def _heading(y: int, content: str) -> str:
    return text(LEFT, y - 16, content, "start", INK)


def _row_name(row: int, y: int) -> str:
    return text(LEFT - 10, y + 19 + row * ROW_HEIGHT, f"row {row}", "end")


def _piece(slot: int, length: int, number: int, y: int) -> list[str]:
    """A document from a slot on, over as many rows as it takes."""
    parts, colour = [], COLOURS[number % len(COLOURS)]
    while length:
        row, column = divmod(slot, ROW)
        here = min(length, ROW - column)
        parts.append(box(LEFT + column * UNIT, y + row * ROW_HEIGHT, here * UNIT, colour, "#fff", 0.28))
        parts.append(text(LEFT + (column + here / 2) * UNIT, y + row * ROW_HEIGHT + 18, f"{number}", "middle", INK))
        slot, length = slot + here, length - here
    return parts


def _named(name: str, x: float, y: float, width: float, colour: str) -> list[str]:
    """A part of the document; that of one token has one letter, or none."""
    part = box(x, y, width, colour, "#fff", 0.35 if width >= 40 else 0.9)
    if width >= 40:
        return [part, text(x + width / 2, y + 18, name, "middle", INK)]
    return [part, text(x + width / 2, y + 18, name, "middle", "#fff")] if len(name) == 1 else [part]
