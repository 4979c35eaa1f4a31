"""`glm46 stage`: one data stage on a directory, also on the output of an earlier stage; wrong use is one sentence."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from flows.cli.single_stage import STAGES, open_stage, this_machine
from flows.cli.stage_output import StageOutcome
from infra.home import Home
from infra.machine.spark import stop_spark
from tests.conftest import ROOT
from tests.support.data_inputs import prose, write_jsonl
from tests.support.pipeline import glm46


def run_stage(*arguments) -> StageOutcome:
    return open_stage(*arguments)()


@pytest.fixture(scope="module", autouse=True)
def one_session():
    """A stage stops Spark before it copies; here one session serves all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flows.cli.single_stage.stop_spark", lambda: None)
        yield
    stop_spark()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return Home(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def deduplicated(home, tmp_path_factory):
    """Thirty documents; two of them are there twice, and one of these asks for mail."""
    directory = tmp_path_factory.mktemp("input")
    texts = [prose(seed) for seed in range(30)]
    texts += [texts[3], texts[4], f"{prose(31)} Write to jane.doe@mailbox.net for more."]
    write_jsonl(
        directory / "web.jsonl.gz", [{"text": text, "url": f"https://example.org/{n}"} for n, text in enumerate(texts)]
    )
    output = directory.parent / "deduplicated"
    outcome = run_stage("deduplicate", directory, output, "micro", home)
    return directory, output, outcome


def test_a_stage_leaves_documents_evidence_and_its_record(deduplicated):
    _, output, outcome = deduplicated
    documents = pq.read_table(output / "documents").to_pylist()
    dropped = pq.read_table(output / "dropped.parquet").to_pylist()
    assert len(documents) == 31 and [row["reason"] for row in dropped] == ["exact_duplicate"] * 2
    assert {row["kept_id"] for row in dropped} <= {row["id"] for row in documents}
    assert json.loads((output / "record.json").read_text()) == json.loads(outcome.model_dump_json())
    assert outcome.record["num_documents"] == 31
    lines = outcome.describe().splitlines()
    assert lines[0] == "deduplicate: 31 documents left, 2 dropped (exact_duplicate 2)"
    assert lines[1].startswith(f"{output}: documents/, dropped.parquet, ") and lines[2] == f"digest {outcome.digest}"


def test_a_stage_names_the_largest_clusters_of_near_duplicates(tmp_path):
    cluster = {
        "collection": "shop",
        "num_removed": 999,
        "num_documents": 5000,
        "kept_id": "a",
        "kept": "cup",
        "removed_id": "b",
        "removed": "pot",
    }
    record = {"num_documents": 4001, "dropped": {"near_duplicate": 999}, "largest_clusters": [cluster]}
    lines = (
        StageOutcome(stage="deduplicate", output=str(tmp_path), digest="0", record=record, earlier={})
        .describe()
        .splitlines()
    )
    assert lines[1] == "  999 of 5,000 documents of shop went as near-duplicates of a ('cup'), for example b ('pot')"


def test_the_next_stage_takes_what_an_earlier_one_left(deduplicated, home, tmp_path):
    _, output, outcome = deduplicated
    masked = run_stage("personal_data", output, tmp_path / "masked", "micro", home)
    texts = {row["id"]: row["text"] for row in pq.read_table(tmp_path / "masked" / "documents").to_pylist()}
    before = {row["id"]: row["text"] for row in pq.read_table(output / "documents").to_pylist()}
    assert masked.record["num_documents"] == outcome.record["num_documents"] and set(texts) == set(before)
    changed = [identity for identity, text in texts.items() if text != before[identity]]
    assert len(changed) == 1 and "jane.doe@mailbox.net" in before[changed[0]] and "jane.doe" not in texts[changed[0]]


def test_decontamination_by_itself_adds_no_documents_of_ours(home, tmp_path):
    question = prose(77, 30)
    write_jsonl(
        tmp_path / "data" / "web.jsonl",
        [{"text": prose(seed)} for seed in range(20)] + [{"text": f"{prose(20)} {question}"}],
    )
    write_jsonl(tmp_path / "data" / "asked.jsonl", [{"text": question}])
    entries = "[{files: web.jsonl, role: pretrain}, {files: asked.jsonl, role: evaluation}]"
    (tmp_path / "data" / "glm46-data.yaml").write_text(f"version: 1\nentries: {entries}\n")
    record = run_stage("decontaminate", tmp_path / "data", tmp_path / "clean", "micro", home).record
    assert record["dropped"] == {"overlaps_evaluation_text": 1} and record["num_protected_items"] == 1
    assert {row["source"] for row in pq.read_table(tmp_path / "clean" / "documents").to_pylist()} == {"web.jsonl"}


@pytest.mark.parametrize("name", ["boilerplate", "semantic", "filter", "score"])
def test_every_stage_takes_what_deduplication_left(name, deduplicated, home, tmp_path):
    record = run_stage(name, deduplicated[1], tmp_path / "output", "micro", home).record
    assert record["num_documents"] + sum(record.get("dropped", {}).values()) == deduplicated[2].record["num_documents"]


def test_token_shards_bring_the_tokenizer_of_their_ids(deduplicated, home, tmp_path):
    few = tmp_path / "few.yaml"
    few.write_text(
        (ROOT / "configs" / "micro.yaml").read_text().replace("ordinary_tokens: 960", "ordinary_tokens: 300")
    )
    outcome = run_stage("shards", deduplicated[1], tmp_path / "out", str(few), home)
    made = tmp_path / "out" / "earlier" / "train_tokenizer"
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    ids = np.fromfile(tmp_path / "out" / "shards" / "web-00000.bin", np.uint16)
    end = outcome.earlier["train_tokenizer"]["special_ids"]["<|endoftext|>"]
    written = [tokenizer.decode(each.tolist()) for each in np.split(ids, np.flatnonzero(ids == end)[:-1] + 1)]
    assert sorted(written) == sorted(pq.read_table(deduplicated[1] / "documents")["text"].to_pylist())
    assert (made / "tokenizer_config.json").exists() and (made / "chat_template.jinja").exists()


def test_duplicates_are_looked_for_in_what_deduplication_left(deduplicated, home, tmp_path):
    _, output, outcome = deduplicated
    again = run_stage("deduplicate", output, tmp_path / "again", "micro", home)
    assert again.record["num_documents"] == outcome.record["num_documents"] and not any(
        again.record["dropped"].values()
    )
    columns = pq.read_schema(tmp_path / "again" / "documents" / "part-00000.parquet").names
    assert len(columns) == len(set(columns)) and "cluster" in columns
    assert run_stage("semantic", tmp_path / "again", tmp_path / "after", "micro", home).record["num_documents"] == 31


def test_documents_without_scores_are_scored_and_those_with_scores_keep_them(deduplicated, home, tmp_path):
    directory, output, _ = deduplicated
    run_stage("extract", directory, tmp_path / "extracted", "micro", home)
    run_stage("personal_data", tmp_path / "extracted", tmp_path / "masked", "micro", home)
    scored = {}
    for name, address in (("sources", directory), ("masked", tmp_path / "masked"), ("deduplicated", output)):
        run_stage("score", address, tmp_path / f"scored_{name}", "micro", home)
        rows = pq.read_table(tmp_path / f"scored_{name}" / "documents").to_pylist()
        scored[name] = {row["id"]: (row["language"], row["language_score"]) for row in rows}
    assert sum(score is not None for _, score in scored["sources"].values()) == len(scored["masked"]) == 33
    changed = [identity for identity, values in scored["masked"].items() if values != scored["sources"][identity]]
    assert len(changed) <= 1, "one document has an address that was masked"
    assert all(values == scored["sources"][identity] for identity, values in scored["deduplicated"].items())


def test_the_funnel_of_every_earlier_step_is_printed_and_kept(home, tmp_path):
    texts = [prose(seed) for seed in range(120)]
    write_jsonl(tmp_path / "input" / "web.jsonl.gz", [{"text": text} for text in [*texts, ""]])
    (tmp_path / "input" / "page.html").write_text(
        "<html><body><article><p>Only a few words.</p></article></body></html>"
    )
    outcome = run_stage("deduplicate", tmp_path / "input", tmp_path / "output", "micro", home)
    lines = outcome.describe().splitlines()
    assert lines[0] == "ingest_documents: 121 documents left, 1 rejected (empty 1)"
    assert lines[1] == "extract_documents: 120 documents left, 1 dropped (too_short 1)"
    assert lines[2] == "deduplicate: 120 documents left, 0 dropped"
    rejected = pq.read_table(tmp_path / "output" / "earlier" / "ingest_documents" / "rejected.parquet").to_pylist()
    dropped = pq.read_table(tmp_path / "output" / "earlier" / "extract_documents" / "dropped.parquet").to_pylist()
    assert [row["reason"] for row in rejected] == ["empty"] and [row["reason"] for row in dropped] == ["too_short"]


def test_the_same_stage_again_computes_nothing(deduplicated, home, tmp_path, capfd):
    directory, _, outcome = deduplicated
    again = run_stage("deduplicate", directory, tmp_path / "again", "micro", home)
    assert again.digest == outcome.digest
    states = [line.split(" s  ")[1].split()[0] for line in capfd.readouterr().err.splitlines() if " s  " in line]
    assert states and set(states) == {"cached"}


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("melt", "input", "no stage 'melt': the stages are extract, .*deduplicate"),
        ("filter", None, "stage filter reads documents: name a directory, .* with --input"),
        ("filter", "missing", "does not exist or is no directory"),
        ("synthesize", "input", "stage synthesize makes its documents: leave --input out"),
        ("decontaminate", "deduplicated", "this stage reads sources .*: name their directory"),
    ],
)
def test_wrong_use_is_one_sentence_with_the_fix(name, given, message, deduplicated, home, tmp_path):
    directory, output, _ = deduplicated
    addresses = {"input": directory, "missing": tmp_path / "missing", "deduplicated": output, None: None}
    with pytest.raises(ValueError, match=message):
        run_stage(name, addresses[given], tmp_path / "output", "micro", home)
    assert not (tmp_path / "output").exists()


