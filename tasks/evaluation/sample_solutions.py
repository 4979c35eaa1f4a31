"""Step: asks checkpoints prompts k times and counts right answers; rejection sampling and distillation keep some.

In: a trained checkpoint (hf/ with tokenizer.json), or one of each expert, and the decontaminated prompts. Out:
solved.parquet with the right and the kept answers to every prompt, counted, and chats/ with those that are kept, in the
shape in which collect_chats leaves conversations; none where a policy phase only measures how hard its prompts are
(objective.difficulty). The verifiers and environments are those of reinforcement learning. rollouts.jsonl shows some
answers. One model after the other answers: whole on one device, or on a server that reads its weights.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from configs.schema import DistillationObjective, EpisodeRecipe
from infra.step import Artifact, Output, Progress, Record, canonical_json, step
from model.text.chat_template import encode, render_to_train
from tasks.data.environments.environments import OPENERS
from tasks.data.prompts.verifiers import verify_answers
from tasks.data.records.documents import CHAT_COLUMNS, TRAIN, document_id
from tasks.data.seeds.verify_solutions import write_rows
from tasks.evaluation.engine import end_token_ids, load_tokenizer, reproducible_arithmetic
from tasks.evaluation.intervals import PassAtK, best_of_k
from tasks.evaluation.open_engine import open_engine
from tasks.training.policy.episode_messages import conversation
from tasks.training.policy.prompt_difficulty import SOLVED_FILE

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from configs.schema import EvaluationResources, SolutionRecipe
    from tasks.data.decontamination.decontaminate_documents import DecontaminatedDocuments
    from tasks.training.policy.episodes import Episode
    from tasks.training.policy.prompts import Prompt
    from tasks.training.policy.rollouts import RolloutEngine
    from tasks.training.state.trained_checkpoint import TrainedCheckpoint

SOURCE = "solutions"
"""Beginning of the source's name of a kept answer; the phase and the digest of the weights follow."""
CHATS_FILE, ROLLOUTS_FILE = "chats/part-00000.parquet", "rollouts.jsonl"
SOLVED_COLUMNS = "id string, phase string, domain string, kind string, num_samples long, num_right long, num_kept long"
PROMPTS_PER_BLOCK, ANSWERS_PER_BLOCK = 64, 4096
"""Most prompts, and answers to them, that are sampled between two progress reports; the seeds count these blocks."""
NUM_SHOWN_PROMPTS = 8
WITHOUT_TOOLS = EpisodeRecipe(max_turns=1, max_turn_tokens=1, max_observation_chars=1, tool_seconds={"others": 1.0})
"""Limits that no prompt without an environment reaches."""
REPEATED, OTHER_FORM, ENOUGH, SHORT = "repeated", "other_form", "enough_kept", "short"


class DomainSolutions(BaseModel):
    """What one model answered to the prompts of one domain."""

    phase: str
    """The phase that left the model."""
    domain: str
    num_prompts: int
    num_answers: int
    num_right: int
    num_kept: int
    pass_at: tuple[PassAtK, ...]


class SampledSolutions(Record):
    num_prompts: int
    num_too_long: int
    """Prompts that leave no room for an answer; they are not asked."""
    num_answers: int
    num_right: int
    num_without_verdict: int
    num_solved_prompts: int
    """Prompts with a right answer."""
    num_kept: int
    num_kept_tokens: int
    left_out: dict[str, int]
    """Right answers that are not kept: repeated, other_form (the conversation would not be the sampled tokens again),
    enough_kept (max_kept_per_prompt), short (dropped_shortest_share)."""
    pass_at: tuple[PassAtK, ...]
    """For k = 1, 2, 4 ... and samples_per_prompt: what best-of-k with this verifier reaches."""
    domains: tuple[DomainSolutions, ...]
    """Of each model the domains that it answered."""


