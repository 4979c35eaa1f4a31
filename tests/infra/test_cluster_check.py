"""`glm46 cluster check`: every item on both sides of its threshold; whole checks here, over ssh and on Slurm (long)."""

from __future__ import annotations

import json
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from infra.cluster import disk_speed, gpus, node_jobs, probe_node
from infra.cluster.checklist import (
    ORDER,
    _environment,
    _hostfile,
    _nccl,
    _nodes,
    _recovery,
    _small_job,
    look_at_cluster,
)
from infra.cluster.cluster_settings import ClusterSettings, write_settings
from infra.cluster.disk_speed import DiskSpeed
from infra.cluster.gpus import Gpu, query_gpus
from infra.cluster.items import Cluster, has_passed
from infra.cluster.node_items import ON_NODES
from infra.cluster.node_jobs import NodeJobs, failure_sentence
from infra.cluster.probe_node import NodeReport, ProbeRequest, SharedFiles
from infra.cluster.trial_job import TrialResult, expected_value
from infra.home import Home
from infra.jobs.launchers import Job, JobFailedError, JobHandle, JobStatus
from infra.machine.doctor import Check
from infra.machine.network import Network, RdmaPort, rdma_ports, write_network
from tests.support.cluster import slurm
from tests.support.cluster.ssh_hosts import missing_programs, ssh_hosts
from tests.support.pipeline import glm46

H100 = "{}, NVIDIA H100 80GB HBM3, 535.129.03, 81559, 1980, 1980, 0x{:016x}"
"""A line of nvidia-smi --format=csv,noheader,nounits."""
JUDGES = {name: judge for name, _, judge in ON_NODES}
GPU = Gpu(0, "NVIDIA H100 80GB HBM3", "535.129.03", 81559, 1980, 1980, ())
PORT = RdmaPort("mlx5_0", 1, "ACTIVE", "LinkUp", "400 Gb/sec (4X NDR)", "InfiniBand")
FILES = SharedFiles("", "", "", 1e9)
REPORT = NodeReport(
    name="node1",
    gpus=(GPU, replace(GPU, index=1)),
    gpu_problem="",
    cuda="12.1",
    nccl="2.18.3",
    rdma=(PORT,),
    interfaces={"eth0": "10.0.0.1"},
    environment=(Check("python", True, "3.11.7", ""),),
    shared=FILES,
    nvme_problem="",
    disk=DiskSpeed(7.1e9, 7.1e9),
    num_data_entries=3,
)
NETWORK = Network("infiniband", ("eth0",), ("mlx5_0",), ())
SETTINGS = ClusterSettings(kind="slurm", num_nodes=2, gpus_per_node=2, nvme_dir="/nvme", data="/data")


