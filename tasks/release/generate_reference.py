"""Our own greedy answers to the smoke prompts, kept so that a later smoke test needs no model of its own.

Every prompt is continued as plain text; a model that was trained on conversations is also asked the first one as a user's message,
without thinking. Out: reference.json, per prompt the token ids asked and generated, the bytes of each and the top-2 margins.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from infra.step import Artifact, Output, Record, step
from model.chat_template import encode, problem_prompt
from tasks.evaluation.engine import document_token_ids, end_token_ids, load_engine, load_tokenizer, reproducible_arithmetic
from tasks.release.token_bytes import token_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from configs.schema import ReleaseRecipe
    from tasks.training.train_phase import TrainedCheckpoint

NUM_THREADS = 1
"""Threads of the reference: part of the result on a CPU."""


class Reference(Record):
    """What reference.json holds."""

    checkpoint_digest: str
    num_prompts: int
    num_tokens: int
    """Generated tokens over all prompts."""
    num_clear_tokens: int
    """Those before the first step whose margin is below `smoke_min_margin`: what a served model must reproduce."""


class ReferenceAnswer(Record):
    """One entry of reference.json."""

    prompt: str
    is_chat: bool
    """Whether the prompt is a user's message in the chat template; else it is text to be continued."""
    prompt_ids: tuple[int, ...]
    """With end-of-text before a text to be continued, or with the whole template."""
    token_ids: tuple[int, ...]
    pieces: tuple[str, ...]
    """Bytes that a server writes for each generated token, in hex: a part of a character, or none for a special token."""
    margins: tuple[float, ...]
    num_clear: int
    """Leading tokens that must be reproduced."""
    is_stopped: bool
    """Whether the last token ended the answer."""


@step(content=("reference.json",), distributions=("torch", "tokenizers", "safetensors"))
def generate_reference(*, checkpoint: Artifact[TrainedCheckpoint], recipe: ReleaseRecipe, output: Output) -> Reference:
    """Generate one prompt at a time, as a server does."""
    from model.generation import Sampling

    checkpoint_dir = checkpoint.directory("hf")
    tokenizer = load_tokenizer(checkpoint_dir / "tokenizer.json")
    stops = end_token_ids(tokenizer)
    sampling = Sampling(max_new_tokens=recipe.smoke_new_tokens, stop_token_ids=stops)
    asked = [(prompt, False) for prompt in recipe.smoke_prompts]
    asked += [(recipe.smoke_prompts[0], True)] if checkpoint.record.is_chat_trained else []
    prompts = [_prompt_ids(tokenizer, *question) for question in asked]
    with reproducible_arithmetic(NUM_THREADS):
        engine = load_engine(checkpoint_dir, weights_version=checkpoint.digest, batch_sequences=1)
        generation = engine.generate(prompts, sampling, checkpoint.digest)
    answers = [
        ReferenceAnswer(
            prompt=prompt,
            is_chat=is_chat,
            prompt_ids=tuple(prompt_ids),
            token_ids=tuple(token_ids),
            pieces=tuple(token_bytes(tokenizer, token_id).hex() for token_id in token_ids),
            margins=tuple(round(margin, 6) for margin in margins),
            num_clear=next((step for step, margin in enumerate(margins) if not margin >= recipe.smoke_min_margin), len(margins)),
            is_stopped=token_ids[-1] in stops,
        )
        for (prompt, is_chat), prompt_ids, token_ids, margins in zip(
            asked, prompts, generation.token_ids, generation.top2_margins, strict=True
        )
    ]
    output.path("reference.json").write_text(json.dumps([answer.model_dump(mode="json") for answer in answers], indent=1) + "\n")
    return Reference(
        checkpoint_digest=checkpoint.digest,
        num_prompts=len(answers),
        num_tokens=sum(len(answer.token_ids) for answer in answers),
        num_clear_tokens=sum(answer.num_clear for answer in answers),
    )


def _prompt_ids(tokenizer: Tokenizer, prompt: str, is_chat: bool) -> list[int]:
    return encode(tokenizer, problem_prompt(prompt, enable_thinking=False))[0] if is_chat else document_token_ids(tokenizer, prompt)
