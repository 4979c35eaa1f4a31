"""Step: compares our greedy tokens and their log-probabilities with those of the engines that will serve the release.

In: our own answers (generate_reference), the exported checkpoint, the GGUF files. Each engine is given our tokens, and
says for each whether it is its first choice and how likely it is. That is greedy generation up to the first token that
differs, after which nothing is compared. As in the smoke test, a prompt ends where our margin is too small to decide.
llama.cpp also writes function calls without and with drafts of the MTP layer, which must be the same. Out: parity.json,
per engine what was compared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from configs.schema import served_gguf_type
from infra.step import Artifact, Output, Progress, Record, digest_of, step
from tasks.evaluation.engine import load_tokenizer, reproducible_arithmetic
from tasks.release.generate_reference import NUM_THREADS, ReferenceAnswer
from tasks.release.parity_engines import Row, llama_scores, transformers_scores, vllm_scores
from tasks.release.served_requests import calls_of_file
from tasks.release.served_scoring import FILLER

if TYPE_CHECKING:
    from pathlib import Path

    from configs.schema import ParityRecipe, ServingResources
    from tasks.release.convert_to_gguf import GgufFiles
    from tasks.release.generate_reference import Reference
    from tasks.training.policy.rollout_connection import TokenScore
    from tasks.training.state.trained_checkpoint import TrainedCheckpoint

TRANSFORMERS, LLAMA, VLLM = "transformers", "llama.cpp", "vllm"
DRAFTING = "llama.cpp with drafts"
MAX_REASONS = 3
"""Differences of one engine that are named; the others follow from the same cause and are counted."""


class OptionalEngines(Record):
    """Engines that are compared only where their program is on PATH."""

    vllm: str
    """Its version; empty where it is not."""

    @property
    def digest(self) -> str:
        """sha256 over the versions."""
        return digest_of(self.model_dump(mode="json"))


def optional_engines() -> OptionalEngines:
    """The engines of this machine. Raises ValueError for a program that does not start."""
    from infra.serving.vllm_program import vllm_program, vllm_version

    program = vllm_program()
    return OptionalEngines(vllm="" if program is None else vllm_version(program))


class EngineParity(Record):
    """One engine beside ours."""

    skipped: str
    """Why it was not compared; empty where it was."""
    num_tokens: int
    """Compared tokens; after the first that differs none of the prompt is."""
    max_log_probability_difference: float | None
    """Natural logarithm; None where none was compared, or where the engine gave a number that is not finite."""
    reasons: tuple[str, ...]
    """What differs beyond the bounds."""


class ParityReport(Record):
    """Whether every engine computes the model that was trained."""

    accepted: bool
    num_prompts: int
    engines: dict[str, EngineParity]
    refusals: tuple[str, ...]


@step(
    content=("parity.json",),
    evidence=("server.log", "drafting-server.log", "vllm.log"),
    distributions=("torch", "transformers", "xllamacpp", "tokenizers", "safetensors"),
)
def check_parity(
    *,
    reference: Artifact[Reference],
    checkpoint: Artifact[TrainedCheckpoint],
    gguf: Artifact[GgufFiles],
    optional: OptionalEngines,
    recipe: ParityRecipe,
    resources: ServingResources,
    output: Output,
) -> ParityReport:
    """A difference is a refusal, not an exception."""
    answers = _answers(reference, recipe.parity_prompts)
    rows = [Row(answer.prompt_ids, answer.token_ids[: answer.num_clear]) for answer in answers]
    hf_dir = checkpoint.directory("hf")
    filler = load_tokenizer(hf_dir / "tokenizer.json").token_to_id(FILLER)
    assert filler is not None, f"a byte-level tokenizer has a token {FILLER!r}"
    config = json.loads((hf_dir / "config.json").read_text(encoding="utf-8"))
    served = gguf.path(gguf.record.file_names[served_gguf_type(gguf.record.file_names)])
    engines = {
        TRANSFORMERS: partial(transformers_scores, hf_dir, rows),
        LLAMA: partial(llama_scores, served, rows, filler, config["vocab_size"], resources, output.path("server.log")),
        VLLM: partial(vllm_scores, hf_dir, rows, output.path("vllm.log")) if optional.vllm else None,
    }
    compared: dict[str, EngineParity] = {}
    for name, score in engines.items():
        output.report(Progress(len(compared), len(engines), "engines", f"{name} scores our answers"))
        if score is None:
            compared[name] = _skipped(f"{name} is not on PATH")
            continue
        with reproducible_arithmetic(NUM_THREADS):
            scores = score()
        bound = "max_served_log_probability" if name == LLAMA else "max_parity_log_probability"
        compared[name] = _compare(answers, scores, bound, getattr(recipe, bound))
    why_not = _why_no_calls(config["num_nextn_predict_layers"], checkpoint.record.is_chat_trained)
    compared[DRAFTING] = (
        _skipped(why_not) if why_not else _compare_drafted_calls(served, resources, output, recipe.parity_calls)
    )
    output.path("parity.json").write_text(
        json.dumps({name: each.model_dump(mode="json") for name, each in compared.items()}, indent=1) + "\n"
    )
    refusals = tuple(f"parity: {name} {reason}" for name, each in compared.items() for reason in each.reasons)
    refusals += _too_few(answers, recipe)
    return ParityReport(accepted=not refusals, num_prompts=len(answers), engines=compared, refusals=refusals)


def _why_no_calls(num_mtp_layers: int, is_chat_trained: bool) -> str:
    """Empty where calls are compared."""
    if not num_mtp_layers:
        return "the model has no MTP layer"
    return "" if is_chat_trained else "the model knows no conversations"


def _skipped(why: str) -> EngineParity:
    return EngineParity(skipped=why, num_tokens=0, max_log_probability_difference=None, reasons=())


def _compare_drafted_calls(
    gguf_path: Path, resources: ServingResources, output: Output, num_calls: int
) -> EngineParity:
    """The same file in two servers, of which one drafts."""
    made = []
    for is_drafting, log_name in ((False, "server.log"), (True, "drafting-server.log")):
        doing = f"llama.cpp writes {num_calls} function calls {'with' if is_drafting else 'without'} drafts"
        output.report(Progress(len(made), 2, "servers", doing))
        made.append(calls_of_file(gguf_path, resources, output.path(log_name), num_calls, is_drafting=is_drafting))
    pairs = list(zip(made[0].calls, made[1].calls, strict=True))
    reasons = [
        f"writes call {number} of {num_calls} as {drafted.name}({drafted.arguments}), without drafts "
        f"{plain.name}({plain.arguments})"
        for number, (plain, drafted) in enumerate(pairs, 1)
        if plain != drafted
    ]
    return EngineParity(
        skipped="",
        num_tokens=sum(plain.num_tokens for plain, _ in pairs),
        max_log_probability_difference=None,
        reasons=_first_reasons(reasons, "calls"),
    )


def _first_reasons(reasons: Sequence[str], noun: str) -> tuple[str, ...]:
    """As many as are named, and the number of the others."""
    hidden = len(reasons) - MAX_REASONS
    return tuple(reasons[:MAX_REASONS]) + ((f"differs at {hidden} further {noun}",) if hidden > 0 else ())


def _answers(reference: Artifact[Reference], num_prompts: int) -> list[ReferenceAnswer]:
    """The first answers that have a token to compare."""
    entries = json.loads(reference.path("reference.json").read_text())
    answers = [ReferenceAnswer.model_validate(entry) for entry in entries]
    return [answer for answer in answers if answer.num_clear][:num_prompts]


def _too_few(answers: Sequence[ReferenceAnswer], recipe: ParityRecipe) -> tuple[str, ...]:
    if len(answers) >= recipe.parity_prompts:
        return ()
    return (
        f"parity: {len(answers)} prompts have a token to compare, release.recipe.parity_prompts asks for "
        f"{recipe.parity_prompts}: lower it, or raise evaluation.recipe.max_document_tokens for more prompts",
    )


def _compare(
    answers: Sequence[ReferenceAnswer], scores: Sequence[Sequence[TokenScore]], bound: str, max_difference: float
) -> EngineParity:
    num_tokens, largest, reasons = 0, 0.0, []
    for answer, row in zip(answers, scores, strict=True):
        compared = _leading_greedy(row)
        num_tokens += len(compared)
        for score, ours in zip(compared, answer.log_probabilities, strict=False):
            difference = abs(score.log_probability - ours)
            largest = max(largest, difference) if math.isfinite(difference) else math.inf
        reasons += _reasons(answer, row, bound, max_difference)
    return EngineParity(
        skipped="",
        num_tokens=num_tokens,
        max_log_probability_difference=round(largest, 6) if math.isfinite(largest) else None,
        reasons=_first_reasons(reasons, "prompts"),
    )


def _leading_greedy(row: Sequence[TokenScore]) -> Sequence[TokenScore]:
    return row[: next((position for position, score in enumerate(row) if not score.is_greedy), len(row))]


def _reasons(answer: ReferenceAnswer, row: Sequence[TokenScore], bound: str, max_difference: float) -> Iterator[str]:
    """The first difference of one prompt, with its position; `bound` is the name of the setting."""
    where = f"at {'message' if answer.is_chat else 'prompt'} {answer.prompt[:40]!r}, position"
    for position, (score, ours) in enumerate(zip(row, answer.log_probabilities, strict=False)):
        if not score.is_greedy:
            yield f"{where} {position}: would not choose our token {answer.token_ids[position]}"
            return
        if not abs(score.log_probability - ours) <= max_difference:
            yield (
                f"{where} {position}: log-probability {score.log_probability:.6f} of token "
                f"{answer.token_ids[position]}, ours is {ours:.6f}; release.recipe.{bound} allows "
                f"{max_difference}"
            )
            return
