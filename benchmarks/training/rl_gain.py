"""What reinforcement learning adds to SFT on verified problems: python -m benchmarks.training.rl_gain [--seeds 3]
[--keep DIRECTORY]

A small model is trained on conversations of two-digit additions (`sft`) and then by GRPO on prompts that are in none of
them (`rl_reasoning`): the real steps, through a store in a temporary directory. Both are asked the same evaluation
problems, whose operands nobody was trained on, as a conversation with sampled answers. WRONG_SHARE keeps SFT at 30-60
%: in that share of its conversations the answer is one too high, as happens where nobody verified, and a model that
imitates them answers wrong as often. Fewer conversations or steps would hold it there as well, but on an edge: one seed
answers a tenth of the problems, the next nine tenths.

The last line is JSON: `sft` and `rl` are pass@1 over all seeds, `interval` is the 95 % interval of the paired
difference (items and seeds resampled), `significant` whether it is above 0.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.inputs.arithmetic_steps import (
    Answers,
    Demonstrations,
    Vocabulary,
    answer_problems,
    learn_tokenizer,
    shard_arithmetic,
    shard_questions,
)
from configs.load import load_scale
from configs.schema import PhaseSection, Scale, TrainingRecipe
from infra.home import Home
from infra.step import Artifact, Step
from infra.storage.local_store import LocalStore
from infra.storage.store import Store, step_key
from tasks.data.packing.pack_phase import pack_phase
from tasks.data.problems.synthesize_problems import synthesize_problems
from tasks.training.state.trained_checkpoint import TrainedCheckpoint
from tasks.training.train_phase import train_phase

SEEDS = (46, 47, 48)
NUM_CHATS, WRONG_SHARE = 5500, 0.45
SFT_STEPS, SFT_ROWS, SFT_LENGTH = 600, 16, 128
RL_STEPS, ANSWERS_PER_STEP, ANSWERS_PER_PROMPT, RL_LENGTH = 80, 512, 16, 48
RL_RATE = 5e-4
"""Of Muon, whose updates are as long however noisy the gradient: at 1e-3 with 256 answers a third of the gain is left,
at 2e-3 a loss."""
NUM_PROMPTS, NUM_PROBLEMS, ANSWERS_PER_PROBLEM = 3000, 500, 8
NUM_RESAMPLES = 2000


def build_scale(seed: int) -> Scale:
    """tiny with a smaller model, only arithmetic, and two phases."""
    values = load_scale("tiny").model_dump(mode="json")
    values["scale"] = "rl_gain"
    values["data"]["recipe"]["synthesize"]["families"] = {}
    _change(
        values["data"]["recipe"],
        {
            "synthesize": {
                "operations": ["+"],
                "num_training_problems": NUM_CHATS,
                "num_chats": NUM_CHATS,
                "num_prompts": NUM_PROMPTS,
                "num_evaluation_problems": NUM_PROBLEMS,
                "max_operand": 99,
                "thinking_share": 0.0,
                "prompt_families": [],
            },
            "tokenizer": {"num_ordinary_tokens": 263},
        },
    )
    _change(
        values["model"]["recipe"],
        {
            "vocab_size": 320,
            "hidden_size": 64,
            "intermediate_size": 128,
            "moe_intermediate_size": 64,
            "num_hidden_layers": 2,
            "n_routed_experts": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "num_nextn_predict_layers": 0,
        },
    )
    phases = {phase["name"]: phase for phase in values["phases"]}
    sft_batch, rl_batch = SFT_ROWS * SFT_LENGTH, ANSWERS_PER_STEP * RL_LENGTH
    shared = {"max_epochs": 1000.0, "seed": seed}
    budgets = {
        "sft": {"num_tokens": SFT_STEPS * sft_batch, "sequence_length": SFT_LENGTH, "mixture": {"chat": 1.0}, **shared},
        "rl_reasoning": {"num_tokens": RL_STEPS * rl_batch, "sequence_length": RL_LENGTH, **shared},
    }
    for name, budget in budgets.items():
        resources = {"micro_batch_sequences": 256, "save_interval_steps": 1000, "log_interval_steps": 1}
        _change(phases[name], {"recipe": budget, "resources": resources})
    phases["rl_reasoning"]["recipe"]["objective"]["samples_per_prompt"] = ANSWERS_PER_PROMPT
    values["phases"] = [phases["sft"], phases["rl_reasoning"]]
    values["courses"] = [
        _course("sft", SFT_STEPS * sft_batch, sft_batch, peak=1e-2, final=1e-3),
        _course("rl_reasoning", RL_STEPS * rl_batch, rl_batch, peak=RL_RATE, final=RL_RATE),
    ]
    _change(
        values["evaluation"]["recipe"], {"num_chat_problems": NUM_PROBLEMS, "samples_per_problem": ANSWERS_PER_PROBLEM}
    )
    return Scale.model_validate(values)


def _change(values: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Put other values into a section; a key that it has not is a mistake."""
    for name, value in changes.items():
        if isinstance(value, Mapping) and name != "mixture":
            _change(values[name], value)
        else:
            assert name in values, (name, sorted(values))
            values[name] = value


