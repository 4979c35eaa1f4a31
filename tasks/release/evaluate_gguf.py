"""Step: measures each GGUF file with llama.cpp itself: bits per byte of the suite's first documents, the answers to its
first problems, and of the file that is served the choices in its first questions, the answers to its first requests and
the tasks that it solves.

In: GGUF files, the checkpoint whose tokenizer they carry, the suite, and what the checkpoint answered to it. Out:
gguf_scores.json, per type and document the log-probability and bytes; items-TYPE.parquet, the answers as an evaluation
has them. It starts the model server on loopback for each file in turn.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from configs.schema import served_gguf_type
from infra.step import Artifact, Output, Progress, Record, step
from tasks.evaluation.choice_scores import score_choices
from tasks.evaluation.comparisons import FigureChange, ServedFigures, figure_changes
from tasks.evaluation.engine import document_token_ids, load_tokenizer
from tasks.evaluation.generated_answers import (
    answer_chats,
    answer_problems,
    asked_problems,
    first_of_groups,
    longest_answer,
)
from tasks.evaluation.items import CHOICE, DOCUMENT, SAFETY, TASK, Item, read_items, write_items
from tasks.evaluation.played_tasks import longest_episode, play_tasks
from tasks.evaluation.suite import Question, read_suite
from tasks.release.leading_texts import LeadingText, leading_texts
from tasks.release.served_scoring import CONTEXT_MARGIN, FILLER, ServedEngine, ServedPlayer, ServedScorer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from configs.schema import EvaluationRecipe, FormatRecipe, ServingResources
    from tasks.evaluation.evaluate_checkpoint import Evaluation
    from tasks.evaluation.select_evaluation_items import EvaluationSuite
    from tasks.release.convert_to_gguf import GgufFiles
    from tasks.training.state.trained_checkpoint import TrainedCheckpoint


class GgufEvaluation(Record):
    """Bits per byte by GGUF type; None where a log-probability is not finite."""

    checkpoint_digest: str
    bits_per_byte: dict[str, float | None]
    file_bytes: dict[str, int]
    num_documents: int
    num_tokens: int
    num_bytes: int
    """Of the scored text."""
    figures: dict[str, dict[str, FigureChange]]
    """By type, what became of each figure of answers: the served type is beside the checkpoint, the others are beside
    the served one."""

    @property
    def served(self) -> ServedFigures:
        """What users of the released file get."""
        return ServedFigures(figures=self.figures[served_gguf_type(self.figures)])


@step(
    content=("gguf_scores.json", "items-*.parquet"),
    evidence=("server-*.log",),
    distributions=("xllamacpp", "tokenizers", "pyarrow", "numpy", "scipy", "lm_eval", "datasets"),
)
def evaluate_gguf(
    *,
    gguf: Artifact[GgufFiles],
    checkpoint: Artifact[TrainedCheckpoint],
    suite: Artifact[EvaluationSuite],
    evaluation: Artifact[Evaluation],
    recipe: FormatRecipe,
    resources: ServingResources,
    output: Output,
) -> GgufEvaluation:
    """`resources` name threads and time limit; port and context length are chosen here."""
    from infra.serving.model_server import Access, running_model_server

    tokenizer = load_tokenizer(checkpoint.path("hf/tokenizer.json"))
    questions = read_suite(suite.path("suite.parquet"))
    asked_as_served = {
        CHOICE: [question for question in questions if question.kind == CHOICE][: recipe.num_problems],
        **{kind: first_of_groups(questions, kind, recipe.num_problems) for kind in (SAFETY, TASK)},
    }
    texts, problems = _choose_texts(tokenizer, questions, recipe), asked_problems(questions, recipe)
    vocab_size = json.loads(checkpoint.path("hf/config.json").read_text(encoding="utf-8"))["vocab_size"]
    filler = tokenizer.token_to_id(FILLER)
    assert filler is not None, f"a byte-level tokenizer has a token {FILLER!r}"
    num_slots = recipe.answers.samples_per_problem
    room = _longest_row(tokenizer, texts, problems, asked_as_served, recipe.answers) + CONTEXT_MARGIN
    private = resources.model_copy(update={"port": 0, "context_length": room})
    served_type = served_gguf_type(gguf.record.file_names)
    scores: dict[str, list[float]] = {}
    answers: dict[str, list[Item]] = {}
    for gguf_type, file_name in gguf.record.file_names.items():
        output.report(Progress(len(scores), len(gguf.record.file_names), "files", f"llama.cpp scores {file_name}"))
        log_path = output.path(f"server-{gguf_type}.log")
        with (
            running_model_server(gguf.path(file_name), private, log_path, access=Access(num_slots=num_slots)) as server,
            ServedScorer(server.url, filler, vocab_size) as scorer,
        ):
            scores[gguf_type] = [_score_text(scorer, text) for text in texts]
            engine = ServedEngine(scorer, num_slots, gguf.digest)
            answers[gguf_type] = answer_problems(engine, tokenizer, problems, recipe.answers, gguf.digest, output)
            if gguf_type == served_type:
                answers[gguf_type] += _answer_as_served(engine, tokenizer, asked_as_served, recipe.answers, output)
        write_items(output.path(f"items-{gguf_type}.parquet"), answers[gguf_type])
    num_bytes = sum(text.num_bytes for text in texts)
    rows = {gguf_type: _score_rows(texts, values) for gguf_type, values in scores.items()}
    output.path("gguf_scores.json").write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    compared = dict.fromkeys(answers, answers[served_type])
    compared[served_type] = read_items(evaluation.path("items.parquet"))
    return GgufEvaluation(
        checkpoint_digest=checkpoint.digest,
        bits_per_byte={kind: _finite(-sum(values) / math.log(2) / num_bytes) for kind, values in scores.items()},
        file_bytes=gguf.record.num_bytes,
        num_documents=len(texts),
        num_tokens=sum(sum(text.is_scored) for text in texts),
        num_bytes=num_bytes,
        figures={kind: figure_changes(items, compared[kind]) for kind, items in answers.items()},
    )


def _longest_row(
    tokenizer: Tokenizer,
    texts: Sequence[LeadingText],
    problems: dict[str, list[Question]],
    asked_as_served: dict[str, list[Question]],
    recipe: EvaluationRecipe,
) -> int:
    """Tokens of the longest request with its answer."""
    return max(
        *(len(text.token_ids) for text in texts),
        longest_answer(tokenizer, problems, asked_as_served[SAFETY], recipe),
        longest_episode(tokenizer, asked_as_served[TASK], recipe),
        min(_longest_choice(tokenizer, asked_as_served[CHOICE]), recipe.sequence_length + 1),
    )


def _answer_as_served(
    engine: ServedEngine,
    tokenizer: Tokenizer,
    asked: dict[str, list[Question]],
    recipe: EvaluationRecipe,
    output: Output,
) -> list[Item]:
    """What only the served file is asked: questions by likelihood, requests, and tasks that are played."""
    version, items = engine.weights_version, []
    if asked[CHOICE]:
        items += score_choices(engine, tokenizer, asked[CHOICE], recipe.sequence_length, version, output).items
    items += answer_chats(engine, tokenizer, asked[SAFETY], recipe, version, output)
    items += play_tasks(ServedPlayer(engine), tokenizer, asked[TASK], recipe, version, output)
    return items


def _score_rows(texts: Sequence[LeadingText], values: Sequence[float]) -> list[dict[str, object]]:
    return [
        {"item_id": text.item_id, "log_probability": _finite(value), "num_bytes": text.num_bytes}
        for text, value in zip(texts, values, strict=True)
    ]


def _finite(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None


def _choose_texts(tokenizer: Tokenizer, questions: Sequence[Question], recipe: FormatRecipe) -> list[LeadingText]:
    documents = [question for question in questions if question.kind == DOCUMENT]
    if len(documents) < recipe.num_documents:
        raise ValueError(
            f"the suite holds {len(documents)} documents, release.recipe.num_quantization_documents asks for "
            f"{recipe.num_documents}: lower it, or raise evaluation.recipe.max_document_tokens"
        )
    return leading_texts(tokenizer, documents[: recipe.num_documents], recipe.max_document_tokens)


def _longest_choice(tokenizer: Tokenizer, questions: Sequence[Question]) -> int:
    """Tokens of the longest question with one of its choices."""
    rows = (f"{question.text} {choice}" for question in questions for choice in question.choice_list)
    return max((len(document_token_ids(tokenizer, row)) for row in rows), default=0)


def _score_text(scorer: ServedScorer, text: LeadingText) -> float:
    return sum(value for value, counts in zip(scorer.score(text.token_ids), text.is_scored, strict=True) if counts)
