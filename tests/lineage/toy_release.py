"""A release of toy steps with the names and files of the real ones: what evidence, verification and take-downs read.

Two documents of one page and one of another are ingested, filtered, cut into shards and trained on; a near and an
exact copy of the other page are dropped.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from infra.registry.model_registry import DIGEST_TAG, GGUF_TAG, PROMOTION_DECISION_TAG, PROMOTION_TAG, RegisteredVersion
from infra.registry.registered_versions import NamedVersion
from infra.step import Artifact, Output, Record, Step, step
from infra.storage.store import Store
from tasks.data.packing.packed_order import part_name, write_part
from tasks.data.records.documents import content_digest, document_id

MODEL = "glm46-micro"
PAGES = (
    {"source": "a.jsonl", "offset": 0, "piece": 0, "url": "https://one.example/a"},
    {"source": "a.jsonl", "offset": 0, "piece": 40, "url": "https://one.example/a"},
    {"source": "a.jsonl", "offset": 90, "piece": 0, "url": "https://two.example/b"},
    {"source": "a.jsonl", "offset": 180, "piece": 0, "url": "https://copy.example/b"},
    {"source": "a.jsonl", "offset": 270, "piece": 0, "url": "https://mirror.example/b"},
)
"""Two pieces of one page, one other page, and a near and an exact copy of it, which are dropped."""
TEXTS = ("Text 0.", "Text 1.", "Text 2.", "Text 3.", "Text 2.")
DOCUMENTS = tuple(
    {"id": document_id(page["source"], page["offset"], page["piece"]), **page, "text": text, "num_bytes": 7}
    | {"language": "en", "domain": "web", "content_digest": content_digest(text)}
    for page, text in zip(PAGES, TEXTS, strict=True)
)
COLUMNS = ("id", "source", "offset", "piece", "url", "text", "content_digest")
KEPT = DOCUMENTS[:3]


class Toy(Record):
    name: str = ""
    suite_digest: str = "e" * 64
    bits_per_byte: float | None = 1.25
    arithmetic_accuracy: float = 0.5
    pass_at_1: float = 0.75
    choice_accuracy: float | None = None
    agentic_success: float | None = None
    safe_answer_share: float | None = None
    dropped: dict[str, int] = Field(default_factory=dict)


class Trained(Record):
    phase: str = "sft"
    objective: str = "sft"
    num_tokens: int = 12
    num_steps: int = 1


class Packed(Record):
    course_epochs_by_domain: dict[str, float] = Field(default_factory=dict)


def _write(output: Output, name: str, rows, columns: tuple[str, ...]) -> None:
    table = pa.Table.from_pylist([{column: row[column] for column in columns} for row in rows])
    pq.write_table(table, output.path(name))


@step(content=("documents/*", "sources.parquet"))
def ingest_documents(*, output: Output) -> Toy:
    source = {"name": "a.jsonl", "sha256": "5" * 64, "licence": "CC0-1.0", "role": "pretrain", "size": 200}
    source |= {"format": "jsonl", "domain": "web", "lang": "en", "collection": "a"}
    pq.write_table(pa.Table.from_pylist([source]), output.path("sources.parquet"))
    _write(output, "documents/part-0.parquet", DOCUMENTS, COLUMNS)
    return Toy(name="ingested")


@step(content=("documents/*",))
def extract_documents(*, records, output: Output) -> Toy:
    _write(output, "documents/part-0.parquet", DOCUMENTS, COLUMNS)
    return Toy(name="extracted")


@step(content=("documents/*", "dropped.parquet"))
def deduplicate_documents(*, documents, output: Output) -> Toy:
    _write(output, "documents/part-0.parquet", KEPT, COLUMNS)
    reasons = {3: "near_duplicate", 4: "exact_duplicate"}
    dropped = [{"id": DOCUMENTS[n]["id"], "reason": why, "kept_id": KEPT[2]["id"]} for n, why in reasons.items()]
    pq.write_table(pa.Table.from_pylist(dropped), output.path("dropped.parquet"))
    return Toy(name="deduplicated", dropped={"near_duplicate": 1, "exact_duplicate": 1})


@step(content=("documents/*",))
def filter_documents(*, documents, output: Output) -> Toy:
    _write(output, "documents/part-0.parquet", KEPT, (*COLUMNS, "num_bytes", "language", "domain"))
    return Toy(name="filtered")


@step(content=("tokenizer.json",))
def train_tokenizer(*, output: Output) -> Toy:
    output.path("tokenizer.json").write_text("{}")
    return Toy(name="tokenizer")


@step(content=("shards/*", "members.parquet"))
def shard_documents(*, documents, tokenizer, output: Output) -> Toy:
    output.path("shards/s0.bin").write_bytes(b"tokens of the shard")
    rows = [{**row, "sequence": n, "shard": "s0"} for n, row in enumerate(KEPT)]
    _write(output, "shards/s0.parquet", rows, ("id", "source", "offset", "piece", "sequence"))
    _write(output, "members.parquet", rows, ("id", "shard", "sequence"))
    return Toy(name="shards")


@step(content=("order-*.npy", "packing.json"))
def pack_phase(*, shards, output: Output) -> Packed:
    lines = [(0, sequence, 0, 4, 0, 0) for sequence in range(len(KEPT))]
    write_part(output.path(part_name(0)), np.array(lines, dtype=np.int64))
    output.path("packing.json").write_text(json.dumps({"shards": ["s0"]}))
    return Packed()


@step(content=("hf/*", "handover/*"), evidence=("log.txt",), distributions=("torch",))
def train_phase(*, recipe: Trained, packed, shards, tokenizer, start, output: Output) -> Trained:
    output.path("hf/model.safetensors").write_text("the weights of a model")
    output.path("handover/moments.bin").write_text("moments")
    output.path("log.txt").write_text("a log")
    return recipe


@step(content=("model-*.gguf",))
def convert_to_gguf(*, checkpoint, output: Output) -> Toy:
    output.path("model-F32.gguf").write_text("weights in GGUF")
    return Toy(name="gguf")


@step(content=())
def evaluate_checkpoint(*, checkpoint, output: Output) -> Toy:
    return Toy(name="evaluation")


@step(content=())
def decide_gate(*, evaluation, output: Output) -> Toy:
    return Toy(name="decision")


@step(content=("decision.json",))
def decide_promotion(*, comparison, output: Output) -> Toy:
    output.path("decision.json").write_text("{}")
    return Toy(name="promotion")


@step(content=(), evidence=("model_card.md", "report.html"))
def write_report(*, decision, output: Output) -> Toy:
    output.path("model_card.md").write_text("# glm46 model, export 0123\n\nTwo figures.\n")
    output.path("report.html").write_text(f"<p>document {DOCUMENTS[3]['id']}; in its place stays {KEPT[2]['id']}</p>")
    return Toy(name="report")


def commit(store: Store, toy: Step, recipe: Record | None = None, **inputs) -> Artifact:
    """A step's artifact under the key that a real run would give it."""
    settings = {} if recipe is None else {"recipe": recipe}
    artifact, _ = store.find_or_compute(
        toy,
        toy.identity(recipe, inputs),
        lambda output: toy(**settings, **inputs, output=output),
        lambda progress: None,
        lambda message: None,
    )
    return artifact


