"""What replay saves when a model is trained on one domain: python -m benchmarks.training.forgetting [--data DIRECTORY]
[--replay 0.3] [--write]

The phases of configs/recipes/tiny_mid_domain.yaml without Spark: a base on general text, then each mid_domain phase
twice from that same base, once only on its domain and once with the given share of the base's text. Every training
measures held-out text of all domains itself. Without --data the embedded library and generated problems are read.

The last line is JSON: `ours` and `peer` are the mean bits per byte of the base's domain (web) after the phases with and
without replay; `by_phase` holds every domain before and after each.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.inputs.domain_steps import learn_domain_tokenizer, read_domains, shard_domains
from benchmarks.results import WRITE_FLAG, report
from configs.load import load_scale
from configs.schema import PhaseSection, Scale
from infra.home import Home
from infra.step import Artifact
from infra.storage.local_store import LocalStore
from tasks.data.packing.pack_phase import pack_phase
from tasks.data.problems.synthesize_problems import synthesize_problems
from tasks.data.sources.list_sources import list_sources
from tasks.training.state.trained_checkpoint import TrainedCheckpoint
from tasks.training.train_phase import train_phase
from tests.support.training_inputs import compute

RECIPE = "recipes/tiny_mid_domain"
BASE_DOMAIN = "web"
REPLAY_SHARE = 0.3


def with_replay(phase: PhaseSection, share: float) -> PhaseSection:
    """The phase on its own domain and this share of the base's."""
    domain = phase.name.removeprefix("mid_domain_")
    mixture = {domain: 1.0 - share, **({BASE_DOMAIN: share} if share else {})}
    recipe = phase.recipe.model_copy(update={"mixture": mixture, "max_epochs": 1000.0})
    return phase.model_copy(update={"recipe": recipe})


def read_scale(num_steps: int | None) -> Scale:
    """The recipe, with phases of `num_steps` steps where a number is given."""
    scale = load_scale(RECIPE)
    if num_steps is None:
        return scale
    phases = []
    for phase in scale.phases:
        num_tokens = num_steps * scale.course_of(phase).peak_batch_tokens
        phases.append(phase.model_copy(update={"recipe": phase.recipe.model_copy(update={"num_tokens": num_tokens})}))
    return scale.model_copy(update={"phases": tuple(phases)})


def measure(root: Path, scale: Scale, data_dir: Path | None, replay: float) -> dict[str, dict[str, dict[str, float]]]:
    """Per phase: bits per byte by domain `before`, and `after` with and without replay."""
    home = Home(root)
    for directory in (root / "work", root / "run"):
        directory.mkdir(parents=True, exist_ok=True)
    store = LocalStore(home.store_dir, home)
    sources = list_sources(data_dir)
    problems = compute(store, synthesize_problems, recipe=scale.data.recipe.synthesize)
    texts = compute(store, read_domains, sources=sources, problems=problems, recipe=scale.data.recipe)
    tokenizer = compute(store, learn_domain_tokenizer, texts=texts, recipe=scale.data.recipe.tokenizer)
    shards, validation = (compute(store, step, texts=texts, tokenizer=tokenizer) for step in shard_domains)

    def train(phase: PhaseSection, start: Artifact[TrainedCheckpoint] | None) -> Artifact[TrainedCheckpoint]:
        chosen = scale.model_copy(
            update={"phases": tuple(phase if own.name == phase.name else own for own in scale.phases)}
        )
        packed = compute(store, pack_phase, shards=shards, chats=None, recipe=phase.recipe.packing_recipe)
        return compute(
            store,
            train_phase,
            packed=packed,
            shards=shards,
            chats=None,
            prompts=None,
            validation=validation,
            tokenizer=tokenizer,
            start=start,
            recipe=Scale.training_recipe(chosen, phase),
            resources=phase.resources,
        )

    base = train(scale.phases[0], None)
    results = {}
    for phase in scale.phases[1:]:
        after = {
            name: train(with_replay(phase, share), base) for name, share in (("no_replay", 0.0), ("replay", replay))
        }
        results[phase.name] = {"before": base.record.validation_bits_per_byte} | {
            name: checkpoint.record.validation_bits_per_byte for name, checkpoint in after.items()
        }
        _print(phase.name, results[phase.name], replay)
    return results


def _print(name: str, bits: dict[str, dict[str, float]], replay: float) -> None:
    print(f"{name}: bits per byte before, after without replay, after with {replay:.0%} replay", flush=True)
    for domain in sorted(bits["before"]):
        before, without, replayed = (bits[key][domain] for key in ("before", "no_replay", "replay"))
        print(
            f"  {domain:<14} {before:.4f}  {without:.4f} ({without - before:+.4f})  {replayed:.4f} "
            f"({replayed - before:+.4f})",
            flush=True,
        )


def main() -> None:
    """Train, measure, compare, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="directory of documents; without it the embedded library")
    parser.add_argument("--replay", type=float, default=REPLAY_SHARE, help="share of the base's domain")
    parser.add_argument(WRITE_FLAG, action="store_true", help="also write benchmarks/results/forgetting.json")
    parser.add_argument("--steps", type=int, help="of each phase; without it those of the recipe")
    given = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        measured = measure(Path(temporary), read_scale(given.steps), given.data, given.replay)
    means: dict[str, Any] = {
        name: sum(phase[name][BASE_DOMAIN] for phase in measured.values()) / len(measured)
        for name in ("before", "replay", "no_replay")
    }
    rounded = {
        phase: {name: {d: round(v, 4) for d, v in by.items()} for name, by in values.items()}
        for phase, values in measured.items()
    }
    report(
        "forgetting",
        ours=means["replay"],
        peer=means["no_replay"],
        unit=f"bits per byte of {BASE_DOMAIN} after mid_domain",
        lower_is_better=True,
        before=round(means["before"], 4),
        replay_share=given.replay,
        by_phase=rounded,
        seconds=round(time.monotonic() - started),
    )


if __name__ == "__main__":
    main()
