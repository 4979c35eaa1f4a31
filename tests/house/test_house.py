"""Guards of the house: import direction, light workers, one name per file, YAMLs with the same keys, commands that
exist."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from pathlib import Path

import pytest
import yaml

from configs.load import load_scale, scale_names
from tasks.data.sources.list_sources import list_sources
from tests.conftest import ROOT

PACKAGES = ("configs", "data_contracts", "infra", "model", "tasks", "flows")
ROOMS = """
configs.files configs.schema configs data_contracts
infra infra.servers infra.monitoring infra.storage infra.machine infra.jobs infra.cluster infra.registry infra.serving
model.text model.kernels model.architecture model.optimizer model.generation model.formats model
tasks.data.records tasks.data.text tasks.data.readers tasks.data.sources tasks.data.extraction tasks.data.embedding
tasks.data.scoring tasks.data.deduplication tasks.data.filtering tasks.data.privacy tasks.data.sandbox
tasks.data.environments tasks.data.problems tasks.data.seeds tasks.data.prompts tasks.data.decontamination
tasks.data.chats tasks.data.preferences tasks.data.repositories tasks.data.contamination tasks.data.tokenizer
tasks.data.shards tasks.data.packing tasks.data
tasks.training.schedule tasks.training.plan tasks.training.parallel tasks.training.state tasks.training.policy
tasks.training.loop tasks.training.watch tasks.training tasks.evaluation tasks
tasks.evaluation.benchmarks tasks.release tasks.report tasks.lineage tasks.monitoring tasks.serving
flows.running flows.show flows flows.cli.serving flows.cli.evidence flows.cli
""".split()  # noqa: SIM905
"""From low to high: a module imports from its own room and from those before it. Steps of the data are in the order of
a record's walk."""
MAX_FILES = 25
"""Most files of Python in one folder."""
WALL_CLOCK = {
    # a date for people
    "flows/ask_approval.py",
    "flows/cli/evidence/forget_document.py",
    "flows/cli/evidence/speedrun.py",
    "flows/cli/evidence/write_evidence.py",
    "infra/registry/experiment_tracking.py",
    "infra/registry/promotion.py",
    "infra/serving/required_call.py",
    "infra/storage/lease.py",
    # against times that another process wrote: of a job, a cluster's event, a file, the start of this process
    "infra/jobs/kubernetes_jobs.py",
    "infra/jobs/supervisor.py",
    "infra/source_files.py",
    "infra/storage/garbage.py",
    "infra/storage/local_store.py",
    "tasks/monitoring/phase_figures.py",
    "tasks/training/watch/effective_time.py",
}
"""Files that ask what time it is. A duration, an age of a sign of life and a lease are measured by a clock that nobody
sets: time.monotonic, or one that goes on while the machine sleeps."""
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
IN_EXECUTORS_AND_RANKS = {"prefect", "mlflow", "infra"}


