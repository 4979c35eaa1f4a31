"""Runs lm-evaluation-harness over our engine: a suite's questions are its task, the engine is its model.

Importing this takes two seconds. Nothing is downloaded: the task's documents are passed in memory.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from datasets import Dataset
from lm_eval.api.model import TemplateLM
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from infra.step import Output, Progress, canonical_json
from model.generation.sampling import Sampling
from model.text.chat_template import render
from model.text.tokenizer_layout import END_OF_TEXT
from tasks.data.prompts.python_turns import MAX_TURNS, SEEDS_PER_TURN, run_calls, shown_answers
from tasks.evaluation.engine import ScoringEngine, document_token_ids, end_token_ids, special_token_id
from tasks.evaluation.suite import Question

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from model.formats.checkpoint_template import GivenTemplate

TASK = "glm46_choice"
PAIRS_PER_REPORT = 256
"""Number of pairs of context and continuation that the engine is given between two progress reports."""
PROMPTS_PER_REPORT = 64
"""Likewise of prompts to be continued; the seeds of sampled continuations count these blocks."""


def run_harness(
    engine: ScoringEngine,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    sequence_length: int,
    weights_version: str,
    output: Output,
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """(the harness's sample per question, in their order; its metrics by name)."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    model = EngineModel(
        engine, tokenizer, sequence_length, weights_version, output.report, starts_documents=True, enable_thinking=False
    )
    results: Any = evaluate(model, {TASK: _task(questions)}, bootstrap_iters=0, log_samples=True, verbosity="ERROR")
    return sorted(results["samples"][TASK], key=lambda sample: sample["doc_id"]), results["results"][TASK]


def _task(questions: Sequence[Question]) -> ConfigurableTask:
    rows = [
        {"text": question.text, "choices": question.choice_list, "right": int(question.answer)}
        for question in questions
    ]
    return QuietTask(
        config={
            "task": TASK,
            "custom_dataset": lambda **options: {"test": Dataset.from_list(rows)},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "{{text}}",
            "doc_to_choice": "choices",
            "doc_to_target": "right",
            "metric_list": [
                {"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")
            ],
        }
    )


class QuietTask(ConfigurableTask):
    """A task without the harness's progress bar: the pipeline shows its own."""

    def build_all_requests(self, **options: Any) -> None:
        with contextlib.redirect_stderr(io.StringIO()):
            super().build_all_requests(**options)


@dataclass(frozen=True)
class ToolRequest:
    """A question with the functions that the model may call."""

    question: str
    tools: Sequence[Mapping[str, Any]]


class SuiteModel(TemplateLM):
    """What a suite tells its model about the benchmark that is asked."""

    tool_requests: Mapping[str, ToolRequest] = {}
    """By id. The harness knows no tools, so it passes a request's id as the user's message."""
    refuses_cuts: bool = False
    """Whether a prompt that is too long is an error, because what is asked for is in it; else it loses its
    beginning."""
    runs_python: bool = False
    """Whether calls of the tool `python` are answered, and the model goes on until a turn without one."""
    num_unfinished: int = 0
    """Answers of the benchmark that had as many tokens as they may."""

    def opened(self, chat_history: list[Any]) -> tuple[list[Any], Sequence[Mapping[str, Any]]]:
        """(messages, tools) of what the harness passes."""
        request = self.tool_requests.get(chat_history[-1]["content"])
        if request is None:
            return chat_history, ()
        return [{"role": "user", "content": request.question}], request.tools


