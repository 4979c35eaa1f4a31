"""Policy phases that train an adapter: as a plain loop over merged weights does it, resumed to the same digest, with
the frozen weights as PPO's reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.func import functional_call

from model.architecture.adapters import AdaptedExperts, AdaptedLinear, add_adapters
from model.architecture.transformer import Glm4Moe
from model.formats.checkpoint_names import checkpoint_shapes, to_checkpoint_tensors
from model.formats.hf_checkpoint import load_model
from model.generation.generation import InProcessEngine
from model.text.tokenizer_layout import END_TOKENS, tokenizer_for_text
from tasks.training.policy.policy import group_advantages
from tasks.training.policy.prompt_order import PromptOrder
from tasks.training.policy.rollouts import policy_model, sample_answers
from tasks.training.state.tensor_sources import FreshAdapters
from tests.configs.test_phase_graph import CRITIC
from tests.model.test_adapters import LORA as EVERYTHING
from tests.model.test_adapters import Weights, adapted_model
from tests.support.model_recipes import GLM46
from tests.support.saved_models import from_checkpoint_tensors
from tests.support.training_inputs import TrainingInputs, metrics_of, small_recipe
from tests.training.adapters.test_adapters import DORA, LORA
from tests.training.test_objectives import ANSWERS, GRPO, RL_STEPS, course, rl_recipe, sft_recipe
from tests.training.test_phase import SAVE_EVERY_STEP, train_through_a_kill
from tests.training.test_zero import ADAM_EPS

RATE, GROUPS, GROUP_SIZE = 1e-2, 4, GRPO["samples_per_prompt"]
ADAMW = small_recipe().optimizer.model_copy(update={"kind": "adamw", "adam_eps": ADAM_EPS, "max_grad_norm": 0.0})
PREFIX = "base_model.model."


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return TrainingInputs(tmp_path_factory.mktemp("adapted") / "home")


@pytest.fixture(scope="module")
def tuned(inputs):
    return inputs.train(inputs.chat_arguments(sft_recipe()))


def adapted_recipe(adapter=LORA, **changes):
    axis = course("rl_reasoning", RATE, GROUPS * GROUP_SIZE) | {"balance_loss_weight": 0.0}
    return rl_recipe(**{"adapter": adapter, "course": axis, "optimizer": ADAMW.model_dump()} | changes)


@pytest.fixture(scope="module")
def reinforced(inputs, tuned):
    return inputs.train(inputs.prompt_arguments(adapted_recipe(), ANSWERS, start=tuned))


def adapter_of(artifact) -> dict[str, torch.Tensor]:
    tensors = load_file(artifact.path("adapter/adapter_model.safetensors"))
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def merged(frozen: dict[str, torch.Tensor], own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights under our names, W + s B A where there is an adapter."""
    scaling, tensors = LORA["alpha"] / LORA["rank"], dict(frozen)
    for name in own:
        if name.endswith("lora_A.weight"):
            stem = name.removesuffix("lora_A.weight")
            tensors[f"{stem}weight"] = tensors[f"{stem}weight"] + scaling * own[f"{stem}lora_B.weight"] @ own[name]
    return from_checkpoint_tensors(tensors)


def plain_grpo(inputs, arguments) -> tuple[dict[str, torch.Tensor], list[str], list[float]]:
    """The adapter, the answers and the mean rewards of a phase: autograd through whole merged matrices, torch's
    AdamW."""
    recipe, model = arguments["recipe"], load_model(arguments["start"].directory("hf"))
    frozen = {name: tensor.clone() for name, tensor in to_checkpoint_tensors(model.state_dict()).items()}
    with torch.device("meta"):
        adapted = Glm4Moe(recipe.model)
        add_adapters(adapted, recipe.adapter)
    shapes = checkpoint_shapes(adapted)
    fresh = FreshAdapters(shapes, Weights(frozen), recipe.seed)
    own = {name: fresh.read(name, shapes[name]).requires_grad_() for name in sorted(fresh.names())}
    adamw = recipe.optimizer
    betas, decay = (adamw.adam_beta1, adamw.adam_beta2), adamw.weight_decay
    optimizer = torch.optim.AdamW(own.values(), lr=RATE, betas=betas, eps=adamw.adam_eps, weight_decay=decay)
    tokenizer = tokenizer_for_text(str(inputs.tokenizer.path("tokenizer.json")))
    prompts = PromptOrder(Path(arguments["prompts"].path("prompts.parquet")), tokenizer, recipe)
    stops = tuple(inputs.tokenizer.record.special_ids[name] for name in END_TOKENS)
    answers, means = [], []
    for step in range(1, RL_STEPS + 1):
        with torch.no_grad():
            model.load_state_dict(merged(frozen, own))
        asked = prompts.groups((step - 1) * GROUPS, step * GROUPS, {})
        engine = InProcessEngine(model, weights_version=str(step), batch_sequences=GROUPS * GROUP_SIZE)
        rollouts = sample_answers(engine, tokenizer, asked, recipe, stops, step)
        rewards_GS = torch.tensor([rollout.reward.total for rollout in rollouts]).view(GROUPS, GROUP_SIZE)
        means.append(float(rewards_GS.mean()))
        answers += [rollout.text for rollout in rollouts[: 2 * GROUP_SIZE]]
        terms, weights = [], merged(frozen, own)
        for rollout, advantage in zip(rollouts, group_advantages(rewards_GS).flatten().tolist(), strict=True):
            row, num_prompt = torch.tensor([rollout.prompt_ids + rollout.answer_ids]), len(rollout.prompt_ids)
            logits_TV = functional_call(model, weights, (row[:, :-1],)).logits_BTV[0, num_prompt - 1 :]
            chosen_T = logits_TV.log_softmax(-1).gather(1, row[0, num_prompt:, None])[:, 0]
            terms += [-advantage * chosen_T] if advantage else []
        optimizer.zero_grad()
        torch.cat(terms).mean().backward()
        optimizer.step()
    return {name: tensor.detach() for name, tensor in own.items()}, answers, means


