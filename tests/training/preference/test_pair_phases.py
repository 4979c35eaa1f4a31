"""Reward and DPO phases through launcher, supervisor and worker: they learn, resume to the same digest, agree on two
ranks, and are judged by held-out pairs."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from configs.schema import PairEvaluationRecipe, PairPackingRecipe, Waypoint
from infra.step import Output, Record, step
from model.formats.hf_checkpoint import load_model
from model.formats.weight_files import tensor_names
from tasks.data.packing.pack_pairs import pack_pairs
from tasks.data.records.documents import document_id
from tasks.evaluation.evaluate_pairs import evaluate_pairs
from tasks.training.loop.pair_data import PairOrder
from tasks.training.plan.launch_rules import refuse_impossible_training, unavailable_training
from tasks.training.plan.topology import impossible_topology
from tests.support.training_inputs import RESOURCES, SEQUENCE_LENGTH, TrainingInputs, compute, metrics_of, small_recipe
from tests.training.test_objectives import course, sft_recipe
from tests.training.test_phase import SAVE_EVERY_STEP, train_through_a_kill

NUM_STEPS, ROWS = 12, 8
KINDS = {"reward": {"kind": "reward", "own_model": None}, "dpo": {"kind": "dpo", "beta": 0.2, "reference": None}}


class ToyPairs(Record):
    num_pairs: int


@step(content=("pairs/*.parquet",))
def write_toy_pairs(*, output: Output) -> ToyPairs:
    """Questions `a?` to `z?`: of two digits the greater one is the better answer."""
    rows = []
    for number, letter in enumerate(f"{letter}{mark}" for letter in "abcdefghijklmnopqrstuvwxyz" for mark in "?!"):
        chosen, rejected = (
            json.dumps({"role": "assistant", "content": text, "reasoning": "", "tool_calls": []})
            for text in (str(5 + number % 5), str(number % 5))
        )
        prompt = json.dumps([{"role": "user", "content": letter, "reasoning": "", "tool_calls": []}])
        split = "test" if number % 2 else "validation" if number % 8 == 0 else "train"
        identity = {"id": document_id("toy", number, 0), "collection": "toy", "tools": "[]", "split": split}
        rows.append(identity | {"prompt": prompt, "chosen": chosen, "rejected": rejected})
    pq.write_table(pa.Table.from_pylist(rows), output.path("pairs/part-00000.parquet"))
    return ToyPairs(num_pairs=len(rows))


def pair_recipe(kind: str, **changes):
    num_tokens = NUM_STEPS * ROWS * SEQUENCE_LENGTH
    model = sft_recipe().model.model_dump() | ({"num_nextn_predict_layers": 0} if kind == "reward" else {})
    values = {
        "phase": "reward_model" if kind == "reward" else "rl_alignment",
        "objective": KINDS[kind],
        "course": course(f"pairs_{kind}", 5e-3, ROWS),
        "model": model,
        "num_tokens": num_tokens,
        "course_num_tokens": num_tokens,
        "max_epochs": 20.0,
        "validation": {"interval_tokens": num_tokens // 2, "num_tokens": 256, "keep": "last"},
    }
    return small_recipe(**values | changes)


def pair_arguments(inputs: TrainingInputs, recipe, start, resources=RESOURCES) -> dict:
    preferences = compute(inputs.store, write_toy_pairs)
    packing = PairPackingRecipe(sequence_length=SEQUENCE_LENGTH)
    pairs = compute(inputs.store, pack_pairs, preferences=preferences, tokenizer=inputs.tokenizer, recipe=packing)
    arguments = inputs.arguments(small_recipe(), resources, start) | {"recipe": recipe}
    return arguments | dict.fromkeys(("packed", "shards")) | {"pairs": pairs}


def values_of(hf_dir, pairs, is_scored: bool) -> np.ndarray:
    """What an exported model makes of the pairs to judge by, one row after the other: (P, 2)."""
    model, values = load_model(hf_dir, is_scored=is_scored), []
    for pair in pq.read_table(pairs.path("test.parquet")).to_pylist():
        for side in ("chosen", "rejected"):
            row, start = pair[side], pair["answer_start"]
            with torch.no_grad():
                hidden_BTD = model.hidden_states(torch.tensor([row]))
                if is_scored:
                    values.append(float(hidden_BTD[0, -1] @ model.score.weight[0]))
                else:
                    logits_TV = model.lm_head(hidden_BTD)[0, start - 1 : -1].log_softmax(-1)
                    values.append(float(logits_TV.gather(1, torch.tensor(row[start:])[:, None]).sum()))
    return np.array(values).reshape(-1, 2)


REWARD_SOONER = [pytest.param(kind, marks=[pytest.mark.long] * (kind == "dpo")) for kind in KINDS]
"""Both kinds; that of DPO with the long tests."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return TrainingInputs(tmp_path_factory.mktemp("preference") / "home")


