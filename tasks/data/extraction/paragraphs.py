"""Cuts documents into paragraphs, hashes them by their words, counts them over documents, and removes them.

A paragraph is a line. Where a text is wrapped (blank lines, and no long line) it is a block between blank lines. Two
paragraphs are the same if their words are: case, punctuation and white space do not count. Runs in executors: imports
no Spark.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.records.documents import DOCUMENT_COLUMNS, content_digest, names_of
from tasks.data.records.documents_by_id import read_marked
from tasks.data.text.words import BASE, mix, split_words

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    from configs.files.stored_files import StoredFile

KEY_COLUMNS = "key long, record long, id string"
"""key: hash of a paragraph in its group; record: hash of the document's record, since the pieces of one record count as
one document here."""
SAMPLE_COLUMNS = "key long, text string, collection string, source string"
MAX_WRAPPED_LINE = 120
"""Characters of the longest wrapped line. A text with a longer one was not wrapped, so its lines are paragraphs."""
CHUNK_DOCUMENTS = 256
SAMPLE_CHARS = 200


def split_paragraphs(text: str) -> tuple[list[str], str]:
    """A text's paragraphs, and the separator that joins them again."""
    lines = text.split("\n")
    if "\n\n" in text and max(map(len, lines)) <= MAX_WRAPPED_LINE:
        return text.split("\n\n"), "\n\n"
    return lines, "\n"


