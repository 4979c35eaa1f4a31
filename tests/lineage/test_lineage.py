"""Lineage both ways on data prepared by the real steps: what a model was trained on, and what happened to a
document."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from configs.load import load_scale
from configs.schema import PackingRecipe, PolicyObjective
from flows.cli.evidence.trace_lineage import lineage_of_document, lineage_of_model
from infra.home import Home
from infra.registry.model_registry import DIGEST_TAG, open_registry
from infra.registry.registered_versions import all_versions, named_version
from infra.servers.databases import MLFLOW_DATABASE, mlflow_database
from infra.step import Artifact, Manifest, Output, Record, canonical_json, step
from infra.storage.manifest_graph import ManifestGraph, read_manifest_graph
from infra.storage.open_store import open_store
from tasks.data.chats.collect_chats import collect_chats
from tasks.data.packing.pack_phase import pack_phase
from tasks.data.records.documents import CHAT_COLUMNS, document_id
from tasks.data.repositories.concatenate_repositories import concatenate_repositories
from tasks.data.seeds.verify_solutions import write_rows
from tasks.data.shards.shard_chats import shard_chats
from tasks.data.shards.shard_documents import shard_documents
from tasks.data.sources.list_sources import list_sources
from tasks.data.tokenizer.train_tokenizer import train_tokenizer
from tasks.lineage.provenance import release_graph
from tasks.lineage.trace_document import trace_document
from tasks.lineage.trace_model import trace_model
from tasks.lineage.trained_phases import asked_prompt_ids, phase_of, shard_reads
from tests.conftest import ROOT
from tests.lineage.toy_release import make_release
from tests.support.data_inputs import (
    RECIPE,
    RESOURCES,
    SYNTHESIS,
    chain_recipe,
    cleaned,
    compute,
    prose,
    rows,
    write_corpus,
    write_jsonl,
    write_packages,
)
from tests.support.postgres import needs_postgres, postgres
from tests.support.training_inputs import packed_lines

CHAIN_RECIPE = chain_recipe(
    SYNTHESIS.model_copy(
        update={
            "num_training_problems": 300,
            "num_evaluation_problems": 20,
            "max_operand": 30,
            "num_chats": 40,
            "num_prompts": 60,
        }
    )
)
MODEL = "glm46-micro"
BRANCH = "rl_cold_start"
"""A phase beside the champion's path, which reads what sft reads."""
SAMPLED = "distillation"
"""Another, which starts from sft and reads what the weights of rl_reasoning answered."""
PRETRAIN = PackingRecipe(
    num_tokens=16000,
    sequence_length=64,
    packing="stream",
    mixture={"web": 0.5, "code": 0.2, "repository": 0.3},
    bucket_weights=(),
    max_epochs=4.0,
    fim_rate=0.5,
    seed=1,
)
SFT = PackingRecipe(
    num_tokens=1280,
    sequence_length=128,
    packing="best_fit",
    mixture={"chat": 0.6, "synthetic": 0.4},
    bucket_weights=(),
    max_epochs=9.0,
    fim_rate=0.0,
    seed=2,
)


class ToyCheckpoint(Record):
    """What lineage reads of a trained checkpoint."""

    phase: str
    objective: str
    num_tokens: int
    num_steps: int


@step(content=("hf/*",))
def train_phase(*, packed, shards, chats, prompts, tokenizer, start, recipe, output: Output) -> ToyCheckpoint:
    """Trains nothing; its inputs are what a real phase has."""
    output.path("hf/config.json").write_text(json.dumps({"phase": recipe.phase}))
    return ToyCheckpoint(phase=recipe.phase, objective=recipe.objective.kind, num_tokens=recipe.num_tokens, num_steps=1)


class ToySolutions(Record):
    """What lineage reads of sampled answers: nothing."""


