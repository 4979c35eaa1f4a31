"""Seed problems, their solutions and a teacher: what is kept was verified, and a killed run asks nothing twice."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from configs.schema import TeacherLimits, TeacherRequest
from infra.teacher_client import teacher_client
from tasks.data.seeds.math_answers import answers_agree, false_annotations, final_answer
from tasks.data.seeds.rate_limit import RateLimit
from tasks.data.seeds.request_traces import request_traces
from tasks.data.seeds.seed_problems import Seed, check_solution, read_seeds
from tasks.data.seeds.teacher import CostExceededError, ResponseLog, ask_all
from tasks.data.seeds.verify_solutions import verify_solutions
from tasks.data.sources.list_sources import list_sources
from tests.conftest import ROOT
from tests.support.data_inputs import SHARED_DATA, compute, rows, write_jsonl

LIMITS = TeacherLimits(
    num_parallel=3,
    requests_per_minute=600_000,
    tokens_per_minute=10**9,
    max_attempts=3,
    first_delay_seconds=0.001,
    timeout_seconds=0.5,
    price_per_million_prompt_tokens=1.0,
    price_per_million_completion_tokens=2.0,
    max_cost=1.0,
)
GSM = {"question": "Two and three apples?", "answer": "There are 2+3 = <<2+3=5>>5 apples.\n#### 5"}
WRONG_GSM = {"question": "Two and four apples?", "answer": "There are 2+4 = <<2+4=7>>7 apples.\n#### 7"}
BOXED = {"problem": "What is half?", "solution": r"It is $\boxed{\frac{1}{2}}$.", "answer": "\\frac12"}
UNSOLVED = {"problem": "What is a third?", "answer": "1/3"}
MBPP = {
    "text": "Write a function to add.",
    "code": "def add(a, b):\n    return a + b",
    "test_setup_code": "",
    "test_list": ["assert add(1, 2) == 3"],
}
BROKEN = {**MBPP, "text": "Write a function to subtract.", "test_list": ["assert add(1, 2) == -1"]}
EXERCISE = {
    "instructions": "Return true.",
    "solution": "def yes():\n    return True\n",
    "module_file": "sure.py",
    "tests": "import unittest\nfrom sure import yes\n\n"
    "class T(unittest.TestCase):\n    def test_it(self):\n        self.assertTrue(yes())\n",
}


@pytest.fixture
def sources(tmp_path):
    data = tmp_path / "data"
    write_jsonl(data / "math.jsonl", [GSM, WRONG_GSM, BOXED, UNSOLVED, {"title": "no problem"}])
    write_jsonl(data / "code.jsonl", [MBPP, BROKEN, EXERCISE])
    write_jsonl(data / "text.jsonl", [{"text": "unused"}])
    (data / "glm46-data.yaml").write_text(
        "version: 1\nentries:\n  - {files: math.jsonl, role: prompts, kind: math}\n"
        "  - {files: code.jsonl, role: prompts, kind: code_with_tests}\n  - {files: text.jsonl, role: pretrain}\n"
    )
    return list_sources(data)


def test_worked_solutions_are_kept_where_calculation_answer_and_tests_hold(sources, tmp_path):
    made = compute(verify_solutions, tmp_path, sources=sources)
    asked = {json.loads(row["messages"])[0]["content"].splitlines()[0] for row in rows(made, "chats.parquet")}
    assert asked == {"Two and three apples?", "What is half?", "Write a function to add.", "Return true."}
    assert (made.record.num_seeds, made.record.num_without_solution) == (7, 1)
    assert made.record.rejected == {"false_calculation": 1, "tests_failed": 1}
    answers = "".join(row["messages"] for row in rows(made, "chats.parquet"))
    assert "<<" not in answers and "The answer is 5." in answers and "```python" in answers


@pytest.mark.skipif(not SHARED_DATA.exists(), reason="no shared data here")
def test_seeds_of_the_shared_data_are_read_and_their_annotated_calculations_hold(tmp_path):
    names = ("math/gsm8k_train", "math/svamp", "math/knights_knaves_train", "math/math_with_solutions")
    files = [file for file in list_sources(SHARED_DATA).files if file.name.removesuffix(".jsonl.gz") in names]
    seeds = read_seeds(files)
    assert len({seed.source for seed in seeds}) == 4 and all(seed.question and seed.answer for seed in seeds)
    gsm = [seed for seed in seeds if "gsm8k" in seed.source]
    assert len(gsm) == 7473 and not [
        seed.id for seed in gsm[::5] if check_solution(seed, f"{seed.solution}\n#### {seed.answer}")
    ]


def test_answers_are_compared_as_numbers_else_as_normalised_text():
    same = [
        ("1,000", "1000"),
        (r"\frac{1}{2}", "0.5"),
        (r"\dfrac12", "1/2"),
        ("$\\$5.00$", "5"),
        (r"x^{2}", r"x^{2} "),
        ("-3", "-3."),
        (r"\textbf{(081)}", "81"),
        (r"\left(1, 2\right)", "(1,2)"),
    ]
    assert [pair for pair in same if not answers_agree(*pair)] == []
    other = [("10", "100"), ("1/0", "0"), ("1/2", "1/3"), ("x", "y"), ("-3", "3"), ("", "0")]
    assert [pair for pair in other if answers_agree(*pair)] == []
    assert final_answer(r"So \boxed{a} or \boxed{\frac{1}{2}} follows") == r"\frac{1}{2}"
    assert final_answer("1\n#### 42") == "42" and final_answer("The answer is 7.") == "7" and final_answer("none") == ""
    assert false_annotations("<<48/2=24>> <<10/3=3.33>> <<20%*50=10>> <<7//2=3>>") == []
    assert false_annotations("<<48/2=25>> <<10/3=3.34>> <<__import__('os')=1>> <<1/0=1>>") == [
        "48/2=25",
        "10/3=3.34",
        "__import__('os')=1",
        "1/0=1",
    ]


@pytest.mark.parametrize(
    "part",
    [
        "\\text{",
        "\\text{a",
        "\\text{a}",
        "1 \\text{a}",
        "1,000",
        "1,000 ",
        "1,\\!000",
        "(",
        "(1,000)",
        "1, and ",
        "\\mbox{",
        "\\textbf{ ",
        "\\textbf{",
        "answer",
        "answer ",
        "answer\n",
        "answer:",
        "answer is ",
        "answer*",
        "*",
        "#",
        " ",
        "\n",
        "1",
        "<<1",
        "<<1=",
    ],
)
def test_answers_are_read_in_time_that_grows_with_their_length(part):
    """A worked solution of 200 kilobytes: quadratic patterns take tens of seconds."""
    for start in ("", "\\textbf{", "answer", "<<", "\\boxed{"):
        text = f"{start}{part * (200_000 // len(part))}~"
        began = time.process_time()
        assert (
            not answers_agree(final_answer(text), "1")
            and not answers_agree(text, "1")
            and not answers_agree(f"{text}=1>>", "1")
        )
        assert isinstance(false_annotations(f"{text}=1>>"), list)
        assert time.process_time() - began < 5


class Teacher(ThreadingHTTPServer):
    """Answers as OpenAI's server does; `script` gives per question what the n-th request gets."""

    daemon_threads = True
    delay_seconds = 0.0

    def __init__(self, script):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.asked, self.lock, self.headers_seen = script, {}, threading.Lock(), []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][0]["content"].splitlines()[0]
        with self.server.lock:
            number = self.server.asked[question] = self.server.asked.get(question, 0) + 1
            self.server.headers_seen.append(self.headers["Authorization"])
        answers = self.server.script.get(question, ["I do not know"])
        answer = answers[min(number, len(answers)) - 1]
        status, headers = 200, {"Content-Type": "application/json"}
        if answer == "hang":
            time.sleep(1.0)
        if isinstance(answer, int):
            status, headers["Retry-After"] = answer, "0"
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": answer}}
        if answer == "long":
            choice["finish_reason"] = "length"
        usage = {"prompt_tokens": 10, "completion_tokens": 20, "total_tokens": 30}
        written = json.dumps(
            {
                "id": "1",
                "object": "chat.completion",
                "created": 1,
                "model": body["model"],
                "choices": [choice],
                "usage": usage,
            }
        )
        empty = json.dumps({"choices": [], "usage": usage})
        written = {"garbage": "<html>", "broken": '{"choices": [', "empty": empty}.get(answer, written)
        if answer == "uncounted":
            written = json.dumps(
                {"choices": [{**choice, "message": {"role": "assistant", "content": r"\boxed{5}"}}], "model": "another"}
            )
        if answer == "leak":
            status, written = (
                401,
                json.dumps({"error": {"message": f"Incorrect API key provided: {self.headers['Authorization']}"}}),
            )
        if answer == "drop":
            headers["Content-Length"] = str(len(written) + 100)
        if answer == 503:
            headers["Retry-After"] = "120"
        if self.server.delay_seconds:
            time.sleep(self.server.delay_seconds)
        try:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(written.encode())
        except OSError:
            return

    def log_message(self, *arguments):
        return