def _course(phase: str, num_tokens: int, batch_tokens: int, *, peak: float, final: float) -> dict[str, Any]:
    recipe = {
        "name": phase,
        "phases": [phase],
        "peak_learning_rate": peak,
        "final_learning_rate": final,
        "warmup_share": 0.0,
        "start_batch_tokens": batch_tokens,
        "peak_batch_tokens": batch_tokens,
        "batch_rampup_share": 0.0,
        "router_bias_rate": [{"until_share": 1.0, "value": 0.0}],
        "mtp_loss_weight": [{"until_share": 1.0, "value": 0.0}],
        "balance_loss_weight": 1e-4,
    }
    return {"recipe": recipe}


def compute(store: Store, step: Step, **arguments: Any) -> Artifact:
    """Run a step and commit it, or find it done."""
    inputs = {name: value for name, value in arguments.items() if name not in ("recipe", "resources")}
    identity = step.identity(arguments.get("recipe"), inputs)
    key = step_key(identity)
    with store.locked(key):
        return store.find(step, key) or store.compute(
            step,
            key,
            identity,
            lambda output: step(**arguments, output=output),
            lambda progress: None,
            lambda *_: None,
            time.monotonic,
        )


def train_both(store: Store, scale: Scale) -> tuple[Answers, Answers]:
    """SFT, then GRPO from it; both answer the same problems."""
    sft, rl = scale.phases
    problems = compute(store, synthesize_problems, recipe=scale.data.recipe.synthesize)
    tokenizer = compute(
        store,
        learn_tokenizer,
        problems=problems,
        recipe=Vocabulary(num_ordinary_tokens=scale.data.recipe.tokenizer.num_ordinary_tokens),
    )
    shards = compute(store, shard_arithmetic, problems=problems, tokenizer=tokenizer)
    chats = compute(
        store, shard_questions, problems=problems, tokenizer=tokenizer, recipe=Demonstrations(wrong_share=WRONG_SHARE)
    )
    packed = compute(store, pack_phase, shards=shards, chats=chats, recipe=sft.recipe.packing_recipe)

    def train(phase: PhaseSection, **inputs: Artifact | None) -> Artifact[TrainedCheckpoint]:
        recipe: TrainingRecipe = scale.training_recipe(phase)
        return compute(
            store, train_phase, validation=None, tokenizer=tokenizer, recipe=recipe, resources=phase.resources, **inputs
        )

    tuned = train(sft, packed=packed, shards=shards, chats=chats, prompts=None, start=None)
    reinforced = train(rl, packed=None, shards=None, chats=None, prompts=problems, start=tuned)
    before, after = (
        compute(store, answer_problems, problems=problems, checkpoint=checkpoint, recipe=scale.evaluation.recipe).record
        for checkpoint in (tuned, reinforced)
    )
    return before, after


def paired_interval(differences_SI: np.ndarray) -> tuple[float, float]:
    """95 % interval of the mean over seeds (S) and items (I), both drawn with replacement; an item keeps its seeds
    together."""
    chance = np.random.default_rng(SEEDS[0])
    num_seeds, num_items = differences_SI.shape
    means = [
        differences_SI[chance.integers(num_seeds, size=num_seeds)][:, chance.integers(num_items, size=num_items)].mean()
        for _ in range(NUM_RESAMPLES)
    ]
    lower, upper = np.quantile(means, [0.025, 0.975])
    return float(lower), float(upper)


def measure(root: Path, seeds: tuple[int, ...]) -> dict[str, Any]:
    """The result of all seeds, each reported when it is there."""
    home = Home(root)
    for directory in (root / "work", root / "run"):
        directory.mkdir(parents=True, exist_ok=True)
    store = LocalStore(home.store_dir, home)
    results = []
    for seed in seeds:
        started = time.monotonic()
        results.append(train_both(store, build_scale(seed)))
        before, after = results[-1]
        print(
            f"seed {seed}: sft {before.mean:.3f}, rl {after.mean:.3f}, {time.monotonic() - started:.0f} s", flush=True
        )
    scores_PSI = np.array([[record.scores for record in records] for records in zip(*results, strict=True)])
    sft, rl = scores_PSI.mean((1, 2))
    lower, upper = paired_interval(scores_PSI[1] - scores_PSI[0])
    by_seed = {
        str(seed): [round(float(value), 4) for value in scores_PSI[:, number].mean(1)]
        for number, seed in enumerate(seeds)
    }
    return {
        "sft": round(float(sft), 4),
        "rl": round(float(rl), 4),
        "interval": [round(lower, 4), round(upper, 4)],
        "significant": lower > 0,
        "num_items": scores_PSI.shape[2],
        "by_seed": by_seed,
    }


def main() -> None:
    """Train, ask, compare, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="how many")
    parser.add_argument("--keep", type=Path, help="directory of the store; without it a temporary one")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        result = measure(given.keep or Path(temporary), SEEDS[: given.seeds])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