@step(content=("chats/*",))
def sample_solutions(*, prompts, output: Output, rl_reasoning) -> ToySolutions:
    """Samples nothing; its answers are in the shape of those of the real step."""
    source = f"solutions/{rl_reasoning.digest[:12]}"
    asked = [{"role": "user", "content": "What is 1 + 1?", "reasoning": "", "tool_calls": []}]
    said = [{"role": "assistant", "content": f"It is {n}.", "reasoning": "", "tool_calls": []} for n in range(6)]
    address = {"collection": "solutions/synthetic", "licence": "", "kind": "exact", "tools": "[]", "num_bytes": 9}
    answers = [
        {"id": document_id(source, n, 0), "source": source, "offset": n, "piece": 0, "split": "train", **address}
        | {"messages": canonical_json([*asked, answer])}
        for n, answer in enumerate(said)
    ]
    write_rows(output.path("chats/part-00000.parquet"), answers, f"{CHAT_COLUMNS}, split string")
    return ToySolutions()


def prepare(directory: Path, root: Path) -> dict[str, Artifact]:
    """The data path of flows/prepare_data.py on a small corpus."""
    write_corpus(directory)
    write_packages(directory)
    turns = [
        [{"role": "user", "content": f"Say {n}"}, {"role": "assistant", "content": f"{n}, as asked"}] for n in range(30)
    ]
    write_jsonl(directory / "talk.jsonl", [{"messages": turn} for turn in turns])
    with zipfile.ZipFile(directory / "bundle.zip", "w") as archive:
        for number in range(3):
            archive.writestr(f"page{number}.txt", prose(900 + number, 400))
    with open(directory / "glm46-data.yaml", "a") as file:
        file.write("  - {files: 'talk.jsonl', role: sft, licence: CC0-1.0}\n")
        file.write("  - {files: 'bundle.zip', role: pretrain, format: zip_text, domain: web, licence: MIT}\n")
    sources, spark = list_sources(directory), {"resources": RESOURCES}
    data = cleaned(sources, root, CHAIN_RECIPE)
    clean, problems = data["decontaminated"], data["problems"]
    chats = compute(
        collect_chats,
        root,
        sources=sources,
        synthetic=problems,
        ingested=data["ingested"],
        recipe=RECIPE.chat_collection,
        **spark,
    )
    repositories = compute(concatenate_repositories, root, documents=clean, recipe=RECIPE.repositories, **spark)
    tokenizer = compute(
        train_tokenizer,
        root,
        documents=clean,
        recipe=RECIPE.tokenizer.model_copy(update={"num_ordinary_tokens": 400, "sample_chars": 150000}),
        **spark,
    )
    return {
        **data,
        "chats": chats,
        "repositories": repositories,
        "tokenizer": tokenizer,
        "shards": compute(
            shard_documents,
            root,
            documents=clean,
            repositories=repositories,
            tokenizer=tokenizer,
            recipe=RECIPE.shards,
            **spark,
        ),
        "chat_shards": compute(shard_chats, root, chats=chats, tokenizer=tokenizer, recipe=RECIPE.shards, **spark),
    }