@step(
    content=(CHATS_FILE, SOLVED_FILE),
    evidence=(ROLLOUTS_FILE,),
    distributions=("torch", "tokenizers", "pyarrow", "safetensors", "numpy", "scipy"),
)
def sample_solutions(
    *,
    checkpoint: Artifact[TrainedCheckpoint] | None = None,
    prompts: Artifact[DecontaminatedDocuments],
    recipe: SolutionRecipe,
    resources: EvaluationResources,
    output: Output,
    **experts: Artifact[TrainedCheckpoint],
) -> SampledSolutions:
    """`checkpoint` answers every prompt without an environment; of distillation it is None, and `experts`, by their
    phases, answer those of their domains, all by one tokenizer. Too few right answers are refused later, so that
    another budget samples nothing again. An answer's draws depend on seed, block and its position in the block, not on
    batches; a server draws by itself. Raises VerifierError for a verifier that failed, NonFiniteLogitsError for broken
    weights, EngineError for a server that stays away or whose answers do not fit."""
    from tasks.training.policy.prompts import refuse_lost_domains, with_room

    objective, parts, num_too_long = recipe.objective, list[Solving](), 0
    asked_of = _prompts_of_models(checkpoint, experts, prompts, recipe)
    for model, every in asked_of:
        tokenizer = load_tokenizer(model.path("hf/tokenizer.json"))
        asked, phase = with_room(every, tokenizer, recipe.sequence_length, objective), model.record.phase
        if experts:
            refuse_lost_domains(phase, every, asked, recipe.sequence_length, objective)
        num_too_long += len(every) - len(asked)
        parts.append(Solving(tokenizer, recipe, f"{SOURCE}/{phase}/{model.digest[:12]}", phase))
        _solve(parts[-1], model, asked, resources, output)
    chats = [chat for part in parts for chat in part.chats]
    write_rows(output.path(CHATS_FILE), chats, f"{CHAT_COLUMNS}, split string")
    solved = [row for part in parts for row in part.solved]
    write_rows(output.path(SOLVED_FILE), solved, SOLVED_COLUMNS)
    shown = [line for part in parts for line in part.shown]
    output.path(ROLLOUTS_FILE).write_text("".join(json.dumps(line) + "\n" for line in shown))
    right = [row["num_right"] for row in solved]
    return SampledSolutions(
        num_prompts=len(solved),
        num_too_long=num_too_long,
        num_answers=len(solved) * objective.samples_per_prompt,
        num_right=sum(right),
        num_without_verdict=sum(part.num_without_verdict for part in parts),
        num_solved_prompts=sum(map(bool, right)),
        num_kept=len(chats),
        num_kept_tokens=sum(sum(part.chat_tokens) for part in parts),
        left_out=dict(sorted(sum((part.left_out for part in parts), Counter()).items())),
        pass_at=best_of_k(right, objective.samples_per_prompt),
        domains=_domain_solutions(solved, objective.samples_per_prompt),
    )


def _prompts_of_models(
    checkpoint: Artifact[TrainedCheckpoint] | None,
    experts: Mapping[str, Artifact[TrainedCheckpoint]],
    prompts: Artifact[DecontaminatedDocuments],
    recipe: SolutionRecipe,
) -> list[tuple[Artifact[TrainedCheckpoint], list[Prompt]]]:
    """The models that answer, in the order in which they do, each with its prompts."""
    from tasks.training.policy.prompts import read_prompts

    every = read_prompts(prompts.path("prompts.parquet"))
    if not isinstance(recipe.objective, DistillationObjective):
        assert checkpoint is not None and not experts, (checkpoint, [*experts])
        asked = [prompt for prompt in every if not recipe.domains or prompt.domain in recipe.domains]
        # A conversation that is kept has one answer: tasks of environments are not asked.
        return [(checkpoint, [prompt for prompt in asked if prompt.kind not in OPENERS])]
    assert checkpoint is None and {*experts} == {each.phase for each in recipe.objective.experts}, [*experts]
    return [
        (experts[each.phase], [prompt for prompt in every if prompt.domain in each.domains])
        for each in recipe.objective.experts
    ]


