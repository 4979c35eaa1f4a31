"""All data steps in order on a small corpus: counts add up, lineage holds, and partitions change no byte."""

from __future__ import annotations

import json
import re
from collections import Counter
from contextlib import contextmanager

import numpy as np
import pytest
from botocore.client import BaseClient

from configs.schema import ContractRecipe, PackingRecipe, RepositoryRecipe, SparkResources
from infra.code_digest import closure
from infra.home import Home
from infra.machine.spark import stop_spark
from infra.storage.s3_store import S3Store
from model.text.tokenizer_layout import END_OF_TEXT
from tasks.data.packing.pack_phase import pack_phase
from tasks.data.repositories.concatenate_repositories import concatenate_repositories
from tasks.data.shards.shard_documents import shard_documents
from tasks.data.shards.shard_validation import shard_validation
from tasks.data.shards.token_shard import open_shard
from tasks.data.sources.list_sources import list_sources
from tasks.data.tokenizer.train_tokenizer import train_tokenizer
from tasks.data.validate_contract import MAX_LOCAL_BYTES, validate_contract
from tests.support.data_inputs import (
    RECIPE,
    RESOURCES,
    SYNTHESIS,
    Compute,
    chain_recipe,
    cleaned,
    compute,
    compute_in,
    in_partitions,
    rows,
    write_corpus,
    write_packages,
)
from tests.support.training_inputs import packed_rows

CHAIN_RECIPE = chain_recipe(SYNTHESIS)
TOKENIZER = RECIPE.tokenizer.model_copy(update={"num_ordinary_tokens": 400, "sample_chars": 150000})
MIXTURE = {"web": 0.5, "code": 0.1, "repository": 0.2, "synthetic": 0.2}
PACKING = PackingRecipe(
    num_tokens=6400,
    sequence_length=64,
    packing="stream",
    mixture=MIXTURE,
    bucket_weights=(),
    max_epochs=4.0,
    fim_rate=0.5,
    seed=1,
)


def run_chain(sources, root, resources: SparkResources, run: Compute = compute) -> dict:
    """Every artifact by the name of its contract; `run` computes a step."""
    common = {"resources": resources}
    artifacts = cleaned(sources, root, CHAIN_RECIPE, resources, run)
    clean = artifacts["decontaminated"]
    tokenizer = run(train_tokenizer, root, documents=clean, recipe=TOKENIZER, **common)
    repositories = run(
        concatenate_repositories, root, documents=clean, recipe=RepositoryRecipe(max_document_chars=20000), **common
    )
    texts = {"documents": clean, "repositories": repositories, "tokenizer": tokenizer}
    shards = run(shard_documents, root, recipe=RECIPE.shards, **texts, **common)
    validation = run(shard_validation, root, **texts, **common)
    made = {"tokenizer": tokenizer, "repositories": repositories, "shards": shards, "validation": validation}
    return artifacts | made


def packed(chain: dict, root, run: Compute = compute):
    """Rows of a phase, of the chain's shards."""
    inputs = {"shards": chain["shards"], "tokenizer": chain["tokenizer"], "chats": None}
    return run(pack_phase, root, recipe=PACKING, **inputs)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    directory = tmp_path_factory.mktemp("corpus")
    write_corpus(directory)
    write_packages(directory)
    return list_sources(directory)


@pytest.fixture(scope="module")
def chain(sources, tmp_path_factory):
    root = tmp_path_factory.mktemp("chain")
    made = run_chain(sources, root, in_partitions(2))
    return made | {"packed": packed(made, root)}


def test_documents_in_equal_documents_out_and_dropped_by_reason(chain):
    dropping = ("boilerplate_free", "deduplicated", "distinct", "filtered", "decontaminated")
    names = ("extracted", "scored", "split", "masked", *dropping)
    ids = {name: [row["id"] for row in rows(chain[name], "documents/*.parquet")] for name in names}
    synthetic = [row["id"] for row in rows(chain["problems"], "documents/*.parquet")]
    before_each = ("extracted", "scored", "deduplicated", "split", "masked")
    for before, after in zip(before_each, dropping, strict=True):
        added = synthetic if after == "decontaminated" else []
        dropped = rows(chain[after], "dropped.parquet")
        assert sorted([*ids[before], *added]) == sorted([*ids[after], *(row["id"] for row in dropped)])
        assert Counter(row["reason"] for row in dropped) == chain[after].record.dropped
        assert ids[after] == sorted(ids[after]) and chain[after].record.num_documents == len(ids[after])
    assert (
        ids["scored"] == ids["boilerplate_free"]
        and ids["split"] == ids["distinct"]
        and ids["masked"] == ids["filtered"]
    )
    assert chain["deduplicated"].record.dropped == {"exact_duplicate": 1, "near_duplicate": 1}


