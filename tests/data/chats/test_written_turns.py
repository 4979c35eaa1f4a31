"""Conversations in one text: what begins a turn, what is quoted, and prompts that end where an answer begins."""

from __future__ import annotations

import re

import pytest

from tasks.data.chats.chat_formats import conversations_of
from tasks.data.chats.chat_tools import MalformedChatError
from tasks.data.chats.written_turns import answered_turns, written_turns
from tasks.data.preferences.pair_formats import pair_of

CHATML = "<|im_start|>user\nq<|im_end|>\n"
ASSISTANT = "<|im_start|>assistant\n"
LLAMA3 = "<|start_header_id|>user<|end_header_id|>\n\nq<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"


def said(record):
    ((messages, _),) = conversations_of(record)
    return [(message["role"], message["content"]) for message in messages]


ASKED = [("user", "q"), ("assistant", "a")]
TWICE = [*ASKED, ("user", "b"), ("assistant", "c")]


@pytest.mark.parametrize(
    "text",
    [
        f"{LLAMA3}a<|eot_id|><|end_of_text|>",
        "<bos><start_of_turn>user\nq<end_of_turn>\n<start_of_turn>model\na<end_of_turn>\n<eos>",
        f"{CHATML}{ASSISTANT}a<|im_end|>\n<|endoftext|>",
        f"<s>{CHATML}{ASSISTANT}a<|im_end|></s>",
        "<s>### Human: q\n### Assistant: a</s>",
        "<|im_start|>user<|im_sep|>q<|im_end|><|im_start|>assistant<|im_sep|>a<|im_end|>",
        "<｜begin▁of▁sentence｜><｜User｜>q<｜Assistant｜>a<｜end▁of▁sentence｜>",
        "Human：q\nAssistant：a",
        "q\n<extra_id_1>Assistant\na",
        "<|im_start|>user name=Bob\r\nq<|im_end|>\r\n<|im_start|>assistant\r\na<|im_end|>\r\n",
        LLAMA3.replace("\n", "") + "a",
    ],
)
def test_marks_around_turns_are_no_part_of_them(text):
    assert said({"text": text}) == ASKED


@pytest.mark.parametrize(
    "text",
    [
        "USER: q\nASSISTANT: a</s>\nUSER: b\nASSISTANT: c</s>",
        "USER: q\n\n\nASSISTANT: a <|endoftext|>\n\n\nUSER: b\n\n\nASSISTANT: c <|endoftext|>",
        "<s>[INST] q [/INST] a </s><s>[INST] b [/INST] c </s>",
        "[INST] q [/INST] a [INST] b [/INST] c",
        "<|user|>\nq<|assistant|>\na<|user|>\nb<|assistant|>\nc",
        "\n\nHuman: q\nAssistant: a\n\nHuman: b\n\nAssistant: c",
        "Human: q\n\nAssistant: a\n\nHuman: b\n\nAssistant: c",
    ],
)
def test_several_turns_follow_each_other(text):
    assert said({"text": text}) == TWICE


@pytest.mark.parametrize(
    ("text", "turns"),
    [
        (
            f"<|im_start|>user\nWhat does {ASSISTANT}mean?<|im_end|>\n{ASSISTANT}It opens.",
            [f"What does {ASSISTANT}mean?", "It opens."],
        ),
        ("<|user|>\nWhat is <|assistant|> for?<|assistant|>\na", ["What is <|assistant|> for?", "a"]),
        ("[INST] What does [INST] mean? [/INST] a", ["What does [INST] mean?", "a"]),
        (
            "### Human: q### Assistant: # Spec\n### System: x\n#### User: y",
            ["q", "# Spec\n### System: x\n#### User: y"],
        ),
        ("Human: q\n\nAssistant: Sure!\nHuman: Who?\nAssistant: Me.", ["q", "Sure!\nHuman: Who?\nAssistant: Me."]),
        ("Human: q\n\nAssistant: a\nUSER: x", ["q", "a\nUSER: x"]),
        ("USER: q\n\n\nASSISTANT: Template:\nUSER: x\nSYSTEM: y", ["q", "Template:\nUSER: x\nSYSTEM: y"]),
    ],
)
def test_a_quoted_mark_begins_no_turn(text, turns):
    assert [turn["content"] for turn in written_turns(text)] == turns


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        (f"{CHATML}{ASSISTANT}", "a<|im_end|>\n"),
        (f"{CHATML}{ASSISTANT}".strip(), "\na"),
        (f"{CHATML}{ASSISTANT}".replace("\n", "\r\n"), "a"),
        (CHATML, f"{ASSISTANT}a<|im_end|>\n"),
        (CHATML, "a"),
        (LLAMA3, "a<|eot_id|>"),
        (LLAMA3.strip(), "a"),
        ("<start_of_turn>user\nq<end_of_turn>\n<start_of_turn>model", "a<end_of_turn>"),
        ("<|system|>\n</s>\n<|user|>\nq</s>\n", "<|assistant|>\na</s>"),
        ("<s>[INST] q [/INST]", " a </s>"),
        ("\n\nHuman: q\n\nAssistant:", " a"),
        ("\n\nHuman: q", "\n\nAssistant: a"),
    ],
)
def test_a_prompt_in_marks_and_its_answer_are_turns(prompt, answer):
    assert said({"prompt": prompt, "completion": answer}) == ASKED
    other = re.sub(r"\ba\b", "b", answer)
    pair = pair_of({"prompt": prompt, "chosen": answer, "rejected": other})
    assert [message["content"] for message in (pair.prompt[-1], pair.chosen, pair.rejected)] == ["q", "a", "b"]


