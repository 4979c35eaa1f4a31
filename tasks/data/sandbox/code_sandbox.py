"""Runs solutions that somebody else wrote in a sandbox, and judges them by their tests.

The sandbox has no network, no files but Python's own, no other process, an id without rights, and limits on time,
memory and system calls. Bubblewrap makes it where it is installed, else the process itself makes it with namespaces.

Solution and tests run in two processes (solution_process, judge_process), so a solution cannot change its judge. A
sandbox judges many solutions, one after the other, each in two processes of its own that end with the verdict.
"""

from __future__ import annotations

import inspect
import json
import marshal
import os
import resource
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from types import ModuleType
from typing import Any

from tasks.data.sandbox import (
    judge_process,
    remote_objects,
    sandbox_process,
    sandbox_walls,
    solution_process,
    value_exchange,
    value_writer,
)
from tasks.data.sandbox.judge_process import FAILED, PASSED, UNVERIFIABLE
from tasks.data.sandbox.sandbox_walls import NOBODY

BUBBLEWRAP, NAMESPACES = "bubblewrap", "namespaces"
CPU_SECONDS = 10
"""Processor time of each process, far above what solutions need: with 3 s, the verdict on one that takes 2.8 to 3.3 s
depended on the machine's load."""
WALL_SECONDS = 30
"""Wall time beyond the processor time, for a busy machine."""
MEMORY_BYTES = 1 << 30
MAX_ANSWER_BYTES = 1 << 17
"""Above what MAX_PRINTED_CHARS of judge_process take as JSON."""
STANDARD_INPUT = "<stdin>"
"""In place of a module's name: the solution is a program that reads and prints."""
BATCH = 2000
PYTHON = ("-s", "-S", "-P", "-B", "-c")
"""Options of Python without site packages and paths of the user; -I would also ignore PYTHONHASHSEED, and some verdicts
depend on the order of sets."""
ENVIRONMENT = {"PYTHONHASHSEED": "0"}
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache")
INSIDE = (sandbox_walls, remote_objects, value_writer, value_exchange, solution_process, judge_process, sandbox_process)
"""Modules that are sent into the sandbox, in the order of their imports; the last one is started."""
LOADER = """
import marshal, os, sys, types
def take(size):
    data = b""
    while len(data) < size:
        data += os.read(0, size - len(data)) or sys.exit(1)
    return data
modules, walls, limits = marshal.loads(take(int.from_bytes(take(8), "big")))
for name, code in modules:
    sys.modules[name] = types.ModuleType(name)
    exec(code, sys.modules[name].__dict__)
os.environ.clear()
sys.modules[name].start(walls, limits)
"""
TRUSTED = """
import json, sys
passed = []
for program in json.load(sys.stdin):
    try:
        exec(compile(program, "program", "exec"), {"__name__": "program"})
        passed.append(True)
    except Exception:
        passed.append(False)
print(json.dumps(passed))
"""


class NoSandboxError(ValueError):
    """This machine cannot make a sandbox."""


LOCAL = threading.local()
"""The sandbox of each thread, and the key of its settings."""


def judge_solution(code: str, tests: str, module: str, seconds: int = CPU_SECONDS) -> str:
    """PASSED, FAILED, or UNVERIFIABLE for tests that do not work across two processes.

    Tests import the solution as `module`, or use its names where that is empty. With STANDARD_INPUT they are pairs as
    JSON: what a program reads, and what it prints. `seconds` of processor time for each process. Raises ValueError
    where this machine has no sandbox.
    """
    verdict = find_verdict(code, tests, module, seconds)
    return verdict if verdict in (PASSED, UNVERIFIABLE) else FAILED


