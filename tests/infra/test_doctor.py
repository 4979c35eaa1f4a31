"""`glm46 doctor`: what is missing on a machine is named with the fix, in words and as JSON."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from configs import machine
from configs.load import load_scale
from flows.stages import launchers_of
from infra.child_process import free_port
from infra.home import Home, known_home, named_home, open_home
from infra.machine import doctor
from infra.servers.recorded_servers import ServerUrls, ended_servers, record
from tests.support.pipeline import glm46


def named(checks, name):
    return next(check for check in checks if check.name == name)


def test_words_and_json_agree(tmp_path):
    words, as_json = (glm46("doctor", *options, home=tmp_path) for options in ((), ("--json",)))
    printed = json.loads(as_json.stdout)
    assert printed["passed"] == (as_json.exit_code == 0) == (words.exit_code == 0)
    expected = {"python", "packages", "java", "compiler", "memory", "disk", "store", "native code"}
    assert {check["name"] for check in printed["checks"]} >= expected
    assert [line[9:].split("  ")[0].strip() for line in words.stdout.splitlines()] == [
        check["name"] for check in printed["checks"]
    ]


def test_a_package_of_another_version_is_named(home, monkeypatch):
    assert named(doctor.check_machine(home), "packages").passed
    monkeypatch.setattr(doctor, "version", lambda name: "0.0.1")
    check = named(doctor.check_machine(home), "packages")
    assert not check.passed and "prefect 0.0.1, asked for ==" in check.found and "constraints.txt" in check.fix


@pytest.mark.parametrize(
    ("home_of_process", "found", "fix"),
    [
        ("another", "the process of prefect and mlflow has ended", "glm46 up"),
        ("", "prefect and mlflow: the process lives, but did not answer at once", "wait, else glm46 down and glm46 up"),
    ],
)
def test_recorded_servers_that_do_not_answer_are_dead_only_without_a_process(home_of_process, found, fix, home):
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    environment = {"GLM46_HOME": home_of_process or str(home.root)}
    with subprocess.Popen(["sleep", "60"], env={**os.environ, **environment}) as process:
        record(home, ServerUrls(prefect=urls[0], mlflow=urls[1], pids={"prefect": process.pid, "mlflow": process.pid}))
        check = named(doctor.check_machine(home), "servers")
        process.kill()
    assert (check.passed, check.found, check.fix) == (False, found, fix)


def test_servers_of_a_home_are_known_by_every_name_of_it(home, tmp_path):
    """Else a run that names the home through a link would use its databases beside the servers of `glm46 up`."""
    link = tmp_path / "link"
    link.symlink_to(home.root)
    linked = Home(link)
    with subprocess.Popen(["sleep", "60"], env={**os.environ, "GLM46_HOME": str(home.root)}) as process:
        urls = ServerUrls(prefect="", mlflow="", pids={"prefect": process.pid, "mlflow": process.pid})
        while ended_servers(home, urls):  # Popen returns before /proc shows the environment
            time.sleep(0.001)
        assert ended_servers(linked, urls) == []
        assert ended_servers(Home(tmp_path), urls) == ["prefect", "mlflow"]
        process.kill()
    assert not linked.is_at("") and not linked.is_at("absent") and not linked.is_at(str(tmp_path / "absent"))


def test_a_port_of_up_that_is_taken_is_said(home, monkeypatch):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        monkeypatch.setattr(doctor, "PORTS", {"prefect": port})
        assert "--prefect-port" in named(doctor.check_machine(home), f"port {port}").fix
    monkeypatch.setattr(doctor, "PORTS", {"prefect": free_port()})
    assert not doctor.check_machine(home)[-1].fix


@pytest.mark.parametrize(("commands", "passed"), [(("sbatch", "scontrol", "scancel"), True), (("sbatch",), False)])
def test_scheduler_commands_are_asked_for_only_by_scales_that_submit(commands, passed, tmp_path, monkeypatch):
    for command in commands:
        (tmp_path / command).write_text("#!/bin/sh\n")
        (tmp_path / command).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.check_launchers(["local"]) == []
    assert [(check.name, check.passed) for check in doctor.check_launchers(["slurm", "slurm", "local"])] == [
        ("slurm", passed)
    ]


def test_evaluation_and_release_ask_for_their_launchers_too():
    scale = load_scale("micro")
    evaluation = scale.evaluation.resources.model_copy(update={"launcher": "pbs"})
    evaluated = scale.model_copy(update={"evaluation": scale.evaluation.model_copy(update={"resources": evaluation})})
    assert launchers_of(scale, scale.phases, releases=True) == {"local"}
    assert launchers_of(evaluated, evaluated.phases, releases=False) == {"local", "pbs"}
    assert launchers_of(evaluated, (), releases=False) == set(), "data alone starts no job"


def test_code_compiled_for_another_machine_is_named_with_both(tmp_path, monkeypatch):
    here = machine.this_machine()
    there = machine.Machine("Other CPU", "sse2 avx2")
    assert there.native_dir != here.native_dir, "its instructions may be illegal here"
    assert machine.Machine("Other name", here.features).native_dir == here.native_dir
    monkeypatch.setattr(machine, "NATIVE_ROOT", tmp_path)
    monkeypatch.setattr(machine, "this_machine", lambda: there)
    (machine.make_native_dir() / "decoding_kernel-0.so").touch()
    monkeypatch.setattr(machine, "this_machine", lambda: here)
    check = doctor.check_native_code([here.native_dir / "decoding_kernel-0.so"])
    assert check.found == f"decoding_kernel: not compiled for this machine ({here}), only for {there}"
    assert "model.kernels.native_library" in check.fix
    (machine.make_native_dir() / "decoding_kernel-0.so").touch()
    assert not doctor.check_native_code([here.native_dir / "decoding_kernel-0.so"]).fix


def test_an_empty_directory_can_be_checked_before_a_run_has_made_a_store_of_it(home, tmp_path):
    (tmp_path / "new").mkdir()
    assert all(check.passed for check in doctor.check_named_store(str(tmp_path / "new"), home, deep=False))
    (missing,) = doctor.check_named_store(str(tmp_path / "typo"), home, deep=False)
    assert not missing.passed and not (tmp_path / "typo").exists()


def test_a_store_of_another_user_is_one_check_of_several(home, monkeypatch):
    """Before, its error was all that doctor printed."""
    refused = PermissionError(errno.EACCES, "Permission denied", "/team/store/manifests")
    monkeypatch.setattr(Path, "is_dir", Mock(side_effect=refused))
    (check,) = doctor.check_named_store("/team/store", home, deep=False)
    assert (check.passed, check.found) == (False, "cannot be used") and "/team/store/manifests" in check.fix


@pytest.mark.parametrize("opening", [known_home, open_home])
def test_a_directory_with_other_things_in_it_is_no_home_and_keeps_its_mode(opening, tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    (tmp_path / "colleagues_file").touch()
    tmp_path.chmod(0o775)
    monkeypatch.setenv("GLM46_HOME", str(tmp_path))
    with pytest.raises(ValueError, match=rf"GLM46_HOME {tmp_path} is not empty and no home of glm46: name a new direc"):
        opening()
    assert tmp_path.stat().st_mode & 0o777 == 0o775
    assert {path.name for path in tmp_path.iterdir()} == {"work", "colleagues_file"}


def test_a_new_directory_a_volume_and_a_home_with_the_users_files_are_homes(tmp_path, monkeypatch):
    monkeypatch.setenv("GLM46_HOME", str(tmp_path))
    (tmp_path / "lost+found").mkdir()
    home = open_home()
    (tmp_path / "blocked_documents.txt").touch()
    assert open_home() == known_home() == home and tmp_path.stat().st_mode & 0o777 == 0o700


def test_an_empty_variable_is_an_unset_one_and_a_tilde_is_expanded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    for value, root in (("", ".glm46"), ("~/runs", "me/runs")):
        monkeypatch.setenv("GLM46_HOME", value)
        assert named_home().root == tmp_path / root
