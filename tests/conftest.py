"""What the tests share: a home of their own, toy steps, a real S3 server."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest

from infra.home import Home

os.environ.update(
    {
        "GX_ANALYTICS_ENABLED": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "GLM46_HOME": tempfile.mkdtemp(prefix="glm46-tests-"),  # of tests that name no home: Spark's files go below one
    }
)
atexit.register(shutil.rmtree, os.environ["GLM46_HOME"], ignore_errors=True)

ROOT = Path(__file__).resolve().parent.parent
_ARITHMETIC_VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_CBWR", "OMP_NUM_THREADS")


def pytest_report_header() -> str:
    """What decides the order of sums here."""
    return arithmetic()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What a failure may hang on, below the failures."""
    if terminalreporter.stats.get("failed"):
        terminalreporter.write_line(arithmetic())


def arithmetic() -> str:
    """Processor, instruction sets and the variables that limit them."""
    import torch

    from configs.machine import this_machine

    limits = " ".join(f"{name}={os.environ[name]}" for name in _ARITHMETIC_VARIABLES if name in os.environ)
    return f"arithmetic: {this_machine()}; torch {torch.backends.cpu.get_cpu_capability()}; {limits}"


@pytest.fixture
def clear_routing():
    """Fails a test in which rounding could have chosen an expert (tests/support/router_margins.py); its random numbers
    are its own."""
    import torch

    from tests.support import router_margins

    torch.manual_seed(46)
    with router_margins.clear_routing():
        yield


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A fresh GLM46_HOME."""
    from infra.home import open_home

    monkeypatch.setenv("GLM46_HOME", str(tmp_path / "home"))
    return open_home()


@pytest.fixture(scope="session")
def s3_server():
    """A real S3 server over HTTP (moto_server), with one bucket `glm46`; its environment is set while the session
    lasts."""
    import boto3

    from infra.child_process import die_with_parent, free_port

    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=die_with_parent,
    )
    url = f"http://127.0.0.1:{port}"
    for _ in range(300):
        try:
            urllib.request.urlopen(f"{url}/moto-api/", timeout=1)
            break
        except OSError:
            time.sleep(0.1)
    settings = {
        "AWS_ENDPOINT_URL_S3": url,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="glm46")
        yield url
    process.terminate()
    process.wait()


@dataclass(frozen=True)
class MlflowServer:
    """A running server and the home whose artifacts it serves."""

    uri: str
    home: Home


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory):
    """`mlflow server` as a user would start it; it takes half a minute, so once per session."""
    from infra.child_process import die_with_parent, free_port
    from infra.registry.experiment_tracking import connect

    home = Home(tmp_path_factory.mktemp("mlflow-server"))
    (home.mlflow_dir / "artifacts").mkdir(parents=True)
    uri = f"http://127.0.0.1:{free_port()}"
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--host",
        "127.0.0.1",
        "--port",
        uri.rsplit(":", 1)[1],
        "--workers",
        "1",
        "--serve-artifacts",
        "--backend-store-uri",
        f"sqlite:///{home.mlflow_dir}/mlflow.db",
        "--artifacts-destination",
        str(home.mlflow_dir / "artifacts"),
    ]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with open(home.mlflow_dir / "server.log", "wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, preexec_fn=die_with_parent, start_new_session=True
        )
    deadline = time.monotonic() + 180
    while True:
        try:
            connect(uri)
            break
        except ValueError:
            assert process.poll() is None and time.monotonic() < deadline, (home.mlflow_dir / "server.log").read_text()
            time.sleep(0.2)
    yield MlflowServer(uri, home)
    os.killpg(process.pid, 15)
    process.wait()
