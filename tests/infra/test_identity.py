"""Keys change exactly with what changes content."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from flows.running.computation import Computation
from infra import code_digest
from infra.jobs.launchers import Job, LocalLauncher
from infra.source_files import CodeChangedError, source
from infra.step import Output, Record, Step
from infra.storage.local_store import LocalStore
from infra.storage.manifest_store import step_key
from infra.storage.rerun_reason import explain_and_remember
from tests.conftest import ROOT


def _read_again():
    """As another process does."""
    for cached in (code_digest._code, code_digest._is_module, source):
        cached.cache_clear()


class Value(Record):
    value: int


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


def test_code_that_is_updated_in_mid_run_is_in_no_manifest_and_the_next_run_computes_with_it(project, home):
    """The step's function stands for an update that comes while it computes."""
    root, _ = project
    texts = ["y = 2\n"]

    def compute(output: Output) -> Value:
        if texts:
            (root / "model/deep.py").write_text(texts.pop())
        return Value(value=1)

    compute.__module__ = "tasks.consumer"
    step, store = Step(compute, (), (), (), (), ()), LocalStore(home.store_dir, home)
    _read_again()
    old = Computation(step, {})
    with pytest.raises(CodeChangedError, match=r"compute: model/deep\.py changed after this run began, so nothing"):
        old.find_or_run(store, lambda *_: None, print)
    assert list(store.committed_keys()) == [] and home.work_dir(step_key(old.identity)).is_dir()
    assert Computation(step, {}).identity == old.identity, "this process still runs the old code"
    with pytest.raises(CodeChangedError, match="changed after this run began"):
        LocalLauncher(home.work_root).submit(Job("key", "tasks.consumer", (), 1, {}))
    _read_again()
    new = Computation(step, {})
    artifact, is_cached = new.find_or_run(store, lambda *_: None, print)
    assert (is_cached, artifact.manifest.identity["code"]) == (False, new.identity["code"]) != old.identity["code"]


def test_a_comment_that_is_added_in_mid_run_ends_nothing_and_a_removed_file_does(project):
    root, digest = project
    before = digest("tasks.consumer")
    (root / "tasks/helper.py").write_text("from model.deep import y\n\nx = y + 1  # added\n")
    code_digest.refuse_changed_code("a step", ("tasks.consumer",))
    (root / "model/deep.py").unlink()
    with pytest.raises(CodeChangedError, match=r"a step: model/deep\.py changed"):
        code_digest.refuse_changed_code("a step", ("tasks.consumer",))
    assert code_digest.code_digest(("tasks.consumer",)) == before


def test_a_file_that_is_written_while_a_run_starts_is_refused_and_one_written_before_is_not(tmp_path):
    program = "import sys, pathlib; from infra.source_files import read_sources; sys.stdin.readline(); "
    command = [sys.executable, "-c", program + "read_sources([pathlib.Path(sys.argv[1])])", str(tmp_path)]
    for is_late in (False, True):
        (tmp_path / "code.py").write_text("x = 1\n")
        run = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if is_late:
            time.sleep(0.1)
            (tmp_path / "code.py").write_text("x = 2\n")
        said = run.communicate("go\n", timeout=60)[1]
        assert (f"{tmp_path}/code.py was written while this run started: run again" in said) == is_late, said
        assert run.returncode == is_late


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
