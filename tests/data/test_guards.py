"""What is banned in tasks/data because its result depends on partitions, and what executors may import."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tasks.data.decontamination.item_names import ProtectedItems
from tasks.data.decontamination.overlap import OverlapIndex
from tests.conftest import ROOT
from tests.house.test_house import NAMES, imports, name_of

FILES = sorted((ROOT / "tasks" / "data").rglob("*.py"))
BANNED = {
    "dropDuplicates": "keeps a different row for another partition count: group and take a minimum over a total order",
    "drop_duplicates": "as dropDuplicates",
    "first": "depends on the order of rows",
    "first_value": "depends on the order of rows",
    "last": "depends on the order of rows",
    "any_value": "depends on the order of rows",
    "collect_list": "depends on the order of rows",
    "rand": "differs per partition",
    "randn": "differs per partition",
    "shuffle": "differs per run",
    "monotonically_increasing_id": "counts per partition",
    "spark_partition_id": "differs per partition count",
    "sample": "draws per partition: use a predicate on a hash",
    "limit": "takes whatever comes first: use a predicate on a hash",
    "avg": "float sums differ in their last digits",
    "mean": "float sums differ in their last digits",
    "stddev": "float sums differ in their last digits",
    "sum_distinct": "float sums differ in their last digits",
}
SENT_IN_BROADCASTS = (ProtectedItems, OverlapIndex)


def spark_calls(path) -> set[str]:
    """Names of the methods and functions that a file calls on Spark frames and functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.func.attr for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }


@pytest.mark.parametrize(
    "path", [path for path in FILES if "pyspark" in path.read_text(encoding="utf-8")], ids=lambda path: path.stem
)
def test_nothing_that_depends_on_partitions_is_called(path):
    assert not {name: reason for name, reason in BANNED.items() if name in spark_calls(path)}


SMALL_FILES = {
    "classifiers.json",
    "ngram_model.json",
    "tokenizer.json",
    "problems.parquet",
    "held_out.parquet",
    "held_out_tasks.parquet",
    "passages.parquet",
    "prompts.parquet",
}
"""Files whose size a configuration bounds: the driver may read them whole."""
NAMED_ELSEWHERE = {"protected_items": {"name"}, "validate_contract": {"table.files", "part.name"}}
"""Calls whose file is a variable: generated problems; tables on one machine with a directory, and a phase's order, part
by part."""


def spark_modules() -> list[Path]:
    """Modules of tasks/ whose step, or a function of it, is given Spark's resources."""
    return [path for path in sorted((ROOT / "tasks").rglob("*.py")) if "spark_session(" in path.read_text()]


@pytest.mark.parametrize("path", spark_modules(), ids=lambda path: path.stem)
def test_a_step_on_spark_opens_no_part_in_the_driver(path):
    """It passes `files` on to executors; `path`, `paths` and `directory` are files of this machine."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        owner = ast.unparse(node.func.value)
        if node.func.attr in ("paths", "directory"):
            raise AssertionError(f"{path.name}:{node.lineno} reads {ast.unparse(node)} in the driver")
        if node.func.attr == "path" and owner not in ("output", "os") and node.args:
            name = ast.unparse(node.args[0])
            allowed = {repr(file) for file in SMALL_FILES} | NAMED_ELSEWHERE.get(path.stem, set())
            assert name in allowed, f"{path.name}:{node.lineno} reads {name} in the driver"


def test_sums_are_sums_of_integers():
    """Every F.sum in tasks/data is over counts or lengths: a float column there would reach content."""
    allowed = {"as_node", "when", "num_bytes", "num_chars", "num_records", "num_words", "num_tokens", "num_occurrences"}
    allowed |= {"amount", "removed"}  # of removed_share.py: documents or bytes
    allowed |= {"num_documents"}  # of remove_semantic_duplicates.py
    allowed |= {"kind", "name"}  # of mask_personal_data.py: what was masked; of shard_documents.py: tokens
    for path in FILES:
        for argument in re.findall(r"F\.sum\(\s*(?:F\.)?\"?(\w+)", path.read_text(encoding="utf-8")):
            assert argument in allowed, f"{path.name}: F.sum over {argument}: say here why it is an integer"


def test_modules_that_run_in_executors_import_neither_prefect_mlflow_infra_nor_spark():
    from infra.code_digest import closure, module_path

    shipped = {
        name_of(path): path
        for path in FILES
        if re.search(r"Runs in\s+executors|inside Spark executors", path.read_text(encoding="utf-8"))
    }
    known = {
        "chat_records",
        "duplicate_candidates",
        "heuristics",
        "minhash",
        "overlap",
        "source_records",
        "tokenize_chats",
        "words",
    }
    assert known <= {path.stem for path in shipped.values()}
    for module in closure(tuple(sorted(shipped))):
        names = {name.split(".")[0] for name in imports(module_path(module), runtime_only=True)}
        assert not names & {"prefect", "mlflow", "infra", "pyspark"}, module


MAPPERS = ("mapInArrow", "map_documents")
"""What sends a function to executors."""


def sent_to_executors() -> dict[str, str]:
    """The module of each function that a step gives to one of MAPPERS, itself or as a partial, by the function's
    name."""
    modules = {}
    for path in FILES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
        if not any(getattr(call.func, "attr", getattr(call.func, "id", "")) in MAPPERS for call in calls):
            continue
        imported = {
            name.name: node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names
        }
        own = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        for call in calls:
            called = getattr(call.func, "attr", getattr(call.func, "id", ""))
            if called in ("mapInArrow", "partial") and isinstance(call.args[0], ast.Name):
                name = call.args[0].id
                if name in own or name in imported:
                    modules[name] = name_of(path) if name in own else imported[name]
    return modules


def test_functions_that_executors_call_are_in_modules_that_they_are_shipped():
    """A function is sent by the name of its module, which executors import: infra is not there."""
    sent = sent_to_executors()
    sent |= {one.__name__: one.__module__ for one in SENT_IN_BROADCASTS}
    assert {"read_sources", "extract_batches", "join_files", "origin_edges", "write_part"} <= sent.keys()
    for name, module in sent.items():
        waiting, seen = [module], set()
        while waiting:
            current = waiting.pop()
            if current in NAMES and current not in seen:
                seen.add(current)
                waiting += imports(NAMES[current], runtime_only=True)
        assert not {other for other in seen if other.startswith("infra.")}, f"{name} of {module}"


def test_files_and_functions_stay_readable():
    for path in [*FILES, ROOT / "infra" / "machine" / "spark.py", ROOT / "data_contracts" / "runner.py"]:
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 350, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 60, f"{path.name}: {node.name}"
