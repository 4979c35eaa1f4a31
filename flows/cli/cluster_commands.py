"""The commands `glm46 cluster`: set up what a cluster needs, and check it before a large training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli.command_errors import EXIT_FAILED, failures, usage_errors
from flows.cli.options import JSON

if TYPE_CHECKING:
    from infra.cluster.cluster_settings import ClusterSettings

cluster_app = typer.Typer(no_args_is_help=True, help="Set up and check the nodes that jobs run on.")
HOSTFILE = Annotated[
    Path | None, typer.Option(metavar="FILE", help="hosts for jobs over ssh, one per line: HOST slots=N")
]


@cluster_app.command("setup")
def cluster_setup(
    kind: Annotated[str, typer.Option("--type", help="slurm, pbs, kubernetes, or manual: jobs over ssh, or here")],
    nodes: Annotated[int, typer.Option(min=1, help="how many nodes a job takes")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=0, help="0: the nodes have none")] = 0,
    hostfile: HOSTFILE = None,
    hosts: Annotated[str, typer.Option(help="writes a hostfile, for example node[001-128]")] = "",
    partition: Annotated[str, typer.Option(help="Slurm's partition, PBS's queue, Kubernetes' namespace")] = "",
    account: Annotated[str, typer.Option(help="Slurm's or PBS's account, the queue of Kueue")] = "",
    image: Annotated[str, typer.Option(help="Kubernetes, or Slurm with pyxis: the image with the project")] = "",
    volume_claim: Annotated[str, typer.Option(help="Kubernetes: the volume that pods mount as GLM46_HOME")] = "",
    nvme_path: Annotated[str, typer.Option(help="a directory on a disk of each node")] = "",
    data: Annotated[str, typer.Option(help="a directory of documents that all nodes mount")] = "",
    network: Annotated[str, typer.Option(help="detect, infiniband, roce, tcp or multi_nic")] = "detect",
    interfaces: Annotated[str, typer.Option(help="IP interfaces, by default that of the default route")] = "",
    hcas: Annotated[str, typer.Option(help="RDMA cards, as mlx5_0 or mlx5_0:1; by default the active ones")] = "",
    added: Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="a variable of NCCL")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would be done; submits no job")] = False,
    master_addr: Annotated[str | None, typer.Option(hidden=True)] = None,
    master_port: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Set a cluster up: eight actions, each of which looks first; run it again and nothing happens."""
    with usage_errors():
        from infra.cluster.cluster_settings import make_settings
        from infra.cluster.setup_actions import NetworkChoice, Setup, set_up_cluster
        from infra.home import open_home
        from infra.machine.network import REFUSED, checked_additions

        for name, given in (("MASTER_ADDR", master_addr), ("MASTER_PORT", master_port)):
            if given is not None:
                raise ValueError(f"--{name.lower().replace('_', '-')}: {REFUSED[name]}; leave it out")
        settings = make_settings(
            kind=kind,
            num_nodes=nodes,
            gpus_per_node=gpus_per_node,
            hostfile=_absolute(hostfile),
            partition=partition,
            account=account,
            image=image,
            volume_claim=volume_claim,
            nvme_dir=nvme_path,
            data=data,
        )
        if settings.launcher == "local" and nodes > 1 and not hosts:
            raise ValueError(f"--type manual with --nodes {nodes}: name the hosts by --hostfile or --hosts")
        choice = NetworkChoice(network, _names(interfaces), _names(hcas), checked_additions(added or []))
        home = open_home()
    has_failed = False
    with failures(home):
        for action in set_up_cluster(Setup(home, settings, hosts, choice, dry_run)):
            print(f"{action.state:<10} {action.name:<18} {action.text}", flush=True)
            has_failed = has_failed or action.state == "failed"
    raise typer.Exit(EXIT_FAILED if has_failed else 0)


@cluster_app.command("check")
def cluster_check(
    as_json: JSON = False,
    hostfile: HOSTFILE = None,
    fio_seconds: Annotated[int, typer.Option(min=0, help="for each measurement of a disk; 0 measures none")] = 10,
) -> None:
    """Check the cluster of `glm46 cluster setup`, or this machine: jobs look at each node, compute, and are killed."""
    with usage_errors():
        from infra.cluster.checklist import check_cluster
        from infra.cluster.cluster_settings import make_settings, read_settings
        from infra.cluster.items import as_json as to_json
        from infra.cluster.items import has_passed
        from infra.home import open_home

        home = open_home()
        settings = read_settings(home) or make_settings(kind="manual")
        if hostfile is not None:
            settings = _with_hosts(settings, hostfile)
    with failures(home):
        items = check_cluster(home, settings, fio_seconds)
    if as_json:
        print(to_json(items))
    else:
        for item in items:
            print(f"{item.state:<8} {item.id:<15} {item.measured or '-'} ({item.threshold})")
            if item.fix:
                print(f"{'':<24} {item.fix}")
    raise typer.Exit(0 if has_passed(items) else EXIT_FAILED)


def _with_hosts(settings: ClusterSettings, hostfile: Path) -> ClusterSettings:
    """All hosts of the file, over ssh."""
    from infra.jobs.ssh_jobs import read_hostfile

    number = len(read_hostfile(hostfile))
    return settings.model_copy(update={"kind": "manual", "hostfile": _absolute(hostfile), "num_nodes": number})


def _absolute(path: Path | None) -> str:
    return "" if path is None else str(path.absolute())


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
