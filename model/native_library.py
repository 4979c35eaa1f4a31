"""Compiled C++ beside its module: built once per machine and source, loaded with plain pointers (ctypes), on torch's OpenMP threads.

Libraries are kept by kind of machine (configs/machine.py), named by a digest of source, headers, compiler and flags. `make env` builds all
of them (`python -m model.native_library`), else the first use does (10 s each) and says so.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from configs.machine import compiler, describe_missing, make_native_dir, this_machine

if TYPE_CHECKING:
    from torch import Tensor

FOLDER = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")


@cache
def load_library(name: str) -> ctypes.CDLL:
    """The library of `model/NAME.cpp`, compiled if this machine has not yet. Raises ValueError without a C++ compiler, or with what the
    compiler said."""
    path = library_path(name)
    if not path.is_file():
        print(f"{describe_missing([path])}: compiling it, once", file=sys.stderr, flush=True)
        _compile(name)
    return ctypes.CDLL(str(path))


def library_path(name: str) -> Path:
    """Where this machine's library of `model/NAME.cpp` is, compiled or not."""
    digest = hashlib.sha256((FOLDER / f"{name}.cpp").read_bytes())
    for header in sorted(FOLDER.glob("*.h")):
        digest.update(header.read_bytes())
    digest.update(" ".join((compiler(), *FLAGS)).encode())
    return this_machine().native_dir / f"{name}-{digest.hexdigest()[:16]}.so"


def library_paths() -> list[Path]:
    """Of all kernels."""
    return [library_path(source.stem) for source in sorted(FOLDER.glob("*.cpp"))]


def pointers(*tensors: Tensor | None) -> list[ctypes.c_void_p]:
    """Where contiguous tensors begin, as arguments of a call; null for None. The caller keeps the tensors alive during the call."""
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors), [tensor is None or tensor.stride() for tensor in tensors]
    return [ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in tensors]


def _compile(name: str) -> None:
    source, path = FOLDER / f"{name}.cpp", library_path(name)
    if shutil.which(compiler()) is None:
        raise ValueError(f"no C++ compiler {compiler()} on PATH for {source.name}: install one (Debian: apt-get install g++) or set CXX")
    with tempfile.TemporaryDirectory(dir=make_native_dir()) as folder:
        built = Path(folder) / path.name
        command = [compiler(), *FLAGS, str(source), "-o", str(built)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            raise ValueError(f"{' '.join(command)} failed with exit code {run.returncode}:\n{run.stderr[-4000:]}")
        # Whoever else compiles it at this moment writes the same library: the last rename wins.
        built.rename(path)


def main() -> None:
    """Build every library and say where they are."""
    for source in sorted(FOLDER.glob("*.cpp")):
        if not library_path(source.stem).is_file():
            _compile(source.stem)
        print(f"{source.name} compiled: {library_path(source.stem)}")


if __name__ == "__main__":
    main()
