"""Draws the pictures of docs/ from the configurations: python -m docs.draw_docs [--check]

course.svg: what changes along the course of configs/full.yaml, by the functions that training reads. packing.svg: the
two packings and fill-in-the-middle, placed by the functions that pack a phase. walk.svg: the rooms and files that a
record passes until it is in a batch.
--check says whether the files are what would be drawn. Long: four pictures share its lines and boxes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import numpy as np

from configs.load import load_scale
from configs.schema import Scale
from tasks.data.packing.best_fit import place_pieces, row_shapes
from tasks.training.schedule.schedules import batch_tokens_at, learning_rate_at, value_at

DOCS_DIR = Path(__file__).resolve().parent
WIDTH, LEFT, RIGHT = 980, 128, 16
INK, SOFT, LINE, BAND = "#1c2330", "#5b6575", "#dfe3ea", "#f3f5f9"
COLOURS = ("#3457d5", "#c2660c", "#13795b", "#8a3ffc", "#007d79", "#b3261e")
PANEL, GAP, TOP = 74, 22, 62
NUM_POINTS = 60


def draw_course(scale: Scale) -> str:
    """Small multiples over the first course's tokens; phases as bands, the mid-training part drawn wider, for it is a
    twentieth of all."""
    phases = [phase for phase in scale.phases if phase.name in scale.courses[0].recipe.phases]
    course, total = scale.courses[0].recipe, scale.course_num_tokens(phases[0])
    starts = [scale.course_start_tokens(phase) for phase in phases]
    ends = [*starts[1:], total]
    widths = np.array([0.34, 0.24, *([0.14] * (len(phases) - 2))])[: len(phases)]
    edges = np.concatenate([[0.0], np.cumsum(widths / widths.sum())])

    def x_of(tokens: float) -> float:
        number = max(n for n, start in enumerate(starts) if tokens >= start)
        inside = (tokens - starts[number]) / (ends[number] - starts[number])
        return LEFT + (edges[number] + inside * (edges[number + 1] - edges[number])) * (WIDTH - LEFT - RIGHT)

    tokens = sorted(
        {
            *np.linspace(0, ends[0] * 0.06, NUM_POINTS).tolist(),
            *(t for a, b in zip(starts, ends, strict=True) for t in np.linspace(a, b - 1, NUM_POINTS).tolist()),
        }
    )
    phase_at = lambda t: phases[max(n for n, start in enumerate(starts) if t >= start)].recipe  # noqa: E731
    panels: list[tuple[str, Callable[[float], float], Callable[[float], str]]] = [
        ("learning rate", lambda t: learning_rate_at(course, total, round(t)), lambda v: f"{v:.2g}"),
        ("batch, tokens", lambda t: batch_tokens_at(course, total, round(t)), lambda v: f"{v / 2**20:.0f}M"),
        ("router bias rate", lambda t: value_at(course.router_bias_rate, total, round(t)), lambda v: f"{v:g}"),
        ("MTP weight", lambda t: value_at(course.mtp_loss_weight, total, round(t)), lambda v: f"{v:g}"),
        ("RoPE base (log)", lambda t: np.log10(phase_at(t).rope_theta), lambda v: f"{10**v:,.0f}"),
        ("sequence (log2)", lambda t: np.log2(phase_at(t).sequence_length), lambda v: f"{2**v:,.0f}"),
    ]
    height = TOP + len(panels) * (PANEL + GAP) + 8
    parts = []
    for number, (phase, start, end) in enumerate(zip(phases, starts, ends, strict=True)):
        x0, x1 = x_of(start), LEFT + edges[number + 1] * (WIDTH - LEFT - RIGHT)
        if number % 2:
            parts.append(
                f'<rect x="{x0:.1f}" y="{TOP - 40}" width="{x1 - x0:.1f}" height="{height - TOP + 34}" fill="{BAND}"/>'
            )
        parts.append(_text((x0 + x1) / 2, TOP - 26, phase.name, "middle", INK))
        kind = f"{(end - start) / 1e12:g}T" if end - start > 9e11 else f"{(end - start) / 1e9:.0f}B"
        parts.append(_text((x0 + x1) / 2, TOP - 11, f"{kind}, {phase.recipe.packing}", "middle"))
    for number, (title, value, show) in enumerate(panels):
        top = TOP + number * (PANEL + GAP)
        values = [float(value(t)) for t in tokens]
        low, high = (0.0, max(values)) if "log" not in title else (min(values) - 0.3, max(values))
        points = " ".join(
            f"{x_of(t):.1f},{top + PANEL - (v - low) / (high - low) * (PANEL - 6):.1f}"
            for t, v in zip(tokens, values, strict=True)
        )
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{top + PANEL}" y2="{top + PANEL}" stroke="{LINE}"/>')
        parts.append(f'<polyline fill="none" stroke="{COLOURS[number]}" stroke-width="2" points="{points}"/>')
        parts.append(_text(LEFT - 10, top + 18, title, "end", INK))
        parts.append(_text(LEFT - 10, top + 36, f"{show(values[0])} first", "end"))
        parts.append(_text(LEFT - 10, top + 52, f"{show(max(values))} highest", "end"))
        parts.append(_text(LEFT - 10, top + 68, f"{show(values[-1])} last", "end"))
    return _svg(height, f"The course of scale {scale.scale}", parts)


LENGTHS = (37, 12, 58, 21, 44, 9, 30, 16, 25, 33, 7, 19)
"""Of the documents in packing.svg."""
ROW = 64


def draw_packing() -> str:
    """The same documents as a stream and in best-fit rows, and one of them rearranged."""
    lengths = np.array(LENGTHS)
    unit = (WIDTH - LEFT - RIGHT) / ROW
    parts, y = [], 34
    parts.append(
        _text(LEFT, 18, "stream (pre-training): cut where rows end, attention over document ends", "start", INK)
    )
    slots = np.cumsum(lengths) - lengths
    for number, (slot, length) in enumerate(zip(slots.tolist(), LENGTHS, strict=True)):
        parts += _piece(slot, length, number, y, unit)
    num_rows = -(-int(lengths.sum()) // ROW)
    parts += [_text(LEFT - 10, y + 19 + row * 32, f"row {row}", "end") for row in range(num_rows)]
    y += num_rows * 32 + 44
    parts.append(
        _text(
            LEFT,
            y - 16,
            "best_fit (mid-training, SFT): whole documents, gaps not trained, attention inside documents",
            "start",
            INK,
        )
    )
    shapes = row_shapes(lengths, ROW)
    pieces, slots = place_pieces(lengths, shapes, ROW)
    for piece, slot in zip(pieces.tolist(), slots.tolist(), strict=True):
        parts += _piece(slot, LENGTHS[piece], piece, y, unit)
    num_rows = int(slots.max()) // ROW + 1
    for row in range(num_rows):
        parts.append(_text(LEFT - 10, y + 19 + row * 32, f"row {row}", "end"))
        used = max(
            slot % ROW + LENGTHS[piece]
            for piece, slot in zip(pieces.tolist(), slots.tolist(), strict=True)
            if slot // ROW == row
        )
        if used < ROW:
            parts.append(_box(LEFT + used * unit, y + row * 32, (ROW - used) * unit, "none", LINE))
    y += num_rows * 32 + 44
    parts.append(
        _text(
            LEFT,
            y - 16,
            "fill-in-the-middle: a document of code is read as prefix, suffix, middle; the shard stays as it is",
            "start",
            INK,
        )
    )
    first, second, length = 18, 36, 58
    whole = [
        ("prefix", 0, first),
        ("middle", first, second),
        ("suffix", second, length - 1),
        ("end", length - 1, length),
    ]
    moved = [
        ("P", 1),
        ("prefix", first),
        ("S", 1),
        ("suffix", length - 1 - second),
        ("M", 1),
        ("middle", second - first),
        ("end", 1),
    ]
    shades = {
        "prefix": COLOURS[0],
        "middle": COLOURS[1],
        "suffix": COLOURS[2],
        "end": INK,
        "P": SOFT,
        "S": SOFT,
        "M": SOFT,
    }
    parts.append(_text(LEFT - 10, y + 19, "in the shard", "end"))
    for name, start, stop in whole:
        parts += _named(name, LEFT + start * unit, y, (stop - start) * unit, shades[name])
    y += 40
    parts.append(_text(LEFT - 10, y + 19, "in the order", "end"))
    x = float(LEFT)
    for name, count in moved:
        parts += _named(name, x, y, count * unit, shades[name])
        x += count * unit
    parts.append(
        _text(
            LEFT,
            y + 46,
            "P, S, M: <|code_prefix|>, <|code_suffix|>, <|code_middle|>; end: <|endoftext|>. All runs are one "
            "document.",
        )
    )
    return _svg(y + 60, "How rows are packed", parts)


@dataclass(frozen=True)
class Stop:
    """A part of a record's walk; a record may be dropped there, with a reason in a table of that stop."""

    name: str
    room: str
    files: dict[str, str]
    """File in the room -> what it does; the first one is the step or the entry."""
    leaves: str
    """What the record is afterwards."""
    reasons: str = ""
    """Table that names what was dropped, and why; empty where nothing is."""


