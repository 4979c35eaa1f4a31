"""A phase trained through launcher, supervisor and worker: resumed equals uninterrupted, two phases equal one, two
ranks equal one."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from prefect import flow
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from configs.load import load_scale
from flows.running.run import Run
from flows.running.run_step import run_step
from flows.running.stage_log import StageLog
from infra.jobs.follow_job import JobStoppedError
from infra.jobs.launchers import JobFailedError, JobLostError, JobStatus
from infra.jobs.supervisor import JobFile, read_job_file
from infra.step import Artifact, Output, Step, step
from model.formats.hf_checkpoint import VOCABULARY_KEY, load_model
from model.text.tokenizer_layout import vocabulary_sha256
from tasks.training.input_rules import refuse_foreign_inputs
from tasks.training.loop.phase_data import open_phase_data
from tasks.training.schedule.schedules import plan_step
from tasks.training.state.position import Position
from tasks.training.state.trained_checkpoint import TrainedCheckpoint
from tasks.training.train_phase import describe_job, train_phase
from tests.support.model_recipes import GLM46, with_every_expert
from tests.support.saved_states import flip_a_bit
from tests.support.training_inputs import (
    NUM_STEPS,
    RESOURCES,
    Nothing,
    TrainingInputs,
    compute,
    metrics_of,
    small_recipe,
)

SAVE_EVERY_STEP = RESOURCES.model_copy(update={"save_interval_steps": 1, "num_kept_checkpoints": 9})
ACROSS_TOPOLOGIES = {"rtol": 2e-3, "atol": 2e-4}
"""Steps later; the order of sums differs, and Newton-Schulz amplifies what is near zero."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return TrainingInputs(tmp_path_factory.mktemp("training") / "home")


@pytest.fixture(scope="module")
def uninterrupted(inputs):
    """The whole course as one phase, and what was reported of it."""
    logged, reported = {}, []
    artifact = inputs.train(inputs.arguments(small_recipe()), log_metrics=logged.__setitem__, report=reported.append)
    return artifact, logged, reported


def test_a_phase_leaves_a_loadable_checkpoint_a_hand_over_and_its_metrics(inputs, uninterrupted):
    artifact, logged, reported = uninterrupted
    record = artifact.record
    assert (record.phase, record.num_steps, record.num_tokens) == (
        "pretrain_general",
        NUM_STEPS,
        small_recipe().num_tokens,
    )
    model = load_model(artifact.directory("hf"))
    state = model.state_dict()
    assert record.num_parameters == sum(tensor.numel() for tensor in state.values())
    assert (artifact.directory("hf") / "tokenizer.json").read_bytes() == inputs.tokenizer.path(
        "tokenizer.json"
    ).read_bytes()
    config = json.loads(artifact.path("hf/config.json").read_text())
    assert config["eos_token_id"] == [
        record.special_token_ids[name] for name in ("<|endoftext|>", "<|user|>", "<|observation|>")
    ]
    assert config[VOCABULARY_KEY] == vocabulary_sha256(Tokenizer.from_file(str(artifact.path("hf/tokenizer.json"))))
    assert sorted(logged) == list(range(1, NUM_STEPS + 1))
    lines = metrics_of(artifact.path("metrics.jsonl"))
    assert lines[-1]["lm"] == record.lm_loss < lines[0]["lm"]
    assert lines[-1]["learning_rate"] == pytest.approx(small_recipe().course.final_learning_rate)
    assert reported[-1].done == reported[-1].total == record.num_tokens and "loss" in reported[-1].message
    router_biases = [tensor for name, tensor in state.items() if name.endswith("e_score_correction_bias")]
    assert all(tensor.abs().max() > 0 for tensor in router_biases)


@contextmanager
def signal_after_saves(work_dir: Path, number: int, *victims: Callable[[JobFile], int]) -> Iterator[list[str]]:
    """Signal a process of the job each time it has saved something new; yields the names of the checkpoints it was done
    at."""
    latest, done, closing = work_dir / "checkpoints" / "latest", [], threading.Event()
    before = latest.read_text() if latest.exists() else ""

    def watch():
        while len(done) < len(victims) and not closing.is_set():
            if latest.exists() and latest.read_text() > (done[-1] if done else before):
                os.kill(victims[len(done)](read_job_file(work_dir)), number)
                done.append(latest.read_text())
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    yield done
    closing.set()
    thread.join()