@pytest.fixture
def teacher():
    made = []

    def start(script) -> Teacher:
        made.append(Teacher(script))
        return made[-1]

    yield start
    for server in made:
        server.close()


def request_of(server: Teacher, **changes) -> TeacherRequest:
    return TeacherRequest(base_url=server.url, model="sage", num_seeds=100, temperature=0.5, max_tokens=100).model_copy(
        update=changes
    )


def ask(sources, root, server, limits=LIMITS, **changes):
    return compute(request_traces, root, sources=sources, recipe=request_of(server, **changes), resources=limits)


GOOD = {
    "Two and three apples?": [r"2+3 is \boxed{5}"],
    "Two and four apples?": [r"\boxed{7.0}"],
    "What is half?": [r"\boxed{0.5}"],
    "What is a third?": [r"It is \boxed{\dfrac{1}{3}}"],
    "Write a function to add.": ["```python\nadd = lambda a, b: b + a\n```"],
    "Write a function to subtract.": ["```\ndef add(a, b):\n    return a - b\n```"],
    "Return true.": ["```python\ndef yes():\n    return 1\n```"],
}


def test_failures_of_the_server_are_retried_and_what_never_verifies_is_counted(sources, teacher, tmp_path, monkeypatch):
    monkeypatch.setenv("GLM46_TEACHER_API_KEY", "secret-of-the-test")
    server = teacher(
        {
            **GOOD,
            "Two and three apples?": [429, 500, GOOD["Two and three apples?"][0]],
            "Two and four apples?": ["hang", r"\boxed{7}"],
            "What is half?": ["garbage", "broken", r"\boxed{.5}"],
            "What is a third?": [r"\boxed{0.33}"],
            "Return true.": ["empty"],
            "Write a function to subtract.": [400],
            "Write a function to add.": ["long"],
        }
    )
    made = ask(sources, tmp_path, server)
    record = made.record
    assert (record.num_seeds, record.num_chats) == (7, 3)
    assert record.rejected == {"cut_off": 1, "refused_request": 1, "unreadable_response": 1, "wrong_answer": 1}
    assert (
        server.asked["Two and three apples?"] == server.asked["What is half?"] == 3
        and server.asked["Two and four apples?"] == 2
    )
    assert server.asked["Write a function to subtract."] == 1 and server.asked["Return true."] == LIMITS.max_attempts
    assert (record.prompt_tokens, record.completion_tokens, record.cost) == (80, 160, 0.0004), (
        "the empty ones are paid for"
    )
    assert set(server.headers_seen) == {"Bearer secret-of-the-test"}
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"secret-of-the-test" not in written


