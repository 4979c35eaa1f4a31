"""What each step's code digest covers, written out in step_closures.txt: a diff of that file says which steps an import re-runs.

After a change that is meant: python -m tests.house.test_closures
"""

from __future__ import annotations

import importlib
import re

import pytest

from configs.load import load_scale
from configs.schema import Scale
from infra.code_digest import closure
from infra.step import Step
from tests.conftest import ROOT

LISTING = ROOT / "tests" / "house" / "step_closures.txt"


def steps() -> dict[str, Step]:
    """Every step of the project by name."""
    found = {}
    for path in sorted((ROOT / "tasks").rglob("*.py")):
        if re.search(r"^@step\(", path.read_text(encoding="utf-8"), re.M):
            module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
            found[path.stem] = getattr(module, path.stem)
    return found


def listing() -> str:
    """The closures of all steps as text."""
    return "\n".join(
        "\n".join([name, *(f"  {module}" for module in closure((step.function.__module__, *step.roots)))]) + "\n"
        for name, step in steps().items()
    )


def test_each_steps_closure_is_the_listed_one():
    assert listing() == LISTING.read_text(), "if the change is meant: python -m tests.house.test_closures"


def test_closures_hold_what_decides_results_and_nothing_of_infra_or_configs():
    for name, step in steps().items():
        modules = closure((step.function.__module__, *step.roots))
        assert not [module for module in modules if module.split(".")[0] in ("infra", "configs", "flows")], name
    assert {"tasks.training.worker", "model.architecture.transformer", "model.optimizer.optimizer"} <= set(
        closure(("tasks.training.train_phase", "tasks.training.worker"))
    )
    assert "tasks.data.filtering.heuristics" not in closure(("tasks.data.sources.ingest_documents",))


def resource_fields() -> list[tuple[tuple[str | int, ...], str, object]]:
    """(path of a resources section, field, another value) for every resources field of micro."""
    tree = load_scale("micro").model_dump(mode="json")
    sections = [(("data",), tree["data"]["resources"]), (("evaluation",), tree["evaluation"]["resources"])]
    sections += [(("phases", 0), tree["phases"][0]["resources"]), (("serving",), tree["serving"]["resources"])]
    others = {
        "master": "spark://host:7077",
        "driver_memory": "3g",
        "executor_memory": "3g",
        "host": "localhost",
        "launcher": "slurm",
        "zero_stage": 1,
        "offload_optimizer": "cpu",
        "offload_parameters": "cpu",
        "nvme_dir": "/elsewhere",
        "recompute": "full",
        "profile": {"steps": 2, "flops": True, "trace": True},
        "tensorboard": False,
        "wandb": "offline",
    }
    found = [
        (path, name, others.get(name, value + 1 if isinstance(value, int | float) else None))
        for path, part in sections
        for name, value in part.items()
    ]
    return [(path, name, value) for path, name, value in found if value is not None]


@pytest.mark.parametrize(("path", "name", "value"), resource_fields(), ids=lambda item: str(item))
def test_no_resources_field_enters_a_recipe(path, name, value):
    tree = load_scale("micro").model_dump(mode="json")
    section = tree
    for part in path:
        section = section[part]
    section["resources"][name] = value
    changed, plain = Scale.model_validate(tree), load_scale("micro")
    assert changed != plain
    for recipes in (
        lambda scale: scale.data.recipe,
        lambda scale: scale.training_recipe(scale.phases[0]),
        lambda scale: scale.phases[0].recipe.packing,
        lambda scale: (scale.evaluation.recipe, scale.release.recipe, scale.model.recipe),
    ):
        assert recipes(changed) == recipes(plain)


if __name__ == "__main__":
    LISTING.write_text(listing())
