"""Rules and alerts: promtool tries each on both sides, and the page describes them all."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
import yaml

from infra.monitoring.dashboards import DASHBOARDS, expressions
from infra.monitoring.prometheus import RULES
from tasks.monitoring.metric_table import METRICS
from tests.conftest import ROOT

CASES = ROOT / "tests" / "monitoring" / "alerts_test.yml"
PAGE = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
GUIDE = {"TrainingStalled": ("10m", ""), "GPUMemoryExhausted": ("5m", "0.98")}
GUIDE |= {"HighGPUTemperature": ("5m", "85"), "LossSpike": ("2m", "2")}
"""Duration and threshold of the guide's alerts."""
OF_OTHERS = r"DCGM_FI_DEV_\w+|node_\w+"
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool (Debian: apt-get install prometheus)"
)


def rules(kind: str) -> dict[str, dict]:
    groups = [group for path in RULES for group in yaml.safe_load(path.read_text())["groups"]]
    return {rule[kind]: rule for group in groups for rule in group["rules"] if kind in rule}


@needs_promtool
def test_each_alert_fires_and_does_not_fire(tmp_path):
    for path in [*RULES, CASES]:
        shutil.copy(path, tmp_path)
    done = subprocess.run(["promtool", "test", "rules", CASES.name], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_has_a_case_on_both_sides():
    """Silent where nothing else is asserted: a case that is expected to fire lists all that do."""
    tried = {}
    for case in yaml.safe_load(CASES.read_text())["tests"]:
        for asked in case["alert_rule_test"]:
            series = len([one for one in case["input_series"]])
            fired = len(asked["exp_alerts"])
            tried.setdefault(asked["alertname"], set()).update(
                {side for side, holds in (("fires", fired), ("silent", fired < series)) if holds}
            )
    assert tried == {name: {"fires", "silent"} for name in rules("alert")}


def test_the_guides_alerts_have_its_durations_and_thresholds():
    for name, (duration, threshold) in GUIDE.items():
        assert rules("alert")[name]["for"] == duration
        assert f"> {threshold}" in f"{rules('alert')[name]['expr']} > "


def test_the_page_says_what_every_alert_and_metric_means():
    assert set(re.findall(r"^\| `(\w+)` \| (?:critical|warning) \|", PAGE, re.M)) == set(rules("alert"))
    assert not [name for name in METRICS if f"`{name}`" not in PAGE]
    for name, rule in rules("alert").items():
        assert f"| `{name}` | {rule['labels']['severity']} |" in PAGE, name


def test_expressions_use_only_metrics_that_exist():
    """A name is what is left of an expression without its strings, lists of labels, functions and words of PromQL."""
    known = {*METRICS, *rules("record"), "up"}
    used = [rule["expr"] for kind in ("alert", "record") for rule in rules(kind).values()]
    used += [expression for name in DASHBOARDS for expression in expressions(name)]
    for expression in used:
        plain = re.sub(r'"[^"]*"|\{[^}]*\}|\[\w+\]|\b(?:on|by) \([^)]*\)|\b[a-z_]+ ?(?=\()', "", expression)
        words = set(re.findall(r"[a-zA-Z_:][\w:]*", plain)) - {"and", "or", "unless", "max", "sum", "avg"}
        assert {word for word in words if not re.fullmatch(OF_OTHERS, word)} <= known, expression