def test_an_output_directory_with_files_is_refused(deduplicated, home):
    directory, output, _ = deduplicated
    with pytest.raises(ValueError, match=r"--output .*deduplicated is not empty: name a new directory"):
        run_stage("deduplicate", directory, output, "micro", home)


def test_an_output_that_cannot_be_used_is_refused_before_the_work(deduplicated, home, tmp_path):
    directory, _, _ = deduplicated
    (tmp_path / "file").write_text("")
    for output, message in (
        (tmp_path / "file", "file is a file: name a new directory"),
        (tmp_path / "file" / "below", "file is a file"),
        (directory / "clean", "is in --input .* read again with it"),
        (directory, "is not empty"),
    ):
        with pytest.raises(ValueError, match=message):
            run_stage("deduplicate", directory, output, "micro", home)
    assert not (directory / "clean").exists()


def test_an_output_whose_copy_was_killed_is_made_whole_and_passes_for_no_input_before(
    deduplicated, home, tmp_path, monkeypatch
):
    directory, whole, _ = deduplicated
    output, copy = tmp_path / "output", shutil.copyfile

    def killed(source, target):
        if target.name == "dropped.parquet":
            raise KeyboardInterrupt
        copy(source, target)

    monkeypatch.setattr(shutil, "copyfile", killed)
    with pytest.raises(KeyboardInterrupt):
        run_stage("deduplicate", directory, output, "micro", home)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="output of a stage that was not finished: run that stage again"):
        run_stage("personal_data", output, tmp_path / "masked", "micro", home)
    run_stage("deduplicate", directory, output, "micro", home)
    files = [sorted(path.relative_to(folder) for path in folder.rglob("*")) for folder in (whole, output)]
    assert files[0] == files[1]


