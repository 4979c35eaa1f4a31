"""The whole data flow on a real standalone Spark cluster: the digests of a local session, also when a worker is killed
in mid-job."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import threading
import time
from contextlib import contextmanager

import pytest
from botocore.client import BaseClient

from configs.schema import ContractRecipe, RepositoryRecipe, SparkResources
from infra.home import Home
from infra.machine.spark import _zip_packages, stop_spark
from infra.storage.manifest_store import CorruptArtifactError
from infra.storage.s3_store import S3Store
from infra.storage.store import Store
from tasks.data.extraction.extract_documents import extract_documents
from tasks.data.repositories.concatenate_repositories import concatenate_repositories
from tasks.data.shards.shard_documents import shard_documents
from tasks.data.sources.ingest_documents import ingest_documents
from tasks.data.sources.list_sources import list_sources
from tasks.data.text.words import split_words
from tasks.data.tokenizer.train_tokenizer import train_tokenizer
from tasks.data.validate_contract import MAX_LOCAL_BYTES, validate_contract
from tests.conftest import ROOT
from tests.data.test_chain import CHAIN_RECIPE, TOKENIZER
from tests.support.cluster.spark_cluster import spark_cluster
from tests.support.data_inputs import RECIPE, RESOURCES, cleaned, compute, compute_in, write_corpus, write_packages


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    directory = tmp_path_factory.mktemp("corpus")
    write_corpus(directory)
    write_packages(directory)
    return list_sources(directory)


def digests(sources, root, resources, run=compute) -> dict[str, str]:
    """Of every step from the sources to the token shards."""
    spark = {"resources": resources}
    artifacts = cleaned(sources, root, CHAIN_RECIPE, resources, run)
    clean = artifacts["decontaminated"]
    tokenizer = run(train_tokenizer, root, documents=clean, recipe=TOKENIZER, **spark)
    repositories = run(
        concatenate_repositories, root, documents=clean, recipe=RepositoryRecipe(max_document_chars=20000), **spark
    )
    texts = {"documents": clean, "repositories": repositories, "tokenizer": tokenizer}
    shards = run(shard_documents, root, recipe=RECIPE.shards, **texts, **spark)
    contract = ContractRecipe(name="decontaminated")
    run(
        validate_contract,
        root,
        subject=clean,
        recipe=contract,
        data_files=("data_contracts/decontaminated.yaml",),
        **spark,
    )
    made = {**artifacts, **texts, "shards": shards}
    return {name: artifact.digest for name, artifact in made.items()}


@pytest.fixture(scope="module")
def local(sources, tmp_path_factory):
    return digests(sources, tmp_path_factory.mktemp("local"), RESOURCES)


def on_s3(store: Store):
    """Computes in a bucket: executors and this process have no directory in common."""
    return lambda step, root, **arguments: compute_in(store, step, **arguments)


@contextmanager
def requests_of_this_process():
    """(operation, key) of the requests that this process makes while the block runs."""
    made, call = [], BaseClient._make_api_call

    def recorded(client, operation, arguments):
        made.append((operation, arguments.get("Key", "")))
        return call(client, operation, arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BaseClient, "_make_api_call", recorded)
        yield made


def test_the_driver_opens_no_part_of_a_store_in_s3(s3_server, sources, local, tmp_path):
    """Executors read and write the bucket themselves, and every step has the digests of a local directory."""
    stop_spark()  # a session that was started before the server knows no endpoint
    home = Home(tmp_path / "home")
    store = S3Store("s3://glm46/data-plane", home)
    with requests_of_this_process() as requests:
        assert digests(sources, tmp_path, RESOURCES, on_s3(store)) == local
    parts = re.compile(r"/(documents|evaluation|signatures|shards|rounds|compared)/")
    tables = re.compile(r"/(dropped|members|files|masked)\.parquet$")
    sizes = {key: store._size(key.removeprefix("data-plane/")) for _, key in requests if parts.search(key)}
    assert not {(operation, key) for operation, key in requests if key in sizes and operation != "PutObject"}
    # Tables without rows, which no task writes, and the problems that the driver makes.
    assert all(size < 65536 for size in sizes.values()), sizes
    read = {key for operation, key in requests if tables.search(key) and operation != "PutObject"}
    # A contract's table of one small file is checked by the driver.
    assert all(store._size(key.removeprefix("data-plane/")) <= MAX_LOCAL_BYTES for key in read)


def test_a_part_that_changed_after_its_commit_is_named_and_made_anew(tmp_path):
    """By the executor that reads it: the driver looks at sizes only."""
    (tmp_path / "corpus").mkdir()
    write_corpus(tmp_path / "corpus", 12)
    sources, spark = list_sources(tmp_path / "corpus"), {"resources": RESOURCES}
    records = compute(ingest_documents, tmp_path, sources=sources, recipe=RECIPE.ingest, **spark)
    part = records.path("documents/part-00000.parquet")
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    with pytest.raises(CorruptArtifactError, match=r"part-00000\.parquet is corrupt: .*Run again"):
        compute(extract_documents, tmp_path, records=records, recipe=RECIPE.extract, **spark)
    again = compute(ingest_documents, tmp_path, sources=sources, recipe=RECIPE.ingest, **spark)
    assert again.digest == records.digest and again.manifest.generation == 1
    compute(extract_documents, tmp_path, records=again, recipe=RECIPE.extract, **spark)


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Its session is stopped first, then the cluster."""
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    stop_spark()
    with spark_cluster(tmp_path) as started:
        yield started
        stop_spark()


