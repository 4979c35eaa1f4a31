"""A real S3 server that checks signatures (moto_server with IAM), with one bucket `glm46` and one user."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from infra.child_process import die_with_parent, free_port

REGION = "us-east-1"
POLICY = '{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"s3:*","Resource":"*"}]}'
NUM_OPEN_REQUESTS = 3
"""Before the server asks who is there: a user, its key, its policy."""


@dataclass(frozen=True)
class StrictServer:
    """Its URL, and the environment of a client that it knows."""

    url: str
    credentials: dict[str, str]


@contextmanager
def strict_server() -> Iterator[StrictServer]:
    """Start the server and stop it."""
    import boto3

    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        env={**os.environ, "INITIAL_NO_AUTH_ACTION_COUNT": str(NUM_OPEN_REQUESTS)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=die_with_parent,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        _await_server(url)
        settings = {"endpoint_url": url, "region_name": REGION}
        iam = boto3.client("iam", aws_access_key_id="any", aws_secret_access_key="any", **settings)
        iam.create_user(UserName="glm46")
        key = iam.create_access_key(UserName="glm46")["AccessKey"]
        iam.put_user_policy(UserName="glm46", PolicyName="all", PolicyDocument=POLICY)
        identifier, secret = key["AccessKeyId"], key["SecretAccessKey"]
        client = boto3.client("s3", aws_access_key_id=identifier, aws_secret_access_key=secret, **settings)
        client.create_bucket(Bucket="glm46")
        yield StrictServer(url, {"AWS_ACCESS_KEY_ID": identifier, "AWS_SECRET_ACCESS_KEY": secret})
    finally:
        process.terminate()
        process.wait()


def _await_server(url: str) -> None:
    for _ in range(300):
        try:
            urllib.request.urlopen(f"{url}/moto-api/", timeout=1)
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError(f"no S3 server at {url} after 30 s")
