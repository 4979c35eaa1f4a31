"""PPO phases and reward models as a part of the reward, through launcher, supervisor and worker."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

from model.architecture.transformer import Glm4Moe
from model.formats.hf_checkpoint import load_model
from model.text.tokenizer_layout import tokenizer_for_text
from tasks.training.import_checkpoint import describe_checkpoint_dir, import_checkpoint
from tasks.training.state.job import TrainingJob
from tasks.training.train_phase import describe_job
from tests.configs.test_phase_graph import CRITIC
from tests.support.model_recipes import GLM46, random_model, with_every_expert
from tests.support.rank_processes import on_ranks
from tests.support.saved_models import save_checkpoint
from tests.support.training_dynamics import AfterSteps, trained
from tests.support.training_inputs import ROWS_PER_STEP, TrainingInputs, compute, metrics_of
from tests.training.preference.test_pair_phases import pair_arguments, pair_recipe
from tests.training.test_objectives import ANSWERS, GRPO, course, rl_recipe, sft_recipe
from tests.training.test_phase import SAVE_EVERY_STEP, train_through_a_kill

PPO = {**GRPO, **CRITIC, "kind": "ppo", "updates_per_rollout": 2}
NUM_STEPS = 32
OWN = with_every_expert(
    GLM46.model_copy(
        update={"hidden_size": 32, "num_hidden_layers": 2, "num_nextn_predict_layers": 0, "rope_theta": 10_000.0}
    )
)
SCORED = {"rewards": {**GRPO["rewards"], "verified": 0.0, "reward_model": 0.5}, "reward_model": "reward_model"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return TrainingInputs(tmp_path_factory.mktemp("ppo") / "home")


@pytest.fixture(scope="module")
def tuned(inputs):
    return inputs.train(inputs.chat_arguments(sft_recipe()))


@pytest.fixture(scope="module")
def judge(inputs, tmp_path_factory):
    """A reward model that prefers the greater of two digits: smaller than the policy, from weights of its own."""
    hf_dir, ends = tmp_path_factory.mktemp("own") / "hf", {"eos_token_ids": [0], "pad_token_id": 0}
    hf_dir.mkdir()
    save_checkpoint(random_model(OWN, std=0.05), hf_dir, **ends, dtype=torch.float32, max_shard_bytes=1 << 30)
    shutil.copy(inputs.tokenizer.path("tokenizer.json"), hf_dir)
    source = describe_checkpoint_dir(hf_dir)
    start = compute(inputs.store, import_checkpoint, source=source, tokenizer=inputs.tokenizer, recipe=OWN)
    return inputs.train(pair_arguments(inputs, pair_recipe("reward", model=OWN.model_dump()), start))


def ppo_recipe(num_steps: int, **objective):
    scorer = OWN.model_dump() if objective.get("reward_model") else None
    return rl_recipe(num_steps, objective=PPO | objective, scorer=scorer, max_epochs=10.0 * num_steps)


def test_ppo_raises_the_reward_and_measures_policy_and_critic(inputs, tuned):
    """The start answers 0 as often as 1; every prompt wants 0."""
    artifact = inputs.train(
        inputs.prompt_arguments(ppo_recipe(NUM_STEPS, max_constant_steps=NUM_STEPS), ("0",) * 8, start=tuned)
    )
    lines = metrics_of(artifact.path("metrics.jsonl"))
    rewards = [line["reward_mean"] for line in lines]
    assert sum(rewards[:3]) / 3 < 0.7 and sum(rewards[-3:]) / 3 > 0.9
    assert lines[0]["reference_kl"] == 0.0 < lines[-1]["reference_kl"], "the reference is the start of the phase"
    assert lines[-1]["value_loss"] < 0.5 * lines[0]["value_loss"]
    assert all(line["critic_grad_norm"] > 0 and line["explained_variance"] <= 1 for line in lines)
    state = json.loads(artifact.path("handover/state.json").read_text())
    assert state["optimizer_steps"] == state["policy"]["num_critic_updates"] == 2 * NUM_STEPS
    assert artifact.record.objective == "ppo" and "score.weight" not in load_file(artifact.path("hf/model.safetensors"))
    assert "score.weight" in load_file(artifact.path("handover/critic-master-00001.safetensors"))


def test_the_policy_is_held_to_the_reference_that_is_named_and_else_to_its_start(inputs, tuned):
    other = inputs.train(inputs.chat_arguments(sft_recipe(num_steps=2, course=course("other", 1e-3, ROWS_PER_STEP))))
    arguments = inputs.prompt_arguments(ppo_recipe(2), ANSWERS, start=tuned)
    by_name = {
        name: metrics_of(inputs.train(arguments | {"reference_model": model}).path("metrics.jsonl"))
        for name, model in (("null", None), ("start", tuned), ("other", other))
    }
    divergences = {name: [line["reference_kl"] for line in lines] for name, lines in by_name.items()}
    assert divergences["null"] == divergences["start"] and divergences["null"][0] == 0.0
    assert abs(divergences["other"][0]) > 0.01, "of the first answers, before any update"


def test_a_killed_ppo_phase_continues_to_the_same_policy_and_critic(inputs, tuned, tmp_path):
    recipe = ppo_recipe(4)
    expected = inputs.train(inputs.prompt_arguments(recipe, ANSWERS, start=tuned))
    other = TrainingInputs(tmp_path / "home")
    resumed = train_through_a_kill(other, other.prompt_arguments(recipe, ANSWERS, SAVE_EVERY_STEP, start=tuned))
    assert resumed.digest == expected.digest
    assert "handover/critic-momentum-00001.safetensors" in {*expected.manifest.content}
    assert metrics_of(resumed.path("metrics.jsonl")) == metrics_of(expected.path("metrics.jsonl"))


def test_a_reward_model_scores_the_answers_and_its_digest_is_in_the_key(inputs, tuned, judge, tmp_path):
    recipe = rl_recipe(objective=GRPO | SCORED, scorer=OWN.model_dump())
    arguments = inputs.prompt_arguments(recipe, ANSWERS, start=tuned) | {"reward_model": judge}
    artifact = inputs.train(arguments)
    assert artifact.manifest.identity["inputs"]["reward_model"] == judge.digest
    model = load_model(judge.directory("hf"), is_scored=True)
    tokenizer = tokenizer_for_text(str(inputs.tokenizer.path("tokenizer.json")))
    groups = [json.loads(line) for line in artifact.path("rollouts.jsonl").read_text().splitlines()]
    num_scored = 0
    for group in groups:
        for text, total, parts in zip(group["samples"], group["rewards"], group["parts"], strict=True):
            assert total == pytest.approx(0.5 * parts["reward_model"])
            if not re.fullmatch(r"\n[01]<\|user\|>", text):
                continue  # bytes that are no text cannot be encoded again
            num_scored += 1
            whole = f"[gMASK]<sop><|user|>\n{group['question']}/nothink<|assistant|>\n<think></think>{text}"
            hidden = model.hidden_states(torch.tensor([tokenizer_ids(tokenizer, whole)]))
            assert parts["reward_model"] == pytest.approx(float(hidden[0, -1] @ model.score.weight[0]), abs=1e-4)
    assert num_scored > 4
    lines = metrics_of(artifact.path("metrics.jsonl"))
    assert all(line["reward_mean"] == pytest.approx(0.5 * line["reward_score"], abs=1e-5) for line in lines)
    other = TrainingInputs(tmp_path / "home")
    given = other.prompt_arguments(recipe, ANSWERS, SAVE_EVERY_STEP, start=tuned) | {"reward_model": judge}
    assert train_through_a_kill(other, given).digest == artifact.digest


def tokenizer_ids(tokenizer, text: str) -> list[int]:
    """Of a text in which special tokens are written out."""
    tokenizer.encode_special_tokens = False
    return tokenizer.encode(text, add_special_tokens=False).ids


def test_the_critic_starts_from_the_reward_model_where_there_is_one(inputs, tuned, judge):
    held = {**SCORED, "critic_rate_ratio": 1e-9, "updates_per_rollout": 1}
    artifact = inputs.train(
        inputs.prompt_arguments(ppo_recipe(1, **held), ANSWERS, start=tuned) | {"reward_model": judge}
    )
    critic, scorer = (
        load_file(path)
        for path in (artifact.path("handover/critic-master-00001.safetensors"), judge.path("hf/model.safetensors"))
    )
    assert critic.keys() == scorer.keys()
    assert scorer["model.norm.weight"].shape == (OWN.hidden_size,), "of its size, not the policy's"
    for name, tensor in scorer.items():
        torch.testing.assert_close(critic[name], tensor, rtol=0, atol=1e-7)


def untrained_critic(rank: int, num_ranks: int, described: dict) -> dict:
    """Values of a job's critic before its first update."""
    critic = trained(TrainingJob.model_validate(described), AfterSteps(0)).trainable.critic
    assert critic is not None
    return {"values": values_of(critic.model)}


