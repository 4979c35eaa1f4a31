"""Rollbacks after spikes, the choice of the best weights, and a resting MTP layer, in whole phases of six steps: the
first two against a plain loop over the same steps.

The spikes are real: a token whose embedding is infinite is in the rows of two steps."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from configs.schema import ValidationRecipe
from model.formats.hf_checkpoint import ROUTER_BIAS
from tasks.data.shards.token_shard import append_tokens, token_dtype, write_index
from tasks.training.state.checkpoints import checkpoint_dir_of
from tasks.training.state.job import TrainingJob
from tasks.training.train_phase import describe_job
from tests.support.model_recipes import GLM46, with_every_expert
from tests.support.rank_processes import on_ranks
from tests.support.training_dynamics import (
    POISONED_STEP,
    SECOND_POISONED_STEP,
    continued,
    keeping_the_best,
    newest,
    poisoned_beside_plain,
    spikes_and_measurements,
    trained,
    variant,
    weights_of,
)
from tests.support.training_inputs import NUM_STEPS, RESOURCES, TrainingInputs, files_in, small_recipe

RESTING_MTP = {
    "no gradient": (0.0, "float32", 0),
    "a gradient of zeros": (0.0, "float32", 1),
    "a gradient of zeros in bfloat16": (0.0, "bfloat16", 1),
    "momentum of steps that trained it": (0.3, "float32", 0),
}
"""Weight of the MTP loss in the first half of the steps, 0 in the second; dtype and zero_stage."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return TrainingInputs(tmp_path_factory.mktemp("dynamics") / "home")


def job_of(inputs: TrainingInputs, work_dir: Path, resources=RESOURCES, **recipe):
    arguments = inputs.arguments(small_recipe(**recipe), resources)
    return describe_job(work_dir=work_dir, **arguments)


@pytest.fixture(scope="module")
def rolled_back(inputs, tmp_path_factory):
    directory = tmp_path_factory.mktemp("spikes")
    job = job_of(inputs, directory / "job")
    (result,) = on_ranks(spikes_and_measurements, 1, directory, job.model_dump(mode="json"), str(directory))
    return result


def test_the_rows_of_a_spike_are_left_out_and_nothing_else(rolled_back):
    assert rolled_back["left_out"] == [[POISONED_STEP] * 2, [SECOND_POISONED_STEP] * 2]
    assert rolled_back["equals_a_run_without_the_steps"] and rolled_back["two_left_out"]
    assert rolled_back["metric_steps"] == [1, 2, 4, 6] and rolled_back["num_skipped"] == 2


def test_neither_checkpoints_nor_interruptions_change_the_result(rolled_back):
    assert rolled_back["save_interval_does_not_matter"]
    assert 0 < rolled_back["killed_at_steps"] < 6 and rolled_back["interruptions_do_not_matter"]


TOPOLOGIES = [
    (1, {}, 2, 2, []),
    (2, {"tensor_parallel": 2, "zero_stage": 1, "micro_batch_sequences": 2}, 3, 4, [POISONED_STEP]),
    (
        2,
        {"expert_parallel": 2, "zero_stage": 3, "micro_batch_sequences": 2},
        9,
        6,
        [POISONED_STEP, SECOND_POISONED_STEP],
    ),
]
"""Ranks, how they divide the model, when they are interrupted; the step that they reach, and the spikes so far."""


