"""Checks what can be missing on a machine, each with the fix; `glm46 doctor` prints all, a run needs those it uses."""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from configs.machine import describe_missing, this_machine
from infra.child_process import take_port
from infra.code_digest import ROOT
from infra.disk_space import temporary_dir
from infra.home import Home
from infra.servers.databases import Database, databases, find_problem
from infra.servers.recorded_servers import PORTS, WORKER, ended_servers, read_servers_file, worker_lives
from infra.servers.server_answers import silent_servers
from infra.step import Manifest
from infra.storage.manifest_store import CorruptManifestError
from infra.storage.open_store import open_known_store, open_store
from infra.storage.parallel import map_in_threads
from infra.storage.store import Store

REQUIRED_JAVA = 17
MIN_FREE_BYTES = 2 << 30
MIN_TEMPORARY_BYTES = 1 << 28
MIN_MEMORY_BYTES = 3 << 30
"""`run tiny` used 2.3 GiB."""
CONNECT_TIMEOUT_SECONDS = 5
MAX_SAID_CHARS = 400
"""Most characters of what another program says of its failure."""
SCHEDULER_COMMANDS = {
    "slurm": ("sbatch", "scontrol", "scancel"),
    "pbs": ("qsub", "qstat", "qdel"),
    "kubernetes": ("kubectl",),
    "ssh": ("ssh",),
}


@dataclass(frozen=True)
class Check:
    """The result of one check; `fix` is empty where nothing is to be done."""

    name: str
    passed: bool
    found: str
    fix: str


def check_machine(home: Home) -> list[Check]:
    """Python, packages, Java, compiler, Python headers, memory, disk space, databases and servers."""
    python, packages, compiler, headers = check_environment()
    machine = [python, packages, check_java(), compiler, headers, _memory()]
    machine += [_disk(home.root, "GLM46_HOME", MIN_FREE_BYTES), _temporary_disk()]
    return [*machine, *map(_database, databases(home)), *_servers(home)]


def check_environment() -> list[Check]:
    """What every machine with ranks needs: Python, its packages, a compiler, Python's headers."""
    return [_python(), _packages(), check_compiler(), _python_headers()]


def check_launchers(launchers: Iterable[str]) -> list[Check]:
    """The commands of each scheduler that a scale asks for; the local launcher needs none."""
    checks = []
    for launcher in sorted(set(launchers) - {"local"}):
        missing = [command for command in SCHEDULER_COMMANDS[launcher] if shutil.which(command) is None]
        fix = f"run on a machine that submits to {launcher}, or set resources.launcher to local"
        checks.append(
            Check(
                launcher, not missing, f"no {', '.join(missing)}" if missing else "its commands", fix if missing else ""
            )
        )
    return checks


def check_java() -> Check:
    """Spark needs Java 17 or later, from JAVA_HOME or the PATH, and a user with a name."""
    try:
        pwd.getpwuid(os.geteuid())
    except KeyError:
        named = "name it in /etc/passwd, or start the container as a user of its image"
        return Check("java", False, f"user {os.geteuid()} has no name, for which Spark's file systems ask", named)
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    fix = f"install Java {REQUIRED_JAVA} (Debian: apt-get install openjdk-17-jre-headless) or set JAVA_HOME to one"
    if java is None or not Path(java).exists():
        return Check("java", False, "none" if not home else f"JAVA_HOME {home} has no bin/java", fix)
    done = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)
    version = re.search(r'version "(\d+)', done.stderr)
    if version is None:
        said = " ".join(line.strip("# ") for line in (done.stderr + done.stdout).splitlines() if line.strip("# "))
        mended = "mend that (memory: ulimit -v; open files: ulimit -n), or set JAVA_HOME to another Java"
        return Check("java", False, f"{java} -version ended with {done.returncode}: {said[:MAX_SAID_CHARS]}", mended)
    passed = int(version[1]) >= REQUIRED_JAVA
    return Check("java", passed, done.stderr.splitlines()[0], "" if passed else fix)