def values_of(model: Glm4Moe) -> torch.Tensor:
    with torch.no_grad():
        return model.score.values(model.hidden_states(torch.arange(3, 18)[None]))


def test_the_critic_has_the_values_of_its_reward_model_where_the_policy_has_another_rope_base(
    inputs, tuned, judge, tmp_path
):
    recipe = ppo_recipe(1, **SCORED).model_copy(update={"rope_theta": 1e6})
    arguments = inputs.prompt_arguments(recipe, ANSWERS, start=tuned) | {"reward_model": judge}
    job = describe_job(work_dir=tmp_path / "work", **arguments).model_dump(mode="json")
    (result,) = on_ranks(untrained_critic, 1, tmp_path, job)
    expected = values_of(load_model(judge.directory("hf"), is_scored=True))
    torch.testing.assert_close(result["values"], expected, rtol=0, atol=1e-6)


def test_a_ppo_phase_without_weights_to_start_from_and_a_foreign_reward_model_are_refused(inputs, tuned, judge):
    with pytest.raises(ValueError, match="objective ppo needs weights that answer"):
        inputs.train(inputs.prompt_arguments(ppo_recipe(1), ANSWERS))
    recipe = rl_recipe(objective=GRPO | SCORED | {"reward_model": "reward_model_of_others"})
    message = "reward_model is reward_model_of_others, and the model that is given is of phase reward_model with"
    with pytest.raises(ValueError, match=message):
        inputs.train(inputs.prompt_arguments(recipe, ANSWERS, start=tuned) | {"reward_model": judge})
