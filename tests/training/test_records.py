"""What a phase writes about itself: event files, Weights & Biases, profiles, held-out text, expert use."""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from configs.load import load_scale
from configs.schema import ValidationRecipe
from model.architecture.attention import visible_within_segments
from model.architecture.counts import training_flops_per_token
from model.architecture.losses import LanguageHead
from model.architecture.transformer import Glm4Moe
from tasks.training.loop.training_step import expert_use
from tasks.training.parallel.micro_batch import MicroBatch
from tasks.training.watch.profiling import FLOP_FORMULAS, counted_attention
from tasks.training.watch.trackers import refuse_missing_tracker
from tests.support.model_recipes import GLM46
from tests.support.training_inputs import RESOURCES, TrainingInputs, small_recipe

RECIPES = {"toy": (GLM46, 256), "micro": (load_scale("micro").model.recipe, 512)}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(
    ("in_documents", "trains_mtp"), [(False, True), (True, True), (False, False)], ids=["rows", "documents", "no MTP"]
)
def test_profiled_flops_agree_with_the_formula(name, in_documents, trains_mtp):
    recipe, num_positions = RECIPES[name]
    model = Glm4Moe(recipe)
    model.runs_mtp = trains_mtp
    token_ids = torch.arange(2 * (num_positions + 1)).view(2, -1) % recipe.vocab_size
    segments = torch.arange(num_positions).expand(2, -1) // (num_positions // 8)
    batch = MicroBatch(token_ids[:, :-1], token_ids[:, 1:], segments, is_segmented=in_documents)
    with (
        counted_attention(model) as attention,
        FlopCounterMode(display=False, custom_mapping=FLOP_FORMULAS) as products,
    ):
        losses = model(batch.token_ids_BT, **batch.model_arguments).losses
        (losses.lm + losses.mtp + losses.balance).backward()
    counted = (products.get_total_flops() + attention[0]) / (2 * num_positions)
    positions, squares = batch.attended.tolist()
    assert squares / positions == (num_positions / 8 if in_documents else num_positions)
    assert counted == pytest.approx(
        training_flops_per_token(recipe, squares / positions, trains_mtp=trains_mtp), rel=0.05
    )


