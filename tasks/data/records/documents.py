"""The one record type of the data stages: columns, identity, normalisation. Runs in executors too: imports no Spark."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

DOCUMENT_COLUMNS = (
    "id string, source string, offset long, piece long, collection string, url string, licence string, domain string, "
    "lang string, "
    "repository string, path string, text string, content_digest string, num_chars long, num_bytes long"
)
"""offset: position of the record in its source: its byte after decompression; in a web archive its byte as stored, as
in CDX indexes (tasks/data/readers/archive_records.py); in Parquet its row number; piece: character offset of this
document in its record's text; collection: the group to which limits per source apply; repository, path: those of a
file, commit or thread whose repository is known, else empty; num_bytes: UTF-8 bytes of the text."""

RECORD_COLUMNS = f"{DOCUMENT_COLUMNS}, markup string"
"""Columns of ingested records: one row per whole record, its text still in the source's markup."""
PLAIN, HTML, WIKITEXT, JSON_RECORD = "", "html", "wikitext", "json"
"""Markups of a record's text. JSON_RECORD: all fields of an evaluation record, since decontamination has to know
question from choice."""

SCORE_COLUMNS = (
    "language string, language_score double, quality double, toxicity double, perplexity double, "
    "perplexity_percentile double, "
    "factuality double"
)
"""language: ISO 639 code detected in the text, empty where none is detected; language_score: share of its letters in
that language, or the probability of the user's model; quality, toxicity, factuality: probabilities of the trained
classifiers; perplexity: per word, of the n-gram model of the language; perplexity_percentile: share of the held-out
reference documents of that language with a lower one. NULL where nothing could score it."""

PREPARED_COLUMNS = (
    f"{DOCUMENT_COLUMNS}, cluster string, split string, language string, quality double, quality_bucket int"
)
"""Columns of cleaned documents and of generated ones. quality_bucket: 0 for the lowest; -1 where no score exists."""
UNBUCKETED = -1

CHAT_COLUMNS = (
    "id string, source string, offset long, piece long, collection string, licence string, kind string, messages "
    "string, tools string, "
    "num_bytes long"
)
"""messages, tools: JSON lists; piece: number of the conversation in its record; num_bytes: UTF-8 bytes of both
lists."""

PAIR_COLUMNS = (
    "id string, source string, offset long, piece long, collection string, licence string, kind string, prompt "
    "string, chosen string, rejected string, tools string, num_bytes long"
)
"""prompt, tools: JSON lists; chosen, rejected: the answers, each a JSON message; num_bytes: UTF-8 bytes of the four."""

DROPPED_COLUMNS = "id string, reason string, kept_id string"
"""kept_id: the document that is kept instead, or the evaluation item it overlaps with; empty where there is none."""

TRAIN, VALIDATION, TEST = "train", "validation", "test"
"""Parts of the split: VALIDATION is measured while a phase trains and may choose among its weights; gates judge by
TEST."""
CODE, COMMIT, ISSUE, MATH = "code", "commit", "issue", "math"
SYNTHETIC, CHAT, REPOSITORY, AGENTIC = "synthetic", "chat", "repository", "agentic"
"""Domains that steps assign: generated problems, conversations, and repositories whose files are concatenated."""

NUM_EXAMPLES = 3
"""Examples of dropped documents that a message or the report shows."""
NUM_HASHES = 1 << 32
"""Number of values that a 32-bit hash (sampling_hash) can have."""

WHITE_SPACE = re.compile(r"\s")
DIGESTED_CHARS = 1 << 20


def arrow_schema(columns: str) -> pa.Schema:
    """The Arrow schema of a schema string with the types string, long, int and double."""
    import pyarrow as pa

    types = {"string": pa.string(), "long": pa.int64(), "int": pa.int32(), "double": pa.float64()}
    fields = [column.split(" ") for column in columns.split(", ")]
    return pa.schema([(name, types[kind]) for name, kind in fields])


def names_of(columns: str) -> list[str]:
    """The column names of a schema string."""
    return [column.split(" ")[0] for column in columns.split(", ")]


def document_id(source: str, offset: int, piece: int) -> str:
    """The first 16 hex digits of the sha256 over a document's source, offset and piece."""
    return hashlib.sha256(f"{source}\n{offset}\n{piece}".encode()).hexdigest()[:16]


def sampling_hash(identity: str) -> int:
    """32 uniform bits of a document's id: the last ones, since the first decide which file it is written to."""
    return int(identity[8:], 16)


def content_digest(text: str) -> str:
    """sha256 of the text in Unicode normal form C with every run of white space as one space."""
    digest, begin, gap = hashlib.sha256(), 0, ""
    while begin < len(text):
        # Blocks end at white space, which never composes with a neighbour. Splitting 50 MB at once takes over a
        # gigabyte.
        space = WHITE_SPACE.search(text, begin + DIGESTED_CHARS)
        end = space.start() if space else len(text)
        words = " ".join(unicodedata.normalize("NFC", text[begin:end]).split())
        digest.update(f"{gap}{words}".encode() if words else b"")
        begin, gap = end, " " if words else gap
    return digest.hexdigest()


def cut_pieces(text: str, max_chars: int) -> list[tuple[int, str]]:
    """(character offset, piece) of a text, cut after the last paragraph end, line end or space that fits. The
    pieces joined give the text again."""
    pieces = []
    start = 0
    while len(text) - start > max_chars:
        end = start + max_chars
        for separator in ("\n\n", "\n", " "):
            position = text.rfind(separator, start + max_chars // 2, end)
            if position >= 0:
                end = position + len(separator)
                break
        pieces.append((start, text[start:end]))
        start = end
    pieces.append((start, text[start:]))
    return pieces
