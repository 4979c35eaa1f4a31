"""docs/bring-your-own.md is followed to the letter: every block is run, or applied, in one copy of the project."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.conftest import ROOT
from tests.evaluation.benchmarks.toy_suite import write_toy_model

if TYPE_CHECKING:
    from pathlib import Path

PAGE = (ROOT / "docs" / "bring-your-own.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))
SAID = {
    "Filter": "1 documents left, 1 dropped (too_many_exclamations 1)",
    "Weights": "scale glm45_air_lora",
    "Tokenizer": "kind: given",
    "Phase": "sft_polite ",
    "Reward": "Write a haiku about tea. [True, False]",
    "Teacher": "model: NAME",
    "Environment": '"name": "look"',
    "Launcher": "urgent",
}
"""What the last block of a section prints."""


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the project with commands that run its own code, and a toy model."""
    root = tmp_path_factory.mktemp("own") / "glm46"
    left_out = shutil.ignore_patterns(".git", ".venv*", ".glm46", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, root, ignore=left_out)
    commands = {"python": '"$@"', "glm46": '-c "from flows.cli.command import main; main()" "$@"'}
    (root / ".venv" / "bin").mkdir(parents=True)
    for name, arguments in commands.items():
        path = root / ".venv" / "bin" / name
        path.write_text(f"#!/bin/sh\nexec {sys.executable} {arguments}\n")
        path.chmod(0o700)
    write_toy_model(root / "model")
    return root


def apply(diff: str, tree: Path) -> None:
    """An edit without line numbers: each hunk's old lines must be in its file once."""
    for path, hunks in re.findall(r"^\+\+\+ b/(.+)\n((?:(?!---).*\n)+)", diff, re.M):
        text = (tree / path).read_text()
        for hunk in filter(None, hunks.split("@@\n")):
            lines = hunk.splitlines()
            old, new = ("\n".join(line[1:] for line in lines if line[:1] in (" ", sign)) for sign in "-+")
            assert text.count(old) == 1, f"{path} has not, or more than once: {old}"
            text = text.replace(old, new)
        (tree / path).write_text(text)


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_is_followed_to_the_letter(section, tree):
    """In the order of the page."""
    printed, environment = "", {**os.environ, "PYTHONPATH": str(tree), "GLM46_HOME": str(tree / "home")}
    for kind, block in re.findall(r"```(\w+)\n(.+?)```", SECTIONS[section], re.S):
        if kind == "diff":
            apply(block, tree)
            continue
        done = subprocess.run(
            ["bash", "-e", "-c", block], cwd=tree, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (block, done.stdout[-2000:], done.stderr[-2000:])
        printed = done.stdout
    assert SAID.get(section, "") in printed
    if section in ("Reward", "Environment"):
        contracts = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/data/test_contracts.py", "-k", "every_name"]
        asked = [sys.executable, *contracts]
        checked = subprocess.run(asked, cwd=tree, env=environment, capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout[-2000:]
    if section == "Benchmark":
        assert "tea" in json.dumps(json.loads((tree / "tea.json").read_text()))


def test_the_page_has_a_section_for_each_thing_and_only_files_that_exist():
    training = ["Data", "Filter", "Weights", "Tokenizer", "Phase"]
    assert list(SECTIONS) == [*training, "Benchmark", "Reward", "Teacher", "Environment", "Launcher"]
    made = set(re.findall(r"^cat > (\S+)", PAGE, re.M))
    for path in re.findall(r"(?<![\w/])(?:tasks|infra|configs|tests)/[\w/]+\.(?:py|yaml)", PAGE):
        assert (ROOT / path).is_file() or path in made, path
