"""Our own greedy continuations of the smoke prompts, kept so that a later smoke test needs no model of its own.

Out: reference.json, per prompt the token ids asked and generated, the bytes of each and the top-2 margins.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from infra.step import Artifact, Output, Record, step
from tasks.evaluation.engine import document_token_ids, end_token_ids, load_engine, load_tokenizer, reproducible_arithmetic
from tasks.release.token_bytes import token_bytes

if TYPE_CHECKING:
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
    prompt_ids: tuple[int, ...]
    """With end-of-text before the prompt."""
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
    prompts = [document_token_ids(tokenizer, prompt) for prompt in recipe.smoke_prompts]
    with reproducible_arithmetic(NUM_THREADS):
        engine = load_engine(checkpoint_dir, weights_version=checkpoint.digest, batch_sequences=1)
        generation = engine.generate(prompts, sampling, checkpoint.digest)
    answers = [
        ReferenceAnswer(
            prompt=prompt,
            prompt_ids=tuple(prompt_ids),
            token_ids=tuple(token_ids),
            pieces=tuple(token_bytes(tokenizer, token_id).hex() for token_id in token_ids),
            margins=tuple(round(margin, 6) for margin in margins),
            num_clear=next((step for step, margin in enumerate(margins) if not margin >= recipe.smoke_min_margin), len(margins)),
            is_stopped=token_ids[-1] in stops,
        )
        for prompt, prompt_ids, token_ids, margins in zip(
            recipe.smoke_prompts, prompts, generation.token_ids, generation.top2_margins, strict=True
        )
    ]
    output.path("reference.json").write_text(json.dumps([answer.model_dump(mode="json") for answer in answers], indent=1) + "\n")
    return Reference(
        checkpoint_digest=checkpoint.digest,
        num_prompts=len(answers),
        num_tokens=sum(len(answer.token_ids) for answer in answers),
        num_clear_tokens=sum(answer.num_clear for answer in answers),
    )
