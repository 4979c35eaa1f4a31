"""Accept or refuse a candidate by its evaluation: floors, then paired comparisons with its start and with the reigning champion.

In: items.parquet and experts.parquet of the candidate and, where there are any, items.parquet of the checkpoint that the phase started
from and of the champion, on the same suite. Out: decision.json. A refusal is a result with reasons, never an exception; evaluations that
cannot be compared or lack a metric raise.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from infra.step import Artifact, Output, Record, step
from tasks.evaluation.expert_use import EXPERTS_FILE, ExpertUse, read_expert_use
from tasks.evaluation.intervals import mean_interval, ratio_interval
from tasks.evaluation.items import (
    ARITHMETIC,
    CHAT_PROBLEM,
    VALIDATION,
    Item,
    accuracy,
    bits_per_byte,
    by_domain,
    distinct_answer_share,
    items_of,
    num_non_finite,
    read_items,
)

if TYPE_CHECKING:
    from configs.schema import GateRecipe
    from tasks.evaluation.evaluate_checkpoint import Evaluation

MIN_PAIRED_ITEMS = 2
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
    start_digest: str = ""
    """Digest of the evaluation of what the phase started from; empty where that had none."""
    champion_digest: str = ""
    """Digest of the champion's evaluation; empty where no champion reigned."""


@step(content=("decision.json",), distributions=("numpy", "pyarrow"))
def decide_gate(
    *,
    evaluation: Artifact[Evaluation],
    start_evaluation: Artifact[Evaluation] | None,
    champion_evaluation: Artifact[Evaluation] | None,
    recipe: GateRecipe,
    output: Output,
) -> GateDecision:
    """Judge an evaluation. Raises ValueError when start or champion were evaluated on other items, or a metric is missing."""
    items = read_items(evaluation.path("items.parquet"))
    verdict = _Verdict()
    _check_experts(read_expert_use(evaluation.path(EXPERTS_FILE)), recipe, verdict)
    _check_floors(items, recipe, verdict)
    if start_evaluation is not None:
        before = _comparable(evaluation, start_evaluation, "start")
        _compare_bits(items, before, "start", recipe.start_bits_per_byte, verdict)
        _compare_domains(items, before, recipe.max_forgetting_bits_per_byte, verdict)
        _compare_passes(items, before, recipe.start_pass_at_1, verdict)
    if champion_evaluation is not None:
        reigning = _comparable(evaluation, champion_evaluation, "champion")
        _compare_bits(items, reigning, "champion", recipe.noninferiority_bits_per_byte, verdict)
    decision = GateDecision(
        accepted=verdict.accepted, reasons=tuple(verdict.reasons), figures=verdict.figures, candidate_digest=evaluation.digest,
        start_digest="" if start_evaluation is None else start_evaluation.digest,
        champion_digest="" if champion_evaluation is None else champion_evaluation.digest,
    )  # fmt: skip
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

    def floor(self, name: str, value: float, needed: float) -> None:
        """Note a figure that must not lie below a bound."""
        if self.measure(name, value):
            self.hold(value >= needed, f"{name} {value:.4f}, at least {needed} needed")


def _check_floors(items: list[Item], recipe: GateRecipe, verdict: _Verdict) -> None:
    bits = bits_per_byte(items)
    if verdict.measure("bits_per_byte", bits):
        verdict.hold(bits <= recipe.max_bits_per_byte, f"bits_per_byte {bits:.4f}, at most {recipe.max_bits_per_byte} allowed")
    verdict.floor("arithmetic_accuracy", accuracy(items, ARITHMETIC), recipe.min_arithmetic_accuracy)
    verdict.floor("pass_at_1", accuracy(items, CHAT_PROBLEM), recipe.min_pass_at_1)
    verdict.floor("distinct_answer_share", distinct_answer_share(items), recipe.min_distinct_answer_share)
    broken = num_non_finite(items)
    verdict.measure("num_non_finite", broken)
    verdict.hold(broken == 0, f"{broken} of {len(items)} items have a log-probability that is not finite, 0 allowed")


def _check_experts(layers: list[ExpertUse], recipe: GateRecipe, verdict: _Verdict) -> None:
    """Ceilings on the worst layer's imbalance; a model without experts has none."""
    for name, ceiling in (("load", recipe.max_expert_load), ("cv", recipe.max_expert_cv)):
        if layers:
            worst = max(layers, key=lambda use: getattr(use, name))
            value = getattr(worst, name)
            verdict.measure(f"expert_{name}", value)
            verdict.hold(
                value <= ceiling, f"expert_{name} {value:.4f} in layer {worst.layer + 1} of those with experts, at most {ceiling} allowed"
            )
    if layers:
        verdict.measure("num_dead_experts", sum(use.num_dead for use in layers))