class EngineModel(SuiteModel):
    """Scores and continues text with an engine; a context that makes a row longer than `sequence_length` loses its
    beginning.

    Contexts begin with end-of-text where `starts_documents`, as the model's documents do. Without it a text's tokens
    are those that the harness's `hf` backend gives a model.
    """

    num_cut: int = 0
    """Prompts of the benchmark that lost their beginning."""

    def __init__(
        self,
        engine: ScoringEngine,
        tokenizer: Tokenizer,
        sequence_length: int,
        weights_version: str,
        report: Callable[[Progress], None],
        *,
        starts_documents: bool,
        enable_thinking: bool,
        template: GivenTemplate | None = None,
    ) -> None:
        """`template`: the checkpoint's own, where chats are not rendered by the project's."""
        super().__init__()
        self.engine, self.bpe, self.sequence_length, self.report = engine, tokenizer, sequence_length, report
        self.weights_version, self.enable_thinking, self.template = weights_version, enable_thinking, template
        self.start = [self.eot_token_id] if starts_documents else []

    @property
    def eot_token_id(self) -> int:
        return special_token_id(self.bpe, END_OF_TEXT)

    @property
    def tokenizer_name(self) -> str:
        return self.weights_version

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
        return document_token_ids(self.bpe, string)[1:]

    def apply_chat_template(self, chat_history: list[Any], add_generation_prompt: bool = True) -> str:
        messages, tools = self.opened(chat_history)
        how = {"enable_thinking": self.enable_thinking, "add_generation_prompt": add_generation_prompt}
        if self.template is not None:
            return self.template.render(messages, tools, **how)
        return "".join(segment.text for segment in render(messages, tools, **how))

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: list[Any], **options: Any) -> list[tuple[float, bool]]:
        """Log-probability of every continuation, and whether it is the greedy one."""
        likelihoods: list[tuple[float, bool]] = []
        for start in range(0, len(requests), PAIRS_PER_REPORT):
            self.report(Progress(start, len(requests), "choices", "scoring continuations"))
            pairs = []
            for _, context, continuation in requests[start : start + PAIRS_PER_REPORT]:
                self.num_cut += len(self.start) + len(context) + len(continuation) > self.sequence_length + 1
                pairs.append(fit_in_row([*self.start, *context], continuation, self.sequence_length))
            likelihoods += [
                (score.log_probability, score.is_greedy) for score in self.engine.score_continuations(pairs)
            ]
        return likelihoods

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of every whole text. A text longer than `sequence_length` is scored in windows of that
        length, every token once, the last window with as many tokens before its own as fit."""
        totals: list[float] = []
        for number, (text,) in enumerate(request.args for request in requests):
            self.report(Progress(number, len(requests), "texts", "scoring texts"))
            windows = [
                make_disjoint_window(window)
                for window in get_rolling_token_windows(
                    self.tok_encode(text), self.eot_token_id, self.sequence_length, 1
                )
            ]
            totals.append(sum(score.log_probability for score in self.engine.score_continuations(windows)))
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Every context's continuation up to the first of its stop strings or the end of the answer."""
        answers = [""] * len(requests)
        for options, members in _by_options(requests):
            for start in range(0, len(members), PROMPTS_PER_REPORT):
                self.report(Progress(start, len(members), "prompts", "answering"))
                block = members[start : start + PROMPTS_PER_REPORT]
                contexts = [requests[member].args[0] for member in block]
                answer = self._answer_with_python if self.runs_python else self._continue
                for member, text in zip(block, answer(contexts, options, seed=start), strict=True):
                    answers[member] = text
        return answers

    def _answer_with_python(self, contexts: Sequence[str], options: dict[str, Any], seed: int) -> list[str]:
        """All turns of each answer, with what programs printed between them. One whose row is full ends there."""
        written, running = [""] * len(contexts), list(range(len(contexts)))
        for turn in range(MAX_TURNS):
            rows = [contexts[number] + written[number] for number in running]
            turns = self._continue(rows, options, seed + turn * SEEDS_PER_TURN)
            for number, text in zip(running, turns, strict=True):
                written[number] += text
            if turn + 1 == MAX_TURNS:
                break
            answered = {number: answers for number, answers in zip(running, run_calls(turns), strict=True) if answers}
            for number, answers in answered.items():
                written[number] += shown_answers(answers, self.enable_thinking)
            room = self._room(options)
            running = [each for each in answered if len(self.tok_encode(contexts[each] + written[each])) <= room]
            if not running:
                break
        return written

    def _room(self, options: dict[str, Any]) -> int:
        """Tokens of a row that are free for what is before an answer. Raises ValueError where there are none."""
        wanted: dict[str, Any] = {**normalize_gen_kwargs(options)}
        max_new_tokens = wanted["max_gen_toks"]
        if max_new_tokens >= self.sequence_length:
            raise ValueError(f"max_gen_toks ({max_new_tokens}) must be below {self.sequence_length}: lower it")
        return self.sequence_length - max_new_tokens

    def _continue(self, contexts: Sequence[str], options: dict[str, Any], seed: int) -> list[str]:
        wanted: dict[str, Any] = {**normalize_gen_kwargs(options)}
        max_new_tokens, room = wanted["max_gen_toks"], self._room(options)
        prompts = [[*self.start, *self.tok_encode(context)] for context in contexts]
        longest = max(map(len, prompts))
        if self.refuses_cuts and longest > room:
            raise ValueError(
                f"a prompt has {longest:,} tokens, and {room:,} of the {self.sequence_length:,} of a row are free for "
                f"it: raise the suite's sequence_length where the model has more positions, or shorten the prompts"
            )
        self.num_cut += sum(len(prompt) > room for prompt in prompts)
        prompts = [prompt[-room:] for prompt in prompts]
        sampling = Sampling(
            max_new_tokens,
            wanted.get("temperature", 0.0),
            stop_token_ids=end_token_ids(self.bpe),
            seed=seed,
            ends=_holds_stop_text(self.bpe, [text for text in wanted["until"] if text]),
        )
        generation = self.engine.generate(prompts, sampling, self.weights_version)
        self.num_unfinished += sum(not is_finished(token_ids, sampling) for token_ids in generation.token_ids)
        texts = [self.bpe.decode(token_ids, skip_special_tokens=True) for token_ids in generation.token_ids]
        return [postprocess_generated_text(text, wanted["until"], think_end_token=None) for text in texts]


