"""Rows of one forward and backward pass: tokens, targets, segments, weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model.architecture.losses import IGNORED
from model.architecture.mtp import mtp_targets
from model.architecture.preferences import Preference
from model.architecture.values import ValueTargets
from tasks.data.packing.packed_rows import NO_SEGMENT


@dataclass(frozen=True)
class MicroBatch:
    token_ids_BT: Tensor
    target_ids_BT: Tensor
    """The next token, or IGNORED where it is not trained."""
    segment_ids_BT: Tensor
    """Ids of the whole row, also where the other tensors hold a part of its positions
    (tasks/training/parallel/sequence_parallel.py)."""
    is_segmented: bool
    """Whether attention stays inside segments; MTP targets do in any case."""
    weights_BT: Tensor | None = None
    """Factor of each target's cross-entropy; None weighs all alike."""
    row_numbers_B: Tensor | None = None
    """Numbers of the rows in their phase; None where they are not trained, or sampled."""
    temperature: float = 1.0
    """Divides the logits; where the targets were sampled, it is the temperature of the sampling."""
    scores_targets: bool = False
    """Whether a pass gives the targets' log-probabilities, or a scalar head's values, in place of losses."""
    is_filler: bool = False
    """Nothing to learn from: it only keeps a rank with fewer rows in step with the others."""

    mtp_target_ids_BT: Tensor | None = None
    """The token after the next, or IGNORED; None where it follows from the other tensors, which hold whole rows."""
    preference: Preference | None = None
    """Makes neighbouring rows pairs, whose loss is trained instead of cross-entropy."""
    values: ValueTargets | None = None
    """Makes the rows a critic's, whose loss at the targets is trained instead of cross-entropy."""
    routes_LBTK: Tensor | None = None
    """The experts that the trunk uses (model/architecture/routes.py); None where its routers choose."""
    max_documents: int | None = None
    """A bound of the number of runs of one segment id in the rows; None: on an accelerator the host counts them, for
    which it waits."""
    has_gaps: bool = False
    """Whether some positions hold no document's token."""

    @property
    def model_arguments(self) -> dict[str, Any]:
        """What the model takes beside the tokens."""
        segments = {"segment_ids_BT" if self.is_segmented else "mtp_segment_ids_BT": self.segment_ids_BT}
        return segments | {
            "max_documents": self.max_documents,
            "target_ids_BT": self.target_ids_BT,
            "target_weights_BT": self.weights_BT,
            "temperature": self.temperature,
            "scores_targets": self.scores_targets,
            "mtp_target_ids_BT": self.mtp_target_ids_BT,
            "preference": self.preference,
            "values": self.values,
            "gaps_BT": self.gaps_BT,
            **({} if self.routes_LBTK is None else {"routes_LBTK": self.routes_LBTK}),
        }

    @property
    def gaps_BT(self) -> Tensor | None:
        """True at the positions of the whole rows that hold no document's token; None where there are none."""
        return self.segment_ids_BT == NO_SEGMENT if self.has_gaps else None

    @property
    def num_rows(self) -> int:
        return self.token_ids_BT.shape[0]

    @property
    def num_positions(self) -> int:
        return 0 if self.is_filler else self.token_ids_BT.numel()

    @property
    def attended(self) -> Tensor:
        """(2,), int64: positions that hold a document's token, and the sum of their documents' squared lengths, or of
        the rows' where attention sees over document ends. It counts the whole rows whose segments these are, and reads
        nothing on the host."""
        is_filled_BT = self.segment_ids_BT != NO_SEGMENT
        runs_BT = self.segment_ids_BT if self.is_segmented else torch.zeros_like(self.segment_ids_BT)
        return torch.stack([is_filled_BT.sum(), (squares_up_to(runs_BT) * is_filled_BT).sum()]) * (not self.is_filler)

    @property
    def num_lm_targets(self) -> Tensor:
        """Terms of the first loss's mean: targets, or pairs; a scalar, not read on the host."""
        if self.preference is not None:
            return self.target_ids_BT.new_full((), self.num_rows // 2)
        return (self.target_ids_BT != IGNORED).sum()

    @property
    def num_mtp_targets(self) -> Tensor:
        targets = self.mtp_target_ids_BT
        return ((mtp_targets(self.target_ids_BT, self.segment_ids_BT) if targets is None else targets) != IGNORED).sum()

    @property
    def terms(self) -> Tensor:
        """(3,), int64: terms of the means of the losses, which are next-token targets or pairs, MTP targets,
        sequences."""
        num_rows = self.target_ids_BT.new_full((), self.num_rows)
        return torch.stack([self.num_lm_targets, self.num_mtp_targets, num_rows]) * (not self.is_filler)


def squares_up_to(segment_ids_BT: Tensor) -> Tensor:
    """What each position adds to the squared length of its run of equal ids, int64: 1, 3, 5 ... along a run."""
    positions_T = torch.arange(segment_ids_BT.shape[1], device=segment_ids_BT.device)
    is_first_BT = torch.ones_like(segment_ids_BT, dtype=torch.bool)
    is_first_BT[:, 1:] = segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1]
    starts_BT = torch.where(is_first_BT, positions_T, 0).cummax(1).values
    return 2 * (positions_T - starts_BT) + 1