def train(data: dict[str, Artifact], root: Path) -> dict[str, Artifact]:
    """A path of three phases, the pre-trained model by itself, and a branch from it."""
    scale = load_scale("micro")
    recipes = {phase.name: scale.training_recipe(phase) for phase in scale.phases}
    none = {"packed": None, "shards": None, "chats": None, "prompts": None, "tokenizer": data["tokenizer"]}
    first = compute(pack_phase, root, shards=data["shards"], chats=None, tokenizer=data["tokenizer"], recipe=PRETRAIN)
    second = compute(pack_phase, root, shards=data["shards"], chats=data["chat_shards"], recipe=SFT)
    pretrained = compute(
        train_phase,
        root,
        recipe=recipes["pretrain_general"],
        start=None,
        **{**none, "packed": first, "shards": data["shards"]},
    )
    tuned = compute(
        train_phase,
        root,
        recipe=recipes["sft"],
        start=pretrained,
        **{**none, "packed": second, "shards": data["shards"], "chats": data["chat_shards"]},
    )
    reinforced = compute(
        train_phase, root, recipe=recipes["rl_reasoning"], start=tuned, **{**none, "prompts": data["decontaminated"]}
    )
    branch = compute(
        train_phase,
        root,
        recipe=recipes["sft"].model_copy(update={"phase": BRANCH}),
        start=pretrained,
        **{**none, "packed": second, "shards": data["shards"], "chats": data["chat_shards"]},
    )
    solutions = compute(sample_solutions, root, rl_reasoning=reinforced, prompts=data["decontaminated"])
    answers = compute(
        shard_chats, root, chats=solutions, tokenizer=data["tokenizer"], recipe=RECIPE.shards, resources=RESOURCES
    )
    chosen = SFT.model_copy(update={"mixture": {"chat": 1.0}, "max_epochs": 99.0})
    third = compute(pack_phase, root, shards=data["shards"], chats=answers, recipe=chosen)
    sampled = compute(
        train_phase,
        root,
        recipe=recipes["sft"].model_copy(update={"phase": SAMPLED}),
        start=tuned,
        **{**none, "packed": third, "shards": data["shards"], "chats": answers},
    )
    return {
        "pretrain_general": pretrained,
        SAMPLED: sampled,
        BRANCH: branch,
        "sft": tuned,
        "rl_reasoning": reinforced,
        "first_order": first,
        "second_order": second,
    }


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Home:
    home = Home(tmp_path_factory.mktemp("home"))
    home.mlflow_dir.mkdir(parents=True)
    return home


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("corpus")


@pytest.fixture(scope="module")
def data(home, corpus):
    return prepare(corpus, home.root)


@pytest.fixture(scope="module")
def trained(home, data):
    checkpoints = train(data, home.root)
    register(home, checkpoints)
    return checkpoints


def register(home: Home, checkpoints: dict[str, Artifact]) -> None:
    """Four versions in the home's database, as a server would have written them."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=mlflow_database(home).uri, registry_uri=mlflow_database(home).uri)
    client.create_registered_model(MODEL)
    for name in ("pretrain_general", "rl_reasoning", BRANCH, SAMPLED):
        tags = {DIGEST_TAG: checkpoints[name].digest, "glm46.key": checkpoints[name].key}
        version = client.create_model_version(MODEL, f"file:///{name}", tags=tags)
        client.set_registered_model_alias(MODEL, name, version.version)
    client.set_registered_model_alias(MODEL, "champion", "2")


@pytest.fixture(scope="module")
def graph(home, trained):
    return read_manifest_graph(open_store(None, home))


@pytest.fixture(scope="module")
def champion(home, graph, tmp_path_factory):
    """The champion's lineage and the records written beside it."""
    path = tmp_path_factory.mktemp("records") / "records.parquet"
    return trace_model(graph, named_version(open_registry(home), MODEL, "champion"), path), pq.read_table(
        path
    ).to_pylist()


def read_by_hand(order: Artifact, shards: list[Artifact]) -> Counter:
    """(document id) -> tokens, line by line of the packed order."""
    names = json.loads(order.path("packing.json").read_text())["shards"]
    members = {
        (row["shard"], row["sequence"]): row["id"] for artifact in shards for row in rows(artifact, "members.parquet")
    }
    tokens = Counter()
    for shard, sequence, _, length, _, _ in packed_lines(order).tolist():
        if shard == len(names):
            continue  # special tokens of fill-in-the-middle belong to no document
        tokens[members[(names[shard], sequence)]] += length
    return tokens


