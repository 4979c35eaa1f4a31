"""Names of hosts: written short, or known to a scheduler."""

from __future__ import annotations

import re

from infra.jobs.scheduled_jobs import ask, last_line

MAX_HOSTS = 100_000


def expand_hosts(text: str) -> list[str]:
    """`node[001-003,7],login` as names; numbers keep their width. Raises ValueError where it cannot be read."""
    names: list[str] = []
    for part in re.findall(r"[^,\[\]]+(?:\[[^\]]*\][^,\[\]]*)?|\S", text):
        matched = re.fullmatch(r"([\w.@-]*)(?:\[([\d,-]+)\]([\w.-]*))?", part.strip())
        if part == ",":
            continue
        if matched is None or not (matched[1] or matched[2]):
            raise ValueError(f"--hosts {text}: {part.strip()!r} is no name; write for example node[001-128],login")
        if matched[2] is None:
            names.append(matched[1])
        else:
            names += [f"{matched[1]}{number}{matched[3]}" for number in _numbers(matched[2], text)]
    return names


def _numbers(text: str, whole: str) -> list[str]:
    numbers = []
    for piece in text.split(","):
        first, _, last = piece.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal() or int(last or first) < int(first):
            raise ValueError(f"--hosts {whole}: {piece!r} is no range; write for example [001-128]")
        if int(last or first) - int(first) >= MAX_HOSTS:
            raise ValueError(f"--hosts {whole}: {piece} are more than {MAX_HOSTS} hosts")
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1)]
    return numbers


def hosts_of_slurm(partition: str) -> list[str]:
    """Every node of the partition, or of all. Raises ValueError with Slurm's words."""
    answer = ask("sinfo", "--noheader", "--Node", "--format=%N", *(["--partition", partition] if partition else []))
    if answer.returncode:
        raise ValueError(f"Slurm does not name its nodes ({last_line(answer.stderr)}): name them by --hosts")
    return sorted(set(answer.stdout.split()))
