"""Reinforcement learning in an environment: a toy learns to call a tool, and a phase of rl_agentic that is killed ends
in the same digest."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from configs.schema import TrainingRecipe
from infra.step import Output, step
from model.architecture.losses import IGNORED
from model.architecture.transformer import Glm4Moe
from model.text.chat_template import encode, render_to_train
from model.text.tokenizer_layout import END_TOKENS, tokenizer_for_text
from tasks.data.environments.calculator import calculate
from tasks.training.import_checkpoint import describe_checkpoint_dir, import_checkpoint
from tasks.training.policy.answer_rows import target_log_probabilities
from tasks.training.policy.episodes import episode_metrics
from tasks.training.policy.policy import policy_updates
from tasks.training.policy.prompt_order import Prompt
from tasks.training.policy.rollouts import sample_answers
from tests.support.model_recipes import GLM46, with_every_expert
from tests.support.saved_models import save_checkpoint
from tests.support.training_inputs import ToyPrompts, TrainingInputs, compute, metrics_of, small_recipe
from tests.training.test_objectives import GRPO, course
from tests.training.test_phase import SAVE_EVERY_STEP, train_through_a_kill
from tests.training.test_policy import CPU

SUMS = ("1+2", "2+4", "3+1", "4+4")
MODEL = with_every_expert(GLM46)
SEQUENCE_LENGTH, ROWS, NUM_STEPS = 64, 16, 24
AGENTIC = {
    **GRPO,
    "max_new_tokens": 48,
    "episodes": {"max_turns": 2, "max_turn_tokens": 40, "max_observation_chars": 20, "tool_seconds": 60.0},
    "max_constant_steps": NUM_STEPS,
}
PROMPTS = [
    Prompt(f"prompt-{number}", "agentic", "calculator", f"{text}?", "[]", json.dumps({"answer": calculate(text)}))
    for number, text in enumerate(SUMS)
]


@step(content=("prompts.parquet",))
def write_tool_prompts(*, output: Output) -> ToyPrompts:
    columns = ("id", "domain", "kind", "tools", "answer")
    rows = [{"prompt": each.question, **{name: getattr(each, name) for name in columns}} for each in PROMPTS]
    pq.write_table(pa.Table.from_pylist(rows), output.path("prompts.parquet"))
    return ToyPrompts(num_prompts=len(rows))


def recipe_of(num_steps: int) -> TrainingRecipe:
    batch = ROWS * SEQUENCE_LENGTH
    own = course("rl_agentic", 1e-3, ROWS) | {"start_batch_tokens": batch, "peak_batch_tokens": batch}
    return small_recipe(
        phase="rl_agentic",
        objective=AGENTIC,
        course=own,
        model=MODEL.model_dump(),
        sequence_length=SEQUENCE_LENGTH,
        num_tokens=num_steps * batch,
        course_num_tokens=num_steps * batch,
        max_epochs=10.0 * num_steps,
        prompt_mixture=[{"at_share": share, "mixture": {"agentic": 1.0}} for share in (0.0, 1.0)],
    )


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return TrainingInputs(tmp_path_factory.mktemp("agentic") / "home")


@pytest.fixture(scope="module")
def tokenizer(inputs):
    return tokenizer_for_text(str(inputs.tokenizer.path("tokenizer.json")))


def conversations() -> list[list[dict]]:
    """Each sum is as often computed with the tool as answered with 0, which is wrong."""
    made = []
    for expression in SUMS:
        question, result = {"role": "user", "content": f"{expression}?"}, calculate(expression)
        call = {"name": "calculator", "arguments": {"expression": expression}}
        asks = {"role": "assistant", "content": "", "tool_calls": [call]}
        made.append([question, asks, {"role": "tool", "content": result}, {"role": "assistant", "content": result}])
        made.append([question, {"role": "assistant", "content": "0"}])
    return made


@pytest.fixture(scope="module")
def tuned(tokenizer) -> Glm4Moe:
    """A model that was shown how the tool is called."""
    encoded = [encode(tokenizer, render_to_train(messages, ())) for messages in conversations()]
    token_ids_BT = torch.zeros(len(encoded), SEQUENCE_LENGTH - 1, dtype=torch.int64)
    target_ids_BT = torch.full_like(token_ids_BT, IGNORED)
    for row, (ids, trained) in enumerate(encoded):
        token_ids_BT[row, : len(ids) - 1] = torch.tensor(ids[:-1])
        targets = [token_id if is_trained else IGNORED for token_id, is_trained in zip(ids, trained, strict=True)]
        target_ids_BT[row, : len(ids) - 1] = torch.tensor(targets[1:])
    torch.manual_seed(46)
    model = Glm4Moe(MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)
    for _ in range(120):
        optimizer.zero_grad()
        model(token_ids_BT, target_ids_BT=target_ids_BT).losses.lm.backward()
        optimizer.step()
    return model


def test_a_model_learns_to_call_the_tool(tokenizer, tuned):
    """The steps of a phase without its worker: sample, judge, weigh, update."""
    recipe, stops = recipe_of(NUM_STEPS), tuple(tokenizer.token_to_id(token) for token in END_TOKENS)
    model = Glm4Moe(MODEL)
    model.load_state_dict(tuned.state_dict())
    optimizer, figures = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.0), []
    for number in range(1, NUM_STEPS + 1):
        rollouts = sample_answers(model, tokenizer, PROMPTS, recipe, stops, number, ROWS)
        updates = policy_updates(
            lambda rows: target_log_probabilities(model, rows, 1.0, ROWS), rollouts, recipe.objective, ROWS, CPU
        )
        figures.append(updates.metrics | episode_metrics([rollout.episode for rollout in rollouts]))
        for update in updates.policy:
            (batch,) = update()
            optimizer.zero_grad()
            weights_BT = batch.weights_BT
            output = model(batch.token_ids_BT, target_ids_BT=batch.target_ids_BT, target_weights_BT=weights_BT)
            output.losses.lm.backward()
            optimizer.step()
    first, last = figures[0], figures[-1]
    print([(round(each["reward_mean"], 2), round(each["tool_calls"], 2)) for each in figures])
    assert sum(each["reward_mean"] for each in figures[:2]) / 2 < 0.6
    assert sum(each["reward_mean"] for each in figures[-3:]) / 3 > 0.9
    assert first["tool_calls"] < 0.7 < 0.9 < last["tool_calls"] and last["tool_success"] == 1.0
