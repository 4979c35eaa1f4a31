"""Compiled C++ beside its module: built once per processor and source, loaded with plain pointers (ctypes), on torch's OpenMP threads.

Libraries lie in `torch_extensions/` of the virtual environment, named by a digest of source, headers, compiler flags and processor.
`make env` builds all of them (`python -m model.native_library`), else the first use does (10 s each).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

FOLDER = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")


@cache
def load_library(name: str) -> ctypes.CDLL:
    """The library of `model/NAME.cpp`, compiled if this machine has not yet. Raises ValueError without a C++ compiler, or with what the
    compiler said."""
    path = _library_path(name)
    if not path.is_file():
        _compile(FOLDER / f"{name}.cpp", path)
    return ctypes.CDLL(str(path))


def pointers(*tensors: Tensor | None) -> list[ctypes.c_void_p]:
    """Where contiguous tensors begin, as arguments of a call; null for None. The caller keeps the tensors alive during the call."""
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors), [tensor is None or tensor.stride() for tensor in tensors]
    return [ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in tensors]


def _library_path(name: str) -> Path:
    digest = hashlib.sha256((FOLDER / f"{name}.cpp").read_bytes())
    for header in sorted(FOLDER.glob("*.h")):
        digest.update(header.read_bytes())
    # Native code of one processor is an illegal instruction on another that shares the environment.
    digest.update(" ".join((_compiler(), *FLAGS, platform.machine(), _processor_features())).encode())
    return Path(sys.prefix) / "torch_extensions" / "glm46" / f"{name}-{digest.hexdigest()[:16]}.so"


def _compiler() -> str:
    return os.environ.get("CXX", "c++")


def _processor_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "")


def _compile(source: Path, path: Path) -> None:
    if shutil.which(_compiler()) is None:
        raise ValueError(f"no C++ compiler {_compiler()} on PATH for {source.name}: install one (Debian: apt-get install g++) or set CXX")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        command = [_compiler(), *FLAGS, str(source), "-o", str(built)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            raise ValueError(f"{' '.join(command)} failed with exit code {run.returncode}:\n{run.stderr[-4000:]}")
        # Whoever else compiles it at this moment writes the same library: the last rename wins.
        built.rename(path)


def main() -> None:
    """Build every library and say where they lie."""
    for source in sorted(FOLDER.glob("*.cpp")):
        load_library(source.stem)
        print(f"{source.name} compiled: {_library_path(source.stem)}")


if __name__ == "__main__":
    main()