def test_a_run_that_broke_off_asks_nothing_twice(sources, teacher, tmp_path):
    import openai

    server = teacher({**GOOD, "Return true.": [401, *GOOD["Return true."]]})
    with pytest.raises(openai.AuthenticationError):
        ask(sources, tmp_path, server, LIMITS.model_copy(update={"num_parallel": 1}))
    (log,) = tmp_path.rglob("responses.jsonl")
    answered = ResponseLog(log).responses
    with open(log, "a") as file:
        file.write('{"id": "cut in the midd')
    assert ask(sources, tmp_path, server).record.num_chats == 7
    assert {question: count for question, count in server.asked.items() if count > 1} == {"Return true.": 2}
    assert len(answered) < 7


def test_a_seed_that_an_outage_left_unanswered_is_asked_again(sources, teacher, tmp_path):
    """The log kept `no_response` for good: one bad hour, and no later run asked these seeds again."""
    server = teacher({question: [500] * LIMITS.max_attempts + answers for question, answers in GOOD.items()})
    with pytest.raises(ValueError, match=r"none of 7 answers verified \(\{'no_response': 7\}\).*The server said: "):
        ask(sources, tmp_path, server)
    record = ask(sources, tmp_path, server).record
    assert (record.num_chats, record.rejected) == (7, {})


