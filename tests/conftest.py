"""What the tests share: a home of their own, toy steps, a real S3 server."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

os.environ.update(
    {
        "GX_ANALYTICS_ENABLED": "false", "MLFLOW_DISABLE_TELEMETRY": "true", "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
)  # fmt: skip

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A fresh GLM46_HOME."""
    from infra.home import open_home

    monkeypatch.setenv("GLM46_HOME", str(tmp_path / "home"))
    return open_home()


@pytest.fixture(scope="session")
def s3_server():
    """A real S3 server over HTTP (moto_server), with one bucket `glm46`; its environment is set while the session lasts."""
    import boto3

    from infra.child_process import die_with_parent, free_port

    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=die_with_parent,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    for _ in range(300):
        try:
            urllib.request.urlopen(f"{url}/moto-api/", timeout=1)
            break
        except OSError:
            time.sleep(0.1)
    settings = {
        "AWS_ENDPOINT_URL_S3": url, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="glm46")
        yield url
    process.terminate()
    process.wait()