def test_records_of_a_model_are_what_its_packed_orders_read(champion, data, trained):
    lineage, records = champion
    pretrain = read_by_hand(trained["first_order"], [data["shards"]])
    sft = read_by_hand(trained["second_order"], [data["shards"], data["chat_shards"]])
    assert {row["id"]: row["tokens"] for row in records if row["tokens"]} == dict(pretrain + sft)
    for row in records:
        expected = [name for name, read in (("pretrain_general", pretrain), ("sft", sft)) if row["id"] in read]
        assert [name for name in row["phases"] if name != "rl_reasoning"] == expected
    prompts = {row["id"] for row in rows(data["decontaminated"], "prompts.parquet")}
    asked = {row["id"] for row in records if "rl_reasoning" in row["phases"]}
    scale = load_scale("micro")
    recipe = scale.training_recipe(next(phase for phase in scale.phases if phase.name == "rl_reasoning"))
    assert isinstance(recipe.objective, PolicyObjective)
    num_groups = recipe.num_tokens // recipe.sequence_length // recipe.objective.samples_per_prompt
    assert asked < prompts and len(asked) == num_groups
    assert lineage.num_documents == len(records) == len({row["id"] for row in records})


def test_records_replace_a_file_when_they_are_whole_and_none_is_an_error(tmp_path, monkeypatch):
    store = open_store(str(tmp_path / "store"), Home(tmp_path / "home"))
    version = make_release(store).version
    graph, path = release_graph(read_manifest_graph(store), version), tmp_path / "out" / "records.parquet"
    path.parent.mkdir()
    path.write_text("of another model")

    def broken(*given):
        yield from shard_reads(*given)
        raise ValueError("a damaged shard")

    monkeypatch.setattr("tasks.lineage.trace_model.shard_reads", broken)
    with pytest.raises(ValueError, match="a damaged shard"):
        trace_model(graph, version, path)
    assert path.read_text() == "of another model" and os.listdir(path.parent) == [path.name]
    monkeypatch.setattr("tasks.lineage.trace_model.shard_reads", lambda *given: iter(()))
    with pytest.raises(ValueError, match="no phase read a document of shards; leave --records out"):
        trace_model(graph, version, path)
    monkeypatch.undo()
    trace_model(graph, version, path)
    assert pq.read_table(path).num_rows == 3 and os.listdir(path.parent) == [path.name]
    with pytest.raises(ValueError, match=r"--records .*nowhere is no directory"):
        lineage_of_model("champion", "tiny", None, tmp_path / "nowhere" / "records.parquet")


def test_a_model_names_phases_shards_steps_and_sources_with_digests(champion, data, trained):
    lineage, records = champion
    assert (lineage.version, lineage.aliases, lineage.digest) == (
        "2",
        ("champion", "rl_reasoning"),
        trained["rl_reasoning"].digest,
    )
    assert [phase.name for phase in lineage.phases] == ["pretrain_general", "sft", "rl_reasoning"]
    assert [phase.packed_digest for phase in lineage.phases] == [
        trained["first_order"].digest,
        trained["second_order"].digest,
        "",
    ]
    assert lineage.tokenizer_digest == data["tokenizer"].digest and lineage.imported == ""
    shards = {shard.name: shard for shard in lineage.phases[1].shards}
    assert {name.split("-")[0] for name in shards} == {"chat", "synthetic"}
    assert shards["chat-00000"].sha256 == data["chat_shards"].manifest.content["shards/chat-00000.bin"].sha256
    assert shards["chat-00000"].num_documents == len({row["id"] for row in records if row["shard"] == "chat-00000"})

    steps = {use.step: use for use in lineage.steps}
    assert set(steps) == {artifact.manifest.step for name, artifact in data.items()}
    assert steps["deduplicate_documents"].dropped == data["deduplicated"].record.dropped != {}
    order = [use.step for use in lineage.steps]
    assert order.index("ingest_documents") < order.index("deduplicate_documents") < order.index("shard_documents")

    sources = {source.name: source for source in lineage.sources}
    files = {row["name"]: row for row in rows(data["ingested"], "sources.parquet")}
    assert sources["talk.jsonl"].sha256 == files["talk.jsonl"]["sha256"] and sources["talk.jsonl"].licence == "CC0-1.0"
    assert {source.sha256 for name, source in sources.items() if name.startswith("synthetic/arithmetic")} == {""}
    members = [source for name, source in sources.items() if name.startswith("bundle.zip!")]
    assert members and {(source.sha256, source.licence) for source in members} == {
        (files["bundle.zip"]["sha256"], "MIT")
    }
    for name, source in sources.items():
        own = [row for row in records if row["source"] == name]
        assert (source.num_documents, source.num_tokens) == (len(own), sum(row["tokens"] for row in own))
        assert source.first_offsets == tuple(sorted({row["offset"] for row in own})[:3])
    assert all(
        part in lineage.describe() for part in ("phase sft (sft)", "near_duplicate 1", "talk.jsonl", "chat-00000")
    )
    epochs = [trained[name].record.course_epochs_by_domain for name in ("first_order", "second_order")]
    assert [phase.course_epochs for phase in lineage.phases] == [*epochs, {}] and epochs[0]
    assert f"passes on its course up to here: chat {epochs[1]['chat']:.2f}" in lineage.describe()


