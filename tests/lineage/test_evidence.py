"""The evidence of a release against the official libraries of in-toto, CycloneDX, OpenLineage and the Hub."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
from cyclonedx.model.bom import Bom
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from google.protobuf.json_format import ParseDict
from huggingface_hub import ModelCard
from in_toto_attestation.predicates.provenance.v1 import provenance_pb2
from in_toto_attestation.v1 import statement_pb2
from in_toto_attestation.v1.statement import Statement
from openlineage.client.event_v2 import InputDataset, Job, JobEvent, OutputDataset
from openlineage.client.facet_v2 import dataset_version_dataset, job_type_job, output_statistics_output_dataset
from openlineage.client.serde import Serde

from infra.home import Home
from infra.registry.model_registry import DIGEST_TAG, GGUF_TAG, PROMOTION_DECISION_TAG, PROMOTION_TAG, RegisteredVersion
from infra.registry.registered_versions import NamedVersion
from infra.step import Output, Record, step
from infra.storage.manifest_graph import read_manifest_graph
from infra.storage.open_store import open_store
from tasks.lineage.bill_of_materials import bill_of_materials
from tasks.lineage.lineage_events import PRODUCER, lineage_events
from tasks.lineage.provenance import provenance_statement
from tasks.lineage.published_card import published_card
from tasks.lineage.trace_model import ModelLineage, SourceUse
from tests.support.evaluation_fakes import commit

CARD = "# glm46 model, export 0123\n\nTwo figures.\n"
SHA256 = "5" * 64
DOCUMENTS = {"README.md": "6" * 64}


class Toy(Record):
    suite_digest: str = "e" * 64
    bits_per_byte: float | None = 1.25
    arithmetic_accuracy: float = 0.5
    pass_at_1: float = 0.75
    choice_accuracy: float | None = None


@step(content=("hf/*", "handover/*"), distributions=("torch",))
def train_phase(*, recipe: Toy, output: Output) -> Toy:
    output.path("hf/model.safetensors").write_text("weights")
    output.path("handover/moments.bin").write_text("moments")
    return recipe


@step(content=("model-*.gguf",))
def convert_to_gguf(*, checkpoint, output: Output) -> Toy:
    output.path("model-F32.gguf").write_text("weights in GGUF")
    return Toy()


@step(content=())
def evaluate_checkpoint(*, checkpoint, output: Output) -> Toy:
    return Toy()


@step(content=())
def decide_gate(*, evaluation, output: Output) -> Toy:
    return Toy(pass_at_1=0.9)


@step(content=())
def decide_promotion(*, comparison, output: Output) -> Toy:
    return Toy(pass_at_1=1.0)


@step(content=(), evidence=("model_card.md",))
def write_report(*, decision, output: Output) -> Toy:
    output.path("model_card.md").write_text(CARD)
    return Toy()


@pytest.fixture
def release(tmp_path):
    """The manifests of a toy release, its version and its lineage."""
    store = open_store(str(tmp_path / "store"), Home(tmp_path / "home"))
    checkpoint = commit(store, train_phase, recipe=Toy())
    gguf = commit(store, convert_to_gguf, checkpoint=checkpoint)
    decision = commit(store, decide_gate, evaluation=commit(store, evaluate_checkpoint, checkpoint=checkpoint))
    promotion = commit(store, decide_promotion, comparison=decision)
    commit(store, write_report, decision=decision)
    tags = {DIGEST_TAG: checkpoint.digest, "glm46.key": checkpoint.key, GGUF_TAG: gguf.key}
    tags |= {PROMOTION_TAG: decision.key, PROMOTION_DECISION_TAG: promotion.key}
    source = SourceUse(
        name="a.txt", sha256=SHA256, licence="CC0-1.0", num_documents=1, num_tokens=2, first_offsets=(0,)
    )
    lineage = ModelLineage(
        model="glm46-toy",
        version="3",
        aliases=("champion",),
        key=checkpoint.key,
        digest=checkpoint.digest,
        imported="",
        tokenizer_key="",
        tokenizer_digest="",
        phases=(),
        steps=(),
        sources=(source,),
        num_documents=1,
    )
    version = NamedVersion("glm46-toy", ("champion",), RegisteredVersion("3", tags))
    return read_manifest_graph(store), version, lineage


def test_the_provenance_is_a_statement_of_in_toto_with_slsas_predicate(release):
    graph, version, lineage = release
    statement = json.loads(json.dumps(provenance_statement(graph, version, lineage, DOCUMENTS)))
    message = ParseDict(statement, statement_pb2.Statement())
    Statement.copy_from_pb(message).validate()
    predicate = ParseDict(statement["predicate"], provenance_pb2.Provenance())
    checkpoint = graph.store.read_manifest(version.registered.key)
    gguf = graph.store.read_manifest(version.registered.tag(GGUF_TAG))
    assert {subject.name: dict(subject.digest) for subject in message.subject} == {
        "hf/model.safetensors": {"sha256": checkpoint.content["hf/model.safetensors"].sha256},
        "gguf/model-F32.gguf": {"sha256": gguf.content["model-F32.gguf"].sha256},
    }
    source, package = predicate.build_definition.resolved_dependencies
    assert (source.name, dict(source.digest)) == ("a.txt", {"sha256": SHA256})
    assert package.uri == f"pkg:pypi/torch@{checkpoint.identity['distributions']['torch']}"
    steps = statement["predicate"]["buildDefinition"]["internalParameters"]["steps"]
    order = ["train_phase", "convert_to_gguf", "evaluate_checkpoint", "decide_gate", "decide_promotion"]
    assert [made["step"] for made in steps] == order
    assert predicate.run_details.metadata.invocation_id == version.registered.key
    byproducts = {each.name: each.digest["sha256"] for each in predicate.run_details.byproducts}
    promotion = graph.store.read_manifest(version.registered.tag(PROMOTION_DECISION_TAG))
    assert byproducts == {"promotion decision": promotion.digest, **DOCUMENTS}


def test_the_bill_of_materials_passes_cyclonedxs_validator(release):
    graph, version, lineage = release
    text = json.dumps(bill_of_materials(graph, version, lineage))
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    bom = Bom.from_json(json.loads(text))
    files = {each.name: each.hashes[0].content for each in bom.components if each.type.value == "file"}
    subjects = provenance_statement(graph, version, lineage, DOCUMENTS)["subject"]
    assert files == {subject["name"]: subject["digest"]["sha256"] for subject in subjects}
    (source,) = [each for each in bom.components if each.type.value == "data"]
    assert (source.name, source.hashes[0].content) == ("a.txt", SHA256)
    assert next(iter(source.licenses)).name == "CC0-1.0"
    (package,) = [each for each in bom.components if each.type.value == "library"]
    assert str(package.purl).startswith("pkg:pypi/torch@")


def test_the_events_are_those_that_openlineages_client_would_send(release):
    graph, version, _ = release
    stated = datetime(2026, 11, 24, tzinfo=UTC)
    trained, converted = lineage_events(graph, version, stated)
    gguf = graph.store.read_manifest(version.registered.tag(GGUF_TAG))
    checkpoint = graph.store.read_manifest(version.registered.key)

    def versioned(digest):
        return {"version": dataset_version_dataset.DatasetVersionDatasetFacet(digest, producer=PRODUCER)}

    size = gguf.content["model-F32.gguf"].size
    statistics = output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet(
        size=size, fileCount=1, producer=PRODUCER
    )
    expected = JobEvent(
        eventTime=stated.isoformat(),
        producer=PRODUCER,
        job=Job(
            "glm46",
            f"convert_to_gguf.{gguf.key[:12]}",
            {"jobType": job_type_job.JobTypeJobFacet("BATCH", "GLM46", "STEP", producer=PRODUCER)},
        ),
        inputs=[
            InputDataset(
                "glm46", f"train_phase.{checkpoint.digest[:12]}", inputFacets=None, facets=versioned(checkpoint.digest)
            )
        ],
        outputs=[
            OutputDataset(
                "glm46",
                f"convert_to_gguf.{gguf.digest[:12]}",
                facets=versioned(gguf.digest),
                outputFacets={"outputStatistics": statistics},
            )
        ],
    )
    assert converted == json.loads(Serde.to_json(expected))
    assert trained["outputs"][0]["name"] == converted["inputs"][0]["name"]


def test_the_card_is_the_reports_below_metadata_that_the_hubs_library_reads(release, tmp_path):
    graph, version, _ = release
    path = tmp_path / "README.md"
    path.write_text(published_card(graph, version), encoding="utf-8")
    card = ModelCard.load(path)
    assert card.text.strip() == CARD.strip()
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-generation")
    measured = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert measured == {"bits_per_byte": 1.25, "arithmetic_accuracy": 0.5, "pass_at_1": 0.75}, "no figure that is None"
    assert {result.dataset_revision for result in card.data.eval_results} == {"e" * 64}


def test_what_is_no_release_or_is_not_in_the_store_is_one_sentence(release):
    graph, version, lineage = release
    tags = dict(version.registered.tags)
    unknown = NamedVersion("glm46-toy", (), RegisteredVersion("3", {**tags, GGUF_TAG: "f" * 64}))
    with pytest.raises(ValueError, match=r"does not hold the gguf files of glm46-toy version 3 .*with --store"):
        provenance_statement(graph, unknown, lineage, {})
    del tags[GGUF_TAG]
    with pytest.raises(ValueError, match="version 3 was never judged for a release"):
        provenance_statement(graph, NamedVersion("glm46-toy", (), RegisteredVersion("3", tags)), lineage, {})
