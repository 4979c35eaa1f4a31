"""The network between nodes: four profiles, the variables that each gives to ranks, and the RDMA cards of this machine.

`glm46 cluster setup` writes $GLM46_HOME/cluster/network.json. Jobs on several nodes get its variables
(infra/jobs/scheduled_jobs.py); ranks of one machine stay on its loopback. Names and values are those of NCCL's user
guide (docs/userguide/source/env.rst of github.com/NVIDIA/nccl) and PyTorch's GLOO_SOCKET_IFNAME.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

import psutil

from configs.files.atomic_files import replace_durably

Profile = Literal["infiniband", "roce", "tcp", "multi_nic"]
LINK_LAYERS: dict[Profile, str] = {"infiniband": "InfiniBand", "roce": "Ethernet"}
"""Of the RDMA ports that a profile uses, as /sys/class/infiniband names them."""
RDMA = {"NCCL_IB_DISABLE": "0", "NCCL_IB_TIMEOUT": "22", "NCCL_IB_RETRY_CNT": "7"}
"""17 s per try instead of 4 s: large fabrics reroute for seconds."""
MULTI_NIC = {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"}
"""NCCL's guide names 4 for 100G networks; the product may not exceed 64."""
MAX_FAULTS = 3
"""Nodes that a refusal names."""
REFUSED = {
    "NCCL_TIMEOUT": "neither NCCL nor PyTorch reads it: the time-out is an argument of the process group",
    "NCCL_TREE_THRESHOLD": "NCCL 2.5 removed it; NCCL_ALGO names algorithms",
    "DEEPSPEED_NVME_PATH": "DeepSpeed reads no such variable; node_dir of a phase's resources is the directory",
    "TRANSFORMERS_CACHE": "transformers 5 does not read it: set HF_HOME",
    "CUDNN_BENCHMARK": "PyTorch reads no such variable; it is torch.backends.cudnn.benchmark, off for equal bits",
    "MASTER_ADDR": "ranks meet through a file in the work directory",
    "MASTER_PORT": "ranks meet through a file in the work directory",
}
"""Variables of guides that have no effect, with the reason."""
ADDED = {
    "NCCL_ALGO",
    "NCCL_CROSS_NIC",
    "NCCL_DEBUG",
    "NCCL_DEBUG_SUBSYS",
    "NCCL_IB_ADAPTIVE_ROUTING",
    "NCCL_IB_GID_INDEX",
    "NCCL_IB_PCI_RELAXED_ORDERING",
    "NCCL_IB_QPS_PER_CONNECTION",
    "NCCL_IB_RETRY_CNT",
    "NCCL_IB_SL",
    "NCCL_IB_SPLIT_DATA_ON_QPS",
    "NCCL_IB_TC",
    "NCCL_IB_TIMEOUT",
    "NCCL_NET_GDR_LEVEL",
    "NCCL_NET_PLUGIN",
    "NCCL_NSOCKS_PERTHREAD",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_PROTO",
    "NCCL_SHM_DISABLE",
    "NCCL_SOCKET_NTHREADS",
    "NCCL_TOPO_FILE",
    "PYTORCH_ALLOC_CONF",
}
"""Variables that a user may add to a profile: they depend on switches, cards and clouds, which no file here knows."""


@dataclass(frozen=True)
class RdmaPort:
    """A port of an RDMA card."""

    device: str
    port: int
    state: str
    """ACTIVE, DOWN, ... as the kernel says."""
    physical_state: str
    rate: str
    link_layer: str

    @property
    def is_active(self) -> bool:
        return self.state == "ACTIVE" and self.physical_state == "LinkUp"


@dataclass(frozen=True)
class Network:
    """What was chosen for a cluster."""

    profile: Profile
    interfaces: tuple[str, ...]
    """IP interfaces: the traffic of tcp and multi_nic, the first contact of all."""
    hcas: tuple[str, ...]
    """RDMA cards of infiniband and roce, as NCCL_IB_HCA has them: `mlx5_0`, or `mlx5_0:1` with a port."""
    added: tuple[tuple[str, str], ...]
    """Variables of the user's, which win."""

    @property
    def variables(self) -> dict[str, str]:
        """The environment of ranks on several nodes."""
        names = ",".join(self.interfaces)
        common = {"NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": f"={names}", "GLOO_SOCKET_IFNAME": names}
        if self.profile in LINK_LAYERS:
            own = {**RDMA, "NCCL_IB_HCA": "=" + ",".join(self.hcas)}
        else:
            own = {"NCCL_IB_DISABLE": "1", **(MULTI_NIC if self.profile == "multi_nic" else {})}
        return {**common, **own, **dict(self.added)}


def network_path(home_root: Path) -> Path:
    return home_root / "cluster" / "network.json"


def read_network(home_root: Path) -> Network | None:
    """What `glm46 cluster setup` wrote; None before."""
    try:
        values = json.loads(network_path(home_root).read_text())
    except FileNotFoundError:
        return None
    added = tuple((name, value) for name, value in values["added"])
    return Network(values["profile"], tuple(values["interfaces"]), tuple(values["hcas"]), added)


def write_network(home_root: Path, network: Network) -> None:
    """Replace network.json durably."""
    network_path(home_root).parent.mkdir(exist_ok=True)
    replace_durably(network_path(home_root), json.dumps(asdict(network), indent=1).encode())