def is_finished(token_ids: Sequence[int], sampling: Sampling) -> bool:
    """Whether a continuation ended by itself, and not because it had as many tokens as it may."""
    if len(token_ids) < sampling.max_new_tokens or token_ids[-1] in sampling.stop_token_ids:
        return True
    return sampling.ends is not None and sampling.ends(token_ids)


def _holds_stop_text(tokenizer: Tokenizer, until: Sequence[str]) -> Callable[[Sequence[int]], bool] | None:
    """Whether the last tokens of a continuation complete a stop text; None without stop texts. Only as many tokens are
    decoded as it has bytes; one that special tokens interrupt is left to the cut afterwards."""
    if not until:
        return None
    num_tokens = max(len(text.encode()) for text in until)

    def holds(token_ids: Sequence[int]) -> bool:
        ending = tokenizer.decode(list(token_ids[-num_tokens:]), skip_special_tokens=True)
        return any(text in ending for text in until)

    return holds


def _by_options(requests: Sequence[Any]) -> list[tuple[dict[str, Any], list[int]]]:
    """The numbers of the requests that have the same options, with those options."""
    groups: dict[str, tuple[dict[str, Any], list[int]]] = {}
    for number, request in enumerate(requests):
        options = request.args[1]
        groups.setdefault(canonical_json(options), (options, []))[1].append(number)
    return list(groups.values())


def fit_in_row(
    context: Sequence[int], continuation: Sequence[int], sequence_length: int
) -> tuple[list[int], list[int]]:
    """The end of the context that fits before a continuation, and the continuation; without a context its first token
    is one. Raises ValueError where it has more tokens than a row: its end alone would be another choice's score."""
    if len(continuation) > sequence_length:
        raise ValueError(
            f"a choice has {len(continuation)} tokens, a row of evaluation {sequence_length}: raise "
            f"evaluation.recipe.sequence_length, or leave its item out"
        )
    row = [*context, *continuation][-sequence_length - 1 :]
    num_scored = min(len(continuation), len(row) - 1)
    return row[:-num_scored], row[-num_scored:]
