"""What a served model must answer besides greedy tokens: each check passes the real server, and finds one that is
wrong."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from types import SimpleNamespace

import psutil
import pytest
from openai import AuthenticationError, BadRequestError, OpenAI

from infra.serving.call_schemas import standing_alone, texts_of
from infra.serving.model_server import Access, running_model_server, start_model_server
from infra.serving.required_call import grammar, parse, required_call
from model.formats.gguf_checkpoint import write_gguf
from model.text.chat_template import render
from tasks.data.prompts.python_turns import SHOWN_TOOLS
from tasks.release.served_requests import (
    NUM_CONCURRENT,
    calls_of_file,
    check_call,
    check_concurrent,
    check_key,
    check_oversized,
    check_schema,
    check_stream,
)
from tasks.serving.server_model import tool_exchange
from tests.conftest import ROOT
from tests.release.test_release import SERVING, answers_of, gguf, reference_of, served, store  # noqa: F401
from tests.support.evaluation_fakes import checkpoint
from tests.support.pipeline import command, environment, glm46

KEY = "key-of-the-clients"
JSON = {"content-type": "application/json"}


def stubbed(text: str, *pieces: str) -> OpenAI:
    """A client whose server answers with this text, and streams these pieces."""

    def create(*, stream: bool = False, **asked):
        if stream:
            return [SimpleNamespace(choices=[SimpleNamespace(text=piece)]) for piece in pieces]
        return SimpleNamespace(choices=[SimpleNamespace(text=text, message=SimpleNamespace(content=text))])

    completions = SimpleNamespace(create=create)
    return SimpleNamespace(completions=completions, chat=SimpleNamespace(completions=completions))  # pyright: ignore[reportReturnType]


def test_a_server_without_a_key_and_one_that_takes_any_prompt_are_found(served):  # noqa: F811
    assert [reason.split(" was ")[0] for reason in check_key(served.url)] == [
        "a request with a wrong key",
        "a request with no key",
    ]
    assert check_oversized(served.url, JSON, SERVING.context_length + 1) == []
    assert check_oversized(served.url, JSON, 3) == ["a prompt of 3 tokens was answered with status 200, not 400"]


def test_other_pieces_than_the_text_are_found(store):  # noqa: F811
    answer = answers_of(reference_of(store))[0]
    assert check_stream(stubbed("abc", "ab", "c"), "m", answer) == []
    for pieces in (("ab", "d"), ("abc",), ()):
        assert check_stream(stubbed("abc", *pieces), "m", answer)[0].startswith(
            f"prompt {answer.prompt!r}: streamed in"
        )


@pytest.mark.parametrize("text", ["yes", '{"answer": "perhaps"}', '{"answer": "yes", "more": 1}', '{"answer": "y'])
def test_an_answer_outside_its_schema_is_found(text):
    assert check_schema(stubbed('{ "answer": "no"}'), "m", "Is it?", {}) == []
    assert check_schema(stubbed(text), "m", "Is it?", {}) == [
        f"message 'Is it?' with a JSON schema was answered with {text!r}"
    ]


def calling(name: str, arguments: str, finish_reason: str = "tool_calls") -> OpenAI:
    """A client whose server answers with this call, or with a text where there is no name."""
    function = SimpleNamespace(name=name, arguments=arguments)
    calls = [SimpleNamespace(type="function", function=function)] if name else None
    message = SimpleNamespace(content=None if name else arguments, tool_calls=calls)
    choice = SimpleNamespace(message=message, finish_reason=finish_reason)
    completions = SimpleNamespace(create=lambda **asked: SimpleNamespace(choices=[choice]))
    return SimpleNamespace(chat=SimpleNamespace(completions=completions))  # pyright: ignore[reportReturnType]


RIGHT = '{"answer": "no", "is_sure": true, "score": {"points": 2}}'


@pytest.mark.parametrize(
    "answer",
    [
        ("record_answer", RIGHT.replace("no", "perhaps")),
        ("record_answer", RIGHT.replace("2", "3")),
        ("record_answer", RIGHT[:-1]),
        ("record", RIGHT),
        ("record_answer", RIGHT, "stop"),
        ("", "no"),
    ],
)
def test_a_call_outside_its_schema_is_found(answer):
    assert check_call(calling("record_answer", RIGHT), "m", "Is it?") == []
    (reason,) = check_call(calling(*answer), "m", "Is it?")
    assert reason.startswith("message 'Is it?' with a required function was answered with ")


TOOL: dict = {
    "type": "function",
    "function": {
        "name": "record_answer",
        "description": "Records the answer.",
        "parameters": {
            "type": "object",
            "properties": {"grade": {"enum": [1, 2]}, "is_yes": {"type": "boolean"}},
            "required": ["grade", "is_yes"],
        },
    },
}
TOOL_ARGUMENTS = [{"grade": grade, "is_yes": is_yes} for grade in (1, 2) for is_yes in (True, False)]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of days ahead",
        "parameters": {"type": "object", "properties": {"days": {"enum": [1, 7]}}, "required": ["days"]},
    },
}


NAMED = {"type": "function", "function": {"name": "weather"}}


def asked_for(choice: object, **more: object) -> dict:
    messages = [{"role": "user", "content": "How warm is it?"}]
    return {"model": "glm46", "messages": messages, "tools": [TOOL, WEATHER], "tool_choice": choice, **more}


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_required_is_made_whatever_the_model_learnt(served, stream):  # noqa: F811
    client = OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    for choice, names in (("required", {"record_answer", "weather"}), (NAMED, {"weather"})):
        answer = client.chat.completions.create(**asked_for(choice, max_tokens=320, temperature=0, stream=stream))
        if stream:
            deltas = [each.choices[0].delta.tool_calls or [] for each in answer if each.choices]
            parts = [call.function for calls in deltas for call in calls]
            name, arguments = ("".join(getattr(part, field) or "" for part in parts) for field in ("name", "arguments"))
        else:
            (call,) = answer.choices[0].message.tool_calls
            assert not answer.choices[0].message.content
            name, arguments = call.function.name, call.function.arguments
        assert name in names
        accepted = [{"days": 1}, {"days": 7}] if name == "weather" else TOOL_ARGUMENTS
        assert json.loads(arguments) in accepted


@pytest.mark.parametrize(("choice", "tools"), [("required", [TOOL, WEATHER]), (NAMED, [WEATHER])])
def test_a_required_call_begins_as_training_writes_it(served, choice, tools):  # noqa: F811
    body = json.dumps(required_call(asked_for(choice)).template).encode()
    with urllib.request.urlopen(
        urllib.request.Request(f"{served.url}/apply-template", body, JSON), timeout=30
    ) as answer:
        begun = json.load(answer)["prompt"]
    called = {"role": "assistant", "content": "", "tool_calls": [{"name": "weather", "arguments": {}}]}
    turns = [{"role": "user", "content": "How warm is it?"}, called]
    segments = render(turns, tools, enable_thinking=False, add_generation_prompt=False)
    assert "".join(segment.text for segment in segments) == f"{begun}weather\n</tool_call>"


def test_what_a_tool_answered_is_rendered_as_training_writes_it(served):  # noqa: F811
    """As `glm46 eval` sends the turns of a model that runs programs."""
    asked, code = {"role": "user", "content": "What is 6 times 7?"}, {"code": "print(6 * 7)"}
    turns = [asked, *tool_exchange("I compute.", [("python", json.dumps(code))], ["42"])]
    tools, thinking = json.loads(SHOWN_TOOLS), {"enable_thinking": False}
    body = json.dumps({"messages": turns, "tools": tools, "chat_template_kwargs": thinking}).encode()
    with urllib.request.urlopen(
        urllib.request.Request(f"{served.url}/apply-template", body, JSON), timeout=30
    ) as answer:
        prompt = json.load(answer)["prompt"]
    called = {"role": "assistant", "content": "I compute.", "tool_calls": [{"name": "python", "arguments": code}]}
    messages = [asked, called, {"role": "tool", "content": "42"}]
    assert prompt == "".join(each.text for each in render(messages, tools, add_generation_prompt=True, **thinking))


def test_a_call_of_an_unknown_function_is_refused_and_other_requests_pass_unchanged(served):  # noqa: F811
    client = OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(BadRequestError, match="tool_choice asks for the function 'time': name one of tools"):
        client.chat.completions.create(**asked_for({"type": "function", "function": {"name": "time"}}))
    for body in (asked_for("auto"), asked_for("none")):
        assert required_call(body) is None
    with pytest.raises(ValueError, match="tool_choice requires a call, and tools describes no function"):
        required_call(asked_for("required") | {"tools": []})


SCHEMAS: dict[str, dict] = {
    "search": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "where": {"$ref": "#/$defs/place"},
            "kind": {"type": "string", "enum": ["a b", 'q"', "<arg_value>"]},
            "limit": {"type": ["integer", "null"]},
            "level": {"enum": [1, "one"]},
            "any": {},
        },
        "required": ["text", "kind"],
        "$defs": {"place": {"type": "object", "properties": {"street": {"type": "string"}}, "required": ["street"]}},
    },
    "stop": {},
}


@pytest.mark.parametrize(
    "arguments",
    [
        {"text": "a\n</tool_call> <arg_key>k</arg_key> 5", "kind": "<arg_value>"},
        {"text": "", "where": {"street": "Ä <b>"}, "kind": 'q"', "limit": None, "level": "one", "any": [1, {"b": 2}]},
        {"text": "5", "kind": "a b", "limit": 7, "level": 1, "any": "x y"},
    ],
)
def test_a_call_is_read_as_training_writes_it(arguments):
    turn = {"role": "assistant", "content": "", "tool_calls": [{"name": "search", "arguments": arguments}]}
    segments = render([{"role": "user", "content": "a"}, turn], [], enable_thinking=False, add_generation_prompt=False)
    written = "".join(segment.text for segment in segments).partition("<tool_call>")[2]
    assert parse(written, SCHEMAS) == ("search", arguments)
    assert parse("stop\n</tool_call>", SCHEMAS) == ("stop", {})


@pytest.mark.parametrize(
    "text", ["other\n</tool_call>", "stop\n", "stop\nx</tool_call>", "stop\n<arg_key>a</arg_key>\n</tool_call>"]
)
def test_what_no_grammar_can_have_held_is_no_call(text):
    with pytest.raises(ValueError, match="could not hold the answer to the schemas of search, stop"):
        parse(text, SCHEMAS)


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        ({"anyOf": [{"type": "string"}, {"const": "a"}]}, "all"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "some"),
        ({"oneOf": [{"type": "object"}, {"enum": [1]}]}, "none"),
        ({"allOf": [{"enum": ["a", "b"]}], "default": "a"}, "all"),
        ({"allOf": [{}, {"type": "string"}], "minLength": 1}, "all"),
        ({"allOf": [{"minimum": 1}, {"type": "integer"}]}, "none"),
        ({"allOf": [{}]}, "some"),
        (True, "some"),
    ],
)
def test_whether_values_are_strings_is_read_from_the_schema(schema, texts):
    assert texts_of(schema, {}) == texts


def test_definitions_that_name_one_another_twice_are_looked_at_once():
    """40 of them have 2 to the power of 40 paths from the first to the last."""
    defined: dict = {
        f"d{number}": {kind: [{"$ref": f"#/$defs/d{number + 1}"}] * 2}
        for number, kind in enumerate(["anyOf", "oneOf"] * 20)
    }
    for last, texts in (({"type": "string"}, "all"), ({"type": "integer"}, "none")):
        whole = {"properties": {"k": {"$ref": "#/$defs/d0"}}, "$defs": {**defined, "d40": last}}
        assert texts_of(whole["properties"]["k"], whole) == texts
        function = {"type": "function", "function": {"name": "f", "parameters": whole}}
        assert required_call(asked_for("required") | {"tools": [function]}).parameters == {"f": whole}


COLOUR = {"enum": ["red", "blue"]}


@pytest.mark.parametrize(
    "value",
    [{"$ref": "#/$defs/colour"}, {"allOf": [{"$ref": "#/$defs/colour"}], "default": "red", "description": "a colour"}],
)
@pytest.mark.parametrize("is_reference", [False, True])
def test_every_spelling_of_a_schema_has_one_grammar(value, is_reference):
    """pydantic puts a reference that has a default into allOf, zod the parameters themselves into a definition."""
    plain = {"type": "object", "properties": {"k": COLOUR, "n": {"type": "integer"}}, "required": ["k"]}
    written, defined = {**plain, "properties": {**plain["properties"], "k": value}}, {"colour": COLOUR}
    if is_reference:
        written, defined = {"$ref": "#/$defs/f"}, {**defined, "f": written}
    grammars = []
    for parameters in (plain, {**written, "$defs": defined}):
        function = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        grammars.append(required_call(asked_for("required") | {"tools": [function]}).completion("a")["grammar"])
    first, second = (each.partition("\nvalue0_1:")[0] for each in grammars)
    assert first == second


def test_a_word_that_only_pythons_reader_takes_for_a_number_stays_a_word():
    schemas = {"f": {"properties": {"k": {"type": ["string", "number"]}}}}
    for word in ("NaN", "-Infinity", "1e999"):
        assert parse(f"f\n<arg_key>k</arg_key>\n<arg_value>{word}</arg_value>\n</tool_call>", schemas)[1] == {"k": word}


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "90210", "90210"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"type": ["string", "integer"]}, "7", 7),
        ({"type": ["string", "integer"]}, "7.5", "7.5"),
        ({"anyOf": [{"enum": ["asc"]}, {"type": "boolean"}]}, "true", True),
        ({"enum": ["a", 1]}, "1", 1),
        ({}, "[1]", [1]),
    ],
)
def test_a_value_is_json_only_where_its_schema_accepts_that(schema, written, value):
    text = f"f\n<arg_key>k</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>"
    assert parse(text, {"f": {"properties": {"k": schema}}})[1] == {"k": value}


def test_an_optional_word_is_held_to_its_options():
    options = {"anyOf": [{"enum": ["asc", "desc"]}, {"type": "null"}]}
    made = grammar({"f": {"properties": {"k": options}, "required": ["k"]}})
    assert "value0_0: value0_0_1 | value0_0_2\n" in made and '"asc</arg_value>\\n"' in made
    assert made.count("text") == 1, "the rule of any text stands there and is not used"


def test_a_schema_for_the_grammar_has_what_it_refers_to_and_no_more():
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "format": {"type": "string"}}}
    whole = {
        "properties": {"from": {"$ref": "#/$defs/node"}, "to": {"$ref": "#/properties/from"}},
        "$defs": {"node": node, "other": {"type": "integer"}},
    }
    assert standing_alone(node, whole) == {
        "type": "object",
        "properties": {"next": {"$ref": "#/$defs/0"}, "format": {"type": "string"}},
        "$defs": {"0": {"type": "object", "properties": {"next": {"$ref": "#/$defs/0"}, "format": {"type": "string"}}}},
    }
    assert texts_of(whole["properties"]["to"], whole) == "none"
    items = {"type": "string", "format": "uri", "default": {"format": "uri"}}
    dropped = {"type": "array", "items": items, "uniqueItems": True, "propertyNames": {"type": "string"}}
    kept = {"type": "array", "items": {"type": "string", "default": {"format": "uri"}}}
    assert standing_alone(dropped, {}) == kept
    assert standing_alone({"type": "string", "format": ["uri"]}, {}) == {"type": "string"}


def test_a_schema_whose_grammar_would_be_huge_is_refused():
    node = {"type": "object", "properties": {f"p{number}": {"type": "integer"} for number in range(2000)}}
    whole = {"properties": {f"k{number}": {"$ref": "#/$defs/node"} for number in range(200)}, "$defs": {"node": node}}
    with pytest.raises(ValueError, match="the schema of f makes a grammar of more than 4 MiB"):
        grammar({"f": whole})


def test_a_reference_to_nothing_and_one_to_itself_are_refused():
    for schema in ({"$ref": "#/$defs/a"}, {"$ref": "other.json"}):
        whole = {"properties": {"k": schema}, "$defs": {"a": {"$ref": "#/$defs/a"}}}
        with pytest.raises(ValueError, match="leads nowhere"):
            grammar({"f": whole})


ITSELF = {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"anyOf": [{"$ref": "#/$defs/b"}]}}}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"required": None}, "parameters of f: required is None: list names"),
        ({"required": 5}, "required is 5"),
        ({"required": "a"}, "required is 'a'"),
        ({"required": [["a"]]}, "required is"),
        ({"properties": ["a"]}, "parameters of f: properties is no object"),
        ({"properties": {"a": {"enum": 5}}}, "parameters of f: a: enum is 5: write a list"),
        ({"properties": {"a": {"enum": None}}}, "enum is None"),
        ({"properties": {"a": {"type": 5}}}, "type is 5: write a name"),
        ({"properties": {"a": {"type": None}}}, "type is None"),
        ({"properties": {"a": {"anyOf": 5}}}, "anyOf is 5: write a list"),
        ({"properties": {"a": {"oneOf": [{"enum": 5}]}}}, "a: enum is 5"),
        ({"properties": {"a": {"allOf": 5}}}, "allOf is 5: write a list"),
        ({"properties": {"a": {"allOf": [{"type": 5}]}}}, "a: type is 5"),
        ({"$ref": "#/$defs/b"}, "leads nowhere"),
        ({"properties": {"a": {"$ref": ["b"]}}}, "leads nowhere"),
        (ITSELF, "a is an option of itself"),
    ],
)
def test_a_schema_whose_keywords_have_other_types_is_refused_with_the_reason(schema, reason):
    asked = asked_for("required") | {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}
    with pytest.raises(ValueError, match=re.escape(reason)):
        required_call(asked)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"n": "2"}, "leave n and logprobs out"),
        ({"n": 2}, "leave n and logprobs out"),
        ({"n": [1]}, "leave n and logprobs out"),
        ({"stream_options": "all"}, "stream_options is no object"),
        ({"tools": [{"type": "function", "function": {"name": 5}}]}, "the names of tools are [5]: write strings"),
    ],
)
def test_a_request_whose_fields_have_other_types_is_refused_with_the_reason(more, reason):
    with pytest.raises(ValueError, match=re.escape(reason)):
        required_call(asked_for("required") | more)


@pytest.mark.parametrize("schema", [*SCHEMAS.values(), {"properties": None}, {"properties": {"a": True}}])
def test_a_schema_with_the_right_types_has_a_grammar(schema):
    asked = asked_for("required", n=1, stream_options=None)
    asked["tools"] = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    assert required_call(asked).completion("a")["grammar"] == grammar({"f": schema})


def test_an_untrained_model_calls_by_any_schema_or_says_why_not(served):  # noqa: F811
    """It never ends a text by itself, so one that is required uses up the tokens."""
    client = OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)

    def ask(parameters, **more):
        function = {"name": "search", "parameters": parameters}
        asked = {"model": "m", "messages": [{"role": "user", "content": "Is it?"}], "max_tokens": 200, "temperature": 0}
        tools = [{"type": "function", "function": function}]
        return client.chat.completions.create(**asked, tools=tools, tool_choice="required", **more).choices[0]

    closed = {"additionalProperties": False}
    place = {"type": "object", "properties": {"street": {"enum": ["a"]}}, "required": ["street"], **closed}
    whole = {"properties": {"kind": SCHEMAS["search"]["properties"]["kind"], "where": {"$ref": "#/$defs/place"}}}
    choice = ask({**whole, "required": ["kind", "where"], "$defs": {"place": place}})
    arguments = json.loads(choice.message.tool_calls[0].function.arguments)
    assert arguments["where"] == {"street": "a"} and arguments["kind"] in whole["properties"]["kind"]["enum"]
    cut = ask({"properties": {"text": {"type": "string"}}, "required": ["text"]})
    assert cut.finish_reason == "length" and not cut.message.tool_calls
    assert cut.message.content.startswith("<tool_call>search\n<arg_key>text</arg_key>\n<arg_value>")
    texts = {"type": "array", "items": {"type": "string", "pattern": "^(?=a)b$"}, "minItems": 1}
    for wrong, reason in ((texts, "simplify them"), ({"type": "nonsense"}, "unrecognized type nonsense")):
        with pytest.raises(BadRequestError, match=reason):
            ask({"properties": {"k": wrong}, "required": ["k"]})
    with pytest.raises(BadRequestError, match="leave n and logprobs out"):
        ask({}, n=2)


def test_an_answer_to_another_prompt_is_found_among_those_at_the_same_time(store):  # noqa: F811
    answers, asked = answers_of(reference_of(store)), []

    def check_answer(answer):
        asked.append(answer)
        return ["it differs"] if answer.prompt == answers[1].prompt else []

    reasons = check_concurrent(answers, check_answer)
    assert len(asked) == NUM_CONCURRENT and {answer.prompt for answer in asked} == {each.prompt for each in answers}
    assert all(0 < len(answer.token_ids) == answer.num_clear <= 8 for answer in asked)
    differ = sum(answer.prompt == answers[1].prompt for answer in asked)
    assert reasons == [f"{NUM_CONCURRENT} requests at the same time: it differs ({differ} differ)"]


@pytest.fixture(scope="module")
def file(store, tmp_path_factory):  # noqa: F811
    path = tmp_path_factory.mktemp("file") / "mine.gguf"
    source = checkpoint(store, "trained").directory("hf")
    write_gguf(source, source / "tokenizer.json", path, gguf_type="F32", name="mine")
    return path


def test_a_file_is_served_to_other_machines_with_a_key_that_no_command_line_shows(file, tmp_path):
    options = ["--host", "0.0.0.0", "--port", "0", "--slots", "4", "--context", "64", "--api-key-env", "MY_KEY"]
    serving = subprocess.Popen(
        command("serve", "--checkpoint", str(file), *options),
        cwd=ROOT,
        env=environment(tmp_path, MY_KEY=KEY),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        line = serving.stdout.readline()
        assert line.startswith("mine at http://127.0.0.1:") and KEY not in line
        url = line.split(" at ")[1].split()[0]
        with urllib.request.urlopen(url.replace("/v1", "/health"), timeout=30) as health:
            assert health.status == 200, "who restarts a server has no key"
        client = OpenAI(base_url=url, api_key=KEY, max_retries=0)
        assert [model.id for model in client.models.list()] == ["mine"]
        answer = client.completions.create(model="mine", prompt="4 + 1 =", max_tokens=60, temperature=0)
        assert answer.usage.completion_tokens > 1
        with pytest.raises(AuthenticationError, match="the key is missing or wrong"):
            OpenAI(base_url=url, api_key=f"{KEY}2", max_retries=0).models.list()
        assert check_key(url.removesuffix("/v1")) == []
        children = psutil.Process(serving.pid).children(recursive=True)
        assert children and not [each for each in children if KEY in " ".join(each.cmdline())]
    finally:
        serving.terminate()
        serving.wait()


def test_drafts_of_the_mtp_layer_change_no_token(file, tmp_path):
    """As llama.cpp makes them, which says how many it took."""
    prompts, answers, taken = ("4 + 1 =", "def add", "What is", "Привет"), [], 0
    for is_drafting in (False, True):
        access = Access(is_drafting=is_drafting)
        with running_model_server(file, SERVING, tmp_path / "log", access=access) as server:
            for prompt in prompts:
                asked = {"prompt": prompt, "n_predict": 60, "temperature": 0, "ignore_eos": True, "return_tokens": True}
                request = urllib.request.Request(f"{server.url}/completion", json.dumps(asked).encode(), JSON)
                with urllib.request.urlopen(request, timeout=60) as response:
                    answer = json.load(response)
                answers.append(answer["tokens"])
                taken += answer["timings"].get("draft_n_accepted", 0)
    assert answers[:4] == answers[4:] and all(len(tokens) == 60 for tokens in answers)
    assert taken > 0, "no draft was right: test is too easy"


@pytest.mark.parametrize("num_calls", [20, pytest.param(500, marks=pytest.mark.long)])
def test_drafts_change_no_function_call(file, tmp_path, num_calls):
    made = []
    for is_drafting in (False, True):
        made.append(calls_of_file(file, SERVING, tmp_path / "log", num_calls, is_drafting=is_drafting))
    assert made[0].calls == made[1].calls and len(made[0].calls) == num_calls
    assert len(set(made[0].calls)) > num_calls // 2 and made[0].num_taken == 0
    assert made[1].num_taken > 0, "no draft was right: test is too easy"


def test_drafts_of_a_file_without_the_layer_are_refused(store, tmp_path):  # noqa: F811
    source = tmp_path / "hf"
    shutil.copytree(checkpoint(store, "trained").directory("hf"), source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    write_gguf(source, source / "tokenizer.json", tmp_path / "m.gguf", gguf_type="F32", name="mine")
    with pytest.raises(ValueError, match="has no MTP layer to draft with: write it again, or leave --drafts out"):
        start_model_server(tmp_path / "m.gguf", SERVING, tmp_path / "log", access=Access(is_drafting=True))


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--host", "0.0.0.0"], 1, "so its clients need a key: name the environment variable"),
        (["--api-key-env", "NOT_SET"], 2, "the environment variable NOT_SET of --api-key-env is not set"),
        ([], 1, "broken.gguf is damaged or no GGUF file"),
    ],
)
def test_what_cannot_be_served_is_one_sentence(arguments, code, message, file, tmp_path):
    path = file
    if not arguments:
        path = tmp_path / "broken.gguf"
        path.write_bytes(file.read_bytes()[:4000])
    ended = glm46("serve", "--checkpoint", str(path), "--port", "0", *arguments, home=tmp_path / "home")
    assert ended.exit_code == code and message in ended.stderr, ended.stderr


def test_a_directory_is_refused_with_the_command_that_converts_it(tmp_path):
    ended = glm46("serve", "--checkpoint", str(tmp_path), home=tmp_path / "home")
    assert ended.exit_code == 2 and f"glm46 convert {tmp_path} FILE.gguf --to gguf" in ended.stderr
