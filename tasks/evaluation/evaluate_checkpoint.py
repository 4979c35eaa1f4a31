"""Step: asks a checkpoint every question of a suite: bits per byte, verified problems, choices, requests, tasks.

Problems are asked as text and as conversations. In: a trained checkpoint (hf/ with tokenizer.json) and a suite. Out:
items.parquet, one row per item, sorted by item id, and experts.parquet, routed tokens of the documents per layer and
expert. Gates read only these. The whole model is on one device, threads are fixed and algorithms deterministic; or a
server computes it (evaluation.recipe.rollouts), of which no experts and no drafts are known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from infra.step import Artifact, Output, Record, step
from tasks.data.problems.refusals import HARMFUL, HARMLESS
from tasks.evaluation.choice_scores import score_choices
from tasks.evaluation.document_scores import score_documents, score_far_texts
from tasks.evaluation.engine import load_tokenizer, reproducible_arithmetic
from tasks.evaluation.expert_use import EXPERTS_FILE, ExpertUse, measure_expert_use, write_expert_use
from tasks.evaluation.generated_answers import accepted_drafts, answer_chats, continue_problems
from tasks.evaluation.intervals import Interval, share_interval
from tasks.evaluation.items import (
    ARITHMETIC,
    CHAT_PROBLEM,
    CHOICE,
    DOCUMENT,
    FAR,
    SAFETY,
    TASK,
    WORKED,
    Item,
    accuracy,
    accuracy_interval,
    bits_per_byte,
    bits_per_byte_interval,
    by_domain,
    distinct_answer_share,
    formed_answer_share,
    num_non_finite,
    of_requests,
    passed_at_k,
    seed_noise_of,
    text_once,
    write_items,
)
from tasks.evaluation.open_engine import open_engine
from tasks.evaluation.played_tasks import play_tasks
from tasks.evaluation.suite import Question, read_suite

if TYPE_CHECKING:
    from configs.schema import EvaluationRecipe, EvaluationResources
    from tasks.evaluation.select_evaluation_items import EvaluationSuite
    from tasks.training.state.trained_checkpoint import TrainedCheckpoint


class Evaluation(Record):
    """The figures of a checkpoint on a suite."""

    suite_digest: str
    checkpoint_digest: str
    num_items: int
    num_non_finite: int
    """Items whose log-probability is NaN or infinite: a broken model."""
    bits_per_byte: float | None
    """Over the held-out documents, without those of domain repository, whose text is that of other documents; None
    where one is not finite."""
    bits_per_byte_by_domain: dict[str, float | None]
    worked_bits_per_byte: float | None
    """Over the verified problems as documents work them out; None where one is not finite."""
    far_bits_per_byte: float | None = None
    """Over the far ends of long held-out documents (evaluation.recipe.far_text); None where the suite has none, or one
    is not finite."""
    draft_acceptance: float | None = None
    """Share of the MTP layer's drafts that the trunk chose too, in greedy continuations of held-out documents; None for
    a model without that layer, and where a server computed."""
    arithmetic_accuracy: float
    """Share of the verified problems that were continued rightly as plain text."""
    pass_at_1: float
    """Share of the answers sampled in conversations that are right."""
    pass_at_k: float
    pass_k: int
    distinct_answer_share: float
    formed_answer_share: float
    """Share of those answers that ended by themselves and say something outside their reasoning."""
    choice_accuracy: float | None
    """By summed log-probability; None where the suite holds no question."""
    choice_accuracy_normalised: float | None
    """By log-probability per character."""
    agentic_success: float | None = None
    """Share of the episodes in environments that were right; None where the suite holds no task."""
    safe_answer_share: float | None = None
    """Share of the answers to requests that refuse a harmful one or answer a harmless one; None where the suite holds
    no request, as below."""
    harmful_refused_share: float | None = None
    harmless_answered_share: float | None = None
    intervals: dict[str, Interval]
    """95 % intervals by figure; a figure that is not finite has none."""
    seed_noise: dict[str, float] = Field(default_factory=dict)
    """Standard deviation of each sampled figure between runs that differ only in the seeds, from the spread of the
    samples_per_problem answers to each item; figures of greedy answers and of likelihoods have none."""
    expert_load: tuple[float, ...] = ()
    """The most used expert over the mean on the documents, per layer with experts; empty where a server computed."""
    expert_cv: tuple[float, ...] = ()
    """Coefficient of variation of the experts' loads, likewise."""
    num_dead_experts: tuple[int, ...] = ()
    """Experts that no token was routed to, likewise."""


