"""The servers of `glm46 up`, asked as its UI and another shell ask them."""

from __future__ import annotations

import base64
import json
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.pipeline import Finished, glm46

FLOW_TIMEOUT_SECONDS = 240
BUSY_SECONDS = 30


@dataclass(frozen=True)
class Deployed:
    """A home whose servers and worker are up."""

    home: Path
    ports: tuple[int, int]

    def up(self, *options: str) -> Finished:
        ports = ("--prefect-port", str(self.ports[0]), "--mlflow-port", str(self.ports[1]))
        return glm46("up", *ports, *options, home=self.home)

    @property
    def recorded(self) -> dict[str, Any]:
        return json.loads((self.home / "run" / "servers.json").read_text())

    @property
    def password(self) -> str:
        return (self.home / "prefect" / "password").read_text()

    def api(
        self,
        path: str,
        body: dict | None = None,
        deadline: float | None = None,
        method: str | None = None,
        **headers: str,
    ) -> Any:
        """One request to Prefect, with the password unless other headers are given; a refused one raises ValueError
        with the server's words. Repeated where a busy database makes it answer 503, as Prefect's own clients do."""
        deadline = deadline or time.monotonic() + BUSY_SECONDS
        headers = headers or {"Authorization": f"Basic {base64.b64encode(self.password.encode()).decode()}"}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.ports[0]}/api/{path}",
            headers={"Content-Type": "application/json", **headers},
            data=None if body is None else json.dumps(body).encode(),
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.loads(answer.read() or "null")
        except urllib.error.HTTPError as error:
            if error.code == 503 and time.monotonic() < deadline:
                time.sleep(0.5)
                return self.api(path, body, deadline, method, **headers)
            raise ValueError(error.read().decode()) from None

    def start(self, deployment_name: str = "full-pipeline", **parameters: str) -> str:
        """Id of a new run of a deployment."""
        deployment = self.api(f"deployments/name/glm46/{deployment_name}")["id"]
        return self.api(
            f"deployments/{deployment}/create_flow_run", {"parameters": parameters, "enforce_parameter_schema": True}
        )["id"]

    def wait(self, flow_run: str, *states: str) -> dict[str, Any]:
        """The flow run once it is in one of the states."""
        deadline = time.monotonic() + FLOW_TIMEOUT_SECONDS
        while True:
            run = self.api(f"flow_runs/{flow_run}")
            if run["state_name"] in states:
                return run
            assert time.monotonic() < deadline, (run["state"], (self.home / "run" / "worker.log").read_text()[-3000:])
            time.sleep(0.5)