def cluster(second: NodeReport = REPORT, network: Network | None = NETWORK, **settings: object) -> Cluster:
    reports = (REPORT, replace(second, name="node2"))
    return Cluster(Home(Path("/home/glm46")), SETTINGS.model_copy(update=settings), network, reports, "")


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Puts a program first on the PATH."""

    def put(name: str, script: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return put


@pytest.mark.parametrize("item", JUDGES)
def test_a_cluster_in_order_passes(item):
    judged = JUDGES[item](cluster())
    assert (judged.id, judged.state, judged.fix) == (item, "passed", "")


@pytest.mark.parametrize(
    ("item", "changed", "measured"),
    [
        ("gpus", {"gpus": (GPU,)}, "node2 has 1 of 2"),
        ("gpus", {"gpus": (GPU, replace(GPU, driver="530.30.01"))}, "node2 has driver 530.30.01"),
        ("gpus", {"gpu_problem": "nvidia-smi: no driver"}, "node2: nvidia-smi: no driver"),
        (
            "gpu_clocks",
            {"gpus": (GPU, replace(GPU, index=1, slow_reasons=("power brake",)))},
            "node2 GPU 1: power brake",
        ),
        ("rdma", {"rdma": (replace(PORT, state="INIT"),)}, "node2: mlx5_0 is INIT (LinkUp)"),
        ("rdma", {"rdma": (PORT, replace(PORT, device="mlx5_1"))}, "node1: there is no mlx5_1"),
        ("nvme", {"disk": DiskSpeed(7e9, 9e9)}, "node2 writes 7.00 and reads 9.00 GB/s"),
        ("nvme", {"disk": DiskSpeed(problem="fio did not end in 100 s")}, "node2: fio did not end in 100 s"),
        ("nvme", {"nvme_problem": "node2 has no /nvme: make it"}, "node2 has no /nvme: make it"),
        ("shared_storage", {"shared": replace(FILES, lock_problem="node2 got a lock")}, "node2 got a lock"),
        ("checkpoint_dir", {"shared": replace(FILES, problem="node2 cannot write")}, "node2 cannot write"),
        ("ports", {"shared": replace(FILES, connect_problem="node2 does not reach")}, "node2 does not reach"),
        ("data", {"num_data_entries": None}, "node2 does not list /data"),
        ("data", {"num_data_entries": 4}, "nodes list 3, 4 entries"),
        ("versions", {"nccl": "2.17.1"}, "CUDA 12.1 and NCCL 2.17.1, asked for 12.1 and 2.18"),
        ("versions", {"cuda": ""}, "PyTorch is built without CUDA"),
        ("versions", {"environment": (Check("python", False, "3.12", "use 3.11"),)}, "python 3.12 (use 3.11)"),
    ],
)
def test_an_item_that_fails_names_node_and_fix(item, changed, measured):
    judged = JUDGES[item](cluster(replace(REPORT, **changed)))
    assert judged.state == "failed" and measured in judged.measured and judged.fix
    assert not has_passed([judged])


def test_what_is_not_there_is_skipped_with_the_reason():
    none = cluster(network=None, gpus_per_node=0, nvme_dir="", data="", num_nodes=1)
    reasons = {name: item for name in JUDGES if (item := JUDGES[name](none)).state == "skipped"}
    assert set(reasons) == {"gpus", "gpu_clocks", "rdma", "nvme", "shared_storage", "data", "ports"}
    assert "but nodes have 2: give --gpus-per-node 2" in reasons["gpus"].measured
    assert reasons["rdma"].measured == "ranks of one node use its loopback", "setup chooses no profile for it"
    down = replace(REPORT, rdma=(replace(PORT, state="DOWN"),))
    without = replace(cluster(network=Network("tcp", ("eth0",), (), ())), reports=(down, down))
    assert JUDGES["rdma"](without).measured == "no node has an active RDMA card"
    no_fio = cluster(replace(REPORT, disk=DiskSpeed(problem=disk_speed.NO_FIO)))
    assert (JUDGES["nvme"](no_fio).state, has_passed([JUDGES["nvme"](no_fio)])) == ("skipped", True)
    roce = cluster(network=replace(NETWORK, profile="roce"))
    assert "asked for 12.1 and 2.21" in JUDGES["versions"](roce).measured


def test_rdma_cards_that_nobody_uses_fail():
    for network in (None, Network("tcp", ("eth0",), (), ())):
        judged = JUDGES["rdma"](cluster(network=network))
        assert judged.state == "failed" and judged.measured.startswith("2 ports are active")


@pytest.mark.parametrize(("bandwidth", "state"), [(300e9, "failed"), (300.1e9, "passed")])
def test_the_sum_over_gpus_has_a_threshold(bandwidth, state):
    assert _nccl(SETTINGS, TrialResult(4, 0, 0.0, bandwidth)).state == state
    assert _nccl(SETTINGS, "it failed").state == "skipped"


def test_jobs_are_judged_by_their_sum_and_by_where_they_resumed():
    right = TrialResult(4, 4, expected_value(4), 1e9)
    assert expected_value(4) == 10 * 36
    assert [_small_job(SETTINGS, right).state, _recovery(SETTINGS, right).state] == ["passed", "passed"]
    assert "it should be 360.0" in _small_job(SETTINGS, replace(right, value=359.0)).measured
    assert "went on from step 0" in _recovery(SETTINGS, replace(right, began_at=0)).measured
    assert [_small_job(SETTINGS, "").state, _recovery(SETTINGS, "job lost").state] == ["skipped", "failed"]


def test_variables_without_effect_and_missing_interfaces_fail(monkeypatch):
    assert _environment(cluster()).state == "passed"
    assert "no network profile was chosen" in _environment(cluster(network=None)).measured
    other = cluster(replace(REPORT, interfaces={}))
    assert "node2 has no interface eth0 that is up" in _environment(other).measured
    monkeypatch.setenv("NCCL_TIMEOUT", "3600000")
    assert "NCCL_TIMEOUT is set: neither NCCL nor PyTorch reads it" in _environment(cluster()).measured


def test_a_hostfile_has_enough_hosts_with_enough_slots(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("node1 slots=2\nnode2 slots=1\n")
    settings = SETTINGS.model_copy(update={"kind": "manual", "hostfile": str(path)})
    assert "1 of 2 hosts have enough slots, 2 are needed" in _hostfile(settings).measured
    path.write_text("node1 slots=2\nnode2\n")
    assert _hostfile(settings).state == "passed"
    assert _hostfile(SETTINGS).state == "skipped"


def test_nodes_that_do_not_answer_are_one_sentence():
    assert _nodes(cluster()).measured == "node1, node2"
    assert _nodes(replace(cluster(), reports=(), unreached="host node2 does not answer")).state == "failed"


def test_a_failed_job_is_one_line_with_its_log_and_its_last_words(tmp_path):
    status = JobStatus("failed", None, 1, 0, "/log", ("Traceback", "OSError: no such card"))
    sentence = "cluster trial failed: rank 0 ended with exit code 1. Log: /log: OSError: no such card"
    assert failure_sentence(JobFailedError("cluster trial", status)) == sentence


def test_a_job_that_nobody_waits_for_does_not_stay(home, monkeypatch):
    jobs = NodeJobs(home, ClusterSettings())

    def interrupt(work_dir: Path) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(node_jobs, "read_step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        jobs.try_recovery()
    (work_dir,) = home.work_root.iterdir()
    assert jobs.launcher.poll(JobHandle(work_dir.name)).state in ("failed", "interrupted", "lost")


def test_gpus_are_read_from_nvidia_smi_also_of_old_drivers(program):
    program("nvidia-smi", f"echo '{H100.format(0, 0x4)}'; echo '{H100.format(1, 0x48)}'")
    first, second = query_gpus()
    assert first == GPU, "its power limit is no fault"
    assert second.slow_reasons == ("hardware slowdown", "hardware thermal slowdown")
    old = (
        'case "$*" in *event*) echo "Field \\"clocks_event_reasons.active\\" is not a valid field to query."; exit 2;;'
    )
    program("nvidia-smi", f"{old} *throttle*) echo '{H100.format(0, 0x1)}';; esac")
    assert query_gpus() == [GPU]
    said = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    program("nvidia-smi", f'echo "{said}"; exit 9')
    with pytest.raises(RuntimeError, match="couldn't communicate with the NVIDIA driver"):
        query_gpus()
    assert gpus.parse_gpu("0, A, 470.1, [N/A], [N/A], [N/A], [N/A]").max_clock_mhz == 0


LOST = "Unable to determine the device handle for GPU0000:5D:00.0: GPU is lost"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (f"echo '{H100.format(0, 0)}'; echo '{LOST}'; exit 15", f"nvidia-smi: {LOST}"),
        ("exit 9", "nvidia-smi: exit code 9"),
        ("exec sleep 60", "nvidia-smi did not answer in 0.2 s: look for Xid in `dmesg`"),
        ("echo '3, NVIDIA H100, [Unknown Error], 1, 1, 1, 0x0'", "a GPU: 3, NVIDIA H100, [Unknown Error], 1"),
        ("echo '3, NVIDIA H100, 535.1, [GPU is lost], 1, 1, 0x0'", "a GPU: 3, NVIDIA H100, 535.1, [GPU is lost]"),
        ("echo 'WARNING: infoROM is corrupted at gpu 3B'", "WARNING: infoROM is corrupted at gpu 3B"),
    ],
)
def test_a_sick_gpu_is_a_problem_of_its_node_in_the_words_of_nvidia_smi(tmp_path, program, monkeypatch, script, why):
    monkeypatch.setattr(gpus, "SECONDS", 0.2 if "sleep" in script else gpus.SECONDS)
    program("nvidia-smi", script)
    report = probe_node.probe_node(ProbeRequest(num_nodes=1, ranks_per_node=1), tmp_path, 0)
    assert why in report.gpu_problem and report.gpus == ()
    judged = JUDGES["gpus"](cluster(report))
    assert judged.state == "failed" and f"node2: {report.gpu_problem}" in judged.measured


def test_a_node_that_fails_is_named_and_hides_no_other(home, monkeypatch):
    """Whatever it raises. The other node's report is judged, and the logs of the job stay."""
    jobs = NodeJobs(home, ClusterSettings())

    def run(job: Job) -> None:
        for rank, name in enumerate(("node1", "node2")):
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("GLM46_NODE_NAME", name)
            looks = {"node1": lambda *given: REPORT, "node2": lambda *given: given[0].no_such_field}
            monkeypatch.setattr(probe_node, "probe_node", looks[name])
            monkeypatch.setattr(sys, "argv", ["probe_node", str(home.work_root / job.key)])
            assert probe_node.main() == 0

    monkeypatch.setattr(jobs, "_run", run)
    seen = look_at_cluster(home, ClusterSettings(num_nodes=2), jobs, 0, interfaces=())
    assert seen.reports == (REPORT,)
    assert seen.unreached.startswith("node2: AttributeError: 'ProbeRequest' object has no attribute 'no_such_field'")
    assert _nodes(seen).state == "failed"
    (work_dir,) = home.work_root.iterdir()
    assert str(work_dir) in seen.unreached


