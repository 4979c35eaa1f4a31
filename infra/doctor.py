"""What can be missing on a machine, each as one check with the fix; `glm46 doctor` prints them and a run needs those it uses."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from configs.machine import describe_missing, this_machine
from infra.child_process import take_port
from infra.code_digest import ROOT
from infra.home import Home
from infra.servers import read_servers_file, silent_servers
from infra.store import Store

REQUIRED_JAVA = 17
MIN_FREE_BYTES = 2 << 30
MIN_MEMORY_BYTES = 3 << 30
"""`run tiny` used 2.3 GiB."""
PORTS = {"prefect": 4200, "mlflow": 5000}
"""Where `glm46 up` starts its servers unless told otherwise."""
SCHEDULER_COMMANDS = {"slurm": ("sbatch", "squeue", "scancel"), "pbs": ("qsub", "qstat", "qdel"), "kubernetes": ("kubectl",)}


@dataclass(frozen=True)
class Check:
    """One thing that was looked at; `fix` is empty when it is well."""

    name: str
    passed: bool
    found: str
    fix: str


def check_machine(home: Home) -> list[Check]:
    """Python, packages, Java, compiler, Python headers, memory, disk space and servers."""
    machine = [_python(), _packages(), check_java(), check_compiler(), _python_headers(), _memory(), _disk(home)]
    return [*machine, *_servers(home)]


def check_launchers(launchers: Iterable[str]) -> list[Check]:
    """The commands of each scheduler that a scale asks for; the local launcher needs none."""
    checks = []
    for launcher in sorted(set(launchers) - {"local"}):
        missing = [command for command in SCHEDULER_COMMANDS[launcher] if shutil.which(command) is None]
        fix = f"run on a machine that submits to {launcher}, or set resources.launcher to local"
        checks.append(Check(launcher, not missing, f"no {', '.join(missing)}" if missing else "its commands", fix if missing else ""))
    return checks


def check_java() -> Check:
    """Spark needs Java 17 or later, from JAVA_HOME or the PATH."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    fix = f"install Java {REQUIRED_JAVA} (Debian: apt-get install openjdk-17-jre-headless) or set JAVA_HOME to one"
    if java is None or not Path(java).exists():
        return Check("java", False, "none" if not home else f"JAVA_HOME {home} has no bin/java", fix)
    text = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    version = re.search(r'version "(\d+)', text)
    passed = version is not None and int(version[1]) >= REQUIRED_JAVA
    return Check("java", passed, text.splitlines()[0] if text else "no answer to java -version", "" if passed else fix)


def check_compiler() -> Check:
    """DeepSpeed compiles its CPU operations at first use."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    found = compiler if compiler and shutil.which(compiler) else None
    return Check(
        "compiler",
        found is not None,
        found or "none",
        "" if found else "install a C++ compiler (Debian: apt-get install g++) or set CXX to one",
    )


def check_native_code(paths: Iterable[Path]) -> Check:
    """Compiled code of this very machine. Passes either way: the first use compiles what is missing."""
    missing = [path for path in paths if not path.is_file()]
    if not missing:
        return Check("native code", True, f"compiled for {this_machine()}", "")
    fix = "python -m infra.build_ops and python -m model.native_library compile it, else the first use does (two minutes)"
    return Check("native code", True, describe_missing(missing), fix)


def require(*checks: Check) -> None:
    """Raise ValueError with the first check that failed."""
    for check in checks:
        if not check.passed:
            raise ValueError(f"{check.name}: {check.found}; {check.fix}")


def check_store(store: Store, deep: bool) -> list[Check]:
    """Every manifest's files exist with their sizes; `deep` also reads them and compares checksums."""
    num_artifacts, broken = 0, []
    for manifest in store.iterate_manifests():
        num_artifacts += 1
        broken += [f"{manifest.step} {manifest.key[:12]} {name}" for name in store.broken_files(manifest, deep)]
    found = f"{num_artifacts} artifacts{', checksums compared' if deep else ''}" + (f"; broken: {', '.join(broken[:5])}" if broken else "")
    return [Check("store", not broken, found, "run again: the broken steps are computed anew" if broken else "")]


def as_json(checks: list[Check]) -> str:
    """The checks as one JSON document."""
    return json.dumps({"passed": all(check.passed for check in checks), "checks": [check.__dict__ for check in checks]}, indent=1)


def _python() -> Check:
    passed = sys.version_info[:2] == (3, 11)
    return Check("python", passed, sys.version.split()[0], "" if passed else "use Python 3.11: the pinned packages were tried with it")


def _python_headers() -> Check:
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    fix = "install Python's headers (Debian: apt-get install python3.11-dev)"
    return Check("python headers", header.exists(), str(header) if header.exists() else "none", "" if header.exists() else fix)


def _packages() -> Check:
    """What pyproject.toml asks for against what is installed."""
    wrong = []
    for text in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]:
        requirement = Requirement(text)
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            wrong.append(f"no {requirement.name}")
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            wrong.append(f"{requirement.name} {found}, asked for {requirement.specifier}")
    fix = "make env, or pip install --constraint constraints.txt --editable ."
    return Check("packages", not wrong, "; ".join(wrong[:5]) if wrong else "as pyproject.toml asks", fix if wrong else "")


def _memory() -> Check:
    available = psutil.virtual_memory().available
    passed = available >= MIN_MEMORY_BYTES
    return Check("memory", passed, f"{available / 2**30:.1f} GiB available", "" if passed else "free 3 GiB: scale tiny needs about 2.3")


def _servers(home: Home) -> list[Check]:
    """The recorded servers answer; where none are recorded, the ports that `glm46 up` takes are free."""
    urls = read_servers_file(home)
    if urls is not None:
        silent = silent_servers(urls)
        found = f"{' and '.join(silent)} recorded but silent" if silent else f"{urls.prefect} and {urls.mlflow} answer"
        return [Check("servers", not silent, found, "glm46 up" if silent else "")]
    return [_port(name, port) for name, port in PORTS.items()]


def _port(name: str, port: int) -> Check:
    """Passes either way: a run finds ports of its own, only `glm46 up` has to be told."""
    try:
        take_port(port)
    except ValueError as error:
        return Check(f"port {port}", True, str(error).partition(" (Address")[0], f"end it before glm46 up, or give --{name}-port")
    return Check(f"port {port}", True, f"free for {name}", "")


def _disk(home: Home) -> Check:
    free = shutil.disk_usage(home.root).free
    passed = free >= MIN_FREE_BYTES
    return Check(
        "disk", passed, f"{free / 2**30:.1f} GiB free under {home.root}", "" if passed else "free at least 2 GiB or move GLM46_HOME"
    )
