"""The answers of a transformers model to token ids, drawn with the numbers that our own engine draws with, and its
scores of given continuations.

So an answer of a quantized checkpoint differs from the unquantized one's only where the format changes a probability
enough, and a paired comparison measures the format, not the dice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tasks.evaluation.engine import Continuations

if TYPE_CHECKING:
    from torch import Tensor, nn

    from model.generation.continuation_scores import ContinuationScore, Pair
    from model.generation.sampling import Sampling

SEQUENCES_AT_ONCE, TOKENS_AT_ONCE = 256, 1 << 16
"""Answers that are computed together, and tokens of their prompts: long documents one after the other."""
SCORED_AT_ONCE = 16
"""Rows that are scored together: each position has a number for every token of the vocabulary."""


class TransformersEngine:
    """A model on this machine's CPU."""

    def __init__(self, model: nn.Module, weights_version: str) -> None:
        self.model, self.weights_version = model, weights_version

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, weights_version: str) -> Continuations:
        """Continue every prompt. Raises NonFiniteLogitsError where nothing can be drawn."""
        from model.generation.generation import sampling_draws

        assert weights_version == self.weights_version, (weights_version, self.weights_version)
        draws = sampling_draws(sampling, len(prompts))
        answers: list[tuple[list[int], list[float]]] = []
        num_rows = max(1, min(SEQUENCES_AT_ONCE, TOKENS_AT_ONCE // max(map(len, prompts), default=1)))
        for start in range(0, len(prompts), num_rows):
            rows = slice(start, start + num_rows)
            answers += self._continue(prompts[rows], sampling, draws[rows])
        return Continuations.up_to_stops(answers, sampling.stop_token_ids)

    def score_continuations(self, pairs: Sequence[Pair]) -> list[ContinuationScore]:
        """One score per pair, in their order."""
        import torch

        scores: dict[int, ContinuationScore] = {}
        order = sorted(range(len(pairs)), key=lambda number: sum(map(len, pairs[number])))
        with torch.inference_mode():
            for start in range(0, len(order), SCORED_AT_ONCE):
                numbers = order[start : start + SCORED_AT_ONCE]
                rows = [[*pairs[number][0], *pairs[number][1]] for number in numbers]
                width = max(map(len, rows)) - 1
                ids_BT = torch.tensor([row[:-1] + [0] * (width + 1 - len(row)) for row in rows])
                logits_BTV = self.model(input_ids=ids_BT).logits.float()
                for row, number in enumerate(numbers):
                    scores[number] = _score(logits_BTV[row], *pairs[number])
        return [scores[number] for number in range(len(pairs))]

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
        lengths = [sampling.max_new_tokens] * len(prompts)
        with torch.inference_mode():
            for number in range(sampling.max_new_tokens):
                positions_BT = (mask_BT.cumsum(-1) - 1).clamp(min=0)[:, -ids_BT.shape[1] :]
                read = self.model(
                    input_ids=ids_BT,
                    attention_mask=mask_BT,
                    position_ids=positions_BT,
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
                logits_BV, cache = read.logits[:, -1].float(), read.past_key_values
                chosen_B = choose_tokens(logits_BV, sampling, draws_BT[:, number])
                chosen_TB.append(chosen_B)
                scores_TB.append(logits_BV.log_softmax(-1).gather(1, chosen_B[:, None])[:, 0])
                done_B |= torch.isin(chosen_B, stops)
                if sampling.ends is not None:
                    for row in (~done_B).nonzero()[:, 0].tolist():
                        if sampling.ends([int(each[row]) for each in chosen_TB]):
                            done_B[row], lengths[row] = True, number + 1
                if bool(done_B.all()):
                    break
                ids_BT = chosen_B[:, None]
                mask_BT = torch.cat([mask_BT, torch.ones_like(ids_BT)], 1)
        token_ids, scores = torch.stack(chosen_TB, 1).tolist(), torch.stack(scores_TB, 1).tolist()
        ended = zip(token_ids, scores, lengths, strict=True)
        return [(ids[:length], own[:length]) for ids, own, length in ended]


def _score(logits_TV: Tensor, context: Sequence[int], continuation: Sequence[int]) -> ContinuationScore:
    """Logits of the row of both, from its first position on."""
    import torch

    from model.generation.continuation_scores import ContinuationScore

    targets_T = torch.tensor(continuation)
    logits_TV = logits_TV[len(context) - 1 : len(context) - 1 + len(continuation)]
    log_probability_T = -torch.nn.functional.cross_entropy(logits_TV, targets_T, reduction="none")
    is_greedy = bool((logits_TV.argmax(-1) == targets_T).all())
    return ContinuationScore(float(log_probability_T.sum()), is_greedy)