DROPPED = "dropped.parquet"
WALK = (
    Stop(
        "read",
        "tasks/data/readers",
        {"source_records.py": "opens source files by format", "web_archives.py": "reads the pages of archives"},
        "text and its offset",
    ),
    Stop(
        "ingest",
        "tasks/data/sources",
        {"ingest_documents.py": "is the step"},
        "record with its markup",
        "rejected.parquet",
    ),
    Stop(
        "extract",
        "tasks/data/extraction",
        {
            "extract_documents.py": "is the step",
            "html_text.py": "finds the main text of a page",
            "plain_text.py": "cuts long texts into documents",
        },
        "document of plain text",
        DROPPED,
    ),
    Stop(
        "boilerplate",
        "tasks/data/extraction",
        {"remove_boilerplate.py": "removes shared paragraphs"},
        "document, shorter",
        DROPPED,
    ),
    Stop(
        "score",
        "tasks/data/scoring",
        {
            "score_documents.py": "is the step",
            "language_id.py": "identifies the language",
            "text_classifiers.py": "scores quality and toxicity",
            "ngram_model.py": "computes the perplexity",
        },
        "document with scores",
    ),
    Stop(
        "deduplicate",
        "tasks/data/deduplication",
        {
            "deduplicate_documents.py": "keeps one document of a cluster",
            "minhash.py": "signs texts and compares them",
            "remove_semantic_duplicates.py": "compares vectors",
            "split_documents.py": "chooses train, validation or test",
        },
        "document with a split",
        DROPPED,
    ),
    Stop(
        "filter",
        "tasks/data/filtering",
        {
            "filter_documents.py": "is the step",
            "score_bounds.py": "compares scores with bounds",
            "heuristics.py": "applies the rules of quality",
        },
        "document in a bucket",
        DROPPED,
    ),
    Stop(
        "mask",
        "tasks/data/privacy",
        {"mask_personal_data.py": "is the step", "personal_data.py": "finds personal data and secrets"},
        "document with placeholders",
    ),
    Stop(
        "decontaminate",
        "tasks/data/decontamination",
        {"decontaminate_documents.py": "is the step", "overlap.py": "finds evaluation items in texts"},
        "document to train on",
        DROPPED,
    ),
    Stop(
        "tokenize",
        "tasks/data/text",
        {"pretokens.py": "cuts texts into pre-tokens", "text_encoder.py": "turns them into token ids"},
        "token ids",
    ),
    Stop(
        "shard",
        "tasks/data/shards",
        {
            "shard_documents.py": "is the step",
            "tokenize_parts.py": "encodes and collects documents",
            "token_shard.py": "writes .bin and .idx",
        },
        "sequence in a shard",
    ),
    Stop(
        "pack",
        "tasks/data/packing",
        {"pack_phase.py": "is the step: orders a phase", "packed_rows.py": "reads rows by that order"},
        "piece in a row",
    ),
    Stop(
        "batch",
        "tasks/training/loop",
        {"phase_data.py": "reads the next rows ahead", "batches.py": "divides rows among ranks"},
        "row in a micro-batch",
    ),
)
FILE_X, DOES_X, LEAVES_X = 340, 556, 782
WALK_LINE, STOP_GAP = 18, 16


