"""The exporter over files that a training and steps of the tests wrote, scraped by a live Prometheus where there is
one; damaged files; the dashboards."""

from __future__ import annotations

import json
import os
import shutil
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from configs.schema import ValidationRecipe
from infra.child_process import free_port
from infra.home import Home, open_home
from infra.jobs.launchers import SUBMISSION_FILE
from infra.monitoring.dashboards import expressions
from infra.monitoring.prometheus import WEBHOOK_VARIABLE
from infra.monitoring.services import find_program, read_services, stop_services
from infra.monitoring.stack import PROGRAMS, bring_up_monitoring
from infra.step import Artifact, Output
from infra.storage.open_store import open_store
from infra.storage.rerun_reason import explain_and_remember
from tasks.evaluation.decide_gate import GateDecision
from tasks.evaluation.evaluate_checkpoint import Evaluation
from tasks.monitoring.exporter import NCCL_TESTS_DIR, HomeCollector
from tasks.training.state.job import METRICS_FILE, ROLLOUTS_FILE
from tasks.training.state.trained_checkpoint import TrainedCheckpoint
from tasks.training.train_phase import train_phase
from tasks.training.watch.effective_time import TIME_FILE
from tests.support.evaluation_fakes import commit
from tests.support.received_posts import receiving_posts
from tests.support.reported_data import RECORDS, toy
from tests.support.training_inputs import TrainingInputs
from tests.training.test_objectives import ANSWERS, GRPO, rl_recipe, sft_recipe

NCCL_OUTPUT = """# nThread 1 nGpus 1 minBytes 8 maxBytes 8589934592 step: 2(factor) warmup iters: 5 iters: 20
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
           8             2     float     sum      -1    24.50    0.00    0.00      0    23.91    0.00    0.00      0
  8589934592    2147483648     float     sum      -1  41950.1  204.77  358.34      0  41963.6  204.70  358.22      0
# Avg bus bandwidth    : 128.2
"""
NUM_STEPS = 4
SCRAPE_SECONDS = 0.5
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="needs Prometheus (Debian: apt-get install prometheus)"
)


@dataclass
class Watched:
    """A home in which a policy phase was trained while somebody looked."""

    inputs: TrainingInputs
    posts: list[tuple[str, dict]]
    """What Alertmanager, where it is installed, sent to the webhook."""
    began: float = field(default_factory=time.time)
    prometheus: str = ""
    seen: list[dict[str, dict[tuple[str, ...], float]]] = field(default_factory=list)
    """Samples while it trained, by metric and labels."""

    @property
    def home(self) -> Home:
        return self.inputs.home

    def look(self) -> dict[str, dict[tuple[str, ...], float]]:
        return samples(HomeCollector(self.home, self.inputs.store))


def samples(collector: HomeCollector) -> dict[str, dict[tuple[str, ...], float]]:
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in collector.collect():
        for sample in family.samples:
            known = found.setdefault(sample.name, {})
            labels = tuple(sample.labels.values())
            assert labels not in known, f"Prometheus refuses two samples of {sample.name} {labels}"
            known[labels] = sample.value
    return found


def commit_stages(inputs: TrainingInputs) -> None:
    """Data stages, a gate that refuses and two evaluations of the scale toy, as flows leave them."""
    gate = GateDecision(accepted=False, bounds=(), candidate_digest="c" * 64)
    records = {
        "filter_documents": ("filter_documents", [RECORDS["filtered"]]),
        "collect_chats": ("collect_chats", [RECORDS["chats"]]),
        "gate sft": ("decide_gate", [gate]),
        "write_report": ("write_report", [gate]),
        "evaluate sft": ("evaluate_checkpoint", [evaluation(2.0), evaluation(2.5)]),
    }
    for stage, (step, versions) in records.items():
        for number, record in enumerate(versions):
            leaves = toy(step, record, write_slowly)
            artifact = commit(inputs.store, leaves, f"{stage} {number}")
            explain_and_remember(inputs.home, "toy", stage, artifact.manifest.identity)


def write_slowly(output: Output) -> None:
    """For milliseconds, the unit in which seconds of stages are kept."""
    time.sleep(0.01)
    output.path("written").write_text("text")


def evaluation(bits_per_byte: float) -> Evaluation:
    numbers = dict.fromkeys(Evaluation.model_fields, 0.0)
    given = {"suite_digest": "s", "checkpoint_digest": "c", "num_items": 40, "num_non_finite": 0, "pass_k": 4}
    given |= {"bits_per_byte": bits_per_byte, "bits_per_byte_by_domain": {}}
    intervals = {"bits_per_byte": (bits_per_byte - 0.1, bits_per_byte + 0.1)}
    optional = {"expert_load": (), "expert_cv": (), "num_dead_experts": ()}
    return Evaluation.model_validate({**numbers, **given, **optional, "intervals": intervals, "seed_noise": {}})


