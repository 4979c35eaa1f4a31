"""Compiles and loads C++ kernels: a source beside the module that loads it, called with plain pointers (ctypes).

Each is built once per machine. Libraries are kept by kind of machine (configs/machine.py), named by a digest of
source, headers, compiler and flags. `make env` builds all of them (`python -m model.kernels.native_library`), else
the first use does (10 s each) and says so.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.files.atomic_files import replacing
from configs.machine import SOURCE_SUFFIXES, compiler, describe_missing, make_native_dir, this_machine, with_headers

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("model", "tasks")
"""Where kernels are."""
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")


@cache
def load_library(source: Path) -> ctypes.CDLL:
    """The library of a .cpp file, compiled if this machine has not done so yet. Raises ValueError without a C++
    compiler, or with the compiler's messages."""
    with _on_disk(source) as file:
        path = library_path(file)
        if not path.is_file():
            print(f"{describe_missing([path])}: compiling it, once", file=sys.stderr, flush=True)
            _compile(file)
    return ctypes.CDLL(str(path))


@contextmanager
def _on_disk(source: Path) -> Iterator[Path]:
    """The source beside its headers as files: executors import the project from a zip."""
    if source.is_file():
        yield source
        return
    archive = next(path for path in source.parents if path.is_file())
    with zipfile.ZipFile(archive) as zipped, tempfile.TemporaryDirectory() as directory:
        inside = source.parent.relative_to(archive).as_posix()
        names = [name for name in zipped.namelist() if name.startswith(f"{inside}/") and name.endswith(SOURCE_SUFFIXES)]
        zipped.extractall(directory, names)
        yield Path(directory) / source.relative_to(archive)


def library_path(source: Path) -> Path:
    """Where this machine's library of a .cpp file is, compiled or not."""
    digest = hashlib.sha256()
    for path in with_headers(source):
        digest.update(path.read_bytes())
    digest.update(" ".join((compiler(), *FLAGS)).encode())
    return this_machine().native_dir / f"{source.stem}-{digest.hexdigest()[:16]}.so"


def kernel_sources() -> list[Path]:
    """The sources of all kernels of the project."""
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.cpp"))


def pointers(*tensors: Tensor | None) -> list[ctypes.c_void_p]:
    """Where contiguous tensors begin, as arguments of a call; null for None. The caller keeps the tensors alive during
    the call."""
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors), [
        tensor is None or tensor.stride() for tensor in tensors
    ]
    return [ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in tensors]


def array_pointers(*arrays: NDArray[Any] | None) -> list[ctypes.c_void_p]:
    """As `pointers`, of NumPy arrays."""
    assert all(array is None or array.flags.c_contiguous for array in arrays)
    return [ctypes.c_void_p(None if array is None else array.ctypes.data) for array in arrays]


def _compile(source: Path) -> None:
    path = library_path(source)
    if shutil.which(compiler()) is None:
        raise ValueError(
            f"no C++ compiler {compiler()} on PATH for {source.name}: install one (Debian: apt-get install g++) or "
            f"set CXX"
        )
    make_native_dir()
    # Another process that compiles it at this moment writes the same library: the last rename wins.
    with replacing(path) as built:
        command = [compiler(), *FLAGS, str(source), "-o", str(built)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            raise ValueError(f"{' '.join(command)} failed with exit code {run.returncode}:\n{run.stderr[-4000:]}")


def main() -> None:
    """Build every library and say where they are."""
    for source in kernel_sources():
        if not library_path(source).is_file():
            _compile(source)
        print(f"{source.name} compiled: {library_path(source)}")


if __name__ == "__main__":
    main()