def test_the_turns_before_an_answer_may_be_several_and_unmarked():
    prompt = "q\n<extra_id_1>Assistant\na\n<extra_id_1>User\nb"
    assert said({"prompt": prompt, "response": "c"}) == TWICE
    pair = pair_of({"prompt": prompt, "response_1": "c", "response_2": "d", "preference_strength": -2})
    assert [turn["content"] for turn in pair.prompt] == ["q", "a", "b"] and pair.chosen["content"] == "c"


@pytest.mark.parametrize("question", ["q", "Human: q\n\nAssistant:"])
def test_an_answer_that_is_the_whole_conversation_is_read_as_it(question):
    talk = "\n\nHuman: q\n\nAssistant: "
    pair = pair_of({"prompt": question, "chosen": f"{talk}a", "rejected": f"{talk}b"})
    assert [turn["content"] for turn in pair.prompt] == ["q"]
    assert (pair.chosen["content"], pair.rejected["content"]) == ("a", "b")


def test_an_answer_that_is_a_dialogue_stays_an_answer():
    dialogue = "Human: hi\n\nAssistant: yo"
    pair = pair_of({"prompt": "Write a dialogue.", "chosen": dialogue, "rejected": "No."})
    assert [turn["content"] for turn in pair.prompt] == ["Write a dialogue."] and pair.chosen["content"] == dialogue


@pytest.mark.parametrize(
    "record",
    [
        {"instruction": "Human:parse the log:\nUSER: root\nSYSTEM: linux\nAssistant:", "input": "", "output": "ok"},
        {"instruction": "Human: fix this:\n  Human: 1\n  Assistant: 2\nAssistant:", "output": "ok"},
        {"prompt": "Human: Continue:\nHuman: hi\nAssistant: yo\n\nAssistant:", "response": "ok"},
        {"question": "<|user|> vs <|assistant|>", "answer": "ok"},
        {"question": "What does\n<|im_start|>user\nmean?", "answer": "ok"},
    ],
)
def test_a_question_that_quotes_speakers_is_one_turn(record):
    assert [role for role, _ in said(record)] == ["user", "assistant"]


def test_what_stands_beside_a_prompt_in_marks_is_kept():
    record = {"prompt": f"{CHATML}{ASSISTANT}", "response": "a", "reasoning": "r", "history": [["x", "y"]]}
    ((messages, _),) = conversations_of(record)
    assert [message["content"] for message in messages] == ["x", "y", "q", "a"] and messages[-1]["reasoning"] == "r"
    assert said({"instruction": f"{CHATML}{ASSISTANT}", "input": "context", "output": "a"})[0] == (
        "user",
        "q\n\ncontext",
    )


@pytest.mark.parametrize("beside", [{"input": ""}, {"prompt": "q"}])
def test_a_question_without_an_answer_hides_no_text(beside):
    assert said({**beside, "text": f"{CHATML}{ASSISTANT}a<|im_end|>"}) == ASKED


def test_a_part_of_no_named_type_is_refused():
    with pytest.raises(MalformedChatError, match="unsupported_part"):
        conversations_of({"messages": [{"role": "user", "content": [{"type": ["text"], "text": "q"}]}]})


@pytest.mark.parametrize(
    "record",
    [
        {"instruction": "x" + "\n" * 1_000_000 + "y", "output": "a"},
        {"instruction": "x" + " " * 1_000_000 + "y", "output": "a"},
        {"text": "Human: q" + "\n" * 1_000_000 + "Assistant: a"},
        {
            "system": "a " * 500_000,
            "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
        },
    ],
)
def test_a_long_text_is_read_in_time_that_grows_as_it_does(record):
    """With its square, it would take hours."""
    assert said(record)[-1] == ("assistant", "a")


def test_answers_are_read_from_what_a_prompt_leaves_open():
    assert answered_turns("q", "a") == [] and answered_turns("### Human: q", "a") == []