def train(watched: Watched) -> None:
    """A phase on conversations, and a policy phase after it, looked at whenever they report."""
    inputs = watched.inputs
    validation = ValidationRecipe(interval_tokens=512, num_tokens=100, keep="last").model_dump()
    tuned = train_watched(watched, inputs.chat_arguments(sft_recipe(validation=validation)))
    objective = GRPO | {"max_constant_steps": 2 * NUM_STEPS}
    train_watched(watched, inputs.prompt_arguments(rl_recipe(NUM_STEPS, objective=objective), ANSWERS, start=tuned))


def train_watched(watched: Watched, arguments: dict) -> Artifact[TrainedCheckpoint]:
    """It saves after each second step."""
    inputs, recipe = watched.inputs, arguments["recipe"]
    if recipe.validation.interval_tokens:
        arguments = arguments | {"validation": inputs.shards}
    digested = {name: value for name, value in arguments.items() if name not in ("recipe", "resources")}
    explain_and_remember(inputs.home, "toy", f"train {recipe.phase}", train_phase.identity(recipe, digested))
    return inputs.train(arguments, report=lambda progress: watched.seen.append(watched.look()))


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """One training of four steps; its worker is the cost of these tests."""
    with pytest.MonkeyPatch.context() as environment, receiving_posts() as (webhook, posts):
        root = tmp_path_factory.mktemp("monitoring") / "home"
        environment.setenv("GLM46_HOME", str(root))
        environment.setenv(WEBHOOK_VARIABLE, webhook)
        watched = Watched(TrainingInputs(root), posts)
        home = open_home()
        commit_stages(watched.inputs)
        if shutil.which("prometheus"):
            ports = free_port(), free_port()
            said = bring_up_monitoring(home, *ports, scrape_seconds=SCRAPE_SECONDS)
            assert any(f"http://127.0.0.1:{ports[0]}" in sentence for sentence in said), said
            watched.prometheus = f"http://127.0.0.1:{ports[0]}"
        try:
            train(watched)
            yield watched
        finally:
            stop_services(home)
            assert not read_services(home)


def test_what_was_seen_while_it_trained_is_what_the_committed_phase_shows(watched):
    running = [seen for seen in watched.seen if 1.0 in seen.get("training_running", {}).values()]
    shown = watched.look()
    (key,) = [labels for labels in shown["training_loss"] if labels[1] == "rl_reasoning"]
    steps = [seen["training_steps_total"][key] for seen in running if key in seen.get("training_steps_total", {})]
    assert steps and steps == sorted(steps) and max(steps) <= NUM_STEPS
    ((labels, state),) = running[-1]["job_state"].items()
    assert labels == ("toy", "train-rl_reasoning", key[2], "running") and state == 1
    saved = [seen["training_checkpoint_step"][key] for seen in running if key in seen["training_checkpoint_step"]]
    assert saved and saved == sorted(saved) and set(saved) <= {0, 2, 4}

    assert set(shown["training_running"].values()) == {0.0} and "job_state" not in shown
    assert shown["training_steps_total"][key] == NUM_STEPS
    lines = [json.loads(line) for line in artifact_lines(watched)]
    assert shown["training_loss"][key] == lines[-1]["loss"]
    duration = lines[-1]["batch_tokens"] / lines[-1]["tokens_per_second"]
    assert shown["training_step_duration_seconds"][key] == pytest.approx(duration)
    assert running[-1]["training_samples_answers"] == {key: 1.0}
    (tuned,) = [seen for seen in shown["training_data_wait_seconds_total"] if seen[1] == "sft"]
    waits = shown["training_data_wait_seconds_total"]
    assert waits[key] == 0 < waits[tuned], "a policy samples its data, which is work"
    sampled = lines[-1]["answer_tokens"] * 16 / lines[-1]["rollout_seconds"]
    assert shown["training_rollout_tokens_per_second"][key] == pytest.approx(sampled)
    assert shown["training_entropy_estimate"][key] == lines[-1]["entropy_estimate"] > 0
    parts = {labels[3]: value for labels, value in shown["training_step_seconds"].items() if labels[:3] == key}
    assert parts == {part: lines[-1][f"{part}_seconds"] for part in ("weight_sync", "rollout", "reward", "training")}
    balance = {labels[3]: value for labels, value in shown["expert_balance_cv"].items() if labels[:3] == key}
    assert balance == {name[10:]: value for name, value in lines[-1].items() if name.startswith("expert_cv_")}


def artifact_lines(watched: Watched) -> list[str]:
    (path,) = watched.home.store_dir.glob(f"objects/*/*/{ROLLOUTS_FILE}")
    return path.with_name(METRICS_FILE).read_text().splitlines()


