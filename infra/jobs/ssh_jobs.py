"""Jobs on hosts that a file lists: a supervisor per host, started over ssh, which outlives the connection and the flow.

ssh is needed to start only. Afterwards the nodes meet in the work directory (node_files.py), and what became of a job
is read there. Files of a job in work/<key>/, beside those of scheduled_jobs.py: ssh.json (which hosts, and why others
were left out), supervisor-N.log (what the supervisor of node N printed).
"""

from __future__ import annotations

import re
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from infra.code_digest import ROOT
from infra.jobs.launchers import Job, TooFewNodesError
from infra.jobs.node_files import SILENT_SECONDS, NodeFiles, changed_at, clock_of
from infra.jobs.node_supervisor import LEADER, NAME_VARIABLE
from infra.jobs.rank_processes import tail_of
from infra.jobs.scheduled_jobs import SchedulerRecord, queue_of
from infra.jobs.supervisor import JobFile, read_job_file, write_json

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=10")
SSH_SECONDS = 60
SSH_FAILED = 255
NUM_CONNECTIONS = 32
NAME_PREFIX = "ssh-"
BEGIN_SECONDS = 60.0
"""For the first node's supervisor to take the job."""
REFUSED = {
    91: f"has no {ROOT}: put the project there, as on this machine",
    92: f"has no Python at {sys.executable}: make the project's environment there, as on this machine",
    93: "does not see {work_dir}: put GLM46_HOME on a directory that this machine and all hosts mount",
    94: "may not write into {work_dir}: let its user write there",
    96: f"has other code of the project in {ROOT} than this machine: update it there",
    95: "cannot import the project or its packages: make the project's environment there, as on this machine",
}
"""Exit codes of the probe."""


@dataclass(frozen=True)
class Host:
    """A line of the hostfile."""

    name: str
    slots: int | None
    """Ranks that it can have; None for any number."""


class Ssh:
    name = "ssh"
    look_seconds = 1.0

    def find(self, job: Job, work_dir: Path) -> str | None:
        """By what its first node wrote: the flow may have died before it knew that the job had begun."""
        begun = read_job_file(work_dir)
        if begun is None or not begun.scheduler_job.startswith(NAME_PREFIX):
            return None
        record = self.look(begun.scheduler_job, work_dir)
        return begun.scheduler_job if record is not None and record.state == "running" else None

    def submit(self, job: Job, work_dir: Path) -> str:
        """Raises TooFewNodesError with a sentence per host that cannot run it, where too few can."""
        if shutil.which("ssh") is None:
            raise ValueError("no ssh on this machine: install one (Debian: apt-get install openssh-client)")
        previous = read_job_file(work_dir)
        if previous is not None and previous.scheduler_job.startswith(NAME_PREFIX):
            _end_nodes(previous, work_dir)
        name = NAME_PREFIX + secrets.token_hex(6)
        hosts = self._usable_hosts(job, work_dir, name)
        with ThreadPoolExecutor(NUM_CONNECTIONS) as connections:
            others = range(LEADER + 1, job.num_nodes)
            refused = list(connections.map(lambda node: _start(hosts[node], node, name, work_dir), others))
        # The first node comes last: where another could not be started, none gets ranks.
        refused = [why for why in refused if why] or [why for why in [_start(hosts[0], LEADER, name, work_dir)] if why]
        deadline = time.monotonic() + BEGIN_SECONDS
        while not refused and self.look(name, work_dir) is None:
            if time.monotonic() > deadline:
                log = self.log_path(name, work_dir)
                said = tail_of(log)[-1:] if log.exists() else []
                refused.append(f"the job did not begin on {hosts[LEADER]}: {''.join(said)} (see {log})")
            time.sleep(0.1)
        if refused:
            raise ValueError("; ".join(refused))
        return name

    def look(self, scheduler_job: str, work_dir: Path) -> SchedulerRecord | None:
        job = read_job_file(work_dir)
        if job is None or job.scheduler_job != scheduler_job:
            return None
        if job.exit_code is not None:
            return SchedulerRecord("ended")
        files, now = NodeFiles(work_dir, job.fencing), clock_of(work_dir)
        began_at = changed_at(work_dir / "job.json") or now
        never_began = files.heard_at(LEADER) is None and abs(now - began_at) > SILENT_SECONDS
        if never_began or files.silent_nodes([LEADER], now):
            return SchedulerRecord("taken", f"no sign of life of {files.name_of(LEADER)}")
        return SchedulerRecord("running")

    def end(self, scheduler_job: str, work_dir: Path) -> None:
        job = read_job_file(work_dir)
        if job is not None and job.scheduler_job == scheduler_job:
            NodeFiles(work_dir, job.fencing).order("KILL")

    def log_path(self, scheduler_job: str, work_dir: Path) -> Path:
        return work_dir / f"supervisor-{LEADER}.log"

    def _usable_hosts(self, job: Job, work_dir: Path, name: str) -> list[str]:
        """The first hosts of the file that can run the job; those after them are spare."""
        hostfile = Path(queue_of(job).hostfile)
        ranks_per_node = job.ranks_per_node
        hosts = [host for host in read_hostfile(hostfile) if host.slots is None or host.slots >= ranks_per_node]
        probe = work_dir / f"probe-{name}"
        probe.write_text(name)
        try:
            with ThreadPoolExecutor(NUM_CONNECTIONS) as connections:
                whys = list(connections.map(lambda host: _probe(host.name, hostfile, work_dir, name), hosts))
        finally:
            probe.unlink()
        usable = [host.name for host, why in zip(hosts, whys, strict=True) if not why]
        if len(usable) < job.num_nodes:
            raise TooFewNodesError(
                f"hostfile {hostfile} has {len(usable)} usable hosts with {ranks_per_node} slots or more, the job "
                f"needs {job.num_nodes} (num_ranks {job.num_ranks}, ranks_per_node {ranks_per_node})"
                + "".join(f"; {why}" for why in whys if why),
                len(usable),
            )
        write_json(work_dir / "ssh.json", {"hosts": usable[: job.num_nodes], "left_out": [why for why in whys if why]})
        return usable