def draw_walk() -> str:
    """The stops from top to bottom, each with its room, its files, and what the record is afterwards."""
    heads = {16: "stop", LEFT + 24: "room", FILE_X: "file", DOES_X: "what it does", LEAVES_X: "the record afterwards"}
    parts = [_text(x, 20, head) for x, head in heads.items()]
    y = 34
    for number, stop in enumerate(WALK):
        height, colour = max(2, len(stop.files)) * WALK_LINE + 6, COLOURS[number % len(COLOURS)]
        parts.append(f'<rect x="0" y="{y}" width="{WIDTH}" height="{height}" fill="{BAND}"/>')
        parts.append(
            f'<rect x="16" y="{y}" width="{LEFT - 8}" height="{height}" rx="3" fill="{colour}" fill-opacity="0.28"/>'
        )
        parts.append(_text(16 + (LEFT - 8) / 2, y + height / 2 + 4, stop.name, "middle", INK))
        parts.append(_text(LEFT + 24, y + 17, f"{stop.room}/", "start", INK))
        for line, (file, does) in enumerate(stop.files.items()):
            parts.append(_text(FILE_X, y + 17 + line * WALK_LINE, file, "start", colour))
            parts.append(_text(DOES_X, y + 17 + line * WALK_LINE, does))
        parts.append(_text(LEAVES_X, y + 17, stop.leaves, "start", INK))
        if stop.reasons:
            parts.append(_text(LEAVES_X, y + 17 + WALK_LINE, f"or a line in {stop.reasons}"))
        y += height + STOP_GAP
        if stop is not WALK[-1]:
            middle = 16 + (LEFT - 8) / 2
            parts.append(f'<path d="M{middle - 5:g},{y - STOP_GAP + 4} h10 l-5,8 z" fill="{SOFT}"/>')
    return _svg(y - STOP_GAP + 8, "The walk of a record from a source file to a batch", parts)


