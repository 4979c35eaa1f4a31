"""`glm46 forget`: which texts, steps and versions a take-down concerns, what is done, and what is left alone."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from configs.load import load_scale
from flows import start_weights
from flows.check_start import check_start
from flows.cli.command import app
from flows.cli.evidence import forget_document
from flows.cli.evidence.trace_lineage import lineage_of_document
from flows.cli.lineage_commands import lineage_document
from flows.find_taken_down import tag_of_taken_down
from flows.show.outcome import RunOutcome
from infra.home import open_home
from infra.registry.model_registry import DIGEST_TAG, RegisteredVersion, find_version
from infra.registry.promotion import refusal_of
from infra.servers.databases import mlflow_database
from infra.storage.manifest_graph import read_manifest_graph
from infra.storage.open_store import open_store
from tasks.data.filtering.blocked_documents import read_block_list
from tasks.data.records.documents import content_digest
from tasks.lineage import plan_takedown
from tasks.lineage.stored_rows import find_rows
from tests.lineage.toy_release import DOCUMENTS, MODEL, ToyRelease, make_release

ONE, ONE_MORE, TWO, NEAR, SAME = (row["id"] for row in DOCUMENTS)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLM46_HOME", str(tmp_path_factory.mktemp("forget") / "home"))
        yield open_home()


@pytest.fixture(scope="module")
def release(home) -> ToyRelease:
    """A release in the home's store, in its registry with the alias champion beside a version that never read it."""
    from mlflow import MlflowClient

    made = make_release(open_store(None, home))
    uri = mlflow_database(home).uri
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    client.create_registered_model(MODEL)
    for tags in ({DIGEST_TAG: "0" * 64}, dict(made.version.registered.tags)):
        version = client.create_model_version(MODEL, "file:///toy", tags=tags)
    client.set_registered_model_alias(MODEL, "champion", version.version)
    return made


def test_a_take_down_names_pieces_steps_versions_and_what_a_rebuild_costs(release):
    found = forget_document.plan("https://one.example/a", None)
    assert found == forget_document.plan(ONE, None).model_copy(update={"asked": found.asked})
    assert set(found.ids) == {ONE, ONE_MORE} and not found.copies and not found.blocked
    names = ["ingest_documents", "extract_documents", "deduplicate_documents", "filter_documents", "shard_documents"]
    assert [each.split()[0] for each in found.holders] == names
    assert [(use.phase, use.shard, use.num_tokens) for use in found.trained] == [("sft", "s0", 4)] * 2
    (model,) = found.models
    assert (model.model, model.version, model.aliases) == (MODEL, "2", ("champion",))
    rerun = ["filter_documents", "shard_documents", "pack_phase", "train_phase", "convert_to_gguf"]
    assert [each.step for each in found.reruns] == rerun, "not the tokenizer, nor what comes before the filter"
    seconds = [release.artifacts[name].manifest.seconds for name in rerun]
    assert [each.seconds for each in found.reruns] == seconds
    assert f"a rebuild runs 5 steps, which took {sum(seconds):,.1f} s" in found.describe()


def test_the_documents_of_a_url_are_traced_like_those_of_their_ids(release, capsys):
    by_url = lineage_of_document("https://one.example/a", None)
    assert {each.id for each in by_url} == {ONE, ONE_MORE} and all(each.models for each in by_url)
    assert by_url == [lineage_of_document(each.id, None)[0] for each in by_url]
    lineage_document("https://copy.example/b", as_json=True)
    (copy,) = capsys.readouterr().out.splitlines()
    assert json.loads(copy)["dropped"][0]["kept_id"] == TWO
    with pytest.raises(ValueError, match=r"holds no document from https://none\.example/: give the URL as the source"):
        lineage_of_document("https://none.example/", None)


def test_the_earliest_documents_that_a_store_has_are_looked_through(release, home, monkeypatch):
    """Later steps only drop some of them."""
    graph, read = read_manifest_graph(open_store(None, home)), []

    def find(graph, made, *asked):
        read.append(made.step)
        return find_rows(graph, made, *asked)

    monkeypatch.setattr(plan_takedown, "find_rows", find)
    later = {key: found for key, found in graph.with_digest.items() if found[0].step != "extract_documents"}
    for each in (graph, replace(graph, with_digest=later)):
        assert plan_takedown.documents_at(each, "https://one.example/a") == tuple(sorted((ONE, ONE_MORE)))
    assert read == ["extract_documents", "filter_documents"]


