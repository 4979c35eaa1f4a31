"""Answers a prompt by our own engine, piece by piece, for `glm46 generate`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from model.formats.checkpoint_template import given_template
from tasks.evaluation.engine import document_token_ids, end_token_ids, load_tokenizer
from tasks.training.import_checkpoint import has_chat_template


def generate_text(
    checkpoint_dir: Path,
    prompt: str,
    max_tokens: int,
    temperature: float,
    seed: int,
    enable_thinking: bool,
    device: str,
) -> Iterator[str]:
    """Pieces of text as they are generated, without the token that ends the answer and with the marks of reasoning and
    calls, which the tokenizer's file does not call special. The model is loaded here: raises
    ValueError for a damaged checkpoint, and for a prompt that with the answer exceeds the model's positions."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.decoders import DecodeStream

    from model.device import open_device
    from model.generation.generation import InProcessEngine, Sampling
    from model.text.chat_template import encode, problem_prompt
    from tasks.release.checkpoint_source import TOKENIZER_FILE, open_source

    source = open_source(checkpoint_dir)
    if source.is_scored:
        raise ValueError(f"{checkpoint_dir} is a reward model, which generates nothing: name a language model")
    path = source.config_dir / TOKENIZER_FILE
    if not path.is_file():
        raise ValueError(f"{path} does not exist: copy the model's own tokenizer beside it")
    tokenizer, shown = load_tokenizer(path), Tokenizer.from_file(str(path))
    if template := given_template(source.config_dir):
        message = {"role": "user", "content": prompt}
        asked = template.render([message], (), enable_thinking=enable_thinking, add_generation_prompt=True)
        prompt_ids = shown.encode(asked, add_special_tokens=False).ids
    elif has_chat_template(source.config_dir):
        prompt_ids = encode(tokenizer, problem_prompt(prompt, enable_thinking=enable_thinking))[0]
    else:
        prompt_ids = document_token_ids(tokenizer, prompt)
    num_tokens, limit = len(prompt_ids) + max_tokens, source.recipe.max_position_embeddings
    if num_tokens > limit:
        raise ValueError(f"prompt and answer have {num_tokens} tokens, the model {limit} positions: lower --max-tokens")
    stops = end_token_ids(tokenizer)
    model = source.load(torch.float32 if device == "cpu" else source.dtype).to(open_device(device))
    engine = InProcessEngine(model, weights_version=str(checkpoint_dir), batch_sequences=1)
    sampling = Sampling(max_new_tokens=max_tokens, temperature=temperature, seed=seed, stop_token_ids=stops)

    def pieces() -> Iterator[str]:
        decoded = DecodeStream(skip_special_tokens=True)
        for token_id in engine.stream(prompt_ids, sampling):
            if token_id not in stops:
                yield decoded.step(shown, token_id) or ""

    return pieces()
