"""Intervals of the bits per byte that a format loses, over the documents that it and its original both scored."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from tasks.evaluation.intervals import Interval, ratio_interval


def checkpoint_loss(scores_path: Path) -> Interval | None:
    """Of a quantized checkpoint, by quantized_scores.json; None where a score is not finite, and of one document."""
    rows = json.loads(scores_path.read_text(encoding="utf-8"))
    return _interval([(row["original"], row["quantized"], row["num_bytes"]) for row in rows])


def gguf_loss(scores_path: Path, gguf_type: str, reference_type: str) -> Interval | None:
    """Of a GGUF file beside that of the reference type, by gguf_scores.json; None as above."""
    scores: dict[str, list[dict[str, Any]]] = json.loads(scores_path.read_text(encoding="utf-8"))
    pairs = zip(scores[reference_type], scores[gguf_type], strict=True)
    return _interval(
        [(before["log_probability"], after["log_probability"], before["num_bytes"]) for before, after in pairs]
    )


def _interval(rows: list[tuple[float | None, float | None, int]]) -> Interval | None:
    lost = [before - after for before, after, _ in rows if before is not None and after is not None]
    if len(lost) < max(2, len(rows)):
        return None
    low, high = ratio_interval([each / math.log(2) for each in lost], [num_bytes for _, _, num_bytes in rows])
    return round(low, 6), round(high, 6)