def train_until_killed(inputs: TrainingInputs, arguments: dict) -> None:
    """Start a phase and kill its rank after the first save; the next call continues it."""
    killed = signal_after_saves(inputs.work_dir(arguments), signal.SIGKILL, lambda job: job.pid)
    with killed as kills, pytest.raises(JobLostError):
        inputs.train(arguments)
    assert kills


def train_through_a_kill(inputs: TrainingInputs, arguments: dict) -> Artifact[TrainedCheckpoint]:
    """The phase after its rank was killed after the first save."""
    train_until_killed(inputs, arguments)
    return inputs.train(arguments)


@pytest.fixture(scope="module")
def prefect_server():
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=180):
        yield


def in_a_flow(run: Run, step: Step, **arguments) -> Artifact:
    """A step as the pipeline runs it."""
    return flow(name="toy", validate_parameters=False)(lambda: run_step(run, step, **arguments))()


@pytest.mark.long
def test_a_job_that_is_lost_twice_is_submitted_again_by_the_flow_and_equals_the_uninterrupted_run(
    uninterrupted, prefect_server, tmp_path
):
    artifact, logged, _ = uninterrupted
    inputs = TrainingInputs(tmp_path / "home")
    arguments = inputs.arguments(small_recipe(), SAVE_EVERY_STEP)
    seen, lines = [], []
    run = Run(load_scale("micro"), inputs.home, inputs.store, "", "", StageLog(lines.append))
    with signal_after_saves(
        inputs.work_dir(arguments), signal.SIGKILL, lambda job: job.rank_pids[0], lambda job: job.pid
    ) as kills:
        resumed = in_a_flow(
            run, train_phase, log_metrics=lambda rows: seen.extend(step for step, _ in rows), **arguments
        )
    assert len(kills) == 2 and kills[1] < "step-000000006", "the kills came too late to prove anything"
    lost = [line for line in lines if "was lost" in line]
    for line, who, name in zip(
        lost, (r"rank 0 was killed \(SIGKILL\)", "its supervisor was killed"), kills, strict=True
    ):
        assert re.search(
            rf"{who}.*; it continues from the checkpoint of step {int(name.split('-')[1])} \(retry \d\)", line
        ), line
    assert "== start 3" in resumed.path("logs/rank-0.log").read_text()
    assert (resumed.key, resumed.digest) == (artifact.key, artifact.digest)
    assert metrics_of(resumed.path("metrics.jsonl")) == metrics_of(artifact.path("metrics.jsonl"))
    assert seen == sorted(logged)  # every step once, although some were taken twice


@pytest.mark.parametrize(("error", "num_calls"), [("lost", 4), ("lost after saves", 9), ("failed", 1)])
def test_only_lost_jobs_are_submitted_again_and_not_for_ever(error, num_calls, prefect_server, inputs):
    calls, lines = [], []

    @step(content=("none",))
    def lose_job(*, output: Output) -> Nothing:
        calls.append(error)
        rank = JobStatus("lost", None, -9, 0, "rank-0.log", ())
        saved = len(calls) if error == "lost after saves" and len(calls) < 6 else 6
        raise JobFailedError("toy", rank) if error == "failed" else JobLostError("toy", rank, saved)

    run = Run(load_scale("micro"), inputs.home, inputs.store, "", "", StageLog(lines.append))
    with pytest.raises(JobFailedError if error == "failed" else JobLostError):
        in_a_flow(run, lose_job)
    assert len(calls) == num_calls
    gave_up = [line for line in lines if "lost 4 times without a new checkpoint: mend the cause" in line]
    assert len(gave_up) == (error != "failed")


@pytest.mark.long
def test_a_stopped_training_says_so_and_continues_also_before_a_corrupt_checkpoint(inputs, uninterrupted, tmp_path):
    artifact, _, _ = uninterrupted
    inputs = TrainingInputs(tmp_path / "home")
    arguments = inputs.arguments(small_recipe(), SAVE_EVERY_STEP)
    work_dir = inputs.work_dir(arguments)
    with (
        signal_after_saves(work_dir, signal.SIGTERM, lambda job: job.pid),
        pytest.raises(JobStoppedError, match="was asked to stop and has saved"),
    ):
        inputs.train(arguments)
    newest = work_dir / "checkpoints" / (work_dir / "checkpoints" / "latest").read_text()
    flip_a_bit(newest / "rank-00000.bin")
    finished = inputs.train(arguments)
    assert finished.digest == artifact.digest
    assert (
        f"{newest} is corrupt (rank-00000.bin: the block at byte 0 has another digest): falling back to before it"
        in finished.path("logs/rank-0.log").read_text()
    )


