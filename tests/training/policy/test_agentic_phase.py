"""Reinforcement learning in an environment: a toy learns to call a tool, and a phase of rl_agentic that is killed ends
in the same digest."""

from __future__ import annotations

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from configs.schema import TrainingRecipe
from infra.step import Output, step
from model.architecture.losses import IGNORED
from model.architecture.transformer import Glm4Moe
from model.formats.hf_checkpoint import read_config
from model.generation.generation import InProcessEngine
from model.text.chat_template import encode, render_to_train
from model.text.tokenizer_layout import END_TOKENS, tokenizer_for_text
from tasks.data.environments.calculator import calculate
from tasks.training.import_checkpoint import describe_checkpoint_dir, import_checkpoint
from tasks.training.policy.answer_rows import target_log_probabilities
from tasks.training.policy.episodes import episode_metrics
from tasks.training.policy.policy import policy_updates
from tasks.training.policy.prompts import Prompt
from tasks.training.policy.rollouts import sample_answers
from tests.support.model_recipes import GLM46
from tests.support.saved_models import save_checkpoint
from tests.support.training_inputs import ToyPrompts, TrainingInputs, compute, metrics_of, small_recipe
from tests.training.policy.test_policy import CPU
from tests.training.test_objectives import GRPO, course
from tests.training.test_phase import SAVE_EVERY_STEP, train_through_a_kill

SUMS = ("1+2", "2+4", "3+1", "4+4")
MODEL = GLM46.model_copy(
    update={
        "num_hidden_layers": 2,
        "n_routed_experts": 2,
        "num_experts_per_tok": 2,
        "num_nextn_predict_layers": 0,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_theta": 10_000.0,
    }
)
SEQUENCE_LENGTH, ROWS, NUM_STEPS = 64, 16, 36
AGENTIC = {
    **GRPO,
    "max_new_tokens": 48,
    "temperature": 0.7,
    "episodes": {"max_turns": 2, "max_turn_tokens": 40, "max_observation_chars": 20, "tool_seconds": {"others": 60.0}},
    "max_constant_steps": NUM_STEPS,
}
PROMPTS = [
    Prompt(f"prompt-{number}", "agentic", "calculator", f"{text}?", "[]", json.dumps({"answer": calculate(text)}))
    for number, text in enumerate(SUMS)
]


@step(content=("prompts.parquet",))
def write_tool_prompts(*, output: Output) -> ToyPrompts:
    columns = ("id", "domain", "kind", "tools", "answer", "source", "messages")
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
    """Each sum is computed with the tool once, and answered with 0 and with 9, which is wrong."""
    made = []
    for expression in SUMS:
        question, result = {"role": "user", "content": f"{expression}?"}, calculate(expression)
        call = {"name": "calculator", "arguments": {"expression": expression}}
        asks = {"role": "assistant", "content": "", "tool_calls": [call]}
        made.append([question, asks, {"role": "tool", "content": result}, {"role": "assistant", "content": result}])
        made += [[question, {"role": "assistant", "content": wrong}] for wrong in "09"]
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
    for _ in range(200):
        optimizer.zero_grad()
        model(token_ids_BT, target_ids_BT=target_ids_BT).losses.lm.backward()
        optimizer.step()
    return model


def test_a_model_learns_to_call_the_tool(tokenizer, tuned):
    """The steps of a phase without its worker: sample, judge, weigh, update."""
    recipe, stops = recipe_of(NUM_STEPS), tuple(tokenizer.token_to_id(token) for token in END_TOKENS)
    model = Glm4Moe(MODEL)
    model.load_state_dict(tuned.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.99), weight_decay=0.0)
    figures = []
    for number in range(1, NUM_STEPS + 1):
        engine = InProcessEngine(model, weights_version=str(number), batch_sequences=ROWS)
        rollouts = sample_answers(engine, tokenizer, PROMPTS, recipe, stops, number)
        updates = policy_updates(
            lambda rows: target_log_probabilities(model, rows, 0.7, ROWS), rollouts, recipe.objective, ROWS, CPU
        )
        figures.append(updates.metrics | episode_metrics([rollout.episode for rollout in rollouts]))
        for update in updates.policy:
            (batch,) = update()
            optimizer.zero_grad()
            weights_BT = batch.weights_BT
            output = model(
                batch.token_ids_BT, target_ids_BT=batch.target_ids_BT, target_weights_BT=weights_BT, temperature=0.7
            )
            output.losses.lm.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
    rewards, calls = ([each[name] for each in figures] for name in ("reward_mean", "tool_calls"))
    assert sum(rewards[:3]) / 3 < 0.5 and sum(rewards[-3:]) / 3 > 0.9, rewards
    assert sum(calls[:3]) / 3 < 0.6 and sum(calls[-3:]) / 3 > 0.9 and figures[-1]["tool_success"] == 1.0, calls


def test_a_killed_phase_of_episodes_ends_in_the_same_digest(inputs, tuned, tmp_path):
    hf_dir = tmp_path / "hf"
    hf_dir.mkdir()
    save_checkpoint(tuned, hf_dir, eos_token_ids=[0], pad_token_id=0, dtype=torch.float32, max_shard_bytes=1 << 30)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(inputs.tokenizer.path(name), hf_dir / name)

    def arguments(home: TrainingInputs, **changes) -> dict:
        start = compute(
            home.store,
            import_checkpoint,
            source=describe_checkpoint_dir(hf_dir),
            tokenizer=home.tokenizer,
            recipe=read_config(hf_dir),
        )
        given = home.prompt_arguments(recipe_of(3), ("0",), start=start, **changes)
        return given | {"prompts": compute(home.store, write_tool_prompts)}

    artifact = inputs.train(arguments(inputs))
    lines = metrics_of(artifact.path("metrics.jsonl"))
    assert all(line["tool_calls"] > 0 and line["tool_timeouts"] == 0 for line in lines)
    groups = [json.loads(line) for line in artifact.path("rollouts.jsonl").read_text().splitlines()]
    for group in groups:
        for reward, text, episode in zip(group["rewards"], group["samples"], group["episodes"], strict=True):
            is_called = len(episode["turns"]) == 3
            assert ("<tool_response>" in text) is is_called
            assert reward == 0.0 or (is_called and episode["ending"] == "answered")
    assert len({reward for group in groups for reward in group["rewards"]}) == 2
    other = TrainingInputs(tmp_path / "home")
    resumed = train_through_a_kill(other, arguments(other, resources=SAVE_EVERY_STEP))
    assert resumed.digest == artifact.digest
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert metrics_of(resumed.path(name)) == metrics_of(artifact.path(name))
