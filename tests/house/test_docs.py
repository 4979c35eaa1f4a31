"""The documents say what is there: commands, files, scales, and what runs today."""

from __future__ import annotations

import re
import shlex
import xml.etree.ElementTree as ElementTree
from typing import get_args

import pytest

from configs.load import load_scale, scale_names
from configs.schema import PHASE_TEMPLATES, TrainingResources
from configs.schema.base import Domain
from infra.jobs.open_launcher import SCHEDULERS
from tasks.training.plan.machine import H800
from tasks.training.plan.plan_training import plan_training
from tests.conftest import ROOT

PAGES = [*(ROOT / name for name in ("README.md", "CHANGELOG.md", "SECURITY.md")), *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_command_file_and_scale_that_a_page_names_exists(path):
    from typer.main import get_command

    from flows.cli.command import app
    from flows.cli.lineage_commands import lineage_app

    text = path.read_text(encoding="utf-8")
    commands, below_lineage = (set(getattr(get_command(group), "commands", {})) for group in (app, lineage_app))
    for words in re.findall(r"(?:bin/|`)glm46 ([a-z]+(?: [a-z]+)?)", text):
        first, _, second = words.partition(" ")
        assert first in commands, words
        if first == "lineage":
            assert second in below_lineage
    for scale in re.findall(r"glm46 (?:run|plan) ([a-z0-9_/]+)(?![a-z0-9_/.])", text):
        assert scale in scale_names(), scale
    text = re.sub(r"^```.+?^```", "", text, flags=re.M | re.S)  # what such blocks make is the matter of their own tests
    for target in re.findall(r"\]\(([^)]+)\)", text):
        assert (path.parent / target).is_file(), target
    for name in re.findall(r"(?<![\w/.])(?:configs|tasks|model|tests|flows|infra)/[\w/]+\.(?:py|yaml)", text):
        assert (ROOT / name).is_file(), name


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_lines_of_prose_are_short(path):
    """Apart from tables, code and links."""
    text = re.sub(r"^```.+?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    prose = [line for line in text.splitlines() if not line.startswith(("|", "    ")) and " " in line[:104]]
    assert not [line for line in prose if len(line) > 104]


def test_commands_of_pages_that_only_compute_run(tmp_path, monkeypatch):
    """Those of `plan` and `config`; the others train, serve or need a server."""
    from typer.testing import CliRunner

    from flows.cli.command import app

    monkeypatch.chdir(tmp_path)
    texts = "\n".join(path.read_text(encoding="utf-8") for path in PAGES)
    lines = dict.fromkeys(re.findall(r"^    \.venv/bin/glm46 ((?:plan|config) [^#>\n]*)", texts, re.M))
    assert len(lines) >= 5
    for line in lines:
        done = CliRunner().invoke(app, shlex.split(line))
        assert done.exit_code == 0, (line, done.output)


def test_the_readme_shows_as_many_steps_as_a_run_has():
    (shown,) = re.findall(r"train pretrain_general .* steps (\d+),", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert plan_training(load_scale("tiny")).phases[0].num_steps == int(shown)


def test_costs_of_the_learning_path_are_the_plans():
    from docs.draw_learning_path import PAGE, drawn

    assert PAGE.read_text() == drawn(), "run python -m docs.draw_learning_path"


def test_the_readme_names_every_page():
    named = re.findall(r"\]\(docs/([\w-]+\.md)\)", (ROOT / "README.md").read_text(encoding="utf-8").split("Pages:")[1])
    assert sorted(named) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_issue_templates_name_pages_and_commands_that_exist():
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.md"):
        header, _, body = path.read_text(encoding="utf-8").removeprefix("---\n").partition("\n---\n")
        assert [line.split(":")[0] for line in header.splitlines()] == ["name", "about", "labels"]
        assert all((ROOT / name).is_file() for name in re.findall(r"docs/[\w-]+\.md", body))
    assert len(list((ROOT / ".github" / "ISSUE_TEMPLATE").iterdir())) == 2


def test_pictures_are_what_draw_docs_would_draw():
    from docs.draw_docs import pictures

    for name, text in pictures().items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == text, (
            f"run python -m docs.draw_docs: {name} differs"
        )


@pytest.mark.parametrize("name", ["pipeline.svg", "course.svg", "packing.svg", "walk.svg"])
def test_a_picture_needs_nothing_else(name):
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    assert not re.search(r"href|<script|<image|url\((?!#)", text)


def test_the_picture_of_the_pipeline_names_the_phases_of_the_scale_that_the_readme_runs():
    drawn = (ROOT / "docs" / "pipeline.svg").read_text(encoding="utf-8")
    words = set(re.findall(r"\w+", " ".join(re.findall(r"<text[^>]*>([^<]*)", drawn))))
    names = {phase.name for phase in load_scale("tiny").phases}
    assert names <= words and len(names) == 7, "README: seven phases"


def test_the_glossary_has_one_line_per_word_and_names_classes_where_they_are():
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    words = re.findall(r"^\| ([^|`]+) \|", text.split("## ")[0], re.M)
    assert len(words) == len(set(words))
    assert {"shard", "piece", "stage", "record"} <= set(words)
    (domains,) = re.findall(r"^\| domain \| what kind of text: (.+) \|$", text, re.M)
    assert domains.split(", ") == list(get_args(Domain))
    classes = re.findall(r"^\| `(\w+)` \(([\w/]+\.py)\)", text, re.M)
    assert classes
    assert not [
        name
        for name, path in classes
        if not re.search(rf"^class {name}\b", (ROOT / path).read_text(encoding="utf-8"), re.M)
    ]


def test_every_file_on_the_walk_of_a_record_is_in_its_room():
    from docs.draw_walk import WALK

    walked = [f"{stop.room}/{file}" for stop in WALK for file in stop.files]
    assert not [path for path in walked if not (ROOT / path).is_file()]


def test_what_runs_today_names_every_objective_and_launcher():
    text = " ".join((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split())
    runs, refused = re.split(r"Refused by name", text.split("## What runs today")[1])
    kinds = {kind for allowed in PHASE_TEMPLATES.values() for kind in allowed}
    assert {kind for kind in kinds if f"`{kind}`" in runs} == kinds, "every objective trains"
    assert not {kind for kind in kinds if f"`{kind}`" in refused}
    words = {"local": "this machine", "slurm": "Slurm", "pbs": "PBS", "kubernetes": "Kubernetes", "ssh": "ssh"}
    assert words.keys() == set(get_args(TrainingResources.model_fields["launcher"].annotation))
    assert words.keys() == {"local", *SCHEDULERS} and all(word in runs for word in words.values())


def test_figures_of_the_notes_are_the_plans():
    text = (ROOT / "docs" / "source-documents.md").read_text(encoding="utf-8")
    full, scaled = plan_training(load_scale("full")).phases[:5], plan_training(load_scale("scaled_down")).phases[:5]
    assert f"{sum(phase.training_flops for phase in full):.1e}".replace("e+", "e") in text
    derived = plan_training(load_scale("full"), H800).phases[:5]
    assert f"`glm46 plan full --machine h800` derives {sum(phase.hours for phase in derived):,.0f} hours" in text
    assert f"with the links of H100 {sum(phase.hours for phase in full):,.0f} hours" in text
    assert f"{sum(phase.hours for phase in scaled):.0f} hours as derived" in text
    at_forty = [sum(phase.hours * phase.mfu / 0.4 for phase in each) for each in (full, scaled)]
    assert f"{at_forty[0]:.0f} hours" in text and f"{at_forty[1]:.0f} hours at 40 %" in text
    assert f"a rank needs {full[0].rank_memory.total / 1e9:.0f} GB of 80" in text
