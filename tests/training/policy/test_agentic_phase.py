"""A phase of rl_agentic through launcher, supervisor and worker: it learns to call a tool, and a killed one ends in the
same digest."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.schema import PackingRecipe, TrainingRecipe
from infra.step import Artifact, Output, step
from model.text.chat_template import encode, render_to_train
from model.text.tokenizer_layout import tokenizer_for_text
from tasks.data.environments.calculator import calculate
from tasks.data.packing.pack_phase import pack_phase
from tasks.data.shards.token_shard import append_tokens, token_dtype, write_index
from tests.support.model_recipes import GLM46
from tests.support.training_inputs import (
    SEED,
    ToyPrompts,
    ToyShards,
    ToyTokenizer,
    TrainingInputs,
    compute,
    metrics_of,
    small_recipe,
)
from tests.training.test_objectives import GRPO, MODEL, course

SUMS = ("1+2", "2+4", "3+1", "4+4")
SEQUENCE_LENGTH, NEW_TOKENS = 64, 48
SFT_STEPS, SFT_ROWS, RL_STEPS, RL_ROWS = 40, 6, 16, 16
AGENTIC = {
    **GRPO,
    "max_new_tokens": NEW_TOKENS,
    "episodes": {"max_turns": 2, "max_turn_tokens": 40, "max_observation_chars": 20, "tool_seconds": 60.0},
    "max_constant_steps": RL_STEPS,
}


@step(content=("shards/*",))
def shard_tool_chats(*, tokenizer: Artifact[ToyTokenizer], output: Output) -> ToyShards:
    """Each sum is as often computed with the tool as answered with 0, which is wrong."""
    opened, chats = tokenizer_for_text(str(tokenizer.path("tokenizer.json"))), []
    for expression in SUMS:
        question = {"role": "user", "content": f"{expression}?"}
        call = {"name": "calculator", "arguments": {"expression": expression}}
        result = calculate(expression)
        solved = [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": result},
            {"role": "assistant", "content": result},
        ]
        for messages in ([question, *solved], [question, {"role": "assistant", "content": "0"}]):
            chats.append(encode(opened, render_to_train(messages, ())))
    dtype = token_dtype(GLM46.vocab_size)
    with open(output.path("shards/chat.bin"), "wb") as file:
        lengths = append_tokens(file, [token_ids for token_ids, _ in chats], dtype)
    write_index(output.path("shards/chat.idx"), lengths, dtype)
    output.path("shards/chat.mask").write_bytes(b"".join(bytes(trained) for _, trained in chats))
    return ToyShards(shards=("chat",), domains={"chat": "chat"})


@step(content=("prompts.parquet",))
def write_tool_prompts(*, output: Output) -> ToyPrompts:
    rows = [
        {
            "id": f"prompt-{number}",
            "domain": "agentic",
            "kind": "calculator",
            "prompt": f"{expression}?",
            "tools": "[]",
            "answer": json.dumps({"answer": calculate(expression)}),
        }
        for number, expression in enumerate(SUMS)
    ]
    pq.write_table(pa.Table.from_pylist(rows), output.path("prompts.parquet"))
    return ToyPrompts(num_prompts=len(rows))


def recipe_of(phase: str, objective: dict, rate: float, num_steps: int, num_rows: int) -> TrainingRecipe:
    batch = num_rows * SEQUENCE_LENGTH
    own = course(phase, rate, num_rows) | {"start_batch_tokens": batch, "peak_batch_tokens": batch}
    return small_recipe(
        phase=phase,
        objective=objective,
        course=own,
        model=MODEL,
        sequence_length=SEQUENCE_LENGTH,
        num_tokens=num_steps * batch,
        course_num_tokens=num_steps * batch,
        max_epochs=10.0 * num_steps,
        spikes=small_recipe().spikes.model_dump() | {"max_loss_ratio": 1e9, "max_grad_norm_ratio": 1e9},
        prompt_mixture=[{"at_share": share, "mixture": {"agentic": 1.0}} for share in (0.0, 1.0)],
    )


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return TrainingInputs(tmp_path_factory.mktemp("agentic") / "home")


@pytest.fixture(scope="module")
def tuned(inputs):
    recipe = recipe_of("sft", {"kind": "sft"}, 1e-2, SFT_STEPS, SFT_ROWS)
    chats = compute(inputs.store, shard_tool_chats, tokenizer=inputs.tokenizer)
    packing = PackingRecipe(
        num_tokens=recipe.num_tokens,
        sequence_length=SEQUENCE_LENGTH,
        packing="best_fit",
        mixture={"chat": 1.0},
        bucket_weights=(),
        max_epochs=100.0,
        fim_rate=0.0,
        seed=SEED,
    )
    packed = compute(inputs.store, pack_phase, shards=inputs.shards, chats=chats, recipe=packing)
    arguments = inputs.prompt_arguments(recipe, ("0",))
    return inputs.train(arguments | {"prompts": None, "packed": packed, "shards": inputs.shards, "chats": chats})


def agentic_arguments(inputs: TrainingInputs, tuned: Artifact, num_steps: int, **changes) -> dict:
    recipe = recipe_of("rl_agentic", AGENTIC, 4e-3, num_steps, RL_ROWS)
    prompts = compute(inputs.store, write_tool_prompts)
    return inputs.prompt_arguments(recipe, ("0",), start=tuned, **changes) | {"prompts": prompts}


def test_the_phase_learns_to_call_the_tool(inputs, tuned):
    artifact = inputs.train(agentic_arguments(inputs, tuned, RL_STEPS))
    lines = metrics_of(artifact.path("metrics.jsonl"))
    print([(round(line["reward_mean"], 2), round(line["tool_calls"], 2), line["tool_success"]) for line in lines])
    first, last = (np.mean([line["reward_mean"] for line in part]) for part in (lines[:3], lines[-3:]))
    assert first < 0.5 and last > 0.9
