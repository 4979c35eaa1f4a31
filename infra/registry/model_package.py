"""Packs what a registered version needs besides its weights to answer anywhere: `MLmodel`, code, requirements.

The code is what model/registered_model.py imports, copied below a package whose name holds its digest. So neither a
file model.py in the working directory nor the code of another version can replace it.
"""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import re
import sys
from functools import cache
from importlib.metadata import packages_distributions, version
from pathlib import PurePosixPath

from configs.machine import with_headers
from infra.code_digest import ROOT, closure, imports, module_path

LOADER = "model.registered_model"
PACKAGES = ("model", "configs")
ANSWERING = {"enable_thinking": False, "max_new_tokens": 256, "device": "cpu", "dtype": "float32"}
"""What whoever loads a version may change by `model_config`."""
BUILD_PACKAGES = ("pip", "setuptools")
OWN_IMPORT = re.compile(rf"^(\s*(?:from|import) )(?=(?:{'|'.join(PACKAGES)})\b)", re.M)
INPUTS = [{"type": "string"}]
"""The input's schema: one column without a name, which accepts a list of prompts or a DataFrame with one column."""
OUTPUTS = [{"type": "string", "name": "answer"}, {"type": "string", "name": "error"}]


def package_files(*, is_chat_trained: bool) -> dict[str, bytes]:
    """Name and content of every file beside the weights; a chat-trained model is asked with its chat template."""
    package, code = _code()
    requirements = _requirements()
    python = platform.python_version()
    flavor = {
        "loader_module": f"{package}.{LOADER}",
        "code": "code",
        "env": {"conda": "conda.yaml", "virtualenv": "python_env.yaml"},
        "python_version": python,
        "config": {"is_chat_trained": is_chat_trained, **ANSWERING},
    }
    signature = {"inputs": json.dumps(INPUTS), "outputs": json.dumps(OUTPUTS)}
    model = {"flavors": {"python_function": flavor}, "mlflow_version": version("mlflow"), "signature": signature}
    build = [f"{name}=={version(name)}" for name in BUILD_PACKAGES]
    environment = {"python": python, "build_dependencies": build, "dependencies": ["-r requirements.txt"]}
    conda = {
        "name": "glm46",
        "channels": ["conda-forge"],
        "dependencies": [f"python={python}", build[0], {"pip": requirements}],
    }
    return {
        "MLmodel": _json(model),  # JSON is YAML
        "python_env.yaml": _json(environment),
        "conda.yaml": _json(conda),
        "requirements.txt": ("\n".join(requirements) + "\n").encode(),
        **{f"code/{name}": content for name, content in code.items()},
    }


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


@cache
def _modules() -> tuple[str, ...]:
    return tuple(closure((LOADER,), PACKAGES))


@cache
def _code() -> tuple[str, dict[str, bytes]]:
    """Name of the package and its files: modules whose imports of each other go through the package's name, and
    compiled kernels as source."""
    sources = {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in map(module_path, _modules())}
    for module in _modules():
        kernel = module_path(module).with_suffix(".cpp")
        if kernel.is_file():
            for path in with_headers(kernel):
                sources[path.relative_to(ROOT).as_posix()] = path.read_bytes()
    digest = hashlib.sha256(b"".join(name.encode() + b"\n" + content for name, content in sorted(sources.items())))
    package = f"glm46_model_{digest.hexdigest()[:12]}"
    folders = {
        package,
        *(f"{package}/{parent}" for name in sources for parent in PurePosixPath(name).parents if parent.name),
    }
    files = {f"{folder}/__init__.py": b"" for folder in sorted(folders)}
    for name, content in sources.items():
        files[f"{package}/{name}"] = _below(package, content) if name.endswith(".py") else content
    return package, files


def _below(package: str, source: bytes) -> bytes:
    text = OWN_IMPORT.sub(rf"\1{package}.", source.decode())
    for node in ast.walk(ast.parse(text)):
        assert not (
            isinstance(node, ast.Import)
            and any(alias.name.startswith(package) and not alias.asname for alias in node.names)
        ), (
            "`import model.x` binds `model`: write `from model import x` or `from model.x import y` in what a "
            "registered model imports"
        )
    return text.encode()


@cache
def _requirements() -> list[str]:
    """The installed versions of what the code imports, and MLflow's, which loads it; without a version's suffix of its
    build (+cpu)."""
    owners = packages_distributions()
    names = (
        {name.split(".")[0] for module in _modules() for name in imports(module)}
        - set(sys.stdlib_module_names)
        - set(PACKAGES)
    )
    return [
        f"{name}=={version(name).partition('+')[0]}"
        for name in sorted({"mlflow", *(owners[name][0] for name in names)})
    ]