def test_a_branch_has_its_own_path_and_is_no_part_of_the_champion(home, graph, trained, champion):
    version = named_version(open_registry(home), MODEL, BRANCH)
    branch = trace_model(graph, version, None)
    assert [phase.name for phase in branch.phases] == ["pretrain_general", BRANCH]
    assert branch.digest == trained[BRANCH].digest
    versions = all_versions(open_registry(home))
    of_sft = next(row for row in champion[1] if row["phases"] == ["sft"])
    models = {model.phase: model.version for model in trace_document(graph, versions, of_sft["id"]).models}
    read = {"sft": "", "rl_reasoning": "2", BRANCH: "3", SAMPLED: "4"}
    assert models == read, "sft and the branch read the document, the others started from sft"


def test_an_answer_that_was_sampled_leads_to_the_weights_that_gave_it_and_the_phase_that_read_it(
    home, graph, trained, champion
):
    lineage = trace_model(graph, named_version(open_registry(home), MODEL, SAMPLED), None)
    assert [phase.name for phase in lineage.phases] == ["pretrain_general", "sft", "rl_reasoning", SAMPLED]
    steps = [use.step for use in lineage.steps]
    assert "sample_solutions" in steps and not {"train_phase", "pack_phase"} & {*steps}
    source = f"solutions/{trained['rl_reasoning'].digest[:12]}"
    assert source in {use.name for use in lineage.sources}
    answer = trace_document(graph, all_versions(open_registry(home)), document_id(source, 3, 0))
    assert [(place.kind, place.step, place.source) for place in answer.places] == [
        ("sampled conversation", "sample_solutions", source)
    ]
    assert answer.split == "train" and {phase.phase for phase in answer.trained} == {SAMPLED}
    assert [(model.phase, model.version) for model in answer.models] == [(SAMPLED, "4")]
    prompt = next(row["id"] for row in champion[1] if row["phases"] == ["rl_reasoning"])
    models = trace_document(graph, all_versions(open_registry(home)), prompt).models
    assert {model.phase for model in models} == {"rl_reasoning", SAMPLED}, "the expert's prompts taught it too"


def test_a_record_leads_back_to_the_bytes_of_its_source(champion, data, corpus):
    _, records = champion
    texts = {row["id"]: row["text"] for row in rows(data["decontaminated"], "documents/*.parquet")}
    own = [row for row in records if row["source"].endswith(".py")]
    for row in own:
        assert (
            (corpus / row["source"]).read_bytes()[row["offset"] :].decode()[row["piece"] :].startswith(texts[row["id"]])
        )
    chats = {row["id"]: row["messages"] for row in rows(data["chats"], "chats/*.parquet")}
    said = [row for row in records if row["source"] == "talk.jsonl"]
    for row in said:
        line = (corpus / row["source"]).read_bytes()[row["offset"] :].splitlines()[0]
        assert json.loads(line)["messages"][1]["content"] in chats[row["id"]]
    assert own and said


