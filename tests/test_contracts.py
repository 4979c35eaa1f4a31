"""Data contracts: what breaks one is named with rule, column and rows; each of them is held to data that breaks it."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from configs.schema import ContractRecipe
from data_contracts.runner import CONTRACTS_DIR, read_contract
from infra.step import Output
from tasks.data.validate_contract import ContractViolationError, validate_contract

ID, DIGEST = "0123456789abcdef", "ab" * 32
DOCUMENT = {
    "id": ID, "source": "a.txt", "offset": 0, "domain": "web", "content_digest": DIGEST, "num_chars": 4, "text": "text", "split": "train",
}  # fmt: skip
VALIDATION = {**DOCUMENT, "id": "1" * 16, "split": "validation", "content_digest": "cd" * 32}
DROPPED = {"id": "2" * 16, "reason": "near_duplicate", "kept_id": ID, "source": "b.txt", "offset": 3}
ITEM = {"item_id": "validation/x", "kind": "validation", "domain": "web", "prompt_digest": DIGEST, "score": 1.0, "num_bytes": 9}
VOCABULARY = [{"token_id": number, "token": f"t{number}", "kind": "ordinary"} for number in range(300)]
GOOD = {
    "documents/*.parquet": [DOCUMENT, VALIDATION],
    "dropped.parquet": [DROPPED],
    "rejected.parquet": [DROPPED],
    "problems.parquet": [{"id": "p0", "prompt": "1 + 1 =", "answer": " 2"}],
    "vocabulary.parquet": VOCABULARY,
    "shards/*.parquet": [{"id": ID, "source": "a.txt", "offset": 0, "sequence": 0, "num_tokens": 5}],
    "items.parquet": [ITEM, {**ITEM, "item_id": "arithmetic/y", "kind": "arithmetic"}],
    "order.npy": [
        {"shard": 0, "sequence": 0, "offset": 0, "length": 3, "slot": 0},
        {"shard": 0, "sequence": 1, "offset": 0, "length": 2, "slot": 3},
    ],
}


def subject(tmp_path: Path, **changes: list[dict]) -> SimpleNamespace:
    """An artifact with every table that a contract speaks of; `changes` replace some."""
    for pattern, rows in {**GOOD, **changes}.items():
        path = tmp_path / pattern.replace("*", "part-00000")
        path.parent.mkdir(exist_ok=True)
        if path.suffix == ".npy":
            np.save(path, np.array([list(row.values()) for row in rows], dtype=np.int64))
        else:
            pq.write_table(pa.Table.from_pylist(rows), path)
    manifest = SimpleNamespace(step="toy_step")
    return SimpleNamespace(manifest=manifest, key="k" * 64, paths=lambda pattern: sorted(tmp_path.glob(pattern)))


def check(name: str, artifact: SimpleNamespace, tmp_path: Path):
    """Run a contract as its step does."""
    output = Output(tmp_path / "out", tmp_path / "work", "key", lambda progress: None, lambda step, metrics: None)
    return validate_contract.function(subject=artifact, recipe=ContractRecipe(name=name), output=output)


@pytest.mark.parametrize("name", sorted(path.stem for path in CONTRACTS_DIR.glob("*.yaml")))
def test_good_data_holds_every_contract(name, tmp_path):
    result = check(name, subject(tmp_path), tmp_path)
    assert result.num_expectations == sum(len(table.expectations) for table in read_contract(name))
    assert (tmp_path / "out" / "findings.json").is_file()


BREAKING = [
    ("ingested", "documents/*.parquet", [DOCUMENT, DOCUMENT], "id in .*to_be_unique"),
    ("ingested", "documents/*.parquet", [{**DOCUMENT, "text": " \n"}], "text in .*not_match_regex"),
    ("deduplicated", "documents/*.parquet", [DOCUMENT, {**VALIDATION, "content_digest": DIGEST}], "content_digest in .*to_be_unique"),
    ("deduplicated", "dropped.parquet", [{**DROPPED, "kept_id": ""}], "kept_id in dropped"),
    (
        "filtered",
        "documents/*.parquet",
        [{**DOCUMENT, "domain": "webb"}],
        f"domain in .*value_set.*1 of 1 rows, for example domain='webb' id='{ID}'",
    ),
    ("decontaminated", "documents/*.parquet", [DOCUMENT], "split in .*distinct_values"),
    ("decontaminated", "dropped.parquet", [{**DROPPED, "kept_id": ""}], "kept_id in dropped"),
    ("problems", "problems.parquet", [{"id": "p0", "prompt": "1 + 1 =", "answer": "two"}], "answer in problems.*answer='two'"),
    ("tokenizer", "vocabulary.parquet", [*VOCABULARY[:-1], {**VOCABULARY[-1], "kind": "odd"}], "kind in vocabulary"),
    ("shards", "shards/*.parquet", [{"id": "x", "source": "a", "offset": 0, "sequence": -1, "num_tokens": 5}], "sequence in shards"),
    ("packed", "order.npy", [{"shard": 0, "sequence": 0, "offset": 0, "length": 0, "slot": 0}], "length in order.npy"),
    ("evaluation_items", "items.parquet", [ITEM, {**ITEM, "item_id": "b"}], "kind in items.parquet"),
]


@pytest.mark.parametrize(("name", "table", "rows", "message"), BREAKING)
def test_broken_data_is_refused_with_rule_column_and_rows(name, table, rows, message, tmp_path):
    with pytest.raises(ContractViolationError, match=rf"contract {name} is broken by toy_step .*{message}"):
        check(name, subject(tmp_path, **{table: rows}), tmp_path)
    assert not (tmp_path / "out" / "findings.json").exists()


def test_every_contract_has_a_breaking_case():
    assert {name for name, *_ in BREAKING} == {path.stem for path in CONTRACTS_DIR.glob("*.yaml")}


def test_a_missing_column_and_an_unknown_expectation_are_named(tmp_path, monkeypatch):
    with pytest.raises(ContractViolationError, match=r"items\.parquet has no column score"):
        check("evaluation_items", subject(tmp_path, **{"items.parquet": [{k: v for k, v in ITEM.items() if k != "score"}]}), tmp_path)
    monkeypatch.setattr("data_contracts.runner.CONTRACTS_DIR", tmp_path)
    rule = {"type": "expect_columns_to_sing", "column": "id"}
    (tmp_path / "odd.yaml").write_text(
        yaml.safe_dump({"tables": [{"files": "items.parquet", "columns": ["item_id"], "expectations": [rule]}]})
    )
    with pytest.raises(ValueError, match="has no expectation expect_columns_to_sing"):
        check("odd", subject(tmp_path), tmp_path)
    with pytest.raises(ValueError, match=r"no contract absent.yaml: the contracts are odd"):
        read_contract("absent")


def test_nothing_is_sent_anywhere(tmp_path, monkeypatch):
    import socket

    looked_up = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **named: looked_up.append(host) or [])
    check("problems", subject(tmp_path), tmp_path)
    time.sleep(0.2)
    assert looked_up == []
