"""`glm46 eval` and `glm46 compare` on servers that fail, refuse, or are ended: a finished answer is never lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import psutil
import pytest
import yaml

from flows.cli.serving import evaluate_target
from infra.serving.kept_answers import KeptAnswers
from infra.serving.model_client import ModelClient, ServerFailedError
from tasks.release.server_profile import measure_levels
from tests.conftest import ROOT
from tests.evaluation.benchmarks.test_targets import compare, evaluate, items_of
from tests.infra.test_launcher import wait_for
from tests.support.data_inputs import write_jsonl
from tests.support.pipeline import command, environment

NUM_ITEMS = 8
SECONDS = 60
"""Until a test gives up waiting for its server."""
RETRY_AT_ONCE = {"retry-after": "0.01"}
Failure = tuple[int, str, dict[str, str]] | None


class Handler(BaseHTTPRequestHandler):
    """Chats whose answer follows from the prompt and the seed; `plan` says how a request fails, if it does."""

    protocol_version = "HTTP/1.1"
    server: Any

    def do_GET(self):
        self.send(200, {"object": "list", "data": [{"id": "m", "object": "model"}]})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            number = len(self.server.asked)
            self.server.asked.append(asked)
        failure = self.server.plan(number, self.path, asked)
        if failure is None:
            text = self.server.text or f"\\boxed{{{len(asked['messages'][0]['content']) + asked.get('seed', 0)}}}"
            message = {"role": "assistant", "content": text}
            reason = "length" if number in self.server.cut else "stop"
            choice = {"index": 0, "finish_reason": reason, "message": message}
            self.send(200, {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]})
        elif failure[0]:
            self.send(failure[0], {"error": {"message": failure[1]}}, failure[2])
        else:
            self.close_connection = True
            self.connection.close()

    def send(self, status, value, headers=None):
        body = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"content-length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


@contextmanager
def served(
    plan: Callable[[int, str, Any], Failure], text: str = "", cut: Collection[int] = ()
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(URL, the requests so far); `text` is every answer, that to the requests `cut` ends at its limit."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.plan, server.text, server.cut, server.asked, server.lock = plan, text, cut, [], threading.Lock()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server.asked
    finally:
        server.shutdown()
        server.server_close()


def answers(number: int, path: str, asked: Any) -> Failure:
    return None


@pytest.fixture
def given(tmp_path, monkeypatch):
    """Options of a suite of sampled chats."""
    monkeypatch.setenv("GLM46_HOME", str(tmp_path / "home"))
    data = tmp_path / "data"
    data.mkdir()
    rows = [{"question": f"Count {'a ' * number}", "answer": f"#### {number + 20}"} for number in range(NUM_ITEMS)]
    write_jsonl(data / "sums.jsonl", rows)
    (data / "glm46-data.yaml").write_text('version: 1\nentries:\n  - {files: "*.jsonl", role: evaluation}\n')
    benchmark = {"name": "sums", "kind": "math", "file": "sums.jsonl", "few_shot": None, "is_chat": True}
    benchmark |= {"max_new_tokens": 8, "num_samples": 1, "temperature": 0.7, "until": []}
    return ["--suite", suite_of(tmp_path, benchmark), "--data", data]


def suite_of(directory, benchmark):
    path = directory / f"{benchmark['name']}.yaml"
    suite = {"description": "x", "sequence_length": 512, "batch_sequences": 8, "dtype": "float32"}
    suite |= {"enable_thinking": False, "timeout_seconds": SECONDS, "benchmarks": [benchmark]}
    path.write_text(yaml.safe_dump(suite))
    return path


@pytest.fixture
def plain(given, tmp_path):
    """Items as a server that answers every request at once gives them, one at a time."""
    with served(answers) as (url, asked):
        code, errors, _ = evaluate(url, *given, "--output", tmp_path / "plain.json", "--concurrency", 1)
    assert code == 0 and len(asked) == NUM_ITEMS + 1, (errors, "each item, and what finds out about the template")
    items = items_of(tmp_path / "plain.json")
    assert len({item["output"] for item in items}) > 1, "so an order is seen"
    return items


def test_requests_without_an_answer_are_repeated_and_change_nothing(given, plain, tmp_path):
    failures = {2: (429, "slow down", RETRY_AT_ONCE), 4: (503, "overloaded", RETRY_AT_ONCE), 6: (0, "", {})}
    with served(lambda number, path, asked: failures.get(number)) as (url, asked):
        code, errors, _ = evaluate(url, *given, "--output", tmp_path / "a.json")
    assert code == 0, errors
    assert len(asked) == NUM_ITEMS + 1 + len(failures)
    assert items_of(tmp_path / "a.json") == plain
    assert not (tmp_path / "a.answers.jsonl").exists()


@pytest.mark.parametrize("status", [429, 503])
def test_a_measured_request_is_not_repeated(status):
    with served(lambda number, path, asked: (status, "no", RETRY_AT_ONCE)) as (url, asked):
        client = ModelClient(url, "", SECONDS, "m")
        with pytest.raises(ServerFailedError, match=f"answered {status} at the first request"):
            measure_levels(client, (1,), 4)
    assert len(asked) == 1


def test_several_requests_at_a_time_end_as_one_after_another(given, plain, tmp_path):
    """The server answers nothing before four requests wait."""
    waiting, are_four = set(), threading.Event()

    def wait_for_four(number, path, asked):
        if not number:
            return None
        waiting.add(number)
        if len(waiting) == 4:
            are_four.set()
        return None if are_four.wait(SECONDS) else (400, "fewer than four were asked", {})

    with served(wait_for_four) as (url, _):
        code, errors, _ = evaluate(url, *given, "--output", tmp_path / "a.json", "--concurrency", 4)
    assert code == 0, errors
    assert items_of(tmp_path / "a.json") == plain


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_command_that_was_ended_asks_only_what_is_left(number, given, plain, tmp_path):
    output, is_over = tmp_path / "a.json", threading.Event()
    kept = tmp_path / "a.answers.jsonl"

    def answer_three(request, path, asked):
        if request > 3 and not is_over.is_set():
            is_over.wait(4 * SECONDS)
            return 0, "", {}
        return None

    with served(answer_three, cut=[1, 2]) as (url, asked):
        words = command("eval", url, *map(str, given), "--output", str(output), "--concurrency", "2")
        own = environment(tmp_path / "home")
        process = subprocess.Popen(words, cwd=ROOT, env=own, stderr=subprocess.PIPE, text=True)
        wait_for(lambda: kept.exists() and kept.read_bytes().count(b"\n") == 3, seconds=4 * SECONDS)
        process.send_signal(number)
        _, said = process.communicate(timeout=SECONDS)
        is_over.set()
        assert process.returncode and not output.exists()
        assert ("interrupted; run again to continue" in said) == (number == signal.SIGINT)
        before = len(asked)
        code, errors, _ = evaluate(url, *given, "--output", output)
    assert code == 0 and f"3 earlier answers are in {kept}" in errors
    assert len(asked) - before == NUM_ITEMS - 3 + 1
    assert items_of(output) == plain
    [benchmark] = json.loads(output.read_text())["benchmarks"]
    assert benchmark["num_unfinished"] == 2, "the earlier answers count"
    assert not kept.exists()


def test_an_answer_is_kept_for_the_same_request_of_the_same_model(tmp_path):
    path, asked = tmp_path / "a.answers.jsonl", []

    def ask(prompt, seed):
        asked.append(prompt)
        return [prompt, seed]

    for _ in range(2):
        assert KeptAnswers(path, "a").recall("chat", ask, "é", 1) == ["é", 1]
    assert asked == ["é"]
    with open(path, "ab") as file:
        file.write(b'["cut')
    again = KeptAnswers(path, "a")
    assert [again.recall("chat", ask, "é", seed) for seed in (1, 2)] == [["é", 1], ["é", 2]]
    KeptAnswers(path, "b").recall("chat", ask, "é", 1)
    assert asked == ["é"] * 3 and [KeptAnswers(path, by).num_earlier for by in ("a", "b")] == [2, 1]
    path.write_text("{}\n")
    with pytest.raises(ValueError, match="holds other lines than answers"):
        KeptAnswers(path, "a")


def test_a_server_whose_speed_cannot_be_measured_is_compared(given, tmp_path):
    """As hosted APIs that only chat; the comparison says why there is no speed."""

    def only_chats(number, path, asked):
        return None if "chat" in path else (404, f"Invalid URL (POST {path})", {})

    with served(only_chats) as (url, requests):
        code, errors, printed = compare(url, url, *given, "--output", tmp_path / "c.json", "--json")
    assert code == 0, errors
    chats = [each for each in requests if "messages" in each]
    assert len(chats) == 2 * (NUM_ITEMS + 1), "the same server on both sides is asked twice"
    made = json.loads(printed)
    assert made == json.loads((tmp_path / "c.json").read_text())
    assert [made[side]["tokens_per_second"] for side in ("first", "second")] == [None, None]
    assert made["not_measured"].count(f"speed of {url}: {url} answered 404") == 1
    assert "Invalid URL" in made["not_measured"] and "experts are compared of two" in made["not_measured"]
    assert made["differences"][0]["num_items"] == NUM_ITEMS
    assert not (tmp_path / "c.answers.jsonl").exists()


@pytest.mark.parametrize("status", [401, 404, 429, 503])
def test_a_failed_probe_for_likelihoods_says_what_the_server_said(status, given, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate_target, "NUM_RETRIES", 0)
    write_jsonl(tmp_path / "data" / "choice.jsonl", [{"question": "a?", "choices": ["b", "c"], "answer": 0}] * 2)
    choice = suite_of(tmp_path, {"name": "choice", "kind": "choice", "file": "choice.jsonl", "few_shot": None})
    with served(lambda number, path, asked: (status, "the server's own words", {})) as (url, _):
        options = ["--suite", choice, "--data", tmp_path / "data", "--output", tmp_path / "a.json"]
        code, errors, _ = evaluate(url, *options)
    assert code == 1 and "the server's own words" in errors
    assert ("reports no log-probabilities of a given text" in errors) == (status == 404)


def test_a_server_that_knows_no_template_settings_gets_chats_without(given, plain, tmp_path):
    def is_strict(number, path, asked):
        refused = "chat_template_kwargs" in asked
        return (400, "Unrecognized request argument supplied: chat_template_kwargs", {}) if refused else None

    with served(is_strict) as (url, asked):
        code, errors, _ = evaluate(url, *given, "--output", tmp_path / "a.json")
    assert code == 0 and f"{url} refuses chat_template_kwargs" in errors
    assert len(asked) == NUM_ITEMS + 1 and items_of(tmp_path / "a.json") == plain
    assert json.loads((tmp_path / "a.json").read_text())["engine"] == f"{url} without enable_thinking"
    with served(lambda number, path, asked: (400, "no such model", {})) as (url, asked):
        code, errors, _ = evaluate(url, *given, "--output", tmp_path / "b.json")
    assert code == 1 and "no such model" in errors and len(asked) == 1


def test_half_a_character_of_a_server_costs_no_result(given, tmp_path):
    with served(answers, text="\ud83d ok") as (url, _):
        code, errors, _ = evaluate(url, *given, "--output", tmp_path / "a.json")
    assert code == 0, errors
    assert {item["output"] for item in items_of(tmp_path / "a.json")} == {"? ok"}


def test_a_server_of_a_large_file_has_the_machine_and_the_time(tmp_path, monkeypatch):
    path = tmp_path / "large.gguf"
    path.touch()
    small = evaluate_target.local_server(path, 64)
    os.truncate(path, 70 * 10**9)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 32)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    large = evaluate_target.local_server(path, 64)
    assert large.startup_timeout_seconds > 600 > small.startup_timeout_seconds == 120 and large.num_threads == 32
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    assert evaluate_target.local_server(path, 64).num_threads == 4
