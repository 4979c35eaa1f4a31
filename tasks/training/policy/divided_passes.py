"""What a model says of sampled answers where ranks divide its weights or its rows' positions: by its engine's passes.

All ranks make equally many passes, as their layers exchange tokens, weights and hidden states. Every rank gets the same
numbers: each position's is computed once, and added to zeros.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from model.architecture.routes import recorded_routes
from tasks.training.parallel.pipeline_parallel import target_scores_in_stages
from tasks.training.parallel.sequence_parallel import own_positions
from tasks.training.policy.rank_shares import share_batches

if TYPE_CHECKING:
    from tasks.training.parallel.micro_batch import MicroBatch
    from tasks.training.parallel.trainable import DividedModel
    from tasks.training.policy.answer_rows import AnswerRows, RouteComparison


@torch.no_grad()
def score_targets(
    divided: DividedModel,
    rows: AnswerRows,
    temperature: float,
    num_sequences: int,
    comparison: RouteComparison | None = None,
) -> Tensor:
    """log p(target) under the present weights at this temperature, or a scalar head's value at every position; float32
    (B, T). All ranks call it with the same rows. `comparison` counts where the routers choose otherwise than in the
    rollout."""
    ranks, whole_BT = divided.ranks, torch.zeros_like(rows.rollout_log_probabilities_BT)
    is_training = divided.model.training
    divided.engine.eval()
    every = torch.arange(len(whole_BT), device=whole_BT.device)
    for numbers, is_filler in share_batches(rows, every, num_sequences, ranks.data):
        batch = rows.batch(numbers).micro_batch(is_filler=is_filler, temperature=temperature, scores_targets=True)
        layers = divided.model.trunk_layers
        with nullcontext([]) if comparison is None else recorded_routes(layers) as chosen:
            scored_BT = _score(divided, own_positions(batch, ranks))
        kept_LBTK = rows.batch(numbers).routes_LBTK
        if comparison is not None and kept_LBTK is not None and not is_filler:
            comparison.add(layers, chosen, kept_LBTK)
        if not is_filler:
            first = ranks.context.rank * scored_BT.shape[1]
            whole_BT[numbers, first : first + scored_BT.shape[1]] = scored_BT
    divided.engine.train(is_training)
    for axis in (ranks.replicas, ranks.pipeline):
        if axis.group is not None:
            dist.all_reduce(whole_BT, group=axis.group)
    return whole_BT


def _score(divided: DividedModel, batch: MicroBatch) -> Tensor:
    if divided.ranks.pipeline.size > 1:
        return target_scores_in_stages(divided, batch)
    output = divided.engine(batch.token_ids_BT, **batch.model_arguments)
    assert output.target_scores_BT is not None, "the micro-batch scores its targets"
    return output.target_scores_BT
