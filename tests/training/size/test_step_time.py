"""The derived time of a step: its constants against counted operations, its traffic against a count by hand, the search
against what it starts from, and the page that shows them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.training.roofline import count_passes, count_update
from benchmarks.training.train_step_gpu import LARGE
from configs.load import load_scale
from docs.draw_scale import PAGE, cases, drawn, s0_topology
from model.architecture.counts import count_parameters, training_flops_per_token
from tasks.training.plan.activation_memory import layer_bytes_per_token
from tasks.training.plan.launch_rules import unavailable_training
from tasks.training.plan.machine import H100, H800, LINK_SHARE, MEMORY_USED
from tasks.training.plan.plan_training import attended_tokens
from tasks.training.plan.search import evaluate, find_topology
from tasks.training.plan.step_time import TRAFFIC_PER_LOGIT, TRAFFIC_PER_SAVED_BYTE, UPDATE_BYTES, step_time
from tasks.training.plan.topology import impossible_topology

ROWS, LENGTH = 2, 2048


def phase_of(name: str):
    scale = load_scale(name)
    phase = scale.phases[0]
    return scale.training_recipe(phase), phase.resources, attended_tokens(phase)


def test_traffic_beside_products_is_that_of_counted_operations():
    """Of two depths, so that layers and unembedding are told apart."""
    counted, saved = [], []
    for num_layers in (2, 4):
        model = LARGE.model_copy(update={"num_hidden_layers": num_layers})
        counted.append(count_passes(model, ROWS, LENGTH))
        dense = [number < model.first_k_dense_replace for number in range(num_layers)]
        saved.append(sum(layer_bytes_per_token(model, 2, "cuda", is_dense=each) for each in dense) * ROWS * LENGTH)
    per_saved = (counted[1].traffic - counted[0].traffic) / (saved[1] - saved[0])
    assert per_saved == pytest.approx(TRAFFIC_PER_SAVED_BYTE, rel=0.15)
    # Once per row of the vocabulary, its weight's gradient is summed and converted.
    logits = ROWS * LENGTH * LARGE.vocab_size
    per_logit = (counted[0].traffic - per_saved * saved[0]) / logits
    assert per_logit == pytest.approx(TRAFFIC_PER_LOGIT, rel=0.3)


def test_an_update_reads_and_writes_what_is_counted():
    model = LARGE.model_copy(update={"num_hidden_layers": 4})
    assert count_update(model).traffic / count_parameters(model).total == pytest.approx(UPDATE_BYTES, rel=0.1)


def measured_step(sequences: int, num_micro_batches: int, **own):
    """On one H200, of 3.35 B parameters with the MTP layer, ZeRO 1, rows of 4,096 tokens."""
    tokens = num_micro_batches * sequences * 4096
    recipe, resources, _ = phase_of("tiny")
    course = recipe.course.model_copy(update={"start_batch_tokens": tokens, "peak_batch_tokens": tokens})
    measured = {
        "model": LARGE.model_copy(update={"num_nextn_predict_layers": 1}),
        "dtype": "bfloat16",
        "sequence_length": 4096,
        "num_tokens": 4 * tokens,
        "course_num_tokens": 4 * tokens,
        "course": course,
    }
    own |= {"device": "cuda", "zero_stage": 1, "micro_batch_sequences": sequences, "peak_flops_per_second": 9.89e14}
    h200 = replace(H100, memory_bytes_per_second=4.8e12)
    return step_time(recipe.model_copy(update=measured), resources.model_copy(update=own), 4096, h200)


def test_the_shares_of_peak_are_those_of_the_measured_step(monkeypatch):
    """3.915 s, when an update still read and wrote 105 bytes per element."""
    monkeypatch.setattr("tasks.training.plan.step_time.UPDATE_BYTES", 105)
    step = measured_step(4, 8)
    assert step.seconds == pytest.approx(3.915, rel=0.03) and step.mfu == pytest.approx(0.252, rel=0.03)
    assert step.update == pytest.approx(0.237, rel=0.05)
    assert step.matrices / 8 == pytest.approx(0.155 + 0.084, rel=0.03)


@pytest.mark.parametrize(
    ("sequences", "num_micro_batches", "deterministic", "tokens_per_second", "mfu"),
    [
        (8, 8, True, 52_966, 0.399),
        (8, 8, False, 58_938, 0.444),
        (8, 8, False, 58_474, 0.440),
        (4, 16, False, 56_064, 0.422),
        (8, 16, False, 61_784, 0.465),
    ],
)
def test_a_step_with_compiled_layers_takes_what_was_measured(
    sequences, num_micro_batches, deterministic, tokens_per_second, mfu
):
    step = measured_step(sequences, num_micro_batches, compile_layers=True, deterministic=deterministic)
    seconds = num_micro_batches * sequences * 4096 / tokens_per_second
    assert step.seconds == pytest.approx(seconds, rel=0.05) and step.mfu == pytest.approx(mfu, rel=0.05)


def test_counted_products_are_those_of_the_formula():
    """The formula counts 6 per active parameter and attention's forward and backward products; flash attention computes
    its scores again, and its operation is counted as if positions saw those after them too."""
    model = LARGE.model_copy(update={"num_hidden_layers": 2})
    counted = count_passes(model, ROWS, LENGTH)
    attention = sum(flops for name, flops in counted.flops.items() if "attn" in name)
    needed = training_flops_per_token(model, 0) * ROWS * LENGTH
    assert sum(counted.flops.values()) - attention == pytest.approx(needed, rel=0.01)


def test_traffic_equals_a_count_by_hand():
    """`full` as S0 divides it: 24 layers with the fullest stage's share, three passes, 64 micro-batches of 512
    positions per rank."""
    recipe, resources, attended = phase_of("full")
    step = step_time(recipe, s0_topology("full", resources), attended, H800)
    hidden = 4096 / 8 * 5120 * 2
    fullest = max(23, 24, 21 + 3) / (92 + 3) * 4
    layers = fullest * 93 / 4
    assert step.tensor_bytes == pytest.approx(64 * layers * 3 * 4 * 7 * hidden)
    assert step.expert_bytes == pytest.approx(64 * layers * 3 * 2 * 8 * hidden * 31 / 32)
    assert step.stage_bytes == pytest.approx(64 * 2 * hidden)
    assert step.tensor == pytest.approx(step.tensor_bytes / (H800.node_bytes_per_second * LINK_SHARE))
    assert sum(step.shares().values()) == pytest.approx(1)


def test_what_is_divided_more_sends_more_and_what_is_not_divided_sends_nothing():
    recipe, resources, attended = phase_of("scaled_down")
    axes = {"tensor_parallel": 1, "pipeline_parallel": 1, "context_parallel": 1, "expert_parallel": 1}
    alone = step_time(recipe, resources.model_copy(update=axes), attended, H100)
    assert (alone.tensor, alone.context, alone.expert, alone.stages, alone.waiting) == (0, 0, 0, 0, 0)
    for axis, part in (("tensor", "tensor"), ("context", "context"), ("expert", "expert"), ("pipeline", "waiting")):
        divided = step_time(recipe, resources.model_copy(update=axes | {f"{axis}_parallel": 4}), attended, H100)
        assert getattr(divided, part) > 0
    again = step_time(recipe, resources.model_copy(update=axes | {"recompute": "full"}), attended, H100)
    assert again.seconds > alone.seconds and again.mfu < alone.mfu


@pytest.mark.parametrize(("name", "machine"), [("scaled_down", H100), ("full", H800)])
def test_the_configured_topology_is_the_fastest_that_fits_and_faster_than_s0s(name, machine):
    recipe, resources, attended = phase_of(name)
    published = s0_topology(name, resources)
    given, best = evaluate(recipe, published, attended, machine), find_topology(recipe, published, attended, machine)
    assert best is not None and best.step.seconds < given.step.seconds
    assert best.resources == resources, "glm46 plan --search names the keys to set"
    assert best.memory_bytes <= MEMORY_USED * resources.device_memory_bytes
    assert not impossible_topology(recipe, best.resources) and best.resources.num_ranks == resources.num_ranks


def test_a_rank_without_memory_for_any_topology_finds_none():
    recipe, resources, attended = phase_of("scaled_down")
    tight = resources.model_copy(update={"device_memory_bytes": 10**6})
    assert find_topology(recipe, tight, attended, H100) is None


def test_the_page_shows_what_is_computed():
    assert PAGE.read_text() == drawn(), "run python -m docs.draw_scale"


def test_the_search_finds_nothing_that_a_run_would_refuse():
    """A policy phase and compiled layers, both of which no other axis than data can have."""
    scale = load_scale("scaled_down")
    policy, first = scale.phases[-1], scale.phases[0]
    compiled = {"compile_layers": True, "zero_stage": 2, "recompute": "full"}
    axes = {f"{axis}_parallel": 1 for axis in ("tensor", "pipeline", "context", "expert")}
    for phase, changes in ((policy, {}), (first, axes | compiled)):
        recipe, resources = scale.training_recipe(phase), phase.resources.model_copy(update=changes)
        assert unavailable_training(recipe, resources) == []
        best = find_topology(recipe, resources, attended_tokens(phase), H100)
        assert best is not None and unavailable_training(recipe, best.resources) == []


def test_the_search_compiles_layers_that_no_axis_divides_and_no_others():
    """Also where the given setting compiles, so that its axes are 1."""
    _, recipe, resources, attended, machine = cases()[0]
    for given in (resources, resources.model_copy(update={"compile_layers": True})):
        best = find_topology(recipe, given, attended, machine)
        assert best is not None and best.resources.compile_layers and "layers compiled" in best.describe()
    for name in ("scaled_down", "full"):
        recipe, resources, attended = phase_of(name)
        best = find_topology(recipe, resources, attended, H100)
        assert best is not None and not best.resources.compile_layers and best.resources.expert_parallel > 1