def test_what_gave_nothing_to_read_is_paid_for_and_what_is_not_counted_is_estimated(sources, teacher, tmp_path):
    server = teacher(
        {
            **GOOD,
            "Two and three apples?": ["uncounted"],
            "Return true.": ["empty", *GOOD["Return true."]],
            "What is half?": ["drop", 408, *GOOD["What is half?"]],
        }
    )
    record = ask(sources, tmp_path, server).record
    assert record.num_chats == 7 and record.answered_by == {"another": 1, "sage": 6}
    assert (record.prompt_tokens, record.completion_tokens) == (
        7 * 10 + -(-len("Two and three apples?") // 3),
        7 * 20 + 3,
    )
    assert record.cost == pytest.approx((record.prompt_tokens + 2 * record.completion_tokens) / 1e6)


def test_the_key_is_in_no_message(sources, teacher, tmp_path, monkeypatch):
    import traceback

    import openai

    monkeypatch.setenv("GLM46_TEACHER_API_KEY", "secret-of-the-test")
    with pytest.raises(openai.AuthenticationError) as caught:
        ask(sources, tmp_path, teacher({question: ["leak"] for question in GOOD}))
    message = "".join(traceback.format_exception(caught.value))
    assert "Incorrect API key provided: Bearer <key>" in message and "secret-of-the-test" not in message
    with pytest.raises(
        ValueError, match=r"names a user or a password before @: give the key only in GLM46_TEACHER_API_KEY"
    ):
        teacher_client("https://me:secret@host/v1", 1.0)


def test_a_server_that_asks_for_two_minutes_gets_them(teacher, tmp_path):
    server = teacher({"Why?": [503, "done"]})
    slept: list[float] = []
    log = ResponseLog(tmp_path / "responses.jsonl")
    seed = Seed("1" * 16, "s", 0, "c", "", "math", "Why?", "because", "", "")
    ask_all(
        teacher_client(server.url, 5.0), [seed], request_of(server), LIMITS, log, lambda count: None, sleep=slept.append
    )
    assert log.responses[seed.id].content == "done" and max(slept) == pytest.approx(120, abs=1)


RESUMED = """
import sys
from pathlib import Path
from configs.schema import TeacherLimits, TeacherRequest
from infra.teacher_client import teacher_client
from tasks.data.seeds.seed_problems import Seed
from tasks.data.seeds.teacher import ResponseLog, ask_all
url, path, limits = sys.argv[1:]
seeds = [Seed(f"{n:016x}", "s", n, "c", "", "math", f"Question {n}?", "1", "", "") for n in range(60)]
request = TeacherRequest(base_url=url, model="sage", num_seeds=60, temperature=0.0, max_tokens=9)
ask_all(teacher_client(url, 5.0), seeds, request, TeacherLimits.model_validate_json(limits), ResponseLog(Path(path)), lambda count: None)
"""  # noqa: E501


def test_a_killed_process_pays_twice_for_what_was_on_its_way_alone(teacher, tmp_path):
    server = teacher({})
    server.delay_seconds = 0.03
    path = tmp_path / "responses.jsonl"
    command = [sys.executable, "-c", RESUMED, server.url, str(path), LIMITS.model_dump_json()]
    process = subprocess.Popen(command, cwd=ROOT)
    while not path.exists() or path.read_bytes().count(b"\n") < 10:
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    answered = set(ResponseLog(path).responses)
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0
    twice = {f"{int(question.split()[1][:-1]):016x}" for question, count in server.asked.items() if count > 1}
    assert len(ResponseLog(path).responses) == 60 and not twice & answered and len(twice) <= LIMITS.num_parallel


def test_the_budget_ends_a_run_and_a_larger_one_goes_on(sources, teacher, tmp_path):
    server = teacher(GOOD)
    poor = LIMITS.model_copy(update={"max_cost": 0.0001, "num_parallel": 1})
    with pytest.raises(CostExceededError, match=r"has cost 0\.00, teacher\.limits\.max_cost is 0\.0001: 2 of 7"):
        ask(sources, tmp_path, server, poor)
    assert ask(sources, tmp_path, server).record.num_seeds == 7 and sum(server.asked.values()) == 7


def test_a_server_that_is_not_there_costs_the_attempts_and_no_verified_answer_stops_the_run(sources, teacher, tmp_path):
    server = teacher({})
    with pytest.raises(ValueError, match=r"teacher sage: none of 3 answers verified \(\{'"):
        ask(sources, tmp_path, server, num_seeds=3)
    gone = request_of(server, base_url="http://127.0.0.1:9/v1", num_seeds=1)
    with pytest.raises(ValueError, match=r"\{'no_response': 1\}"):
        compute(request_traces, tmp_path, sources=sources, recipe=gone, resources=LIMITS)


def test_the_key_of_the_step_holds_request_and_seeds_and_not_the_limits(sources):
    request = TeacherRequest(base_url="http://one/v1", model="sage", num_seeds=1, temperature=0.0, max_tokens=1)
    identity = request_traces.identity(request, {"sources": sources}, ())
    assert identity == request_traces.identity(request, {"sources": sources}, ())
    assert identity != request_traces.identity(request.model_copy(update={"model": "other"}), {"sources": sources}, ())
    assert "requests_per_minute" not in json.dumps(identity)


def test_rates_are_kept_whoever_asks():
    now = [0.0]
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    rate = RateLimit(60, 6000, clock=lambda: now[0], sleep=sleep)
    for _ in range(4):
        rate.wait(50)
    assert now[0] == pytest.approx(3.0), "60 requests a minute are one per second"
    rate.wait(1000)
    rate.wait(10)
    assert now[0] == pytest.approx(14.0), "1000 tokens take 10 seconds of 6000 a minute"
    rate.wait(1000)
    rate.correct(-900)
    rate.wait(10)
    assert now[0] == pytest.approx(16.0), "what was announced and not used is given back"
    rate.pause(30)
    rate.wait(1)
    assert now[0] == pytest.approx(46.0)