def test_an_output_that_another_run_took_meanwhile_stays_as_it_left_it(deduplicated, home, tmp_path, monkeypatch):
    directory, _, _ = deduplicated
    output, compute = tmp_path / "output", STAGES["deduplicate"]

    def overtaken(run):
        (output / "record.json").write_text("{}")
        return compute(run)

    monkeypatch.setitem(STAGES, "deduplicate", overtaken)
    with pytest.raises(ValueError, match="is not empty: name a new directory"):
        run_stage("deduplicate", directory, output, "micro", home)
    assert [path.name for path in output.iterdir()] == ["record.json"]


def test_an_output_that_was_killed_while_it_was_put_in_place_is_made_whole(deduplicated, home, tmp_path, monkeypatch):
    directory, whole, _ = deduplicated
    output, rename = tmp_path / "output", Path.rename

    def killed(path, target):
        if path.name == "dropped.parquet":
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        run_stage("deduplicate", directory, output, "micro", home)
    monkeypatch.undo()
    assert (output / "documents").exists() and not (output / "dropped.parquet").exists()
    with pytest.raises(ValueError, match="output of a stage that was not finished: run that stage again"):
        run_stage("personal_data", output, tmp_path / "masked", "micro", home)
    (output / "mine.txt").write_text("")
    with pytest.raises(ValueError, match="is not empty: name a new directory"):
        run_stage("deduplicate", directory, output, "micro", home)
    (output / "mine.txt").unlink()
    run_stage("deduplicate", directory, output, "micro", home)
    files = [sorted(path.relative_to(folder) for path in folder.rglob("*")) for folder in (whole, output)]
    assert files[0] == files[1]


