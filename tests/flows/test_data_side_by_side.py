"""Long: the data of `micro`, with searches over its documents, with its branches at the same time, as on a cluster,
and in order: equal digests.

Neither Prefect nor a cluster is there: steps run in the threads of their branches, in one session of Spark.
"""

from __future__ import annotations

import threading
from dataclasses import fields

import pytest

from configs.load import changed_scale, load_scale
from flows import check_contract, prepare_data
from flows.running.branches import Branches
from flows.running.computation import Computation
from flows.running.run import Run
from flows.running.stage_log import StageLog
from infra.home import Home
from infra.machine.spark import stop_spark
from infra.step import Artifact
from infra.storage.open_store import open_store
from tasks.data.sources.list_sources import list_sources
from tests.support.data_inputs import write_corpus, write_packages

pytestmark = pytest.mark.long


def digests(scale, sources, home: Home, are_side_by_side: bool, monkeypatch) -> tuple[dict[str, str], int]:
    """Of every prepared artifact, and of how many steps the most computed at the same time."""
    computing: list[str] = []
    most = [0]
    one_at_a_time = threading.Lock()

    def run_step(run, step, *, stage="", recipe=None, resources=None, job=None, data_files=(), **inputs) -> Artifact:
        with one_at_a_time:
            computing.append(step.name)
            most[0] = max(most[0], len(computing))
        computation = Computation(step, inputs, recipe, resources, data_files, stage, job)
        artifact, _ = computation.find_or_run(run.store, lambda part, progress: None, print)
        with one_at_a_time:
            computing.remove(step.name)
        return artifact

    def branches(run, *, are_side_by_side: bool) -> Branches:
        return Branches(run, are_side_by_side=given)

    given = are_side_by_side
    for module in (prepare_data, check_contract):
        monkeypatch.setattr(module, "run_step", run_step)
    monkeypatch.setattr(prepare_data, "Branches", branches)
    run = Run(scale, home, open_store(None, home), "", "", StageLog())
    prepared = prepare_data.prepare_data.fn(run, sources, reads_documents=True, reads_pairs=False)
    stop_spark()
    assert prepared.documents.prompts.record.prompts_by_kind["search"] > 0
    made = {
        **vars(prepared),
        **{each.name: getattr(prepared.documents, each.name) for each in fields(prepared.documents)},
    }
    return {name: artifact.digest for name, artifact in made.items() if isinstance(artifact, Artifact)}, most[0]


def test_branches_at_the_same_time_have_the_digests_of_branches_in_order(tmp_path, monkeypatch):
    (tmp_path / "corpus").mkdir()
    write_corpus(tmp_path / "corpus")
    write_packages(tmp_path / "corpus")
    sources = list_sources(tmp_path / "corpus")
    scale_path = tmp_path / "micro.yaml"
    scale_path.write_text(changed_scale("micro", ["data.recipe.prompts.num_document_searches=64"]))
    scale = load_scale(str(scale_path))
    at_once, most = digests(scale, sources, Home(tmp_path / "at once"), True, monkeypatch)
    in_order, one = digests(scale, sources, Home(tmp_path / "in order"), False, monkeypatch)
    assert at_once == in_order and len(in_order) > 20
    assert most > 2 and one == 1