@pytest.mark.long
def test_a_phase_resumed_on_other_ranks_and_rolled_back_ends_in_the_weights_of_a_plain_loop(inputs, tmp_path):
    job = job_of(inputs, tmp_path / "job", model=with_every_expert(GLM46).model_dump())
    (made,) = on_ranks(poisoned_beside_plain, 1, tmp_path, job.model_dump(mode="json"), str(tmp_path))
    for num_ranks, topology, num_looks, step, left_out in TOPOLOGIES:
        topology = topology | {"micro_batch_sequences": 4 // num_ranks}
        by_rank = on_ranks(continued, num_ranks, tmp_path, made["job"], topology, num_looks)
        assert all(rank == {"step": step, "left_out": left_out} for rank in by_rank), by_rank
    plain, start = load_file(tmp_path / "plain.safetensors"), load_file(tmp_path / "start" / "master-00001.safetensors")
    ended = weights_of(newest(TrainingJob.model_validate(made["job"])))
    for name, expected in plain.items():
        moved = (expected - start[name]).nan_to_num(posinf=0, neginf=0)
        error = (ended[name] - expected).nan_to_num(posinf=0, neginf=0)
        assert error.norm() <= 5e-5 * moved.norm(), (name, float(error.norm() / moved.norm()))


def test_the_evidence_names_losses_rows_and_documents(rolled_back):
    evidence = rolled_back["evidence"]
    assert (evidence["step"], evidence["first_row"], evidence["last_row"], evidence["loss"]) == (
        POISONED_STEP,
        8,
        11,
        "nan",
    )
    piece = evidence["pieces"][0]
    assert {**piece, "num_tokens": 0} == {
        "row": 8,
        "document": "",
        "file": "toy.bin",
        "byte_offset": 2 * 8 * 16,
        "num_tokens": 0,
    }
    assert sum(piece["num_tokens"] for piece in evidence["pieces"]) == 4 * 17


def test_training_stops_where_no_rollback_is_left(rolled_back):
    assert rolled_back["limited_lines"] == [True, False]
    assert rolled_back["stopped_first"] == rolled_back["stopped_again"]
    for part in (
        f"step {SECOND_POISONED_STEP}: loss nan",
        "rows 16 to 19",
        "after 1 rollbacks in 1000 steps (spikes.max_rollbacks 1)",
        "spikes.jsonl",
    ):
        assert part in rolled_back["stopped_first"]


def test_a_loss_just_above_the_bound_is_a_spike_and_one_just_below_is_none(rolled_back):
    assert rolled_back["above_is_a_spike"] and not rolled_back["below_is_a_spike"]


def held_out(directory: Path) -> dict[str, list[list[int]]]:
    """Shards of two domains that the toy's training makes worse, random and backwards; returns their tokens without
    end-of-text."""
    draw = np.random.default_rng(3)
    documents = {"web": draw.integers(250, 256, (6, 20)).tolist(), "code": [[104, 101, 108], list(range(119, 96, -1))]}
    directory.mkdir()
    for domain, texts in documents.items():
        dtype = token_dtype(GLM46.vocab_size)
        with open(directory / f"{domain}-00000.bin", "wb") as file:
            lengths = append_tokens(file, [[*text, 256] for text in texts], dtype)
        write_index(directory / f"{domain}-00000.idx", lengths, dtype)
    return documents


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_held_out_text_is_measured_and_the_best_weights_are_left(inputs, tmp_path, num_ranks):
    documents = held_out(tmp_path / "held_out")
    validation = ValidationRecipe(interval_tokens=128, num_tokens=50, keep="last")
    resources = RESOURCES.model_copy(update={"num_ranks": num_ranks, "micro_batch_sequences": 2})
    job = job_of(
        inputs, tmp_path / "job", resources, validation=validation, model=with_every_expert(GLM46).model_dump()
    ).model_copy(
        update={
            "validation": tuple(files_in(tmp_path / "held_out")),
            "validation_domains": {f"{domain}-00000": domain for domain in documents},
        }
    )
    results = on_ranks(keeping_the_best, num_ranks, tmp_path, job.model_dump(mode="json"), str(tmp_path))
    for result in results:
        assert result["measured_steps"] == [2, 4, 6]
        assert result["best_step"] < 6, "the best measurement is the last one: this shows nothing"
        assert result["measuring_changes_nothing"] and result["best_weights"] and result["a_lost_best_is_trained_again"]
        assert result["position"] == [6, job.recipe.num_tokens, result["best_step"], result["best_step"]]
        assert result["kept_dirs"] == sorted({f"step-{result['best_step']:09d}", "step-000000006"})
    line = results[0]["line"]
    assert line["validation_bits_per_byte"] == pytest.approx(
        (line["validation_bits_per_byte_web"] + line["validation_bits_per_byte_code"]) / 2
    )
    for domain, (nats, num_bytes, num_tokens) in naive_scores(job, documents, tmp_path).items():
        assert line[f"validation_bits_per_byte_{domain}"] == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-4), (
            domain
        )
        assert line[f"validation_loss_{domain}"] == pytest.approx(nats / num_tokens, rel=1e-4), domain


