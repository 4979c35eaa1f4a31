"""A scale for tests that kill: micro's model and data, the seven phases of tiny's course, a few steps each."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

from infra.code_digest import ROOT

BUDGETS = {
    "pretrain_general": 40960,
    "pretrain_code_reasoning": 8192,
    "mid_repo_code": 8192,
    "mid_reasoning": 8192,
    "mid_long_context": 8192,
}
LONG_CONTEXT = 512
WITHOUT_MEANING = 9.0
"""Bits per byte that a phase of four steps may lose: these gates are not what is tested."""


def write_seven_phases(path: Path) -> Path:
    """Write the scale `seven` as YAML."""
    scale = yaml.safe_load((ROOT / "configs" / "micro.yaml").read_text())
    tiny = yaml.safe_load((ROOT / "configs" / "tiny.yaml").read_text())
    names = [phase["name"] for phase in tiny["phases"]]
    general, middle, *post = scale["phases"]
    scale["scale"] = "seven"
    scale["phases"] = [
        _phase(general if phase["kind"] == general["kind"] else middle, phase["name"], BUDGETS[phase["name"]])
        for phase in tiny["phases"][: len(BUDGETS)]
    ] + [phase for phase in post if phase["name"] in names]
    scale["phases"][4]["recipe"]["sequence_length"] = LONG_CONTEXT
    first, *courses = scale["courses"]
    first["recipe"]["phases"] = list(BUDGETS)
    scale["courses"] = [first, *(course for course in courses if course["recipe"]["name"] in names)]
    assert [phase["name"] for phase in scale["phases"]] == names
    path.write_text(yaml.safe_dump(scale, sort_keys=False))
    return path


def _phase(like: dict[str, Any], name: str, num_tokens: int) -> dict[str, Any]:
    phase = copy.deepcopy(like) | {"name": name}
    phase["recipe"]["num_tokens"] = num_tokens
    gate = phase["recipe"]["gate"]
    gate["start"] |= {"bits_per_byte": WITHOUT_MEANING, "domain_bits_per_byte": WITHOUT_MEANING}
    gate["own_figure"] = "none"
    phase["resources"]["save_interval_steps"] = 2
    return phase
