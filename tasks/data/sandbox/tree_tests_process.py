"""The process that runs the tests of a source tree with pytest, and reports which pass.

Tests and tree share this process, as in any repository: a tree could report tests that did not run. So it measures
models, and is no reward. Runs inside the sandbox: imports only the standard library, and the pytest that is shown to
it.
"""

from __future__ import annotations

import io
import json
import os
import sys
from typing import Any

from tasks.data.sandbox.sandbox_walls import confine, enter_namespaces, hide_memory

OPTIONS = (
    "-q",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:logging",
    "-o",
    "addopts=",
    "--rootdir",
    ".",
    "--capture",
    "no",
    "--tb",
    "no",
)
"""Without the plugin of logging, which opens /dev/null: the sandbox has none. A test that asks for `caplog` fails."""
NUM_THREADS = 256
"""Of tests that start some."""


class Passed:
    """A plugin of pytest: tests whose every part passed."""

    def __init__(self) -> None:
        self.passed: dict[str, bool] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        # A test that is skipped, or expected to fail, has no part of kind call that passed.
        is_right = report.passed if report.when == "call" else not report.failed
        if report.when == "call" or not is_right:
            self.passed[report.nodeid] = is_right and self.passed.get(report.nodeid, True)


def start(walls: dict[str, Any] | None, limits: tuple[int, int]) -> None:
    """Answer one job, a line of JSON with `tree`, `packages` and `files`, with a line: the ids of passing tests."""
    if walls is not None:
        enter_namespaces(**walls)
    hide_memory()
    job = json.loads(sys.stdin.readline())
    confine(*limits, num_threads=NUM_THREADS)
    os.chdir(job["tree"])
    sources = [path for path in (f"{job['tree']}/src", job["tree"]) if os.path.isdir(path)]
    sys.path[:0] = [*sources, job["packages"]]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.dont_write_bytecode = True
    sys.stdin = sys.stdout = sys.stderr = io.StringIO()
    pytest = __import__("pytest")
    plugin = Passed()
    pytest.main([*OPTIONS, *job["files"]], plugins=[plugin])
    passed = sorted(name for name, is_right in plugin.passed.items() if is_right)
    os.write(1, json.dumps(passed).encode() + b"\n")
    os._exit(0)
