"""Step: accepts or refuses a candidate by its evaluation: floors and ceilings, then paired comparisons.

The comparisons are with start, champion and anchors. In: items.parquet and experts.parquet of the candidate and,
where there are any, items.parquet of the checkpoint that the phase started from, of the champion and of the anchors,
on the same suite; figures of preference pairs where the phase trained on some; of a release the figures of the file
that is served. Out: decision.json. A refusal is a result with reasons, never an exception. Evaluations that cannot be
compared or lack a metric raise.

The anchor of a figure is the best promoted version so far. Margins against only the champion would add up from
release to release: against the anchor they do not. It moves only to a candidate that is better than it beyond the
interval.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from pydantic import Field

from infra.step import Artifact, Output, Record, digest_of, step
from tasks.data.problems.refusals import HARMFUL, HARMLESS
from tasks.evaluation.bounds import Bound, Verdict
from tasks.evaluation.comparisons import (
    BITS_PER_BYTE,
    NOUNS,
    OWN_TEXTS,
    SHARES,
    Compared,
    ServedFigures,
    compare,
    judge,
    measured_figures,
)
from tasks.evaluation.expert_use import EXPERTS_FILE, ExpertUse, chance_cv, chance_load, read_expert_use
from tasks.evaluation.items import (
    ARITHMETIC,
    CHAT_PROBLEM,
    CHOICE,
    DOCUMENT,
    FAR,
    SAFETY,
    WORKED,
    Item,
    accuracy,
    bits_per_byte,
    distinct_answer_share,
    formed_answer_share,
    num_non_finite,
    of_requests,
    read_items,
    text_once,
)
from tasks.evaluation.pair_bounds import check_pairs

if TYPE_CHECKING:
    from configs.schema import GateRecipe, MarginRecipe
    from tasks.evaluation.evaluate_checkpoint import Evaluation
    from tasks.evaluation.evaluate_pairs import PairEvaluation

START, CHAMPION, ANCHOR, UNSERVED = "start", "champion", "anchor", "checkpoint"
NO_ANCHORS: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
"""What no promotion moves."""

E = TypeVar("E", bound=Record)


@dataclass(frozen=True)
class Anchors(Generic[E]):
    """The evaluation of each figure's anchor; a figure without one is absent."""

    evaluations: dict[str, Artifact[E]]

    @property
    def digest(self) -> str:
        """sha256 over the figures and their evaluations' digests."""
        return digest_of({figure: evaluation.digest for figure, evaluation in self.evaluations.items()})


class GateDecision(Record):
    """The verdict of a gate; also decision.json."""

    accepted: bool
    bounds: tuple[Bound, ...]
    candidate_digest: str
    """Digest of the evaluation that was judged."""
    start_digest: str = ""
    """Digest of the evaluation of the checkpoint that the phase started from; empty where it had none."""
    champion_digest: str = ""
    """Digest of the champion's evaluation; empty where there was no champion."""
    anchor_digests: dict[str, str] = Field(default_factory=dict)
    """Digest of the anchor's evaluation, by figure."""
    anchored: tuple[str, ...] = ()
    """Figures whose anchor the candidate becomes with its promotion."""
    champion_anchored: tuple[str, ...] = ()
    """Figures without an anchor whose anchor the champion becomes with that promotion: the candidate is no better."""

    @property
    def refusals(self) -> tuple[str, ...]:
        """Why the candidate was refused, one sentence per bound."""
        return tuple(bound.sentence for bound in self.bounds if bound.is_refusal)


@step(content=("decision.json",), distributions=("numpy", "scipy", "pyarrow"))
def decide_gate(
    *,
    evaluation: Artifact[Evaluation] | None,
    start_evaluation: Artifact[Evaluation] | None,
    champion_evaluation: Artifact[Evaluation] | None,
    anchors: Anchors[Evaluation] | None,
    recipe: GateRecipe,
    output: Output,
    pairs: Artifact[PairEvaluation] | None = None,
    served: ServedFigures | None = None,
) -> GateDecision:
    """Judge an evaluation; `anchors` and `served` are None except for a release. `pairs` are judged where the phase
    trained on some; a reward model has no other evaluation. Raises ValueError when another evaluation is of other
    items, or a metric is missing."""
    verdict = Verdict()
    anchored, champion_anchored = NO_ANCHORS
    if pairs is not None:
        check_pairs(pairs.record, recipe, verdict)
    if evaluation is not None:
        noise = {} if served is None else _check_served(served, verdict)
        anchored, champion_anchored = _judge_answers(
            evaluation, start_evaluation, champion_evaluation, anchors, recipe, verdict, noise
        )
    judged = pairs if evaluation is None else evaluation
    assert judged is not None, "nothing to judge"
    decision = GateDecision(
        accepted=verdict.is_held,
        bounds=tuple(verdict.bounds),
        candidate_digest=judged.digest,
        start_digest="" if start_evaluation is None else start_evaluation.digest,
        champion_digest="" if champion_evaluation is None else champion_evaluation.digest,
        anchor_digests={}
        if anchors is None
        else {figure: anchor.digest for figure, anchor in anchors.evaluations.items()},
        anchored=anchored,
        champion_anchored=champion_anchored,
    )
    output.path("decision.json").write_text(
        json.dumps(decision.model_dump(mode="json"), indent=1, sort_keys=True) + "\n"
    )
    return decision


