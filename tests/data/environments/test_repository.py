"""Repository repair: a record becomes a prompt only where its own patch is right, and hidden tests judge the edits."""

from __future__ import annotations

import difflib
import json

import pytest

from tasks.data.environments.environment import ToolError
from tasks.data.environments.environments import OPENERS
from tasks.data.environments.patches import PatchError, apply_patch
from tasks.data.environments.repository import failed_tests
from tasks.data.prompts.prompt_records import UnusablePromptError, prompt_of

BROKEN = "import math\n\n\ndef area(radius):\n    return math.pi * radius\n"
FIXED = BROKEN.replace("* radius", "* radius**2")
TESTS = """import pytest
from shapes import circle


@pytest.mark.parametrize(("radius", "expected"), [(0, 0), (1, 3.14)])
def test_small(radius, expected):
    assert round(circle.area(radius), 2) == expected


class TestErrors:
    def test_text(self):
        with pytest.raises(TypeError, match="unsupported|multiply"):
            circle.area("x")
"""
HIDDEN = f"{TESTS}\n\ndef test_two():\n    assert round(circle.area(2), 1) == 12.6\n"
TREE = {"shapes/__init__.py": "", "shapes/circle.py": BROKEN, "tests/test_circle.py": TESTS, "README.md": "Shapes"}


def diff(path: str, before: str, after: str) -> str:
    lines = difflib.unified_diff(before.splitlines(True), after.splitlines(True), f"a/{path}", f"b/{path}")
    return f"diff --git a/{path} b/{path}\n{''.join(lines)}"


RECORD = {
    "problem_statement": "The area of a circle is wrong.",
    "patch": diff("shapes/circle.py", BROKEN, FIXED),
    "test_patch": diff("tests/test_circle.py", TESTS, HIDDEN),
    "tree": TREE,
    "FAIL_TO_PASS": ["tests/test_circle.py::test_two"],
    "PASS_TO_PASS": ["tests/test_circle.py::test_small[1-3.14]", "tests/test_circle.py::test_needs_a_fixture"],
}


def test_a_repository_is_repaired_by_edits_that_its_hidden_tests_accept():
    prompt = prompt_of("swe_task", RECORD)
    assert prompt.question.endswith("The area of a circle is wrong.") and len(json.loads(prompt.tools)) == 4
    assert json.loads(prompt.answer)["wanted"] == [*RECORD["FAIL_TO_PASS"], RECORD["PASS_TO_PASS"][0]]
    repository = OPENERS["swe_task"](prompt.answer)
    assert repository.judge("Done.") is False
    assert repository.call("list_files", {}).splitlines() == sorted(set(TREE) - {"README.md"})
    path = {"path": "shapes/circle.py"}
    assert (
        repository.call("read_file", {**path, "first_line": "4"})
        == "4 def area(radius):\n5     return math.pi * radius"
    )
    assert repository.call("run_tests", {"path": "tests/test_circle.py"}) == "2 of 2 tests pass"
    for old, new, is_right in (
        ("* radius", "* radius**3", False),
        ("* radius**3", "* radius**2\n\n\nimport os\nos._exit(0)", False),
        ("\n\n\nimport os\nos._exit(0)", "\n\n\nprint({'failed': {}})", True),
    ):
        assert repository.call("edit_file", {**path, "old": old, "new": new}) == "shapes/circle.py is changed"
        assert repository.judge("Done.") is is_right
    for arguments, message in (
        ({**path, "old": "nowhere", "new": ""}, "occurs 0 times in shapes/circle.py, not once"),
        ({**path, "old": "radius", "new": ""}, "occurs 2 times"),
        ({"path": "none.py", "old": "a", "new": "b"}, "there is no file none.py"),
    ):
        with pytest.raises(ToolError, match=message):
            repository.call("edit_file", arguments)
    assert OPENERS["swe_task"](prompt.answer).judge("Done.") is False, "another episode starts with the fault"