def test_a_near_copy_was_not_trained_on_and_names_the_text_that_stays_and_the_report_that_quotes_it(release):
    found = forget_document.plan(NEAR, None)
    assert (found.ids, found.same, found.copies, found.trained, found.models) == ((NEAR,), (), (TWO,), (), ())
    assert f"a near-duplicate of it stays, unless you ask for it too: {TWO}" in found.describe()
    assert "no phase was trained on it, but one may have been on what stays" in found.describe()
    assert [each.split()[0] for each in found.holders] == ["ingest_documents", "extract_documents", "write_report"]
    alone = found.model_copy(update={"copies": ()})
    assert "no phase was trained on it: nothing has to be rebuilt" in alone.describe()


def test_an_exact_copy_is_meant_whichever_of_both_is_asked_for(release):
    dropped, kept = forget_document.plan(SAME, None), forget_document.plan(TWO, None)
    assert (dropped.ids, dropped.same, dropped.copies) == ((SAME,), (TWO,), ())
    assert (kept.ids, kept.same, kept.resembling) == ((TWO,), (SAME,), (NEAR,))
    for found in (dropped, kept):
        assert [(use.phase, use.num_tokens) for use in found.trained] == [("sft", 4)]
        assert [model.version for model in found.models] == ["2"] and len(found.reruns) == 5
        assert f"the same text is in {found.same[0]}, which is meant, too" in found.describe()
    assert f"a near-duplicate was dropped in favour of it: {NEAR}" in kept.describe()
    digest = content_digest("Text 2.")
    assert dropped.entries == (f"{SAME} sha256:{digest}",) and kept.entries == (f"{TWO} sha256:{digest}",)


def test_a_text_inside_a_repository_is_held_by_its_steps(home, monkeypatch):
    graph = read_manifest_graph(open_store(None, home))
    (extracted,), asked = graph.made_by("extract_documents"), []

    def find(graph, made, patterns, wanted, columns):
        asked.append(set(wanted.get("id", ())))
        return [{"repository_id": "r" * 16}] if patterns == ("files.parquet",) else []

    monkeypatch.setattr(plan_takedown, "find_rows", find)
    joined = extracted.model_copy(update={"identity": {**extracted.identity, "step": "concatenate_repositories"}})
    plan_takedown._holders(replace(graph, with_digest={joined.digest: (joined,)}), (ONE,))
    assert asked == [{ONE}, {ONE, "r" * 16}], "the repository's text is looked for by its own id"


def test_take_downs_at_the_same_time_are_all_in_the_block_list(home, monkeypatch):
    found, urls = forget_document.plan(ONE, None), [f"https://many.example/{number}" for number in range(16)]
    monkeypatch.setattr(forget_document, "_tag", lambda home, takedown: [])
    monkeypatch.setattr(forget_document, "plan", lambda asked, store: found)
    asked = [found.model_copy(update={"asked": url, "entries": ()}) for url in urls]
    with ThreadPoolExecutor(len(asked)) as threads:
        list(threads.map(lambda each: forget_document.apply(each, "micro", None), asked))
    listed = read_block_list(home.root, "blocked_documents.txt")
    assert listed is not None and set(listed.urls) == set(urls)
    (home.root / "blocked_documents.txt").unlink()


def test_only_apply_blocks_and_tags(release, home):
    client_of = forget_document.open_registry
    found = forget_document.plan(ONE, None)
    assert read_block_list(home.root, "blocked_documents.txt") is None
    early = found.model_copy(update={"models": ()})  # a run may register a version after the plan
    said = forget_document.apply(early, "micro", None)
    listed = read_block_list(home.root, "blocked_documents.txt")
    assert listed is not None and listed.ids == listed.urls == ()
    assert set(listed.digests) == {content_digest("Text 0."), content_digest("Text 1.")}
    written = (home.root / "blocked_documents.txt").read_text().splitlines()
    assert written[0].endswith(f": {ONE}") and {line[:16] for line in written[1:]} == {ONE, ONE_MORE}
    tagged = find_version(client_of(home), MODEL, release.version.registered.digest)
    other = find_version(client_of(home), MODEL, "0" * 64)
    assert tagged is not None and other is not None
    assert tagged.tags["glm46.forgotten"].startswith(f"{ONE}, ") and "glm46.forgotten" not in other.tags
    assert said[-1] == f"{MODEL} version 2 is tagged glm46.forgotten; it still has the aliases champion"
    again = forget_document.apply(forget_document.plan("https://one.example/a", None), "micro", None)
    assert again[0].startswith("1 entries added"), "the URL: the ids are there already"
    tagged = find_version(client_of(home), MODEL, release.version.registered.digest)
    asked = [each.split(", ")[0] for each in tagged.tags["glm46.forgotten"].split("; ")]
    assert asked == ["https://one.example/a", ONE], "the first is kept"


