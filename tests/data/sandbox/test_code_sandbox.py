"""Others' code: no escape leaves the sandbox, no forgery passes, honest solutions pass; in bubblewrap and in our own
namespaces."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from textwrap import indent

import psutil
import pytest

from tasks.data.sandbox import code_sandbox
from tasks.data.sandbox.code_sandbox import BUBBLEWRAP, FAILED, NAMESPACES, PASSED, UNVERIFIABLE, judge_solution
from tasks.data.seeds.seed_problems import require_sandbox
from tasks.data.sources.list_sources import list_sources
from tests.conftest import ROOT
from tests.support.data_inputs import write_jsonl


def cases(name):
    """By name what a file of cases holds after each `## name`, cut at `--`."""
    text = (ROOT / "tests" / "data" / "sandbox" / "sandbox_cases" / f"{name}.txt").read_text()
    sections = [re.sub("^# .*\n", "", section, flags=re.M).partition("\n") for section in text.split("\n## ")[1:]]
    return {title: [part.strip("\n") for part in body.split("\n--\n")] for title, _, body in sections}


def judged(name):
    """The cases with tests, as judge_solution's arguments."""
    return {
        title: (code, tests, "solution" if "from solution" in tests else "")
        for title, (code, tests) in cases(name).items()
    }


ESCAPES, EXHAUSTION, FORGERIES, HONEST = cases("escapes"), cases("exhaustion"), judged("forgeries"), judged("honest")
ESCAPED = "assert attempt()"


def possible(isolation):
    """A parameter that is skipped, with the reason, on a machine that cannot make this isolation."""
    problem = code_sandbox.problem_of(isolation)
    return pytest.param(isolation, marks=pytest.mark.skipif(bool(problem), reason=f"{isolation}: {problem}"))


@pytest.fixture(params=[possible(BUBBLEWRAP), possible(NAMESPACES)])
def isolation(request, monkeypatch):
    monkeypatch.setattr(code_sandbox, "find_isolation", lambda: (request.param, ""))
    return request.param


@pytest.fixture
def bait(tmp_path, monkeypatch):
    """Things of the user that a solution could reach for, by the names of the escapes."""
    (tmp_path / "home").mkdir()
    (tmp_path / "file").write_text("precious")
    with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as unix, socket.socket(socket.AF_UNIX) as abstract:
        tcp.bind(("127.0.0.1", 0))
        unix.bind(str(tmp_path / "socket"))
        abstract.bind(f"\0{tmp_path}")
        for one in (tcp, unix, abstract):
            one.listen()
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "socket"))
        monkeypatch.setenv("GLM46_SECRET", "secret")
        victim = subprocess.Popen(["sleep", "600"])
        yield {
            "file": str(tmp_path / "file"),
            "directory": str(tmp_path),
            "home": str(tmp_path / "home"),
            "victim": victim.pid,
            "port": tcp.getsockname()[1],
            "socket": str(tmp_path / "socket"),
            "abstract": str(tmp_path),
        }
        assert victim.poll() is None
        victim.kill()
        victim.wait()
        assert (tmp_path / "file").read_text() == "precious" and os.stat(tmp_path / "file").st_mode & 0o777
        assert {path.name for path in tmp_path.iterdir()} == {"home", "file", "socket"}
        assert not os.path.exists("/dev/shm/written") and not os.path.exists("/tmp/written")


def verdicts(jobs, seconds=code_sandbox.CPU_SECONDS):
    """By name; several at a time, since most of a sandbox's start is waiting."""
    with ThreadPoolExecutor(8) as pool:
        jobs_done = {name: pool.submit(judge_solution, *job, seconds) for name, job in jobs.items()}
        return {name: verdict.result() for name, verdict in jobs_done.items()}


def attempt(body):
    return f"def attempt():\n{indent(body, '    ')}\n"


def test_no_escape_succeeds_from_a_solution(isolation, bait):
    assert len(ESCAPES) + len(FORGERIES) >= 65
    jobs = {name: (attempt(body.format(**bait)), ESCAPED, "") for name, (body,) in ESCAPES.items()}
    assert {name for name, verdict in verdicts(jobs).items() if verdict != FAILED} == set()


def test_no_escape_succeeds_from_tests(isolation, bait):
    jobs = {name: ("", f"{attempt(body.format(**bait))}{ESCAPED}", "") for name, (body,) in ESCAPES.items()}
    assert {name for name, verdict in verdicts(jobs).items() if verdict != FAILED} == set()


def test_the_attempts_would_be_seen_to_succeed(isolation, bait):
    """The table itself works: what an honest program may do passes in the same form."""
    allowed = {
        "time": "import time\nreturn time.time() > 0",
        "library": "import decimal, sqlite3, hashlib, ctypes, zoneinfo\nreturn True",
    }
    jobs = {name: (attempt(body), ESCAPED, "") for name, body in allowed.items()}
    assert verdicts(jobs) == dict.fromkeys(allowed, PASSED)
    outside = {"__name__": "outside"}
    for name in (
        "read",
        "list",
        "TCP",
        "socket in a file",
        "abstract socket",
        "fork",
        "thread",
        "own environment",
        "/proc",
    ):
        exec(attempt(ESCAPES[name][0].format(**bait)), outside)
        assert outside["attempt"](), name
    while os.waitpid(-1, os.WNOHANG)[0]:
        pass