def test_two_runs_on_one_output_do_not_mix(deduplicated, home, tmp_path):
    directory, output = deduplicated[0], tmp_path / "output"
    output.mkdir()
    held = os.open(output, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match=r"another run writes there now: wait for it, or name another directory"):
        run_stage("deduplicate", directory, output, "micro", home)
    os.close(held)
    assert output.is_dir()
    assert run_stage("deduplicate", directory, output, "micro", home).digest == deduplicated[2].digest


def test_a_full_disk_leaves_nothing_and_says_what_to_do(deduplicated, home, tmp_path, monkeypatch):
    def full(source, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(ValueError, match=r"cannot be written \(No space left on device\): make room or name another"):
        run_stage("deduplicate", deduplicated[0], tmp_path / "output", "micro", home)
    assert not (tmp_path / "output").exists()


def test_parquet_of_the_users_own_in_a_directory_named_documents_is_a_source(home, tmp_path):
    (tmp_path / "data" / "documents").mkdir(parents=True)
    texts = [prose(seed) for seed in range(12)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "data" / "documents" / "mine.parquet")
    assert run_stage("extract", tmp_path / "data", tmp_path / "output", "micro", home).record["num_documents"] == 12
    (tmp_path / "cut" / "documents").mkdir(parents=True)
    (tmp_path / "cut" / "documents" / "part-00000.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"part-00000\.parquet cannot be read .*run the stage that wrote it again"):
        run_stage("extract", tmp_path / "cut", tmp_path / "other", "micro", home)


def test_wrong_use_ends_with_exit_code_2_before_any_work(home, tmp_path):
    finished = glm46("stage", "melt", "--input", str(tmp_path), "--output", str(tmp_path / "output"), home=home.root)
    assert finished.exit_code == 2 and finished.stderr.startswith("glm46: no stage 'melt': the stages are"), (
        finished.stderr
    )


def test_a_cluster_that_this_machine_does_not_know_is_named_before_any_work(deduplicated, home, tmp_path, monkeypatch):
    monkeypatch.delenv("HADOOP_CONF_DIR", raising=False)
    monkeypatch.delenv("YARN_CONF_DIR", raising=False)
    with pytest.raises(ValueError, match=r"master is yarn, and neither HADOOP_CONF_DIR .* leave --config out"):
        run_stage("deduplicate", deduplicated[0], tmp_path / "output", "full", home)


def test_the_running_spark_job_is_reported(home, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("flows.running.spark_progress.INTERVAL_SECONDS", 0.02)
    monkeypatch.setattr("flows.running.stage_log.PROGRESS_INTERVAL_SECONDS", {True: 0.0, False: 0.0})
    write_jsonl(tmp_path / "input" / "web.jsonl.gz", [{"text": prose(seed)} for seed in range(200, 215)])
    run_stage("extract", tmp_path / "input", tmp_path / "output", "micro", home)
    progress = re.findall(r"_documents, Spark stage \d+: (\d+) of (\d+) tasks", capfd.readouterr().err)
    assert progress and all(int(done) <= int(total) for done, total in progress)


def test_tasks_on_this_machine_do_not_grow_with_the_input():
    assert this_machine(0).shuffle_partitions == 2 * len(os.sched_getaffinity(0))
    assert this_machine(10 * 2**40).shuffle_partitions == 10 * 2**40 // (64 * 2**20)


def test_every_stage_is_a_section_of_the_data_recipe():
    from configs.schema import DataRecipe

    assert set(STAGES) - {"score", "shards"} <= set(DataRecipe.model_fields)
