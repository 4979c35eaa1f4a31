"""What an S3 server refuses is said in one sentence with the fix, and nothing is lost: wrong and expired credentials,
another region, a clock that is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request

import boto3
import pytest

from infra.child_process import die_with_parent, free_port
from infra.storage.open_store import open_store
from infra.storage.s3_errors import StoreRefusedError
from infra.storage.s3_store import S3Store
from tests.support.faulty_s3 import faulty
from tests.support.toy_steps import ensure, run_both, sum_numbers, write_numbers

POLICY = '{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"s3:*","Resource":"*"}]}'
NUM_OPEN_REQUESTS = 3
"""Before the server asks who is there: a user, its key, its policy."""


@pytest.fixture(scope="module")
def strict_server():
    """An S3 server that checks signatures: its URL, and a key that it knows."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        env={**os.environ, "INITIAL_NO_AUTH_ACTION_COUNT": str(NUM_OPEN_REQUESTS)},
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
    settings = {"endpoint_url": url, "region_name": "us-east-1"}
    iam = boto3.client("iam", aws_access_key_id="any", aws_secret_access_key="any", **settings)
    iam.create_user(UserName="glm46")
    key = iam.create_access_key(UserName="glm46")["AccessKey"]
    iam.put_user_policy(UserName="glm46", PolicyName="all", PolicyDocument=POLICY)
    known = {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"]}
    boto3.client(
        "s3", aws_access_key_id=key["AccessKeyId"], aws_secret_access_key=key["SecretAccessKey"], **settings
    ).create_bucket(Bucket="strict")
    yield url, known
    process.terminate()
    process.wait()


@pytest.mark.parametrize(
    ("wrong", "code"), [("AWS_SECRET_ACCESS_KEY", "SignatureDoesNotMatch"), ("AWS_ACCESS_KEY_ID", "InvalidAccessKeyId")]
)
def test_wrong_credentials_are_named_and_right_ones_work(wrong, code, strict_server, home, monkeypatch):
    url, known = strict_server
    for name, value in {**known, "AWS_ENDPOINT_URL_S3": url, "AWS_DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # it keeps the credentials that it was made with
    assert run_both(open_store("s3://strict/store", home))[1].record.total == sum(range(20))
    monkeypatch.setenv(wrong, "wrong")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    with pytest.raises(StoreRefusedError, match=rf"does not know these credentials \({code}\).*AWS_SECRET_ACCESS_KEY"):
        open_store("s3://strict/store", home)


def test_a_bucket_of_another_region_is_named_with_its_region(home, s3_server):
    boto3.client("s3").create_bucket(Bucket="far-away", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    with pytest.raises(
        StoreRefusedError,
        match="in region eu-west-1, AWS_DEFAULT_REGION is us-east-1: set AWS_DEFAULT_REGION to eu-west-1",
    ):
        open_store("s3://far-away/store", home)


@pytest.fixture
def refusing(home, s3_server, monkeypatch):
    """A store, and the code with which a proxy before it refuses every request at a path once it is set."""
    plan: dict[str, str] = {}

    def refusal(method: str, path: str) -> str:
        return next((code for place, code in plan.items() if place in path), "")

    with faulty(s3_server, refusal) as (url, _):
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", url)
        yield S3Store(f"s3://glm46/refused-{home.root.parent.name}", home), plan


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("ExpiredToken", r"the credential has expired \(ExpiredToken\); what is committed stays.*AWS_SESSION_TOKEN"),
        ("RequestTimeTooSkewed", r"clock differs too much from the server's.*what is committed stays.*NTP"),
        ("PermanentRedirect", r"in region eu-west-1, AWS_DEFAULT_REGION is us-east-1"),
    ],
)
def test_a_refusal_in_mid_run_loses_nothing(code, sentence, refusing):
    store, plan = refusing
    numbers = ensure(store, write_numbers)

    def sum_while_refused(**arguments):
        plan["/objects/"] = plan["/manifests/"] = plan["/leases/"] = code
        return sum_numbers.function(**arguments)

    broken = type(sum_numbers)(sum_while_refused, ("total.txt",), (), (), (), ())
    sum_while_refused.__name__ = "sum_numbers"
    with pytest.raises(StoreRefusedError, match=sentence):
        ensure(store, broken, numbers=numbers)
    plan.clear()
    computed: list[str] = []
    again, total = run_both(S3Store(store.uri, store.home), computed)
    assert (again.manifest, total.record.total, computed) == (numbers.manifest, sum(range(20)), ["sum_numbers"])


def test_a_download_that_is_refused_says_why_though_its_answer_has_no_body(refusing):
    store, plan = refusing
    numbers = ensure(store, write_numbers)
    numbers.path("log.txt").unlink()
    plan["objects/"] = plan["?list-type"] = "ExpiredToken"
    with pytest.raises(StoreRefusedError, match="expired"):
        S3Store.local_path(store, numbers.manifest, "log.txt")