def test_two_phases_of_a_course_equal_one_long_phase(inputs, uninterrupted):
    artifact, _, _ = uninterrupted
    first = inputs.train(inputs.arguments(small_recipe(num_steps=3)))
    second = inputs.train(
        inputs.arguments(small_recipe(num_steps=3, first_step=3, phase="pretrain_code_reasoning"), start=first)
    )
    for name in artifact.manifest.content:
        if name.endswith(".safetensors"):
            assert second.manifest.content[name] == artifact.manifest.content[name], name
    assert second.record.course_tokens == artifact.record.course_tokens
    with pytest.raises(ValueError, match="phase pretrain_general ended at 192: start from the phase before it"):
        inputs.train(inputs.arguments(small_recipe(num_steps=2, first_step=4), start=first))


def test_weights_that_are_no_numbers_stop_the_training_after_its_rollbacks_and_name_the_rows(inputs):
    first = inputs.train(inputs.arguments(small_recipe(num_steps=3)))
    spikes = small_recipe().spikes.model_copy(update={"max_rollbacks": 1}).model_dump()
    recipe = small_recipe(num_steps=3, first_step=3, spikes=spikes)
    arguments = inputs.arguments(recipe, start=compute(inputs.store, break_weights, checkpoint=first))
    with pytest.raises(
        JobFailedError,
        match=r"step 2: loss nan and gradient norm nan are not both finite; rows 4 to 7 of the phase, course position "
        r"256 tokens. The "
        r"optimizer step was not taken, and after 1 rollbacks in 1000 steps \(spikes.max_rollbacks 1\) training stops",
    ) as failure:
        inputs.train(arguments)
    assert failure.value.args[0].count("\n") <= 31
    assert not list((inputs.work_dir(arguments) / "checkpoints").glob("step-*"))


@step(content=("hf/*", "handover/*"))
def break_weights(*, checkpoint: Artifact[TrainedCheckpoint], output: Output) -> TrainedCheckpoint:
    """A start whose embedding holds one NaN."""
    for name in checkpoint.manifest.content:
        shutil.copyfile(checkpoint.path(name), output.path(name))
    master = load_file(checkpoint.path("handover/master-00001.safetensors"))
    master["model.embed_tokens.weight"][:, 0] = torch.nan
    save_file(master, output.path("handover/master-00001.safetensors"))
    return checkpoint.record


def listeners(work_dir: Path, is_over: threading.Event, seen: set[str]) -> None:
    """Collect the addresses on which ranks of a job listen, until it is over."""
    while not is_over.wait(0.1):
        job = read_job_file(work_dir)
        for pid in job.rank_pids if job else ():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                connections = psutil.Process(pid).net_connections("inet")
                seen |= {connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN}


def test_two_ranks_and_smaller_micro_batches_equal_one_rank(inputs):
    """And they listen to each other on loopback, to nobody on other interfaces."""
    recipe = small_recipe(num_steps=3, model=with_every_expert(GLM46).model_dump())
    artifact = inputs.train(inputs.arguments(recipe))
    arguments = inputs.arguments(recipe, RESOURCES.model_copy(update={"num_ranks": 2, "micro_batch_sequences": 1}))
    assert (
        inputs.work_dir(arguments).name == artifact.key
    )  # resources do not enter the key: a home of its own shows the numbers
    other = TrainingInputs(inputs.home.root.parent / "two-ranks")
    given = other.arguments(arguments["recipe"], arguments["resources"])
    is_over, addresses = threading.Event(), set()
    watch = threading.Thread(target=listeners, args=(other.work_dir(given), is_over, addresses))
    watch.start()
    try:
        shared = other.train(given)
    finally:
        is_over.set()
        watch.join()
    assert addresses == {"127.0.0.1"}
    for ours, theirs in zip(
        metrics_of(shared.path("metrics.jsonl")), metrics_of(artifact.path("metrics.jsonl")), strict=True
    ):
        assert ours == pytest.approx(theirs, rel=1e-3)
    for name in ("handover/master-00001.safetensors", "handover/momentum-00001.safetensors"):
        expected = load_file(artifact.path(name))
        for tensor_name, tensor in load_file(shared.path(name)).items():
            torch.testing.assert_close(
                tensor, expected[tensor_name], **ACROSS_TOPOLOGIES, msg=lambda text, at=tensor_name: f"{at}: {text}"
            )


