"""Evaluates a model by a suite of benchmarks, for `glm46 eval`: a checkpoint, a registered version, a GGUF file, or a
server.

No pipeline server is started, and no result is written before every benchmark has ended. Only what a server or a GGUF
file has answered is kept meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from configs.load import load_scale, load_suite
from configs.schema import ServingResources
from infra.home import Home
from infra.registry.model_registry import model_name, open_registry
from infra.registry.registered_versions import named_version
from infra.serving.kept_answers import KeptAnswers
from infra.serving.model_client import TEMPLATE_SETTINGS, ModelClient
from infra.serving.model_server import running_model_server
from infra.step import Progress
from infra.storage.open_store import open_known_store
from tasks.evaluation.benchmarks.run_suite import Asked, read_suite_items, run_suite
from tasks.training.state.trained_checkpoint import TrainedCheckpoint

if TYPE_CHECKING:
    from lm_eval.api.model import LM

    from tasks.evaluation.benchmarks.suite_results import SuiteResult

SECONDS_PER_LINE = 5.0
"""Between two lines of progress."""
STARTUP_SECONDS = 120.0
READ_BYTES_PER_SECOND = 5e7
"""Of a slow disk: how long the largest files may take until their server answers."""
NUM_RETRIES = 5
"""Of a request to a server: with the waits, 15 seconds."""


@dataclass(frozen=True)
class Target:
    """What is evaluated, as the user named it and as it was found."""

    name: str
    url: str
    """Empty unless it is a server's."""
    gguf_path: Path | None
    checkpoint_dir: Path | None

    @property
    def is_quantized(self) -> bool:
        """Whether it is a checkpoint in the layout of compressed-tensors."""
        from model.formats.quantized_model import is_quantized

        return self.checkpoint_dir is not None and is_quantized(self.checkpoint_dir)


@dataclass(frozen=True)
class Wanted:
    """The options of `glm46 eval`."""

    target: Target
    asked: Asked
    output: Path
    device: str
    model: str
    """The name under which a server knows its model; empty for its only one."""
    key_variable: str
    concurrency: int
    """Requests to a URL at a time."""
    answers_path: Path | None
    """Where the answers of a server are kept until the result is there; None keeps none."""


def local_server(gguf_path: Path, context_length: int) -> ServingResources:
    """Of a server that only this command uses: a thread on each physical core that this process may use."""
    usable = len(os.sched_getaffinity(0))
    return ServingResources(
        host="127.0.0.1",
        port=0,
        context_length=context_length,
        num_threads=min(usable, psutil.cpu_count(logical=False) or usable),
        startup_timeout_seconds=STARTUP_SECONDS + gguf_path.stat().st_size / READ_BYTES_PER_SECOND,
    )


def find_target(target: str, home: Home, scale: str, store: str | None) -> Target:
    """Raises ValueError for a path, alias or version that does not exist."""
    if target.startswith(("http://", "https://")):
        return Target(target, target, None, None)
    path = Path(target)
    if target.endswith(".gguf"):
        if not path.is_file():
            raise ValueError(f"no file {path.absolute()}: name a GGUF file that exists")
        return Target(target, "", path, None)
    if path.is_dir():
        return Target(target, "", None, path)
    if "/" in target:
        raise ValueError(f"no directory {path.absolute()}: name a checkpoint in the Hugging Face layout that exists")
    registered = model_name(load_scale(scale).scale)
    version = named_version(open_registry(home), registered, target).registered
    checkpoint = open_known_store(store, home).load(version.key, TrainedCheckpoint)
    return Target(f"{registered} version {version.version}", "", None, checkpoint.directory("hf"))


def new_output(output: Path) -> Path:
    """Raises ValueError for a file that exists or has no place."""
    from tasks.evaluation.benchmarks.suite_results import PREDICTIONS_SUFFIX, items_path

    if output.suffix != ".json":
        raise ValueError(f"--output {output} must end in .json; the items are written beside it")
    for path in (output, items_path(output), *output.parent.glob(f"{output.stem}.*{PREDICTIONS_SUFFIX}")):
        if path.exists():
            raise ValueError(f"{path} exists: name a new file")
    if not output.absolute().parent.is_dir():
        raise ValueError(f"the directory of --output {output} does not exist: make it first")
    return output


def ask(suite: str, data: str | None, limit: int | None) -> Asked:
    """The items of a suite. Raises ValueError for an unknown suite, and for data that do not fit it or are missing."""
    return read_suite_items(suite, load_suite(suite), data, limit)


def evaluate_target(wanted: Wanted, home: Home) -> SuiteResult:
    """Run the suite and write both files. Raises ValueError or ServerFailedError before either is written."""
    from tasks.evaluation.benchmarks.suite_results import write_result

    report = _lines_of_progress()
    with _opened(wanted, home, report) as (model, engine):
        result, items = run_suite(model, wanted.asked, wanted.target.name, engine, report)
    write_result(wanted.output, result, items)
    return result


@contextmanager
def _opened(wanted: Wanted, home: Home, report: Callable[[Progress], None]) -> Iterator[tuple[LM, str]]:
    """(the model as the harness asks it, what computes)."""
    target = wanted.target
    if target.is_quantized:
        yield _quantized_model(target, wanted, report), "transformers"
    elif target.checkpoint_dir is not None:
        yield _checkpoint_model(target.checkpoint_dir, wanted, report), "glm46"
    elif target.gguf_path is not None:
        with _llama_model(target.gguf_path, wanted, home, report) as model:
            yield model, "llama.cpp"
    else:
        yield _endpoint_model(wanted, report)


