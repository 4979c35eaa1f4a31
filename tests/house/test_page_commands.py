"""Commands of README and pages: the cheap ones are run, of the others every word is one that the command takes."""

from __future__ import annotations

import re
import shlex

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from flows.cli.command import app
from tests.house.test_docs import PAGES

TEXTS = "\n".join(path.read_text(encoding="utf-8") for path in PAGES)
LINES = sorted(
    {
        re.split(r" #|[>|]", line)[0].strip()
        for line in re.findall(r"^ {4}(?:.*&& )?(?:\.venv/bin/)?glm46 (.+)$", TEXTS.replace("\\\n", " "), re.M)
    }
)
RUN = ("plan ", "config ", "doctor", "jobs list", "checkpoint list", "cluster setup", "serve --scale full")
NOT_RUN = {
    "chat": "asks a promoted model: tests/flows/test_end_to_end.py",
    "checkpoint": "needs a checkpoint: tests/flows/weights/test_checkpoint_commands.py",
    "cluster": "submits jobs: tests/infra/test_cluster_check.py",
    "convert": "needs weights: tests/release/test_model_commands.py",
    "down": "ends servers: tests/flows/test_deployment.py",
    "doctor": "another store: tests/infra/test_doctor.py",
    "eval": "needs a trained phase: tests/evaluation/benchmarks/test_targets.py",
    "evidence": "needs a release: tests/lineage/test_evidence.py",
    "exporter": "runs until it is stopped: tests/monitoring/test_exporter.py",
    "fetch": "needs a network: tests/training/test_fetch_checkpoint.py",
    "forget": "needs a release: tests/lineage/test_forget.py",
    "generate": "needs weights: tests/release/test_model_commands.py",
    "lineage": "needs a release: tests/lineage/test_lineage.py",
    "profile": "needs a model: tests/release/test_profile.py",
    "rollback": "needs a champion: tests/infra/test_promotion.py",
    "run": "trains: tests/flows/test_end_to_end.py",
    "serve": "needs a model: tests/serving/test_serve_engines.py",
    "speedrun": "trains: tests/flows/test_end_to_end.py",
    "stage": "starts Spark: tests/flows/test_single_stage.py",
    "up": "starts servers: tests/flows/test_deployment.py",
    "verify": "needs a release: tests/lineage/test_verify_release.py",
    "worker": "runs until it is stopped: tests/flows/test_deployment.py",
}


def is_run(line: str) -> bool:
    return line.startswith(RUN) and "s3://" not in line


@pytest.mark.parametrize("line", [line for line in LINES if is_run(line) and not line.startswith(("plan", "config"))])
def test_a_command_that_only_looks_runs(line, home, tmp_path, monkeypatch):
    """In an empty home. Those of plan and config are run by test_docs.py. A set-up is shown, not done."""
    monkeypatch.chdir(tmp_path)
    dry = ["--dry-run"] if line.startswith("cluster setup") and "--dry-run" not in line else []
    done = CliRunner().invoke(app, [*shlex.split(line), *dry])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code in (0, 1) and "Traceback" not in done.output, done.output


@pytest.mark.parametrize("line", [line for line in LINES if not is_run(line)])
def test_a_command_that_is_not_run_has_a_reason_and_words_that_the_command_takes(line):
    words, command = shlex.split(line), get_command(app)
    assert NOT_RUN[words[0]].split(": ")[1].startswith("tests/")
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    assert command.make_context("glm46", words).command is command, "an unknown option, or a missing word, raises"


@pytest.mark.parametrize("name", sorted(get_command(app).commands))
def test_help_of_every_command_is_shown(name):
    done = CliRunner().invoke(app, [name, "--help"])
    assert done.exit_code == 0 and "Usage:" in done.output


def test_options_that_sentences_name_exist():
    known = set()
    groups = [get_command(app)]
    while groups:
        command = groups.pop()
        known |= {word for parameter in command.params for word in (*parameter.opts, *parameter.secondary_opts)}
        groups += getattr(command, "commands", {}).values()
    named = {word for line in re.findall(r"`glm46 ([^`\n]+)`", TEXTS) for word in re.findall(r"(?<=\s)--[a-z-]+", line)}
    assert len(named) > 15 and not named - known


def test_reasons_name_tests_that_exist_and_commands_that_pages_name():
    from tests.conftest import ROOT

    for name, reason in NOT_RUN.items():
        assert (ROOT / reason.split(": ")[1]).is_file(), name
        assert name in get_command(app).commands, name
