"""The chat template as segments equals the template as Jinja, in text and in tokens; what is trained is what an
assistant writes."""

from __future__ import annotations

import json

import numpy as np
import pytest

from model.text.chat_template import (
    CHAT_TEMPLATE,
    Message,
    answer_of,
    encode,
    is_thinking,
    problem_prompt,
    render,
    render_to_train,
)
from model.text.tokenizer_layout import SPECIAL_TOKENS, tokenizer_for_text
from tasks.data.tokenizer.bpe_tokenizer import tokenizer_config, train_bpe, write_json
from tests.support.data_inputs import prose

TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Wetter für Städte", "parameters": {"type": "object"}},
}
TEXTS = [
    "What is 12 + 7?",
    " padded \n",
    "Zeile\n\nzwei",
    "你好",
    "",
    "tab\tand 'quotes' \"both\" {% raw %} {{ x }}",
    "…é",
    "def f():\n    return 1",
]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, reasoning: str = "", calls: tuple = ()) -> Message:
    return {"role": "assistant", "content": text, "reasoning": reasoning, "tool_calls": list(calls)}


CALL = {
    "name": "weather",
    "arguments": {"city": "Köln", "days": 3, "units": ["C", None], "exact": True, "place": {"x": 1.5}},
}
CONVERSATIONS = {
    "one turn": [user("What is 12 + 7?"), assistant("19")],
    "reasoned": [user("What is 12 + 7?"), assistant("19", "12 + 7 = 19")],
    "history": [user("a"), assistant("b", "dropped"), user("c"), assistant("d", "kept")],
    "system": [{"role": "system", "content": "Be brief.\n"}, user("a"), assistant("b")],
    "tools": [
        user("a"),
        assistant("", "why", (CALL, CALL)),
        {"role": "tool", "content": "sun"},
        {"role": "tool", "content": "rain\n"},
        assistant("Both.", "see"),
        user("b"),
        assistant("again", "", (CALL,)),
        {"role": "tool", "content": ""},
        assistant("c"),
    ],
    "no arguments": [user("a"), assistant("b", "", ({"name": "now", "arguments": {}},))],
    "no user": [assistant("b", "r")],
    "unanswered": [user("a"), user("b")],
}


def random_conversation(seed: int) -> list[Message]:
    draw = np.random.default_rng(seed)
    said: list[Message] = [{"role": "system", "content": str(draw.choice(TEXTS))}] if draw.random() < 0.3 else []
    for _ in range(draw.integers(1, 4)):
        said.append(user(str(draw.choice(TEXTS))))
        for _ in range(draw.integers(0, 3)):
            said.append(assistant(str(draw.choice(TEXTS)), str(draw.choice(TEXTS)), (CALL,) * int(draw.integers(1, 3))))
            said += [{"role": "tool", "content": str(draw.choice(TEXTS))}] * int(draw.integers(1, 3))
        said.append(assistant(str(draw.choice(TEXTS)), str(draw.choice(TEXTS))))
    return said


ALL = {**CONVERSATIONS, **{f"random {seed}": random_conversation(seed) for seed in range(60)}}


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    texts = [prose(seed) for seed in range(60)] + [text for text in TEXTS for _ in range(3)]
    tokenizer = train_bpe(iter(texts), 400)
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(tokenizer_config(tokenizer), directory / "tokenizer_config.json")
    return directory


@pytest.fixture(scope="module")
def hugging_face(tokenizer_dir):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_dir)


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir):
    return tokenizer_for_text(str(tokenizer_dir / "tokenizer.json"))


def served(hugging_face, messages, tools, **given):
    """What a server makes of the same conversation: transformers, our Jinja, the names that servers use."""
    named = [
        {**{k: v for k, v in message.items() if k != "reasoning"}, "reasoning_content": message.get("reasoning", "")}
        for message in messages
    ]
    for message in named:
        message["tool_calls"] = [{"type": "function", "function": call} for call in message.get("tool_calls", ())]
    return hugging_face.apply_chat_template(named, tools=list(tools) or None, **given)


@pytest.mark.parametrize("name", ALL)
def test_segments_and_jinja_give_the_same_text_and_the_same_tokens(name, tokenizer, hugging_face):
    for tools in ((), (TOOL, TOOL)):
        for enable_thinking in (True, False):
            for add_generation_prompt in (True, False):
                given = {"enable_thinking": enable_thinking, "add_generation_prompt": add_generation_prompt}
                segments = render(ALL[name], tools, **given)
                assert "".join(segment.text for segment in segments) == served(
                    hugging_face, ALL[name], tools, tokenize=False, **given
                )
                token_ids, trained = encode(tokenizer, segments)
                assert token_ids == served(hugging_face, ALL[name], tools, **given)["input_ids"]
                assert len(trained) == len(token_ids)


def test_a_switch_that_a_user_wrote_is_not_doubled(tokenizer, hugging_face):
    given = {"enable_thinking": False, "add_generation_prompt": True}
    segments = render([user("a/nothink")], (), **given)
    assert "".join(segment.text for segment in segments) == served(
        hugging_face, [user("a/nothink")], (), tokenize=False, **given
    )
    assert encode(tokenizer, segments)[0] == served(hugging_face, [user("a")], (), **given)["input_ids"]


