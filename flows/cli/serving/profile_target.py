"""Profiles a server, or a registered version that is served here, for `glm46 profile`."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from configs.load import load_scale
from flows.cli.serving.serve_model import find_version, served_model
from infra.home import Home
from infra.serving.model_client import ModelClient
from infra.serving.model_server import Access
from infra.storage.open_store import open_known_store
from model.formats.hf_checkpoint import read_config
from tasks.release.server_profile import (
    LLAMA_SERVER,
    Drafts,
    ServerProfile,
    compare_drafts,
    measure_levels,
    measure_own_drafts,
    served_answers,
)
from tasks.report.profile_page import profile_page
from tasks.training.state.trained_checkpoint import TrainedCheckpoint

TIMEOUT_SECONDS = 600.0
NO_MEMORY = (
    "memory of the server: its process is on another machine or is another user's, and is not seen from here: run the "
    "profile there"
)
NO_DRAFTS = (
    "drafts: a running server cannot be told to draft or not: start it once with and once without, and compare the "
    "tokens/s of two profiles"
)
JSON_FILE, PAGE_FILE = "profile.json", "profile.html"


def parse_levels(text: str) -> tuple[int, ...]:
    """Raises ValueError for what are no rising positive numbers."""
    parts = text.split(",")
    levels = tuple(int(part) for part in parts if part.strip().isdecimal())
    if len(levels) != len(parts) or sorted(set(levels)) != list(levels) or levels[0] < 1:
        raise ValueError(f"--concurrency {text}: write rising numbers of requests, as 1,2,4,8")
    return levels


def profile_target(
    target: str,
    home: Home,
    scale: str,
    store: str | None,
    levels: tuple[int, ...],
    num_tokens: int,
    model: str,
    key_variable: str,
    output: Path,
) -> ServerProfile:
    """Write both files; none where a request fails."""
    if target.startswith(("http://", "https://")):
        client = ModelClient(target, key_variable, TIMEOUT_SECONDS, model)
        measured = measure_levels(client, levels, num_tokens)
        memory = memory_behind(target)
        unseen = [] if memory is not None else [NO_MEMORY]
        profile = ServerProfile(
            target=target, levels=measured, memory_bytes=memory, drafts=(), not_measured="; ".join([*unseen, NO_DRAFTS])
        )
    else:
        configuration, opened = load_scale(scale), open_known_store(store, home)
        version = find_version(home, configuration, target)
        checkpoint_dir = opened.load(version.key, TrainedCheckpoint).directory("hf")
        has_drafts = read_config(checkpoint_dir).num_nextn_predict_layers > 0
        with served_model(home, configuration, version, opened, port=None) as served:
            client = ModelClient(served.url, "", TIMEOUT_SECONDS, "")
            measured = measure_levels(client, levels, num_tokens)
            memory = psutil.Process(served.server.process.pid).memory_info().rss
            plain = served_answers(served.url, checkpoint_dir, num_tokens)
        drafts: tuple[Drafts, ...] = ()
        if has_drafts:
            with served_model(home, configuration, version, opened, None, Access(is_drafting=True)) as drafting:
                drafted = served_answers(drafting.url, checkpoint_dir, num_tokens)
            drafts = (compare_drafts(LLAMA_SERVER, plain, drafted), measure_own_drafts(checkpoint_dir, num_tokens))
        profile = ServerProfile(
            target=served.name,
            levels=measured,
            memory_bytes=memory,
            drafts=drafts,
            not_measured="" if has_drafts else "drafts: the model has no MTP layer",
        )
    _write(profile, output)
    return profile


def memory_behind(url: str) -> int | None:
    """Resident memory of the process that listens at the URL's port, with its children; None where that is not seen: on
    another machine, or as another user."""
    address = urlsplit(url)
    port = address.port or {"http": 80, "https": 443}[address.scheme]
    own = {each.address for addresses in psutil.net_if_addrs().values() for each in addresses}
    found = {str(info[4][0]) for info in socket.getaddrinfo(address.hostname, port)}
    if not found & own:
        return None
    listening = [each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    process_ids = {each.pid for each in listening if each.laddr[1:] == (port,) and each.pid is not None}
    if not process_ids:
        return None
    processes = [psutil.Process(pid) for pid in process_ids]
    every = {each.pid: each for process in processes for each in (process, *process.children(recursive=True))}
    return sum(each.memory_info().rss for each in every.values())


def _write(profile: ServerProfile, output: Path) -> None:
    temporary = output.with_name(f".{output.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        (temporary / JSON_FILE).write_text(profile.model_dump_json(indent=1) + "\n")
        (temporary / PAGE_FILE).write_text(profile_page(profile), encoding="utf-8")
        temporary.rename(output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