def test_rdma_ports_are_read_from_the_files_that_ibstat_reads(tmp_path):
    for device, state, physical, layer in [
        ("mlx5_0", "4: ACTIVE", "5: LinkUp", "InfiniBand"),
        ("mlx5_1", "1: DOWN", "3: Disabled", "Ethernet"),
    ]:
        directory = tmp_path / "class" / "infiniband" / device / "ports" / "1"
        directory.mkdir(parents=True)
        for name, text in [("state", state), ("phys_state", physical), ("link_layer", layer)]:
            (directory / name).write_text(f"{text}\n")
        (directory / "rate").write_text("400 Gb/sec (4X NDR)\n")
    first, second = rdma_ports(tmp_path)
    assert (first, first.is_active, second.is_active) == (PORT, True, False)
    assert rdma_ports(tmp_path / "nowhere") == []


def test_a_disk_is_measured_by_fio_which_leaves_nothing(tmp_path, program, monkeypatch):
    directory = tmp_path / "disk"
    directory.mkdir()
    answer = json.dumps({"jobs": [{"write": {"bw_bytes": 5}, "read": {"bw_bytes": 0}}]})
    assert disk_speed.parse_fio(f"fio: a warning\n{answer}", "write") == 5.0
    if shutil.which("fio") is not None:
        monkeypatch.setattr(disk_speed, "MAX_BYTES", 64 << 20)
        speed = disk_speed.measure_disk(directory, seconds=1)
        assert speed.problem or min(speed.write, speed.read) > 0
        assert not list(directory.iterdir())
    program("fio", "echo 'fio: destination does not support O_DIRECT' >&2; exit 1")
    assert "does not support O_DIRECT" in disk_speed.measure_disk(directory).problem
    for script, why in [
        ("exit 1", "fio: no reason given"),
        ("exit 0", "fio printed no measurement: "),
        ("exec sleep 100", "fio did not end in 5 s, of which 1 s were to measure"),
    ]:
        program("fio", script)
        monkeypatch.setattr(disk_speed, "PATIENCE_SECONDS", 1)
        assert disk_speed.measure_disk(directory, seconds=1).problem.startswith(why)


