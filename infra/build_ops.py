"""Compiles the DeepSpeed op that training loads, once per environment, so that no training start waits for a compiler (90 s).

It lies in `torch_extensions/` of the virtual environment. Run by `make env`: `python -m infra.build_ops`.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path


def op_environment() -> dict[str, str]:
    """Variables under which DeepSpeed finds the compiled op, and ninja beside this interpreter."""
    return {
        "TORCH_EXTENSIONS_DIR": str(Path(sys.prefix) / "torch_extensions"),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "DS_ACCELERATOR": "cpu",
    }


def build_ops() -> str:
    """Compile the op (or find it compiled) and return its name. Raises ValueError without a C++ compiler."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise ValueError(f"no C++ compiler {compiler} on PATH: install one (Debian: apt-get install g++) or set CXX")
    os.environ.update(op_environment())
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    builder = ShareMemCommBuilder()
    builder.load()
    return builder.name


def main() -> int:
    try:
        name = build_ops()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"DeepSpeed op {name} ready in {op_environment()['TORCH_EXTENSIONS_DIR']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
