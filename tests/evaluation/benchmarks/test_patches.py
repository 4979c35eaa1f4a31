"""Patches: diffs of difflib are applied as they were made, what does not fit is refused, and issues of real
repositories are resolved by their gold patch and by no other."""

from __future__ import annotations

import difflib
import gzip
import json
import random

import pytest

from tasks.data.environments.patches import PatchError, apply_patch, patch_in, read_patch
from tasks.data.sandbox.code_sandbox import BUBBLEWRAP, NAMESPACES, problem_of
from tasks.data.sandbox.tree_tests import passing_tests
from tasks.evaluation.benchmarks.repository_tasks import issue_prompt, judge_patch, prediction, task_of
from tests.support.data_inputs import SHARED_DATA as DATA

ISOLATIONS = [name for name in (BUBBLEWRAP, NAMESPACES) if not problem_of(name)]
pytestmark = pytest.mark.skipif(not ISOLATIONS, reason="no sandbox can be made here")
ODD_LINES = ["\n", "-- a/x\n", "++ b\n", "--- a/x\n", "+++ b\n", "@@ x\n", "new\n"]
NEW_FILE = "--- /dev/null\n+++ b/notes.txt\n@@ -0,0 +1 @@\n+nothing is resolved\n"


def diff(before: str, after: str, path: str = "a.py") -> str:
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{path}", f"b/{path}"
    )
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def test_a_diff_leads_from_the_text_that_it_was_made_of_to_the_other():
    chance = random.Random(46)
    for _ in range(300):
        lines = [chance.choice([f"line {chance.randrange(8)}\n", *ODD_LINES]) for _ in range(chance.randrange(1, 60))]
        changed = [line for line in lines if chance.random() > 0.1]
        for _ in range(chance.randrange(1, 5)):
            changed.insert(chance.randint(0, len(changed)), chance.choice(ODD_LINES))
        before, after = ("".join(each) for each in (lines, changed))
        before, after = (text.removesuffix("\n") if chance.random() < 0.3 else text for text in (before, after))
        if before != after:
            assert apply_patch({"a.py": before, "b.py": "b"}, diff(before, after)) == {"a.py": after, "b.py": "b"}


@pytest.mark.parametrize("mark", ["\x0c", "\x0b", "\x1c", "\x1e", "\x85", "\u2028", "\u2029", "\r"])
def test_lines_of_a_text_end_where_those_of_its_diff_do(mark):
    """As git ends them; str.splitlines knows more breaks."""
    before = f"x = 1\n{mark}\nS = 'a{mark}b'\nreturn 1{mark}"
    patch = (
        f"--- a/a.py\n+++ b/a.py\n@@ -1,4 +1,4 @@\n x = 1\n {mark}\n S = 'a{mark}b'\n"
        f"-return 1{mark}\n\\ No newline at end of file\n+return 2{mark}\n\\ No newline at end of file\n"
    )
    assert apply_patch({"a.py": before}, patch) == {"a.py": before.replace("return 1", "return 2")}


def test_files_are_made_renamed_and_removed():
    tree = {"a/old.py": "one\ntwo\n", "b.py": "b\n"}
    renamed = "diff --git a/a/old.py b/a/new.py\nrename from a/old.py\nrename to a/new.py\n"
    removed = "--- a/b.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-b\n"
    patched = apply_patch(tree, renamed + NEW_FILE + removed)
    assert patched == {"a/new.py": "one\ntwo\n", "notes.txt": "nothing is resolved\n"}
    assert apply_patch(tree, renamed + diff(tree["a/old.py"], "one\nthree\n", "a/new.py")) == {
        "a/new.py": "one\nthree\n",
        "b.py": "b\n",
    }


def test_a_hunk_at_another_place_than_it_says_is_found_and_one_that_is_nowhere_refused():
    before = "".join(f"line {number}\n" for number in range(40))
    after = before.replace("line 30\n", "changed\n")
    moved = diff(before, after).replace("@@ -28,", "@@ -3,")
    assert apply_patch({"a.py": before}, moved)["a.py"] == after
    for tree, message in (({"a.py": before.replace("line 29", "x")}, "are not in it"), ({"b.py": ""}, "no file a.py")):
        with pytest.raises(PatchError, match=message):
            apply_patch(tree, moved)
    for text in ("", "I would change line 30.", "--- a/a.py\nline", "--- a/a.py\n+++ b/a.py\nline\n"):
        with pytest.raises(PatchError):
            read_patch(text)


