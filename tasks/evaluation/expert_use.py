"""How evenly a checkpoint spreads validation text over its experts: routed tokens per layer and expert, in experts.parquet.

Measured on rows of equal length without padding, which would all go to the same experts.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from infra.step import Output, Progress
from tasks.evaluation.engine import document_token_ids
from tasks.evaluation.suite import Question

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from model.generation import InProcessEngine

EXPERTS_FILE = "experts.parquet"
MAX_TOKENS = 32_768
"""Enough for some hundred tokens per expert at 160 experts of which 8 work."""
COLUMNS = ("layer", "expert", "num_tokens")


@dataclass(frozen=True)
class ExpertUse:
    """One layer with experts."""

    layer: int
    num_tokens: tuple[int, ...]
    """Routed copies by expert."""

    @property
    def load(self) -> float:
        """The most used expert over the mean; 1 is balance."""
        return max(self.num_tokens) / statistics.fmean(self.num_tokens)

    @property
    def cv(self) -> float:
        """Coefficient of variation: standard deviation over mean."""
        return statistics.pstdev(self.num_tokens) / statistics.fmean(self.num_tokens)

    @property
    def num_dead(self) -> int:
        """Experts that no token was routed to."""
        return sum(not count for count in self.num_tokens)


def measure_expert_use(
    engine: InProcessEngine, tokenizer: Tokenizer, documents: Sequence[Question], sequence_length: int, batch_sequences: int, output: Output
) -> list[ExpertUse]:
    """Of the first documents in the order given, MAX_TOKENS at most, one after the other; empty for a model without experts."""
    import torch
    from torch import Tensor

    from model.moe import Router

    counts: dict[str, Tensor] = {}

    def count(name: str, router: Router, arguments: object, given: tuple[Tensor, Tensor, Tensor]) -> None:
        found = torch.bincount(given[0].flatten(), minlength=router.weight.shape[0]).cpu()
        counts[name] = counts[name] + found if name in counts else found

    routers = {name: module for name, module in engine.model.named_modules() if isinstance(module, Router)}
    hooks = [router.register_forward_hook(partial(count, name)) for name, router in routers.items()]
    stream = list(chain.from_iterable(document_token_ids(tokenizer, document.text) for document in documents))[:MAX_TOKENS]
    length = min(sequence_length, len(stream))
    rows = [stream[start : start + length] for start in range(0, len(stream) - length + 1, length)]
    output.report(Progress(0, len(rows), "rows", "counting routed tokens"))
    try:
        with torch.inference_mode():
            for start in range(0, len(rows), batch_sequences):
                device = engine.model.lm_head.weight.device
                engine.model.hidden_states(torch.tensor(rows[start : start + batch_sequences], device=device))
    finally:
        for hook in hooks:
            hook.remove()
    return [ExpertUse(number, tuple(counts[name].tolist())) for number, name in enumerate(name for name in routers if name in counts)]


def write_expert_use(path: Path, layers: Iterable[ExpertUse]) -> None:
    """One row per layer and expert."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [dict(zip(COLUMNS, (use.layer, expert, count), strict=True)) for use in layers for expert, count in enumerate(use.num_tokens)]
    pq.write_table(pa.Table.from_pylist(rows, schema=pa.schema([(name, pa.int64()) for name in COLUMNS])), path)


def read_expert_use(path: Path) -> list[ExpertUse]:
    """The layers, in order. Raises ValueError where the file is not such a table."""
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    if tuple(table.column_names) != COLUMNS:
        raise ValueError(f"{path} is not a table of routed tokens (columns {table.column_names}): evaluate the checkpoint again")
    layers: dict[int, list[int]] = {}
    for row in table.to_pylist():
        layers.setdefault(row["layer"], []).append(row["num_tokens"])
    return [ExpertUse(layer, tuple(counts)) for layer, counts in sorted(layers.items())]
