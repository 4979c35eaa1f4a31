"""The answers by which the formats of a release are compared: the first problems of a suite, asked of any engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from infra.step import Output
from tasks.evaluation.engine import document_token_ids
from tasks.evaluation.generated_answers import answer_chats, chat_prompt, continue_problems
from tasks.evaluation.items import ARITHMETIC, CHAT_PROBLEM, Item
from tasks.evaluation.suite import Question

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from configs.schema import EvaluationRecipe, FormatRecipe
    from tasks.evaluation.engine import AnsweringEngine


def asked_problems(questions: Sequence[Question], recipe: FormatRecipe) -> dict[str, list[Question]]:
    """By kind the first of those that the checkpoint was asked: the same draws belong to them."""
    return {
        kind: [question for question in questions if question.kind == kind][: recipe.num_problems]
        for kind in (CHAT_PROBLEM, ARITHMETIC)
    }


def longest_answer(tokenizer: Tokenizer, problems: dict[str, list[Question]], recipe: EvaluationRecipe) -> int:
    """Tokens of the longest prompt and the most that may follow it."""
    chats = [chat_prompt(tokenizer, problem, recipe) for problem in problems[CHAT_PROBLEM]]
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