def check_compiler() -> Check:
    """DeepSpeed compiles its CPU operations at first use."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    installed = compiler if compiler and shutil.which(compiler) else None
    return Check(
        "compiler",
        installed is not None,
        installed or "none",
        "" if installed else "install a C++ compiler (Debian: apt-get install g++) or set CXX to one",
    )


def check_native_code(paths: Iterable[Path]) -> Check:
    """Compiled code for this machine. Passes in any case: the first use compiles what is missing."""
    missing = [path for path in paths if not path.is_file()]
    if not missing:
        return Check("native code", True, f"compiled for {this_machine()}", "")
    fix = (
        "python -m infra.jobs.build_ops and python -m model.kernels.native_library compile it, else the first use "
        "does (two minutes)"
    )
    return Check("native code", True, describe_missing(missing), fix)


def check_spark_master(master: str) -> Check:
    """What a Spark master needs on this machine: settings that name YARN's cluster, a standalone master that
    listens."""
    if master == "yarn":
        variables = [name for name in ("HADOOP_CONF_DIR", "YARN_CONF_DIR") if os.environ.get(name)]
        fix = "set HADOOP_CONF_DIR to the cluster's configuration, or data.resources.master to local[2]"
        observed = (
            f"yarn, {variables[0]} is set"
            if variables
            else "yarn, but neither HADOOP_CONF_DIR nor YARN_CONF_DIR is set"
        )
        return Check("spark master", bool(variables), observed, "" if variables else fix)
    silent = [address for address in _standalone_masters(master) if not _listens(address)]
    fix = "start it, or set data.resources.master to a master that runs (local[2]: this machine)"
    return Check(
        "spark master", not silent, f"{', '.join(silent)} does not answer" if silent else master, fix if silent else ""
    )


def _standalone_masters(master: str) -> list[str]:
    """host:port of each master of a spark:// address; none for any other."""
    return master.removeprefix("spark://").split(",") if master.startswith("spark://") else []


def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"data.resources.master: spark://{address} is no address, write spark://HOST:PORT")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_SECONDS).close()
    except OSError:
        return False
    return True


def check_room(home: Home, staging_root: Path) -> list[Check]:
    """Free space where a run writes: on a full disk a database fails without saying so."""
    return [
        _disk(home.root, "GLM46_HOME", MIN_FREE_BYTES),
        _disk(staging_root, "--store", MIN_FREE_BYTES),
        _temporary_disk(),
    ]


def _temporary_disk() -> Check:
    return _disk(temporary_dir(), "TMPDIR", MIN_TEMPORARY_BYTES)


def _disk(directory: Path, setting: str, min_bytes: int) -> Check:
    free = shutil.disk_usage(directory).free
    fix = f"free at least {min_bytes / 2**30:.2f} GiB or name another directory with {setting}"
    return Check(
        "disk", free >= min_bytes, f"{free / 2**30:.1f} GiB free under {directory}", "" if free >= min_bytes else fix
    )


def require(*checks: Check) -> None:
    """Raise ValueError with the first check that failed."""
    for check in checks:
        if not check.passed:
            raise ValueError(f"{check.name}: {check.found}; {check.fix}")


def check_named_store(uri: str | None, home: Home, deep: bool) -> list[Check]:
    """The checks of the store at a URI, or of the home's own (None). One that is not there is not made; an empty
    directory becomes one, as in a run."""
    try:
        is_new = uri is None or (Path(uri).is_dir() and not any(Path(uri).iterdir()))
        store = open_store(uri, home) if is_new and not deep else open_known_store(uri, home, writes=not deep)
        return check_store(store, deep)
    except (ValueError, OSError) as error:
        return [Check("store", False, "cannot be used", str(error))]