@dataclass(frozen=True)
class ToyRelease:
    """The version and the artifacts that it was made from."""

    version: NamedVersion
    artifacts: dict[str, Artifact]


def make_release(store: Store, num_tokens: int = 12) -> ToyRelease:
    """Run the toy steps into a store, or find them there."""
    ingested = commit(store, ingest_documents)
    extracted = commit(store, extract_documents, records=ingested)
    deduplicated = commit(store, deduplicate_documents, documents=extracted)
    filtered = commit(store, filter_documents, documents=deduplicated)
    tokenizer = commit(store, train_tokenizer)
    shards = commit(store, shard_documents, documents=filtered, tokenizer=tokenizer)
    packed = commit(store, pack_phase, shards=shards)
    given = {"packed": packed, "shards": shards, "tokenizer": tokenizer, "start": None}
    checkpoint = commit(store, train_phase, recipe=Trained(num_tokens=num_tokens), **given)
    gguf = commit(store, convert_to_gguf, checkpoint=checkpoint)
    decision = commit(store, decide_gate, evaluation=commit(store, evaluate_checkpoint, checkpoint=checkpoint))
    promotion = commit(store, decide_promotion, comparison=decision)
    commit(store, write_report, decision=decision)
    tags = {DIGEST_TAG: checkpoint.digest, "glm46.key": checkpoint.key, GGUF_TAG: gguf.key}
    tags |= {PROMOTION_TAG: decision.key, PROMOTION_DECISION_TAG: promotion.key}
    version = NamedVersion(MODEL, ("champion",), RegisteredVersion("3", tags))
    made = (ingested, extracted, deduplicated, filtered, tokenizer, shards, packed, checkpoint, gguf, promotion)
    return ToyRelease(version, {each.manifest.step: each for each in made})
