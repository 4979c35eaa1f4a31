"""What each step's code digest covers, written out in step_closures.txt: a diff of that file says which steps an import
re-runs.

After a change that is meant: python -m tests.house.test_closures
"""

from __future__ import annotations

import importlib
import re
import shutil

import pytest

from configs.load import load_scale
from configs.machine import with_headers
from configs.schema import Scale
from infra import code_digest, settings_code
from infra.code_digest import closure
from infra.source_files import source
from infra.step import Step
from tests.conftest import ROOT

LISTING = ROOT / "tests" / "house" / "step_closures.txt"


def steps() -> dict[str, Step]:
    """Every step of the project by name."""
    by_name = {}
    for path in sorted((ROOT / "tasks").rglob("*.py")):
        if re.search(r"^@step\(", path.read_text(encoding="utf-8"), re.M):
            module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
            by_name[path.stem] = getattr(module, path.stem)
    return by_name


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


MODEL_STEPS = {
    "quantize_checkpoint",
    "evaluate_quantized",
    "sample_solutions",
    "train_phase",
    "import_checkpoint",
    "select_evaluation_items",
    "evaluate_checkpoint",
    "decide_gate",
    "decide_suite",
    "evaluate_suite",
    "measure_importance",
    "convert_to_gguf",
    "evaluate_gguf",
    "decide_quantization",
    "decide_contamination",
    "generate_reference",
    "check_parity",
    "smoke_test",
    "write_report",
}
SUITE_STEPS = {"decide_suite", "evaluate_suite", "evaluate_quantized", "write_report"}
COMPUTED_SETTINGS = {
    "rotary_dim": MODEL_STEPS,
    "signing": {"deduplicate_documents", "collect_chats", "collect_preferences"},
    "waypoints": {"pack_phase"},
    "domains": {"pack_phase"},
    "reads_pairs": {"train_phase", "import_checkpoint", "sample_solutions", "write_report"},
    "is_scored": {"train_phase", "import_checkpoint", "sample_solutions", "write_report"},
    "critic_recipe": {"train_phase", "import_checkpoint", "sample_solutions", "write_report"},
    **{name: SUITE_STEPS for name in ("file_names", "benchmark_by_file", "own_files", "hub_files")},
    "num_special_tokens": {"train_tokenizer", "import_tokenizer", "write_report"},
}
"""Properties of settings that decide content, and the steps that are given them; the other properties make values,
which are hashed."""


def digests() -> dict[str, str]:
    """Of every step; the settings are read again, modules and headers are not."""
    settings_code.definitions.cache_clear()
    source.cache_clear()
    return {name: code_digest.code_digest((step.function.__module__, *step.roots)) for name, step in steps().items()}


def changed_steps(before: dict[str, str]) -> set[str]:
    return {name for name, digest in digests().items() if digest != before[name]}


@pytest.fixture(scope="module")
def before() -> dict[str, str]:
    """Digests of the steps as they are."""
    return digests()


@pytest.fixture
def headers_read_again(before):
    """Before and after a test that changes one."""
    code_digest._code.cache_clear()
    yield
    code_digest._code.cache_clear()


def test_a_change_to_a_computed_setting_re_runs_exactly_the_steps_that_are_given_it(before, tmp_path, monkeypatch):
    schema, changed = tmp_path / "configs" / "schema", []
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    monkeypatch.setattr(settings_code, "ROOT", tmp_path)
    texts = {path: path.read_text() for path in sorted(schema.glob("*.py"))}
    for path, text in texts.items():
        for name, body in re.findall(r"@property\n    def (\w+)\(self\)[\s\S]*?\n        (return .*)", text):
            path.write_text(text.replace(body, f"assert self\n        {body}"))
            changed.append((name, changed_steps(before)))
        path.write_text(text)
    assert {name: steps for name, steps in changed if steps} == COMPUTED_SETTINGS
    assert len(changed) == sum(text.count("@property") for text in texts.values())
    new_setting = texts[schema / "model.py"].replace(
        "class ModelRecipe(Frozen):", "class ModelRecipe(Frozen):\n    new: int"
    )
    assert new_setting != texts[schema / "model.py"]
    (schema / "model.py").write_text(new_setting)
    assert not changed_steps(before), "a new setting re-runs the steps that are given it by its value"
    monkeypatch.undo()
    assert digests() == before


@pytest.mark.parametrize(
    "header", sorted((ROOT / "model").rglob("*.h")) + sorted((ROOT / "tasks").rglob("*.h")), ids=lambda path: path.name
)
@pytest.mark.usefixtures("headers_read_again")
def test_a_change_to_a_header_re_runs_exactly_the_steps_whose_kernels_include_it(header, before, tmp_path, monkeypatch):
    (tmp_path / header.name).write_text(header.read_text() + "// changed\n")
    monkeypatch.setattr(
        code_digest,
        "with_headers",
        lambda source: [tmp_path / header.name if path == header else path for path in with_headers(source)],
    )
    kernels = (
        {"model.kernels.attention_kernel", "model.kernels.elementwise_kernels"}
        if "model" in header.parts[-3:]
        else {"tasks.data.tokenizer.bpe_merges"}
    )
    expected = {
        name for name, step in steps().items() if kernels & set(closure((step.function.__module__, *step.roots)))
    }
    assert changed_steps(before) == expected and ("train_phase" in expected) is not ("train_tokenizer" in expected)


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
        "node_dir": "/elsewhere",
        "recompute": "full",
        "profile": {"steps": 2, "flops": True, "trace": True},
        "tensorboard": False,
        "wandb": "offline",
    }
    fields = [
        (path, name, others.get(name, _another(value))) for path, part in sections for name, value in part.items()
    ]
    return [(path, name, value) for path, name, value in fields if value is not None]


def _another(value: object) -> object:
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else None


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