def test_stages_show_their_rows_verdicts_and_the_evaluation_before(watched):
    shown = watched.look()
    rows = {labels[1]: value for labels, value in shown["stage_rows"].items()}
    filtered = RECORDS["filtered"].model_dump()
    assert rows["filter_documents"] == filtered["num_documents"] + sum(filtered["dropped"].values())
    assert rows["collect_chats"] == RECORDS["chats"].num_chats + sum(
        sum(reasons.values()) for reasons in (RECORDS["chats"].dropped, RECORDS["chats"].rejected)
    )
    assert {labels[1]: value for labels, value in shown["gate_accepted"].items()} == {"gate-sft": 0.0}
    of_phase = ("toy", "sft", "bits_per_byte")
    assert shown["evaluation_low"][of_phase] == 2.4 and shown["evaluation_previous_high"][of_phase] == 2.1


def test_nccl_figures_are_those_of_a_saved_test_and_absent_without(watched):
    assert not [name for name in watched.look() if name.startswith("nccl_")]
    directory = watched.home.run_dir / NCCL_TESTS_DIR
    directory.mkdir()
    (directory / "rack-1.txt").write_text(NCCL_OUTPUT)
    (directory / "rack-2.txt").write_text("mpirun was unable to find the executable")
    for name, rank in (
        ("tag-output", "[1,0]<stdout>:"),
        ("openmpi-5", "[prterun-n1-7@1,0]<stdout>: "),
        ("label", " 0: "),
    ):
        (directory / f"{name}.txt").write_text("".join(rank + line for line in NCCL_OUTPUT.splitlines(keepends=True)))
    shown = watched.look()
    labels = [(name, "8589934592") for name in ("rack-1", "tag-output", "openmpi-5", "label")]
    assert shown["nccl_allreduce_time_ms"] == dict.fromkeys(labels, 41.9501)
    assert shown["nccl_bandwidth_gbps"] == dict.fromkeys(labels, 204.77)
    assert shown["nccl_busbw_gbps"] == dict.fromkeys(labels, 358.34)
    assert [file for (file,) in shown["exporter_unreadable_file"]] == [str(directory / "rack-2.txt")]
    shutil.rmtree(directory)


def write_job(work_dir: Path, others: dict[str, str]) -> None:
    """A phase that logged one step and whose supervisor was killed; `others` replace files, or are more lines."""
    recipe = {"phase": "sft", "sequence_length": 16, "course_start_tokens": 0, "num_tokens": 128}
    command = {"module": "m", "arguments": [], "num_ranks": 1, "num_nodes": 1, "environment": {}, "name": "train sft"}
    files = {
        "job.json": json.dumps({"pid": 1, "started_at": 0.0, "fencing": 1, "master_port": 1}),
        "command.json": json.dumps(command),
        "training.json": json.dumps({"recipe": recipe, "resources": {"save_interval_steps": 2}}),
    }
    work_dir.mkdir(parents=True)
    for name, text in {**files, **others}.items():
        (work_dir / name).write_text(text)
    first_line = json.dumps({"step": 1, "tokens": 64, "loss": 2.0}) + "\n"
    (work_dir / METRICS_FILE).write_text(first_line + others.get(METRICS_FILE, ""))


def test_a_resumed_phase_forgets_no_wait_and_shows_when_it_began_again(tmp_path):
    """Its lines are cut back to the checkpoint; a counter that fell with them would be taken for a jump from 0."""
    home = Home(tmp_path / "home")
    work_dir, key = home.work_dir("0" * 64), ("", "sft", "0" * 12)
    first = {"first_step": 0, "opened_at": 10.0, "last_step": 2, "seen_at": 90.0, "wait_seconds": 5.0}
    line = json.dumps({"step": 2, "tokens": 128, "data_wait_seconds": 5.0}) + "\n"
    write_job(work_dir, {METRICS_FILE: line, TIME_FILE: json.dumps({"submitted_at": 0.0, "stretches": [first]})})
    for name, seconds in ((METRICS_FILE, 90), (TIME_FILE, 95)):
        os.utime(work_dir / name, (seconds, seconds))
    collector = HomeCollector(home, open_store(None, home))
    shown = samples(collector)
    assert shown["training_progress_timestamp_seconds"] == {key: 95.0}
    assert shown["training_samples_answers"] == {key: 0.0}
    second = {"first_step": 1, "opened_at": 110.0, "last_step": 1, "seen_at": 120.0, "wait_seconds": 1.0}
    (work_dir / METRICS_FILE).write_text(json.dumps({"step": 1, "tokens": 64, "data_wait_seconds": 2.0}) + "\n")
    (work_dir / TIME_FILE).write_text(json.dumps({"submitted_at": 0.0, "stretches": [first, second]}))
    for name, seconds in ((METRICS_FILE, 110), (TIME_FILE, 105)):
        os.utime(work_dir / name, (seconds, seconds))
    again = samples(collector)
    assert again["training_progress_timestamp_seconds"] == {key: 110.0}
    waits = [seen["training_data_wait_seconds_total"][key] for seen in (shown, again)]
    assert waits == [5.0, 6.0]