def test_the_patch_of_an_answer_is_the_fenced_one_or_begins_where_a_diff_does():
    patch = diff("a\n", "b\n")
    assert patch_in(f"So:\n```diff\n{patch}```\nThat is all.") == patch
    assert patch_in(f"So:\n{patch.rstrip()}") == patch
    assert patch_in("I cannot.") == ""
    assert json.loads(prediction("x-1", "glm46", f"```patch\n{patch}```")) == {
        "instance_id": "x-1",
        "model_name_or_path": "glm46",
        "model_patch": patch,
    }


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_tree_passes_what_it_passes_and_sees_neither_files_nor_network(isolation):
    tests = (
        f"OUTSIDE = {__file__!r}"
        + """
import os, socket, threading
import pytest
from package import one

def test_right(): assert one() == 1
def test_wrong(): assert one() == 2
@pytest.mark.skip
def test_left_out(): pass
@pytest.mark.parametrize("a", [1, 2])
def test_one_of_two(a): assert one() == a
def test_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(1)); thread.start(); thread.join()
    assert found
def test_files(): assert not os.path.exists("/etc/passwd") and not os.path.exists(OUTSIDE)
def test_writes():
    with pytest.raises(OSError): open("package/other.py", "w").write("x")
def test_network():
    with pytest.raises(OSError): socket.socket()
"""
    )
    tree = {"src/package/__init__.py": "def one(): return 1\n", "tests/test_one.py": tests}
    wanted = {"test_right", "test_one_of_two[1]", "test_thread", "test_files", "test_writes", "test_network"}
    assert passing_tests(tree, ["tests/test_one.py"], isolation) == {f"tests/test_one.py::{name}" for name in wanted}
    tree["tests/conftest.py"] = "import os; os._exit(0)"
    assert passing_tests(tree, ["tests/test_one.py"], isolation) == set()
    with pytest.raises(ValueError, match=r"\.\./x\.py leaves the tree"):
        passing_tests({"../x.py": ""}, [], isolation)


def records(name):
    with gzip.open(DATA / f"{name}.jsonl.gz", "rt") as lines:
        return [json.loads(line) for line in lines]


def check_that_gold_resolves_and_no_other_does(record):
    task = task_of(record)
    assert record["problem_statement"].strip() in issue_prompt(record, task.tree)
    gold = judge_patch(task, f"Here it is.\n```diff\n{record['patch']}```")
    assert (gold.is_well_formed, gold.is_resolved) == (True, True), record["instance_id"]
    other = judge_patch(task, NEW_FILE)
    assert (other.is_well_formed, other.is_resolved) == (True, False), record["instance_id"]
    for answer in ("", record["patch"].replace("\n ", "\n x")):
        verdict = judge_patch(task, answer)
        assert (verdict.is_well_formed, verdict.is_resolved) == (False, False), record["instance_id"]


needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the benchmark files are not here")


@needs_data
def test_the_gold_patch_resolves_an_issue_and_no_other_does():
    check_that_gold_resolves_and_no_other_does(records("code/swe_tasks")[0])


@needs_data
@pytest.mark.long
def test_every_gold_patch_resolves_its_issue_and_no_other_does():
    for record in records("code/swe_tasks"):
        check_that_gold_resolves_and_no_other_does(record)


@needs_data
def test_the_gold_patches_of_swe_bench_are_well_formed():
    for name in ("bench/swebench_lite", "bench/swebench_verified"):
        for record in records(name):
            assert judge_patch(task_of(record), record["patch"]).is_well_formed, record["instance_id"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"instance_id": ""}, "no text in instance_id"),
        ({"FAIL_TO_PASS": "[]"}, "no tests in FAIL_TO_PASS"),
        ({"test_patch": "nothing"}, "does not fit its tree"),
    ],
)
def test_a_record_that_no_patch_can_be_judged_by_is_refused(changed, message):
    record = {"instance_id": "x-1", "problem_statement": "It fails.", "tree": {"a.py": "a\n"}, "FAIL_TO_PASS": ["t::t"]}
    record |= {"PASS_TO_PASS": [], "patch": diff("a\n", "b\n"), "test_patch": NEW_FILE}
    assert task_of(record).instance_id == "x-1"
    with pytest.raises(ValueError, match=message):
        task_of(record | changed)
