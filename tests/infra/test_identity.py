"""Keys change exactly with what changes content."""

from __future__ import annotations

import pytest

from infra import code_digest
from infra.storage.rerun_reason import explain_and_remember


def _read_again():
    for cached in (code_digest._code, code_digest._is_module):
        cached.cache_clear()


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A small project tree instead of ours: tasks.consumer -> tasks.helper -> model.deep, and tasks.other without
    imports."""
    files = {
        "tasks/__init__.py": "",
        "model/__init__.py": "",
        "infra/__init__.py": "",
        "tasks/consumer.py": '"""Doc."""\nimport infra\n\n\ndef run():\n    from tasks import helper\n\n    return '
        "helper.x  # why\n",
        "tasks/helper.py": "from model.deep import y\n\nx = y + 1\n",
        "model/deep.py": "y = 1\n",
        "tasks/other.py": "z = 3\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(code_digest, "ROOT", tmp_path)

    def digest(module):
        _read_again()
        return code_digest.code_digest((module,))

    yield tmp_path, digest
    _read_again()


def test_comments_docstrings_and_infra_do_not_change_the_code_digest(project):
    root, digest = project
    before = digest("tasks.consumer")
    (root / "tasks/consumer.py").write_text(
        "import infra\n\n\ndef run():\n    '''Other words.'''\n    from tasks import helper\n    return helper.x\n"
    )
    (root / "infra/__init__.py").write_text("changed = True\n")
    assert digest("tasks.consumer") == before


def test_a_helper_two_imports_away_changes_its_dependents_only(project):
    root, digest = project
    before = {name: digest(name) for name in ("tasks.consumer", "tasks.other")}
    (root / "model/deep.py").write_text("y = 2\n")
    assert digest("tasks.consumer") != before["tasks.consumer"]
    assert digest("tasks.other") == before["tasks.other"]


def test_code_under_type_checking_is_not_followed(project):
    root, digest = project
    before = digest("tasks.other")
    (root / "tasks/other.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from tasks import helper\nz = 3\n"
    )
    after = digest("tasks.other")
    (root / "tasks/helper.py").write_text("x = 99\n")
    assert digest("tasks.other") == after != before


def test_the_reason_of_a_rerun_names_what_changed(home):
    identity = {
        "step": "s",
        "recipe": {"min_words": 20},
        "inputs": {"documents": "a"},
        "code": "c",
        "distributions": {"pyarrow": "25"},
    }
    assert explain_and_remember(home, "micro", "s", identity) == "first run"
    changed = {**identity, "recipe": {"min_words": 30}, "code": "d", "inputs": {"documents": "b"}}
    assert (
        explain_and_remember(home, "micro", "s", changed)
        == "input documents changed; recipe min_words: 20 -> 30; code changed"
    )
    assert explain_and_remember(home, "micro", "s", changed) == "not in the store"
