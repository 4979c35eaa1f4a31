"""Accept or refuse a candidate by its evaluation: floors, then a paired comparison with the reigning champion on the same items.

In: items.parquet of the candidate and, where there is a champion, of the champion on the same suite. Out: decision.json. A refusal is
a result with reasons, never an exception; evaluations that cannot be compared or lack a metric raise.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from infra.step import Artifact, Output, Record, step
from tasks.evaluation.items import Item, arithmetic_accuracy, bits_per_byte, read_items, validation_items

if TYPE_CHECKING:
    from configs.schema import GateRecipe
    from tasks.evaluation.evaluate_checkpoint import Evaluation

NUM_RESAMPLES = 2000
RESAMPLES_AT_ONCE = 100
"""Bounds memory: a block holds this many counts per document."""
BOOTSTRAP_SEED = 46
MIN_PAIRED_DOCUMENTS = 2
"""Below this a resampled interval has no width and proves nothing."""


class GateDecision(Record):
    """The verdict of a gate; also decision.json."""

    accepted: bool
    reasons: tuple[str, ...]
    """One sentence per bound, held or broken, with both numbers; a broken one starts with `refused: `."""
    figures: dict[str, float]
    """What was measured, finite values only."""
    candidate_digest: str
    """Digest of the evaluation that was judged."""
    champion_digest: str
    """Digest of the champion's evaluation; empty where no champion reigned."""


@step(content=("decision.json",), distributions=("numpy", "pyarrow"))
def decide_gate(
    *, evaluation: Artifact[Evaluation], champion_evaluation: Artifact[Evaluation] | None, recipe: GateRecipe, output: Output
) -> GateDecision:
    """Judge an evaluation. Raises ValueError when the champion was evaluated on other items or a metric is missing."""
    items = read_items(evaluation.path("items.parquet"))
    verdict = _Verdict()
    _check_floors(items, recipe, verdict)
    if champion_evaluation is not None:
        ours, theirs = evaluation.record.suite_digest, champion_evaluation.record.suite_digest
        if ours != theirs:
            raise ValueError(
                f"candidate and champion were evaluated on different items ({ours[:12]} and {theirs[:12]}): evaluate on one suite"
            )
        _compare(items, read_items(champion_evaluation.path("items.parquet")), recipe, verdict)
    decision = verdict.decision(evaluation.digest, "" if champion_evaluation is None else champion_evaluation.digest)
    output.path("decision.json").write_text(json.dumps(decision.model_dump(mode="json"), indent=1, sort_keys=True) + "\n")
    return decision


class _Verdict:
    """Collects bounds and figures while a gate is decided."""

    def __init__(self) -> None:
        self.accepted = True
        self.reasons: list[str] = []
        self.figures: dict[str, float] = {}

    def hold(self, held: bool, reason: str) -> None:
        """Note one bound; `reason` says what was measured and what was allowed."""
        self.accepted &= held
        self.reasons.append(reason if held else f"refused: {reason}")

    def measure(self, name: str, value: float) -> bool:
        """Note a figure; one that is not finite refuses, and False is returned."""
        if math.isfinite(value):
            self.figures[name] = round(value, 6)
            return True
        self.hold(False, f"{name} is {value}")
        return False

    def decision(self, candidate_digest: str, champion_digest: str) -> GateDecision:
        return GateDecision(
            accepted=self.accepted, reasons=tuple(self.reasons), figures=self.figures,
            candidate_digest=candidate_digest, champion_digest=champion_digest,
        )  # fmt: skip


def _check_floors(items: list[Item], recipe: GateRecipe, verdict: _Verdict) -> None:
    bits = bits_per_byte(items)
    if verdict.measure("bits_per_byte", bits):
        verdict.hold(bits <= recipe.max_bits_per_byte, f"bits_per_byte {bits:.4f}, at most {recipe.max_bits_per_byte} allowed")
    accuracy = arithmetic_accuracy(items)
    if verdict.measure("arithmetic_accuracy", accuracy):
        verdict.hold(
            accuracy >= recipe.min_arithmetic_accuracy,
            f"arithmetic_accuracy {accuracy:.4f}, at least {recipe.min_arithmetic_accuracy} needed",
        )


def _compare(items: list[Item], champion_items: list[Item], recipe: GateRecipe, verdict: _Verdict) -> None:
    champion_bits = bits_per_byte(champion_items)
    if not math.isfinite(champion_bits):
        raise ValueError(f"the champion's bits per byte is {champion_bits}: move the alias champion to a sound version, then run again")
    verdict.measure("champion_bits_per_byte", champion_bits)
    if "bits_per_byte" not in verdict.figures:
        return
    candidate, champion = validation_items(items), validation_items(champion_items)
    assert [item.item_id for item in candidate] == [item.item_id for item in champion], "equal suite digests, different items"
    if len(candidate) < MIN_PAIRED_DOCUMENTS:
        verdict.hold(False, f"{len(candidate)} validation document, at least {MIN_PAIRED_DOCUMENTS} needed for a paired comparison")
        return
    difference, lower, upper = paired_difference(candidate, champion)
    verdict.measure("bits_per_byte_difference", difference)
    verdict.measure("difference_lower", lower)
    verdict.measure("difference_upper", upper)
    verdict.hold(
        upper < recipe.noninferiority_bits_per_byte,
        f"bits_per_byte differs from the champion's by {difference:+.4f} [{lower:+.4f}, {upper:+.4f}] (95 %, {len(candidate)} documents), "
        f"the upper end must stay below {recipe.noninferiority_bits_per_byte:+}",
    )


def paired_difference(candidate: list[Item], champion: list[Item]) -> tuple[float, float, float]:
    """Candidate minus champion in bits per byte and its 95 % interval, by a paired bootstrap over documents with a fixed seed.

    A resample draws documents; its difference is summed bits over summed bytes, so that long documents weigh as they do in the metric.
    """
    import numpy as np

    extra_bits = np.array([ours.bits - theirs.bits for ours, theirs in zip(candidate, champion, strict=True)])
    num_bytes = np.array([item.num_bytes for item in candidate], dtype=np.float64)
    chance = np.random.default_rng(BOOTSTRAP_SEED)
    equal = np.full(len(extra_bits), 1 / len(extra_bits))
    differences = []
    for _ in range(NUM_RESAMPLES // RESAMPLES_AT_ONCE):
        draws = chance.multinomial(len(extra_bits), equal, RESAMPLES_AT_ONCE)
        differences.append((draws @ extra_bits) / (draws @ num_bytes))
    lower, upper = np.quantile(np.concatenate(differences), [0.025, 0.975])
    return float(extra_bits.sum() / num_bytes.sum()), float(lower), float(upper)
