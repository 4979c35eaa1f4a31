"""Compares two models on the same items, for `glm46 compare`: checkpoints, registered versions, GGUF files, servers, or
two results of `glm46 eval`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel

from configs.files.atomic_files import replacing
from flows.cli.serving.evaluate_target import Target, Wanted, evaluate_target, local_server
from flows.cli.serving.format_speeds import CONTEXT_LENGTH, NUM_TOKENS, TIMEOUT_SECONDS
from infra.home import Home
from infra.serving.model_client import ModelClient
from infra.serving.model_server import running_model_server
from tasks.evaluation.benchmarks.run_suite import Asked
from tasks.evaluation.benchmarks.suite_results import (
    ComparedModel,
    ModelComparison,
    SuiteResult,
    compare_results,
    read_result,
)
from tasks.release.server_profile import engine_speed, measure_levels

MAX_ROUTED_TEXTS = 64
"""Prompts of the suite on which the experts are compared, the first of each benchmark in turn."""


def compare_files(first: Path, second: Path) -> ModelComparison:
    """Of two results. Raises ValueError where they do not answer the same questions."""
    results = [read_result(path)[0] for path in (first, second)]
    sides = [_side(result, None, None) for result in results]
    return ModelComparison(
        suite=results[0].suite,
        first=sides[0],
        second=sides[1],
        differences=tuple(compare_results(first, second)),
        routing_agreement=None,
        not_measured="size, speed and experts are measured of models, not of results",
    )


def compare_targets(
    targets: tuple[Target, Target],
    asked: Asked,
    home: Home,
    device: str,
    models: tuple[str, str],
    key_variables: tuple[str, str],
    concurrency: int,
    answers_path: Path | None,
) -> ModelComparison:
    """Evaluate both, and measure what they weigh and how fast they answer. `models` and `key_variables`: on the server
    of each. `concurrency` and `answers_path` as in Wanted."""
    with tempfile.TemporaryDirectory(dir=home.work_root) as directory:
        paths = [Path(directory) / name for name in ("first.json", "second.json")]
        sides, reasons = [], []
        for target, path, model, key_variable in zip(targets, paths, models, key_variables, strict=True):
            wanted = Wanted(target, asked, path, device, model, key_variable, concurrency, answers_path)
            result = evaluate_target(wanted, home)
            speed, reason = _speed(target, home, device, model, key_variable)
            sides.append(_side(result, _num_bytes(target), speed))
            reasons.append(reason)
        differences = tuple(compare_results(*paths))
        prompts = _prompts(paths[0])
    agreement, reason = _agreement(*targets, prompts, device)
    return ModelComparison(
        suite=asked.name,
        first=sides[0],
        second=sides[1],
        differences=differences,
        routing_agreement=agreement,
        not_measured="; ".join(dict.fromkeys(filter(None, (*reasons, reason)))),
    )


def of_both(value: str, option: str) -> tuple[str, str]:
    """What an option says of A and of B: A,B, or once for both. Raises ValueError for more."""
    first, *rest = value.split(",")
    if len(rest) > 1:
        raise ValueError(f"{option} {value}: write it once for both, or as OF_A,OF_B")
    return first, (rest or [first])[0]


def write_comparison(output: Path, comparison: BaseModel) -> None:
    """The figures as one file, which appears whole."""
    with replacing(output) as temporary:
        temporary.write_text(comparison.model_dump_json(indent=1) + "\n")


def _side(result: SuiteResult, num_bytes: int | None, speed: float | None) -> ComparedModel:
    return ComparedModel(target=result.target, engine=result.engine, num_bytes=num_bytes, tokens_per_second=speed)


def _num_bytes(target: Target) -> int | None:
    if target.gguf_path is not None:
        return target.gguf_path.stat().st_size
    if target.checkpoint_dir is not None:
        return sum(path.stat().st_size for path in target.checkpoint_dir.glob("*.safetensors"))
    return None


def _speed(target: Target, home: Home, device: str, model: str, key_variable: str) -> tuple[float | None, str]:
    """(tokens per second, "") or (None, why): a speed that cannot be measured costs no evaluation. None for a quantized
    checkpoint: transformers computes it for its figures, and no engine serves it so."""
    if target.is_quantized:
        return None, ""
    try:
        if target.checkpoint_dir is not None:
            return engine_speed(target.checkpoint_dir, NUM_TOKENS, device), ""
        with _client(target, home, model, key_variable) as client:
            return measure_levels(client, (1,), NUM_TOKENS)[0].tokens_per_second, ""
    except (RuntimeError, ValueError) as error:
        return None, f"speed of {target.name}: {error}"


@contextmanager
def _client(target: Target, home: Home, model: str, key_variable: str) -> Iterator[ModelClient]:
    if target.gguf_path is None:
        yield ModelClient(target.url, key_variable, TIMEOUT_SECONDS, model)
        return
    resources = local_server(target.gguf_path, CONTEXT_LENGTH)
    with running_model_server(target.gguf_path, resources, home.run_dir / "compare-server.log") as server:
        yield ModelClient(server.url, "", TIMEOUT_SECONDS, "")


def _prompts(path: Path) -> list[str]:
    by_benchmark = [[item.prompt for item in items] for items in read_result(path)[1].values()]
    longest = max(map(len, by_benchmark))
    in_turn = [prompts[number] for number in range(longest) for prompts in by_benchmark if number < len(prompts)]
    return [prompt for prompt in in_turn if prompt][:MAX_ROUTED_TEXTS]


def _agreement(first: Target, second: Target, prompts: list[str], device: str) -> tuple[float | None, str]:
    """Of two checkpoints with the same experts and tokenizer, or why there is none."""
    from model.formats.hf_checkpoint import read_config
    from tasks.evaluation.engine import document_token_ids, load_tokenizer
    from tasks.release.routing import chosen_experts, routing_agreement

    if first.is_quantized or second.is_quantized:
        return None, (
            "of a quantized checkpoint neither speed nor experts are measured here: what it loses is in `glm46 compare "
            "VERSION` of its release"
        )
    directories = [target.checkpoint_dir for target in (first, second)]
    if directories[0] is None or directories[1] is None:
        return None, "experts are compared of two checkpoints: llama.cpp and servers do not say which they choose"
    recipes = [read_config(directory) for directory in directories if directory is not None]
    shapes = {
        (each.num_hidden_layers, each.first_k_dense_replace, each.n_routed_experts, each.num_experts_per_tok)
        for each in recipes
    }
    tokenizers = {(directory / "tokenizer.json").read_bytes() for directory in directories if directory is not None}
    if len(shapes) > 1 or len(tokenizers) > 1:
        return None, "experts are not compared: the models have other layers, experts or tokenizers"
    tokenizer, longest = load_tokenizer(directories[0] / "tokenizer.json"), recipes[0].max_position_embeddings
    rows = [document_token_ids(tokenizer, prompt)[:longest] for prompt in prompts]
    ours, theirs = (chosen_experts(directory, rows, device) for directory in directories if directory is not None)
    agreement = routing_agreement(ours, theirs)
    return agreement, "" if agreement is not None else "experts are not compared: the models have none"
