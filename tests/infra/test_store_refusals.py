"""What an S3 server refuses is said in one sentence with the fix, and nothing is lost: wrong and expired credentials,
another region, a clock that is wrong."""

from __future__ import annotations

import subprocess

import boto3
import pytest
from botocore.exceptions import BotoCoreError
from typer.testing import CliRunner

from configs.files.s3_refusals import StoreRefusedError
from flows.cli.command import app
from infra.home import open_home
from infra.storage import s3_store
from infra.storage.garbage import find_garbage
from infra.storage.manifest_store import CorruptArtifactError
from infra.storage.open_store import open_known_store, open_store
from infra.storage.s3_store import S3Store
from tests.support.cluster.small_disk import small_disk
from tests.support.cluster.strict_s3 import REGION, strict_server
from tests.support.faulty_s3 import Request, faulty
from tests.support.toy_steps import ensure, run_both, sum_numbers, write_numbers


@pytest.fixture(scope="module")
def strict():
    with strict_server() as server:
        yield server


@pytest.mark.parametrize(
    ("wrong", "code"), [("AWS_SECRET_ACCESS_KEY", "SignatureDoesNotMatch"), ("AWS_ACCESS_KEY_ID", "InvalidAccessKeyId")]
)
def test_wrong_credentials_are_named_and_right_ones_work(wrong, code, strict, home, monkeypatch):
    for name, value in {**strict.credentials, "AWS_ENDPOINT_URL_S3": strict.url, "AWS_DEFAULT_REGION": REGION}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # it keeps the credentials that it was made with
    assert run_both(open_store("s3://glm46/store", home))[1].record.total == sum(range(20))
    monkeypatch.setenv(wrong, "wrong")
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    with pytest.raises(StoreRefusedError, match=rf"does not know these credentials \({code}\).*AWS_SECRET_ACCESS_KEY"):
        open_store("s3://glm46/store", home)


def test_a_bucket_of_another_region_is_named_with_its_region(home, s3_server):
    boto3.client("s3").create_bucket(Bucket="far-away", CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
    with pytest.raises(
        StoreRefusedError,
        match="in region eu-west-1, AWS_DEFAULT_REGION is us-east-1: set AWS_DEFAULT_REGION to eu-west-1",
    ):
        open_store("s3://far-away/store", home)


def test_a_known_store_is_opened_without_the_right_to_write_and_a_mistyped_one_is_none(home, s3_server, monkeypatch):
    uri, written = f"s3://glm46/read-{home.root.parent.name}", []
    numbers = ensure(open_store(uri, home), write_numbers)

    def refusal(request: Request) -> str:
        if request.method in ("GET", "HEAD"):
            return ""
        written.append(request.path)
        return "ExpiredToken"

    with faulty(s3_server, refusal) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.url)
        assert open_known_store(uri, home).read_manifest(numbers.key) == numbers.manifest
        with pytest.raises(ValueError, match=f"{uri}-typo is no store: name the one that the runs were made with"):
            open_known_store(f"{uri}-typo", home)
    assert not written


def test_a_home_and_a_store_on_a_read_only_disk_are_read_and_what_is_damaged_there_is_named(tmp_path, monkeypatch):
    disk = tmp_path / "disk"
    monkeypatch.setenv("GLM46_HOME", str(disk / "home"))
    with small_disk(disk, 4000):
        home = open_home()
        numbers = ensure(open_store(None, home), write_numbers)
        damaged = numbers.path("numbers/part-00001.txt")
        damaged.write_text(damaged.read_text().replace("0", "1"))
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        for uri in (None, str(home.store_dir)):
            known = open_known_store(uri, home)
            assert known.read_manifest(numbers.key) == numbers.manifest
            assert len(find_garbage(known, 0, is_cache_free=True).leases) == 1
            assert known.local_path(numbers.manifest, "log.txt").is_file()
            with pytest.raises(CorruptArtifactError, match=r"part-00001.*cannot be marked .*Read-only.*doctor --deep"):
                known.local_path(numbers.manifest, "numbers/part-00001.txt")
        for command in (("jobs", "list"), ("checkpoint", "list")):
            assert CliRunner().invoke(app, command).exit_code == 0
        refused = CliRunner().invoke(app, ["rollback", "--reason", "worse"])
        assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)


def test_reading_a_store_in_a_directory_writes_nothing(home):
    numbers = ensure(open_store(None, home), write_numbers)

    def times() -> dict[str, int]:
        return {str(path): path.stat().st_mtime_ns for path in (home.root, *home.root.rglob("*"))}

    before, known = times(), open_known_store(None, home)
    assert known.read_manifest(numbers.key) == numbers.manifest
    find_garbage(known, 0, is_cache_free=True)
    assert times() == before


@pytest.fixture
def refusing(home, s3_server, monkeypatch):
    """A store, and the code with which a proxy before it refuses every request at a path once it is set."""
    plan: dict[str, str] = {}

    def refusal(request: Request) -> str:
        return next((code for place, code in plan.items() if place in request.path), "")

    with faulty(s3_server, refusal) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.url)
        yield S3Store(f"s3://glm46/refused-{home.root.parent.name}", home), plan


@pytest.fixture
def few_tries(monkeypatch):
    """Of a request: eight take ten seconds."""
    monkeypatch.setattr(s3_store, "MAX_ATTEMPTS", 1)


@pytest.mark.usefixtures("few_tries")
@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("reset", r"s3://glm46: the server \S+ does not answer host \S+ \(.*\); what is committed stays.*: start it"),
        ("ExpiredToken", r"the credential has expired \(ExpiredToken\); what is committed stays.*AWS_SESSION_TOKEN"),
        ("RequestTimeTooSkewed", r"clock differs too much from the server's.*what is committed stays.*NTP"),
        ("PermanentRedirect", r"in region eu-west-1, AWS_DEFAULT_REGION is us-east-1"),
    ],
)
def test_a_refusal_or_a_dead_server_in_mid_run_loses_nothing(code, sentence, refusing):
    store, plan = refusing
    numbers = ensure(store, write_numbers)

    def sum_while_refused(**arguments):
        plan["/objects/"] = plan["/manifests/"] = plan["/leases/"] = code
        return sum_numbers.function(**arguments)

    broken = type(sum_numbers)(sum_while_refused, ("total.txt",), (), (), (), ())
    sum_while_refused.__name__ = "sum_numbers"
    with pytest.raises((StoreRefusedError, BotoCoreError), match=sentence):
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
