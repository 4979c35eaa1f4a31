"""The pages answer what the infrastructure guide (S2) names: its variables, its do's and don'ts, its problems."""

from __future__ import annotations

import re

import pytest

from configs.load import changed_scale
from tests.conftest import ROOT

GUIDE = ROOT.parent / "shared" / "source-documents" / "S2-infrastructure-guide.md"
PAGE = ROOT / "docs" / "source-documents.md"
TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
needs_guide = pytest.mark.skipif(not GUIDE.is_file(), reason="needs ../shared/source-documents")
PARTS = ("Symptom", "Look", "Cause", "Fix", "Prevention", "Test")
PROBLEMS = dict(re.findall(r"^\*\*(.+?)\.\*\*\n((?:[- ] ?.+\n)+)", TROUBLES, re.M))


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_problem_has_symptom_command_cause_fix_prevention_and_test(problem):
    parts = dict(re.findall(r"^- (\w+): ((?:.+\n)(?:  .+\n)*)", PROBLEMS[problem], re.M))
    assert tuple(parts) == PARTS
    assert re.search(r"`glm46\s[a-z]+", parts["Look"]), "a command to look with"
    tests = re.findall(r"tests/[\w/]+\.py", parts["Test"])
    assert tests and all((ROOT / path).is_file() for path in tests)


def test_the_problems_are_those_of_the_source_documents():
    assert len(PROBLEMS) == 15
    for word in ("spikes", "NaN", "memory", "slow", "experts", "NCCL", "node fails", "waits", "disk", "data", "fit"):
        assert any(word in problem for problem in PROBLEMS), word


@needs_guide
def test_each_do_and_dont_is_enforced_by_a_test_or_explained():
    guide = GUIDE.read_text(encoding="utf-8").split("## Best Practices")[1].split("## Validation")[0]
    wanted = re.findall(r"^\d+\. \*\*(.+?)\*\*", guide, re.M)
    rows = [line.strip("| ").split(" | ") for line in TROUBLES.split("| S2 says |")[1].splitlines()[2:] if line]
    assert len(wanted) == len(rows) == 20
    for name, (said, kind, how) in zip(wanted, rows, strict=True):
        words = set(re.findall(r"[a-z']{3,}|fp16|nvme", name.lower())) - {"use", "test", "run", "don't", "not", "have"}
        assert name.startswith("Don't") == said.startswith("don't")
        assert words & set(re.findall(r"[a-z']{3,}|fp16", said.lower())), (name, said)
        tests = re.findall(r"tests/[\w/]+\.py", how)
        assert kind in ("enforced", "explained") and bool(tests) == (kind == "enforced"), said
        assert all((ROOT / path).is_file() for path in tests), said


def test_float16_is_refused():
    for name in ("tiny", "full"):
        with pytest.raises(ValueError, match="dtype"):
            changed_scale(name, ["phases.sft.recipe.dtype=float16"])


@needs_guide
def test_every_variable_that_the_guide_exports_has_a_row():
    guide = GUIDE.read_text(encoding="utf-8")
    script = guide.split("cat > setup_env.sh << 'EOF'")[1].split("\nEOF")[0]
    exported = {name: set(re.findall(r"^export (\w+)=", text, re.M)) for name, text in (("", guide), ("sh", script))}
    assert len(exported["sh"]) == 16 and exported["sh"] < exported[""]
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    named = {name for row in rows for name in re.findall(r"`(\w+)(?:=[^`]*)?`", row.split(" | ")[0])}
    assert not exported[""] - named