@pytest.mark.parametrize("route", ["lo", None])
def test_nodes_whose_own_name_is_no_address_meet_by_their_default_route(tmp_path, monkeypatch, route):
    """Debian's /etc/hosts has the name as 127.0.1.1, on which no other node is reached."""
    monkeypatch.setattr(probe_node.socket, "gethostbyname", lambda name: "127.0.1.1")
    monkeypatch.setattr(probe_node, "default_interface", lambda: route)
    request = ProbeRequest(num_nodes=2, ranks_per_node=1)
    with ThreadPoolExecutor() as threads:
        meet = partial(probe_node._meet, request, tmp_path)
        problems = [shared.connect_problem for shared in threads.map(meet, range(2))]
    assert ["has no default route" in problem for problem in problems] == [route is None] * 2, problems
    assert route is None or problems == ["", ""]
    addresses = [json.loads((tmp_path / "meeting" / f"here-{node}").read_text())[0] for node in range(2)]
    assert addresses == ["127.0.0.1" if route else ""] * 2


def checked(home: Path, *options: str) -> dict[str, dict[str, str]]:
    done = glm46("cluster", "check", "--json", "--fio-seconds", "0", *options, home=home)
    assert done.stdout, done.stderr
    printed = json.loads(done.stdout)
    assert [item["id"] for item in printed["items"]] == list(ORDER)
    assert printed["passed"] == (done.exit_code == 0)
    return {item["id"]: item for item in printed["items"]}


