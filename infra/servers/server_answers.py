"""Waits until the servers of a home answer, also from their databases. A server is dead when its process has ended; one
that lives is waited for: on a busy machine an answer may take a minute."""

from __future__ import annotations

import base64
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from http import HTTPStatus

from infra.home import Home
from infra.servers.databases import databases, find_problem
from infra.servers.recorded_servers import ServerUrls, ended_servers, log_path
from infra.servers.server_password import api_password

HEALTH_PATHS = {"prefect": "/api/health", "mlflow": "/health"}
HEALTH_SECONDS = 2
QUESTIONS = {"prefect": ("/api/flows/count", {}), "mlflow": ("/api/2.0/mlflow/experiments/search", {"max_results": 1})}
"""A request for each server that reads its database; the health checks do not read it."""
ANSWER_SECONDS = 180
"""Seconds in which a server answers a health check, from its start or from the first question."""
DATABASE_SECONDS = 120
"""MLflow creates its tables at the first request."""
SLOW_SECONDS = 10
"""Seconds without an answer after which a message names the server that is waited for."""
POLL_SECONDS = 0.1


def silent_servers(urls: ServerUrls) -> list[str]:
    """Names of the servers that do not answer within two seconds, dead or busy."""
    return [name for name, path in HEALTH_PATHS.items() if not _healthy(urls.address(name) + path)]


def wait_for_recorded(home: Home, urls: ServerUrls, say: Callable[[str], None]) -> None:
    """Block until recorded servers answer, also from their databases; `say` gets which one is slow. Raises RuntimeError
    for one that ends, or does not answer in time."""
    for name in HEALTH_PATHS:
        wait_for_answer(home, name, urls.address(name), lambda name=name: name in ended_servers(home, urls), say)
    ask_databases(home, urls)


def wait_for_answer(
    home: Home, name: str, url: str, has_ended: Callable[[], bool], say: Callable[[str], None] = lambda message: None
) -> None:
    """Block until a server answers its health check. Raises RuntimeError with the end of its log."""
    started, has_said, log = time.monotonic(), False, log_path(home, name)
    while not _healthy(url + HEALTH_PATHS[name]):
        is_over, waited = has_ended(), time.monotonic() - started
        if is_over or waited > ANSWER_SECONDS:
            what, fix = "has ended", "run again to start it anew, and if it ends again, see why in its log"
            if not is_over:
                what = f"lives, but did not answer within {ANSWER_SECONDS} s"
                fix = "run again when this machine is less busy, after `glm46 down` if it is the server of `glm46 up`"
            last_lines = "\n".join(log.read_text(errors="replace").splitlines()[-8:])
            raise RuntimeError(f"the {name} server {what}: {fix}. The end of {log}:\n{last_lines or '(it is empty)'}")
        if waited > SLOW_SECONDS and not has_said:
            has_said = True
            say(f"the {name} server of {home.root} lives, but has not answered for {SLOW_SECONDS} s; waiting for it")
        time.sleep(POLL_SECONDS)


def ask_databases(home: Home, urls: ServerUrls) -> None:
    """Ask each server for something that its database holds. Raises RuntimeError naming the database that gives no
    answer."""
    for database in databases(home):
        path, body = QUESTIONS[database.server]
        headers = {"Content-Type": "application/json"}
        if database.server == "prefect":
            headers["Authorization"] = f"Basic {base64.b64encode(api_password(home).encode()).decode()}"
        request = urllib.request.Request(urls.address(database.server) + path, json.dumps(body).encode(), headers)
        try:
            _ask(request)
        except OSError as error:
            log = log_path(home, database.server)
            if isinstance(error, TimeoutError):
                raise RuntimeError(
                    f"the {database.server} server did not answer from its database within {DATABASE_SECONDS} s: wait "
                    f"until this machine is less busy, then run again ({log})"
                ) from error
            said = f"the {database.server} server answers, but not from its database ({error}; {log})"
            if database.path is None and (problem := find_problem(database)):
                said = f"{database.server}'s database {problem}"
            raise RuntimeError(f"{said}: {database.fix}") from error


def _ask(request: urllib.request.Request) -> None:
    """Repeats what is answered with 503: Prefect says so where another write holds its database for long."""
    deadline = time.monotonic() + DATABASE_SECONDS
    while True:
        try:
            urllib.request.urlopen(request, timeout=DATABASE_SECONDS).close()
            return
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.SERVICE_UNAVAILABLE:
                raise
            if time.monotonic() > deadline:
                raise TimeoutError(str(error)) from error
        time.sleep(POLL_SECONDS)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=HEALTH_SECONDS) as answer:
            return answer.status == HTTPStatus.OK
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
