"""What a model makes of preference pairs, computed by the ranks that train: scores, or log-probabilities of answers.

DPO is held to a reference. It scores all pairs before the phase's own model has memory, once for all starts of the job
(REFERENCE_FILE in the work directory: id, chosen, rejected). At its end a phase leaves what it makes of the pairs to
judge by (SCORES_FILE in final/: also reference_chosen and reference_rejected, 0 for a reward model).
"""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tasks.training.loop.frozen_models import open_frozen
from tasks.training.loop.pair_data import PARTS, REFERENCE_FILE, TEST_FILE, open_pairs
from tasks.training.loop.pair_rows import SIDES, PairRows
from tasks.training.parallel.control import on_first_rank
from tasks.training.policy.answer_rows import AnswerRows
from tasks.training.policy.divided_passes import score_targets

if TYPE_CHECKING:
    from tasks.training.parallel.ranks import Ranks
    from tasks.training.parallel.trainable import DividedModel, Trainable
    from tasks.training.state.job import TrainingJob

SCORES_FILE = "pairs/scores.parquet"


def keep_reference(job: TrainingJob, ranks: Ranks) -> None:
    """Score all pairs by the model that DPO is held to, unless an earlier start of the job did; all ranks call it.
    Raises ValueError for a value that is not finite."""
    path = Path(job.work_dir) / REFERENCE_FILE
    if on_first_rank(path.exists):
        return
    reference = open_frozen(job, job.reference_dir or job.start_weights_dir, ranks)
    ids, values = [], []
    for name in PARTS:
        rows = open_pairs(job, name, is_reference=True)
        ids += rows.ids
        values.append(score_pairs(reference, rows, job.resources.micro_batch_sequences))
    del reference
    gc.collect()  # the engine holds itself
    values_P2 = torch.cat(values)
    _refuse_broken(ids, values_P2, "the reference")
    on_first_rank(lambda: _write(path, _columns(ids, values_P2)))


def leave_scores(job: TrainingJob, trainable: Trainable) -> None:
    """Write what the trained model makes of the pairs to judge by; all ranks call it, after the export. Raises
    ValueError for a value that is not finite."""
    rows = open_pairs(job, TEST_FILE)
    values_P2 = score_pairs(trainable, rows, job.resources.micro_batch_sequences)
    _refuse_broken(rows.ids, values_P2, f"phase {job.recipe.phase}")
    columns = _columns(rows.ids, values_P2)
    columns |= {f"reference_{side}": rows.reference_P2[:, number] for number, side in enumerate(SIDES)}
    on_first_rank(lambda: _write(Path(job.work_dir) / "final" / SCORES_FILE, columns))


def score_pairs(divided: DividedModel, rows: PairRows, num_sequences: int) -> Tensor:
    """Of both answers of every pair the score, or the log-probability of the answer, float64 (P, 2), the same on all
    ranks, which all call it. A micro-batch has `num_sequences` rows."""
    at_once, values = max(1, num_sequences // 2) * divided.ranks.data.size, []
    for first in range(0, len(rows), at_once):
        batch = rows.micro_batch(range(first, min(first + at_once, len(rows))), divided.device)
        zeros_BT = torch.zeros(batch.token_ids_BT.shape, device=divided.device)
        answers = AnswerRows(batch.token_ids_BT, batch.target_ids_BT, zeros_BT, gaps_BT=batch.gaps_BT)
        scored_BT = score_targets(divided, answers, 1.0, max(2, num_sequences))
        if divided.model.is_scored:
            assert batch.preference is not None, batch
            last_B = batch.preference.last_B
            values_B = scored_BT[torch.arange(len(last_B), device=last_B.device), last_B]
        else:
            values_B = (scored_BT * answers.is_answer_BT).sum(1)
        values.append(values_B.view(-1, 2).double().cpu())
    return torch.cat(values)


def _refuse_broken(ids: list[str], values_P2: Tensor, who: str) -> None:
    is_sound = values_P2.isfinite().all(1).tolist()
    broken = [identity for identity, is_finite in zip(ids, is_sound, strict=True) if not is_finite]
    if broken:
        raise ValueError(
            f"{who} gives pair {broken[0]} a score that is not finite ({len(broken)} pairs in all): its weights are "
            f"broken, train it again with a lower learning rate"
        )


def _columns(ids: list[str], values_P2: Tensor) -> dict[str, Any]:
    return {"id": ids, **{side: values_P2[:, number].numpy() for number, side in enumerate(SIDES)}}


def _write(path: Path, columns: dict[str, Any]) -> None:
    """By one rename."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    pq.write_table(pa.table(columns), temporary)
    os.replace(temporary, path)
