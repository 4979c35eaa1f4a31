"""Issues of repositories in the form of SWE-bench: what a model is asked, and whether its patch resolves the issue.

A record with a `tree`, the whole source as path to text, is judged here. Of one without, SWE-bench's own containers
judge the predictions that `glm46 eval` writes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.data.sandbox.code_sandbox import isolation
from tasks.data.sandbox.tree_tests import passing_tests
from tasks.evaluation.benchmarks.patches import PatchError, apply_patch, changed_paths, patch_in, read_patch

INSTRUCTION = (
    "Resolve this issue of the repository {repository}. Answer with one patch in unified diff format between ```diff "
    "and ```, with three lines of context around each change."
)


@dataclass(frozen=True)
class RepositoryTask:
    """What decides whether a patch resolves an issue."""

    instance_id: str
    tree: Mapping[str, str] | None
    """None where the source is not in the record."""
    test_patch: str
    wanted: frozenset[str]
    """Tests that must pass: those that failed before, and those that already passed."""


@dataclass(frozen=True)
class PatchVerdict:
    is_well_formed: bool
    """Whether it can be read and, where the source is here, fits it."""
    is_resolved: bool | None
    """None where the source is not here."""


def task_of(record: Mapping[str, Any]) -> RepositoryTask:
    """Raises ValueError for a record without what SWE-bench states, or whose own patches cannot be read."""
    for name in ("instance_id", "problem_statement", "patch"):
        if not isinstance(record.get(name), str) or not record[name].strip():
            raise ValueError(f"it has no text in {name}")
    tree = record.get("tree")
    if tree is None:
        return RepositoryTask(record["instance_id"], None, "", frozenset())
    tests = [_names(record.get(name)) for name in ("FAIL_TO_PASS", "PASS_TO_PASS")]
    if not isinstance(tree, dict) or not tests[0] or not isinstance(record.get("test_patch"), str):
        raise ValueError("it has a tree, but no test_patch or no tests in FAIL_TO_PASS")
    try:
        apply_patch(tree, record["patch"])
        apply_patch(tree, record["test_patch"])
    except PatchError as error:
        raise ValueError(f"its patch or test_patch does not fit its tree ({error})") from error
    return RepositoryTask(record["instance_id"], tree, record["test_patch"], frozenset(tests[0] + tests[1]))


def issue_prompt(record: Mapping[str, Any], tree: Mapping[str, str] | None) -> str:
    """The issue, with the files that the right patch changes where the source is here ("oracle retrieval" of Jimenez
    et al. 2023, arXiv 2310.06770, section 4)."""
    asked = INSTRUCTION.format(repository=record.get("repo", ""))
    parts = [asked, f"Issue:\n{record['problem_statement'].strip()}"]
    if tree is not None:
        shown = sorted(changed_paths(record["patch"]) & tree.keys())
        parts += [f"File {name}:\n```\n{tree[name]}```" for name in shown]
    return "\n\n".join(parts)


def judge_patch(task: RepositoryTask, answer: str) -> PatchVerdict:
    """Whether the patch in an answer can be applied, and whether the task's tests pass then. Tests are those of the
    task, whatever the patch does to their files."""
    patch = patch_in(answer)
    try:
        if task.tree is None:
            return PatchVerdict(bool(read_patch(patch)), None)
        patched = apply_patch(task.tree, patch)
    except PatchError:
        return PatchVerdict(is_well_formed=False, is_resolved=None if task.tree is None else False)
    test_files = sorted(changed_paths(task.test_patch))
    for name in test_files:
        patched.pop(name, None)
    patched |= {name: task.tree[name] for name in test_files if name in task.tree}
    passed = passing_tests(apply_patch(patched, task.test_patch), sorted(_files(task.wanted)), isolation())
    return PatchVerdict(is_well_formed=True, is_resolved=task.wanted <= passed)


def prediction(instance_id: str, model: str, answer: str) -> str:
    """A line of SWE-bench's predictions."""
    return json.dumps({"instance_id": instance_id, "model_name_or_path": model, "model_patch": patch_in(answer)}) + "\n"


def _files(tests: frozenset[str]) -> set[str]:
    return {test.split("::")[0] for test in tests}


def _names(given: object) -> list[str]:
    """A list of tests, which some copies of SWE-bench state as JSON text."""
    try:
        names = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        names = None
    return [str(name) for name in names] if isinstance(names, Sequence) else []