def check_store(store: Store, deep: bool) -> list[Check]:
    """Every manifest reads and its files exist with their sizes; `deep` also compares checksums. Broken artifacts are
    marked, so that the next run computes them anew, also those that it would not have read."""
    num_artifacts, broken = 0, []
    look = partial(_look_at, store, deep)
    keys = store.committed_keys()
    for manifest, files, corrupt in map(look, keys) if deep else map_in_threads(look, keys):
        if corrupt is not None:
            store.mark_manifest_invalid(corrupt.name, str(corrupt))
            broken.append(str(corrupt))
        if manifest is not None:
            num_artifacts += 1
            broken += [f"{manifest.step} {manifest.key[:12]} {name}" for name in files]
            if files:
                store.mark_invalid(manifest, f"{files[0]} is missing or damaged")
    summary = f"{num_artifacts} artifacts{', checksums compared' if deep else ''}" + (
        f"; broken: {', '.join(broken[:5])}" if broken else ""
    )
    return [Check("store", not broken, summary, "run again: the broken steps are computed anew" if broken else "")]


def _look_at(store: Store, deep: bool, key: str) -> tuple[Manifest | None, list[str], CorruptManifestError | None]:
    """A key's manifest and its broken files, or what is wrong with the manifest."""
    try:
        manifest = store.read_manifest(key)
    except CorruptManifestError as error:
        return None, [], error
    return manifest, [] if manifest is None else store.broken_files(manifest, deep), None


def as_json(checks: list[Check]) -> str:
    """The checks as one JSON document."""
    return json.dumps(
        {"passed": all(check.passed for check in checks), "checks": [check.__dict__ for check in checks]}, indent=1
    )


def _python() -> Check:
    passed = sys.version_info[:2] == (3, 11)
    return Check(
        "python",
        passed,
        sys.version.split()[0],
        "" if passed else "use Python 3.11: the pinned packages were tried with it",
    )


def _python_headers() -> Check:
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    fix = "install Python's headers (Debian: apt-get install python3.11-dev)"
    return Check(
        "python headers", header.exists(), str(header) if header.exists() else "none", "" if header.exists() else fix
    )


def _packages() -> Check:
    """Compares the packages that pyproject.toml asks for with the installed ones."""
    wrong = []
    for text in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]:
        requirement = Requirement(text)
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            wrong.append(f"no {requirement.name}")
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            wrong.append(f"{requirement.name} {installed}, asked for {requirement.specifier}")
    fix = "make env, or pip install --constraint constraints.txt --editable ."
    return Check(
        "packages", not wrong, "; ".join(wrong[:5]) if wrong else "as pyproject.toml asks", fix if wrong else ""
    )


def _memory() -> Check:
    available = psutil.virtual_memory().available
    passed = available >= MIN_MEMORY_BYTES
    return Check(
        "memory",
        passed,
        f"{available / 2**30:.1f} GiB available",
        "" if passed else "free 3 GiB: scale tiny needs about 2.3",
    )


def _servers(home: Home) -> list[Check]:
    """The recorded servers and their worker run; where none are recorded, the ports that `glm46 up` takes are free."""
    urls = read_servers_file(home)
    if urls is None:
        return [_port(name, port) for name, port in PORTS.items()]
    ended, has_worker = ended_servers(home, urls), worker_lives(home, urls)
    silent = [] if ended else silent_servers(urls)
    found, fix = f"{urls.prefect} and {urls.mlflow} answer", ""
    if ended:
        found, fix = f"the process of {' and '.join(ended)} has ended", "glm46 up"
    elif silent:
        found, fix = (
            f"{' and '.join(silent)}: the process lives, but did not answer at once",
            "wait, else glm46 down and glm46 up",
        )
    worker = f"process {urls.pids[WORKER]}" if has_worker else "ended: runs that are asked for stay Late"
    return [Check("servers", not fix, found, fix), Check(WORKER, has_worker, worker, "" if has_worker else "glm46 up")]


def _database(database: Database) -> Check:
    name, problem = f"{database.server} data", find_problem(database)
    if problem:
        return Check(name, False, problem, database.fix)
    return Check(name, True, "Postgres answers" if database.path is None else str(database.path), "")


def _port(name: str, port: int) -> Check:
    """Passes in any case: a run finds free ports; only `glm46 up` needs these."""
    try:
        take_port(port)
    except ValueError as error:
        return Check(
            f"port {port}", True, str(error).partition(" (Address")[0], f"end it before glm46 up, or give --{name}-port"
        )
    return Check(f"port {port}", True, f"free for {name}", "")