def test_this_machine_is_checked_by_jobs_of_its_own(tmp_path):
    items = checked(tmp_path)
    assert {name for name, item in items.items() if item["state"] == "failed"} == {"monitoring"}
    assert items["monitoring"]["fix"] == "glm46 up --monitoring"
    assert items["small_job"]["state"] == "passed"
    assert "resumed after step 4" in items["recovery"]["measured"]
    assert not list((tmp_path / "work").iterdir()), "work directories go"


def assert_two_nodes_pass(items: dict[str, dict[str, str]]) -> None:
    assert {name for name, item in items.items() if item["state"] == "failed"} == {"monitoring"}
    passed = {name for name, item in items.items() if item["state"] == "passed"}
    wanted = {"nodes", "shared_storage", "environment", "checkpoint_dir", "small_job", "recovery", "versions", "ports"}
    assert passed >= wanted
    assert items["nodes"]["measured"] == "node1, node2"
    assert items["recovery"]["measured"] == "nodes 2, resumed after step 4, sum 108"


@pytest.fixture
def two_nodes(home):
    write_network(home.root, Network("tcp", ("lo",), (), ()))
    return home.root


@pytest.mark.long
def test_two_hosts_are_checked_over_ssh_and_one_that_is_down_is_named(two_nodes, tmp_path):
    if reason := missing_programs():
        pytest.skip(reason)
    with ssh_hosts(tmp_path / "hosts") as hosts:
        assert_two_nodes_pass(checked(two_nodes, "--hostfile", str(hosts.hostfile)))
        hosts.kill_node("node2")
        items = checked(two_nodes, "--hostfile", str(hosts.hostfile))
        assert items["nodes"]["state"] == "failed" and "host node2 does not answer" in items["nodes"]["measured"]
        assert items["recovery"]["state"] == items["ports"]["state"] == "skipped"


@pytest.mark.long
def test_two_nodes_of_a_real_slurm_are_checked(two_nodes, tmp_path):
    if reason := slurm.missing_programs():
        pytest.skip(reason)
    write_settings(Home(two_nodes), ClusterSettings(kind="slurm", num_nodes=2))
    with slurm.slurm_cluster(tmp_path / "slurm"):
        assert_two_nodes_pass(checked(two_nodes))