def test_the_float32_sum_of_an_accelerators_unembedding_is_counted():
    with torch.device("meta"):
        head = LanguageHead(GLM46.hidden_size, GLM46.vocab_size).bfloat16()
        hidden_BTD = torch.zeros(2, 8, GLM46.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        targets_BT = torch.zeros(2, 8, dtype=torch.int64)
    with FlopCounterMode(display=False, custom_mapping=FLOP_FORMULAS) as products:
        head(hidden_BTD, targets_BT).backward()
    assert products.get_total_flops() == 6 * 2 * 8 * GLM46.hidden_size * GLM46.vocab_size


def test_attention_inside_documents_counts_only_their_squares():
    model = Glm4Moe(GLM46)
    segments = torch.tensor([[0] * 10 + [1] * 30 + [2] * 24])
    with counted_attention(model) as attention:
        model(
            torch.ones(1, 64, dtype=torch.int64),
            target_ids_BT=torch.ones(1, 64, dtype=torch.int64),
            segment_ids_BT=segments,
        )
    mtp = [10, 30, 23]
    squares = GLM46.num_hidden_layers * (10**2 + 30**2 + 24**2) + sum(length**2 for length in mtp)
    assert attention[0] == 6 * squares * GLM46.num_attention_heads * GLM46.head_dim
    assert visible_within_segments(segments) is not None


def test_expert_use_equals_a_naive_computation():
    counts = torch.tensor([[4, 4, 4, 4], [0, 16, 0, 0], [0, 0, 0, 0]])
    use = expert_use(counts)
    assert use.load == (1.0, 4.0) and use.num_dead == (0, 3)  # the third layer did not run
    assert use.variation == pytest.approx((0.0, (sum((count - 4) ** 2 for count in (0, 16, 0, 0)) / 4) ** 0.5 / 4))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    inputs = TrainingInputs(tmp_path_factory.mktemp("records") / "home")
    resources = RESOURCES.model_copy(
        update={
            "tensorboard": True,
            "wandb": "offline",
            "profile": RESOURCES.profile.model_copy(update={"steps": 1, "flops": True, "trace": True}),
        }
    )
    recipe = small_recipe(validation=ValidationRecipe(interval_tokens=256, num_tokens=100, keep="last").model_dump())
    logged: dict[int, dict[str, float]] = {}
    artifact = inputs.train(
        inputs.arguments(recipe, resources) | {"validation": inputs.shards}, log_metrics=logged.__setitem__
    )
    return artifact, logged


def test_the_tracker_gets_losses_schedules_expert_use_and_speed(recorded):
    artifact, logged = recorded
    lines = [json.loads(line) for line in artifact.path("metrics.jsonl").read_text().splitlines()]
    assert {line.pop("step"): line for line in lines} == logged
    per_layer = {f"{name}_{layer}" for name in ("expert_load", "expert_cv", "dead_experts") for layer in range(3)}
    assert per_layer | {
        "grad_norm",
        "learning_rate",
        "router_bias_rate",
        "mtp_weight",
        "tokens_per_second",
        "mfu",
        "attended_tokens",
        "data_wait_seconds",
    } <= set(logged[1])
    measured = [step for step, line in logged.items() if "validation_bits_per_byte" in line]
    assert measured == [4, 6]
    assert artifact.record.validation_bits_per_byte == {"web": logged[6]["validation_bits_per_byte_web"]}


def test_event_files_hold_the_same_numbers(recorded):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    artifact, logged = recorded
    events = EventAccumulator(str(artifact.directory("tensorboard")))
    events.Reload()
    for name in ("loss", "grad_norm", "expert_load_0"):
        assert {event.step: pytest.approx(event.value, rel=1e-5) for event in events.Scalars(name)} == {
            step: line[name] for step, line in logged.items()
        }


def test_weights_and_biases_keeps_an_offline_run(recorded):
    artifact, _ = recorded
    (path,) = (path for path in artifact.manifest.evidence if path.startswith("wandb/") and path.endswith(".wandb"))
    assert artifact.manifest.evidence[path].size > 1000


def test_table_and_trace_of_the_profiled_step_are_evidence(recorded):
    artifact, _ = recorded
    figures = json.loads(artifact.path("profile/flops.json").read_text())
    assert figures["ratio"] == pytest.approx(1.0, abs=0.05)
    table = artifact.path("profile/flops.txt").read_text()
    assert "FlopCounterMode" in table and "DeepSpeed Flops Profiler" in table
    names = {
        event.get("name", "") for event in json.loads(artifact.path("profile/trace.json").read_text())["traceEvents"]
    }
    assert any("mm" in name for name in names)


def test_the_trace_has_shapes_memory_and_lines_of_python(recorded):
    """As the infrastructure guide (S2) profiles: record_shapes, profile_memory, with_stack."""
    artifact = recorded[0]
    events = json.loads(artifact.path("profile/trace.json").read_text())["traceEvents"]
    assert any(event.get("args", {}).get("Input Dims") for event in events if event.get("cat") == "cpu_op")
    assert any(event.get("name") == "[memory]" for event in events)
    assert any("training_step.py" in event.get("name", "") for event in events if event.get("cat") == "python_function")


def test_weights_and_biases_without_package_or_key_is_refused(monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    refuse_missing_tracker(RESOURCES.model_copy(update={"wandb": "offline"}))
    with pytest.raises(
        ValueError, match=r"WANDB_API_KEY is not in the environment: set it, or set resources.wandb to offline"
    ):
        refuse_missing_tracker(RESOURCES.model_copy(update={"wandb": "online"}))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else find_spec(name))
    with pytest.raises(ValueError, match=r"wandb is not installed: pip install 'glm46\[wandb\]', or set it to off"):
        refuse_missing_tracker(RESOURCES.model_copy(update={"wandb": "offline"}))
