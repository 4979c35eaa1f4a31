"""The rows of text that quantization looks at."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infra.step import Artifact
    from tasks.data.packing.pack_phase import PackedPhase
    from tasks.data.shards.shard_chats import ChatShards
    from tasks.data.shards.shard_documents import TokenShards


def calibration_rows(
    packed: Artifact[PackedPhase],
    sources: tuple[Artifact[TokenShards] | Artifact[ChatShards] | None, ...],
    num_rows: int,
) -> list[list[int]]:
    """Token ids of the first rows, without gaps and without the last target. `sources` hold the tokens."""
    from configs.files.block_reader import BlockReader
    from tasks.data.packing.packed_rows import NO_SEGMENT, PackedRows

    files = [file for source in sources if source is not None for file in source.files("shards/*")]
    rows = PackedRows(packed.files("*"), files, BlockReader())
    tokens, segments, _ = rows.rows(0, min(num_rows, len(rows)))
    rows.close()
    return [row[:-1][own[:-1] != NO_SEGMENT].tolist() for row, own in zip(tokens, segments, strict=True)]
