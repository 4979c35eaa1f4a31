"""The failure webhook: what a local server receives of failed, crashed and refused runs, and that no log holds its
address."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from prefect import flow
from prefect.testing.utilities import prefect_test_harness

from flows.full_pipeline import full_pipeline
from flows.nightly import nightly
from flows.show.report_failure import tell_failure, tell_refusal
from infra.monitoring.failure_webhook import WEBHOOK_URL, post_failure

TOKEN = "secret-token-4711"


@pytest.fixture
def webhook(monkeypatch):
    """Requests as (path, values); the answer is 200, or 500 below /broken."""
    received = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self):
            received.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(500 if self.path.startswith("/broken") else 200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv(WEBHOOK_URL, f"http://127.0.0.1:{server.server_port}/{TOKEN}")
    yield received
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def prefect_server():
    with prefect_test_harness(server_startup_timeout=120):
        yield


def test_failed_and_crashed_runs_and_refusals_are_posted_once(webhook, prefect_server):
    @flow(on_failure=[tell_failure], on_crashed=[tell_failure])
    def toy(scale: str, ends: str) -> None:
        if ends == "failed":
            raise ValueError("disk: 0.1 GiB free")
        if ends == "crashed":
            raise KeyboardInterrupt
        tell_refusal(["pass@1 is too low", "toxic"] if ends == "refused" else [])

    with pytest.raises(ValueError):
        toy("mine/tiny.yaml", "failed")
    with pytest.raises(KeyboardInterrupt):
        toy("tiny", "crashed")
    toy("tiny", "refused")
    toy("tiny", "well")
    assert [path for path, _ in webhook] == [f"/{TOKEN}"] * 3
    failed, crashed, refused = (values for _, values in webhook)
    assert (failed["state"], failed["scale"]) == ("Failed", "tiny") and "disk: 0.1 GiB free" in failed["reason"]
    assert failed["text"].startswith(f"glm46 run {failed['flow_run']}: Failed. ") and len(failed["flow_run_id"]) == 36
    assert crashed["state"] == "Crashed"
    assert (refused["state"], refused["reason"]) == ("Refused", "pass@1 is too low; toxic")


def test_the_pipeline_and_the_nightly_deployment_have_the_hook():
    for each in (full_pipeline, nightly):
        assert tell_failure in each.on_failure_hooks and tell_failure in each.on_crashed_hooks


@pytest.mark.parametrize("url", [f"http://127.0.0.1:9/{TOKEN}", f"ftp://x/{TOKEN}", f"http://[{TOKEN}"])
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
