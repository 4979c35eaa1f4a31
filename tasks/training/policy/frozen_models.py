"""The models that a policy phase reads and never changes: its reference, and the reward model that scores answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn.utils.rnn import pad_sequence

from model.formats.hf_checkpoint import load_model

if TYPE_CHECKING:
    from model.architecture.transformer import Glm4Moe


def open_frozen(checkpoint_dir: str, dtype: str, device: torch.device, is_scored: bool = False) -> Glm4Moe:
    """A checkpoint's model in the arithmetic of the phase, none of whose weights has a gradient."""
    model = load_model(Path(checkpoint_dir), dtype=getattr(torch, dtype), device=device, is_scored=is_scored)
    return model.requires_grad_(False)


@torch.no_grad()
def score_answers(model: Glm4Moe, sequences: Sequence[list[int]], num_sequences: int) -> list[float]:
    """The reward model's score of each prompt with its answer, `num_sequences` at once: as in its training that of the
    last token, which is the one that ended the answer, or where the answer was cut off its last one."""
    device, scores = model.score.weight.device, []
    for first in range(0, len(sequences), num_sequences):
        rows = [torch.tensor(sequence) for sequence in sequences[first : first + num_sequences]]
        hidden_BTD = model.hidden_states(pad_sequence(rows, batch_first=True).to(device))
        last_B = torch.tensor([len(row) - 1 for row in rows], device=device)
        scores += model.score(hidden_BTD, last_B).tolist()
    return scores
