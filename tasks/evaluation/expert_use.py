"""Measures how evenly a checkpoint spreads held-out text over its experts: routed tokens per layer and expert.

They are in experts.parquet. Rows have equal length and no padding: padding tokens would all go to the same experts.
Even a router that sends every token to random experts loads some more than others: `chance_load` and `chance_cv` say
how much on this number of tokens.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from infra.step import Output, Progress
from tasks.evaluation.scored_text import scored_text
from tasks.evaluation.suite import Question

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from model.generation.generation import InProcessEngine

EXPERTS_FILE = "experts.parquet"
COLUMNS = ("layer", "expert", "num_tokens", "num_routed")
CHANCE = 1e-3
"""Probability that an ideal router exceeds `chance_load`, or `chance_cv`, in any of the layers."""


@dataclass(frozen=True)
class ExpertUse:
    """One layer with experts."""

    layer: int
    num_tokens: tuple[int, ...]
    """Tokens that were sent to each expert."""
    num_routed: int
    """Tokens that the router saw; each goes to several experts."""

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

    @property
    def num_per_token(self) -> float:
        """Experts that a token goes to."""
        return sum(self.num_tokens) / self.num_routed


def chance_load(layers: Sequence[ExpertUse]) -> float:
    """The load over the mean that the most used expert of all layers exceeds with probability CHANCE, if every token
    goes to random experts.

    One expert's count is binomial: of num_routed tokens each comes with probability num_per_token / experts. Bonferroni
    over all experts of all layers.
    """
    from scipy.stats import binom

    use, num_counts = layers[0], sum(len(layer.num_tokens) for layer in layers)
    share = use.num_per_token / len(use.num_tokens)
    return float(binom.isf(CHANCE / num_counts, use.num_routed, share)) / (use.num_routed * share)


def chance_cv(layers: Sequence[ExpertUse]) -> float:
    """The same for the coefficient of variation: its square is about chi-squared with experts - 1 degrees of
    freedom."""
    from scipy.stats import chi2

    use, freedom = layers[0], len(layers[0].num_tokens) - 1
    expected = (
        (1 - use.num_per_token / len(use.num_tokens)) * len(use.num_tokens) / (use.num_routed * use.num_per_token)
    )
    return math.sqrt(expected * float(chi2.isf(CHANCE / len(layers), freedom)) / freedom)


def measure_expert_use(
    engine: InProcessEngine,
    tokenizer: Tokenizer,
    documents: Sequence[Question],
    sequence_length: int,
    batch_sequences: int,
    output: Output,
) -> list[ExpertUse]:
    """Expert use on the documents in the order given, one after the other; empty for a model without experts."""
    import torch
    from torch import Tensor

    from model.architecture.moe import Router

    counts: dict[str, Tensor] = {}

    def count(name: str, router: Router, arguments: object, given: tuple[Tensor, Tensor, Tensor]) -> None:
        routed = torch.bincount(given[0].flatten(), minlength=router.weight.shape[0]).cpu()
        counts[name] = counts[name] + routed if name in counts else routed

    routers = {name: module for name, module in engine.model.named_modules() if isinstance(module, Router)}
    hooks = [router.register_forward_hook(partial(count, name)) for name, router in routers.items()]
    stream = list(chain.from_iterable(scored_text(tokenizer, document).token_ids for document in documents))
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
    used = [name for name in routers if name in counts]
    return [ExpertUse(number, tuple(counts[name].tolist()), sum(map(len, rows))) for number, name in enumerate(used)]


def write_expert_use(path: Path, layers: Iterable[ExpertUse]) -> None:
    """One row per layer and expert."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        dict(zip(COLUMNS, (use.layer, expert, count, use.num_routed), strict=True))
        for use in layers
        for expert, count in enumerate(use.num_tokens)
    ]
    pq.write_table(pa.Table.from_pylist(rows, schema=pa.schema([(name, pa.int64()) for name in COLUMNS])), path)


def read_expert_use(path: Path) -> list[ExpertUse]:
    """The layers, in order. Raises ValueError where the file is not such a table."""
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    if tuple(table.column_names) != COLUMNS:
        raise ValueError(
            f"{path} is not a table of routed tokens (columns {table.column_names}): evaluate the checkpoint again"
        )
    layers: dict[tuple[int, int], list[int]] = {}
    for row in table.to_pylist():
        layers.setdefault((row["layer"], row["num_routed"]), []).append(row["num_tokens"])
    return [ExpertUse(layer, tuple(counts), num_routed) for (layer, num_routed), counts in sorted(layers.items())]