def test_what_uses_up_the_machine_is_ended(isolation, monkeypatch):
    monkeypatch.setattr(code_sandbox, "WALL_SECONDS", 2)
    before = set(psutil.Process().children(recursive=True))
    jobs = {name: (attempt(body), "assert list(attempt()) is not None", "") for name, (body,) in EXHAUSTION.items()}
    assert verdicts(jobs, seconds=1) == dict.fromkeys(EXHAUSTION, FAILED)
    started = set(psutil.Process().children(recursive=True)) - before
    assert psutil.wait_procs(started, timeout=10)[1] == []


def test_no_forgery_passes(isolation):
    judged = verdicts(FORGERIES, seconds=2)
    assert {name for name, verdict in judged.items() if verdict == PASSED} == set()
    assert set(judged.values()) == {FAILED, UNVERIFIABLE}


SEARCH = """
import ctypes, gc
libc = ctypes.CDLL(None)
libc.sbrk.restype = ctypes.c_void_p
def holds(first, second):
    pages = {id(known) >> 12 << 12 for one in gc.get_objects() for known in (one, *gc.get_referents(one))}
    page = (libc.sbrk(0) - 1) >> 12 << 12
    while libc.mincore(ctypes.c_void_p(page), 1, ctypes.create_string_buffer(1)) == 0:
        pages.add(page)
        page -= 4096
    pages = {page for page in pages if libc.mincore(ctypes.c_void_p(page), 1, ctypes.create_string_buffer(1)) == 0}
    return any(first + b'-' + second in ctypes.string_at(page, 4096) for page in pages)
"""
SPOILERS = {
    "ends": "import os\nos._exit(0)",
    "closes": "import os\nos.closerange(0, 64)",
    "kills": "import ctypes\nfor number in range(1, 9):\n    ctypes.CDLL(None).syscall(234, number, number, 9)",
    "writes": "import os\nfor end in range(64):\n    try:\n        os.write(end, b'passed\\n')\n    except OSError:\n "
    "       pass",
}


def test_a_solution_knows_nothing_of_the_one_before_and_spoils_nothing_of_the_next(isolation):
    """One sandbox judges many, one after the other."""
    one, search = "def f():\n    return 1", "assert not holds(b'rolled', b'dragon')"
    assert judge_solution(f"{SEARCH}\nkept = b'rolled-dragon'", search, "") == FAILED, "the search works"
    for spoiler in SPOILERS.values():
        assert judge_solution(one, "secret = 'rolled-dragon'\nassert f() == 1", "") == PASSED
        sandbox = code_sandbox.LOCAL.sandbox
        assert judge_solution(SEARCH, search, "") == PASSED and code_sandbox.LOCAL.sandbox is sandbox
        assert judge_solution(f"{spoiler}\ndef f():\n    return 2", "assert f() == 1", "") == FAILED
        assert judge_solution(one, "assert f() == 1", "") == PASSED
        assert judge_solution(one, "assert f() == 2", "") == FAILED


READING = {
    "input": "print(int(input()) + int(input()))",
    "lines": "import sys\nprint(sum(map(int, sys.stdin)))",
    "bytes": "import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))",
    "descriptor": "print(sum(map(int, open(0).read().split())))",
    "system call": "import os\nprint(sum(map(int, os.read(0, 99).split())))",
    "renamed": "import sys\ninput = sys.stdin.readline\nprint(int(input()) + int(input()))",
    "written": "import sys\nsys.stdout.write(str(int(input()) + int(input())))",
    "written as bytes": "import sys\nsys.stdout.buffer.write(b'%d' % (int(input()) + int(input())))",
    "another output": "import io, sys\nsys.stdout = io.StringIO()\nprint(int(input()) + int(input()))\n"
    "sys.__stdout__.write(sys.stdout.getvalue())",
    "main": "def main():\n    print(int(input()) + int(input()))\nif __name__ == '__main__':\n    main()",
    "left": "print(int(input()) + int(input()))\nexit()\nprint(0)",
    "standard error": "import sys\nprint(0, file=sys.stderr)\nprint(int(input()) + int(input()))",
    "blanks": "print('\\n ')\nprint(int(input()) + int(input()), ' \\n\\n')",
    "decimals": "print(float(input()) + float(input()))",
}
NOT_READING = {
    "wrong": "print(4)",
    "two lines": "print(3)\nprint(3)",
    "nothing": "",
    "error": "print(3)\nraise ValueError",
    "error at the end": "print(3)\nimport sys\nsys.exit(1)",
    "past the end": "print(3)\ninput(), input(), input()",
    "ends its process": "print(3)\nimport os\nos._exit(0)",
    "waits for ever": "print(3)\nwhile True:\n    pass",
    "lies": "import gc, sys\nclass Lie(str):\n    __eq__ = lambda *_: True\n    __iter__ = lambda _: iter(())\n"
    "    __len__ = lambda _: 1\n    rstrip = split = lambda self, *_: self\n"
    "peer = next(one for one in gc.get_objects() if type(one).__name__ == 'SolutionSide')\n"
    "writer = sys.modules['tasks.data.sandbox.value_writer'].Writer(peer, [])\n"
    "peer._send(['return', writer.atom(Lie())], writer.nodes())\npeer.serve_all()",
}