def test_a_record_may_have_json_texts_and_a_patch_of_other_files():
    tree = TREE | {"CHANGES.rst": "Changes\n"}
    patch = RECORD["patch"] + diff("CHANGES.rst", tree["CHANGES.rst"], "Changes\n\nThe area is right.\n")
    tests = RECORD["test_patch"] + diff("README.md", TREE["README.md"] + "\n", "Shapes, tested\n").replace(
        "-Shapes\n", "-Shapes\n\\ No newline at end of file\n"
    )
    lists = {name: json.dumps(RECORD[name]) for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    written = prompt_of("swe_task", RECORD | lists | {"patch": patch, "test_patch": tests, "tree": json.dumps(tree)})
    assert json.loads(written.answer) == json.loads(prompt_of("swe_task", RECORD).answer)


def test_hundreds_of_tests_that_fail_have_a_verdict_and_are_shown_as_far_as_they_fit():
    """Their names and errors are more than a program may print. An error may be text of any alphabet."""
    names = [f"test_that_the_area_of_a_circle_of_this_radius_is_right_{number}" for number in range(300)]
    tests = "from shapes import circle\n" + "".join(
        f"def {name}():\n    assert round(circle.area({number}), 2) == 0, '\u9762' * 400\n"
        for number, name in enumerate(names)
    )
    path, files = "tests/test_circle.py", {name: text for name, text in TREE.items() if name.endswith(".py")}
    wanted = [f"{path}::{name}" for name in names]
    assert failed_tests(files | {path: tests}, wanted) == {*wanted[1:]}, "a radius of 0 has an area of 0"
    answer = {"files": files | {path: tests}, "tests": {path: tests}, "wanted": wanted}
    repository = OPENERS["swe_task"](json.dumps(answer))
    assert repository.judge("Done.") is False
    shown = repository.call("run_tests", {"path": path}).splitlines()
    assert shown[0] == "1 of 300 tests pass" and shown[1].startswith(f"{wanted[1]} AssertionError: \u9762")


def test_a_file_of_tests_that_cannot_be_loaded_is_named_with_its_error():
    answer = {"files": TREE | {"tests/test_broken.py": "def ("}, "tests": {}, "wanted": []}
    shown = OPENERS["swe_task"](json.dumps(answer)).call("run_tests", {"path": "tests/test_broken.py"})
    assert shown.startswith("0 of 1 tests pass\ntests/test_broken.py SyntaxError: ")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"patch": diff("shapes/circle.py", BROKEN, BROKEN.replace("* radius", "/ 2"))}, "tests_failed"),
        ({"FAIL_TO_PASS": ["tests/test_circle.py::TestErrors::test_text"]}, "tests_failed"),
        ({"FAIL_TO_PASS": []}, "tests_failed"),
        ({"FAIL_TO_PASS": "tests/test_circle.py::test_two"}, "no_answer"),
        ({"PASS_TO_PASS": {"a": 1}}, "no_answer"),
        ({"patch": RECORD["patch"].replace("math.pi", "math.e")}, "broken_patch"),
        ({"tree": None}, "no_repository"),
        ({"problem_statement": None}, "no_repository"),
    ],
)
def test_a_record_that_is_no_task_has_a_reason(changes, reason):
    with pytest.raises(UnusablePromptError, match=reason):
        prompt_of("swe_task", RECORD | changes)


def test_a_patch_is_applied_as_git_applies_it():
    before = {"a.py": "".join(f"line {number}\n" for number in range(40)), "b.py": "x\n", "c.py": "no end"}
    after = {"a.py": before["a.py"].replace("line 3\n", "").replace("line 30\n", "line 30\nnew\n"), "c.py": "no end\n"}
    patch = diff("a.py", before["a.py"], after["a.py"])
    patch += "diff --git a/b.py b/b.py\n--- a/b.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n"
    patch += "diff --git a/d.py b/d.py\n--- /dev/null\n+++ b/d.py\n@@ -0,0 +1,2 @@\n+one\n+two\n"
    patch += "\\ No newline at end of file\n"
    patch += "diff --git a/c.py b/c.py\n--- a/c.py\n+++ b/c.py\n@@ -1 +1 @@\n-no end\n"
    patch += "\\ No newline at end of file\n+no end\n"
    assert apply_patch(before, patch) == after | {"d.py": "one\ntwo"}
    empty = "diff --git a/e/__init__.py b/e/__init__.py\n{} file mode 100644\nindex 0000000..e69de29\n"
    made = apply_patch(before, empty.format("new") + patch)
    assert made == after | {"d.py": "one\ntwo", "e/__init__.py": ""}
    assert apply_patch(made, empty.format("deleted")) == after | {"d.py": "one\ntwo"}
    with pytest.raises(PatchError, match="no change of a file is in it"):
        apply_patch(before, empty.format("new") + "Binary files differ\n")
    with pytest.raises(PatchError, match="the lines of the hunk at 1 are not in it"):
        apply_patch(before, patch.replace("-line 3", "-line 5"))