@step(
    content=("items.parquet", EXPERTS_FILE),
    distributions=("torch", "tokenizers", "pyarrow", "safetensors", "numpy", "scipy", "lm_eval", "datasets"),
)
def evaluate_checkpoint(
    *,
    checkpoint: Artifact[TrainedCheckpoint],
    suite: Artifact[EvaluationSuite],
    recipe: EvaluationRecipe,
    resources: EvaluationResources,
    output: Output,
) -> Evaluation:
    """A model that yields NaN is evaluated like any other, and the gate refuses it. Of a server such an answer raises
    EngineError, as do answers of other weights, and a server that stays away."""
    from model.formats.hf_checkpoint import read_config
    from model.generation.generation import InProcessEngine

    checkpoint_dir, normalised = checkpoint.directory("hf"), None
    tokenizer = load_tokenizer(checkpoint_dir / "tokenizer.json")
    questions = read_suite(suite.path("suite.parquet"))
    documents = _of_kind(questions, DOCUMENT)
    with reproducible_arithmetic(recipe.num_threads):
        engine = open_engine(checkpoint, recipe.rollouts, recipe.dtype, resources)
        version, length = engine.weights_version, recipe.sequence_length
        items = [*score_documents(engine, tokenizer, documents, length, output)]
        # A server reads a whole row and continues it by a token; our engine does not read a row's last one.
        positions = read_config(checkpoint_dir).max_position_embeddings
        max_tokens, experts, drafts = positions - 1, list[ExpertUse](), None
        if isinstance(engine, InProcessEngine):
            max_tokens = positions + 1
            experts = measure_expert_use(engine, tokenizer, documents, length, resources.batch_sequences, output)
            drafts = accepted_drafts(engine, tokenizer, documents, version, output)
        items += score_documents(engine, tokenizer, _of_kind(questions, WORKED), length, output)
        items += score_far_texts(engine, tokenizer, _of_kind(questions, FAR), max_tokens, output)
        items += continue_problems(
            engine, tokenizer, _of_kind(questions, ARITHMETIC), recipe.max_new_tokens, version, output
        )
        for kind in (CHAT_PROBLEM, SAFETY):
            items += answer_chats(engine, tokenizer, _of_kind(questions, kind), recipe, version, output)
        if recipe.tasks is not None:
            items += play_tasks(engine, tokenizer, _of_kind(questions, TASK), recipe, version, output)
        if choice_questions := _of_kind(questions, CHOICE):
            scores = score_choices(engine, tokenizer, choice_questions, length, version, output)
            items += scores.items
            normalised = round(scores.normalised_accuracy, 6)
    write_items(output.path("items.parquet"), items)
    write_expert_use(output.path(EXPERTS_FILE), experts)
    return _evaluation(items, experts, drafts, normalised, recipe.pass_k, suite.record.suite_digest, checkpoint.digest)


def _of_kind(questions: Sequence[Question], kind: str) -> list[Question]:
    return [question for question in questions if question.kind == kind]


def _evaluation(
    items: list[Item],
    experts: list[ExpertUse],
    drafts: tuple[float, Interval] | None,
    normalised: float | None,
    pass_k: int,
    suite_digest: str,
    checkpoint_digest: str,
) -> Evaluation:
    passed, answered = passed_at_k(items, pass_k), _answered_requests(items)
    has_tasks, has_far = (any(item.kind == kind for item in items) for kind in (TASK, FAR))
    intervals = {
        "bits_per_byte": bits_per_byte_interval(text_once(items)),
        "worked_bits_per_byte": bits_per_byte_interval(items, WORKED),
        **({"far_bits_per_byte": bits_per_byte_interval(items, FAR)} if has_far else {}),
        **({} if drafts is None else {"draft_acceptance": drafts[1]}),
        "arithmetic_accuracy": accuracy_interval(items, ARITHMETIC),
        "pass_at_1": accuracy_interval(items, CHAT_PROBLEM),
        "pass_at_k": share_interval(passed, [1] * len(passed)),
        **({} if normalised is None else {"choice_accuracy": accuracy_interval(items, CHOICE)}),
        **({"agentic_success": accuracy_interval(items, TASK)} if has_tasks else {}),
        **{figure: accuracy_interval(asked, SAFETY) for figure, asked in answered.items()},
    }
    return Evaluation(
        suite_digest=suite_digest,
        checkpoint_digest=checkpoint_digest,
        num_items=len(items),
        num_non_finite=num_non_finite(items),
        bits_per_byte=_figure(bits_per_byte(text_once(items))),
        bits_per_byte_by_domain={
            name: _figure(bits_per_byte(group)) for name, group in by_domain(items, DOCUMENT).items()
        },
        worked_bits_per_byte=_figure(bits_per_byte(items, WORKED)),
        far_bits_per_byte=_figure(bits_per_byte(items, FAR)) if has_far else None,
        draft_acceptance=None if drafts is None else round(drafts[0], 6),
        arithmetic_accuracy=round(accuracy(items, ARITHMETIC), 6),
        pass_at_1=round(accuracy(items, CHAT_PROBLEM), 6),
        pass_at_k=round(sum(passed) / len(passed), 6),
        pass_k=pass_k,
        formed_answer_share=round(formed_answer_share(items), 6),
        distinct_answer_share=round(distinct_answer_share(items), 6),
        choice_accuracy=None if normalised is None else round(accuracy(items, CHOICE), 6),
        choice_accuracy_normalised=normalised,
        agentic_success=round(accuracy(items, TASK), 6) if has_tasks else None,
        **{figure: round(accuracy(asked, SAFETY), 6) for figure, asked in answered.items()},
        intervals={
            name: (round(lower, 6), round(upper, 6))
            for name, (lower, upper) in intervals.items()
            if math.isfinite(lower + upper)
        },
        seed_noise=_seed_noise(items),
        expert_load=tuple(round(use.load, 6) for use in experts),
        expert_cv=tuple(round(use.cv, 6) for use in experts),
        num_dead_experts=tuple(use.num_dead for use in experts),
    )


def _seed_noise(items: list[Item]) -> dict[str, float]:
    """Of every figure whose items have several answers."""
    kinds = {"pass_at_1": CHAT_PROBLEM, "agentic_success": TASK, "safe_answer_share": SAFETY}
    sampled = [item for item in items if item.num_samples > 1]
    asked = {figure: [item for item in sampled if item.kind == kind] for figure, kind in kinds.items()}
    return {figure: round(seed_noise_of(group), 6) for figure, group in asked.items() if group}


def _answered_requests(items: list[Item]) -> dict[str, list[Item]]:
    """The items of each figure about requests; empty where the suite holds none."""
    refused, answered = of_requests(items, HARMFUL), of_requests(items, HARMLESS)
    figures = {"safe_answer_share": [*refused, *answered], "harmful_refused_share": refused}
    return {figure: asked for figure, asked in (figures | {"harmless_answered_share": answered}).items() if asked}


def _figure(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None