def test_every_document_tells_the_phases_that_the_models_records_tell(champion, graph, home):
    _, records = champion
    versions = all_versions(open_registry(home))
    chosen = {tuple(row["phases"]): row for row in records}
    assert set(chosen) >= {("pretrain_general",), ("sft",), ("rl_reasoning",)}
    for phases, row in chosen.items():
        lineage = trace_document(graph, versions, row["id"])
        itself = [phase for phase in lineage.trained if not phase.within and phase.phase != BRANCH]
        assert {phase.phase for phase in itself} == set(phases)
        assert sum(phase.num_tokens for phase in itself) == row["tokens"]
        assert {(phase.shard, phase.sequence) for phase in itself} == {(row["shard"], row["sequence"])}
        assert {(position.source, position.offset, position.piece) for position in lineage.places} == {
            (row["source"], row["offset"], row["piece"])
        }
        models = {(model.phase, model.version, model.aliases) for model in lineage.models}
        assert ("rl_reasoning", "2", ("champion", "rl_reasoning")) in models
        assert (("pretrain_general", "1", ("pretrain_general",)) in models) == ("pretrain_general" in phases)


def test_a_file_tells_the_phases_that_read_its_repository_and_the_repository_its_files(champion, data, graph):
    _, records = champion
    read = {row["id"]: row for row in records if row["shard"].startswith("repository-")}
    assert read, "no repository was packed"
    members = {}
    for row in rows(data["repositories"], "files.parquet"):
        members.setdefault(row["repository_id"], []).append((row["number"], row["id"]))
    for identity, row in list(read.items())[:2]:
        repository = trace_document(graph, [], identity)
        assert repository.parts == tuple(part for _, part in sorted(members[identity]))
        (position,) = repository.places
        assert (position.kind, position.source, position.step) == (
            "repository",
            row["source"],
            "concatenate_repositories",
        )
        for part in repository.parts[:3]:
            inside = [phase for phase in trace_document(graph, [], part).trained if phase.within]
            assert {(phase.within, phase.shard, phase.sequence) for phase in inside} == {
                (identity, row["shard"], row["sequence"])
            }
            assert [phase.phase for phase in inside] == ["pretrain_general"] and inside[0].num_tokens == row["tokens"]
        assert "as a part of repository" in trace_document(graph, [], repository.parts[0]).describe()


def test_a_dropped_document_names_the_step_the_reason_and_what_stayed(data, graph):
    for name in ("deduplicated", "filtered", "decontaminated"):
        for row in rows(data[name], "dropped.parquet"):
            lineage = trace_document(graph, [], row["id"])
            (drop,) = lineage.dropped
            assert (drop.digest, drop.reason, drop.kept_id) == (data[name].digest, row["reason"], row["kept_id"])
            assert lineage.trained == lineage.models == () and "no phase was trained on it" in lineage.describe()
    assert rows(data["deduplicated"], "dropped.parquet") and rows(data["decontaminated"], "dropped.parquet")


def test_a_held_out_document_and_an_evaluated_problem_are_trained_by_no_phase(data, graph):
    held_out = next(row for row in rows(data["decontaminated"], "documents/*.parquet") if row["split"] == "validation")
    lineage = trace_document(graph, [], held_out["id"])
    assert (lineage.split, lineage.trained, lineage.dropped) == ("validation", (), ())
    problem = rows(data["problems"], "problems.parquet")[0]
    lineage = trace_document(graph, [], problem["id"])
    assert [position.kind for position in lineage.places] == ["evaluated problem"] and lineage.trained == ()
    request = rows(data["problems"], "safety.parquet")[0]
    lineage = trace_document(graph, [], request["id"])
    assert [position.kind for position in lineage.places] == ["held-out request"] and lineage.trained == ()


def test_what_is_not_known_is_one_sentence_with_the_names_there_are(home, graph, tmp_path):
    client = open_registry(home)
    with pytest.raises(ValueError, match="knows no document feedfeedfeedfeed: ids have 16 hex digits"):
        trace_document(graph, [], "feedfeedfeedfeed")
    with pytest.raises(
        ValueError, match="has no version or alias tuned; it has 1 = pretrain_general; 2 = champion = rl_reasoning"
    ):
        named_version(client, MODEL, "tuned")
    with pytest.raises(ValueError, match="holds no version of glm46-huge; it holds glm46-micro"):
        named_version(client, "glm46-huge", "champion")
    other = read_manifest_graph(open_store(str(tmp_path / "empty"), home))
    with pytest.raises(ValueError, match=r"does not hold glm46-micro version 1, .*name it with --store"):
        trace_model(other, named_version(client, MODEL, "1"), None)