@pytest.fixture(scope="module")
def tuned(inputs):
    return inputs.train(inputs.chat_arguments(sft_recipe()))


@pytest.fixture(scope="module", params=KINDS)
def trained(request, inputs, tuned):
    arguments = pair_arguments(inputs, pair_recipe(request.param), tuned)
    return request.param, arguments, inputs.train(arguments)


def test_the_phase_learns_and_its_loss_is_a_measure(trained):
    """A DPO phase begins at ln 2: its start is its reference. Both rows of the record count pairs."""
    kind, _, artifact = trained
    lines = metrics_of(artifact.path("metrics.jsonl"))
    assert lines[-1]["lm"] < 0.6 * lines[0]["lm"]
    measured = [line["validation_pair_loss"] for line in lines if "validation_pair_loss" in line]
    assert len(measured) == 2 and measured[-1] < 0.69
    if kind == "dpo":
        assert lines[0]["lm"] == pytest.approx(0.693147, abs=1e-4)
    assert artifact.record.objective == kind and not artifact.record.unreached_tensors
    assert artifact.record.validation_bits_per_byte == {}


def test_held_out_pairs_judge_the_phase(inputs, tuned, trained):
    """The scores are those of the exported weights, and the reference's those of the phase's start."""
    kind, arguments, artifact = trained
    pairs, is_scored = arguments["pairs"], kind == "reward"
    recipe = PairEvaluationRecipe(beta=KINDS[kind].get("beta", 1.0))
    figures = compute(inputs.store, evaluate_pairs, checkpoint=artifact, pairs=pairs, recipe=recipe).record
    assert figures.num_pairs == pairs.record.num_test == 26 and figures.is_scored == (kind == "reward")
    assert figures.pair_accuracy > 0.8 and figures.interval[0] > 0.5
    scores = pq.read_table(artifact.path("pairs/scores.parquet")).drop_columns("id")
    values = np.stack([column.to_numpy() for column in scores.columns], 1)
    np.testing.assert_allclose(values[:, :2], values_of(artifact.directory("hf"), pairs, is_scored), atol=1e-4)
    before = np.zeros_like(values[:, 2:]) if is_scored else values_of(tuned.directory("hf"), pairs, is_scored)
    np.testing.assert_allclose(values[:, 2:], before, atol=1e-4)
    margins = recipe.beta * ((values[:, 0] - values[:, 1]) - (values[:, 2] - values[:, 3]))
    assert figures.mean_margin == pytest.approx(margins.mean(), abs=1e-5)


def test_a_reward_model_is_exported_with_its_head_and_without_what_predicts_tokens(tuned, trained):
    kind, _, artifact = trained
    names = tensor_names(artifact.directory("hf"))
    if kind == "dpo":
        assert names == tensor_names(tuned.directory("hf"))
        return
    config = json.loads(artifact.path("hf/config.json").read_text())
    assert config["architectures"] == ["Glm4MoeForSequenceClassification"] and config["num_nextn_predict_layers"] == 0
    assert "score.weight" in names and "lm_head.weight" not in names
    own = sum(t.numel() for t in load_file(artifact.path("hf/model.safetensors")).values())
    assert own == artifact.record.num_parameters


@pytest.mark.parametrize("trained", REWARD_SOONER, indirect=True)
def test_a_killed_phase_continues_to_the_same_result(tuned, trained, tmp_path):
    kind, _, expected = trained
    other = TrainingInputs(tmp_path / "home")
    arguments = pair_arguments(other, pair_recipe(kind), tuned, SAVE_EVERY_STEP)
    resumed = train_through_a_kill(other, arguments)
    assert resumed.digest == expected.digest
    assert metrics_of(resumed.path("metrics.jsonl")) == metrics_of(expected.path("metrics.jsonl"))


