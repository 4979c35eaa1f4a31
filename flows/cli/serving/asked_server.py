"""What `glm46 serve` was asked, from its options and S0's file: a fleet, wishes, an address, and which model."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

from configs.load import load_scale
from configs.schema import Scale, ServingResources
from flows.cli.serving.serve_model import find_version, served_directory, served_path
from infra.home import Home
from infra.registry.model_registry import CHAT_TAG, RegisteredVersion, find_registry, model_name, resolve_alias
from infra.serving.model_client import key_of
from infra.serving.model_server import LOOPBACK
from infra.serving.vllm_program import CPU_BUILD, VLLM, vllm_version
from infra.storage.open_store import open_known_store
from infra.storage.store import Store
from tasks.serving.engine_command import VERSIONS
from tasks.serving.fleet import Fleet, find_fleet
from tasks.serving.plan_serving import plan_serving
from tasks.serving.planned_server import DIRECTORY_ENGINES, Engine, PlannedModel, ScenarioName, ServingPlan, Wishes
from tasks.serving.production_settings import ProductionSettings, read_production_settings
from tasks.serving.served_model import model_of_directory, model_of_gguf, model_of_scale, require_weights

DEFAULT_PORT = 8000
UNKNOWN_DIRECTORY = "MODEL_DIR"
"""Stands in a printed command for the checkpoint of a scale that was not trained here."""


@dataclass(frozen=True)
class Options:
    """Options of the command that S0's file may give too; None: not given."""

    engine: str | None
    scenario: str | None
    hardware: str | None
    tp: int | None
    pp: int | None
    dp: int | None
    ep: int | None
    quantization: str | None
    host: str | None
    port: int | None
    slots: int | None
    drafts: bool | None
    context: int | None
    checkpoint: Path | None
    format: str | None


@dataclass(frozen=True)
class PlacedModel:
    """A planned server and the file or directory that it reads."""

    plan: ServingPlan
    path: Path


@dataclass(frozen=True)
class Asked:
    scale: Scale
    alias: str
    store: Store
    home: Home
    fleet: Fleet
    wishes: Wishes
    host: str
    port: int
    key: str
    resources: ServingResources
    checkpoint: Path | None
    format: str | None
    settings: ProductionSettings | None

    def given(self) -> PlacedModel:
        """The server of the checkpoint that was named. Raises ValueError where it is none or does not fit."""
        assert self.checkpoint is not None
        path = self.checkpoint.absolute()
        read = model_of_directory if self.wishes.engine in DIRECTORY_ENGINES else model_of_gguf
        return PlacedModel(self._plan(read(path.stem if path.is_file() else path.name, path)), path)

    def of_version(self, version: RegisteredVersion) -> PlacedModel:
        """The server of a registered version in the format that was asked for, whose files are verified. For llama.cpp
        a version of another phase than the released one is converted once."""
        name = model_name(self.scale.scale)
        if self.wishes.engine in DIRECTORY_ENGINES:
            path = served_directory(self.store, version, self.format)
            model = replace(model_of_directory(name, path), is_chat_trained=version.tag(CHAT_TAG) == "true")
        else:
            path = served_path(self.store, version, self.scale, self.format or "")
            model = model_of_gguf(name, path)
        return PlacedModel(self._plan(model), path)

    def to_show(self) -> PlacedModel:
        """What would be served; of a scale without the version, as one that was never trained, its architecture."""
        if self.checkpoint is not None:
            return self.given()
        registry, name = find_registry(self.home), model_name(self.scale.scale)
        version = None if registry is None else resolve_alias(registry, name, self.alias)
        if version is None and self.wishes.engine in DIRECTORY_ENGINES:
            return PlacedModel(self._plan(model_of_scale(self.scale)), Path(UNKNOWN_DIRECTORY))
        return self.of_version(version or find_version(self.home, self.scale, self.alias))

    def _plan(self, model: PlannedModel) -> ServingPlan:
        if self.settings is not None:
            self.settings.refuse_other_model("--config", model.recipe)
        return plan_serving(model, self.fleet, self.wishes)