def test_prompts_of_a_checkpoint_whose_settings_are_unknown_now_are_one_sentence(graph, trained):
    checkpoint = next(made for made in graph.made_by("train_phase") if made.key == trained["rl_reasoning"].key)
    prompts = phase_of(graph, checkpoint).prompts
    assert prompts is not None and asked_prompt_ids(graph, checkpoint, prompts)
    recipe = {key: value for key, value in checkpoint.identity["recipe"].items() if key != "sequence_length"}
    older = checkpoint.model_copy(update={"identity": checkpoint.identity | {"recipe": recipe}})
    with pytest.raises(ValueError, match=r"are not known: .* \(sequence_length differs\): use that version"):
        asked_prompt_ids(graph, older, prompts)


def test_of_manifests_with_one_digest_the_one_that_fits_is_followed(home):
    """A tokenizer that came out the same from the documents of another run does not bring that run into the lineage."""

    def made(key: str, digest: str, **inputs: str) -> Manifest:
        identity = {"step": key, "inputs": inputs}
        return Manifest(
            key=key,
            generation=0,
            object_key=key,
            attempt="",
            digest=digest,
            identity=identity,
            record={},
            content={},
            evidence={},
            seconds=0,
        )

    other, ours = made("a-other", "other", sources="x"), made("b-ours", "ours", sources="y")
    tokenizers = (made("c-tokenizer", "tokens", documents="other"), made("d-tokenizer", "tokens", documents="ours"))
    shards = made("e-shards", "shards", documents="ours", tokenizer="tokens")
    store = open_store(None, home)
    graph = ManifestGraph(store, {"other": (other,), "ours": (ours,), "tokens": tokenizers, "shards": (shards,)})
    assert graph.ancestors(shards) == [ours, tokenizers[1], shards]
    assert graph.ancestors(tokenizers[0]) == [other, tokenizers[0]]


def test_the_commands_answer_without_a_server(home, champion, trained):
    def glm46(*arguments: str) -> subprocess.CompletedProcess:
        environment = {**os.environ, "GLM46_HOME": str(home.root)}
        return subprocess.run(
            [sys.executable, "-c", "from flows.cli.command import main; main()", "lineage", *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    lineage, records = champion
    by_alias = glm46("model", "champion", "--scale", "micro", "--json")
    assert json.loads(by_alias.stdout) == json.loads(lineage.model_dump_json()), by_alias.stderr
    document = glm46("document", records[0]["id"])
    assert (
        document.returncode == 0
        and "trained in" in document.stdout
        and f"{MODEL} version 2 = champion" in document.stdout
    )
    unknown = glm46("model", "9", "--scale", "micro")
    assert unknown.returncode == 2 and unknown.stderr.startswith("glm46: glm46-micro has no version or alias 9")


@pytest.mark.long
@needs_postgres
def test_a_document_leads_to_the_same_models_on_postgres(home, champion, trained, tmp_path_factory, monkeypatch):
    identity, store = champion[1][0]["id"], str(home.root / "store")
    monkeypatch.setenv("GLM46_HOME", str(home.root))
    (on_sqlite,) = lineage_of_document(identity, store)
    empty = tmp_path_factory.mktemp("empty")
    monkeypatch.setenv("GLM46_HOME", str(empty))
    assert not [model for model in lineage_of_document(identity, store)[0].models if model.model]
    with postgres(tmp_path_factory.mktemp("postgres"), "mlflow") as (url,):
        monkeypatch.setenv(MLFLOW_DATABASE, url)
        register(Home(empty), trained)
        assert lineage_of_document(identity, store) == [on_sqlite]
    assert [model.version for model in on_sqlite.models if model.model] and not list(empty.rglob("*.db"))