def _judge_answers(
    evaluation: Artifact[Evaluation],
    start_evaluation: Artifact[Evaluation] | None,
    champion_evaluation: Artifact[Evaluation] | None,
    anchors: Anchors[Evaluation] | None,
    recipe: GateRecipe,
    verdict: Verdict,
    noise: dict[str, float],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Record the bounds of a language model; gives what _judge_anchors does. `noise`: floors of figures besides that of
    seeds."""
    items = read_items(evaluation.path("items.parquet"))
    _check_experts(read_expert_use(evaluation.path(EXPERTS_FILE)), recipe, verdict)
    _check_floors(items, recipe, verdict)
    is_measured = all(bound.value is not None for bound in verdict.bounds)
    if is_measured and not num_non_finite(item for item in items if item.kind in (DOCUMENT, WORKED, FAR)):
        for name, other, margins in (
            (START, start_evaluation, recipe.start),
            (CHAMPION, champion_evaluation, recipe.champion),
        ):
            if other is not None:
                before = _items_of(evaluation, other, name)
                own = recipe.own_figure if name == START else ""
                for figure in (*measured_figures(items), *((own,) if own in OWN_TEXTS else ())):
                    compared = compare(figure, items, before, noise.get(figure, 0.0))
                    _judge(compared, name, margins, verdict, own, recipe.must_gain)
                if own not in ("", "none") and not any(bound.is_own for bound in verdict.bounds):
                    verdict.unmeasured(own, name, recipe.must_gain)
        if anchors is not None:
            return _judge_anchors(evaluation, items, anchors, champion_evaluation, recipe.champion, verdict, noise)
    return NO_ANCHORS


def _check_served(served: ServedFigures, verdict: Verdict) -> dict[str, float]:
    """Record that no figure of the served file is worse than the checkpoint's own beyond interval and noise floor;
    gives the noise floors of the greedy figures, of which the two engines are two measurements."""
    for figure, change in served.figures.items():
        interval = change.change_interval
        bounds = "" if interval is None else f" [{interval[0]:+.4f}, {interval[1]:+.4f}]"
        floor = f", noise floor {change.noise_floor:.4f}" if change.noise_floor else ""
        noun = NOUNS[SHARES[figure]]
        verdict.bounds.append(
            Bound(
                figure=f"{figure} as served",
                against=UNSERVED,
                value=change.change,
                interval=interval,
                limit=0.0,
                num_items=change.num_items,
                noise_floor=change.noise_floor,
                outcome="broken" if change.is_worse else "held",
                is_refusal=change.is_worse,
                sentence=f"{figure} as served is {change.value:.4f}, {change.change:+.4f}{bounds} from the "
                f"checkpoint's (95 %, {change.num_items} independent {noun}{floor}): it must not be lower beyond both",
            )
        )
    return {figure: change.disagreement for figure, change in served.figures.items() if not change.is_sampled}


def _check_floors(items: list[Item], recipe: GateRecipe, verdict: Verdict) -> None:
    verdict.ceiling(BITS_PER_BYTE, bits_per_byte(text_once(items)), recipe.max_bits_per_byte)
    verdict.floor("arithmetic_accuracy", accuracy(items, ARITHMETIC), recipe.min_arithmetic_accuracy)
    verdict.floor("pass_at_1", accuracy(items, CHAT_PROBLEM), recipe.min_pass_at_1)
    if any(item.kind == CHOICE for item in items):
        verdict.floor("choice_accuracy", accuracy(items, CHOICE), recipe.min_choice_accuracy)
    elif recipe.min_choice_accuracy > 0:
        verdict.floor(
            "choice_accuracy",
            math.nan,
            recipe.min_choice_accuracy,
            ": the suite holds no question, bring some or lower it to 0",
        )
    for figure, label, needed in (
        ("harmful_refused_share", HARMFUL, recipe.min_harmful_refused_share),
        ("harmless_answered_share", HARMLESS, recipe.min_harmless_answered_share),
    ):
        if asked := of_requests(items, label):
            verdict.floor(figure, accuracy(asked, SAFETY), needed)
        elif needed > 0:
            verdict.floor(figure, math.nan, needed, ": the suite holds no request, raise num_safety_prompts")
    verdict.floor("formed_answer_share", formed_answer_share(items), recipe.min_formed_answer_share)
    verdict.floor("distinct_answer_share", distinct_answer_share(items), recipe.min_distinct_answer_share)
    verdict.ceiling("items_not_finite", num_non_finite(items), 0)


def _check_experts(layers: list[ExpertUse], recipe: GateRecipe, verdict: Verdict) -> None:
    """Ceilings on the worst layer's imbalance beyond that of an ideal router; a model without experts has none, nor
    has one that a server evaluated."""
    if not layers:
        return
    by_load, by_cv = max(layers, key=lambda use: use.load), max(layers, key=lambda use: use.cv)
    excess, spread, tokens = chance_load(layers) - 1, chance_cv(layers), f"{by_load.num_routed:,} tokens"
    if recipe.max_expert_load is not None:
        verdict.ceiling(
            "expert_load",
            by_load.load,
            recipe.max_expert_load + excess,
            f": {recipe.max_expert_load} and the {excess:.4f} that chance adds to an ideal router's on {tokens}; the "
            f"worst is layer {by_load.layer + 1} of {len(layers)} with experts",
        )
    if recipe.max_expert_cv is not None:
        verdict.ceiling(
            "expert_cv",
            by_cv.cv,
            math.hypot(recipe.max_expert_cv, spread),
            f": {recipe.max_expert_cv} and an ideal router's {spread:.4f} by chance on {tokens}, as variances add; the "
            f"worst is layer {by_cv.layer + 1} of {len(layers)} with experts",
        )


def _items_of(evaluation: Artifact[Evaluation], other: Artifact[Evaluation], name: str) -> list[Item]:
    """The items of the other evaluation, if it was asked the same questions. Raises ValueError where it was not, or a
    document is not finite."""
    ours, theirs = evaluation.record.suite_digest, other.record.suite_digest
    if ours != theirs:
        raise ValueError(
            f"candidate and {name} were evaluated on different items ({ours[:12]} and {theirs[:12]}): evaluate on one "
            f"suite"
        )
    items = read_items(other.path("items.parquet"))
    bits = bits_per_byte(items)
    if not math.isfinite(bits):
        raise ValueError(
            f"the {name}'s bits per byte is {bits}: nothing can be compared with it, name a sound version as {name}"
        )
    return items


def _judge(
    compared: list[Compared], name: str, margins: MarginRecipe, verdict: Verdict, own: str = "", must_gain: bool = False
) -> None:
    """Record the bound of a figure and those of its parts: domains have a margin of their own, benchmarks and requests
    that of the figure."""
    for number, each in enumerate(compared):
        is_domain = each.kind in (WORKED, FAR) or (each.kind == DOCUMENT and number > 0)
        margin = margins.domain_bits_per_byte if is_domain else getattr(margins, each.figure.partition(" of ")[0])
        verdict.bounds.append(judge(each, name, margin, each.figure == own, must_gain))


def _judge_anchors(
    evaluation: Artifact[Evaluation],
    items: list[Item],
    anchors: Anchors[Evaluation],
    champion_evaluation: Artifact[Evaluation] | None,
    margins: MarginRecipe,
    verdict: Verdict,
    noise: dict[str, float],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(measured figures whose anchor the candidate becomes, those without an anchor whose anchor the champion becomes).

    The candidate becomes it where it is better than the anchor beyond the interval while no part of the figure is worse
    beyond its own. A figure that was added while the champion reigns has no anchor: there the champion is compared. An
    anchor that is the champion, or the candidate itself, is not judged a second time.
    """
    anchored = []
    for figure in measured_figures(items):
        anchor = anchors.evaluations.get(figure, champion_evaluation)
        if anchor is None:
            anchored.append(figure)
        elif anchor.digest != evaluation.digest:
            compared = compare(figure, items, _items_of(evaluation, anchor, ANCHOR), noise.get(figure, 0.0))
            if champion_evaluation is None or champion_evaluation.digest != anchor.digest:
                _judge(compared, ANCHOR, margins, verdict)
            if (
                compared
                and compared[0].difference.is_better
                and not any(each.difference.is_worse for each in compared[1:])
            ):
                anchored.append(figure)
    unanchored = () if champion_evaluation is None else set(measured_figures(items)) - {*anchors.evaluations, *anchored}
    return tuple(anchored), tuple(sorted(unanchored))
