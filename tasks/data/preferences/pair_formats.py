"""Converts the layouts of preference pairs in public files to one: a shared prompt, and two answers to it.

It reads `chosen` and `rejected`: answers to a `prompt`, an `instruction` + `input`, `conversations` or `messages`;
whole conversations with a shared beginning, as lists of messages or as transcripts ("\\n\\nHuman: ...\\n\\nAssistant:
..."); `instruction` with two `output`s, the better one first; `messages` and the `rejected_response` in place of the
last one, or ms-swift's `query`, `history` and `response` with it; two answers beside a field that says which is better
(COMPARISONS) or their ratings (RATED); and a list of rated ones (RANKINGS). The functions are pure and work per record.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.data.chats.chat_formats import conversations_of
from tasks.data.chats.chat_messages import are_texts
from tasks.data.chats.chat_roles import role_of
from tasks.data.chats.chat_tools import TOOLS, MalformedChatError, from_json
from tasks.data.chats.written_turns import answered_turns, written_turns
from tasks.data.records.record_fields import MEDIA, SYSTEMS, with_turns

if TYPE_CHECKING:
    from model.text.chat_template import Message

Record = dict[str, Any]
NO_PREFERENCE = "no_preference"
"""Reason of a comparison that ended in a tie."""
UNKNOWN_VERDICT = "unknown_verdict"
TIES = ("tie", "tie (bothbad)", "both_bad")
"""Chatbot Arena's words for no preference."""


QUESTIONS = ("conversations", "messages", "prompt", "context", "trajectory")
"""Fields of the turns before the answers; the last one is UltraInteract's."""
ASKING = ("user", "assistant")


class Comparison(NamedTuple):
    """Records with two answers, and a verdict on them."""

    first: str
    second: str
    verdict: str
    prefers_first: Callable[[Any], bool | None]
    """Whether the verdict is for the first answer; None for a tie."""


def _is_negative(strength: Any) -> bool | None:
    if not isinstance(strength, int | float) or math.isnan(strength):
        raise MalformedChatError(UNKNOWN_VERDICT, f"{strength!r} is no number")
    return strength < 0 if strength else None


def _is(first: str | int, second: str | int, *ties: str) -> Callable[[Any], bool | None]:
    """A verdict that is one of two values, or says that it is none."""
    known = {first: True, second: False, **dict.fromkeys(ties)}

    def prefers_first(verdict: Any) -> bool | None:
        if not isinstance(verdict, str | int | float) or verdict not in known:
            raise MalformedChatError(UNKNOWN_VERDICT, f"{verdict!r} is none of {', '.join(map(repr, known))}")
        return known[verdict]

    return prefers_first


COMPARISONS = (
    Comparison("response_0", "response_1", "better_response_id", _is(0, 1)),
    Comparison("response_1", "response_2", "preference_strength", _is_negative),
    Comparison("response1", "response2", "overall_preference", _is_negative),
    Comparison("human_ref_A", "human_ref_B", "labels", _is(1, 0)),
    Comparison("conversation_a", "conversation_b", "winner", _is("model_a", "model_b", *TIES)),
)
"""The layouts of PKU-SafeRLHF, HelpSteer2, HelpSteer3, SHP and Chatbot Arena."""
RATED = (
    ("answer_0", "answer_1", "score_0", "score_1"),
    ("response_a", "response_b", "winner_model_a", "winner_model_b"),
)
"""Fields of two answers and of their ratings, of which the higher is better: WebGPT's, and those of Arena's 55k, whose
prompt and answers are JSON lists of what is said in turn."""
PREFERRED = (("chosen", "rejected"), ("response_j", "response_k"), ("messages", "rejected_messages"))
PREFERRED += (("chosen_response", "rejected_response"), ("preferred_output", "non_preferred_output"))
"""Fields of the better and of the other answer; the later ones of the pairs of Stack Exchange, of ms-swift, of Argilla
and of OpenAI's API."""
REJECTED = "rejected_response"

SCORES = (("score_chosen", "score_rejected"), ("chosen_score", "rejected_score"), ("chosen_rating", "rejected_rating"))
SCORES += (("chosen-rating", "rejected-rating"), ("chosen_avg_rating", "rejected_avg_rating"))
SCORES += (("rating_chosen", "rating_rejected"),)
"""Fields of what both answers were rated; equal ones are no preference."""


