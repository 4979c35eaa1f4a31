"""`glm46 serve` follows its alias: after `glm46 rollback` the version before answers at the same address."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields

import pytest
import yaml

from configs.schema import ConversionRecipe
from flows.cli.serving.asked_server import Options, ask
from flows.cli.serving.serve_asked import next_version
from infra.home import Home
from infra.registry.experiment_tracking import connect, ensure_run
from infra.registry.model_registry import GGUF_TAG, RegisteredVersion, ensure_registered, model_name
from infra.registry.promotion import look_up_rivals, promote
from infra.serving.model_server import ModelServer
from infra.storage.open_store import open_store
from tasks.release.convert_to_gguf import convert_to_gguf
from tests.conftest import ROOT
from tests.support.evaluation_fakes import checkpoint, commit
from tests.support.pipeline import command, environment, glm46, here, refused

FOLLOWING_SECONDS = 300
"""Far above the second or two that it takes: the machine may be busy."""
MODEL = model_name("followed")


@dataclass(frozen=True)
class Followed:
    """A model whose versions 1 and 2 were champion, one after the other."""

    home: str
    scale: str
    client: object

    def glm46(self, *arguments: str):
        return glm46(*arguments, home=self.home, timeout=120)


@pytest.fixture(scope="module")
def followed(mlflow_server, tmp_path_factory):
    tree = yaml.safe_load((ROOT / "configs" / "micro.yaml").read_text())
    path = tmp_path_factory.mktemp("followed") / "followed.yaml"
    path.write_text(yaml.safe_dump({**tree, "scale": "followed"}))
    home, client = mlflow_server.home, connect(mlflow_server.uri)
    store = open_store(None, home)
    recipe = ConversionRecipe(gguf_types=("F32",))
    for name in ("random", "trained"):
        weights = checkpoint(store, name)
        gguf = commit(store, convert_to_gguf, checkpoint=weights, recipe=recipe)
        run_id = ensure_run(client, "glm46-followed", name, weights.key, None, {})
        root = home.mlflow_dir / "artifacts"
        version, _ = ensure_registered(client, MODEL, weights, "hf", run_id, root, {GGUF_TAG: gguf.key}, "")
        promote(client, store, MODEL, version, {}, look_up_rivals(client, store, MODEL, (), print), print)
    return Followed(home.root, str(path), client)


def answer(url: str) -> str | None:
    """The served model's greedy continuation; None while it does not answer."""
    body = json.dumps({"prompt": "4 + 1 =", "max_tokens": 8, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answered:
            return json.loads(answered.read())["choices"][0]["text"]
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return None


def test_a_served_champion_follows_a_rollback_at_its_address(followed):
    serving = subprocess.Popen(
        command("serve", "--scale", followed.scale, "--port", "0"),
        cwd=ROOT,
        env=environment(followed.home),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        line = serving.stdout.readline()
        assert line.startswith(f"{MODEL} version 2 (champion) at http://127.0.0.1:")
        url = line.split(" at ")[1].split()[0]
        before = answer(url)
        started = time.monotonic()
        with ThreadPoolExecutor(1) as beside:
            command_ended = beside.submit(followed.glm46, "rollback", followed.scale, "--reason", "it answers wrongly")
            while answer(url) in (before, None):
                assert time.monotonic() < started + FOLLOWING_SECONDS
                time.sleep(0.05)
            print(f"the restored version answered {time.monotonic() - started:.1f} s after the command began")
            back = command_ended.result()
        assert (back.exit_code, back.stderr) == (0, "")
        assert f"{MODEL}: champion is version 1 again, instead of version 2; previous: no version" in back.stdout
        assert serving.stdout.readline() == line.replace("version 2", "version 1")
    finally:
        serving.terminate()
        serving.wait()
    again = refused("rollback", followed.scale, "--reason", "once more", home=followed.home)
    assert again.exit_code == 1 and "there is nothing to roll back to" in again.stderr
    assert "Traceback" not in again.stderr and len(again.stderr.splitlines()) == 1


def test_a_next_version_that_cannot_be_served_leaves_the_one_before(followed, capfd):
    """An alias that was moved by hand to a version of which glm46 knows nothing, or whose files are gone."""
    client, home = followed.client, Home(followed.home)
    foreign = client.create_model_version(MODEL, "s3://none/none", tags={GGUF_TAG: "0" * 64}).version
    none = Options(**{field.name: None for field in fields(Options)})
    asked = ask(none, None, home, followed.scale, "champion", "", None)
    first, second = (RegisteredVersion(number, client.get_model_version(MODEL, number).tags) for number in "12")
    before = client.get_model_version_by_alias(MODEL, "champion").version
    server = subprocess.Popen(["sleep", "600"])
    try:
        client.set_registered_model_alias(MODEL, "champion", foreign)
        with ThreadPoolExecutor(1) as beside:
            following = beside.submit(next_version, asked, ModelServer("", server, home.run_dir / "log"), first)
            said = ""
            while "version 1 is served still" not in said:
                assert not following.done(), following.result()
                said += capfd.readouterr().err
                time.sleep(0.05)
            client.set_registered_model_alias(MODEL, "champion", "2")
            version, placed = following.result()
        assert "holds no manifest for key 0000" in said and said.count("is served still") == 1
        assert version == second and placed == asked.of_version(second)
    finally:
        server.kill()
        server.wait()
        client.set_registered_model_alias(MODEL, "champion", before)
        client.delete_model_version(MODEL, foreign)


def test_a_rollback_without_a_reason_or_a_champion_is_wrong_usage(followed):
    assert refused("rollback", followed.scale, home=followed.home).exit_code == 2
    unknown = refused("rollback", "nightly", "--reason", "x", home=followed.home)
    assert unknown.exit_code == 2 and "no version of model glm46-nightly has the alias champion" in unknown.stderr


def test_a_format_is_one_of_the_versions(followed):
    """Of its GGUF files for llama.cpp, of its quantized checkpoints for the others."""
    serve = ("serve", "--scale", followed.scale, "--print")
    assert here(*serve, "--format", "F32", home=followed.home).exit_code == 0
    for options, names in (((), "name one of F32"), (("--engine", "vllm"), "for vllm and sglang: name one of none")):
        other = refused(*serve, *options, "--format", "Q3_K", home=followed.home)
        assert other.exit_code == 2 and len(other.stderr.splitlines()) == 1
        assert "has no files in format Q3_K" in other.stderr and names in other.stderr
    both = refused(*serve, "--checkpoint", "model.gguf", "--format", "F32", home=followed.home)
    assert both.exit_code == 2 and "leave one out" in both.stderr