def test_what_cannot_be_trained_is_refused_before_anything_starts(inputs):
    for recipe, resources, message in (
        (
            small_recipe(seed=1, objective={"kind": "dpo", "beta": 0.1, "reference": None}),
            RESOURCES,
            "objective dpo with an mtp_loss_weight above 0",
        ),
        (
            small_recipe(seed=1),
            RESOURCES.model_copy(update={"zero_stage": 2, "pipeline_parallel": 2, "num_ranks": 2}),
            "zero_stage 2 with pipeline_parallel 2",
        ),
        (
            small_recipe(seed=1),
            RESOURCES.model_copy(update={"num_ranks": 5}),
            r"5 data-parallel copies \(5 ranks\) cannot share the step at 0 tokens, it has 4 sequences",
        ),
        (
            small_recipe(model=GLM46.model_copy(update={"vocab_size": 290})),
            RESOURCES,
            "the tokenizer has 292 ids, the model 290 rows",
        ),
        (
            small_recipe(model=GLM46.model_copy(update={"max_position_embeddings": 8})),
            RESOURCES,
            r"sequence_length \(16\) exceeds the model's max_position_embeddings \(8\)",
        ),
    ):
        started = time.monotonic()
        with pytest.raises(ValueError, match=message):
            inputs.train(inputs.arguments(recipe, resources))
        assert time.monotonic() - started < 2


def test_inputs_of_another_architecture_or_tokenizer_are_refused(inputs, uninterrupted):
    artifact, _, _ = uninterrupted
    deeper = small_recipe(seed=1, model=GLM46.model_copy(update={"num_experts_per_tok": 4}), course_start_tokens=384)
    with pytest.raises(
        ValueError,
        match=r"config.json of phase pretrain_general says num_experts_per_tok 2 \(the configuration has 4\)",
    ):
        refuse_foreign_inputs(deeper, inputs.tokenizer, artifact, {})
    theta = small_recipe().rope_theta
    refuse_foreign_inputs(small_recipe(course_start_tokens=384, rope_theta=2 * theta), inputs.tokenizer, artifact, {})
    with pytest.raises(
        ValueError, match=r"rope_theta .* is below the .* that its start, phase pretrain_general, was trained with"
    ):
        refuse_foreign_inputs(
            small_recipe(course_start_tokens=384, rope_theta=theta / 2), inputs.tokenizer, artifact, {}
        )
    other = replace(inputs.tokenizer, manifest=inputs.tokenizer.manifest.model_copy(update={"digest": "f" * 64}))
    chats = inputs.chat_arguments(small_recipe(objective={"kind": "sft"}))["chats"]
    refuse_foreign_inputs(small_recipe(), inputs.tokenizer, None, {"conversations": chats})
    with pytest.raises(ValueError, match=r"conversations were made with tokenizer .*, the phase is given ffffffffffff"):
        refuse_foreign_inputs(small_recipe(), other, None, {"conversations": chats})
    with pytest.raises(
        ValueError, match=r"phase pretrain_general was trained with tokenizer .*, this one is given ffffffffffff"
    ):
        refuse_foreign_inputs(small_recipe(course_start_tokens=384), other, artifact, {})


def test_packed_rows_that_are_longer_or_hold_foreign_tokens_are_refused(inputs):
    arguments = inputs.arguments(small_recipe())
    job = describe_job(work_dir=inputs.home.root / "none", **arguments)
    with pytest.raises(ValueError, match=r"trains on 8 tokens per row, .* holds rows of 16"):
        open_phase_data(
            job.model_copy(update={"recipe": job.recipe.model_copy(update={"sequence_length": 8})}), NotTrained()
        )
    narrow = job.recipe.model_copy(update={"model": GLM46.model_copy(update={"vocab_size": 40})})
    data = open_phase_data(job.model_copy(update={"recipe": narrow}), NotTrained())
    with pytest.raises(ValueError, match=r"the shards hold token id \d+, the model has 40 rows"):
        data.read(plan_step(narrow, 5 * 64), Position.model_construct(step=5))
    data.close()


class NotTrained:
    """Where the rows go: one rank, on the CPU."""

    device = torch.device("cpu")
    ranks = SimpleNamespace(data=SimpleNamespace(rank=0, size=1), context=SimpleNamespace(rank=0, size=1))


def test_the_code_digest_covers_the_worker():
    from infra.code_digest import closure

    names = closure((train_phase.function.__module__, *train_phase.roots))
    assert {
        "tasks.training.worker",
        "tasks.training.loop.training_step",
        "tasks.training.schedule.schedules",
        "model.architecture.moe",
        "tasks.data.packing.packed_rows",
    } <= set(names)