def test_where_a_scheduler_does_not_answer_the_files_say_what_runs(tmp_path, monkeypatch):
    """No scrape waits for it, and the phase stays watched."""
    monkeypatch.setenv("PATH", str(tmp_path))
    home = Home(tmp_path / "home")
    work_dir = home.work_dir("0" * 64)
    write_job(work_dir, {SUBMISSION_FILE: json.dumps({"scheduler": "slurm", "job": "7"})})
    collector = HomeCollector(home, open_store(None, home))
    deadline = time.monotonic() + 20
    while "exporter_unreadable_file" not in (shown := samples(collector)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert shown["job_state"] == {("", "train-sft", "0" * 12, "running"): 1.0}
    assert list(shown["training_running"].values()) == [1.0] and list(shown["training_loss"].values()) == [2.0]
    assert list(shown["exporter_unreadable_file"]) == [(str(work_dir / SUBMISSION_FILE),)]


@pytest.mark.parametrize(
    ("damage", "reported"),
    [
        ({"job.json": '{"pid": 1, "start'}, "0" * 64),
        ({"training.json": "{}"}, "0" * 64),
        ({"spikes.jsonl": "no\n"}, "spikes.jsonl"),
        ({"metrics.jsonl": '{"step": 2, "tokens"\n'}, "metrics.jsonl"),
        ({"metrics.jsonl": '{"step": 2, "tok'}, None),
    ],
)
def test_a_damaged_file_is_reported_and_hides_nothing_else(watched, damage, reported):
    """The last one is half a line, which the ranks still write."""
    work_dir = watched.home.work_dir("0" * 64)
    write_job(work_dir, damage)
    try:
        shown = watched.look()
    finally:
        shutil.rmtree(work_dir)
    assert ("toy", "rl_reasoning") in {labels[:2] for labels in shown["training_loss"]}
    files_reported = [Path(file).name for (file,) in shown.get("exporter_unreadable_file", {})]
    assert files_reported == ([] if reported is None else [reported])
    if reported != "0" * 64:
        assert shown["training_loss"]["", "sft", "0" * 12] == 2.0
        assert shown["job_state"]["", "train-sft", "0" * 12, "lost"] == 1


def test_a_home_without_runs_gives_no_samples(tmp_path):
    home = Home(tmp_path)
    assert samples(HomeCollector(home, open_store(None, home))) == {}


@needs_prometheus
@pytest.mark.parametrize("name", ["training", "rl", "data"])
def test_every_expression_of_the_dashboards_returns_data(watched, name):
    """Over the time of the training, as a dashboard asks."""
    for expression in expressions(name):
        query = expression.replace("$scale", ".*")
        deadline = time.monotonic() + 20
        while not (result := ask(watched, query)) and time.monotonic() < deadline:
            time.sleep(SCRAPE_SECONDS)
        assert result, expression


def ask(watched: Watched, expression: str) -> list[dict]:
    asked = {"query": expression, "start": watched.began, "end": time.time(), "step": SCRAPE_SECONDS}
    url = f"{watched.prometheus}/api/v1/query_range?{urllib.parse.urlencode(asked)}"
    with urllib.request.urlopen(url) as answer:
        return json.load(answer)["data"]["result"]


@needs_prometheus
def test_the_gate_that_refused_fires_its_alert(watched):
    deadline = time.monotonic() + 20
    while not (fired := ask(watched, 'ALERTS{alertname="GateRefused", alertstate="firing"}')):
        assert time.monotonic() < deadline
        time.sleep(SCRAPE_SECONDS)
    assert fired[0]["metric"]["stage"] == "gate-sft"


@needs_prometheus
@pytest.mark.skipif(
    find_program(*PROGRAMS["alertmanager"]) is None, reason="needs apt-get install prometheus-alertmanager"
)
def test_the_alert_reaches_the_webhook(watched):
    """The first message waits 10 s for others of its group."""
    deadline = time.monotonic() + 60
    while not (sent := [alert for _, post in watched.posts for alert in post["alerts"] if is_gate(alert)]):
        assert time.monotonic() < deadline, watched.posts
        time.sleep(SCRAPE_SECONDS)
    assert sent[0]["status"] == "firing" and sent[0]["labels"]["stage"] == "gate-sft"
    assert sent[0]["annotations"].keys() >= {"summary"}


def is_gate(alert: dict) -> bool:
    return alert["labels"]["alertname"] == "GateRefused"
