"""Verified problems, continued greedily as plain text; problems and requests asked as conversations, with sampled
answers. Of any engine: also those by which the formats of a release are compared."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from infra.step import Output, Progress
from model.text.chat_template import answer_of, encode, problem_prompt
from tasks.data.problems.refusals import behaves
from tasks.evaluation.engine import AnsweringEngine, document_token_ids, end_token_ids
from tasks.evaluation.intervals import Interval, share_interval
from tasks.evaluation.items import ARITHMETIC, CHAT_PROBLEM, SAFETY, Item
from tasks.evaluation.scored_text import scored_text
from tasks.evaluation.suite import Question

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from configs.schema import EvaluationRecipe, FormatRecipe
    from model.generation.generation import InProcessEngine

PROBLEMS_PER_REPORT = 64
"""Number of problems that the engine is given between two progress reports; the seeds of the sampled answers count
these blocks."""
NUM_DRAFTED_DOCUMENTS, NUM_PROMPT_TOKENS, NUM_DRAFTED_TOKENS = 64, 32, 16
"""How many documents are continued with drafts, after how many tokens of theirs, and by how many."""


def continue_problems(
    engine: AnsweringEngine,
    tokenizer: Tokenizer,
    problems: Sequence[Question],
    max_new_tokens: int,
    weights_version: str,
    output: Output,
) -> Iterator[Item]:
    """One item per problem: the greedy continuation up to the line's end, right only if it equals the answer
    exactly."""
    from model.generation.generation import Sampling

    sampling = Sampling(max_new_tokens=max_new_tokens, stop_token_ids=end_token_ids(tokenizer))
    for start in range(0, len(problems), PROBLEMS_PER_REPORT):
        output.report(Progress(start, len(problems), "problems", "continuing arithmetic problems"))
        asked = problems[start : start + PROBLEMS_PER_REPORT]
        generation = engine.generate(
            [document_token_ids(tokenizer, problem.text) for problem in asked], sampling, weights_version
        )
        for problem, token_ids, log_probabilities in zip(
            asked, generation.token_ids, generation.log_probabilities, strict=True
        ):
            text = tokenizer.decode(token_ids, skip_special_tokens=True)
            right = int(text.split("\n", 1)[0] == problem.answer)
            yield Item(
                problem.item_id,
                ARITHMETIC,
                problem.domain,
                problem.unit,
                problem.prompt_digest,
                expected=problem.answer,
                output=text,
                score=float(right),
                log_probability=sum(log_probabilities),
                num_bytes=len(text.encode()),
                num_samples=1,
                num_right=right,
            )


def chat_prompt(tokenizer: Tokenizer, problem: Question, recipe: EvaluationRecipe) -> list[int]:
    """The tokens of a conversation that asks a problem."""
    return encode(tokenizer, problem_prompt(problem.text, recipe.enable_thinking))[0]


def answer_chats(
    engine: AnsweringEngine,
    tokenizer: Tokenizer,
    problems: Sequence[Question],
    recipe: EvaluationRecipe,
    weights_version: str,
    output: Output,
) -> Iterator[Item]:
    """One item per problem or request with all its sampled answers. A prompt's answers depend on its position among
    those of its kind, not on batches.

    A model whose logits are not finite gives empty answers with the log-probability NaN, to the whole block of
    problems.
    """
    from model.generation.generation import NonFiniteLogitsError, Sampling

    stops = end_token_ids(tokenizer)
    for start in range(0, len(problems), PROBLEMS_PER_REPORT):
        output.report(Progress(start, len(problems), "problems", f"sampling answers of kind {problems[start].kind}"))
        asked = problems[start : start + PROBLEMS_PER_REPORT]
        sampling = Sampling(
            max_new_tokens=recipe.max_answer_tokens, temperature=recipe.temperature, stop_token_ids=stops, seed=start
        )
        prompts = [chat_prompt(tokenizer, problem, recipe) for problem in asked]
        repeated = [prompt for prompt in prompts for _ in range(recipe.samples_per_problem)]
        try:
            generation = engine.generate(repeated, sampling, weights_version)
            texts = [tokenizer.decode(token_ids, skip_special_tokens=False) for token_ids in generation.token_ids]
            is_ended = [token_ids[-1] in stops for token_ids in generation.token_ids]
            totals = [sum(log_probabilities) for log_probabilities in generation.log_probabilities]
        except NonFiniteLogitsError:
            texts, totals, is_ended = [""] * len(repeated), [math.nan] * len(repeated), [False] * len(repeated)
        for number, problem in enumerate(asked):
            samples = slice(number * recipe.samples_per_problem, (number + 1) * recipe.samples_per_problem)
            answers = [answer_of(text) for text in texts[samples]]
            num_right = sum(map(_is_right, [problem] * len(answers), answers, is_ended[samples]))
            yield Item(
                problem.item_id,
                problem.kind,
                problem.domain,
                problem.unit,
                problem.prompt_digest,
                expected=problem.answer,
                output=json.dumps(answers, ensure_ascii=False),
                score=num_right / len(answers),
                log_probability=sum(totals[samples]),
                num_bytes=sum(len(answer.encode()) for answer in answers),
                num_samples=len(answers),
                num_right=num_right,
                num_formed=sum(
                    answer != "" and ended for answer, ended in zip(answers, is_ended[samples], strict=True)
                ),
            )


def _is_right(problem: Question, answer: str, is_ended: bool) -> bool:
    """Text for text, a request by what it asks for; only an answer that ended by itself, as in reinforcement learning
    (tasks/data/prompts/verifiers.py): "19" that was cut off may be the beginning of "195"."""
    if not is_ended or not answer:
        return False
    return behaves(answer, problem.answer) if problem.kind == SAFETY else answer == problem.answer


def asked_problems(questions: Sequence[Question], recipe: FormatRecipe) -> dict[str, list[Question]]:
    """By kind the first of those that the checkpoint was asked: the same draws belong to them."""
    return {
        kind: [question for question in questions if question.kind == kind][: recipe.num_problems]
        for kind in (CHAT_PROBLEM, ARITHMETIC)
    }


def first_of_groups(questions: Sequence[Question], kind: str, num_problems: int) -> list[Question]:
    """The first of each label of requests, or of each environment of tasks."""
    groups: dict[str, list[Question]] = {}
    for question in questions:
        if question.kind == kind:
            groups.setdefault(question.item_id.split("/")[1], []).append(question)
    return [question for group in groups.values() for question in group[:num_problems]]


def longest_answer(
    tokenizer: Tokenizer, problems: dict[str, list[Question]], requests: Sequence[Question], recipe: EvaluationRecipe
) -> int:
    """Tokens of the longest prompt and the most that may follow it."""
    chats = [chat_prompt(tokenizer, problem, recipe) for problem in (*problems[CHAT_PROBLEM], *requests)]
    texts = [document_token_ids(tokenizer, problem.text) for problem in problems[ARITHMETIC]]
    return max(max(map(len, chats)) + recipe.max_answer_tokens, max(map(len, texts)) + recipe.max_new_tokens)


def answer_problems(
    engine: AnsweringEngine,
    tokenizer: Tokenizer,
    problems: dict[str, list[Question]],
    recipe: EvaluationRecipe,
    weights_version: str,
    output: Output,
) -> list[Item]:
    """One item per problem, as an evaluation has them."""
    version = weights_version
    return [
        *answer_chats(engine, tokenizer, problems[CHAT_PROBLEM], recipe, version, output),
        *continue_problems(engine, tokenizer, problems[ARITHMETIC], recipe.max_new_tokens, version, output),
    ]


def accepted_drafts(
    engine: InProcessEngine, tokenizer: Tokenizer, documents: Sequence[Question], weights_version: str, output: Output
) -> tuple[float, Interval] | None:
    """(share of the MTP layer's drafts that the trunk chose too, in greedy continuations of held-out documents; its
    interval over documents); None where the model has no such layer, or no document is long enough."""
    from model.generation.generation import Sampling

    rows = [scored_text(tokenizer, document).token_ids for document in documents]
    prompts = [row[:NUM_PROMPT_TOKENS] for row in rows if len(row) >= NUM_PROMPT_TOKENS][:NUM_DRAFTED_DOCUMENTS]
    if not engine.model.recipe.num_nextn_predict_layers or not prompts:
        return None
    output.report(Progress(0, len(prompts), "documents", "counting accepted drafts"))
    generation = engine.generate(prompts, Sampling(NUM_DRAFTED_TOKENS, is_speculative=True), weights_version)
    share = generation.num_accepted / generation.num_drafted
    return share, share_interval(generation.accepted, generation.drafted)