def ask(
    given: Options,
    config: Path | None,
    home: Home,
    scale: str,
    alias: str,
    api_key_env: str,
    store: str | None,
    *,
    rollouts: bool = False,
    routes: bool = False,
) -> Asked:
    """Raises ValueError for options that contradict each other or the file, and for unknown names."""
    settings = None if config is None else read_production_settings(config)
    options = given if settings is None else _merged(given, settings, config)
    engine, scenario = _named("engine", options.engine, get_args(Engine)), options.scenario
    if rollouts:
        _refuse_open_rollouts(engine, options.host, api_key_env)
    elif routes:
        raise ValueError("--routes is of a server that samples for a policy phase: add --rollouts")
    if options.checkpoint is not None:
        _refuse_other_kind(options.checkpoint, engine)
        if options.format is not None:
            raise ValueError("--format chooses among the files of a version, and --checkpoint names one: leave one out")
    own = load_scale(scale)
    resources, is_llama = own.serving.resources, engine not in DIRECTORY_ENGINES
    default = "low_latency" if is_llama else "balanced"
    wishes = Wishes(
        engine,
        _named("scenario", scenario or default, get_args(ScenarioName)),
        options.tp,
        options.pp,
        options.dp,
        options.ep,
        options.context or (resources.context_length if is_llama else None),
        options.slots,
        options.drafts,
        options.quantization,
        rollouts,
        routes,
    )
    fleet = settings.fleet if settings and settings.fleet and not options.hardware else find_fleet(options.hardware)
    return Asked(
        scale=own,
        alias=alias,
        store=open_known_store(store, home),
        home=home,
        fleet=fleet,
        wishes=wishes,
        host=options.host or LOOPBACK[0],
        port=DEFAULT_PORT if options.port is None else options.port,
        key=key_of(api_key_env),
        resources=resources,
        checkpoint=options.checkpoint,
        format=options.format,
        settings=settings,
    )


def refuse_what_cannot_start(asked: Asked) -> None:
    """Raises ValueError before anything starts: no such version, no weights, an engine that is not installed or built
    for other machines, a plan of several nodes or one that does not fit."""
    engine = asked.wishes.engine
    if asked.checkpoint is None:
        version = find_version(asked.home, asked.scale, asked.alias)
    if engine not in DIRECTORY_ENGINES:
        return
    placed = asked.given() if asked.checkpoint is not None else asked.of_version(version)
    require_weights(placed.path)
    if placed.plan.num_nodes > 1:
        raise ValueError(
            f"this plan needs {placed.plan.num_nodes} nodes: write its script and manifests with --write DIR, and "
            f"start those"
        )
    _refuse_absent_engine(placed.plan)


def _refuse_absent_engine(plan: ServingPlan) -> None:
    """vLLM is built for GPUs or for CPUs; its program says which."""
    engine, program = plan.engine, shutil.which(plan.engine)
    if program is None:
        made = f"run `pip install {engine}=={VERSIONS[engine]}` in an environment of its own (it pins another PyTorch)"
        made = made if plan.is_on_gpus else "run `make env-vllm`, which makes .venv-vllm,"
        raise ValueError(f"{engine} is not installed: {made} and put its bin/ on PATH")
    if engine != VLLM:
        return
    version = vllm_version(program)
    if (CPU_BUILD in version) == plan.is_on_gpus:
        built, other = ("CPUs", "name --hardware none") if plan.is_on_gpus else ("GPUs", "name --hardware")
        raise ValueError(
            f"{program} is {version}, built for {built}, and this plan is for {plan.fleet}: {other}, or put another "
            f"vllm on PATH"
        )


def _merged(given: Options, settings: ProductionSettings, config: Path | None) -> Options:
    """The options with those of the file. Raises ValueError for one that both give."""
    told = {name: value for name, value in asdict(given).items() if value is not None}
    twice = sorted(told.keys() & settings.options.keys())
    if settings.fleet is not None and given.hardware is not None:
        twice.append("hardware")
    if twice:
        raise ValueError(f"{config} gives {', '.join(twice)} too: leave --{' --'.join(twice)} out, or remove it there")
    merged = {**settings.options, **told}
    if "checkpoint" in merged:
        merged["checkpoint"] = Path(str(merged["checkpoint"]))
    return Options(**{field.name: merged.get(field.name) for field in fields(Options)})  # pyright: ignore[reportArgumentType]


def _named(option: str, value: str | None, allowed: tuple[Any, ...]) -> Any:
    """The value, by default the first that is allowed."""
    if value is None:
        return allowed[0]
    if value not in allowed:
        raise ValueError(f"--{option} {value}: write one of {', '.join(allowed)}")
    return value


def _refuse_open_rollouts(engine: Engine, host: str | None, api_key_env: str) -> None:
    """Whoever reaches such a server changes its weights, with a key or without."""
    if engine not in DIRECTORY_ENGINES:
        raise ValueError(f"--rollouts is of {' and '.join(DIRECTORY_ENGINES)}: leave it out with {engine}")
    if host not in (None, *LOOPBACK) or api_key_env:
        raise ValueError(
            f"--rollouts lets whoever reaches the server change its weights, with a key or without: leave --host and "
            f"--api-key-env out, and it answers programs of this machine at {LOOPBACK[0]}"
        )


def _refuse_other_kind(checkpoint: Path, engine: Engine) -> None:
    if engine in DIRECTORY_ENGINES:
        if not checkpoint.is_dir():
            raise ValueError(f"{checkpoint} is no directory, and {engine} serves one in the Hugging Face layout")
    elif checkpoint.is_dir():
        raise ValueError(
            f"{checkpoint} is a directory, and a GGUF file is served: make one with `glm46 convert {checkpoint} "
            f"FILE.gguf --to gguf`, or name --engine vllm or sglang"
        )