def test_a_planted_evaluation_item_is_dropped_and_named(chain):
    (planted,) = [
        row for row in rows(chain["decontaminated"], "dropped.parquet") if row["reason"] == "overlaps_evaluation_text"
    ]
    (item,) = [row for row in rows(chain["ingested"], "evaluation/*.parquet") if row["id"] == planted["kept_id"]]
    (document,) = [row for row in rows(chain["filtered"], "documents/*.parquet") if row["id"] == planted["id"]]
    assert json.loads(item["text"])["question"] in document["text"]
    assert "overlaps_problem" not in chain["decontaminated"].record.dropped


def test_the_split_follows_the_cluster_and_only_the_cluster(chain):
    import hashlib

    documents = rows(chain["split"], "documents/*.parquet")
    for row in documents:
        share = int(hashlib.sha256(row["cluster"].encode()).hexdigest()[:8], 16) / 2**32
        assert row["split"] == ("test" if share < 0.2 else "validation" if share < 0.4 else "train")
    assert {row["split"] for row in documents} == {"train", "validation", "test"}


def test_a_sequence_leads_back_to_its_document_and_its_text(chain):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(chain["tokenizer"].path("tokenizer.json")))
    end = chain["tokenizer"].record.special_ids[END_OF_TEXT]
    sources = ("decontaminated", "repositories")
    documents = {
        row["id"]: row
        for name in sources
        for row in rows(chain[name], "documents/*.parquet")
        if row["split"] == "train"
    }
    members = rows(chain["shards"], "members.parquet")
    assert [row["id"] for row in members] == sorted(documents)
    directory = chain["shards"].directory("shards")
    for shard in chain["shards"].record.shards:
        opened = open_shard(directory / f"{shard}.bin")
        sidecar = rows(chain["shards"], f"shards/{shard}.parquet")
        assert [row["sequence"] for row in sidecar] == list(range(len(opened.lengths)))
        for row in sidecar:
            document = documents[row["id"]]
            tokens = opened.tokens[opened.starts[row["sequence"]] :][: opened.lengths[row["sequence"]]]
            assert document["domain"] == chain["shards"].record.domains[shard] and row["source"] == document["source"]
            assert (
                tokens[-1] == end
                and tokenizer.decode(tokens[:-1].tolist(), skip_special_tokens=False) == document["text"]
            )
            assert {"id": row["id"], "shard": shard, "sequence": row["sequence"]} in members


def test_a_repository_is_its_surviving_files_of_one_side_each_behind_those_that_it_imports(chain):
    files = {row["id"]: row for row in rows(chain["decontaminated"], "documents/*.parquet") if row["repository"]}
    assert any(row["piece"] for row in files.values()), (
        "no file was cut, so nothing shows that pieces come together again"
    )
    members = {}
    for row in rows(chain["repositories"], "files.parquet"):
        members.setdefault(row["repository_id"], []).append(row)
    documents = {row["id"]: row for row in rows(chain["repositories"], "documents/*.parquet")}
    assert set(members) == set(documents) and chain["repositories"].record.num_repositories > 1
    for identity, document in documents.items():
        own = [files[row["id"]] for row in sorted(members[identity], key=lambda row: row["number"])]
        assert {(row["repository"], row["split"]) for row in own} == {(document["repository"], document["split"])}
        assert sum(row["num_chars"] for row in members[identity]) == document["num_chars"] <= 20000
        position = -1
        for row in own:
            position = document["text"].index(row["text"], position + 1)
        order = list(dict.fromkeys(row["path"] for row in own))
        texts = {path: "".join(row["text"] for row in own if row["path"] == path) for path in order}
        for path, following in zip(sorted(order), sorted(order)[1:], strict=False):
            if f"from .{following.split('/')[1].removesuffix('.py')} import" in texts[path]:
                assert order.index(following) < order.index(path), "the imported file comes first"
        headers = dict.fromkeys(line for line in document["text"].splitlines() if line.startswith("# file:"))
        assert list(headers) == [f"# file: {path}" for path in order]
    placed = [row["id"] for rows_of in members.values() for row in rows_of]
    per_side = Counter(
        (row["repository"], row["split"]) for row in {(r["path"], r["split"]): r for r in files.values()}.values()
    )
    expected = [row["id"] for row in files.values() if per_side[row["repository"], row["split"]] > 1]
    assert sorted(placed) == sorted(expected)


