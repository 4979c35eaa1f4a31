"""walk.svg: the rooms and files that a record passes until it is in a batch."""

from __future__ import annotations

from dataclasses import dataclass

from docs.svg import BAND, COLOURS, INK, LEFT, SOFT, WIDTH, svg, text


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
    parts = [text(x, 20, head) for x, head in heads.items()]
    y = 34
    for number, stop in enumerate(WALK):
        height, colour = max(2, len(stop.files)) * WALK_LINE + 6, COLOURS[number % len(COLOURS)]
        parts.append(f'<rect x="0" y="{y}" width="{WIDTH}" height="{height}" fill="{BAND}"/>')
        parts.append(
            f'<rect x="16" y="{y}" width="{LEFT - 8}" height="{height}" rx="3" fill="{colour}" fill-opacity="0.28"/>'
        )
        parts.append(text(16 + (LEFT - 8) / 2, y + height / 2 + 4, stop.name, "middle", INK))
        parts.append(text(LEFT + 24, y + 17, f"{stop.room}/", "start", INK))
        for line, (file, does) in enumerate(stop.files.items()):
            parts.append(text(FILE_X, y + 17 + line * WALK_LINE, file, "start", colour))
            parts.append(text(DOES_X, y + 17 + line * WALK_LINE, does))
        parts.append(text(LEAVES_X, y + 17, stop.leaves, "start", INK))
        if stop.reasons:
            parts.append(text(LEAVES_X, y + 17 + WALK_LINE, f"or a line in {stop.reasons}"))
        y += height + STOP_GAP
        if stop is not WALK[-1]:
            middle = 16 + (LEFT - 8) / 2
            parts.append(f'<path d="M{middle - 5:g},{y - STOP_GAP + 4} h10 l-5,8 z" fill="{SOFT}"/>')
    return svg(y - STOP_GAP + 8, "The walk of a record from a source file to a batch", parts)
