"""Runs, versions and aliases against a real MLflow server."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from infra.child_process import free_port
from infra.home import Home
from infra.registry.experiment_tracking import connect, ensure_run, finish_run, log_metrics
from infra.registry.format_versions import ensure_format_version
from infra.registry.model_registry import (
    CHAMPION,
    PROMOTION_TAG,
    ensure_alias,
    ensure_registered,
    model_name,
    resolve_alias,
)
from infra.registry.registered_versions import all_versions
from infra.step import Output, Record, step
from infra.storage.open_store import open_store
from model.formats.hf_checkpoint import load_model
from model.generation.generation import InProcessEngine, Sampling
from model.text.chat_template import answer_of, encode, problem_prompt
from model.text.tokenizer_layout import END_OF_TEXT
from tests.support.evaluation_fakes import checkpoint, commit, toy_tokenizer

EXPERIMENT = "glm46-test"


@pytest.fixture(scope="module")
def home(mlflow_server):
    return mlflow_server.home


@pytest.fixture(scope="module")
def store(home):
    return open_store(None, home)


@pytest.fixture(scope="module")
def artifact_root(home) -> Path:
    return home.mlflow_dir / "artifacts"


@pytest.fixture(scope="module")
def tracking_uri(mlflow_server):
    return mlflow_server.uri


@pytest.fixture(scope="module")
def client(tracking_uri):
    return connect(tracking_uri)


def register(client, name, artifact, artifact_root, tags=None):
    run_id = ensure_run(client, EXPERIMENT, artifact.record.name, artifact.key, None, {})
    return ensure_registered(client, name, artifact, "hf", run_id, artifact_root, tags or {}, "a toy")


def test_run_is_found_again_by_its_key(client):
    parent = ensure_run(client, EXPERIMENT, "pipeline", "key-0", None, {"scale": "tiny"})
    other = ensure_run(client, EXPERIMENT, "pipeline", "key-00", None, {})
    child = ensure_run(client, EXPERIMENT, "phase", "key-1", parent, {})
    assert parent == ensure_run(client, EXPERIMENT, "pipeline", "key-0", None, {"scale": "micro"})
    assert child == ensure_run(client, EXPERIMENT, "phase", "key-1", other, {}), (
        "a phase stays below the run that computed it"
    )
    assert child != ensure_run(client, EXPERIMENT, "phase", "key-2", parent, {})
    assert client.get_run(parent).data.tags["scale"] == "micro"
    assert client.get_run(child).data.tags["mlflow.parentRunId"] == parent


def test_a_deleted_experiment_is_restored_by_the_command_that_the_message_names(client, tracking_uri):
    ensure_run(client, "glm46-deleted", "pipeline", "key-0", None, {})
    client.delete_experiment(client.get_experiment_by_name("glm46-deleted").experiment_id)
    with pytest.raises(ValueError, match=r"glm46-deleted was deleted: run `glm46 up`") as refused:
        ensure_run(client, "glm46-deleted", "pipeline", "key-0", None, {})
    command = [sys.executable, "-m", *str(refused.value).split("`")[-2].split()]
    subprocess.run(command, env={**os.environ, "MLFLOW_TRACKING_URI": tracking_uri}, check=True)
    ensure_run(client, "glm46-deleted", "pipeline", "key-0", None, {})


def test_metrics_arrive_by_step(client):
    run_id = ensure_run(client, EXPERIMENT, "metrics", "key-3", None, {})
    log_metrics(client, run_id, [(number, {"loss": 3.0 - number, "rate": 0.1}) for number in (1, 2)])
    finish_run(client, run_id, "FINISHED")
    assert [(point.step, point.value) for point in client.get_metric_history(run_id, "loss")] == [(1, 2.0), (2, 1.0)]
    assert client.get_run(run_id).info.status == "FINISHED"


def test_server_that_is_down_is_named():
    port = free_port()
    started = time.monotonic()
    with pytest.raises(ValueError, match=f"http://127.0.0.1:{port} does not answer"):
        connect(f"http://127.0.0.1:{port}")
    assert time.monotonic() - started < 5
    with pytest.raises(ValueError, match="must be http"):
        connect("sqlite:///mlflow.db")


def test_equal_content_is_one_version(client, store, artifact_root):
    name = model_name("once")
    trained = checkpoint(store, "trained")
    assert register(client, name, trained, artifact_root, {"glm46.scale": "once"}) == ("1", "done")
    assert register(client, name, trained, artifact_root, {"glm46.scale": "once"}) == ("1", "unchanged")
    assert register(client, name, trained, artifact_root, {"glm46.scale": "twice"}) == ("1", "done")
    assert register(client, name, checkpoint(store, "random"), artifact_root) == ("2", "done")
    assert [version.version for version in client.search_model_versions(f"name = '{name}'")] in (["2", "1"], [2, 1])


def test_weights_live_once_and_are_downloaded_by_alias(client, tracking_uri, store, artifact_root, tmp_path):
    import mlflow

    name = model_name("linked")
    trained = checkpoint(store, "trained")
    version, _ = register(client, name, trained, artifact_root)
    assert ensure_alias(client, name, CHAMPION, version) == "done"
    weights = trained.path("hf/model.safetensors")
    links = [path for path in artifact_root.rglob("model.safetensors") if path.stat().st_ino == weights.stat().st_ino]
    assert links and weights.stat().st_nlink == 1 + len(links)
    shutil.rmtree(links[0].parent)  # as `mlflow gc` does after a run was deleted
    assert [register(client, name, trained, artifact_root) for _ in range(2)] == [
        (version, "done"),
        (version, "unchanged"),
    ]
    assert weights.stat().st_nlink == 1 + len(links) and (links[0].parent / "MLmodel").is_file()
    mlflow.set_tracking_uri(tracking_uri)
    directory = Path(mlflow.artifacts.download_artifacts(f"models:/{name}@{CHAMPION}", dst_path=str(tmp_path)))
    for path in trained.paths("hf/*"):
        assert (directory / path.name).read_bytes() == path.read_bytes()


def test_version_of_an_s3_store_points_at_its_objects(client, s3_server, home, artifact_root):
    s3_store = open_store("s3://glm46/registry-test", home)
    artifact = checkpoint(s3_store, "random")
    version, _ = register(client, model_name("s3"), artifact, artifact_root)
    source = client.get_model_version(model_name("s3"), version).source
    assert source == f"s3://glm46/registry-test/objects/{artifact.key}/{artifact.manifest.attempt}/hf"


class Quantized(Record):
    quantized_format: str = "FP8_DYNAMIC"


def quantized(store, content):
    @step(content=("hf/*",))
    def quantize_checkpoint(*, output: Output) -> Quantized:
        output.path("hf/model.safetensors").write_text(content)
        return Quantized()

    return commit(store, quantize_checkpoint, content)


def test_a_format_of_a_release_is_a_version_of_a_model_of_its_own(client, home, store, artifact_root, tracking_uri):
    import mlflow

    name, made = model_name("formats"), quantized(store, "first")
    version, _ = register(client, name, checkpoint(store, "trained"), artifact_root)
    run_id, of_format = client.get_model_version(name, version).run_id, f"{name}-FP8_DYNAMIC"

    def ensure(artifact, release, **figures):
        return ensure_format_version(client, f"{name}/{release}", artifact, run_id, artifact_root, figures)

    assert ensure(made, version, **{"glm46.pass_at_1": "0.5"}) == "done"
    assert ensure(made, version, **{"glm46.pass_at_1": "0.5"}) == "unchanged"
    assert ensure(made, version, **{"glm46.pass_at_1": "0.6"}) == "done"
    assert ensure(quantized(store, "second"), "2") == "done"
    pointed = {alias: resolve_alias(client, of_format, alias) for alias in ("release_1", "release_2")}
    assert {alias: each and each.version for alias, each in pointed.items()} == {"release_1": "1", "release_2": "2"}
    tags = pointed["release_1"].tags
    assert (tags["glm46.made_of"], tags["glm46.format"], tags["glm46.pass_at_1"]) == (f"{name}/1", "FP8_DYNAMIC", "0.6")
    mlflow.set_tracking_uri(tracking_uri)
    directory = Path(mlflow.artifacts.download_artifacts(f"models:/{of_format}@release_1"))
    assert [path.name for path in directory.iterdir()] == ["model.safetensors"]
    assert (directory / "model.safetensors").read_text() == "first"
    assert of_format not in {each.model for each in all_versions(client)}, "no result of a training"
    assert name in {each.model for each in all_versions(client)}


def continuations(directory: Path, prompts: list[list[int]]) -> list[str]:
    """What the engine makes of prompts in token ids, greedily."""
    engine = InProcessEngine(load_model(directory), weights_version="v", batch_sequences=1)
    stops = (toy_tokenizer().token_to_id(END_OF_TEXT),)
    generation = engine.generate(prompts, Sampling(max_new_tokens=12, stop_token_ids=stops), "v")
    return [toy_tokenizer().decode(token_ids, skip_special_tokens=False) for token_ids in generation.token_ids]


ELSEWHERE = """
import importlib.metadata, sys
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
import model
assert model.THE_USERS_OWN, "a file model.py of the user's"
import mlflow
loaded = mlflow.pyfunc.load_model(sys.argv[1], model_config={"max_new_tokens": 12})
answered = loaded.predict(["What is 3 + 1?"])
assert "configs" not in sys.modules and model is sys.modules["model"]
required = {line.strip().partition("==")[0] for line in open(mlflow.pyfunc.get_model_dependencies(sys.argv[1]))}
assert {"torch", "mlflow", "tokenizers", "safetensors"} <= required, required
print(answered["answer"][0])
"""
"""Loads a registered model where this project cannot be imported."""


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_the_registered_model_is_loaded_by_alias_and_answers(
    kind, request, client, tracking_uri, home, store, artifact_root, tmp_path
):
    import mlflow
    import pandas as pd

    if kind == "s3":
        request.getfixturevalue("s3_server")
        store = open_store("s3://glm46/answers", home)
    name, trained = model_name(f"answers_{kind}"), checkpoint(store, "trained")
    version, _ = register(client, name, trained, artifact_root)
    ensure_alias(client, name, CHAMPION, version)
    mlflow.set_tracking_uri(tracking_uri)
    questions = ["What is 3 + 1?", "What is 5 + 1?"]
    said = continuations(
        trained.directory("hf"), [encode(toy_tokenizer(), problem_prompt(text, False))[0] for text in questions]
    )
    answers = [answer_of(text) for text in said]
    model = mlflow.pyfunc.load_model(f"models:/{name}@{CHAMPION}", model_config={"max_new_tokens": 12})
    assert (
        list(model.predict(questions)["answer"])
        == list(model.predict(pd.DataFrame({"prompt": questions}))["answer"])
        == answers
    )
    plain = mlflow.pyfunc.load_model(
        f"models:/{name}@{CHAMPION}", model_config={"is_chat_trained": False, "max_new_tokens": 4}
    )
    continued = continuations(
        trained.directory("hf"), [toy_tokenizer().encode("3 + 1 =", add_special_tokens=False).ids]
    )[0]
    text = plain.predict(["3 + 1 ="])["answer"][0]
    assert continued.startswith(text.rstrip()) and text.strip()

    (tmp_path / "model.py").write_text("THE_USERS_OWN = True")
    environment = {**os.environ, "MLFLOW_TRACKING_URI": tracking_uri}
    finished = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, f"models:/{name}@{CHAMPION}"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.splitlines()[-1] == answers[0]


def test_each_prompt_is_answered_or_refused_by_itself(client, tracking_uri, store, artifact_root):
    import mlflow
    import pandas as pd

    name = model_name("rows")
    version, _ = register(client, name, checkpoint(store, "trained"), artifact_root)
    mlflow.set_tracking_uri(tracking_uri)
    model = mlflow.pyfunc.load_model(f"models:/{name}/{version}", model_config={"max_new_tokens": 12})
    alone = model.predict(["What is 3 + 1?"])["answer"][0]
    said = model.predict(pd.DataFrame({0: ["What is 3 + 1?", "", None, ["a", "list"], "What is 5 + 1? " * 500, " \n"]}))
    assert list(said["answer"]) == [alone, "", "", "", "", ""]
    parts = ["", "is empty", "this is NoneType", "this is list", "at most", "is empty"]
    assert all((part in error) if part else not error for error, part in zip(said["error"], parts, strict=True)), list(
        said["error"]
    )
    half = mlflow.pyfunc.load_model(f"models:/{name}/{version}", model_config={"dtype": "bfloat16"})
    assert half._model_impl.engine.model.lm_head.weight.dtype == torch.bfloat16
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"no CUDA device on .*: set device to cpu"):
            mlflow.pyfunc.load_model(f"models:/{name}/{version}", model_config={"device": "cuda"})


def test_weights_of_a_store_on_another_file_system_are_copied(client, tracking_uri, artifact_root, tmp_path):
    import mlflow

    shared_memory = Path("/dev/shm")
    if not shared_memory.is_dir() or shared_memory.stat().st_dev == artifact_root.stat().st_dev:
        pytest.skip("/dev/shm is no file system of its own here")
    root = shared_memory / f"glm46-test-{os.getpid()}"
    try:
        elsewhere = checkpoint(open_store(str(root / "store"), Home(root)), "random")
        name = model_name("elsewhere")
        assert [register(client, name, elsewhere, artifact_root) for _ in range(2)] == [
            ("1", "done"),
            ("1", "unchanged"),
        ]
        mlflow.set_tracking_uri(tracking_uri)
        directory = Path(mlflow.artifacts.download_artifacts(f"models:/{name}/1", dst_path=str(tmp_path)))
        for path in elsewhere.paths("hf/*"):
            assert (directory / path.name).read_bytes() == path.read_bytes()
    finally:
        subprocess.run(["rm", "-r", str(root)], check=True)


def test_versions_of_all_pages_of_models_are_listed(client, store, artifact_root, monkeypatch):
    """MLflow gives a hundred models at a time; here one."""
    names = [model_name(f"page{number}") for number in range(3)]
    for name in names:
        register(client, name, checkpoint(store, "trained"), artifact_root)
    monkeypatch.setattr(client, "search_registered_models", partial(client.search_registered_models, max_results=1))
    assert set(names) <= {each.model for each in all_versions(client)}


def test_alias_moves_once_and_unknown_ones_resolve_to_none(client, store, artifact_root):
    name = model_name("alias")
    assert resolve_alias(client, name, CHAMPION) is None
    first, _ = register(client, name, checkpoint(store, "trained"), artifact_root)
    assert resolve_alias(client, name, CHAMPION) is None
    assert [ensure_alias(client, name, CHAMPION, first) for _ in range(2)] == ["done", "unchanged"]
    second, _ = register(client, name, checkpoint(store, "random"), artifact_root)
    assert ensure_alias(client, name, CHAMPION, second) == "done"
    reigning = resolve_alias(client, name, CHAMPION)
    assert reigning is not None and (reigning.version, reigning.digest) == (second, checkpoint(store, "random").digest)
    with pytest.raises(ValueError, match=f"no tag {PROMOTION_TAG}"):
        _ = reigning.promotion_key