def test_validation_shards_hold_the_documents_of_their_side_and_nothing_that_is_trained_or_judged(chain):
    sources = ("decontaminated", "repositories")
    held_out = {
        row["id"]
        for name in sources
        for row in rows(chain[name], "documents/*.parquet")
        if row["split"] == "validation"
    }
    members = {row["id"] for row in rows(chain["validation"], "members.parquet")}
    assert members == held_out != set() and not members & {
        row["id"] for row in rows(chain["shards"], "members.parquet")
    }


def test_packed_rows_hold_the_tokens_of_the_mixture(chain):
    packed = packed_rows(chain["packed"], chain["shards"])
    tokens, segments, trained = packed.rows(0, len(packed))
    assert tokens.shape == segments.shape == (100, 65) and trained.all()
    assert tokens.max() < chain["tokenizer"].record.num_tokens
    assert sum(chain["packed"].record.tokens_by_domain.values()) == 6401
    assert np.diff(segments, axis=1).min() >= 0


CONTRACTED = (
    "ingested",
    "extracted",
    "boilerplate_free",
    "scored",
    "deduplicated",
    "distinct",
    "filtered",
    "masked",
    "problems",
    "decontaminated",
    "repositories",
    "tokenizer",
    "shards",
    "validation",
    "packed",
)


@pytest.mark.parametrize("name", CONTRACTED)
def test_every_hand_over_holds_its_contract(chain, name, tmp_path):
    files = (f"data_contracts/{name}.yaml",)
    result = compute(
        validate_contract,
        tmp_path,
        subject=chain[name],
        recipe=ContractRecipe(name=name),
        resources=RESOURCES,
        data_files=files,
    )
    assert result.record.num_rows > 0 and result.record.num_expectations > 3


def test_the_code_digest_of_the_filter_follows_its_helpers_and_ingestion_does_not():
    assert "tasks.data.filtering.heuristics" in closure(("tasks.data.filtering.filter_documents",))
    assert "tasks.data.text.words" in closure(("tasks.data.filtering.filter_documents",))
    assert "tasks.data.filtering.heuristics" not in closure(("tasks.data.sources.ingest_documents",))
    assert "tasks.data.sources.ingest_documents" not in closure(("tasks.data.deduplication.deduplicate_documents",))


@contextmanager
def requests_of_this_process():
    """(operation, key) of the requests that this process makes while the block runs."""
    made, call = [], BaseClient._make_api_call

    def recorded(client, operation, arguments):
        made.append((operation, arguments.get("Key", "")))
        return call(client, operation, arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BaseClient, "_make_api_call", recorded)
        yield made


def test_in_a_bucket_every_digest_is_the_same_for_another_partition_count_and_the_driver_opens_no_part(
    s3_server, chain, sources, tmp_path
):
    """Executors read and write the bucket themselves."""
    stop_spark()  # a session that was started before the server knows no endpoint
    store = S3Store("s3://glm46/data-plane", Home(tmp_path / "home"))

    def on_s3(step, root, **arguments):
        return compute_in(store, step, **arguments)

    with requests_of_this_process() as requests:
        other = run_chain(sources, tmp_path, in_partitions(5), on_s3)
        contract = {"recipe": ContractRecipe(name="decontaminated"), "resources": in_partitions(5)}
        data_files = ("data_contracts/decontaminated.yaml",)
        on_s3(validate_contract, tmp_path, subject=other["decontaminated"], data_files=data_files, **contract)
    parts = re.compile(r"/(documents|evaluation|signatures|shards|rounds|compared)/")
    tables = re.compile(r"/(dropped|members|files|masked)\.parquet$")
    sizes = {key: store._size(key.removeprefix("data-plane/")) for _, key in requests if parts.search(key)}
    assert not {(operation, key) for operation, key in requests if key in sizes and operation != "PutObject"}
    # Tables without rows, which no task writes, and the problems that the driver makes.
    assert all(size < 65536 for size in sizes.values()), sizes
    read = {key for operation, key in requests if tables.search(key) and operation != "PutObject"}
    # A contract's table of one small file is checked by the driver.
    assert all(store._size(key.removeprefix("data-plane/")) <= MAX_LOCAL_BYTES for key in read)
    other["packed"] = packed(other, tmp_path, on_s3)
    assert {name: artifact.digest for name, artifact in other.items()} == {
        name: artifact.digest for name, artifact in chain.items()
    }
