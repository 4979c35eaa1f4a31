"""What can be missing on a machine, each as one check with the fix; `glm46 doctor` prints them and a run needs those it uses."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from infra.home import Home
from infra.store import Store

REQUIRED_JAVA = 17
MIN_FREE_BYTES = 2 << 30


@dataclass(frozen=True)
class Check:
    """One thing that was looked at; `fix` is empty when it is well."""

    name: str
    passed: bool
    found: str
    fix: str


def check_machine(home: Home) -> list[Check]:
    """Python, Java, compiler, Python headers and disk space."""
    return [_python(), check_java(), check_compiler(), _python_headers(), _disk(home)]


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


def _disk(home: Home) -> Check:
    free = shutil.disk_usage(home.root).free
    passed = free >= MIN_FREE_BYTES
    return Check(
        "disk", passed, f"{free / 2**30:.1f} GiB free under {home.root}", "" if passed else "free at least 2 GiB or move GLM46_HOME"
    )