def find_verdict(code: str, tests: str, module: str, seconds: int = CPU_SECONDS) -> str:
    """As judge_solution; empty where the judge came to no verdict: the tests' own process used up its limits, or a
    solution waited until the wall clock ran out."""
    if module != STANDARD_INPUT:
        return _run(isolation(), {"code": code, "tests": tests, "module": module}, seconds)[0]
    verdict = FAILED
    for given, expected in json.loads(tests):
        verdict, _ = _run(isolation(), {"code": code, "input": given, "output": expected}, seconds)
        if verdict != PASSED:
            break
    return verdict


def run_program(code: str, seconds: int = CPU_SECONDS) -> tuple[str, str] | None:
    """(what the program printed, its error in one line or ""); None where it used up its time or memory, or ended its
    process. Its random numbers are the same in every run. Raises ValueError where this machine has no sandbox."""
    line, _ = _run(isolation(), {"code": code}, seconds)
    if not line:
        return None
    printed, error = json.loads(line)
    return printed, error


def run_trusted(programs: Sequence[str]) -> list[bool]:
    """Whether each of our own programs runs to its end without an exception; many share a process, with limits on time
    and memory only."""
    passed: list[bool] = []
    for start in range(0, len(programs), BATCH):
        batch = list(programs[start : start + BATCH])
        run = subprocess.run(
            [sys.executable, "-I", "-S", "-c", TRUSTED],
            input=json.dumps(batch),
            capture_output=True,
            text=True,
            check=False,
            env={},
            preexec_fn=_limit,
        )
        passed += json.loads(run.stdout) if run.returncode == 0 else [False] * len(batch)
    return passed


def isolation() -> str:
    """BUBBLEWRAP or NAMESPACES. Raises NoSandboxError where neither works."""
    name, problem = find_isolation()
    if not name:
        raise NoSandboxError(
            f"code that others wrote is only run in a sandbox, and this machine cannot make one ({problem}): install "
            f"bubblewrap (Debian: "
            "apt-get install bubblewrap), allow user namespaces, or give the files of kind code_with_tests the role "
            "ignore"
        )
    return name


@cache
def find_isolation() -> tuple[str, str]:
    """(the isolation that works here, ""); ("", the problems) where none does."""
    problems = {name: problem_of(name) for name in (BUBBLEWRAP, NAMESPACES)}
    works = next((name for name, problem in problems.items() if not problem), "")
    return works, "" if works else "; ".join(f"{name}: {problem}" for name, problem in problems.items())


@cache
def problem_of(isolation: str) -> str:
    """Why this machine cannot make an isolation, tested with a solution; empty where it can."""
    if isolation == BUBBLEWRAP and shutil.which("bwrap") is None:
        return "not installed"
    job = {"code": "def one():\n    return 1", "tests": "assert one() == 1", "module": ""}
    verdict, problem = _run(isolation, job, CPU_SECONDS)
    return "" if verdict == PASSED else problem or f"a right solution has the verdict {verdict!r}"


def _run(isolation: str, job: dict[str, str], seconds: int) -> tuple[str, str]:
    """(the line that answers the job, ""), or, without one, ("", the last line of the error)."""
    key = (isolation, seconds, os.getpid())
    if getattr(LOCAL, "key", None) != key or LOCAL.sandbox.has_ended():
        LOCAL.sandbox, LOCAL.key = Sandbox(isolation, seconds), key
    return LOCAL.sandbox.judge(json.dumps(job).encode() + b"\n")


