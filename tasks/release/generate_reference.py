"""Step: generates our own greedy answers to the smoke prompts, so that a later smoke test needs no model of its own.

The recipe's prompts are continued as plain text. A model that was trained on conversations is also asked the first
one as a user's message, without thinking. Those answers may be short: after them the beginnings of held-out documents
are continued, one after the other, until MIN_COMPARED_TOKENS tokens can be compared; then by SHORT_TOKENS each until
`parity_prompts` were asked.
Out: reference.json, per prompt the token ids asked and generated, the bytes of each, its log-probability and the top-2
margins.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from infra.step import Artifact, Output, Progress, Record, step
from model.text.chat_template import encode, problem_prompt
from tasks.evaluation.engine import (
    document_token_ids,
    end_token_ids,
    load_engine,
    load_tokenizer,
    reproducible_arithmetic,
)
from tasks.evaluation.items import DOCUMENT
from tasks.evaluation.suite import Question, read_suite
from tasks.release.token_bytes import token_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from configs.schema import JobResources, ReferenceRecipe
    from model.generation.generation import InProcessEngine, Sampling
    from tasks.evaluation.select_evaluation_items import EvaluationSuite
    from tasks.training.state.trained_checkpoint import TrainedCheckpoint

NUM_THREADS = 1
"""Number of threads that compute the reference; on a CPU it changes the result."""
MIN_COMPARED_TOKENS = 500
"""Number of tokens below which a comparison proves too little: a wrong rotation or a wrong expert shows only at some
positions."""

SHORT_TOKENS = 16
"""New tokens of a prompt that is asked for the sake of one more prompt."""


class Reference(Record):
    """What reference.json holds."""

    checkpoint_digest: str
    num_prompts: int
    num_tokens: int
    """Generated tokens over all prompts."""
    num_clear_tokens: int
    """Tokens before the first step whose margin is below `smoke_min_margin`: a served model must reproduce them."""


class ReferenceAnswer(Record):
    """One entry of reference.json."""

    prompt: str
    is_chat: bool
    """Whether the prompt is a user's message in the chat template; else it is text to be continued."""
    prompt_ids: tuple[int, ...]
    """The prompt with an end-of-text token before it, or in the chat template."""
    token_ids: tuple[int, ...]
    pieces: tuple[str, ...]
    """Bytes that a server writes for each generated token, in hex: a part of a character, or none for a special
    token."""
    margins: tuple[float, ...]
    log_probabilities: tuple[float, ...]
    """Natural, of each generated token."""
    num_clear: int
    """Leading tokens that must be reproduced."""
    is_stopped: bool
    """Whether the last token ended the answer."""


@step(content=("reference.json",), distributions=("torch", "tokenizers", "safetensors", "pyarrow"))
def generate_reference(
    *,
    checkpoint: Artifact[TrainedCheckpoint],
    suite: Artifact[EvaluationSuite],
    recipe: ReferenceRecipe,
    resources: JobResources,
    output: Output,
) -> Reference:
    """Generate one prompt at a time in float32, as the server does that is compared with it."""
    from model.generation.generation import Sampling

    checkpoint_dir = checkpoint.directory("hf")
    tokenizer = load_tokenizer(checkpoint_dir / "tokenizer.json")
    sampling = Sampling(max_new_tokens=recipe.smoke_new_tokens, stop_token_ids=end_token_ids(tokenizer))
    asked = [(prompt, False) for prompt in recipe.smoke_prompts]
    asked += [(recipe.smoke_prompts[0], True)] if checkpoint.record.is_chat_trained else []
    beginnings = _beginnings(tokenizer, read_suite(suite.path("suite.parquet")), recipe.smoke_prompt_tokens)
    answers: list[ReferenceAnswer] = []
    num_clear = 0
    with reproducible_arithmetic(NUM_THREADS):
        engine = load_engine(
            checkpoint_dir, weights_version=checkpoint.digest, batch_sequences=1, device=resources.device
        )
        for prompt, is_chat in (*asked, *((text, False) for text in beginnings)):
            num_comparable = sum(answer.num_clear > 0 for answer in answers)
            is_enough = num_comparable >= recipe.parity_prompts and num_clear >= MIN_COMPARED_TOKENS
            if len(answers) >= len(asked) and is_enough:
                break
            output.report(
                Progress(min(num_clear, MIN_COMPARED_TOKENS), MIN_COMPARED_TOKENS, "tokens", "continuing prompts")
            )
            is_short = len(answers) >= len(asked) and num_clear >= MIN_COMPARED_TOKENS
            given = replace(sampling, max_new_tokens=SHORT_TOKENS) if is_short else sampling
            answers.append(_answer(engine, tokenizer, prompt, is_chat, given, recipe.smoke_min_margin))
            num_clear += answers[-1].num_clear
    output.path("reference.json").write_text(
        json.dumps([answer.model_dump(mode="json") for answer in answers], indent=1) + "\n"
    )
    return Reference(
        checkpoint_digest=checkpoint.digest,
        num_prompts=len(answers),
        num_tokens=sum(len(answer.token_ids) for answer in answers),
        num_clear_tokens=num_clear,
    )


def _beginnings(tokenizer: Tokenizer, questions: list[Question], num_tokens: int) -> list[str]:
    """The leading `num_tokens` tokens of each held-out document as text; equal ones once."""
    texts = [question.text for question in questions if question.kind == DOCUMENT]
    ends = [tokenizer.encode(text, add_special_tokens=False).offsets[:num_tokens][-1][1] for text in texts]
    return list(dict.fromkeys(text[:end] for text, end in zip(texts, ends, strict=True)))


def _answer(
    engine: InProcessEngine, tokenizer: Tokenizer, prompt: str, is_chat: bool, sampling: Sampling, min_margin: float
) -> ReferenceAnswer:
    prompt_ids = _prompt_ids(tokenizer, prompt, is_chat)
    generation = engine.generate([prompt_ids], sampling, engine.weights_version)
    token_ids, margins = generation.token_ids[0], generation.top2_margins[0]
    return ReferenceAnswer(
        prompt=prompt,
        is_chat=is_chat,
        prompt_ids=tuple(prompt_ids),
        token_ids=tuple(token_ids),
        pieces=tuple(token_bytes(tokenizer, token_id).hex() for token_id in token_ids),
        margins=tuple(round(margin, 6) for margin in margins),
        log_probabilities=tuple(round(value, 6) for value in generation.log_probabilities[0]),
        num_clear=next((step for step, margin in enumerate(margins) if not margin >= min_margin), len(margins)),
        is_stopped=token_ids[-1] in sampling.stop_token_ids,
    )


def _prompt_ids(tokenizer: Tokenizer, prompt: str, is_chat: bool) -> list[int]:
    return (
        encode(tokenizer, problem_prompt(prompt, enable_thinking=False))[0]
        if is_chat
        else document_token_ids(tokenizer, prompt)
    )
