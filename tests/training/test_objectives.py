"""SFT and GRPO phases through launcher, supervisor and worker: repeatable, resumed like uninterrupted, stopped where
nothing is learned."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from infra.jobs.launchers import JobFailedError
from model.formats.hf_checkpoint import read_config
from tasks.training.import_checkpoint import describe_checkpoint_dir, import_checkpoint
from tasks.training.plan.answer_batches import answer_cache_bytes, answers_at_once
from tasks.training.state.tensor_sources import open_weights
from tasks.training.watch.effective_time import TIME_FILE
from tests.support.cluster.default_queue import DEFAULT_QUEUE
from tests.support.model_recipes import GLM46, with_every_expert
from tests.support.training_inputs import (
    RESOURCES,
    ROWS_PER_STEP,
    SEQUENCE_LENGTH,
    TrainingInputs,
    compute,
    metrics_of,
    small_recipe,
)
from tests.training.test_phase import SAVE_EVERY_STEP, train_through_a_kill

GRPO = {
    "kind": "grpo",
    "samples_per_prompt": 4,
    "max_new_tokens": 4,
    "temperature": 1.0,
    "enable_thinking": False,
    "clip_low": 0.2,
    "clip_high": 0.28,
    "dual_clip": 3.0,
    "mismatch": {"max_kl": 0.001, "max_route_difference": 0.01},
    "importance": {"kind": "truncated", "level": "tokens", "floor": 0.0, "cap": 2.0},
    "routes": "compare",
    "max_refills": 0,
    "updates_per_rollout": 1,
    "loss_mean": "tokens",
    "rewards": {"verified": 1.0, "format": 0.0, "length": 0.0, "overlong_tokens": 1, "reward_model": 0.0},
    "difficulty": None,
    "episodes": {"max_turns": 3, "max_turn_tokens": 4, "max_observation_chars": 100, "tool_seconds": {"others": 60.0}},
    "max_constant_steps": 3,
    "dynamic_temperature": None,
    "rollouts": "in_process",
    "reward_model": None,
}
ANSWERS = tuple("01010101")
SFT_STEPS, RL_STEPS, RL_ROWS = 24, 4, 16
MODEL = with_every_expert(GLM46).model_dump()
"""Rollouts and the trainer compute the same logits in two ways, from weights that were trained here."""


def course(name: str, peak: float, num_rows: int) -> dict:
    recipe = small_recipe().course.model_dump()
    waypoints = [{"until_share": 1.0, "value": 0.0}]
    rates = {
        "peak_learning_rate": peak,
        "final_learning_rate": peak,
        "warmup_share": 0.0,
        "router_bias_rate": waypoints,
        "mtp_loss_weight": waypoints,
    }
    batch = num_rows * SEQUENCE_LENGTH
    return recipe | rates | {"name": name, "start_batch_tokens": batch, "peak_batch_tokens": batch}


def sft_recipe(**changes):
    num_tokens = SFT_STEPS * ROWS_PER_STEP * SEQUENCE_LENGTH
    values = {"phase": "sft", "objective": {"kind": "sft"}, "course": course("sft", 1e-2, ROWS_PER_STEP)}
    return small_recipe(
        **{**values, "model": MODEL, "num_tokens": num_tokens, "course_num_tokens": num_tokens, **changes}
    )


def rl_recipe(num_steps: int = RL_STEPS, **changes):
    num_tokens = num_steps * RL_ROWS * SEQUENCE_LENGTH
    values = {
        "phase": "rl_reasoning",
        "objective": GRPO,
        "course": course("rl_reasoning", 2e-3, RL_ROWS),
        "max_epochs": 10.0,
    }
    return small_recipe(
        **{**values, "model": MODEL, "num_tokens": num_tokens, "course_num_tokens": num_tokens, **changes}
    )


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return TrainingInputs(tmp_path_factory.mktemp("objectives") / "home")


@pytest.fixture(scope="module")
def tuned(inputs):
    return inputs.train(inputs.chat_arguments(sft_recipe()))


@pytest.fixture(scope="module")
def reinforced(inputs, tuned):
    logged = {}
    return inputs.train(
        inputs.prompt_arguments(rl_recipe(), ANSWERS, start=tuned), log_metrics=logged.__setitem__
    ), logged


def test_sft_learns_to_answer_and_marks_the_checkpoint(inputs, tuned):
    losses = [line["lm"] for line in metrics_of(tuned.path("metrics.jsonl"))]
    assert losses[-1] < 0.6 < losses[0]  # of newline, 0 or 1, role token only the second is uncertain: ln 2 / 3 = 0.23
    assert tuned.record.is_chat_trained and tuned.record.mean_reward is None
    assert json.loads(tuned.path("hf/tokenizer_config.json").read_text())["chat_template"] == "a template"
    base = inputs.train(inputs.arguments(small_recipe()))
    assert not base.record.is_chat_trained
    assert json.loads(base.path("hf/tokenizer_config.json").read_text()) == {"eos_token": "<|endoftext|>"}


def test_imported_weights_count_as_chat_trained_where_they_bring_a_template(inputs, tuned):
    base = inputs.train(inputs.arguments(small_recipe()))
    for start, is_chat_trained in ((tuned, True), (base, False)):
        directory = start.directory("hf")
        imported = compute(
            inputs.store,
            import_checkpoint,
            source=describe_checkpoint_dir(directory),
            tokenizer=inputs.tokenizer,
            recipe=read_config(directory),
        )
        assert imported.record.is_chat_trained == is_chat_trained
        assert imported.record.chat_template_digest == start.record.chat_template_digest


def test_weights_that_transformers_saved_again_are_imported_as_ours_are_written(inputs, tuned, tmp_path):
    shutil.copytree(tuned.directory("hf"), tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text())
    inside = {
        "rope_type": "default",
        "rope_theta": config.pop("rope_theta"),
        "partial_rotary_factor": config.pop("partial_rotary_factor"),
    }
    path.write_text(json.dumps(config | {"rope_parameters": inside}))
    # The architecture of a scale may state another RoPE base than its phases train with.
    recipe = read_config(tmp_path / "hf").model_copy(update={"rope_theta": 123.0, "max_position_embeddings": 456})
    imported = compute(
        inputs.store,
        import_checkpoint,
        source=describe_checkpoint_dir(tmp_path / "hf"),
        tokenizer=inputs.tokenizer,
        recipe=recipe,
    )
    written = json.loads(imported.path("hf/config.json").read_text())
    assert written["rope_theta"] == inside["rope_theta"] and set(written) >= set(type(recipe).model_fields)
    assert imported.path("hf/model.safetensors").read_bytes() == tuned.path("hf/model.safetensors").read_bytes()


def test_imported_weights_keep_their_dtype_and_glm45_copies_are_left_out(inputs, tuned, tmp_path):
    """As GLM-4.5 is published: bfloat16, in shards, embedding and unembedding once more in the MTP layer."""
    shutil.copytree(tuned.directory("hf"), tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "model.safetensors").unlink()
    kept = {
        name: tensor if "bias" in name and "gate" in name else tensor.bfloat16() for name, tensor in tensors.items()
    }
    layer = f"model.layers.{read_config(tmp_path / 'hf').num_hidden_layers}"
    copies = {
        f"{layer}.embed_tokens.weight": kept["model.embed_tokens.weight"].clone(),
        f"{layer}.shared_head.head.weight": kept["lm_head.weight"].clone(),
    }
    own = {name: kept.pop(name) for name in [*kept][:5]}
    files = {"a.safetensors": own, "b.safetensors": kept | copies}
    for name, held in files.items():
        save_file(held, tmp_path / "hf" / name)
    weight_map = {name: file for file, held in files.items() for name in held}
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "hf" / "optimizer.pt").write_bytes(b"what their trainer left")
    imported = compute(
        inputs.store,
        import_checkpoint,
        source=describe_checkpoint_dir(tmp_path / "hf"),
        tokenizer=inputs.tokenizer,
        recipe=read_config(tmp_path / "hf"),
    )
    weights = open_weights(
        imported.directory("handover"), imported.directory("hf"), read_config(imported.directory("hf"))
    )
    assert weights.names() == set(tensors)
    for name, tensor in (own | kept).items():
        read = weights.read(name, tensor.shape)
        assert read.dtype == tensor.dtype and read.equal(tensor)
    assert "optimizer.pt" not in {path.name for path in imported.paths("hf/*")}
    assert imported.path("hf/a.safetensors").samefile(tmp_path / "hf" / "a.safetensors")


def test_grpo_samples_learns_and_keeps_its_evidence(tuned, reinforced):
    artifact, logged = reinforced
    assert sorted(logged) == list(range(1, RL_STEPS + 1))
    assert all(isinstance(value, int | float) for values in logged.values() for value in values.values())
    first = logged[1]
    assert (
        0 < first["reward_mean"] < 1
        and first["informative_groups"] > 0
        and first["rollout_kl"] < 1e-4
        and first["clip_fraction"] == 0
    )
    assert first["mfu"] > 0 and first["memory_bytes"] > 10**7
    stretches = json.loads(artifact.path(TIME_FILE).read_bytes())["stretches"]
    assert [stretch["wait_seconds"] for stretch in stretches] == [0.0], "answers and what is computed of them are work"
    assert artifact.record.is_chat_trained  # its start was
    assert artifact.record.mean_reward == logged[RL_STEPS]["reward_mean"]  # a tenth of four steps is the last one
    groups = [json.loads(line) for line in artifact.path("rollouts.jsonl").read_text().splitlines()]
    assert [group["step"] for group in groups] == [1, 1, 2, 2, 3, 3, 4, 4]
    for group in groups:
        for text, reward in zip(group["samples"], group["rewards"], strict=True):
            answer, end, rest = text.partition("<|user|>")
            assert reward == float(answer.strip() == group["answer"] and (end, rest) == ("<|user|>", ""))
    before, after = (load_file(each.path("handover/master-00001.safetensors")) for each in (tuned, artifact))
    assert any(not tensor.equal(after[name]) for name, tensor in before.items())


@pytest.mark.parametrize("kind", [pytest.param("sft", marks=pytest.mark.long), "grpo"])
def test_a_killed_phase_continues_to_the_same_result(kind, inputs, tuned, reinforced, tmp_path):
    other = TrainingInputs(tmp_path / "home")
    if kind == "sft":
        expected, arguments = tuned, other.chat_arguments(sft_recipe(), SAVE_EVERY_STEP)
    else:
        expected, arguments = reinforced[0], other.prompt_arguments(rl_recipe(), ANSWERS, SAVE_EVERY_STEP, start=tuned)
    resumed = train_through_a_kill(other, arguments)
    assert "== start 2" in resumed.path("logs/rank-0.log").read_text()
    assert resumed.digest == expected.digest
    for name in ("metrics.jsonl", "rollouts.jsonl") if kind == "grpo" else ("metrics.jsonl",):
        assert metrics_of(resumed.path(name)) == metrics_of(expected.path(name))


GSPO = GRPO | {"kind": "gspo", "loss_mean": "answers", "updates_per_rollout": 2, "clip_low": 3e-4, "clip_high": 4e-4}


@pytest.fixture(scope="module")
def gspo(inputs, tuned):
    return inputs.train(inputs.prompt_arguments(rl_recipe(objective=GSPO), ANSWERS, start=tuned))


def test_gspo_takes_several_updates_per_rollout(gspo):
    logged = {line["step"]: line for line in metrics_of(gspo.path("metrics.jsonl"))}
    state = json.loads(gspo.path("handover/state.json").read_text())
    num_updates = sum(min(2, line["informative_groups"]) for line in logged.values())
    assert state["step"] == RL_STEPS < state["optimizer_steps"] == num_updates
    assert any(line["clip_fraction"] > 0 for line in logged.values()), "the second update's ratios have moved"


@pytest.mark.long
def test_gspo_with_several_updates_per_rollout_continues_after_a_kill(gspo, tuned, tmp_path):
    other = TrainingInputs(tmp_path / "home")
    arguments = other.prompt_arguments(rl_recipe(objective=GSPO), ANSWERS, SAVE_EVERY_STEP, start=tuned)
    assert train_through_a_kill(other, arguments).digest == gspo.digest


def test_answers_sampled_two_at_a_time_are_those_of_one_batch(tuned, reinforced, tmp_path):
    recipe, expected = rl_recipe(), reinforced[0]
    few = RESOURCES.model_copy(update={"rollout_cache_bytes": 3 * answer_cache_bytes(recipe, RESOURCES) - 1})
    assert (answers_at_once(recipe, few, RL_ROWS), answers_at_once(recipe, RESOURCES, RL_ROWS)) == (2, RL_ROWS)
    other = TrainingInputs(tmp_path / "home")
    artifact = other.train(other.prompt_arguments(recipe, ANSWERS, few, start=tuned))
    assert artifact.digest == expected.digest
    assert metrics_of(artifact.path("rollouts.jsonl")) == metrics_of(expected.path("rollouts.jsonl"))


def test_other_seeds_sample_other_answers(inputs, tuned, reinforced):
    other = inputs.train(inputs.prompt_arguments(rl_recipe(seed=47), ANSWERS, start=tuned))
    assert metrics_of(other.path("rollouts.jsonl")) != metrics_of(reinforced[0].path("rollouts.jsonl"))


def test_a_step_with_nothing_to_learn_moves_only_the_position(inputs, tuned):
    artifact = inputs.train(inputs.prompt_arguments(rl_recipe(num_steps=2), ("wrong",) * 8, start=tuned))
    before, after = (load_file(each.path("handover/master-00001.safetensors")) for each in (tuned, artifact))
    assert all(tensor.equal(after[name]) for name, tensor in before.items())
    state = json.loads(artifact.path("handover/state.json").read_text())
    assert (state["step"], state["optimizer_steps"], state["num_tokens"]) == (2, 0, rl_recipe(num_steps=2).num_tokens)
    assert state["policy"] == {
        "mean_rewards": [0.0, 0.0],
        "num_constant_steps": 2,
        "num_critic_updates": 0,
        "num_refilled": {},
    }
    assert not any(tensor.any() for tensor in load_file(artifact.path("handover/momentum-00001.safetensors")).values())
    assert artifact.record.mean_reward == 0.0
    trained = {name for name in before if "e_score_correction_bias" not in name and ".layers.3." not in name}
    assert {*artifact.record.unreached_tensors} == trained, "but the MTP layer, whose loss weighs nothing"
    assert tuned.record.unreached_tensors == ()


def test_constant_rewards_stop_the_phase_with_what_to_do(inputs, tuned):
    with pytest.raises(
        JobFailedError,
        match=r"step 3: in 3 steps in a row \(objective.max_constant_steps\) no group had two different rewards",
    ):
        inputs.train(inputs.prompt_arguments(rl_recipe(num_steps=4), ("wrong",) * 8, start=tuned))


def test_a_mismatch_beyond_its_bound_stops_the_phase_before_the_step(inputs, tuned):
    recipe = rl_recipe(objective=GRPO | {"mismatch": {"max_kl": 1e-30, "max_route_difference": 0.01}})
    with pytest.raises(JobFailedError, match=r"step \d: rollout_kl is .*, objective.mismatch.max_kl allows 1e-30"):
        inputs.train(inputs.prompt_arguments(recipe, ("0",) * 8, start=tuned))


def test_prompts_without_room_for_an_answer_are_refused_before_the_job(inputs, tuned):
    recipe = rl_recipe(objective={**GRPO, "max_new_tokens": 6})
    with pytest.raises(
        ValueError,
        match=r"all 8 prompts \(of toys.jsonl\) have more than 10 tokens, which is sequence_length \(16\) less "
        r"max_new_tokens \(6\)",
    ):
        inputs.train(inputs.prompt_arguments(recipe, ANSWERS, start=tuned))


@pytest.mark.parametrize(
    ("recipe", "resources", "message"),
    [
        (
            {"adapter": {"kind": "lora", "rank": 4, "alpha": 8.0, "dropout": 0.1, "targets": ["attention"]}},
            {},
            "adapter.dropout 0.1 cannot train grpo: .* Set adapter.dropout to 0",
        ),
        (
            {"adapter": {"kind": "qlora", "rank": 4, "alpha": 8.0, "dropout": 0.0, "targets": ["attention"]}},
            {},
            "adapter.kind qlora cannot train grpo, .*: set adapter.kind to lora",
        ),
        ({}, {"launcher": "ssh"}, "launcher ssh needs queue.hostfile: set it in the same resources"),
        ({}, {"launcher": "kubernetes"}, "queue.image: .*; launcher kubernetes needs queue.volume_claim"),
        ({}, {"queue": DEFAULT_QUEUE.model_copy(update={"image": "a"})}, "launcher local heeds no queue.image: empty"),
        *(
            (
                {},
                {"launcher": launcher, "queue": DEFAULT_QUEUE.model_copy(update={name: value, "hostfile": "h"})},
                f"launcher {launcher} heeds no queue.{name}: empty it",
            )
            for launcher, name, value in (
                ("local", "environment", {"HF_HOME": "/cache"}),
                ("pbs", "image", "a"),
                ("ssh", "image", "a"),
                ("slurm", "hostfile", "h"),
            )
        ),
        (
            {},
            {"queue": DEFAULT_QUEUE.model_copy(update={"max_missing_nodes": 1})},
            r"queue.max_missing_nodes 1: no smaller world can be trained \(the job has one node\). Set it to 0",
        ),
        (
            {"objective": {"kind": "sft"}},
            {"micro_batch_tokens": 64},
            "micro_batch_tokens 64 with objective sft, .* to 0",
        ),
        ({}, {"zero_stage": 3}, "zero_stage 3 cannot train grpo, .* set zero_stage to 2 or less"),
        ({}, {"num_ranks": 2, "expert_parallel": 2}, "expert_parallel 2 cannot train grpo, .* set expert_parallel to"),
        (
            {},
            {"rollout_cache_bytes": 1000},
            r"rollout_cache_bytes \(1000\) hold no answer .* take \d+ bytes of a rank; raise it",
        ),
        (
            {"objective": {**GRPO, "samples_per_prompt": 5}},
            {},
            r"does not divide into groups of samples_per_prompt \(5\)",
        ),
        (
            {"max_epochs": 1.0},
            {},
            r"16 groups of answers need 2.0 passes over 8 prompts of domain synthetic, max_epochs is 1.0",
        ),
    ],
)
def test_what_has_no_code_is_refused_by_key_value_and_fix(recipe, resources, message, inputs):
    with pytest.raises(ValueError, match=message):
        inputs.train(inputs.prompt_arguments(rl_recipe(**recipe), ANSWERS, RESOURCES.model_copy(update=resources)))