def _end_nodes(job: JobFile, work_dir: Path) -> None:
    """Wait until no node of a start has ranks: those of one whose first node went end a moment later."""
    files = NodeFiles(work_dir, job.fencing)
    while files.live_nodes():
        files.order("KILL")
        time.sleep(0.2)


def read_hostfile(path: Path) -> list[Host]:
    """Raises ValueError naming the line where one is no host."""
    if not path.is_file():
        raise ValueError(f"resources.queue.hostfile: there is no file {str(path)!r}, name one with a host per line")
    hosts = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        if mpich := re.fullmatch(r"([^\s:]+):(\d+)", text):
            raise ValueError(
                f"hostfile {path}, line {number}: write `{mpich[1]} slots={mpich[2]}`, or `ssh://{text}` for a port"
            )
        matched = re.fullmatch(r"([^\s-]\S*)(?:\s+slots=([1-9]\d*))?(?:\s+max[_-]slots=\d+)?", text)
        if matched is None:
            raise ValueError(f"hostfile {path}, line {number}: {text!r} is not `HOST` or `HOST slots=N`")
        hosts.append(Host(matched[1], int(matched[2]) if matched[2] else None))
    names = [host.name for host in hosts]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"hostfile {path} names {', '.join(twice)} twice: give each host one line, with its slots")
    return hosts


def refusal(host: str, hostfile: Path, work_dir: Path, exit_code: int, said: str) -> str:
    """Why a host cannot run the job, in one sentence with the fix; empty where it can."""
    if exit_code == 0:
        return ""
    if exit_code in REFUSED:
        return f"host {host} {REFUSED[exit_code].format(work_dir=work_dir)}"
    last = said.strip().splitlines()[-1] if said.strip() else f"exit code {exit_code}"
    if exit_code != SSH_FAILED:
        return f"host {host} does not start the job: {last}"
    if "REMOTE HOST IDENTIFICATION HAS CHANGED" in said:
        return f"host {host} has another key than known_hosts: make sure that it is the host, then ssh-keygen -R {host}"
    if "Host key verification failed" in said:
        return f"the key of host {host} is not known here: compare and accept it once, by `ssh {host}`"
    if "Permission denied" in said:
        return f"host {host} does not let this user in ({last}): give it this user's public key (ssh-copy-id {host})"
    if "Could not resolve" in said:
        return f"host {host} has no address: correct {hostfile}"
    return f"host {host} does not answer ({last}): start it and its sshd, or take it out of {hostfile}"


def _probe(host: str, hostfile: Path, work_dir: Path, name: str) -> str:
    """Why a host cannot run the job."""
    seen = shlex.quote(str(work_dir / f"probe-{name}"))
    written = shlex.quote(str(work_dir / f"probe-{name}-{secrets.token_hex(6)}"))
    same_code = (
        f"import pathlib, infra.jobs.node_supervisor as node; "
        f"raise SystemExit(not node.has_same_code(pathlib.Path({str(work_dir)!r})))"
    )
    script = "; ".join(
        [
            f"cd {shlex.quote(str(ROOT))} 2>/dev/null || exit 91",
            f"[ -x {shlex.quote(sys.executable)} ] || exit 92",
            f'[ "$(cat {seen} 2>/dev/null)" = {name} ] || exit 93',
            f"(: > {written}) 2>/dev/null || exit 94",
            f"rm -f {written}",
            f"{shlex.quote(sys.executable)} -c 'import infra.jobs.node_supervisor' || exit 95",
            f"{shlex.quote(sys.executable)} -c {shlex.quote(same_code)} || exit 96",
        ]
    )
    answer = _ssh(host, script)
    return refusal(host, hostfile, work_dir, answer.returncode, answer.stderr)


def _start(host: str, node: int, name: str, work_dir: Path) -> str:
    """Start the supervisor of a node; why that failed, empty where it did not."""
    supervisor = [sys.executable, "-m", "infra.jobs.node_supervisor", str(work_dir), name, str(node)]
    command = shlex.join(["setsid", "env", f"{NAME_VARIABLE}={host}", *supervisor])
    log = shlex.quote(str(work_dir / f"supervisor-{node}.log"))
    answer = _ssh(host, f"cd {shlex.quote(str(ROOT))} && {{ {command} </dev/null >>{log} 2>&1 & }}")
    return refusal(host, work_dir, work_dir, answer.returncode, answer.stderr)


def _ssh(host: str, script: str) -> subprocess.CompletedProcess[str]:
    command = [*SSH, "--", host, f"exec /bin/sh -c {shlex.quote(script)}"]
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=SSH_SECONDS
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, SSH_FAILED, "", f"no answer in {SSH_SECONDS} s")