def job_environment(home_root: Path) -> dict[str, str]:
    """The variables of ranks on several nodes; none where no profile was chosen."""
    network = read_network(home_root)
    return {} if network is None else network.variables


def checked_additions(texts: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """NAME=VALUE of the command line. Raises ValueError for a name that has no effect or is unknown here."""
    added = []
    for text in texts:
        name, equals, value = text.partition("=")
        if name in REFUSED:
            raise ValueError(f"--set {name}: {REFUSED[name]}")
        if not equals or not value or name not in ADDED:
            raise ValueError(f"--set {text}: write NAME=VALUE, where NAME is one of {', '.join(sorted(ADDED))}")
        added.append((name, value))
    return tuple(added)


def choose_network(
    profile: str, ports: Mapping[str, Sequence[RdmaPort]], interfaces: Sequence[str], hcas: Sequence[str]
) -> tuple[Profile, tuple[str, ...]]:
    """Profile and cards. `ports` are those of each node; profile `detect` takes the fastest kind that any node has.
    Raises ValueError naming the nodes on which a card is not active that --hcas names, or that another node has."""
    if profile not in ("detect", *get_args(Profile)):
        raise ValueError(f"--network {profile}: give one of detect, {', '.join(get_args(Profile))}")
    kinds: list[Profile] = [kind for kind in LINK_LAYERS if profile in (kind, "detect")]
    if hcas and not kinds:
        raise ValueError(f"--network {profile} uses no RDMA card: leave out --hcas {','.join(hcas)}")
    active = {kind: active_cards(ports, kind) for kind in kinds}
    named = {_device(card) for card in hcas}
    usable: list[Profile] = [kind for kind in kinds if (named.intersection(active[kind]) if hcas else active[kind])]
    if not usable and not hcas and profile not in LINK_LAYERS:
        return ("multi_nic" if profile == "multi_nic" or (profile == "detect" and len(interfaces) > 1) else "tcp"), ()
    kind = (usable or kinds)[0]
    cards = tuple(hcas) or active[kind]
    faults = card_faults(ports, kind, cards)
    if cards and not faults:
        return kind, cards
    said = f"on {len(faults)} of {len(ports)} nodes a card is not active: {'; '.join(faults[:MAX_FAULTS])}"
    raise ValueError(
        f"--network {profile}: {said if cards else f'no node has an active {LINK_LAYERS[kind]} card'}; bring the "
        f"ports up, name the cards to use by --hcas, or give --network tcp"
    )


def active_cards(ports: Mapping[str, Sequence[RdmaPort]], profile: Profile) -> tuple[str, ...]:
    """The cards that the profile can use on at least one node, in the order of their numbers."""
    names = {port.device for of in ports.values() for port in of if _is_usable(port, profile)}
    return tuple(sorted(names, key=lambda name: (len(name), name)))


def card_faults(ports: Mapping[str, Sequence[RdmaPort]], profile: Profile, cards: Sequence[str]) -> list[str]:
    """For each node on which the profile cannot use all these cards: its name, the cards and their states."""
    faults = {node: [fault for card in cards if (fault := _fault(of, profile, card))] for node, of in ports.items()}
    return [f"{node}: {', '.join(said)}" for node, said in faults.items() if said]


def _fault(ports: Sequence[RdmaPort], profile: Profile, card: str) -> str:
    """Why a node's card cannot be used; empty where it can."""
    number = card.partition(":")[2]
    seen = [port for port in ports if port.device == _device(card) and number in ("", str(port.port))]
    if any(_is_usable(port, profile) for port in seen):
        return ""
    if not seen:
        return f"there is no {card}"
    inactive = [port for port in seen if port.link_layer == LINK_LAYERS[profile]]
    if not inactive:
        return f"{card} is not {LINK_LAYERS[profile]} but {seen[0].link_layer}"
    return f"{card} is {inactive[0].state} ({inactive[0].physical_state})"


def _device(card: str) -> str:
    return card.partition(":")[0]


def _is_usable(port: RdmaPort, profile: Profile) -> bool:
    return port.is_active and port.link_layer == LINK_LAYERS[profile]


def rdma_ports(sys_root: Path = Path("/sys")) -> list[RdmaPort]:
    """Every port of every RDMA card, from the files that `ibstat` reads; it need not be installed."""
    ports = []
    for directory in sorted((sys_root / "class" / "infiniband").glob("*/ports/*")):
        read = {name: (directory / name).read_text().strip() for name in ("state", "phys_state", "rate", "link_layer")}
        state, physical = (read[name].partition(": ")[2] for name in ("state", "phys_state"))
        ports.append(
            RdmaPort(directory.parents[1].name, int(directory.name), state, physical, read["rate"], read["link_layer"])
        )
    return ports


def default_interface(proc_root: Path = Path("/proc")) -> str | None:
    """That of the default route; None on a machine without one."""
    lines = (proc_root / "net" / "route").read_text().splitlines()[1:]
    return next((fields[0] for line in lines if (fields := line.split())[1:2] == ["00000000"]), None)


def live_interfaces() -> dict[str, str]:
    """The IPv4 address of each interface that is up, loopback too."""
    states = psutil.net_if_stats()
    return {
        name: address.address
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET and name in states and states[name].isup
    }