def test_thinking_is_on_unless_it_is_switched_off(hugging_face):
    text = served(hugging_face, [user("a")], (), tokenize=False, add_generation_prompt=True)
    assert text == "".join(s.text for s in render([user("a")], (), enable_thinking=True, add_generation_prompt=True))


def test_jinja_takes_thinking_inside_the_content_apart_as_servers_return_it(hugging_face):
    apart = [user("a"), {"role": "assistant", "content": "b", "reasoning_content": "r"}]
    inside = [user("a"), {"role": "assistant", "content": "\n<think>r</think>\nb"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}]}, apart[1]]
    texts = {hugging_face.apply_chat_template(messages, tokenize=False) for messages in (apart, inside, parts)}
    assert len(texts) == 1


def trained_text(messages, tools=()) -> list[str]:
    """The runs of trained text, in order."""
    runs: list[str] = [""]
    for segment in render_to_train(messages, tools):
        if segment.is_trained:
            runs[-1] += segment.text
        elif runs[-1]:
            runs.append("")
    return [run for run in runs if run]


def test_an_answer_and_the_role_token_that_closes_it_are_trained_and_nothing_else():
    assert trained_text([user("q"), assistant("19")]) == ["\n19<|user|>"]
    assert trained_text([user("q"), assistant("19", "12 + 7 = 19")]) == ["\n<think>12 + 7 = 19</think>\n19<|user|>"]
    assert trained_text([user("a"), assistant("b", "old"), user("c"), assistant("d", "new")]) == [
        "\nb<|user|>",
        "\n<think>new</think>\nd<|user|>",
    ]
    call = {"name": "f", "arguments": {"k": 1}}
    written = "\n<tool_call>f\n<arg_key>k</arg_key>\n<arg_value>1</arg_value>\n</tool_call><|observation|>"
    assert trained_text([user("a"), assistant("", "", (call,)), {"role": "tool", "content": "r"}, assistant("d")]) == [
        written,
        "\nd<|user|>",
    ]
    assert trained_text([user("a"), assistant("b", "r", (call,))]) == [f"\n<think>r</think>\nb{written}"]


def test_the_mask_follows_the_segments_token_by_token(tokenizer):
    token_ids, trained = encode(tokenizer, render_to_train([user("q"), assistant("19", "r")], ()))
    text = tokenizer.decode(
        [token for token, is_trained in zip(token_ids, trained, strict=True) if is_trained], skip_special_tokens=False
    )
    assert text == "\n<think>r</think>\n19<|user|>"
    assert tokenizer.id_to_token(token_ids[-1]) == "<|user|>" and trained[-1]


def test_a_conversation_thinks_if_it_reasons_after_the_last_question():
    assert is_thinking(CONVERSATIONS["reasoned"]) and is_thinking(CONVERSATIONS["history"])
    assert not is_thinking(CONVERSATIONS["one turn"]) and not is_thinking(
        [*CONVERSATIONS["reasoned"], user("c"), assistant("d")]
    )


@pytest.mark.parametrize("special", SPECIAL_TOKENS)
def test_special_strings_that_people_write_stay_characters(special, tokenizer):
    answer = {"role": "tool", "content": special}
    messages = [
        user(special),
        assistant(special, special, ({"name": special, "arguments": {special: special}},)),
        answer,
        assistant(special),
    ]
    plain = [
        user("x"),
        assistant("x", "x", ({"name": "x", "arguments": {"x": "x"}},)),
        {"role": "tool", "content": "x"},
        assistant("x"),
    ]
    ids = [
        token
        for token in encode(tokenizer, render(messages, (), enable_thinking=True, add_generation_prompt=False))[0]
        if token >= 400
    ]
    assert ids == [
        token
        for token in encode(tokenizer, render(plain, (), enable_thinking=True, add_generation_prompt=False))[0]
        if token >= 400
    ]


def test_a_prompt_is_the_trained_conversation_up_to_where_the_assistant_writes():
    for reasoning in ("", "12 + 7 = 19"):
        asked = "".join(segment.text for segment in problem_prompt("What is 12 + 7?", enable_thinking=bool(reasoning)))
        segments = render_to_train([user("What is 12 + 7?"), assistant("19", reasoning)], ())
        whole = "".join(segment.text for segment in segments)
        assert whole == asked + "".join(segment.text for segment in segments if segment.is_trained)
        assert answer_of(whole.removeprefix(asked)) == "19"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\n19<|user|>more", "19"),
        ("19", "19"),
        ("\n<think>12 + 7 = 19</think>\n19<|endoftext|>", "19"),
        ("<think>never ends", ""),
        ("<think>a</think>", ""),
        ("</think>19", "19"),
        ("19<|observation|></think>20", "19"),
        ("", ""),
    ],
)
def test_the_answer_is_after_the_reasoning_and_before_the_end(text, answer):
    assert answer_of(text) == answer


def test_the_template_goes_with_the_tokenizer(tokenizer_dir, hugging_face):
    assert json.loads((tokenizer_dir / "tokenizer_config.json").read_text())["chat_template"] == CHAT_TEMPLATE
    assert hugging_face.chat_template == CHAT_TEMPLATE
