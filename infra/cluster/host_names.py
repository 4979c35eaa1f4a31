"""Names of hosts: written short, or known to a scheduler."""

from __future__ import annotations

import itertools
import math
import re

from infra.jobs.scheduled_jobs import ask, last_line

MAX_HOSTS = 100_000


def expand_hosts(text: str) -> list[str]:
    """`rack[1-2]node[001-003,7],login` as names; numbers keep their width. Raises ValueError for what is no name."""
    names: list[str] = []
    for part in re.split(r",(?![^\[]*\])", text):
        words = re.split(r"\[([\d,-]+)\]", part.strip())  # names and ranges in turn, as the group is kept
        if any(not re.fullmatch(r"[\w.@-]*", word) for word in words[::2]):
            raise ValueError(f"--hosts {text}: {part.strip()!r} is no name; write for example node[001-128],login")
        choices = [_numbers(word, text) if place % 2 else [word] for place, word in enumerate(words)]
        if math.prod(map(len, choices)) > MAX_HOSTS:
            raise ValueError(f"--hosts {text}: {part.strip()} are more than {MAX_HOSTS} hosts")
        names += filter(None, map("".join, itertools.product(*choices)))
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