def test_grpo_trains_an_adapter_as_a_plain_loop_over_merged_weights_does(inputs, tuned, reinforced):
    expected, answers, means = plain_grpo(inputs, inputs.prompt_arguments(adapted_recipe(), ANSWERS, start=tuned))
    lines = metrics_of(reinforced.path("metrics.jsonl"))
    assert [line["reward_mean"] for line in lines] == means and len(lines) == RL_STEPS
    groups = metrics_of(reinforced.path("rollouts.jsonl"))
    assert [text for group in groups for text in group["samples"]] == answers
    assert all(line["rollout_log_ratio"] < 1e-5 and line["grad_norm"] > 0 for line in lines)
    assert all(line["route_difference"] == 0 for line in lines)
    actual = adapter_of(reinforced)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-3, atol=1e-5, msg=lambda text, at=name: f"{at} {text}")
    assert any(tensor.abs().max() > RATE for name, tensor in actual.items() if "lora_B" in name)


def test_what_a_policy_leaves_is_its_start_with_the_adapter_merged_in(tuned, reinforced):
    assert {path.name for path in reinforced.directory("handover").iterdir()} == {"state.json"}
    before, after = (load_file(each.path("hf/model.safetensors")) for each in (tuned, reinforced))
    own = adapter_of(reinforced)
    for name, weight in to_checkpoint_tensors(merged(before, own)).items():
        torch.testing.assert_close(after[name], weight, rtol=0, atol=1e-6, msg=name)
        if name.removesuffix("weight") + "lora_A.weight" not in own:
            assert after[name].equal(before[name]), name
    assert reinforced.record.unreached_tensors == (), "every tensor of the adapter was trained"


def test_the_tensors_of_an_adapter_that_no_gradient_reached_are_named(inputs, tuned):
    """The first update finds B at zero, so it reaches no A; without a second one the record names them."""
    recipe = adapted_recipe(num_steps=1)
    artifact = inputs.train(inputs.prompt_arguments(recipe, ANSWERS, start=tuned))
    own = adapter_of(artifact)
    halves = sorted(name for name in own if "lora_A" in name)
    assert [*artifact.record.unreached_tensors] == halves and 2 * len(halves) == len(own)


@pytest.mark.parametrize(
    ("adapter", "objective"),
    [
        (LORA, GRPO),
        pytest.param(
            DORA, GRPO | {"kind": "gspo", "loss_mean": "answers", "updates_per_rollout": 2}, marks=pytest.mark.long
        ),
        pytest.param(LORA, GRPO | CRITIC | {"kind": "ppo"}, marks=pytest.mark.long),
    ],
    ids=["grpo lora", "gspo dora", "ppo lora"],
)
def test_a_killed_phase_with_an_adapter_continues_to_the_same_result(inputs, tuned, tmp_path, adapter, objective):
    recipe, other = adapted_recipe(adapter, objective=objective), TrainingInputs(tmp_path / "home")
    expected = inputs.train(inputs.prompt_arguments(recipe, ANSWERS, start=tuned))
    resumed = train_through_a_kill(other, other.prompt_arguments(recipe, ANSWERS, SAVE_EVERY_STEP, start=tuned))
    assert resumed.digest == expected.digest
    lines = metrics_of(expected.path("metrics.jsonl"))
    assert metrics_of(resumed.path("metrics.jsonl")) == lines
    assert all(line["rollout_log_ratio"] < 1e-5 for line in lines)
    if objective["kind"] == "ppo":
        assert lines[0]["reference_kl"] == 0.0 < lines[-1]["reference_kl"], "the reference has no adapter"
        assert all(line["critic_grad_norm"] > 0 for line in lines)


def test_a_bfloat16_policy_samples_with_the_frozen_weights_that_train():
    model = adapted_model(GLM46, EVERYTHING)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    copied = policy_model(model, "bfloat16")
    assert all(parameter.dtype == torch.bfloat16 for parameter in copied.parameters())
    kinds = {type(module) for module in copied.modules()}
    assert {AdaptedLinear, AdaptedExperts} <= kinds
    for (name, ours), theirs in zip(copied.named_parameters(), model.parameters(), strict=True):
        assert (ours.data_ptr() == theirs.data_ptr()) == ("lora_" not in name), name
