"""The pages answer what the infrastructure guide (S2) names: its variables, its do's and don'ts, its problems."""

from __future__ import annotations

import re

import pytest

from tests.conftest import ROOT

GUIDE = ROOT.parent / "shared" / "source-documents" / "S2-infrastructure-guide.md"
PAGE = ROOT / "docs" / "source-documents.md"
pytestmark = pytest.mark.skipif(not GUIDE.is_file(), reason="needs ../shared/source-documents")


def test_every_variable_that_the_guide_exports_has_a_row():
    guide = GUIDE.read_text(encoding="utf-8")
    script = guide.split("cat > setup_env.sh << 'EOF'")[1].split("\nEOF")[0]
    exported = {name: set(re.findall(r"^export (\w+)=", text, re.M)) for name, text in (("", guide), ("sh", script))}
    assert len(exported["sh"]) == 16 and exported["sh"] < exported[""]
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    named = {name for row in rows for name in re.findall(r"`(\w+)(?:=[^`]*)?`", row.split(" | ")[0])}
    assert not exported[""] - named