class Ranking(NamedTuple):
    """Records with a list of rated answers, of which the best and the worst are a pair."""

    answers: str
    text: str
    rating: str
    sign: int
    """1 where a higher rating is better, else -1."""


RANKINGS = (
    Ranking("completions", "response", "fine-grained_score", 1),
    Ranking("answers", "answer", "rank", -1),
    Ranking("completions", "completion", "rank", -1),
)
"""The layouts of UltraFeedback, whose `overall_score` is wrong in places, of Nectar, and of NeMo-RL, whose answers are
lists of messages."""


class Pair(NamedTuple):
    prompt: list[Message]
    chosen: Message
    rejected: Message
    tools: list[Record]


def pair_of(record: Record) -> Pair:
    """The pair of one record. Raises MalformedChatError for a record that is none."""
    asked, question = record.get("input"), record.get("question")
    record = with_turns({**(asked if isinstance(asked, dict) else {}), **record})
    if isinstance(question, dict):
        record["question"] = question.get("full_text")
    if {"query", "response", REJECTED} <= record.keys():
        asked = {key: value for key, value in record.items() if key != REJECTED}
        ((better, tools),), ((worse, _),) = map(conversations_of, (asked, {**asked, "response": record[REJECTED]}))
    else:
        chosen, rejected = _answers(record)
        (better, tools), (worse, _) = _conversation(record, chosen), _conversation(record, rejected)
    if better[:-1] != worse[:-1]:
        raise MalformedChatError("no_shared_prompt", f"{len(better) - 1} and {len(worse) - 1} turns before the answers")
    if better[-1] == worse[-1]:
        raise MalformedChatError("equal_answers", better[-1]["content"][:60])
    return Pair(better[:-1], better[-1], worse[-1], tools)


def _answers(record: Record) -> tuple[object, object]:
    """What names the preferred and the rejected answer."""
    for better, worse in PREFERRED:
        if {better, worse} <= record.keys():
            _refuse_equal_scores(record)
            return record[better], record[worse]
    if REJECTED in record and _is_turns(record.get("messages")):
        return record["messages"][-1], record[REJECTED]
    outputs = record.get("output")
    if isinstance(outputs, list) and len(outputs) == 2:
        return outputs[0], outputs[1]
    for first, second, verdict, prefers_first in COMPARISONS:
        if {first, second, verdict} <= record.keys():
            is_first = prefers_first(from_json(record[verdict]))
            if is_first is None:
                raise MalformedChatError(NO_PREFERENCE, f"{verdict} is {record[verdict]!r}")
            return (record[first], record[second]) if is_first else (record[second], record[first])
    for first, second, *ratings in RATED:
        if {first, second, *ratings} <= record.keys():
            is_first = _is_negative(_number(record[ratings[1]]) - _number(record[ratings[0]]))
            if is_first is None:
                raise MalformedChatError(NO_PREFERENCE, f"{' and '.join(ratings)} are {record[ratings[0]]!r}")
            answers = [_in_turn(record.get("prompt"), record[name]) for name in (first, second)]
            return (answers[0], answers[1]) if is_first else (answers[1], answers[0])
    for ranking in RANKINGS:
        if ranked := _ranked(record.get(ranking.answers), ranking):
            return ranked
    raise MalformedChatError("no_pair", f"fields are {', '.join(sorted(map(str, record)))}")


def _number(rating: object) -> float:
    value = from_json(rating)
    if not isinstance(value, int | float):
        raise MalformedChatError(UNKNOWN_VERDICT, f"the rating {rating!r} is no number")
    return value


def _in_turn(prompt: object, answer: object) -> object:
    """The conversation of a prompt and an answer that are JSON lists of texts; any other answer as it is."""
    asked, said = from_json(prompt), from_json(answer)
    if not are_texts(asked):
        return answer
    if not are_texts(said) or len(said) != len(asked):
        raise MalformedChatError("no_answer", f"{len(asked)} questions have no such number of answers")
    turns = zip(asked, said, strict=True)
    return [{"role": role, "content": text} for pair in turns for role, text in zip(ASKING, pair, strict=True)]


