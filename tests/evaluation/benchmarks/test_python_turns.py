"""Answers with the tool `python`: what a model computes in the sandbox it reads and says, in our engine and on a
server."""

from __future__ import annotations

import json

import pytest

from infra.serving.kept_answers import KeptAnswers
from model.generation.generation import Generation
from model.text.chat_template import render_to_train
from tasks.data.prompts.python_turns import MAX_SHOWN_CHARS, MAX_TURNS, SHOWN_TOOLS, last_words
from tasks.evaluation.benchmarks.benchmark_tasks import is_right
from tasks.evaluation.harness import EngineModel, ToolRequest
from tasks.serving.server_model import EndpointModel
from tests.support.evaluation_fakes import toy_tokenizer

QUESTION = "What is 6 times 7?"
OPTIONS = {"until": [], "max_gen_toks": 200, "temperature": 0.0}


def call(code: str) -> str:
    return f"\nI compute.\n<tool_call>python\n<arg_key>code</arg_key>\n<arg_value>{code}</arg_value>\n</tool_call>"


class ScriptedModel:
    """An engine, and a client of a server, that writes given turns, whatever it reads."""

    def __init__(self, *turns: str) -> None:
        self.turns, self.read, self.url = list(turns), [], ""

    def generate(self, prompts, sampling, weights_version):
        tokenizer = toy_tokenizer()
        self.read += [tokenizer.decode(list(prompt), skip_special_tokens=False) for prompt in prompts]
        written = [tokenizer.encode(self.turns.pop(0), add_special_tokens=False).ids for _ in prompts]
        numbers = [[-0.5] * len(turn) for turn in written]
        return Generation(written, numbers, numbers, numbers, weights_version)

    def chat(self, messages, tools, *options):
        self.read.append(json.dumps(messages))
        said, _, called = self.turns.pop(0).partition("\n<tool_call>")
        code = called.partition("<arg_value>")[2].partition("</arg_value>")[0]
        return said, [("python", json.dumps({"code": code}))] if called else [], True


def answer_of(scripted: ScriptedModel, *, is_served: bool = False, sequence_length: int = 4096) -> str:
    if is_served:
        model = EndpointModel(scripted, KeptAnswers(None, ""), 1, False, lambda progress: None)  # pyright: ignore
    else:
        model = EngineModel(
            scripted,  # pyright: ignore[reportArgumentType]
            toy_tokenizer(),
            sequence_length,
            "v",
            lambda progress: None,
            starts_documents=False,
            enable_thinking=False,
        )
    model.runs_python, model.refuses_cuts = True, True
    model.tool_requests = {"1": ToolRequest(QUESTION, json.loads(SHOWN_TOOLS))}
    context = model.apply_chat_template([{"role": "user", "content": "1"}])
    (written,) = model.generate_until([type("Request", (), {"args": (context, OPTIONS)})])
    return written


@pytest.mark.parametrize("is_served", [False, True])
def test_what_a_program_printed_is_read_before_the_answer(is_served):
    scripted = ScriptedModel(call("print(6 * 7)"), call("print(1 / 0)"), "So \\boxed{42}")
    written = answer_of(scripted, is_served=is_served)
    assert len(scripted.read) == 3 and "42" not in scripted.read[0]
    assert "42" in scripted.read[1] and "Error: ZeroDivisionError" in scripted.read[2]
    assert last_words(written) == "So \\boxed{42}" and written.count("<tool_response>") == 2
    assert is_right("math_with_python", "", "42", written) and not is_right("math_with_python", "", "41", written)


def test_the_turns_are_read_as_training_renders_them():
    """The last prompt is the conversation up to where the model writes again."""
    scripted = ScriptedModel(call("print(6 * 7)"), "\\boxed{42}")
    answer_of(scripted)
    messages = [
        {"role": "user", "content": QUESTION},
        {
            "role": "assistant",
            "content": "I compute.",
            "tool_calls": [{"name": "python", "arguments": {"code": "print(6 * 7)"}}],
        },
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "x"},
    ]
    trained = "".join(segment.text for segment in render_to_train(messages, json.loads(SHOWN_TOOLS)))  # pyright: ignore
    assert scripted.read[1] == trained[: trained.rindex("\nx")]


@pytest.mark.parametrize("is_served", [False, True])
def test_a_model_that_never_answers_is_wrong_even_where_a_program_printed_the_answer(is_served):
    scripted = ScriptedModel(*[call("print('\\\\boxed{42}')")] * MAX_TURNS)
    written = answer_of(scripted, is_served=is_served)
    assert not scripted.turns and "\\boxed{42}" in scripted.read[-1]
    assert last_words(written) == "" and not is_right("math_with_python", "", "42", written)


def test_a_long_print_is_cut_and_a_full_row_ends_the_answer_unanswered():
    scripted = ScriptedModel(call("print('7' * 100000)"), "\\boxed{7}")
    written = answer_of(scripted, sequence_length=900)
    assert scripted.turns == ["\\boxed{7}"], "the second turn has no room"
    assert MAX_SHOWN_CHARS <= written.count("7") < MAX_SHOWN_CHARS + 10
    assert not is_right("math_with_python", "", "7", written)


def test_a_call_that_cannot_be_read_ends_the_answer():
    written = answer_of(ScriptedModel("\\boxed{42} <tool_call>python"))
    assert not is_right("math_with_python", "", "42", written)