def _compare_domains(items: list[Item], other_items: list[Item], margin: float, verdict: _Verdict) -> None:
    """No domain may have been forgotten: the same interval against the start as over all documents, one domain at a time."""
    others = by_domain(other_items, VALIDATION)
    for domain, candidate in by_domain(items, VALIDATION).items():
        if len(candidate) < MIN_PAIRED_ITEMS or not all(math.isfinite(item.bits) for item in (*candidate, *others[domain])):
            verdict.reasons.append(f"domain {domain} is not judged alone: {len(candidate)} document, or one that is not finite")
            continue
        difference, lower, upper = paired_bits_per_byte(candidate, others[domain])
        verdict.measure(f"forgetting_{domain}", difference)
        verdict.hold(
            upper < margin,
            f"bits_per_byte of domain {domain} differs from the start's by {difference:+.4f} [{lower:+.4f}, {upper:+.4f}] "
            f"(95 %, {len(candidate)} documents), the upper end must stay below {margin:+}",
        )


def _comparable(evaluation: Artifact[Evaluation], other: Artifact[Evaluation], name: str) -> list[Item]:
    """The other evaluation's items, if it was asked the same."""
    ours, theirs = evaluation.record.suite_digest, other.record.suite_digest
    if ours != theirs:
        raise ValueError(f"candidate and {name} were evaluated on different items ({ours[:12]} and {theirs[:12]}): evaluate on one suite")
    return read_items(other.path("items.parquet"))


def _compare_bits(items: list[Item], other_items: list[Item], name: str, margin: float, verdict: _Verdict) -> None:
    """The upper end of the interval of the difference in bits per byte must stay below the margin."""
    other_bits = bits_per_byte(other_items)
    if not math.isfinite(other_bits):
        raise ValueError(f"the {name}'s bits per byte is {other_bits}: nothing can be compared with it, name a sound version as {name}")
    verdict.measure(f"{name}_bits_per_byte", other_bits)
    if "bits_per_byte" not in verdict.figures:
        return
    candidate, other = _paired(items, other_items, VALIDATION, verdict)
    if candidate:
        difference, lower, upper = paired_bits_per_byte(candidate, other)
        verdict.measure(f"bits_per_byte_against_{name}", difference)
        verdict.hold(
            upper < margin,
            f"bits_per_byte differs from the {name}'s by {difference:+.4f} [{lower:+.4f}, {upper:+.4f}] "
            f"(95 %, {len(candidate)} documents), the upper end must stay below {margin:+}",
        )


def _compare_passes(items: list[Item], other_items: list[Item], margin: float, verdict: _Verdict) -> None:
    """The lower end of the interval of the difference in pass@1 against the start must stay above minus the margin."""
    candidate, other = _paired(items, other_items, CHAT_PROBLEM, verdict)
    if candidate:
        differences = [ours.score - theirs.score for ours, theirs in zip(candidate, other, strict=True)]
        difference, (lower, upper) = sum(differences) / len(differences), mean_interval(differences)
        verdict.measure("pass_at_1_against_start", difference)
        verdict.hold(
            lower > -margin,
            f"pass_at_1 differs from the start's by {difference:+.4f} [{lower:+.4f}, {upper:+.4f}] "
            f"(95 %, {len(candidate)} problems), the lower end must stay above {-margin:+}",
        )


def _paired(items: list[Item], other_items: list[Item], kind: str, verdict: _Verdict) -> tuple[list[Item], list[Item]]:
    """Both sides' items of one kind, in one order; empty, and refused, where they are too few for an interval."""
    candidate, other = items_of(items, kind), items_of(other_items, kind)
    assert [item.item_id for item in candidate] == [item.item_id for item in other], "equal suite digests, different items"
    if len(candidate) < MIN_PAIRED_ITEMS:
        verdict.hold(False, f"{len(candidate)} item of kind {kind}, at least {MIN_PAIRED_ITEMS} needed for a paired comparison")
        return [], []
    return candidate, other


def paired_bits_per_byte(candidate: list[Item], other: list[Item]) -> tuple[float, float, float]:
    """Candidate minus other in bits per byte and its 95 % interval, by a paired bootstrap over documents.

    A resample draws documents; its difference is summed bits over summed bytes, so that long documents weigh as they do in the metric.
    """
    extra_bits = [ours.bits - theirs.bits for ours, theirs in zip(candidate, other, strict=True)]
    num_bytes = [item.num_bytes for item in candidate]
    return sum(extra_bits) / sum(num_bytes), *ratio_interval(extra_bits, num_bytes)
