"""Plays episodes: the assistant writes a turn, tools answer its calls, and so on until it answers.

A turn ends with the role token that the model samples: `<|observation|>` after calls, `<|user|>` or `<|endoftext|>`
after an answer. What tools answer is a part of the row that the model reads, and is never trained. Each episode depends
on the weights, its prompt and its draws only, not on the others that are played with it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from configs.schema import EpisodeRecipe
from model.generation.generation import Generation
from model.text.chat_template import answer_of, encode, observation
from tasks.data.environments.environment import Environment, ToolError, ToolTimeoutError
from tasks.data.prompts.function_calls import written_calls
from tasks.data.prompts.verifiers import WrittenAnswer
from tasks.data.sandbox.code_sandbox import NoSandboxError
from tasks.training.policy.tool_calls import tool_threads

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Calls = list[tuple[str, dict[str, str]]]
Generate = Callable[[Sequence[list[int]], Sequence[Sequence[float]]], Generation]
"""Continues rows, each by as many tokens at most as it has draws."""
Ending = Literal["answered", "format_error", "cut_off", "too_many_turns", "timed_out", "tool_failed"]
"""cut_off: a turn or the whole episode had no token left. tool_failed: a tool raised what is no ToolError. All but the
first earn nothing."""
Answers = list[tuple[str, ToolError | None]]
"""What each call gives the assistant to read, with its error."""
SHOWN_ENDINGS: tuple[Ending, ...] = ("format_error", "cut_off", "too_many_turns", "tool_failed")
"""Endings whose shares are metrics."""
MAX_LOGGED_CHARS = 300


class Turn(NamedTuple):
    role: Literal["assistant", "tool"]
    text: str


class BrokenToolError(RuntimeError):
    """A tool that failed itself: neither an answer nor a refusal."""


@dataclass(frozen=True)
class EpisodeFigures:
    """How an episode in an environment was played."""

    kind: str
    """Of its prompt, which names the environment."""
    ending: Ending
    turns: tuple[Turn, ...]
    num_calls: int
    num_failed_calls: int
    num_timeouts: int
    num_tool_tokens: int


@dataclass
class Episode:
    """A row that grows: a prompt, what was written after it, and by whom."""

    prompt_ids: list[int]
    draws: Sequence[float]
    """One for each token after the prompt; those of tools' tokens are not used."""
    environment: Environment | None
    """None for a prompt that is answered in one turn, without tools."""
    kind: str
    """Of the prompt: it names the environment."""
    token_ids: list[int] = field(default_factory=list)
    """After the prompt, of assistant and tools."""
    log_probabilities: list[float] = field(default_factory=list)
    """Of each of them when it was sampled; 0 where a tool wrote."""
    tool_spans: list[tuple[int, int]] = field(default_factory=list)
    """Where in token_ids tools wrote: from, up to."""
    routes_LTK: Tensor | None = None
    """The experts of each token when it was first read; None where they are not kept."""
    turns: list[Turn] = field(default_factory=list)
    ending: Ending | None = None
    """None while it is played."""
    num_calls: int = 0
    num_failed_calls: int = 0
    num_timeouts: int = 0

    @property
    def row(self) -> list[int]:
        return [*self.prompt_ids, *self.token_ids]

    def keep_routes(self, routes_LTK: Tensor) -> None:
        """Those of a turn, which read the whole row: of the tokens that were read before, the earlier ones stay."""
        known = self.routes_LTK
        self.routes_LTK = routes_LTK if known is None else torch.cat((known, routes_LTK[:, known.shape[1] :]), 1)

    @property
    def figures(self) -> EpisodeFigures | None:
        """None without an environment. Raises AssertionError while it is played."""
        assert self.ending is not None, self.turns
        if self.environment is None:
            return None
        num_tool_tokens = sum(stop - start for start, stop in self.tool_spans)
        counts = (self.num_calls, self.num_failed_calls, self.num_timeouts, num_tool_tokens)
        return EpisodeFigures(self.kind, self.ending, tuple(self.turns), *counts)

    @property
    def written(self) -> WrittenAnswer:
        """The last turn, with those before it."""
        texts = [turn.text for turn in self.turns if turn.role == "assistant"]
        return WrittenAnswer(texts[-1], self.ending == "answered", self.environment, tuple(texts[:-1]))