def test_programs_read_and_print_as_they_do_outside(isolation):
    tests = '[["1\\n2\\n", "3\\n"]]'
    jobs = {name: (code, tests, code_sandbox.STANDARD_INPUT) for name, code in READING.items()}
    assert verdicts(jobs, seconds=2) == dict.fromkeys(READING, PASSED)
    jobs = {name: (code, tests, code_sandbox.STANDARD_INPUT) for name, code in NOT_READING.items()}
    assert verdicts(jobs, seconds=2) == dict.fromkeys(NOT_READING, FAILED)


def test_every_input_is_read_by_a_process_of_its_own_however_long_it_is(isolation):
    numbers = "\n".join(map(str, range(200_000)))
    tests = json.dumps([["1", "1"], [numbers, str(sum(range(200_000)))], ["2", "2"]])
    kept = "import builtins, sys\nbuiltins.seen = getattr(builtins, 'seen', 0) + 1\nassert builtins.seen == 1\n"
    reads = f"{kept}print(sum(map(int, sys.stdin.read().split())))"
    assert judge_solution(reads, tests, code_sandbox.STANDARD_INPUT) == PASSED
    unread = "print(1)"
    assert judge_solution(unread, json.dumps([[numbers, "1"]]), code_sandbox.STANDARD_INPUT) == PASSED
    assert judge_solution(unread, tests, code_sandbox.STANDARD_INPUT) == FAILED


def test_honest_solutions_pass(isolation):
    assert {name: verdict for name, verdict in verdicts(HONEST).items() if verdict != PASSED} == {}


def test_a_wrong_solution_fails_and_what_two_processes_cannot_do_is_unverifiable(isolation):
    wrong = {
        name: (code, tests.replace("==", "!=").replace("assertEqual", "assertNotEqual"), module)
        for name, (code, tests, module) in HONEST.items()
        if "==" in tests or "assertEqual" in tests
    }
    judged = verdicts(wrong)
    assert {name for name, verdict in judged.items() if verdict == PASSED} == set()
    jobs = {
        "subclass": ("class A:\n    pass", "class B(A):\n    pass", ""),
        "attribute": ("def f(x):\n    return x.gi_frame", "assert f(iter(())) is None", ""),
    }
    assert verdicts(jobs) == dict.fromkeys(jobs, UNVERIFIABLE)


def test_the_users_python_settings_are_not_those_of_the_sandbox(isolation, tmp_path, monkeypatch):
    for name in ("sitecustomize.py", "usercustomize.py", "startup.py", "json.py"):
        (tmp_path / name).write_text("open('/dev/null'); raise SystemExit(7)")
    for name, value in {
        "PYTHONPATH": "",
        "PYTHONSTARTUP": "startup.py",
        "PYTHONHOME": "",
        "LD_PRELOAD": "json.py",
    }.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    monkeypatch.chdir(tmp_path)
    assert judge_solution("def f(x):\n    return 5", "assert f(2) == 5", "") == PASSED


def test_a_sandbox_ends_with_the_process_that_started_it(isolation, tmp_path):
    program = (
        "import os, sys\nfrom tasks.data.sandbox import code_sandbox\n"
        f"code_sandbox.find_isolation = lambda: ({isolation!r}, '')\n"
        "code_sandbox.judge_solution('import time\\ntime.sleep(300)', 'pass', '')"
    )
    process = subprocess.Popen([sys.executable, "-c", program])
    started = psutil.Process(process.pid)
    while len(inside := started.children(recursive=True)) < 3:
        assert process.poll() is None
    process.kill()
    process.wait()
    assert psutil.wait_procs(inside, timeout=20)[1] == []


def test_where_no_sandbox_can_be_made_code_is_refused_by_name(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "code.jsonl", [{"text": "q", "code": "a = 1", "test_list": ["assert a == 1"]}])
    (tmp_path / "glm46-data.yaml").write_text(
        "version: 1\nentries:\n  - {files: code.jsonl, role: prompts, kind: code_with_tests}\n"
    )
    files = list_sources(tmp_path, needed="prompts").files
    monkeypatch.setattr(
        code_sandbox, "find_isolation", lambda: ("", "bubblewrap: not installed; namespaces: not permitted")
    )
    for run in (lambda: require_sandbox(files), lambda: judge_solution("a = 1", "assert a == 1", "")):
        with pytest.raises(
            ValueError, match=r"cannot make one \(bubblewrap: not installed; .*install bubblewrap .* the role ignore"
        ):
            run()