@pytest.mark.parametrize("trained", REWARD_SOONER, indirect=True)
def test_two_ranks_train_as_one_does(tuned, trained, tmp_path):
    """Three pairs for two ranks in the last step: one rank has a filler."""
    kind, _, _ = trained
    recipe = pair_recipe(kind, num_tokens=22 * SEQUENCE_LENGTH, course_num_tokens=22 * SEQUENCE_LENGTH)
    resources = RESOURCES.model_copy(update={"micro_batch_sequences": 2})
    lines = []
    for num_ranks, zero_stage in ((1, 0), (2, 1)):
        changes = {"num_ranks": num_ranks, "ranks_per_node": num_ranks, "zero_stage": zero_stage}
        other = TrainingInputs(tmp_path / str(num_ranks))
        arguments = pair_arguments(other, recipe, tuned, resources.model_copy(update=changes))
        artifact = other.train(arguments)
        lines.append((metrics_of(artifact.path("metrics.jsonl")), load_file(artifact.path("hf/model.safetensors"))))
    (one, ours), (two, theirs) = lines
    for name in ("lm", "grad_norm"):
        assert [line[name] for line in two] == pytest.approx([line[name] for line in one], rel=2e-3)
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=1e-2, atol=2e-3, msg=name)


ADAPTER = {"kind": "lora", "rank": 4, "alpha": 8.0, "dropout": 0.25, "targets": ["attention", "shared_experts"]}


@pytest.mark.long
def test_dpo_trains_an_adapter_and_a_killed_phase_leaves_out_the_same_inputs(inputs, tuned, tmp_path):
    recipe = pair_recipe("dpo", adapter=ADAPTER)
    expected = inputs.train(pair_arguments(inputs, recipe, tuned))
    lines = metrics_of(expected.path("metrics.jsonl"))
    assert lines[0]["lm"] == pytest.approx(0.693147, abs=1e-4) and lines[-1]["lm"] < 0.65
    assert json.loads(expected.path("adapter/adapter_config.json").read_text())["r"] == ADAPTER["rank"]
    other = TrainingInputs(tmp_path / "killed")
    resumed = train_through_a_kill(other, pair_arguments(other, recipe, tuned, SAVE_EVERY_STEP))
    assert resumed.digest == expected.digest


def test_an_epoch_reads_every_pair_once_in_an_order_of_its_own():
    order = PairOrder(7, 46)
    epochs = [order.pairs(start, start + 7) for start in (0, 7)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(7))] * 2 and epochs[0] != epochs[1]
    assert order.pairs(5, 9) == [*epochs[0][5:], *epochs[1][:2]]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_ranks": 8, "ranks_per_node": 8}, "does not give each of 8 data-parallel copies a pair"),
        ({"context_parallel": 3, "num_ranks": 3, "ranks_per_node": 3}, r"does not divide by .* context parallel \(3\)"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_train_is_refused_by_name(kind, changes, reason):
    refuse_impossible_training(pair_recipe(kind), RESOURCES)
    with pytest.raises(ValueError, match=reason):
        refuse_impossible_training(pair_recipe(kind), RESOURCES.model_copy(update=changes))


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_run_where_the_model_or_its_rows_are_divided(kind):
    axes = {"tensor_parallel": 2, "pipeline_parallel": 2, "context_parallel": 2, "expert_parallel": 4, "num_ranks": 8}
    for changes in (axes | {"ranks_per_node": 8, "zero_stage": 1}, {"zero_stage": 3}):
        recipe, resources = pair_recipe(kind), RESOURCES.model_copy(update=changes)
        assert [*unavailable_training(recipe, resources), *impossible_topology(recipe, resources)] == []


def test_a_new_head_is_no_adapter():
    refuse_impossible_training(pair_recipe("dpo", adapter=ADAPTER), RESOURCES)
    with pytest.raises(ValueError, match=r"adapter.kind lora cannot train reward, whose head is new .*kind to none"):
        refuse_impossible_training(pair_recipe("reward", adapter=ADAPTER), RESOURCES)


def test_a_loss_of_the_mtp_layer_is_refused_since_it_would_learn_rejected_answers():
    recipe = pair_recipe("dpo")
    taught = recipe.course.model_copy(update={"mtp_loss_weight": (Waypoint(until_share=1.0, value=0.1),)})
    with pytest.raises(ValueError, match=r"mtp_loss_weight above 0 .*: set mtp_loss_weight to 0 in course pairs_dpo"):
        refuse_impossible_training(recipe.model_copy(update={"course": taught}), RESOURCES)


def test_too_few_pairs_and_no_weights_are_refused_with_the_fix(inputs, trained):
    kind, arguments, _ = trained
    with pytest.raises(ValueError, match=r"48 pairs need 2.5 passes over 19 pairs .* max_epochs is 2.0: raise it"):
        inputs.train(arguments | {"recipe": pair_recipe(kind, max_epochs=2.0)})
    with pytest.raises(ValueError, match=f"objective {kind} needs weights that answer"):
        inputs.train(arguments | {"start": None})
