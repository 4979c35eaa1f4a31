"""Controls of benchmarks.phases: only what a phase reads differs, and figures are compared item by item."""

from __future__ import annotations

import pytest

from benchmarks.phases import READING, beyond_control, control_of, write_scale
from configs.load import load_scale
from infra.home import Home
from infra.step import Output, Record, step
from infra.storage.open_store import open_store
from tasks.evaluation.items import write_items
from tests.support.evaluation_fakes import commit
from tests.support.gate_items import items_of, mixed

CONTROLLED = ("pretrain_code_reasoning", "mid_repo_code", "mid_reasoning", "mid_long_context", "sft")


class Items(Record):
    num_items: int


def test_a_control_reads_what_the_phase_before_read_and_trains_as_the_phase_does(tmp_path):
    scale = load_scale("tiny")
    assert tuple(phase.name for phase in scale.phases if control_of("tiny", phase.name)) == CONTROLLED
    for name in CONTROLLED:
        write_scale(tmp_path / "control.yaml", "tiny", 47, controlled=name)
        for phase, control in zip(scale.phases, load_scale(str(tmp_path / "control.yaml")).phases, strict=True):
            differs = {
                key
                for key in type(phase.recipe).model_fields
                if getattr(phase.recipe, key) != getattr(control.recipe, key)
            }
            assert control.recipe.seed == 47 and (differs - {"seed"} <= {*READING}), (name, differs)
            assert bool(differs - {"seed"}) == (phase.name == name)
            if phase.name == name == "sft":
                assert differs == {"seed", "mixture"} and "chat" not in control.recipe.mixture
            elif phase.name == name:
                before = scale.start_of(phase)
                assert before is not None
                assert all(getattr(control.recipe, key) == getattr(before.recipe, key) for key in READING)


@pytest.mark.parametrize(("code", "is_its_own"), [(0.9, True), (1.0, False)])
def test_a_phase_is_compared_with_its_control_in_its_own_figure(tmp_path, code, is_its_own):
    store = open_store(None, Home(tmp_path))

    def evaluation(bits):
        items = items_of(documents=mixed(code=(30, bits), web=(30, 2.0 - bits)))

        @step(content=("items.parquet",))
        def evaluate_checkpoint(*, output: Output) -> Items:
            write_items(output.path("items.parquet"), items)
            return Items(num_items=len(items))

        return commit(store, evaluate_checkpoint, repr(items))

    row = beyond_control("bits_per_byte of domain code", evaluation(code), evaluation(1.0))
    assert row["beyond_control"] == pytest.approx(code - 1.0) and row["is_its_own"] is is_its_own