def naive_scores(job, documents, tmp_path) -> dict[str, tuple[float, int, int]]:
    """Per domain (nats, bytes, tokens) of its first 50 tokens, from the weights of the best measurement: every row's
    part of a document on its own, by plain logits."""
    from model.architecture.transformer import Glm4Moe
    from tests.support.saved_models import from_checkpoint_tensors

    tokenizer = Tokenizer.from_file(job.tokenizer_path)
    best_dir = Path(f"{job.work_dir}-best") / "checkpoints" / "step-000000006"
    model = Glm4Moe(job.recipe.model, rope_theta=job.recipe.rope_theta)
    model.load_state_dict(from_checkpoint_tensors(weights_of(best_dir)))
    scores = {}
    for domain, texts in documents.items():
        left, position, nats, kept = 50, 0, 0.0, []
        for text in texts:
            ids = [256, *text[:left]]
            left -= len(ids) - 1
            kept += ids[1:]
            while len(ids) > 1:  # rows of 16 positions are filled one document after the other
                room = 16 - position % 16
                part = torch.tensor([ids[: room + 1]])
                nats -= float(model(part[:, :-1]).logits_BTV.log_softmax(-1).gather(2, part[:, 1:, None]).sum())
                position += part.shape[1] - 1
                ids = ids[room:]
        scores[domain] = nats, sum(len(tokenizer.id_to_token(token)) for token in kept), len(kept)
    return scores


def test_held_out_text_of_another_tokenizer_is_refused(inputs, tmp_path):
    from tasks.training.loop.validation import HeldOut

    held_out(tmp_path / "held_out")
    job = job_of(inputs, tmp_path / "job").model_copy(
        update={"validation": tuple(files_in(tmp_path / "held_out")), "validation_domains": {"web-00000": "web"}}
    )
    with pytest.raises(ValueError, match=r"held-out shards of domain web hold token id 25[0-9], .* the model 200 rows"):
        HeldOut(
            job.model_copy(
                update={"recipe": job.recipe.model_copy(update={"model": GLM46.model_copy(update={"vocab_size": 200})})}
            )
        )


def rest_mtp(rank: int, num_ranks: int, jobs: dict[str, dict]) -> dict[str, bool]:
    """Per case and tensor whether the last steps changed it."""
    changed = {}
    for name, described in jobs.items():
        job = variant(TrainingJob.model_validate(described), name, {"zero_stage": RESTING_MTP[name][2]})
        trained(job)
        before, after = (weights_of(checkpoint_dir_of(Path(job.work_dir), step)) for step in (NUM_STEPS - 2, NUM_STEPS))
        changed |= {f"{name}: {key}": not tensor.equal(after[key]) for key, tensor in before.items()}
    return changed


def test_the_weights_of_an_mtp_layer_whose_loss_weighs_nothing_stay_as_they_are(inputs, tmp_path):
    recipe, jobs = small_recipe(), {}
    optimizer = recipe.optimizer.model_dump() | {"weight_decay": 0.1}
    for name, (weight, dtype, _) in RESTING_MTP.items():
        waypoints = [{"until_share": 0.5, "value": weight}, {"until_share": 1.0, "value": 0.0}]
        course = recipe.course.model_dump() | {"mtp_loss_weight": waypoints}
        job = job_of(inputs, tmp_path / "job", course=course, optimizer=optimizer, dtype=dtype)
        jobs[name] = job.model_dump(mode="json")
    (changed,) = on_ranks(rest_mtp, 1, tmp_path, jobs)
    mtp = f"model.layers.{recipe.model.num_hidden_layers}."
    assert not [name for name, is_changed in changed.items() if mtp in name and is_changed and ROUTER_BIAS not in name]
    assert all(changed[f"{name}: lm_head.weight"] for name in RESTING_MTP)
    assert sum(mtp in name for name in changed) > 10 * len(RESTING_MTP)
