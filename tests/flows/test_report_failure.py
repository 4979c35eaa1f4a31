"""The failure webhook: what a local server receives of failed, crashed and refused runs, and that no log holds its
address."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

import pytest
from prefect import State, flow
from prefect.client.schemas.objects import StateType
from prefect.testing.utilities import prefect_test_harness

from flows.cli.silent_runs import ENDED
from flows.full_pipeline import full_pipeline
from flows.nightly import nightly
from flows.show.outcome import RunOutcome
from flows.show.report_failure import tell_failure, tell_refusal
from infra.failure_webhook import WEBHOOK_URL, post_failure
from infra.servers import servers
from tests.support.received_posts import receiving_posts

TOKEN = "secret-token-4711"


@pytest.fixture
def webhook(monkeypatch):
    with receiving_posts() as (url, received):
        monkeypatch.setenv(WEBHOOK_URL, f"{url}/{TOKEN}")
        yield received


@pytest.fixture(scope="module")
def prefect_server():
    with prefect_test_harness(server_startup_timeout=120):
        yield


def test_failed_and_crashed_runs_and_refusals_are_posted_once(webhook, prefect_server):
    outcome = RunOutcome(
        promoted=False,
        model="glm46-tiny",
        alias="",
        version="7",
        seconds=1.5,
        digest="",
        report="",
        stages=[],
        reasons=["pass@1 is too low", "toxic"],
    )

    @flow(on_failure=[tell_failure], on_crashed=[tell_failure])
    def toy(scale: str, ends: str) -> RunOutcome | State[RunOutcome] | None:
        if ends == "failed":
            raise ValueError("disk: 0.1 GiB free")
        if ends == "crashed":
            raise KeyboardInterrupt
        return tell_refusal(outcome) if ends == "refused" else None

    with pytest.raises(ValueError):
        toy("mine/tiny.yaml", "failed")
    with pytest.raises(KeyboardInterrupt):
        toy("tiny", "crashed")
    assert toy("tiny", "refused") == outcome
    state = toy("tiny", "refused", return_state=True)
    assert (state.type, state.name, state.message) == (StateType.COMPLETED, "Refused", "pass@1 is too low; toxic")
    assert state.result() == outcome and f"prefect.flow-run.{state.name}" in ENDED
    toy("tiny", "well")
    assert [path for path, _ in webhook] == [f"/{TOKEN}"] * 4
    failed, crashed, refused, _ = (values for _, values in webhook)
    assert (failed["state"], failed["scale"]) == ("Failed", "tiny") and "disk: 0.1 GiB free" in failed["reason"]
    assert failed["text"].startswith(f"glm46 run {failed['flow_run']}: Failed. ") and len(failed["flow_run_id"]) == 36
    assert crashed["state"] == "Crashed"
    assert (refused["state"], refused["reason"]) == ("Refused", "pass@1 is too low; toxic")


def test_a_run_whose_server_died_is_posted_before_it_leaves(webhook, monkeypatch, capfd):
    def leave(status: int) -> None:
        raise SystemExit(status)

    monkeypatch.setattr(servers.os, "_exit", leave)
    monkeypatch.setattr(servers, "WATCH_INTERVAL_SECONDS", 0)
    dead = subprocess.Popen(["true"])
    dead.wait()
    with pytest.raises(SystemExit):
        server = servers.Server("mlflow", "", lambda: dead, dead, Path("mlflow.log"))
        servers._leave_when_one_dies([server], threading.Event())
    [(_, posted)] = webhook
    said = "the mlflow server stopped during the run (mlflow.log): run again to continue"
    assert (posted["state"], posted["text"]) == ("Crashed", f"glm46 run: Crashed. {said}")
    assert f"glm46: {said}" in capfd.readouterr().err


def test_the_pipeline_and_the_nightly_deployment_have_the_hook():
    for each in (full_pipeline, nightly):
        assert tell_failure in each.on_failure_hooks and tell_failure in each.on_crashed_hooks


@pytest.mark.parametrize(
    "url", [f"http://127.0.0.1:9/{TOKEN}", f"ftp://x/{TOKEN}", f"http://[{TOKEN}", f"http://127.0.0.1:9/a {TOKEN}"]
)
def test_an_unreachable_receiver_is_said_without_its_address_and_fails_nothing(url, monkeypatch):
    monkeypatch.setenv(WEBHOOK_URL, url)
    said = []
    post_failure({"text": "x"}, said.append)
    assert len(said) == 1 and TOKEN not in said[0] and said[0].startswith(WEBHOOK_URL)


def test_an_answer_with_an_error_is_said_and_without_an_address_nothing_happens(webhook, monkeypatch):
    import os

    said = []
    monkeypatch.setenv(WEBHOOK_URL, os.environ[WEBHOOK_URL].replace(f"/{TOKEN}", "/broken"))
    post_failure({"text": "x"}, said.append)
    assert said == [f"{WEBHOOK_URL} was not reached (HTTPError 500)"] and len(webhook) == 1
    monkeypatch.delenv(WEBHOOK_URL)
    post_failure({"text": "x"}, said.append)
    assert len(said) == len(webhook) == 1
