"""Step: scores preference pairs with a checkpoint -> scores.parquet (id, chosen, rejected).

A reward model gives its scores, a language model the log-probabilities of the answers: those of the start of a DPO
phase are its reference. The whole model is on one device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from infra.step import Artifact, Output, Progress, Record, step
from tasks.evaluation.engine import reproducible_arithmetic

if TYPE_CHECKING:
    from torch import Tensor

    from configs.schema import EvaluationResources, PairScoringRecipe
    from model.architecture.transformer import Glm4Moe
    from tasks.data.packing.pack_pairs import PackedPairs
    from tasks.training.parallel.micro_batch import MicroBatch
    from tasks.training.state.trained_checkpoint import TrainedCheckpoint


class PairScores(Record):
    num_pairs: int
    is_scored: bool
    """Whether a reward model gave the values."""


@step(content=("scores.parquet",), distributions=("torch", "pyarrow", "safetensors", "numpy"))
def score_pairs(
    *,
    checkpoint: Artifact[TrainedCheckpoint],
    pairs: Artifact[PackedPairs],
    recipe: PairScoringRecipe,
    resources: EvaluationResources,
    output: Output,
) -> PairScores:
    """Score the pairs of the parts that the recipe names, in the order of the files. Raises ValueError for a value that
    is not finite."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch

    from model.device import open_device
    from model.formats.hf_checkpoint import is_reward_model, load_model
    from tasks.training.loop.pair_rows import PairRows

    hf_dir, device = checkpoint.directory("hf"), open_device(resources.device)
    is_scored, at_once = is_reward_model(hf_dir), max(1, resources.batch_sequences // 2)
    ids: list[str] = []
    values: list[Tensor] = []
    with reproducible_arithmetic(recipe.num_threads), torch.inference_mode():
        model = load_model(hf_dir, device=device, dtype=getattr(torch, recipe.dtype), is_scored=is_scored)
        for part in recipe.parts:
            rows = PairRows(pairs.path(f"{part}.parquet"))
            for first in range(0, len(rows), at_once):
                batch = rows.micro_batch(range(first, min(first + at_once, len(rows))), device)
                values.append(row_values(model, batch).view(-1, 2).double().cpu())
                output.report(Progress(min(first + at_once, len(rows)), len(rows), "pairs", part))
            ids += rows.ids
    scored = torch.cat(values)
    broken = [
        identity for identity, is_sound in zip(ids, scored.isfinite().all(1).tolist(), strict=True) if not is_sound
    ]
    if broken:
        raise ValueError(
            f"phase {checkpoint.record.phase} gives pair {broken[0]} a score that is not finite ({len(broken)} pairs "
            f"in all): its weights are broken, train it again with a lower learning rate"
        )
    chosen, rejected = scored.T.tolist()
    table = pa.table({"id": ids, "chosen": chosen, "rejected": rejected})
    pq.write_table(table, output.path("scores.parquet"))
    return PairScores(num_pairs=len(ids), is_scored=is_scored)


def row_values(model: Glm4Moe, batch: MicroBatch) -> Tensor:
    """The score of each row, or the log-probability of its targets, float32 (B,)."""
    hidden_BTD = model.hidden_states(batch.token_ids_BT)
    if model.is_scored:
        assert batch.preference is not None, batch
        return model.score(hidden_BTD, batch.preference.last_B)
    return model.lm_head.log_probabilities(hidden_BTD, batch.target_ids_BT).sum(1)
