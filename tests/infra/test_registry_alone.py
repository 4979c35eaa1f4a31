"""A registered model in an environment made from its own requirements, and nothing of this project."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from infra.home import Home
from infra.registry.model_package import package_files
from infra.storage.open_store import open_store
from model.text.chat_template import answer_of, encode, problem_prompt
from tests.infra.test_registry import continuations
from tests.support.evaluation_fakes import checkpoint, toy_tokenizer

QUESTION = "What is 3 + 1?"
ALONE = """
import importlib.util, sys
absent = ("configs", "infra", "deepspeed", "transformers", "pyspark")
present = [name for name in absent if importlib.util.find_spec(name) is not None]
assert not present, present
import mlflow
loaded = mlflow.pyfunc.load_model(sys.argv[1], model_config={"max_new_tokens": 12})
print(loaded.predict([sys.argv[2]])["answer"][0])
"""


@pytest.mark.long
def test_a_model_answers_in_an_environment_made_from_its_own_requirements(tmp_path):
    """Minutes: pip installs torch and MLflow."""
    trained = checkpoint(open_store(None, Home(tmp_path / "home")), "trained")
    packed, python = tmp_path / "packed", tmp_path / "environment" / "bin" / "python"
    shutil.copytree(trained.directory("hf"), packed)
    for name, content in package_files(is_chat_trained=True).items():
        path = packed / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (expected,) = continuations(trained.directory("hf"), [encode(toy_tokenizer(), problem_prompt(QUESTION, False))[0]])
    assert _run([sys.executable, "-m", "venv", str(python.parents[1])], tmp_path) == ""
    requirements = str(packed / "requirements.txt")
    _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", requirements], tmp_path)
    said = _run([str(python), "-I", "-c", ALONE, str(packed), QUESTION], tmp_path)
    assert said.splitlines()[-1] == answer_of(expected)


def _run(command: list[str], directory: Path) -> str:
    """Standard output of a command in an environment without this project."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    finished = subprocess.run(command, cwd=directory, env=plain, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout
