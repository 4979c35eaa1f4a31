"""The data that a phase trains on, step by step: packed rows, read ahead, preference pairs, or answers that it samples
itself."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from configs.files.block_reader import BlockReader
from configs.schema import PolicyObjective, PpoObjective
from model.architecture.adapters import without_adapters
from model.generation.generation import InProcessEngine
from model.text.tokenizer_layout import tokenizer_for_text
from tasks.data.packing.packed_rows import PackedRows
from tasks.training.loop.batches import Rows, read_micro_batches, refuse_foreign_tokens
from tasks.training.loop.frozen_models import open_frozen, score_answers
from tasks.training.loop.pair_data import PairData
from tasks.training.loop.prefetch import Prefetcher
from tasks.training.parallel.control import on_first_rank
from tasks.training.parallel.micro_batch import MicroBatch
from tasks.training.parallel.sequence_parallel import own_parts
from tasks.training.parallel.trainable import DividedModel, Trainable
from tasks.training.plan.answer_batches import answers_at_once
from tasks.training.policy.answer_rows import AnswerRows, RouteComparison, target_log_probabilities
from tasks.training.policy.critic import Estimates, estimate_advantages, token_values
from tasks.training.policy.divided_passes import score_targets
from tasks.training.policy.dynamic_temperature import step_temperature
from tasks.training.policy.episodes import episode_metrics
from tasks.training.policy.policy import policy_updates, refuse_mismatch
from tasks.training.policy.prompt_order import PromptOrder
from tasks.training.policy.prompts import Prompt
from tasks.training.policy.rank_shares import compute_rows, gather, share_of
from tasks.training.policy.rollouts import (
    SAMPLING_PARTS,
    Rollout,
    RolloutEngine,
    add_scores,
    describe_groups,
    policy_model,
    sample_answers,
    sample_until_informative,
)
from tasks.training.policy.served_engine import ServedEngine
from tasks.training.schedule.schedules import StepPlan, plan_step
from tasks.training.state.job import TrainingJob
from tasks.training.state.position import Position
from tasks.training.state.rollout_weights import write_rollout_weights

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from configs.schema import TrainingRecipe
    from tasks.training.parallel.ranks import Ranks

LOGGED_GROUPS = 2
"""Groups of each step that rollouts.jsonl keeps."""
MAX_EVIDENCE_PIECES = 1000
"""Pieces of documents that the evidence of one spike names."""


@dataclass(frozen=True)
class StepData:
    micro_batches: list[MicroBatch]
    """None where a step has nothing to learn: no optimizer step is taken then."""
    later_updates: Sequence[Callable[[], list[MicroBatch]]] = ()
    """What makes the micro-batches of further optimizer updates of the step, each after the one before was taken."""
    critic_updates: list[list[MicroBatch]] = field(default_factory=list)
    """The critic's micro-batches of every update of the step; none without a critic."""
    metrics: dict[str, float] = field(default_factory=dict)
    rollouts: list[dict[str, object]] = field(default_factory=list)
    """Lines of rollouts.jsonl."""
    refilled: dict[str, int] = field(default_factory=dict)
    """Further prompts by domain that the step asked in place of groups without signal."""


class PhaseData(Protocol):
    """The data of a step depend on the position before it and, for a policy, on the weights: never on what was read
    before."""

    def read(self, plan: StepPlan, position: Position) -> StepData: ...

    def describe(self, plan: StepPlan, position: Position) -> list[dict[str, object]]:
        """Where the step's rows come from, for the evidence of a spike."""
        ...

    def close(self) -> None: ...