def test_no_run_starts_from_weights_that_know_what_was_taken_down(release, home, monkeypatch):
    """After the test above. A phase that is trained on them would be a version without the tag."""
    scale, trained = load_scale("micro"), release.artifacts["train_phase"]
    refused = pytest.raises(ValueError, match=r"--start \S+: version 2 was trained on a text that was taken down")
    with refused:
        check_start(scale, "champion", open_store(None, home), lambda: forget_document.open_registry(home))
    monkeypatch.setattr(start_weights, "connect", lambda uri: forget_document.open_registry(home))
    run = SimpleNamespace(scale=scale, mlflow="", store=SimpleNamespace(load=lambda key, kind: trained))
    with refused:
        start_weights.find_start(run, trained.key, None)


@pytest.mark.parametrize(
    ("entry", "is_tagged"),
    [
        (ONE, True),
        ("https://two.example/b", True),
        (f"{SAME} sha256:{content_digest('Text 2.')}", True),
        ("https://other.example", False),
        ("# a remark", False),
    ],
)
def test_a_version_that_a_run_registers_after_a_take_down_of_its_text_is_tagged(
    release, home, tmp_path, entry, is_tagged
):
    """The run has filtered its documents before. `forget` tags the versions that are registered by then."""
    filtered, path = release.artifacts["filter_documents"], tmp_path / "blocked.txt"
    inputs = {**filtered.manifest.identity["inputs"], "blocked": None}
    manifest = filtered.manifest.model_copy(update={"identity": {**filtered.manifest.identity, "inputs": inputs}})
    documents = SimpleNamespace(filtered=replace(filtered, manifest=manifest))
    recipe = SimpleNamespace(filter=SimpleNamespace(block_list=str(path)))
    scale = SimpleNamespace(data=SimpleNamespace(recipe=recipe))
    run = SimpleNamespace(home=home, store=open_store(None, home), scale=scale)
    path.write_text(f"{entry}\n")
    trained, other = release.artifacts["train_phase"], SimpleNamespace(digest="0" * 64)
    tags = tag_of_taken_down(run, SimpleNamespace(documents=documents), trained)
    assert (
        bool(tags) == is_tagged and ("was trained on a text" in refusal_of(RegisteredVersion("3", tags))) == is_tagged
    )
    assert tag_of_taken_down(run, SimpleNamespace(documents=documents), other) == {}, "it never read the text"
    assert tag_of_taken_down(run, SimpleNamespace(documents=None), trained) == {}


@pytest.mark.parametrize(
    ("version", "reasons", "code", "said"),
    [
        ("1", [], 0, f"{MODEL} version 1 was made without it and is champion"),
        ("3", ["pass_at_1 0.2000, at least 0.25"], 3, "refused: pass_at_1 0.2000, at least 0.25"),
        ("2", [], 1, f"{MODEL} version 2, which the run promoted, was trained on {ONE}: compare --data and"),
    ],
)
def test_run_makes_a_release_and_says_whether_the_text_is_gone(
    release, home, monkeypatch, version, reasons, code, said
):
    """The run itself is that of `glm46 run` (tests/flows/test_end_to_end.py): here it ends as it is told, with the
    version that was trained on the text and with the one that was not."""
    asked = []

    def whole_run(home_dir, *arguments):
        asked.append((home_dir, arguments))
        made = {"promoted": not reasons, "model": MODEL, "alias": "", "version": version, "reasons": reasons}
        return RunOutcome(**made, seconds=1.0, digest="", report="", stages=[])

    monkeypatch.setattr(forget_document, "whole_run", whole_run)
    done = CliRunner().invoke(app, ["forget", ONE, "--scale", "micro", "--run", "--data", "mine"])
    assert done.exit_code == code and said in done.output + done.stderr
    assert asked == [(home.root, ("micro", "--data", "mine"))] and "a rebuild runs 5 steps" in done.stdout
    done = CliRunner().invoke(app, ["forget", ONE, "--data", "mine"])
    assert done.exit_code == 2 and "--data names the documents of --run: add --run, or leave" in done.stderr


def test_an_empty_url_does_not_mean_the_documents_without_one(release):
    """An unset variable of a shell: `glm46 forget "$PAGE" --apply`."""
    with pytest.raises(ValueError, match="no document is asked for: give the URL as the source has it, or an id"):
        forget_document.plan("", None)


def test_what_the_store_does_not_know_is_one_sentence(release):
    with pytest.raises(ValueError, match=r"holds no document from https://other.example: give the URL as the source"):
        forget_document.plan("https://other.example", None)
    with pytest.raises(ValueError, match="knows no document 0123456789abcdef"):
        forget_document.plan("0123456789abcdef", None)
