"""The one Spark session of a process: started on first use from `SparkResources`, stopped by `stop_spark`.

It is quiet and has no UI. Executors on other machines get the project's executor-side packages as a zip and run
the Python that PYSPARK_PYTHON names; a local master imports them in place with this Python. Shuffles, sockets, native
libraries and Spark's log are in a directory of this process below the home's work/, removed with the session. The
directory of a process that was killed is removed when the next session starts.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import psutil
from filelock import FileLock, Timeout

from configs.machine import SOURCE_SUFFIXES
from infra.code_digest import ROOT
from infra.file_lock import file_lock
from infra.home import open_home
from infra.machine.doctor import check_java, require
from infra.storage.object_store import SHARED_VARIABLES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from configs.schema import SparkResources

STOP_TIMEOUT_SECONDS = 30
SHIPPED_PACKAGES = ("tasks", "model", "configs", "data_contracts")
ARROW_BATCH_RECORDS = 4096
ARROW_BATCH_BYTES = 8 * 2**20
"""Bounds of one Arrow batch for a Python worker. Each task holds a small multiple of it outside Java's heap: with 64
MiB, 280,000 documents on two tasks took 0.4 GB more."""
PARQUET_BATCH_ROWS = 256
"""Rows that a task reads at once: web pages have 100 KB and more, and Spark's 4,096 of them ended a process with 1 GB
of heap."""
SMALLEST_SPLIT_BYTES = 2**18
"""Smallest part of a file that a task reads where several tasks share it. With Spark's 4 MiB one core would read a
corpus of 10 MB of text."""
LOCAL_SETTINGS = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
    "spark.python.daemon.module": "infra.machine.python_daemon",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}
"""On a local master there are many short jobs and Python workers do the work, so compiling costs more than it gains:
start-up and first jobs take 15 s instead of 24 s without the optimizing compiler, ingest and deduplication of 7 MB 17 s
instead of 31 s without generated code (2 cores)."""

DIRECTORY_PREFIX = "spark-"

_lock = threading.Lock()
_session: SparkSession | None = None
_started_with: tuple[str, str, str] | None = None
_num_users = 0
_is_to_stop = False
_directory: tuple[Path, FileLock] | None = None
"""The process's directory and the lock in it, which shows that the process runs."""


def spark_session(resources: SparkResources) -> SparkSession:
    """The process's session; another master or memory replaces it. Raises ValueError if Java is missing or Spark does
    not start."""
    global _session, _started_with
    wanted = (resources.master, resources.driver_memory, resources.executor_memory)
    with _lock:
        if _session is not None and _started_with != wanted:
            _stop()
        if _session is None:
            require(check_java())
            _session = _start(resources, _own_directory())
            _started_with = wanted
        _session.conf.set("spark.sql.shuffle.partitions", str(resources.shuffle_partitions))
        return _session


@contextmanager
def spark_in_use() -> Iterator[None]:
    """While the block runs, `stop_spark` of another thread leaves the session, which ends with the last such block."""
    global _num_users, _is_to_stop
    with _lock:
        _num_users += 1
    try:
        yield
    finally:
        with _lock:
            _num_users -= 1
            if _is_to_stop and not _num_users:
                _stop()


def stop_spark() -> None:
    """Stop the process's session, if there is one, as soon as no thread uses it."""
    global _is_to_stop
    with _lock:
        _is_to_stop = _num_users > 0
        if not _is_to_stop:
            _stop()


def _stop() -> None:
    """Ends the Java process too: its memory is the training's."""
    global _session, _started_with, _is_to_stop
    _is_to_stop = False
    if _session is None:
        _remove_directory()
        return
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    _session.stop()
    _session = None
    _started_with = None
    if gateway is not None:
        gateway.shutdown()
        SparkContext._gateway = SparkContext._jvm = None
        process = gateway.proc  # pyright: ignore[reportAttributeAccessIssue]
        assert process is not None and process.stdin is not None
        process.stdin.close()
        process.wait(STOP_TIMEOUT_SECONDS)
    _remove_directory()


def _own_directory() -> Path:
    """The directory of this process, made if there is none; those of processes that have ended are removed."""
    global _directory
    if _directory is None:
        home = open_home()
        with file_lock(home.run_dir / "spark.lock"):
            for path in home.work_root.glob(f"{DIRECTORY_PREFIX}*"):
                _remove_abandoned(path)
            path = Path(tempfile.mkdtemp(prefix=DIRECTORY_PREFIX, dir=home.work_root))
            _directory = (path, _lock_of(path))
            _directory[1].acquire()
        atexit.register(_remove_directory)
    return _directory[0]


def _remove_abandoned(path: Path) -> None:
    try:
        with _lock_of(path).acquire(blocking=False):
            shutil.rmtree(path, ignore_errors=True)
    except (Timeout, FileNotFoundError):
        return  # its process runs, or has just removed it