class PackedData:
    """This rank's part of the packed rows; the next step's are read while the present one computes."""

    def __init__(
        self,
        rows: Rows,
        num_sequences: int,
        vocab_size: int,
        ranks: Ranks,
        device: torch.device,
        following: Callable[[StepPlan], StepPlan | None],
    ) -> None:
        self.rows, self.num_sequences, self.vocab_size, self.ranks, self.device = (
            rows,
            num_sequences,
            vocab_size,
            ranks,
            device,
        )
        self._ahead = Prefetcher(self._load, following)

    def read(self, plan: StepPlan, position: Position) -> StepData:
        """Raises ValueError for token ids that the model has no row for."""
        return self._ahead.read(plan)

    def _load(self, plan: StepPlan) -> StepData:
        data = self.ranks.data
        batches = read_micro_batches(self.rows, plan, data.rank, data.size, self.num_sequences, self.device)
        refuse_foreign_tokens(batches, self.vocab_size)
        return StepData(own_parts(batches, self.ranks))

    def describe(self, plan: StepPlan, position: Position) -> list[dict[str, object]]:
        assert isinstance(self.rows, PackedRows), self.rows
        return self.rows.describe(plan.first_row, plan.first_row + plan.num_rows)[:MAX_EVIDENCE_PIECES]

    def close(self) -> None:
        self._ahead.close()
        self.rows.close()


