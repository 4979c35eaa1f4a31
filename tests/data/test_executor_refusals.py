"""What a store refuses to executors, and parts that somebody changed or removed, are said in one sentence; the next run
continues from what was committed."""

from __future__ import annotations

from dataclasses import dataclass

import boto3
import pytest

from configs.files.s3_objects import s3_client
from flows.running.computation import Computation
from infra.home import Home
from infra.machine.spark import stop_spark
from infra.step import Artifact, Step
from infra.storage.s3_store import S3Store
from tasks.data.extraction.extract_documents import extract_documents
from tasks.data.sources.ingest_documents import ingest_documents
from tasks.data.sources.list_sources import list_sources
from tests.support.data_inputs import RECIPE, RESOURCES, write_corpus
from tests.support.faulty_s3 import Request, faulty

NUM_DOCUMENTS = 12


@dataclass
class Refusing:
    """A bucket, and the code with which executors are refused its parts; an empty one is none."""

    code: str = ""

    def plan(self, request: Request) -> str:
        """Only executors read and write parts."""
        return self.code if "/documents/part-" in request.path else ""


@pytest.fixture(scope="module")
def refusing(s3_server):
    """Executors of this module go through a proxy."""
    refusing = Refusing()
    with faulty(s3_server, refusing.plan) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL_S3", server.url)
        stop_spark()
        s3_client.cache_clear()
        yield refusing
        stop_spark()
        s3_client.cache_clear()


@pytest.fixture
def compute(refusing, tmp_path):
    """Computes a step as a run does, in a bucket; gives the artifact and whether it was there."""
    store = S3Store(f"s3://glm46/{tmp_path.name}", Home(tmp_path / "home"))

    def compute(step: Step, recipe, **inputs) -> tuple[Artifact, bool]:
        return Computation(step, inputs, recipe, RESOURCES).find_or_run(store, lambda *_: None, lambda _: None)

    return compute


@pytest.fixture
def records(compute, tmp_path):
    (tmp_path / "corpus").mkdir()
    write_corpus(tmp_path / "corpus", NUM_DOCUMENTS)
    sources = list_sources(tmp_path / "corpus")
    return lambda: compute(ingest_documents, RECIPE.ingest, sources=sources)


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("ExpiredToken", r"s3://glm46 refuses host \S+: the credential has expired .*what is committed stays"),
        ("RequestTimeTooSkewed", r"refuses host \S+: that host's clock differs too much .*is committed stays.*NTP"),
        ("PermanentRedirect", r"bucket is in region eu-west-1, AWS_DEFAULT_REGION is us-east-1: set"),
    ],
)
def test_what_executors_are_refused_in_mid_run_is_one_sentence_and_loses_nothing(
    code, sentence, refusing, compute, records
):
    ingested, _ = records()
    refusing.code = code
    with pytest.raises(ValueError, match=sentence) as refused:
        compute(extract_documents, RECIPE.extract, records=ingested)
    assert "\n" not in str(refused.value)
    refusing.code = ""
    assert records()[1]
    compute(extract_documents, RECIPE.extract, records=ingested)


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_part_that_was_changed_or_removed_in_the_bucket_is_named_and_made_anew(is_removed, compute, records):
    ingested, _ = records()
    client, name = boto3.client("s3"), "documents/part-00000.parquet"
    place = dict(zip(("Bucket", "Key"), ingested.file(name).uri.removeprefix("s3://").split("/", 1), strict=True))
    data = bytearray(client.get_object(**place)["Body"].read())
    data[len(data) // 2] ^= 1
    if is_removed:
        client.delete_object(**place)
    else:
        client.put_object(**place, Body=bytes(data))
    with pytest.raises(ValueError, match=rf"{name} is corrupt: .*Run again") as corrupt:
        compute(extract_documents, RECIPE.extract, records=ingested)
    assert "\n" not in str(corrupt.value)
    again, was_there = records()
    assert not was_there and again.digest == ingested.digest and again.manifest.generation == 1
    compute(extract_documents, RECIPE.extract, records=again)
