"""What a user gets wrong ends with one clear message, exit code 1 or 2, and no traceback."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys

import pytest
import torch
import typer
import yaml
from prefect.exceptions import ParameterTypeError
from typer.testing import CliRunner

from configs.load import load_scale
from flows.cli import command
from flows.cli.command_errors import failures
from flows.full_pipeline import full_pipeline
from model.formats.hf_checkpoint import config_dict
from tests.conftest import ROOT
from tests.support.model_recipes import random_model
from tests.support.pipeline import environment, glm46, refused
from tests.support.saved_models import save_checkpoint


def expect(finished, exit_code, *parts):
    """One message with these parts, no traceback."""
    assert finished.exit_code == exit_code, finished.stderr
    assert "Traceback" not in finished.stderr + finished.stdout
    for part in parts:
        assert part in finished.stderr, finished.stderr


def test_unknown_scale(tmp_path):
    expect(refused("run", "hugee", home=tmp_path), 2, "no scale 'hugee'", "tiny")


def test_unknown_key_in_a_yaml(tmp_path):
    tree = yaml.safe_load((ROOT / "configs" / "micro.yaml").read_text())
    tree["model"]["recipe"]["hidden_sise"] = 3
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(tree))
    expect(
        refused("plan", str(tmp_path / "mine.yaml"), home=tmp_path),
        2,
        "mine.yaml: model.recipe.hidden_sise: unknown key",
    )


def test_unknown_stage_and_an_entry_without_weights(tmp_path):
    expect(
        refused("run", "micro", "--until", "lunch", home=tmp_path),
        2,
        "--until lunch",
        "prepare_data, pretrain_general, mid_reasoning, sft, reward_model, rl_reasoning, release_model",
    )
    expect(refused("run", "micro", "--from", "release_model", home=tmp_path), 2, "--start")


def test_a_speedrun_refuses_what_is_no_record(tmp_path):
    other = tmp_path / "other.json"
    other.write_text("{}")
    expect(
        refused("speedrun", "micro", "--verify", str(other), home=tmp_path / "home"),
        2,
        "is no record",
        "Field required",
    )
    expect(
        refused("speedrun", "micro", "--verify", str(tmp_path / "no.json"), home=tmp_path / "home"),
        2,
        "cannot be read (No such file or directory): name a file of `glm46 speedrun`",
    )


def test_what_plan_knows_is_refused_before_anything_is_computed(tmp_path):
    if torch.cuda.device_count() < 8:
        expect(
            refused("run", "air_lora", "--from", "sft", "--start", str(tmp_path), home=tmp_path / "home"),
            2,
            "phase sft: ",
            "CUDA device",
        )
    text = (ROOT / "configs" / "micro.yaml").read_text()
    for master, part in (
        ("yarn", "HADOOP_CONF_DIR"),
        ("spark://127.0.0.1:1", "does not answer"),
        ("spark://there", "spark://HOST:PORT"),
    ):
        (tmp_path / "mine.yaml").write_text(text.replace('master: "local[2]"', f'master: "{master}"'))
        expect(refused("run", str(tmp_path / "mine.yaml"), home=tmp_path / "home"), 2, "master", part)
    for line, changed, part in (
        ("launcher: local, device: cpu, batch", "launcher: ssh, device: cpu, batch", "evaluation: launcher ssh needs"),
        ("launcher: local, device: cpu,\n", "launcher: local, device: cuda,\n", "release: no CUDA device on"),
    ):
        if "cuda" in changed and torch.cuda.is_available():
            continue
        assert text.count(line) == 1
        (tmp_path / "mine.yaml").write_text(text.replace(line, changed))
        expect(refused("run", str(tmp_path / "mine.yaml"), home=tmp_path / "home"), 2, part)
    assert not (tmp_path / "home" / "prefect" / "prefect.db").exists()


def test_weights_with_another_chat_template_are_not_released_as_they_are(tmp_path):
    """They would be judged in one template and served in another; a phase on conversations teaches them ours."""
    model = random_model(load_scale("micro").model.recipe)
    save_checkpoint(
        model, tmp_path / "hf", eos_token_ids=[1], pad_token_id=1, dtype=torch.float32, max_shard_bytes=10**9
    )
    (tmp_path / "hf" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    asked = ("run", "micro", "--from", "release_model", "--start", str(tmp_path / "hf"))
    expect(refused(*asked, home=tmp_path / "home"), 2, "its chat template writes conversations otherwise", "--from")


def test_a_start_that_is_no_checkpoint_is_refused_before_data_is_prepared(tmp_path):
    def start(value):
        return refused("run", "micro", "--from", "release_model", "--start", str(value), home=tmp_path / "home")

    (tmp_path / "empty").mkdir()
    expect(start(tmp_path / "empty"), 2, "config.json does not exist")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    expect(start(tmp_path / "adapter"), 2, "holds an adapter, no model: merge it into the model that it was trained on")
    expect(start("0" * 64), 2, "holds nothing under this key")
    expect(start("hf://name"), 2, "hf://name names no model: write hf://owner/name or hf://owner/name@revision")
    expect(start("hf://owner/name"), 2, "hf://owner/name cannot be fetched", "or download it and name the")
    expect(start("chmapion"), 2, "no model registry yet")
    (tmp_path / "other").mkdir()
    recipe = load_scale("micro").model.recipe.model_copy(update={"n_routed_experts": 12, "rope_theta": 5e6})
    config = config_dict(recipe, dtype=torch.float32, eos_token_ids=[1], pad_token_id=1)
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    expect(start(tmp_path / "other"), 2, "other/config.json: n_routed_experts 12 (the scale has")


def test_missing_data_directory(tmp_path):
    expect(refused("run", "micro", "--data", str(tmp_path / "absent"), home=tmp_path), 2, "absent")


@pytest.mark.parametrize(
    ("option", "address", "part"),
    [
        ("--data", "s3://absent/corpus", "s3://absent/corpus cannot be listed"),
        ("--data", "s3://glm46/absent", "s3://glm46/absent holds no file"),
        ("--data", "s3:///", "s3:/// names no bucket: write s3://bucket/prefix"),
        ("--store", "s3:///", "s3:/// names no bucket: write s3://bucket/prefix"),
    ],
)
def test_a_bucket_that_holds_nothing_is_refused_before_any_server_starts(option, address, part, s3_server, tmp_path):
    expect(refused("run", "micro", option, address, home=tmp_path), 2, part)
    assert not (tmp_path / "run" / "prefect.log").exists()


def test_empty_corpus(tmp_path):
    (tmp_path / "data").mkdir()
    expect(glm46("run", "micro", "--data", str(tmp_path / "data"), home=tmp_path / "home"), 1, str(tmp_path / "data"))


def test_a_home_and_a_store_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    expect(refused("run", "micro", home=tmp_path / "file"), 2, "GLM46_HOME", "cannot be written")
    expect(
        refused("run", "micro", "--store", str(tmp_path / "file"), home=tmp_path / "home"),
        2,
        "store",
        "cannot be written",
    )


@pytest.mark.parametrize(
    ("variable", "value", "part"), [("JAVA_HOME", "/absent", "install Java 17"), ("CXX", "/absent/c++", "C++ compiler")]
)
def test_no_java_and_no_compiler(variable, value, part, tmp_path):
    expect(refused("run", "micro", home=tmp_path, **{variable: value}), 2, part)


def test_a_file_system_without_room_is_refused_before_anything_starts(tmp_path):
    expect(
        glm46("run", "micro", home=tmp_path, TMPDIR="/proc"),
        2,
        "0.0 GiB free under /proc",
        "free at least 0.25 GiB",
        "TMPDIR",
    )


def test_chat_before_anything_was_promoted(tmp_path):
    expect(refused("chat", "--scale", "micro", "--prompt", "x", home=tmp_path), 2, "glm46 run")
    expect(refused("serve", "--scale", "mikro", home=tmp_path), 2, "no scale 'mikro'")
    expect(refused("serve", "--port", "99999", home=tmp_path), 2, "--port")
    expect(refused("plan", "./missing.yaml", home=tmp_path), 2, "no file", "missing.yaml")


def test_what_cannot_be_written_or_asked_is_wrong_usage(tmp_path, home, monkeypatch):
    (tmp_path / "file").touch()
    for arguments, part in (
        (("evidence", "--output", str(tmp_path / "file" / "x")), f"cannot be made in {tmp_path / 'file'}: name a new"),
        (("lineage", "model", "champion", "--records", str(tmp_path)), f"--records {tmp_path} is a directory: name a"),
        (("rollback", "tiny", "--reason", ""), "--reason has 0 characters: give 1 to 1000"),
        (("chat", "--max-tokens", "0"), "--max-tokens"),
        (("chat", "--temperature", "-1"), "--temperature"),
    ):
        done = CliRunner().invoke(command.app, arguments)
        assert done.exit_code == 2 and part in done.stderr, (arguments, done.stderr)


def test_a_piped_chat_has_no_prompt_among_its_answers(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("What is 3 + 4?\nAnd 5?\n"))
    assert list(command._terminal_lines()) == ["What is 3 + 4?", "And 5?"] and capsys.readouterr().out == ""


def test_unreadable_sources_stop_the_run_and_are_named(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "latin.txt").write_bytes(b"caf\xe9 " * 200)
    (data / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "one two three"}\n' * 50)[:-20])
    finished = glm46("run", "micro", "--data", str(data), "--until", "prepare_data", home=tmp_path / "home")
    expect(finished, 1, "latin.txt", "cut.jsonl.gz")


RUN_WITHOUT_THE_FLOW = """
import sys
from flows.cli import command, run_pipeline
def run(home, scale, store, *rest):
    raise ValueError(f"the flow gets {store}")