class PolicyData:
    """Answers of the present model to the prompts of the step, which all ranks know. Each rank samples its share of the
    groups with the whole model; of a server rank 0 asks for all."""

    def __init__(self, job: TrainingJob, trainable: Trainable) -> None:
        assert isinstance(job.recipe.objective, PolicyObjective), job.recipe.objective
        self.job, self.trainable, self.model = job, trainable, trainable.model
        self.objective, self.ranks = job.recipe.objective, trainable.ranks.data
        self.num_sequences, self.dtype = job.resources.micro_batch_sequences, job.recipe.dtype
        self.tokenizer = tokenizer_for_text(job.tokenizer_path)
        solved_path = Path(job.solved_path) if job.solved_path else None
        self.prompts = PromptOrder(Path(job.prompts_path), self.tokenizer, job.recipe, solved_path)
        self.comparison: RouteComparison | None = None
        """Of the routes before a step's first update, while these are computed."""
        self.reference = self.reward_model = None
        if trainable.critic is not None and job.recipe.adapter.kind == "none":
            self.reference = open_frozen(job, job.reference_dir or job.start_weights_dir, trainable.ranks)
        if job.reward_model_dir:
            self.reward_model = open_frozen(job, job.reward_model_dir, trainable.ranks, is_scored=True)

    def read(self, plan: StepPlan, position: Position) -> StepData:
        size, step = self.objective.samples_per_prompt, position.step + 1
        started, seconds = time.perf_counter(), dict.fromkeys(SAMPLING_PARTS, 0.0)
        self._set_temperature(position)
        rollouts = self._sample(plan, position, seconds)
        seconds["rollout_seconds"] = time.perf_counter() - started - sum(seconds.values())
        device, parts = self.trainable.device, self.trainable.ranks
        self.comparison = RouteComparison(device) if self.objective.routes != "ignore" else None
        updates = policy_updates(
            self._log_probabilities,
            rollouts,
            self.objective,
            self.num_sequences,
            device,
            None if self.trainable.critic is None else self._critique,
            self.ranks,
            parts.tensor.size * parts.context.size,
            self.job.resources.micro_batch_tokens * parts.context.size,
        )
        if self.comparison is not None:
            updates.metrics["route_difference"] = self.comparison.share()
            self.comparison = None
        refuse_mismatch(updates.metrics, self.objective, step)
        every = [partial(self._own_parts, update) for update in updates.policy]
        first, later = (every[0](), every[1:]) if every else ([], [])
        refilled = Counter(rollout.prompt.domain for rollout in rollouts[plan.num_rows :: size])
        played = [rollout.episode for rollout in rollouts if rollout.episode is not None]
        updates.metrics.update(episode_metrics(played), **seconds, refilled_groups=float(refilled.total()))
        updates.metrics["temperature"] = self.objective.temperature
        described = describe_groups(rollouts, size, LOGGED_GROUPS, step)
        critic = [own_parts(update, parts) for update in updates.critic]
        return StepData(first, later, critic, updates.metrics, described, dict(refilled))

    def _own_parts(self, update: Callable[[], list[MicroBatch]]) -> list[MicroBatch]:
        return own_parts(update(), self.trainable.ranks)

    def _set_temperature(self, position: Position) -> None:
        """Let the step's sampling and loss have the temperature of its position."""
        assert position.policy is not None, position
        configured = self.job.recipe.objective
        assert isinstance(configured, PolicyObjective), configured
        temperature = step_temperature(configured, position.policy.mean_rewards)
        self.objective = configured.model_copy(update={"temperature": temperature})

    def _sample(self, plan: StepPlan, position: Position, seconds: dict[str, float]) -> list[Rollout]:
        """The step's answers, also those to further prompts, the same on all ranks. Adds to `seconds` what the engine's
        weights and this rank's rewards took."""
        started = time.perf_counter()
        engine, size = self._engine(plan, position.step + 1), self.objective.samples_per_prompt
        seconds["weight_sync_seconds"] += time.perf_counter() - started
        refilled = Counter(self._refilled(position))
        recipe = self.job.recipe.model_copy(update={"objective": self.objective})

        def answer(prompts: Sequence[Prompt], first_group: int) -> list[Rollout]:
            eos, step = self.job.eos_token_ids, position.step + 1
            return sample_answers(engine, self.tokenizer, prompts, recipe, eos, step, first_group, seconds)

        def sample(prompts: Sequence[Prompt], first_group: int) -> list[Rollout]:
            if isinstance(engine, ServedEngine):
                rollouts = on_first_rank(lambda: answer(prompts, first_group))
            else:
                share = share_of(len(prompts), self.ranks)
                rollouts = gather(answer(prompts[share], first_group + share.start), self.ranks)
            return rollouts if self.reward_model is None else self._scored(rollouts, position.step + 1, seconds)

        def further(domains: Sequence[str]) -> list[Prompt]:
            prompts = self.prompts.further((plan.first_row + plan.num_rows) // size, domains, refilled)
            refilled.update(prompt.domain for prompt in prompts)
            return prompts

        prompts = self._prompts_of(plan, position)
        return sample_until_informative(sample, prompts, further, self.objective.max_refills, size)

    def _engine(self, plan: StepPlan, step: int) -> RolloutEngine:
        """The engine of a step, with its weights; all ranks call it."""
        if self.objective.rollouts == "in_process":
            at_once = answers_at_once(self.job.recipe, self.job.resources, plan.num_rows)
            model = policy_model(self.model, self.dtype)
            return InProcessEngine(model, weights_version=str(step), batch_sequences=at_once)
        work_dir = Path(self.job.work_dir)
        hf_dir = write_rollout_weights(self.job, self.trainable)
        # With digits of the key: another run that uses the server has steps of the same numbers.
        version = f"{self.job.recipe.phase}-{work_dir.name[:12]}-{step}"
        server = self.job.resources.rollout_server
        return ServedEngine(self.objective.rollouts, server, hf_dir, version, self.job.recipe.model)

    def _scored(self, rollouts: Sequence[Rollout], step: int, seconds: dict[str, float]) -> list[Rollout]:
        """With the reward model's scores; all ranks call it with the same answers. Adds what it took to `seconds`."""
        assert self.reward_model is not None, self.job.reward_model_dir
        started, rows = time.perf_counter(), [rollout.row for rollout in rollouts]
        scores = score_answers(self.reward_model, rows, self.num_sequences, self.job.resources.micro_batch_tokens)
        seconds["reward_seconds"] += time.perf_counter() - started
        return add_scores(rollouts, scores, self.objective, step)

    def _log_probabilities(self, rows: AnswerRows) -> Tensor:
        return self._likelihood(self.trainable, rows, self.comparison)

    def _likelihood(self, divided: DividedModel, rows: AnswerRows, comparison: RouteComparison | None = None) -> Tensor:
        """log p(target), (B, T), at the temperature of the sampling."""
        temperature = self.objective.temperature
        if divided.is_divided:
            return score_targets(divided, rows, temperature, self.num_sequences, comparison)
        model = policy_model(divided.model, self.dtype)
        return compute_rows(
            lambda own: target_log_probabilities(model, own, temperature, self.num_sequences, comparison),
            rows,
            self.ranks,
        )

    def _values(self, critic: DividedModel, rows: AnswerRows) -> Tensor:
        if critic.is_divided:
            return score_targets(critic, rows, 1.0, self.num_sequences)
        model = policy_model(critic.model, self.dtype)
        return compute_rows(lambda own: token_values(model, own, self.num_sequences), rows, self.ranks)

    def _critique(self, rows: AnswerRows, trainer_BT: Tensor, rewards_B: Tensor) -> Estimates:
        assert isinstance(self.objective, PpoObjective), self.objective
        assert self.trainable.critic is not None, self.objective
        rows = replace(rows, replays=False)
        values_BT = self._values(self.trainable.critic, rows)
        if self.reference is not None:
            reference_BT = self._likelihood(self.reference, rows)
        else:
            with without_adapters(self.model):
                reference_BT = self._likelihood(self.trainable, rows)
        return estimate_advantages(rows, rewards_B, values_BT, trainer_BT, reference_BT, self.objective)

    def describe(self, plan: StepPlan, position: Position) -> list[dict[str, object]]:
        pieces: list[dict[str, object]] = [{"prompt_id": prompt.id} for prompt in self._prompts_of(plan, position)]
        return pieces[:MAX_EVIDENCE_PIECES]

    def _prompts_of(self, plan: StepPlan, position: Position) -> list[Prompt]:
        size = self.objective.samples_per_prompt
        first, stop = plan.first_row // size, (plan.first_row + plan.num_rows) // size
        return self.prompts.groups(first, stop, self._refilled(position))

    def _refilled(self, position: Position) -> dict[str, int]:
        assert position.policy is not None, position
        return position.policy.num_refilled

    def close(self) -> None:
        pass


class PreferenceData(PairData):
    """The pairs of each step as a step's data."""

    def read(self, plan: StepPlan, position: Position) -> StepData:
        return StepData(self.micro_batches(plan))


def open_phase_data(job: TrainingJob, trainable: Trainable) -> PhaseData:
    """Raises ValueError where the packed rows hold less than the budget, or rows of another length."""
    recipe = job.recipe
    if isinstance(recipe.objective, PolicyObjective):
        return PolicyData(job, trainable)
    if recipe.reads_pairs:
        return PreferenceData(job, trainable)
    rows = PackedRows(job.packed, job.shards, BlockReader())
    packed_dir = job.packed[0].directory
    if rows.sequence_length != recipe.sequence_length:
        raise ValueError(
            f"phase {recipe.phase} trains on {recipe.sequence_length} tokens per row, {packed_dir} holds rows of "
            f"{rows.sequence_length}: pack the phase with the same sequence_length"
        )
    if len(rows) * recipe.sequence_length < recipe.num_tokens:
        raise ValueError(
            f"phase {recipe.phase} wants {recipe.num_tokens} tokens, {packed_dir} holds {len(rows)} rows of "
            f"{recipe.sequence_length}: pack the phase with the same budget"
        )
    return PackedData(
        rows,
        job.resources.micro_batch_sequences,
        recipe.model.vocab_size,
        trainable.ranks,
        trainable.device,
        following=lambda plan: next_plan(recipe, plan),
    )


def next_plan(recipe: TrainingRecipe, plan: StepPlan) -> StepPlan | None:
    """The step after this one; None at the phase's end."""
    num_tokens = plan.end_tokens - recipe.course_start_tokens
    return plan_step(recipe, num_tokens) if num_tokens < recipe.num_tokens else None