def paragraph_hashes(paragraphs: list[str]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """(hash over the words in their order, number of words) of each paragraph."""
    words = split_words(paragraphs)
    position = np.arange(len(words.hashes)) - np.repeat(words.offsets[:-1], words.counts)
    sums = np.concatenate(
        ([np.uint64(0)], np.cumsum(mix(words.hashes + position.astype(np.uint64) * BASE), dtype=np.uint64))
    )
    return mix(sums[words.offsets[1:]] - sums[words.offsets[:-1]] + words.counts.astype(np.uint64)), words.counts


def _keyed(
    texts: list[str], groups: NDArray[np.int64], min_words: int
) -> Iterator[tuple[list[str], str, NDArray[np.int64]]]:
    """Per text its paragraphs, their separator, and their keys; 0 for a paragraph that is too short to be judged."""
    cut = [split_paragraphs(text) for text in texts]
    hashes, num_words = paragraph_hashes([paragraph for paragraphs, _ in cut for paragraph in paragraphs])
    sizes = [len(paragraphs) for paragraphs, _ in cut]
    keys = mix(hashes ^ np.repeat(groups.view(np.uint64), sizes)) | np.uint64(1)
    keys = np.where(num_words >= min_words, keys, np.uint64(0)).view(np.int64)
    for (paragraphs, joint), own in zip(cut, np.split(keys, np.cumsum(sizes)[:-1]), strict=True):
        yield paragraphs, joint, own


def _chunks(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    for start in range(0, batch.num_rows, CHUNK_DOCUMENTS):
        yield batch.slice(start, CHUNK_DOCUMENTS)


def paragraph_keys(batches: Iterator[pa.RecordBatch], min_words: int) -> Iterator[pa.RecordBatch]:
    """KEY_COLUMNS, one row per different paragraph of a document, for rows (id, record, group, text)."""
    import pyarrow as pa

    for batch in batches:
        for chunk in _chunks(batch):
            keyed = _keyed(chunk.column("text").to_pylist(), chunk.column("group").to_numpy(), min_words)
            unique = [np.unique(keys[keys != 0]) for _, _, keys in keyed]
            owners = pa.array(np.repeat(np.arange(len(unique)), [len(keys) for keys in unique]))
            columns = [
                pa.array(np.concatenate(unique)),
                chunk.column("record").take(owners),
                chunk.column("id").take(owners),
            ]
            yield pa.RecordBatch.from_arrays(columns, names=["key", "record", "id"])


def frequent_keys(batches: Iterator[pa.RecordBatch], min_documents: int) -> Iterator[pa.RecordBatch]:
    """The rows of KEY_COLUMNS (sorted by key and record) whose key is in at least `min_documents` records, without the
    first record of each key.

    The first record keeps the paragraph: copies of one article share all of it, and without a keeper its text would
    disappear from the corpus. Between batches only the rows of the last key are kept, and only while it has fewer than
    `min_documents` records.
    """
    import pyarrow as pa

    waiting: list[pa.RecordBatch] = []
    reached: int | None = None
    for batch in batches:
        if not batch.num_rows:
            continue
        table = pa.Table.from_batches([*waiting, batch]).combine_chunks()
        keys, records = table.column("key").to_numpy(), table.column("record").to_numpy()
        starts = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
        sizes = np.diff(starts, append=len(keys))
        is_new = np.ones(len(keys), dtype=bool)
        is_new[1:] = (keys[1:] != keys[:-1]) | (records[1:] != records[:-1])
        continues = keys[starts] == reached if reached is not None else np.zeros(len(starts), dtype=bool)
        is_frequent = (np.add.reduceat(is_new.astype(np.int64), starts) >= min_documents) | continues
        is_keeper = (records == np.repeat(records[starts], sizes)) & ~np.repeat(continues, sizes)
        yield from table.filter(pa.array(np.repeat(is_frequent, sizes) & ~is_keeper)).to_batches()
        reached = int(keys[-1]) if is_frequent[-1] else None
        waiting = [] if is_frequent[-1] else table.slice(int(starts[-1])).combine_chunks().to_batches()


def remove_paragraphs(
    batches: Iterator[pa.RecordBatch], files: list[StoredFile], min_words: int, min_remaining_chars: int
) -> Iterator[pa.RecordBatch]:
    """Documents of the files without the paragraphs whose keys are in `keys` (null: none), with the reason
    ONLY_BOILERPLATE where too little is left.

    Input: id, group and keys of the documents; output: DOCUMENT_COLUMNS, then bytes_before and reason.
    """
    for batch in read_marked(batches, files, names_of(DOCUMENT_COLUMNS)):
        for chunk in _chunks(batch):
            keys = chunk.column("keys").to_pylist()
            touched = [index for index, lost in enumerate(keys) if lost]
            texts = chunk.column("text").to_pylist()
            groups = chunk.column("group").to_numpy()[touched]
            reasons = [""] * len(texts)
            for index, (parts, joint, own) in zip(
                touched, _keyed([texts[index] for index in touched], groups, min_words) if touched else (), strict=True
            ):
                stays = ~np.isin(own, np.array(keys[index], dtype=np.int64))
                texts[index] = _joined([part for part, kept in zip(parts, stays, strict=True) if kept], joint)
                reasons[index] = ONLY_BOILERPLATE if len(texts[index].strip()) < min_remaining_chars else ""
            yield _rewritten(chunk, texts, touched, reasons)


ONLY_BOILERPLATE = "only_boilerplate"


def _joined(parts: list[str], joint: str) -> str:
    """Join paragraphs, without blank lines at the ends and without consecutive ones that removed lines leave."""
    kept = [part for index, part in enumerate(parts) if part.strip() or (index and parts[index - 1].strip())]
    return joint.join(kept).strip("\n")


def _rewritten(chunk: pa.RecordBatch, texts: list[str], touched: list[int], reasons: list[str]) -> pa.RecordBatch:
    import pyarrow as pa

    columns = {name: chunk.column(name) for name in chunk.schema.names if name not in ("group", "keys")}
    columns["bytes_before"], columns["reason"] = columns["num_bytes"], pa.array(reasons, pa.string())
    if touched:
        digests, chars, sizes = (columns[name].to_pylist() for name in ("content_digest", "num_chars", "num_bytes"))
        for index in touched:
            digests[index], chars[index] = content_digest(texts[index]), len(texts[index])
            sizes[index] = len(texts[index].encode())
        rewritten = {"text": pa.array(texts, pa.string()), "content_digest": pa.array(digests, pa.string())}
        columns |= {**rewritten, "num_chars": pa.array(chars, pa.int64()), "num_bytes": pa.array(sizes, pa.int64())}
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def paragraph_samples(
    batches: Iterator[pa.RecordBatch], files: list[StoredFile], min_words: int
) -> Iterator[pa.RecordBatch]:
    """SAMPLE_COLUMNS for documents (id, group, keys) of the files: the beginning of each paragraph whose key is in
    `keys`, with the document's collection and source."""
    import pyarrow as pa

    for batch in read_marked(batches, files, ["id", "text", "collection", "source"]):
        for chunk in _chunks(batch):
            keyed = _keyed(chunk.column("text").to_pylist(), chunk.column("group").to_numpy(), min_words)
            owners = zip(*(chunk.column(name).to_pylist() for name in ("keys", "collection", "source")), strict=True)
            samples: dict[int, tuple[str, str, str]] = {}
            for (parts, _, own), (wanted, collection, source) in zip(keyed, owners, strict=True):
                for index in np.flatnonzero(np.isin(own, np.array(wanted, dtype=np.int64)))[::-1]:
                    samples[int(own[index])] = (parts[index].strip()[:SAMPLE_CHARS], collection, source)
            texts = list(zip(*samples.values(), strict=True)) or [()] * 3
            columns = [pa.array(list(samples), pa.int64()), *(pa.array(list(values), pa.string()) for values in texts)]
            yield pa.RecordBatch.from_arrays(columns, names=names_of(SAMPLE_COLUMNS))
