"""`glm46 eval`, `generate`, `fetch` and `profile` by the real command line: of a registered version as of its
directory, and what each refuses."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
import yaml
from tokenizers import Tokenizer
from typer.testing import CliRunner

from configs.schema import ConversionRecipe
from flows.cli.command import app
from infra.registry.experiment_tracking import connect, ensure_run
from infra.registry.model_registry import GGUF_TAG, ensure_registered, model_name
from infra.registry.promotion import look_up_rivals, promote
from infra.step import Output, step
from infra.storage.open_store import open_store
from model.formats.quantized_model import load_original
from model.generation.sampling import Sampling
from model.text.chat_template import encode, problem_prompt
from tasks.evaluation.engine import end_token_ids, load_tokenizer
from tasks.release.convert_to_gguf import convert_to_gguf
from tasks.release.transformers_engine import TransformersEngine
from tasks.training.import_checkpoint import describe_checkpoint_dir
from tasks.training.state.trained_checkpoint import TrainedCheckpoint
from tests.conftest import ROOT
from tests.evaluation.benchmarks.toy_suite import write_suite, write_toy_model
from tests.support.evaluation_fakes import commit
from tests.support.pipeline import glm46, here, refused
from tests.support.refused_releases import record_of
from tests.training.test_fetch_checkpoint import published

MODEL = model_name("commanded")


@step(content=("hf/*",))
def train_phase(*, output: Output) -> TrainedCheckpoint:
    write_toy_model(output.path("hf/config.json").parent)
    return record_of(1)


@dataclass(frozen=True)
class Commanded:
    """A champion, and the directory that it was registered from."""

    home: Path
    scale: str
    checkpoint_dir: Path

    def glm46(self, *arguments: object):
        return glm46(*map(str, arguments), home=self.home, timeout=300)


@pytest.fixture(scope="module")
def commanded(mlflow_server, tmp_path_factory):
    tree = yaml.safe_load((ROOT / "configs" / "micro.yaml").read_text())
    path = tmp_path_factory.mktemp("commanded") / "commanded.yaml"
    path.write_text(yaml.safe_dump({**tree, "scale": "commanded"}))
    home, client = mlflow_server.home, connect(mlflow_server.uri)
    store = open_store(None, home)
    recipe = ConversionRecipe(gguf_types=("F32",))
    weights = commit(store, train_phase)
    gguf = commit(store, convert_to_gguf, checkpoint=weights, recipe=recipe)
    run_id = ensure_run(client, "glm46-commanded", "toy", weights.key, None, {})
    root = home.mlflow_dir / "artifacts"
    version, _ = ensure_registered(client, MODEL, weights, "hf", run_id, root, {GGUF_TAG: gguf.key}, "")
    promote(client, store, MODEL, version, {}, look_up_rivals(client, store, MODEL, (), print), print)
    return Commanded(home.root, str(path), weights.directory("hf"))


def test_eval_of_an_alias_is_that_of_its_directory(commanded, tmp_path):
    write_suite(tmp_path)
    suite = yaml.safe_load((tmp_path / "toy.yaml").read_text())
    suite["benchmarks"] = [each for each in suite["benchmarks"] if each["name"] in ("choice", "copies")]
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(suite))
    given = ["--suite", tmp_path / "toy.yaml", "--data", tmp_path / "data", "--scale", commanded.scale, "--json"]
    results = []
    for target in ("champion", commanded.checkpoint_dir):
        done = commanded.glm46("eval", target, *given, "--output", tmp_path / f"{len(results)}.json")
        assert done.exit_code == 0, done.stderr
        results.append(json.loads(done.stdout))
    assert results[0]["target"] == f"{MODEL} version 1" and len(results[0]["benchmarks"]) == 2
    assert results[0]["benchmarks"] == results[1]["benchmarks"]
    unknown = refused("eval", "sft", *map(str, given), "--output", str(tmp_path / "no.json"), home=commanded.home)
    assert unknown.exit_code == 2 and f"{MODEL} has no version or alias sft; it has 1 = " in unknown.stderr
    assert not (tmp_path / "no.json").exists()


def test_generate_answers_by_an_alias_as_by_its_directory(commanded, tmp_path):
    asked = ["--prompt", "What is 4 + 1?", "--max-tokens", "8", "--scale", commanded.scale]
    answers = [
        commanded.glm46("generate", "champion", *asked),
        here("generate", str(commanded.checkpoint_dir), *asked, home=commanded.home),
    ]
    assert [answer.exit_code for answer in answers] == [0, 0], answers[0].stderr
    tokenizer = load_tokenizer(commanded.checkpoint_dir / "tokenizer.json")
    prompt = encode(tokenizer, problem_prompt("What is 4 + 1?", enable_thinking=False))[0]
    sampling = Sampling(8, stop_token_ids=end_token_ids(tokenizer))
    theirs = TransformersEngine(load_original(commanded.checkpoint_dir), "v").generate([prompt], sampling, "v")
    shown = Tokenizer.from_file(str(commanded.checkpoint_dir / "tokenizer.json"))
    expected = shown.decode(theirs.token_ids[0], skip_special_tokens=True)
    assert answers[0].stdout == answers[1].stdout == f"{expected}\n" and expected.strip(), "what transformers answers"
    tree = yaml.safe_load(Path(commanded.scale).read_text())
    tree["evaluation"]["recipe"]["enable_thinking"] = True
    (reasoning := tmp_path / "reasoning.yaml").write_text(yaml.safe_dump(tree))
    reasoned = [
        here("generate", *source, "--prompt", "What is 4 + 1?", "--max-tokens", "8", home=commanded.home).stdout
        for source in (
            ("champion", "--scale", str(reasoning)),
            ("champion", "--scale", commanded.scale, "--thinking"),
            (str(commanded.checkpoint_dir), "--thinking"),
            ("champion", "--scale", str(reasoning), "--no-thinking"),
        )
    ]
    assert reasoned[0] == reasoned[1] == reasoned[2] != reasoned[3] == answers[0].stdout, "as `chat` asks a version"
    long = refused("generate", "champion", *asked[:3], "100000", *asked[4:], home=commanded.home)
    assert long.exit_code == 2 and "the model 1024 positions: lower --max-tokens" in long.stderr


def test_profile_of_a_version_measures_levels_memory_and_drafts(commanded, tmp_path):
    given = ["champion", "--scale", commanded.scale, "--max-tokens", "8", "--json"]
    done = commanded.glm46("profile", *given, "--concurrency", "1,2", "--output", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    measured = json.loads(done.stdout)
    assert measured == json.loads((tmp_path / "out" / "profile.json").read_text())
    assert [level["concurrency"] for level in measured["levels"]] == [1, 2] and measured["memory_bytes"] > 10_000_000
    assert len(measured["drafts"]) == 2 and (tmp_path / "out" / "profile.html").stat().st_size > 1000
    assert all(each["num_equal"] == each["num_answers"] for each in measured["drafts"]), "drafts change no answer"
    again = refused("profile", *given, "--output", str(tmp_path / "out"), home=commanded.home)
    assert again.exit_code == 2 and "must be a new directory in one that exists" in again.stderr
    rising = ["--concurrency", "2,1", "--output", str(tmp_path / "other")]
    falling = refused("profile", *given, *rising, home=commanded.home)
    assert falling.exit_code == 2 and "write rising numbers of requests, as 1,2,4,8" in falling.stderr
    assert not (tmp_path / "other").exists()


def test_no_command_that_reads_a_store_makes_one_of_a_directory_that_is_none(commanded, tmp_path):
    """Neither of a name that was typed wrongly, nor in a directory that holds something else."""
    (tmp_path / "papers").mkdir()
    wrongs = (("typo", "does not exist"), ("papers", "is no store"))
    asked = (
        ("serve", "--print", "--scale", commanded.scale),
        ("chat", "--prompt", "x", "--scale", commanded.scale),
        ("eval", "champion", "--suite", "smoke", "--scale", commanded.scale, "--output", tmp_path / "no.json"),
        ("convert", "champion", tmp_path / "no.gguf", "--to", "gguf", "--scale", commanded.scale),
        ("generate", "champion", "--prompt", "x", "--scale", commanded.scale),
        ("profile", "champion", "--scale", commanded.scale, "--output", tmp_path / "no"),
        ("rollback", commanded.scale, "--reason", "x"),
    )
    for arguments, (name, wrong) in product(asked, wrongs):
        ended = refused(*map(str, arguments), "--store", str(tmp_path / name), home=commanded.home)
        assert f"glm46: store {tmp_path / name} {wrong}: name the one that the runs" in ended.stderr, arguments
        assert ended.exit_code == (1 if arguments[0] == "profile" else 2), arguments
    assert [path.name for path in tmp_path.iterdir()] == ["papers"] and not [*(tmp_path / "papers").iterdir()]


def test_fetch_copies_a_model_of_the_hub_once_it_is_accounted_for(tmp_path, monkeypatch):
    monkeypatch.setenv("GLM46_HOME", str(tmp_path / "home"))
    model = write_toy_model(tmp_path / "model")

    def fetch(target: Path, source: str = "hf://owner/name"):
        return CliRunner().invoke(app, ["fetch", source, str(target)])

    with published(model, tmp_path / "cache", monkeypatch):
        done = fetch(tmp_path / "own")
        assert (done.exit_code, done.stdout.strip()) == (0, str(tmp_path / "own")), done.stderr
        fetched, original = describe_checkpoint_dir(tmp_path / "own"), describe_checkpoint_dir(model)
        assert fetched.digest == original.digest
        taken = fetch(tmp_path / "own")
        assert taken.exit_code == 2 and "must be a new directory in one that exists" in taken.stderr
        absent = fetch(tmp_path / "other", "hf://owner/other")
        assert absent.exit_code == 2 and "cannot be fetched" in absent.stderr
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"intermediate_size": config["intermediate_size"] * 2}))
    with published(model, tmp_path / "another cache", monkeypatch):
        wrong = fetch(tmp_path / "wrong")
    assert wrong.exit_code == 2 and "mlp.down_proj.weight" in wrong.stderr, wrong.stderr
    assert not (tmp_path / "wrong").exists() and not (tmp_path / "other").exists()
