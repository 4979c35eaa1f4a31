"""Every contract refuses what it speaks of, and says rule, column and rows."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pandas as pd
import pytest
import yaml

from configs.schema import ContractRecipe
from data_contracts.runner import CONTRACTS_DIR, ContractTable, check_table, read_contract
from infra.step import Artifact, Output, Record, step
from tasks.data.environments.environments import GENERATORS, OPENERS
from tasks.data.filtering.score_bounds import SCORES
from tasks.data.prompts.prompt_records import READERS
from tasks.data.prompts.verifiers import VERIFIERS
from tasks.data.sources.data_directory import DOMAINS, ROLES
from tasks.data.validate_contract import ContractViolationError, check_files, validate_contract
from tests.support.data_inputs import RESOURCES, compute

NAMES = sorted(path.stem for path in CONTRACTS_DIR.glob("*.yaml"))
DIGEST = "0123456789abcdef" * 4
GOOD = {
    "id": ["0123456789abcdef", "fedcba9876543210"],
    "source": ["a.txt", "b.txt"],
    "offset": [0, 7],
    "domain": ["web", "code"],
    "content_digest": [DIGEST, DIGEST[::-1]],
    "num_chars": [3, 4],
    "text": ["one", "four"],
    "split": ["train", "test"],
    "reason": ["near_duplicate", "too_few_words"],
    "kept_id": ["0123456789abcdef", "0123456789abcdef"],
    "num_bytes": [3, 4],
    "shard": [0, 0],
    "sequence": [0, 1],
    "length": [5, 5],
    "slot": [0, 5],
    "document": [0, 1],
    "number": [0, 1],
    "repository_id": ["0123456789abcdef", "0123456789abcdef"],
    "prompt": ["1 + 1 =", "1 + 2 ="],
    "answer": [" 2", " 3"],
    "num_tokens": [8, 9],
    "num_trained_tokens": [2, 3],
    "question": ["What is 1 + 1?", "What is 1 + 2?"],
    "family": ["brackets", "logic"],
    "item": ["bench.jsonl at 0", "bench.jsonl at 7"],
    "item_id": ["0123456789abcdef"] * 2,
    "item_source": ["bench.jsonl"] * 2,
    "item_offset": [0, 7],
    "item_kind": ["code_task", "problem"],
    "shared": ["def one(", "1 + 2 = 3"],
    "num_runs": [1, 2],
    "messages": ['[{"role":"user"},{"role":"assistant"}]'] * 2,
    "tools": ["[]", "[]"],
    "kind": ["math", "exact"],
    "collection": ["a", "b"],
    "name": ["a.txt", "b.txt"],
    "sha256": [DIGEST, DIGEST],
    "size": [0, 7],
    "role": ["pretrain", "sft"],
    "format": ["text", "jsonl"],
    "markup": ["", "html"],
    "language": ["en", ""],
    "language_score": [0.9, None],
    "quality": [0.5, None],
    "toxicity": [0.1, None],
    "factuality": [None, 0.5],
    "perplexity": [80.0, None],
    "quality_bucket": [1, -1],
    "digest": ["0123456789abcdef", "fedcba9876543210"],
    "num_documents": [7, 8],
    "neighbour_id": ["fedcba9876543210", "0123456789abcdef"],
    "num_shared": [9, 8],
    "num_union": [10, 9],
    "similarity": [0.9, 0.889],
    "passage": ["The boats came home late. " * 4, "It was quiet in the harbour. " * 4],
    "cosine": [0.97, 0.99],
    **{kind: [1, 0] for kind in ("secret", "email", "iban", "credit_card", "us_ssn", "ip_address", "phone")},
}
VOCABULARY = {
    "token_id": list(range(292)),
    "token": [f"t{n}" for n in range(292)],
    "kind": ["ordinary"] * 256 + ["special"] * 36,
}


EVALUATION = {
    "item_id": ["i1", "i2", "i3", "i4"],
    "kind": ["arithmetic", "chat_problem", "document", "worked_problem"],
    "domain": ["synthetic", "synthetic", "web", "synthetic"],
    "unit": ["i1", "i2", "g", "i4"],
    "prompt_digest": [DIGEST] * 4,
    "score": [1.0, 0.5, 2.0, 2.0],
    "num_bytes": [0, 0, 7, 7],
    "num_samples": [1, 4, 1, 1],
    "num_right": [1, 2, 0, 0],
    "num_formed": [0, 3, 0, 0],
    "text": ["1 + 1 =", "What is 1 + 1?", "one", "1+1=2"],
    "layer": [0, 0, 1, 1],
    "expert": [0, 1, 0, 1],
    "num_tokens": [3, 4, 7, 7],
    "num_routed": [7, 7, 7, 7],
}
FERTILITY = {
    "tokenizer": ["ours", "ours"],
    "domain": ["*", "web"],
    "language": ["*", "*"],
    "num_documents": [7, 7],
    "num_bytes": [70, 70],
    "num_words": [12, 12],
    "num_tokens": [20, 20],
    "tokens_per_word": [1.67, 1.67],
    "bytes_per_token": [3.5, 3.5],
    "vocabulary_share": [0.5, 0.5],
}
REQUESTS = {
    "id": GOOD["id"],
    "prompt": ["How do I take it?", "How do I take it back?"],
    "answer": ['{"known": "", "label": "harmful"}', '{"known": "", "label": "harmless"}'],
    "family": ["harmful", "harmless"],
}
TASKS = GOOD | {"kind": ["calculator", "retail"], "answer": ["{}", "{}"]}
REPOSITORIES = GOOD | {"domain": ["repository", "repository"]}
OWN_TABLES = {
    "repositories": REPOSITORIES,
    "tokenizer": VOCABULARY,
    "evaluation_items": EVALUATION,
    "evaluation_suite": EVALUATION,
    "chats": GOOD | {"split": ["train", "validation"]},
    "preferences": GOOD
    | {"prompt": ['[{"role":"user"}]'] * 2, "chosen": ['{"role":"assistant"}'] * 2}
    | {"rejected": ['{"role":"assistant"}'] * 2},
    "packed_pairs": {
        "id": ["0123456789abcdef", "fedcba9876543210", "0123456789fedcba"],
        "collection": ["a"] * 3,
        "answer_start": [7] * 3,
    },
    "sampled_solutions": GOOD
    | {"split": ["train"] * 2, "num_samples": [8, 8], "num_right": [2, 0], "num_kept": [1, 0]},
}


def good_table(contract: str, columns: tuple[str, ...]) -> pd.DataFrame:
    special = next((table for table in (FERTILITY, REQUESTS) if set(columns) <= set(table)), None)
    is_task = contract == "problems" and "kind" in columns
    own = special or (TASKS if is_task else OWN_TABLES.get(contract, GOOD))
    return pd.DataFrame({name: own[name] for name in columns})


BREAKERS = {
    "expect_column_values_to_be_unique": lambda frame, rule: frame.assign(
        **{rule["column"]: frame[rule["column"]].iloc[0]}
    ),
    "expect_column_values_to_not_be_null": lambda frame, rule: frame.assign(**{rule["column"]: None}),
    "expect_column_values_to_match_regex": lambda frame, rule: frame.assign(**{rule["column"]: "?!"}),
    "expect_column_values_to_not_match_regex": lambda frame, rule: frame.assign(**{rule["column"]: ""}),
    "expect_column_values_to_be_in_set": lambda frame, rule: frame.assign(**{rule["column"]: "poems"}),
    "expect_column_distinct_values_to_equal_set": lambda frame, rule: frame.assign(
        **{rule["column"]: rule["value_set"][0]}
    ),
    "expect_column_values_to_be_between": lambda frame, rule: frame.assign(**{rule["column"]: rule["min_value"] - 1}),
    "expect_column_min_to_be_between": lambda frame, rule: frame.assign(**{rule["column"]: frame[rule["column"]] + 1}),
    "expect_column_values_to_be_increasing": lambda frame, rule: frame.iloc[::-1].reset_index(drop=True),
    "expect_column_distinct_values_to_contain_set": lambda frame, rule: frame.assign(
        **{rule["column"]: rule["value_set"][0]}
    ),
    "expect_column_pair_values_a_to_be_greater_than_b": lambda frame, rule: frame.assign(
        **{rule["column_A"]: frame[rule["column_B"]] - 1}
    ),
    "expect_table_row_count_to_be_between": lambda frame, rule: frame.iloc[:0],
}
RULES = [
    (name, number, rule)
    for name in NAMES
    for number, table in enumerate(read_contract(name))
    for rule in table.expectations
]


@pytest.mark.parametrize("name", NAMES)
def test_good_data_holds_every_rule(name):
    for table in read_contract(name):
        findings = check_table(table, good_table(name, table.columns))
        assert len(findings) == len(table.expectations)
        assert [finding for finding in findings if not finding.is_met] == []


def test_every_rule_of_every_contract_is_broken_by_data_that_breaks_it():
    for name in NAMES:
        for number, table in enumerate(read_contract(name)):
            for rule in table.expectations:
                broken = BREAKERS[rule["type"]](good_table(name, table.columns), rule)
                (finding,) = check_table(replace(table, expectations=(rule,)), broken)
                assert not finding.is_met, (name, number, rule)


@pytest.mark.parametrize(
    ("name", "column", "known"),
    [
        ("ingested", "domain", {*DOMAINS}),
        ("ingested", "role", {*ROLES} - {"ignore"}),
        ("problems", "kind", {*GENERATORS}),
        ("prompts", "kind", {*READERS, *VERIFIERS, *OPENERS}),
    ],
)
def test_a_contract_allows_every_name_that_the_code_has(name, column, known):
    rules = [rule for table in read_contract(name) for rule in table.expectations]
    allowed = [set(rule["value_set"]) for rule in rules if rule.get("column") == column and "value_set" in rule]
    assert allowed and all(each == known for each in allowed)


def test_a_row_without_values_breaks_every_contract():
    """But for the columns that a contract calls nullable: rules on values pass over NULL."""
    for name in NAMES:
        for table in read_contract(name):
            frame = good_table(name, table.columns)
            last = pd.DataFrame({column: [None] for column in table.columns}, dtype=object)
            findings = check_table(table, pd.concat([frame.astype(object), last], ignore_index=True))
            empty = {finding.arguments["column"] for finding in findings if "not_be_null" in finding.expectation}
            assert empty and not any(finding.is_met for finding in findings if "not_be_null" in finding.expectation)
            assert {*table.columns} - empty <= {*SCORES, "score"}, (name, table.files)


class ToyTable(Record):
    num_rows: int


@step(content=("*.parquet",))
def write_toy_table(*, output: Output) -> ToyTable:
    rows = {
        "id": ["a", "b", "b"],
        "prompt": ["1 + 1 =", "2 + 2 =", "3 + 3 ="],
        "answer": [" 2", " four", " 6"],
        "question": ["a?", "b?", "c?"],
        "text": ["1+1=2", "2+2=4", "3+3=6"],
        "domain": ["math"] * 3,
        "kind": ["exact"] * 3,
        "family": ["logic"] * 3,
        "messages": ['[{"role":"assistant"}]'] * 3,
        "tools": ["[]"] * 3,
    }
    for name in ("problems", "prompts", "tasks", "chats", "held_out", "held_out_tasks", "safety"):
        pd.DataFrame(rows).to_parquet(output.path(f"{name}.parquet"))
    return ToyTable(num_rows=3)


@pytest.fixture
def toy(tmp_path) -> Artifact:
    return compute(write_toy_table, tmp_path)


def test_a_violation_names_contract_step_rule_column_and_rows(toy, tmp_path):
    with pytest.raises(ContractViolationError) as violation:
        compute(
            validate_contract,
            tmp_path,
            subject=toy,
            recipe=ContractRecipe(name="problems"),
            resources=RESOURCES,
            data_files=("data_contracts/problems.yaml",),
        )
    message = str(violation.value)
    assert "contract problems is broken by write_toy_table" in message
    assert re.search(
        r"answer in problems\.parquet: expect_column_values_to_match_regex .*found 1 of 3 rows.*answer=' four' id='b'",
        message,
    )
    assert re.search(r"id in problems\.parquet: expect_column_values_to_be_unique found 2 of 3 rows", message)


def test_spark_finds_what_pandas_finds_and_reads_the_tables_that_are_too_large(toy):
    """On a table that breaks one rule and holds the others."""
    table = next(table for table in read_contract("problems") if table.files == "problems.parquet")
    (findings, num_small), (same, num_large) = (
        check_files(toy, table, "problems", RESOURCES, bound) for bound in (10**9, 0)
    )
    assert num_small == num_large == 3
    assert [(finding.expectation, finding.is_met, finding.observed) for finding in findings] == [
        (finding.expectation, finding.is_met, finding.observed) for finding in same
    ]
    assert {finding.is_met for finding in findings} == {True, False}
    assert [set(finding.examples) for finding in findings] == [set(finding.examples) for finding in same]


def test_a_missing_column_is_a_violation_that_names_it(toy, tmp_path, monkeypatch):
    monkeypatch.setattr("data_contracts.runner.CONTRACTS_DIR", tmp_path)
    (tmp_path / "mine.yaml").write_text(
        yaml.safe_dump({"tables": [{"files": "problems.parquet", "columns": ["id", "colour"], "expectations": []}]})
    )
    with pytest.raises(ContractViolationError, match=r"contract mine .*problems\.parquet has no column colour"):
        compute(validate_contract, tmp_path, subject=toy, recipe=ContractRecipe(name="mine"), resources=RESOURCES)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"tables": [{"files": "x", "columns": ["a"]}]},
            r"mine\.yaml: a contract has `tables`.*'expectations' is wrong",
        ),
        (
            {"tables": [{"files": "x", "columns": ["a"], "expectations": [{"type": "expect_magic"}]}]},
            "no expectation expect_magic",
        ),
    ],
)
def test_a_mistake_in_a_contract_is_named(content, message, tmp_path, monkeypatch):
    monkeypatch.setattr("data_contracts.runner.CONTRACTS_DIR", tmp_path)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError, match=message):
        check_table(read_contract("mine")[0], pd.DataFrame({"a": [1]}))


def test_an_unknown_contract_is_named_with_those_there_are():
    with pytest.raises(ValueError, match=r"no contract nothing\.yaml: the contracts are .*deduplicated"):
        read_contract("nothing")


def test_a_changed_contract_file_changes_the_key_of_its_check_alone(toy):
    recipe = ContractRecipe(name="problems")
    keys = {
        str(validate_contract.identity(recipe, {"subject": toy}, (f"data_contracts/{name}.yaml",)))
        for name in ("problems", "ingested")
    }
    assert len(keys) == 2
    assert "data_contracts" not in str(write_toy_table.identity(None, {}))


def test_contracts_that_threads_check_at_the_same_time_are_not_mixed_up():
    def found(length: int) -> set[str]:
        table = ContractTable(
            f"{length}.parquet", ("id",), ({"type": "expect_column_values_to_be_null", "column": "id"},)
        )
        (finding,) = check_table(table, pd.DataFrame({"id": [f"{length}"] * length}))
        return {finding.table, finding.observed}

    lengths = range(1, 9)
    with ThreadPoolExecutor(len(lengths)) as threads:
        assert list(threads.map(found, lengths)) == [{f"{n}.parquet", f"{n} of {n} rows"} for n in lengths]
