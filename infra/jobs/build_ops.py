"""Compiles the DeepSpeed op that training loads, once per kind of machine: `python -m infra.jobs.build_ops`.

So no training start waits for a compiler (90 s). configs/machine.py says where the op is kept. `make env` runs this.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from configs.machine import compiler, make_native_dir, this_machine

OP_NAME = "deepspeed_shm_comm"


def op_environment() -> dict[str, str]:
    """Variables under which DeepSpeed finds the compiled op, and ninja beside this interpreter."""
    return {
        "TORCH_EXTENSIONS_DIR": str(this_machine().native_dir),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
    }


def op_path() -> Path:
    """Where this machine's op is, compiled or not."""
    return this_machine().native_dir / OP_NAME / f"{OP_NAME}.so"


def build_ops() -> None:
    """Compile the op, or find it compiled. Raises ValueError without a C++ compiler."""
    if shutil.which(compiler()) is None:
        raise ValueError(f"no C++ compiler {compiler()} on PATH: install one (Debian: apt-get install g++) or set CXX")
    make_native_dir()
    os.environ.update({**op_environment(), "DS_ACCELERATOR": "cpu"})
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    ShareMemCommBuilder().load()


def main() -> int:
    try:
        build_ops()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"DeepSpeed op {OP_NAME} ready: {op_path()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