def _piece(slot: int, length: int, number: int, y: int, unit: float) -> list[str]:
    """A document from a slot on, over as many rows as it takes."""
    parts, colour = [], COLOURS[number % len(COLOURS)]
    while length:
        row, column = divmod(slot, ROW)
        here = min(length, ROW - column)
        parts.append(_box(LEFT + column * unit, y + row * 32, here * unit, colour, "#fff", 0.28))
        parts.append(_text(LEFT + (column + here / 2) * unit, y + row * 32 + 18, f"{number}", "middle", INK))
        slot, length = slot + here, length - here
    return parts


def _named(name: str, x: float, y: float, width: float, colour: str) -> list[str]:
    label = [] if width < 40 else [_text(x + width / 2, y + 18, name, "middle", INK)]
    return [_box(x, y, width, colour, "#fff", 0.35 if label else 0.9), *label]


def _box(x: float, y: float, width: float, fill: str, stroke: str, opacity: float = 1.0) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="26" rx="3" fill="{fill}" '
        f'fill-opacity="{opacity}" stroke="{stroke}"/>'
    )


def _text(x: float, y: float, content: str, anchor: str = "start", colour: str = SOFT) -> str:
    return f'<text x="{x:.1f}" y="{y:g}" text-anchor="{anchor}" fill="{colour}">{escape(content)}</text>'


def _svg(height: float, label: str, parts: Sequence[str]) -> str:
    style = "<style>text{font:12px system-ui,sans-serif}</style>"
    body = "\n".join([style, f'<rect width="{WIDTH}" height="{height:g}" fill="#fff"/>', *parts])
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" role="img"'
    return f'{opening} aria-label="{escape(label)}">\n{body}\n</svg>\n'


def pictures() -> dict[str, str]:
    """File name -> content."""
    return {"course.svg": draw_course(load_scale("full")), "packing.svg": draw_packing(), "walk.svg": draw_walk()}


def main() -> None:
    """Write the pictures, or compare them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 where a file is not what would be drawn")
    is_check = parser.parse_args().check
    differing = [
        name
        for name, text in pictures().items()
        if not (DOCS_DIR / name).exists() or (DOCS_DIR / name).read_text() != text
    ]
    for name, text in pictures().items():
        if not is_check:
            (DOCS_DIR / name).write_text(text)
    if is_check and differing:
        raise SystemExit(f"draw again: {', '.join(differing)}")
    print(f"{', '.join(differing) or 'nothing'} {'differs' if is_check else 'changed'}")


if __name__ == "__main__":
    main()
