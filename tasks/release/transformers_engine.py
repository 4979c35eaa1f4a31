"""The answers of a transformers model to token ids, drawn with the numbers that our own engine draws with.

So an answer of a quantized checkpoint differs from the unquantized one's only where the format changes a probability
enough, and a paired comparison measures the format, not the dice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tasks.evaluation.engine import Continuations

if TYPE_CHECKING:
    from torch import Tensor, nn

    from model.generation.sampling import Sampling

SEQUENCES_AT_ONCE = 256
"""Answers that are computed together."""


class TransformersEngine:
    """A model on this machine's CPU."""

    def __init__(self, model: nn.Module, weights_version: str) -> None:
        self.model, self.weights_version = model, weights_version

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, weights_version: str) -> Continuations:
        """Continue every prompt. Raises NonFiniteLogitsError where nothing can be drawn."""
        from model.generation.generation import sampling_draws

        assert weights_version == self.weights_version, (weights_version, self.weights_version)
        assert sampling.ends is None, sampling
        draws = sampling_draws(sampling, len(prompts))
        answers: list[tuple[list[int], list[float]]] = []
        for start in range(0, len(prompts), SEQUENCES_AT_ONCE):
            rows = slice(start, start + SEQUENCES_AT_ONCE)
            answers += self._continue(prompts[rows], sampling, draws[rows])
        return Continuations.up_to_stops(answers, sampling.stop_token_ids)

    def _continue(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, draws: Sequence[Sequence[float]]
    ) -> list[tuple[list[int], list[float]]]:
        """Of one batch: prompts end together, and what fills the shorter ones up in front is not attended to."""
        import torch

        from model.generation.sampling import choose_tokens

        width = max(map(len, prompts))
        ids_BT = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask_BT = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        draws_BT, stops = torch.tensor(draws), torch.tensor(sampling.stop_token_ids)
        done_B = torch.zeros(len(prompts), dtype=torch.bool)
        cache: Any = None
        chosen_TB: list[Tensor] = []
        scores_TB: list[Tensor] = []
        with torch.inference_mode():
            for number in range(sampling.max_new_tokens):
                positions_BT = (mask_BT.cumsum(-1) - 1).clamp(min=0)[:, -ids_BT.shape[1] :]
                read = self.model(
                    input_ids=ids_BT,
                    attention_mask=mask_BT,
                    position_ids=positions_BT,
                    past_key_values=cache,
                    use_cache=True,
                )
                logits_BV, cache = read.logits[:, -1].float(), read.past_key_values
                chosen_B = choose_tokens(logits_BV, sampling, draws_BT[:, number])
                chosen_TB.append(chosen_B)
                scores_TB.append(logits_BV.log_softmax(-1).gather(1, chosen_B[:, None])[:, 0])
                done_B |= torch.isin(chosen_B, stops)
                if bool(done_B.all()):
                    break
                ids_BT = chosen_B[:, None]
                mask_BT = torch.cat([mask_BT, torch.ones_like(ids_BT)], 1)
        token_ids, scores = torch.stack(chosen_TB, 1).tolist(), torch.stack(scores_TB, 1).tolist()
        return list(zip(token_ids, scores, strict=True))