def on_cluster(cluster) -> SparkResources:
    return SparkResources(master=cluster.master, driver_memory="1g", executor_memory="600m", shuffle_partitions=3)


@pytest.mark.long
def test_the_data_flow_on_a_cluster_has_the_digests_of_a_local_session(cluster, sources, local, tmp_path):
    assert digests(sources, tmp_path / "cluster", on_cluster(cluster)) == local
    assert cluster.num_alive_workers() == 2


@pytest.mark.long
def test_a_worker_killed_in_mid_job_changes_no_digest(cluster, sources, local, tmp_path):
    killed: list[float] = []

    def kill_when_busy():
        """Half a second after the third step has been committed, when a later one is at work."""
        while len(list((tmp_path / "cluster").rglob("manifests/*.json"))) < 3:
            time.sleep(0.05)
        time.sleep(0.5)
        cluster.kill_worker(0)
        killed.append(time.monotonic())

    threading.Thread(target=kill_when_busy, daemon=True).start()
    distributed = digests(sources, tmp_path / "cluster", on_cluster(cluster))
    assert killed and killed[0] < time.monotonic() and distributed == local
    assert cluster.workers[0].poll() is not None and cluster.workers[1].poll() is None


def test_what_executors_are_shipped_imports_without_the_project(tmp_path):
    """On other machines only the zip is there: no other package of the project, no file beside a module."""
    archive = _zip_packages(tmp_path)
    shipped = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted((ROOT / "tasks" / "data").rglob("*.py"))
        if re.search(r"Runs in\s+executors|inside Spark executors", path.read_text(encoding="utf-8"))
    ]
    assert len(shipped) > 10
    code = (
        "import importlib, sys; sys.path[:0] = sys.argv[1:3]\n"
        "for name in sys.argv[3:]: assert importlib.import_module(name).__file__.startswith(sys.argv[1]), name"
    )
    # -S: no .pth file, through which the project itself is installed.
    command = [sys.executable, "-S", "-c", code, str(archive), sysconfig.get_paths()["purelib"], *shipped]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_executors_are_shipped_compiles_and_cuts_the_same_words(tmp_path):
    texts = ["Shipped words: 12 + 7 = 19!", "人工智能 and more"]
    code = (
        "import sys; from pathlib import Path; sys.path[:0] = sys.argv[1:3]\n"
        "import configs.machine; configs.machine.NATIVE_ROOT = Path(sys.argv[3])\n"
        "from tasks.data.text import words; assert words.__file__.startswith(sys.argv[1])\n"
        f"print(words.split_words({texts!r}).hashes.tolist())"
    )
    folders = [str(_zip_packages(tmp_path)), sysconfig.get_paths()["purelib"], str(tmp_path / "native")]
    command = [sys.executable, "-S", "-c", code, *folders]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == f"{split_words(texts).hashes.tolist()}\n", done.stderr
    assert list((tmp_path / "native").rglob("words-*.so"))