run_pipeline.run_pipeline = run
command.main()
"""


CLOSED = """
import os, sys
from flows.cli.inherited import open_closed_streams
open_closed_streams()
log = open("log", "w")
print("a message", file=sys.stderr, flush=True)
print(log.fileno(), *(os.path.realpath(f"/proc/self/fd/{number}") for number in range(3)), file=log)
"""


def test_messages_to_closed_streams_do_not_go_into_the_first_file_that_is_opened(tmp_path):
    shell = ["bash", "-c", '"$@" <&- >&- 2>&-', "bash", sys.executable, "-c", CLOSED]
    subprocess.run(shell, cwd=tmp_path, env=environment(tmp_path), check=True)
    assert (tmp_path / "log").read_text().split() == ["3", "/dev/null", "/dev/null", "/dev/null"]


def test_a_current_directory_that_was_removed_is_one_sentence(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    script = f"import os; os.rmdir({str(gone)!r}); from flows.cli.command import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", script, "plan", "micro"],
        cwd=gone,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (1, "glm46: the current directory was removed: change to another one\n")


@pytest.mark.parametrize(("utf8_mode", "exit_code"), [("0", 1), ("1", 0)])
def test_files_are_read_as_utf_8_or_not_at_all(utf8_mode, exit_code, tmp_path):
    ended = glm46("config", "micro", home=tmp_path, LC_ALL="C", PYTHONUTF8=utf8_mode)
    assert ended.exit_code == exit_code
    assert ended.stderr.endswith("their text is UTF-8: set PYTHONUTF8=1 or LC_ALL=C.UTF-8\n" if exit_code else "")


def test_a_relative_store_reaches_the_flow_by_its_whole_path(tmp_path):
    """The flow refuses a relative one: in a deployment it would be a new one in the directory of the worker."""
    words = [sys.executable, "-c", RUN_WITHOUT_THE_FLOW, "run", "micro", "--store", "a b"]
    own = environment(tmp_path / "home")
    done = subprocess.run(words, cwd=tmp_path, env=own, capture_output=True, text=True, check=False)
    assert (done.returncode, f"the flow gets {tmp_path / 'a b'}\n" in done.stderr) == (1, True), done.stderr
    assert full_pipeline.validate_parameters({"scale": "micro", "store": str(tmp_path / "a b")})
    with pytest.raises(ParameterTypeError, match="store: String should match pattern"):
        full_pipeline.validate_parameters({"scale": "micro", "store": "a b"})


@pytest.mark.parametrize("arguments", [("lineage", "model", "champion"), ("rollback", "--reason", "x"), ("chat",)])
def test_a_registry_that_is_damaged_is_one_message(arguments, home):
    (home.store_dir / "manifests").mkdir(parents=True, exist_ok=True)
    (home.mlflow_dir / "mlflow.db").write_bytes(b"no database" * 500)
    log_path = home.run_dir / "last-error.log"
    expect(glm46(*arguments, home=home.root), 1, "file is not a database", f"the traceback is in {log_path}")


def test_an_interrupted_command_promises_no_resume(home, capsys):
    """The commands that resume say so themselves."""
    with pytest.raises(typer.Exit), failures(home):
        raise KeyboardInterrupt
    assert capsys.readouterr().err == "glm46: interrupted\n"


def test_a_log_that_cannot_be_written_hides_no_error(home, capsys):
    (home.run_dir / "last-error.log").symlink_to("/dev/full")
    with pytest.raises(typer.Exit), failures(home):
        raise OSError("the disk is full")
    said = capsys.readouterr().err.splitlines()
    assert (
        said[0] == "glm46: OSError: the disk is full" and "No space left on device): make room on that disk" in said[1]
    )


def test_adopting_in_a_mistyped_home_makes_none(tmp_path):
    ended = glm46("adopt", "a", "b", "--reason", "only a comment changed", home=tmp_path / "mistyped")
    expect(ended, 2, "is no home of glm46 yet")
    assert not (tmp_path / "mistyped").exists()
