"""Says what Slurm's words about a job mean, and the fix: why it refuses or never starts one, why one waits, which node
was lost. It asks Slurm for what it allows (`scontrol show partition`, `sacctmgr`) and for its nodes (`sinfo`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from getpass import getuser

from infra.jobs.scheduled_jobs import CHANGE_RESOURCES, ask

UNUSABLE = re.compile(r"down|drain|fail|error|unknown|maint|reboot|power|.*\*$")
"""States of nodes, as `sinfo` prints them, that take no job; a `*` is a node that does not answer."""
MAX_NAMED_NODES = 4
"""Of the nodes that cannot be used."""
SIGNS_IN_LOG = {
    re.compile(
        r"oom-kill event"
    ): "memory ran out: a rank needs less with a lower micro_batch_sequences or more recompute",
    re.compile(r"Node failure on (\S+)"): "its node failed: {0}",
    re.compile(r"Task launch for \S+ failed on node (\S+): (.+)"): "{0} did not start it ({1})",
}
"""What `srun` prints of a job that was taken from its nodes, although the state of the job is FAILED."""


@dataclass(frozen=True)
class Request:
    """What a job asks of Slurm; a partition or an account that is empty is Slurm's default."""

    partition: str
    account: str
    time_limit: str
    """As it was asked for, or as Slurm shows it."""
    num_nodes: str


def request_of(values: dict[str, str]) -> Request:
    """Of the values that `scontrol show job` prints."""
    account = values.get("Account", "").replace("(null)", "")
    num_nodes = values.get("NumNodes", "").partition("-")[0]
    return Request(values.get("Partition", ""), account, values.get("TimeLimit", ""), num_nodes)


def fix_of(words: str, request: Request) -> str:
    """What to change so that Slurm takes a job that it refuses, or that waits for ever for this reason."""
    for pattern, fix in FIXES.items():
        if re.search(pattern, words):
            return fix(request)
    return CHANGE_RESOURCES


def _another_partition(request: Request) -> str:
    up = [name for name, values in _partitions().items() if values.get("State") == "UP"]
    return f"set queue.partition to one of {', '.join(up)}" if up else "ask its administrator, as no partition is up"


def _another_account(request: Request) -> str:
    allowed = _partition(request).get("AllowAccounts", "ALL")
    if allowed == "ALL":
        own = ("where", f"user={getuser()}", "format=account")
        shown = ask("sacctmgr", "--noheader", "--parsable2", "show", "associations", *own)
        allowed = ", ".join(sorted(set(shown.stdout.split()))) if shown.returncode == 0 else ""
    return f"set queue.account to one of {allowed}" if allowed else "set queue.account to one that this user has"


def _less_time(request: Request) -> str:
    most = _partition(request).get("MaxTime", "less")
    return f"time_limit_minutes asks for {_duration(request.time_limit)}, its partition allows {most}: lower it"


def _fewer_nodes(request: Request) -> str:
    partition = _partition(request)
    has, allows = partition.get("TotalNodes", "fewer"), partition.get("MaxNodes", "fewer")
    return (
        f"the job asks for {request.num_nodes} nodes, its partition has {has} and allows {allows} for a job: lower "
        f"num_ranks or raise ranks_per_node"
    )


def _fewer_gpus(request: Request) -> str:
    return "no node has so many GPUs as ranks_per_node asks for: lower it, or set device to cpu"


def _another_qos(request: Request) -> str:
    return "set SBATCH_QOS in the shell of the run to one that allows it (`sacctmgr show qos`)"


def _another_machine(request: Request) -> str:
    return "run on a machine where Slurm answers, for example a login node"


FIXES: dict[str, Callable[[Request], str]] = {
    "[Ii]nvalid partition|partition not available|PartitionDown|PartitionInactive": _another_partition,
    "[Ii]nvalid account|account.not.|AccountNotAllowed|InvalidAccount": _another_account,
    "time limit is invalid|PartitionTimeLimit|WallDuration": _less_time,
    "Node count specification|PartitionNodeLimit": _fewer_nodes,
    "generic resource": _fewer_gpus,
    "[Ii]nvalid ?(qos|QOS)|QOSNotAllowed|QOSMinGRES|QOS_not": _another_qos,
    "configuration source": _another_machine,
}
"""By Slurm's words, at the end of `sbatch` or as the reason of a job that waits."""


def reason_of_waiting(words: str, job: str, values: dict[str, str]) -> str:
    """Why a job waits, in words; with the nodes that cannot be used where it waits for those. Empty where Slurm has not
    looked yet."""
    if re.match("Nodes_required|ReqNodeNotAvail|PartitionConfig", words):
        unusable = unusable_nodes("--partition", values.get("Partition", ""))
        if unusable:
            return f"{unusable}; once mended, `scontrol update nodename=NODE state=resume`"
    if words.startswith("JobHeld"):
        return f"{words}: `scontrol release {job}` lets it go"
    if words == "BeginTime":
        restarted = "it was requeued" if values.get("Restarts", "0") != "0" else words
        return f"{restarted}; it begins at {values.get('StartTime', 'a later time')}"
    if words in ("PartitionDown", "PartitionInactive"):
        return f"{words}: partition {values.get('Partition', '')} starts no jobs until its administrator lets it"
    return words.replace("_", " ") if words != "None" else ""


def reason_in_log(lines: list[str]) -> str:
    """How a job was taken from its nodes, by the last lines of what it printed; empty where nothing says so."""
    for sign, reason in SIGNS_IN_LOG.items():
        for line in lines:
            if seen := sign.search(line):
                return reason.format(*seen.groups())
    return ""


def unusable_nodes(*which: str) -> str:
    """The nodes that take no job, with state and reason; empty where all do, or Slurm does not answer. which: the
    options by which `sinfo` chooses."""
    shown = ask("sinfo", "--noheader", "--Node", "--format=%N|%T|%E", *which)
    lines = sorted(set(shown.stdout.splitlines()))
    nodes = [
        (name, state, reason) for name, state, reason in (line.split("|", 2) for line in lines if line.count("|") > 1)
    ]
    unusable = [_described(*node) for node in nodes if UNUSABLE.match(node[1])]
    more = len(unusable) - MAX_NAMED_NODES
    return ", ".join(unusable[:MAX_NAMED_NODES]) + (f" and {more} more" if more > 0 else "")


def _described(name: str, state: str, reason: str) -> str:
    why = f" ({reason})" if reason not in ("none", "") else ""
    return f"{name} is {state.rstrip('*')}{' and does not answer' if state.endswith('*') else ''}{why}"


def _partitions() -> dict[str, dict[str, str]]:
    shown = ask("scontrol", "show", "partition", "--oneliner").stdout
    each = (dict(re.findall(r"(\w+)=(\S*)", line)) for line in shown.splitlines())
    return {values["PartitionName"]: values for values in each if "PartitionName" in values}


def _partition(request: Request) -> dict[str, str]:
    """The values of the partition that a job asks for; none where Slurm has no such one."""
    known = _partitions()
    default = next((name for name, values in known.items() if values.get("Default") == "YES"), "")
    return known.get(request.partition or default, {})


def _duration(asked: str) -> str:
    return f"{asked} minutes" if asked.isdecimal() else asked