class EpisodePlayer:
    """Plays episodes turn by turn, all of them at once."""

    def __init__(
        self, tokenizer: Tokenizer, limits: EpisodeRecipe, stop_token_ids: Sequence[int], enable_thinking: bool
    ) -> None:
        self.tokenizer, self.limits = tokenizer, limits
        self.stop_token_ids, self.enable_thinking = stop_token_ids, enable_thinking

    def play(self, generate: Generate, episodes: Sequence[Episode]) -> None:
        """Play all of them to their end."""
        while running := [episode for episode in episodes if episode.ending is None]:
            given = [self._draws_of_turn(episode) for episode in running]
            generation = generate([episode.row for episode in running], given)
            for episode, routes_LTK in zip(running, generation.routes or (), strict=False):
                episode.keep_routes(routes_LTK)
            columns = zip(running, generation.token_ids, generation.sampled_log_probabilities, strict=True)
            asked = [(episode, self._take_turn(episode, ids, scores)) for episode, ids, scores in columns]
            waiting = [(episode, calls) for episode, calls in asked if calls]
            jobs = [partial(self._call_tools, episode, calls) for episode, calls in waiting]
            seconds = [self.limits.seconds_of(episode.kind) for episode, _ in waiting]
            answers = tool_threads().run(jobs, seconds) if jobs else []
            for (episode, calls), answered in zip(waiting, answers, strict=True):
                self._observe(episode, len(calls), answered)

    def _draws_of_turn(self, episode: Episode) -> Sequence[float]:
        start = len(episode.token_ids)
        size = len(episode.draws) if episode.environment is None else self.limits.max_turn_tokens
        return episode.draws[start : start + size]

    def _take_turn(self, episode: Episode, token_ids: list[int], log_probabilities: list[float]) -> Calls:
        """Add a turn; the calls that it makes, none where it ended the episode."""
        text = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        episode.token_ids += token_ids
        episode.log_probabilities += log_probabilities
        episode.turns.append(Turn("assistant", text))
        if token_ids[-1] not in self.stop_token_ids:
            episode.ending = "cut_off"
            return []
        if episode.environment is None:
            episode.ending = "answered"
            return []
        calls = written_calls(answer_of(text))
        hands_over = self.tokenizer.id_to_token(token_ids[-1]) == "<|observation|>"
        if calls is None or bool(calls) != hands_over:
            episode.ending = "format_error"
        elif not calls:
            episode.ending = "answered"
        elif sum(turn.role == "assistant" for turn in episode.turns) == self.limits.max_turns:
            episode.ending = "too_many_turns"
        else:
            return calls
        return []

    def _call_tools(self, episode: Episode, calls: Calls) -> Answers | BrokenToolError:
        """Changes the environment only: it may be abandoned while it runs. What the sampled text cannot cause, a
        machine without a sandbox or out of processes, passes through."""
        assert episode.environment is not None, calls
        answers: Answers = []
        for name, arguments in calls:
            try:
                answers.append((self._shown(episode.environment.call(name, arguments)), None))
            except ToolError as error:
                answers.append((self._shown(f"Error: {error}"), error))
            except (NoSandboxError, OSError):
                raise
            except Exception as error:
                given = str(arguments)[:MAX_LOGGED_CHARS]
                _, run = episode.environment.functions[name]
                return BrokenToolError(f"{run.__module__}: the tool {name} failed on {given} ({error!r})")
        return answers

    def _shown(self, text: str) -> str:
        """As much as the assistant reads, as text that can be encoded: a program may print half a character."""
        return text[: self.limits.max_observation_chars].encode(errors="replace").decode()

    def _observe(self, episode: Episode, num_calls: int, answers: Answers | BrokenToolError | None) -> None:
        episode.num_calls += num_calls
        if answers is None:
            episode.num_failed_calls += num_calls
            episode.num_timeouts += 1
            episode.ending = "timed_out"
            return
        if isinstance(answers, BrokenToolError):
            print(f"{answers}: the episode earns nothing. Correct the tool", file=sys.stderr, flush=True)
            episode.num_failed_calls += num_calls
            episode.ending = "tool_failed"
            return
        errors = [error for _, error in answers if error is not None]
        episode.num_failed_calls += len(errors)
        episode.num_timeouts += sum(isinstance(error, ToolTimeoutError) for error in errors)
        texts = [text for text, _ in answers]
        token_ids, _ = encode(self.tokenizer, observation(texts, self.enable_thinking))
        start = len(episode.token_ids)
        if start + len(token_ids) >= len(episode.draws):
            episode.ending = "cut_off"
            return
        episode.token_ids += token_ids
        episode.log_probabilities += [0.0] * len(token_ids)
        episode.tool_spans.append((start, start + len(token_ids)))
        episode.turns += [Turn("tool", text) for text in texts]


def episode_metrics(played: Sequence[EpisodeFigures]) -> dict[str, float]:
    """Of the episodes that a step played in environments; none where it played none."""
    if not played:
        return {}
    num_calls = sum(episode.num_calls for episode in played)
    num_failed = sum(episode.num_failed_calls for episode in played)
    num_turns = sum(turn.role == "assistant" for episode in played for turn in episode.turns)
    endings = [episode.ending for episode in played]
    return {
        "episode_turns": num_turns / len(played),
        "tool_calls": num_calls / len(played),
        "tool_success": (num_calls - num_failed) / max(1, num_calls),
        "tool_tokens": sum(episode.num_tool_tokens for episode in played) / len(played),
        "tool_timeouts": float(sum(episode.num_timeouts for episode in played)),
        **{
            f"tool_timeouts_{kind}": float(sum(episode.num_timeouts for episode in played if episode.kind == kind))
            for kind in sorted({episode.kind for episode in played})
        },
        **{f"{ending}_share": endings.count(ending) / len(played) for ending in SHOWN_ENDINGS},
    }