def _lock_of(path: Path) -> FileLock:
    """Held by the process that a directory belongs to."""
    return file_lock(path / "lock")


def _remove_directory() -> None:
    global _directory
    if _directory is not None:
        path, lock = _directory
        _directory = None
        shutil.rmtree(path, ignore_errors=True)
        lock.release()


def _start(resources: SparkResources, directory: Path) -> SparkSession:
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    if resources.is_local or "PYSPARK_PYTHON" not in os.environ:
        os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    log_path = directory / "spark.log"
    builder = SparkSession.builder.appName("glm46")
    for key, value in _settings(resources, directory).items():
        builder = builder.config(key, value)
    try:
        with _standard_error_to(log_path), _ending_java(directory):
            session = builder.getOrCreate()
    except (Py4JError, PySparkException, RuntimeError, OSError) as error:
        said = log_path.read_text(errors="replace").splitlines() if log_path.exists() else []
        tail = " | ".join([line for line in said if not line.startswith("\tat ")][-5:])
        raise ValueError(
            f"Spark did not start on master {resources.master} ({error}): check data.resources; its log ended in: "
            f"{tail}"
        ) from error
    if not resources.is_local:
        session.sparkContext.addPyFile(str(_zip_packages(directory)))
    return session


def _settings(resources: SparkResources, directory: Path) -> dict[str, str]:
    (directory / "log4j2.properties").write_text(
        "rootLogger.level = error\nrootLogger.appenderRef.stderr.ref = stderr\nappender.stderr.type = Console\n"
        "appender.stderr.name = stderr\nappender.stderr.target = SYSTEM_ERR\nappender.stderr.layout.type = "
        "PatternLayout\n"
        "appender.stderr.layout.pattern = %d %p %c: %m%n%ex\n"
    )
    # Spark guesses that what is read from a list of files is as small as the list: it would send whole corpora to the
    # driver and from there to all executors. Steps say what is small (F.broadcast).
    settings = {
        "spark.master": resources.master,
        "spark.driver.memory": resources.driver_memory,
        "spark.executor.memory": resources.executor_memory,
        # Where the JVM keeps its temporary files is also where a driver shuffles; executors on other machines use the
        # directory that is set there.
        "spark.driver.extraJavaOptions": (
            f"-Djava.io.tmpdir={quote(str(directory))} "
            f"-Dlog4j2.configurationFile={directory.as_uri()}/log4j2.properties"
        ),
        "spark.log.level": "ERROR",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.sql.catalogImplementation": "in-memory",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": str(resources.shuffle_partitions),
        "spark.sql.parquet.columnarReaderBatchSize": str(PARQUET_BATCH_ROWS),
        "spark.sql.files.openCostInBytes": str(SMALLEST_SPLIT_BYTES),
        "spark.sql.execution.arrow.maxRecordsPerBatch": str(ARROW_BATCH_RECORDS),
        "spark.sql.execution.arrow.maxBytesPerBatch": str(ARROW_BATCH_BYTES),
        "spark.sql.autoBroadcastJoinThreshold": "-1",
        "spark.network.timeout": "120s",
        "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled": "true",
    }
    settings |= {f"spark.executorEnv.{name}": os.environ[name] for name in SHARED_VARIABLES if name in os.environ}
    if resources.is_local:
        options = f"{settings['spark.driver.extraJavaOptions']} {LOCAL_SETTINGS['spark.driver.extraJavaOptions']}"
        settings |= {**LOCAL_SETTINGS, "spark.driver.extraJavaOptions": options}
    return settings


@contextmanager
def _ending_java(directory: Path) -> Iterator[None]:
    """Where PySpark is interrupted while it waits for Java's address, it removes the file for that address: Java then
    fails to write it and never ends. So it is killed here."""
    from pyspark import SparkContext

    try:
        yield
    except BaseException:
        if SparkContext._gateway is None:
            for child in psutil.Process().children():
                with suppress(psutil.NoSuchProcess):
                    if str(directory) in " ".join(child.cmdline()):
                        child.kill()
        raise


@contextmanager
def _standard_error_to(path: Path) -> Iterator[None]:
    """The Java process inherits this file as its standard error: its start-up notices stay out of the terminal."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(path, "ab") as log:
        os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _zip_packages(directory: Path) -> Path:
    """SHIPPED_PACKAGES as a zip that executors put on their path, with the sources of what they compile."""
    path = directory / "glm46-executor.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for package in SHIPPED_PACKAGES:
            for file in sorted((ROOT / package).rglob("*")):
                if file.suffix in (".py", *SOURCE_SUFFIXES):
                    archive.write(file, file.relative_to(ROOT).as_posix())
    return path