class Sandbox:
    """A process in a sandbox, which judges one solution after the other: starting Python takes most of a sandbox's
    time.

    It belongs to the thread that started it: the kernel ends it with that thread.
    """

    def __init__(self, isolation: str, seconds: int) -> None:
        self.wall_seconds = 2 * seconds + WALL_SECONDS
        self.first = _start(isolation, seconds)
        """Bytes that are sent before the first job."""
        self.is_expired = False
        self.process = subprocess.Popen(
            sandbox_command(isolation, ()),
            cwd="/",
            env=ENVIRONMENT,
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def _expire(self) -> None:
        self.is_expired = True
        self.process.kill()

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def judge(self, job: bytes) -> tuple[str, str]:
        """The result of _run for a job; without a verdict the sandbox is ended."""
        process = self.process
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        timer = threading.Timer(self.wall_seconds, self._expire)
        timer.daemon = True
        timer.start()
        try:
            with suppress(BrokenPipeError):  # where no sandbox was made, standard error has the reason
                process.stdin.write(self.first + job)
                process.stdin.flush()
            verdict = process.stdout.readline(MAX_ANSWER_BYTES).decode(errors="replace")
        except BaseException:
            process.kill()
            raise
        finally:
            timer.cancel()
            timer.join()
        self.first = b""
        if verdict and not self.is_expired:
            return verdict.removesuffix("\n"), ""
        process.kill()
        _, problem = process.communicate()
        return "", problem.decode(errors="replace").strip().rpartition("\n")[2]


@cache
def _start(isolation: str, seconds: int) -> bytes:
    return loader_input(isolation, INSIDE, (), (seconds, MEMORY_BYTES))


def loader_input(isolation: str, inside: Sequence[ModuleType], shown: Sequence[str], limits: tuple[int, int]) -> bytes:
    """The loader's input: a number of bytes, then the code of modules in the order of their imports, the walls and the
    limits. `shown` are paths that the sandbox shows beside Python's own."""
    modules = [(module.__name__, compile(inspect.getsource(module), module.__name__, "exec")) for module in inside]
    start = marshal.dumps((modules, _walls(*shown) if isolation == NAMESPACES else None, limits))
    return len(start).to_bytes(8, "big") + start


def sandbox_command(isolation: str, shown: Sequence[str]) -> list[str]:
    """The command that makes the sandbox and reads the loader's input there; with NAMESPACES the process makes it
    itself."""
    loader = [_interpreter(), *PYTHON, LOADER]
    if isolation == NAMESPACES:
        return loader
    walls = _walls(*shown)
    command = [
        shutil.which("bwrap") or BUBBLEWRAP,
        "--unshare-user",
        "--unshare-all",
        "--die-with-parent",
        "--new-session",
        "--cap-drop",
        "ALL",
    ]
    command += ["--uid", str(NOBODY), "--gid", str(NOBODY)]
    for path in walls["visible"]:
        command += ["--ro-bind", path, path]
    for path, target in walls["links"]:
        command += ["--symlink", target, path]
    for path in walls["hidden"]:
        command += ["--tmpfs", path, "--remount-ro", path]
    return [*command, "--remount-ro", "/", "--chdir", "/", "--", *loader]


def _interpreter() -> str:
    """The path of Python outside of any virtual environment, which is a directory of the user's."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


@cache
def _walls(*shown: str) -> dict[str, list[Any]]:
    """The files that the sandbox shows: the interpreter, its standard library and shared libraries, without installed
    packages, and the paths in `shown`."""
    prefix = os.path.realpath(sys.base_prefix)
    wanted = [
        *LIBRARIES,
        f"{prefix}/lib",
        f"{prefix}/lib64",
        os.path.realpath(sysconfig.get_path("stdlib")),
        _interpreter(),
    ]
    links = sorted({(path, os.readlink(path)) for path in wanted if os.path.islink(path)})
    visible: list[str] = []
    for path in sorted({path for path in wanted if os.path.exists(path) and not os.path.islink(path)}):
        if not any(path.startswith(f"{known}/") for known in visible):
            visible.append(path)
    installed = {sysconfig.get_path(name, vars={"base": prefix, "platbase": prefix}) for name in ("purelib", "platlib")}
    hidden = sorted(
        path for path in installed if os.path.isdir(path) and any(path.startswith(f"{known}/") for known in visible)
    )
    return {"visible": [*visible, *shown], "links": links, "hidden": hidden}


def _limit() -> None:
    for name, limit in (("CPU", CPU_SECONDS * 12), ("AS", MEMORY_BYTES), ("FSIZE", 0), ("CORE", 0)):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