def _refuse_equal_scores(record: Record) -> None:
    for better, worse in SCORES:
        rated = record.get(better)
        if isinstance(rated, int | float) and rated == record.get(worse):
            raise MalformedChatError(NO_PREFERENCE, f"{better} and {worse} are {rated!r}")
    if record.get("status") == "tie":  # Argilla's pairs of Intel's Orca
        raise MalformedChatError(NO_PREFERENCE, "status is tie")


def _ranked(answers: object, ranking: Ranking) -> tuple[object, object] | None:
    """The best of a list of rated answers and the worst that is another text, the first of equal ones; None for any
    other value. Answers without a text or a rating do not count."""
    if not isinstance(answers, list) or not all(isinstance(each, dict) and ranking.text in each for each in answers):
        return None
    texts, ratings = ([each.get(key) for each in answers] for key in (ranking.text, ranking.rating))
    rated = [
        (ranking.sign * rating, text)
        for text, rating in zip((_stripped(text) for text in texts), ratings, strict=True)
        if isinstance(text, str | list) and text and isinstance(rating, int | float) and math.isfinite(rating)
    ]
    if len(rated) < 2:
        return None
    highest, best = max(rated, key=lambda each: each[0])
    others = [each for each in rated if each[1] != best]
    lowest, worst = min(others, key=lambda each: each[0], default=(highest, best))
    if others and lowest == highest:
        raise MalformedChatError(NO_PREFERENCE, f"every {ranking.rating} is {ranking.sign * highest!r}")
    return best, worst


def _stripped(answer: object) -> object:
    return answer.strip() if isinstance(answer, str) else answer


def _conversation(record: Record, answer: object) -> tuple[list[Message], list[Record]]:
    """The whole conversation that ends with this answer."""
    lists = (record[key] for key in QUESTIONS if _is_turns(record.get(key)))
    asked = next(lists, None)
    question = _question(record) if asked is None else ""
    if asked is None:
        asked = [{"role": "user", "content": question}] if question else []
    elif REJECTED in record:
        asked = asked[:-1]
    if isinstance(answer, list):
        turns = answer if _is_whole(answer) else [*asked, *answer]
    elif isinstance(answer, str):
        turns = _spoken(question, answer) or [*asked, {"role": "assistant", "content": answer}]
        if len(turns) == 1:
            raise MalformedChatError("no_shared_prompt", f"an answer without a prompt: {reprlib.repr(answer)}")
    else:
        turns = [*asked, answer]
    if not turns or not _answers_in_text(turns[-1]):
        raise MalformedChatError("no_answer", "the last turn is not the assistant's, or it is empty")
    shared = {key: record[key] for key in (*TOOLS, *SYSTEMS, *MEDIA) if key in record}
    ((messages, tools),) = conversations_of({**shared, "messages": turns})
    return messages, tools


def _is_turns(value: object) -> bool:
    return isinstance(value, list) and bool(value)


def _is_whole(answer: list[Any]) -> bool:
    """Whether a list of turns is a whole conversation: it begins with who asks, not with the answer. Then what else the
    record has, such as its last question as `prompt` or the preferred conversation as `messages`, is in it already."""
    return bool(answer) and isinstance(answer[0], dict) and role_of(answer[0]) in ("system", "user")


def _question(record: Record) -> str:
    """A record's `prompt`, `instruction` + `input`, or what else holds the question; empty where it has none."""
    for key in ("prompt", "instruction", "question", "input", "history", "context"):
        if isinstance(record.get(key), str) and record[key].strip():
            given = record.get("input") if key == "instruction" else None
            return "\n\n".join(filter(None, (record[key].strip(), given.strip() if isinstance(given, str) else "")))
    return ""


def _spoken(question: str, answer: str) -> list[Record]:
    """The turns of a question and an answer that hold marks or names of speakers; none where neither does. An answer
    may be the whole conversation: it is, where it holds the question too."""
    whole = written_turns(answer)
    is_whole = not question or answer.strip().startswith(question) or question in [turn["content"] for turn in whole]
    return whole if whole and is_whole else answered_turns(question, answer)


def _answers_in_text(turn: object) -> bool:
    """Whether a turn is the assistant's and says something."""
    if not isinstance(turn, dict) or role_of(turn) != "assistant":
        return False
    said = turn.get("content", turn.get("value"))
    return bool(turn.get("tool_calls") or (said.strip() if isinstance(said, str) else said))
