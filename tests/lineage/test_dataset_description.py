"""The Croissant description of a version's texts: the official reader validates it and loads the records."""

from __future__ import annotations

import json

import mlcroissant
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infra.home import Home
from infra.step import Output, Record, step
from infra.storage.manifest_graph import read_manifest_graph
from infra.storage.open_store import open_store
from tasks.lineage.dataset_description import dataset_description
from tasks.lineage.trace_model import ModelLineage, SourceUse, StepUse
from tests.support.evaluation_fakes import commit

PARTS = (
    {"id": ["a", "b"], "text": ["One.", "Two."], "num_bytes": [4, 4]},
    {"id": ["c"], "text": ["3"], "num_bytes": [1]},
)


class Toy(Record):
    name: str = ""


@step(content=("documents/*",))
def decontaminate_documents(*, output: Output) -> Toy:
    for number, columns in enumerate(PARTS):
        pq.write_table(pa.table(columns), output.path(f"documents/part-{number:05}.parquet"))
    return Toy(name="documents")


@step(content=("chats/*",))
def collect_chats(*, output: Output) -> Toy:
    pq.write_table(pa.table({"id": ["d"], "messages": ["[]"]}), output.path("chats/part-00000.parquet"))
    return Toy(name="chats")


@step(content=("chats/*",))
def sample_solutions(*, output: Output) -> Toy:
    pq.write_table(pa.table({"id": ["e"], "messages": ["[1]"]}), output.path("chats/part-00000.parquet"))
    return Toy(name="solutions")


@step(content=("shards.bin",))
def shard_documents(*, documents, output: Output) -> Toy:
    output.path("shards.bin").write_bytes(b"tokens")
    return Toy(name="shards")


@step(content=("shards.bin",))
def shard_chats(*, chats, output: Output) -> Toy:
    output.path("shards.bin").write_text(f"tokens of {chats.digest}")
    return Toy(name="chat shards")


@pytest.fixture
def trained(tmp_path):
    """The manifests of a store, and the lineage of a version that was trained on its documents but on no chats."""
    store = open_store(str(tmp_path / "store"), Home(tmp_path / "home"))
    shards = commit(store, shard_documents, documents=commit(store, decontaminate_documents))
    commit(store, shard_chats, chats=commit(store, collect_chats))
    made = StepUse(
        step="shard_documents", key=shards.key, digest=shards.digest, dropped={"short": 7, "long": 0}, recipe={}
    )
    source = SourceUse(
        name="a.txt", sha256="5" * 64, licence="CC0-1.0", num_documents=3, num_tokens=9, first_offsets=(0,)
    )
    lineage = ModelLineage(
        model="glm46-toy",
        version="3",
        aliases=(),
        key="",
        digest="",
        imported="",
        tokenizer_key="",
        tokenizer_digest="",
        phases=(),
        steps=(made,),
        sources=(source,),
        num_documents=3,
    )
    return read_manifest_graph(store), lineage, tmp_path / "store"


def test_the_official_reader_loads_the_texts_from_the_stores_directory(trained):
    graph, lineage, directory = trained
    path = directory / "croissant.json"
    path.write_text(json.dumps(dataset_description(graph, lineage)))
    dataset = mlcroissant.Dataset(jsonld=str(path))
    assert not dataset.metadata.issues.errors
    assert [records.uuid for records in dataset.metadata.record_sets] == ["documents"], "it saw no chats"
    rows = sorted(
        (row["documents/id"], row["documents/text"], row["documents/num_bytes"]) for row in dataset.records("documents")
    )
    assert rows == [(b"a", b"One.", 4), (b"b", b"Two.", 4), (b"c", b"3", 1)]


def test_it_names_licences_sources_digests_and_what_was_left_out(trained):
    graph, lineage, _ = trained
    description = dataset_description(graph, lineage)
    assert description["license"] == ["CC0-1.0"]
    others = tuple(source.model_copy(update={"licence": ""}) for source in lineage.sources)
    unstated = dataset_description(graph, lineage.model_copy(update={"sources": (*lineage.sources, *others)}))
    assert unstated["license"] == ["CC0-1.0", "NOASSERTION"], "not all of it has the licence that one source states"
    assert description["rai:dataPreprocessingProtocol"] == ["shard_documents: left out short 7"]
    (made,) = graph.made_by("decontaminate_documents")
    files = {part["name"]: part["sha256"] for part in description["distribution"] if part["@type"] == "cr:FileObject"}
    assert files == {name: entry.sha256 for name, entry in made.content.items()}


def test_collected_and_sampled_conversations_are_both_described(trained):
    graph, lineage, _ = trained
    (collected,) = graph.made_by("shard_chats")
    sampled = commit(graph.store, shard_chats, chats=commit(graph.store, sample_solutions))
    graph = read_manifest_graph(graph.store)
    steps = [
        lineage.steps[0].model_copy(update={"step": "shard_chats", "key": made.key, "digest": made.digest})
        for made in (collected, sampled.manifest)
    ]
    description = dataset_description(graph, lineage.model_copy(update={"steps": (*lineage.steps, *steps)}))
    wanted = {made.digest[:12] for made in graph.made_by("collect_chats", "sample_solutions")}
    assert {each["name"] for each in description["recordSet"]} == {"documents", *(f"chats-{each}" for each in wanted)}
    hashes = [part["sha256"] for part in description["distribution"] if part["@type"] == "cr:FileObject"]
    assert len(set(hashes)) == len(hashes) == len(PARTS) + 2


def test_a_version_without_texts_in_the_store_is_one_sentence(trained):
    graph, lineage, _ = trained
    with pytest.raises(ValueError, match=r"trained on no texts that store .* holds: name the store of its run"):
        dataset_description(graph, lineage.model_copy(update={"steps": ()}))