def _solve(
    solving: Solving,
    checkpoint: Artifact[TrainedCheckpoint],
    asked: Sequence[Prompt],
    resources: EvaluationResources,
    output: Output,
) -> None:
    """Ask a model all of its prompts; its weights are in memory only until it has answered."""
    recipe = solving.recipe
    with reproducible_arithmetic(recipe.num_threads):
        engine = open_engine(checkpoint, recipe.objective.rollouts, recipe.dtype, resources)
        size = min(PROMPTS_PER_BLOCK, ANSWERS_PER_BLOCK // recipe.objective.samples_per_prompt)
        for start in range(0, len(asked), size):
            output.report(Progress(start, len(asked), "prompts", f"{solving.phase} is sampling answers"))
            solving.solve(engine, asked[start : start + size], start)
    solving.leave_out_shortest(recipe.objective.dropped_shortest_share)


def _domain_solutions(solved: Sequence[Mapping[str, Any]], num_samples: int) -> tuple[DomainSolutions, ...]:
    answered: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in solved:
        answered.setdefault((row["phase"], row["domain"]), []).append(row)
    return tuple(
        DomainSolutions(
            phase=phase,
            domain=domain,
            num_prompts=len(rows),
            num_answers=len(rows) * num_samples,
            num_right=sum(row["num_right"] for row in rows),
            num_kept=sum(row["num_kept"] for row in rows),
            pass_at=best_of_k([row["num_right"] for row in rows], num_samples),
        )
        for (phase, domain), rows in answered.items()
    )


class Solving:
    """What was kept of one model's answers so far."""

    def __init__(self, tokenizer: Tokenizer, recipe: SolutionRecipe, source: str, phase: str) -> None:
        self.tokenizer, self.recipe, self.source, self.phase = tokenizer, recipe, source, phase
        self.stops = end_token_ids(tokenizer)
        self.specials = {*tokenizer.get_added_tokens_decoder()}
        self.chats: list[dict[str, Any]] = []
        self.solved: list[dict[str, Any]] = []
        self.shown: list[dict[str, Any]] = []
        self.left_out: Counter[str] = Counter()
        self.num_without_verdict = 0
        self.answer_tokens: list[int] = []
        """Of each conversation, those that the assistant wrote."""
        self.chat_tokens: list[int] = []
        """Of each conversation, all of them."""

    def solve(self, engine: RolloutEngine, prompts: Sequence[Prompt], start: int) -> None:
        """Sample and judge the answers to a block of prompts; `start` is the number of its first."""
        from tasks.training.policy.rollouts import MAX_SHOWN_ANSWER_CHARS

        size = self.recipe.objective.samples_per_prompt
        episodes = self._play(engine, prompts, start)
        asked = [prompt.asked for prompt in prompts for _ in range(size)]
        verdicts = verify_answers(asked, [episode.written for episode in episodes])
        self.num_without_verdict += sum(verdict is None for verdict in verdicts)
        for number, prompt in enumerate(prompts):
            own = slice(number * size, (number + 1) * size)
            right = [verdict is True for verdict in verdicts[own]]
            texts, num_kept = [self._text(episode.token_ids) for episode in episodes[own]], 0
            if self.recipe.keeps_answers:
                num_kept = self._keep(prompt, start + number, episodes[own], texts, right)
            counted = {"num_samples": size, "num_right": sum(right), "num_kept": num_kept}
            described = {"id": prompt.id, "phase": self.phase, "domain": prompt.domain, "kind": prompt.kind}
            self.solved.append(described | counted)
            if len(self.shown) < NUM_SHOWN_PROMPTS:
                line = {"phase": self.phase, "prompt_id": prompt.id, "question": prompt.question}
                answer = prompt.answer[:MAX_SHOWN_ANSWER_CHARS]
                self.shown.append(
                    {"step": 0} | line | {"answer": answer, "samples": texts, "rewards": list(map(float, right))}
                )

    def _play(self, engine: RolloutEngine, prompts: Sequence[Prompt], start: int) -> list[Episode]:
        """The answers to a block of prompts, prompt by prompt; in turns where a prompt has an environment."""
        from model.generation.generation import Sampling, sampling_draws
        from tasks.training.policy.episodes import Episode, EpisodePlayer
        from tasks.training.policy.rollouts import sampling_seed

        objective = self.recipe.objective
        thinks, seed = objective.enable_thinking, sampling_seed(self.recipe.seed, start)
        limits = objective.episodes if isinstance(objective, DistillationObjective) else WITHOUT_TOOLS
        sampling = Sampling(objective.max_new_tokens, objective.temperature, stop_token_ids=self.stops, seed=seed)
        asked_ids = [(prompt, prompt.token_ids(self.tokenizer, thinks)) for prompt in prompts]
        asked = [each for each in asked_ids for _ in range(objective.samples_per_prompt)]
        episodes = [
            Episode(token_ids, draws, prompt.open_environment(), prompt.kind)
            for (prompt, token_ids), draws in zip(asked, sampling_draws(sampling, len(asked)), strict=True)
        ]
        player = EpisodePlayer(self.tokenizer, limits, self.stops, thinks)
        player.play(lambda rows, given: engine.generate(rows, sampling, engine.weights_version, given), episodes)
        return episodes

    def _keep(
        self, prompt: Prompt, number: int, episodes: Sequence[Episode], texts: Sequence[str], right: Sequence[bool]
    ) -> int:
        """Make conversations of the first right answers to a prompt that differ; their number."""
        kept: set[str] = set()
        for piece, (episode, text) in enumerate(zip(episodes, texts, strict=True)):
            if not right[piece]:
                continue
            messages = conversation(prompt, episode.turns, self.recipe.objective.enable_thinking)
            again, trained = encode(self.tokenizer, render_to_train(messages, json.loads(prompt.tools)))
            if text in kept:
                self.left_out[REPEATED] += 1
            elif not self._reads_alike(again, episode.row):
                self.left_out[OTHER_FORM] += 1
            elif len(kept) == self.recipe.objective.max_kept_per_prompt:
                self.left_out[ENOUGH] += 1
            else:
                kept.add(text)
                self.answer_tokens.append(sum(trained))
                self.chat_tokens.append(len(again))
                self.chats.append(self._row(prompt, number, piece, canonical_json(messages)))
        return len(kept)

    def leave_out_shortest(self, share: float) -> None:
        """Drop the conversations of this share of the prompts that have some, those with the shortest answers; of equal
        ones those that were asked first."""
        sizes: dict[int, list[int]] = {}
        for chat, size in zip(self.chats, self.answer_tokens, strict=True):
            sizes.setdefault(chat["offset"], []).append(size)
        means = sorted((sum(own) / len(own), number) for number, own in sizes.items())
        dropped = {number for _, number in means[: int(share * len(means))]}
        self.left_out.update({SHORT: sum(len(sizes[number]) for number in dropped)} if dropped else {})
        for number in dropped:
            self.solved[number]["num_kept"] = 0
        kept = [place for place, chat in enumerate(self.chats) if chat["offset"] not in dropped]
        self.chats = [self.chats[place] for place in kept]
        self.answer_tokens = [self.answer_tokens[place] for place in kept]
        self.chat_tokens = [self.chat_tokens[place] for place in kept]

    def _text(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def _reads_alike(self, first: Sequence[int], second: Sequence[int]) -> bool:
        """Whether two sequences are the same text with the same special tokens."""
        texts = {self._text(token_ids) for token_ids in (first, second)}
        specials = {tuple(each for each in token_ids if each in self.specials) for token_ids in (first, second)}
        return len(texts) == len(specials) == 1

    def _row(self, prompt: Prompt, number: int, piece: int, messages: str) -> dict[str, Any]:
        return {
            "id": document_id(self.source, number, piece),
            "source": self.source,
            "offset": number,
            "piece": piece,
            "collection": f"{SOURCE}/{prompt.domain}",
            "licence": "",
            "kind": prompt.kind,
            "messages": messages,
            "tools": prompt.tools,
            "num_bytes": len(messages.encode()) + len(prompt.tools.encode()),
            "split": TRAIN,
        }
