"""The whole data flow on a real standalone Spark cluster: the digests of a local session, also when a worker is killed
in mid-job."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import threading
import time

import pytest

from configs.schema import SparkResources
from infra.machine.spark import _zip_packages, stop_spark
from infra.storage.manifest_store import CorruptArtifactError
from tasks.data.extraction.extract_documents import extract_documents
from tasks.data.sources.ingest_documents import ingest_documents
from tasks.data.sources.list_sources import list_sources
from tasks.data.text.words import split_words
from tests.conftest import ROOT
from tests.data.test_chain import run_chain
from tests.support.cluster.spark_cluster import spark_cluster
from tests.support.data_inputs import RECIPE, RESOURCES, compute, write_corpus, write_packages


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    directory = tmp_path_factory.mktemp("corpus")
    write_corpus(directory)
    write_packages(directory)
    return list_sources(directory)


def digests(sources, root, resources) -> dict[str, str]:
    """Of every step from the sources to the token shards."""
    return {name: artifact.digest for name, artifact in run_chain(sources, root, resources).items()}


@pytest.fixture(scope="module")
def local(sources, tmp_path_factory):
    return digests(sources, tmp_path_factory.mktemp("local"), RESOURCES)


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