def imports(path: Path, *, runtime_only: bool = False) -> set[str]:
    """Every module that a file imports, also inside functions; runtime_only leaves out blocks under TYPE_CHECKING."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if runtime_only:
        for node in ast.walk(tree):
            body = getattr(node, "body", None)
            if isinstance(body, list):
                body[:] = [
                    item
                    for item in body
                    if not (isinstance(item, ast.If) and getattr(item.test, "id", "") == "TYPE_CHECKING")
                ]
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


NAMES = {name_of(path): path for path in MODULES if path.name != "__init__.py" or path.read_text(encoding="utf-8")}


def room_of(module: str) -> str:
    return module.rpartition(".")[0]


@pytest.mark.parametrize("module", NAMES)
def test_imports_point_down_the_house(module):
    """Lazy imports and those for type checkers too."""
    rank, here = ROOMS.index(room_of(module)), module.split(".")[0]
    imported = {name for name in imports(NAMES[module]) if name in NAMES}
    assert not {name for name in imported if ROOMS.index(room_of(name)) > rank}
    apart = {"infra", "model", "data_contracts"}
    assert here not in apart or not {name for name in imported if name.split(".")[0] in apart - {here}}


def test_no_module_imports_itself_through_others():
    waiting = {
        module: {name for name in imports(path) if name in NAMES and name != module} for module, path in NAMES.items()
    }
    while free := {module for module, needed in waiting.items() if not needed & set(waiting)}:
        waiting = {module: needed for module, needed in waiting.items() if module not in free}
    assert not waiting, "in circles, or above one"


def test_of_the_rest_of_configs_only_load_knows_the_settings():
    """Kernels and readers of YAML need the others: a new setting is no change to them."""
    beside = [module for module in NAMES if room_of(module) == "configs" and module != "configs.schema"]
    assert [
        module for module in beside if any(name.startswith("configs.schema") for name in imports(NAMES[module]))
    ] == ["configs.load"]


def test_no_folder_is_too_full_to_look_through():
    folders = {path.parent for package in (*PACKAGES, "tests", "benchmarks") for path in (ROOT / package).rglob("*.py")}
    assert not {folder: count for folder in folders if (count := len(list(folder.glob("*.py")))) > MAX_FILES}


def test_only_flows_know_prefect():
    assert not [
        path
        for path in MODULES
        if "flows" not in path.parts and any(name.split(".")[0] == "prefect" for name in imports(path))
    ]


def test_what_runs_in_ranks_and_executors_is_light():
    from infra.code_digest import closure

    roots = ["tasks.training.worker", "tasks.data.deduplication.minhash", "tasks.data.filtering.heuristics"]
    for module in closure(tuple(roots)):
        path = ROOT.joinpath(*module.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        heavy = {name for name in imports(path, runtime_only=True) if name.split(".")[0] in IN_EXECUTORS_AND_RANKS}
        assert not heavy, f"{module} imports {heavy}"


def test_step_modules_import_no_heavy_package_at_the_top():
    heavy = {"torch", "pyspark", "great_expectations", "deepspeed", "mlflow", "transformers"}
    for path in MODULES:
        if "@step(" in path.read_text(encoding="utf-8"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            names = {a.name for n in tree.body if isinstance(n, ast.Import) for a in n.names}
            names |= {n.module or "" for n in tree.body if isinstance(n, ast.ImportFrom)}
            assert not {name for name in names if name.split(".")[0] in heavy}, path


def test_durations_and_leases_do_not_hang_on_a_clock_that_can_be_set():
    tells_the_time = re.compile(r"\btime\.time(_ns)?\(|\.(utc)?now\(")
    known = {path.relative_to(ROOT).as_posix() for path in MODULES if tells_the_time.search(path.read_text())}
    assert known == WALL_CLOCK


def test_no_file_has_the_name_of_a_library():
    taken = set(sys.stdlib_module_names) | {
        "torch",
        "tokenizers",
        "mlflow",
        "prefect",
        "pyspark",
        "deepspeed",
        "safetensors",
        "gguf",
    }
    assert not [path for path in MODULES if path.stem in taken and path.stem != "__init__"]


def test_a_step_file_holds_the_step_of_its_name():
    for path in MODULES:
        text = path.read_text(encoding="utf-8")
        if re.search(r"^@step\(", text, re.M) and "tasks" in path.parts:
            assert re.search(rf"^def {path.stem}\(", text, re.M), path


def keys_of(value, where=""):
    """Every key path of a YAML; lists of sections are walked, mixtures by domain, tasks by environment, bounds by
    format and what may be null (a suite, far text, a difficulty, a changing temperature) are not; an objective has the
    keys of its kind."""
    if isinstance(value, dict) and not where.endswith(
        ("mixture", "tasks", "min_routing_agreement", ".suite", ".far_text", ".difficulty", ".dynamic_temperature")
    ):
        where += f".{value['kind']}" if where.endswith("objective") else ""
        return {path for key, item in value.items() for path in {f"{where}.{key}", *keys_of(item, f"{where}.{key}")}}
    if isinstance(value, list) and not where.endswith("mixture"):
        return {path for item in value for path in keys_of(item, where)}
    return set()


def test_every_scale_loads_and_has_the_same_keys():
    keys = {}
    for name in scale_names():
        assert load_scale(name).scale == name.removeprefix("recipes/")
        keys[name] = keys_of(yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text()))
    assert {"micro", "tiny", "nightly", "scaled_down", "full", "air_lora"} <= set(keys)
    outside_objectives = {
        name: {path for path in present if ".objective." not in path} for name, present in keys.items()
    }
    assert {name: present ^ outside_objectives["tiny"] for name, present in outside_objectives.items()} == {
        name: set() for name in keys
    }
    objectives = {}
    for path in {path for present in keys.values() for path in present if ".objective." in path}:
        objectives.setdefault(path.split(".objective.")[1].split(".")[0], set()).add(path)
    for present in keys.values():
        for kind, wanted in objectives.items():
            assert not (present & wanted) or wanted <= present, (kind, wanted - present)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda tree: tree["model"]["recipe"].update(num_experts_per_tok=99),
            r"num_experts_per_tok \(99\) must not exceed n_routed_experts",
        ),
        (lambda tree: tree["data"]["recipe"].update(typo=1), "data.recipe.typo: unknown key"),
        (lambda tree: tree["model"]["recipe"].pop("head_dim"), "model.recipe.head_dim: key is missing"),
        (
            lambda tree: tree["data"]["recipe"]["tokenizer"].update(num_ordinary_tokens=99999),
            "exceeds model.vocab_size",
        ),
        (
            lambda tree: tree["phases"][0]["recipe"].update(sequence_length=10**6, num_tokens=10**6),
            "exceeds model.max_position_embeddings",
        ),
        (lambda tree: tree["courses"][0]["recipe"].update(phases=["sft"]), "list the same names in the same order"),
        (
            lambda tree: tree["phases"][0]["recipe"]["optimizer"].update(muon_newton_schulz_steps=6),
            r"muon_newton_schulz_steps: .* be 5",
        ),
        (
            lambda tree: tree["serving"]["resources"].update(host="0.0.0.0"),
            r"serving.resources.host: .*'127.0.0.1' or 'localhost'",
        ),
        (
            lambda tree: tree["release"]["recipe"].update(gguf_types=["Q8_0"]),
            r"release.recipe: gguf_types is \['Q8_0'\]: add one of F32, BF16, F16, which is served",
        ),
        (
            lambda tree: tree["release"]["recipe"].update(min_routing_agreement={"FP8_EXPERTS": 0.99}),
            r"release.recipe: min_routing_agreement holds FP8_EXPERTS: 0.99: name formats of quantized_formats",
        ),
        (
            lambda tree: tree["model"]["recipe"].update(moe_intermediate_size=200),
            r"multiples of 32: .*moe_intermediate_size \(200\)",
        ),
        (
            lambda tree: tree["evaluation"]["recipe"].update(sequence_length=4096),
            r"sequence_length needs 4096 .*embeddings is 2048",
        ),
        (
            lambda tree: tree["serving"]["resources"].update(context_length=12),
            r"smoke_new_tokens needs 112 positions, .*context_length is 12",
        ),
        (
            lambda tree: tree["model"]["recipe"].update(vocab_size=10**18),
            r"model.recipe.vocab_size: Input should be less than or equal to",
        ),
        (
            lambda tree: tree["phases"][0]["recipe"].update(num_tokens=61441),
            r"phases.pretrain_general.recipe: num_tokens \(61441\) must be a multiple of .* \(128\), for example 61440",
        ),
        (
            lambda tree: tree["phases"][0]["recipe"].update(num_tokens=127),
            r"multiple of sequence_length \(128\), for example 128",
        ),
        (
            lambda tree: tree["phases"][0]["recipe"].update(objective=tree["phases"][-1]["recipe"]["objective"]),
            "phase pretrain_general: objective grpo needs a model that answers",
        ),
        (
            lambda tree: tree["courses"][0]["recipe"].update(start_batch_tokens=127),
            r"start_batch_tokens \(127\) holds no sequence of phase pretrain_general \(128 tokens\)",
        ),
        *(
            (
                lambda tree, url=url: tree["data"]["recipe"]["teacher"]["request"].update(base_url=url, model="m"),
                "base_url must be http:// or",
            )
            for url in ("file:///etc/passwd", "ftp://host/v1", "http://user:word@host/v1", "host:8000", "http:///v1")
        ),
    ],
)
def test_a_wrong_configuration_is_one_message_with_file_key_and_fix(edit, message, tmp_path):
    tree = yaml.safe_load((ROOT / "configs" / "micro.yaml").read_text())
    edit(tree)
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(tree))
    with pytest.raises(ValueError, match=rf"mine.yaml: .*{message}"):
        load_scale(str(path))


def test_repeated_key_and_unknown_scale_are_refused(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("scale: a\nscale: b\n")
    with pytest.raises(ValueError, match="key 'scale' occurs twice"):
        load_scale(str(path))
    with pytest.raises(ValueError, match=r"no scale 'hugee': the scales are .*micro, .*tiny, .*recipes/glm45_air_lora"):
        load_scale("hugee")


@pytest.mark.parametrize("text", ["[" * 20_000, "a: " + "{b: " * 60 + "1" + "}" * 60, "- " * 60 + "x"])
def test_a_yaml_that_nests_too_deep_is_one_sentence(text, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"mine\.yaml is not a YAML file: it nests more than 50 levels deep"):
        load_scale(str(path))
    (tmp_path / "glm46-data.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"glm46-data\.yaml is not a YAML file: it nests more than 50 levels deep"):
        list_sources(tmp_path)


def test_nothing_unfinished_and_no_machine_path_is_tracked():
    pattern = re.compile(r"TO" + r"DO|FIX" + r"ME|(?<![\w.])/wor" + r"k/|/roo" + r"t/")
    for path in [
        *MODULES,
        *(ROOT / "tests").rglob("*.py"),
        ROOT / "README.md",
        ROOT / "Makefile",
        ROOT / "pyproject.toml",
    ]:
        assert not pattern.search(path.read_text(encoding="utf-8")), path


def test_every_deployment_names_a_flow_that_imports_and_parameters_it_has():
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    for deployment in deployments:
        module, name = deployment["entrypoint"].rsplit(".", 1)
        assert ":" not in deployment["entrypoint"], "a path entrypoint loads the file under a second name"
        deployed = getattr(importlib.import_module(module), name)
        assert deployed.name == "glm46"
        assert set(deployment["parameters"]) <= set(deployed.parameters.properties)


def test_every_command_and_target_that_the_readme_names_exists():
    from typer.main import get_command

    from flows.cli.command import app

    readme = (ROOT / "README.md").read_text()
    commands = set(get_command(app).commands)
    assert set(re.findall(r"(?:^|[ `/])glm46 ([a-z]+)", readme, re.M)) <= commands | {"is", "does", "implements"}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"make ([a-z-]+)", readme)) <= targets


def test_the_readme_is_short_and_its_tree_is_that_of_the_rooms():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 130
    assert not [line for line in readme.splitlines() if len(line) > 100]
    rooms, parent = set(), ""
    for indent, names in re.findall(
        r"^ {4}( *)([a-z_/]+/(?: [a-z_/]+/)*)  ", readme.split("## The tree")[1].split("## ")[0], re.M
    ):
        parent = parent if indent else names.split()[0]
        rooms.update((parent if indent else "") + name for name in names.split())
    assert rooms == {f"{room.replace('.', '/')}/" for room in [*ROOMS, "docs", "tests", "benchmarks"]}