def _checkpoint_model(checkpoint_dir: Path, wanted: Wanted, report: Callable[[Progress], None]) -> LM:
    from tasks.evaluation.benchmarks.checkpoint_model import checkpoint_model
    from tasks.release.checkpoint_source import open_source

    source = open_source(checkpoint_dir)
    for name in source.shapes:
        source.read(name)  # a number that is not finite is refused here: an answer can be read off it all the same
    version = hashlib.sha256((checkpoint_dir / "config.json").read_bytes()).hexdigest()
    return checkpoint_model(checkpoint_dir, wanted.asked.suite, version, wanted.device, report)


def _quantized_model(target: Target, wanted: Wanted, report: Callable[[Progress], None]) -> LM:
    """Computed as a release measures its formats. Raises ValueError for another device than a CPU, and for a checkpoint
    that does not read back."""
    from model.formats.hf_checkpoint import CONFIG_FILE
    from model.formats.quantized_model import load_quantized
    from tasks.evaluation.benchmarks.checkpoint_model import engine_model
    from tasks.release.transformers_engine import TransformersEngine

    directory = target.checkpoint_dir
    assert directory is not None, target
    if wanted.device != "cpu":
        raise ValueError(
            f"{target.name} is quantized, and is computed on a CPU here: leave --device out, or serve it with vLLM and "
            f"name its URL"
        )
    config = (directory / CONFIG_FILE).read_bytes()
    version, positions = hashlib.sha256(config).hexdigest(), json.loads(config)["max_position_embeddings"]

    def load() -> TransformersEngine:
        model = load_quantized(directory)
        for name, parameter in model.named_parameters():
            if not parameter.isfinite().all():
                raise ValueError(f"{directory}: {name} has numbers that are not finite: quantize the checkpoint again")
        return TransformersEngine(model, version)

    return engine_model(load, directory, wanted.asked.suite, version, positions, report)


@contextmanager
def _llama_model(gguf_path: Path, wanted: Wanted, home: Home, report: Callable[[Progress], None]) -> Iterator[LM]:
    from tasks.release.served_scoring import ServedScorer
    from tasks.serving.server_model import LlamaModel, server_tokens

    suite, file = wanted.asked.suite, gguf_path.stat()
    resources = local_server(gguf_path, suite.sequence_length + 1)
    kept = _kept_answers(
        wanted, f"{gguf_path.absolute()} {file.st_size} {file.st_mtime_ns} {suite.sequence_length} llama.cpp"
    )
    with running_model_server(gguf_path, resources, home.run_dir / "eval-server.log") as server:
        with urllib.request.urlopen(f"{server.url}/v1/models", timeout=suite.timeout_seconds) as answer:
            described = json.load(answer)["data"][0]["meta"]
        client = ModelClient(server.url, "", suite.timeout_seconds, "")
        sequence_length = min(suite.sequence_length, described["n_ctx_train"])
        (filler,) = server_tokens(server.url, "a")
        with ServedScorer(server.url, filler, described["n_vocab"]) as scorer:
            yield LlamaModel(client, kept, scorer, sequence_length, suite.enable_thinking, report)


def _endpoint_model(wanted: Wanted, report: Callable[[Progress], None]) -> tuple[LM, str]:
    from tasks.serving.server_model import EndpointModel

    asked, suite = wanted.asked, wanted.asked.suite
    if asked.needs_whole_texts:
        raise ValueError(
            f"suite {asked.name} scores whole texts, which needs the tokens of the model at {wanted.target.url}: "
            f"give the checkpoint or its GGUF file, or a suite without the kind text"
        )
    client = ModelClient(
        wanted.target.url, wanted.key_variable, suite.timeout_seconds, wanted.model, num_retries=NUM_RETRIES
    )
    if asked.needs_likelihoods:
        client.require_likelihoods()
    engine = wanted.target.url
    if (
        any(getattr(benchmark, "is_chat", False) for benchmark in suite.benchmarks)
        and not client.takes_template_settings()
    ):
        engine += " without enable_thinking"
        print(
            f"{wanted.target.url} refuses {TEMPLATE_SETTINGS}: chats go without it, so the suite's enable_thinking has "
            f"no effect",
            file=sys.stderr,
        )
    kept = _kept_answers(wanted, f"{client.url} {client.model}")
    return EndpointModel(client, kept, wanted.concurrency, suite.enable_thinking, report), engine


def _kept_answers(wanted: Wanted, answered_by: str) -> KeptAnswers:
    side = wanted.output.name  # two sides of a comparison may be one server, and each is asked
    kept = KeptAnswers(wanted.answers_path, f"{answered_by} {side}")
    if kept.num_earlier:
        print(f"{kept.num_earlier} earlier answers are in {wanted.answers_path}: remove it to ask all", file=sys.stderr)
    return kept


def _lines_of_progress() -> Callable[[Progress], None]:
    """Prints progress to standard error, and a benchmark's name when it starts."""
    last = 0.0

    def report(progress: Progress) -> None:
        nonlocal last
        now = time.monotonic()
        if progress.unit == "benchmarks" or now - last > SECONDS_PER_LINE:
            last = now
            print(f"{progress.message}: {progress.done} of {progress.total} {progress.unit}", file=sys.stderr)

    return report
