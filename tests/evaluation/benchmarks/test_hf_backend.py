"""Our figures of every kind of benchmark, against those of lm-evaluation-harness's own `hf` backend on the exported
directory."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from configs.load import load_suite
from model.generation.generation import InProcessEngine
from tasks.data.prompts.prompt_records import tool_request
from tasks.evaluation.benchmarks.benchmark_tasks import is_right
from tasks.evaluation.benchmarks.checkpoint_model import checkpoint_model
from tasks.evaluation.benchmarks.run_suite import read_suite_items, run_suite
from tasks.evaluation.engine import load_engine
from tasks.evaluation.harness import EngineModel, ToolRequest
from tasks.evaluation.intervals import share_interval
from tasks.release.generate_text import generate_text
from tests.evaluation.benchmarks.toy_suite import (
    ANSWERS,
    LIKELIHOOD,
    ROWS,
    SEQUENCE_LENGTH,
    write_suite,
    write_toy_model,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(our model, the hf backend's, what both are asked)."""
    directory = tmp_path_factory.mktemp("hf")
    model_dir = write_toy_model(directory / "model")
    suite_path, data = write_suite(directory)
    suite = load_suite(str(suite_path))
    # The hf backend passes no tools to its template.
    with_tools = ("tools", "math_with_python")
    without_tools = [benchmark for benchmark in suite.benchmarks if benchmark.kind not in with_tools]
    asked = read_suite_items("toy", suite.model_copy(update={"benchmarks": without_tools}), str(data), None)
    engine = load_engine(model_dir, weights_version="v", batch_sequences=3)
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    ours = EngineModel(
        engine, tokenizer, SEQUENCE_LENGTH, "v", lambda progress: None, starts_documents=False, enable_thinking=False
    )
    theirs = HFLM(
        pretrained=str(model_dir),
        device="cpu",
        dtype="float32",
        batch_size=1,
        max_length=SEQUENCE_LENGTH,
        chat_template_args={"enable_thinking": False},
    )
    return ours, theirs, asked


@pytest.fixture(scope="module")
def results(models):
    """(ours, the hf backend's), each the result and its items."""
    *asked_models, asked = models
    return [run_suite(model, asked, "toy", "x", lambda progress: None) for model in asked_models]


def test_tools_are_shown_as_the_exported_template_shows_them(models):
    ours, theirs, _ = models
    question, tools = tool_request(ROWS["calls"][0])
    ours.tool_requests = {"1": ToolRequest(question, json.loads(tools))}
    shown = theirs.tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        tools=json.loads(tools),
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    assert ours.apply_chat_template([{"role": "user", "content": "1"}]) == shown
    assert '"type": "object"' in shown and "What is 1 + 1?/nothink<|assistant|>" in shown
    assert "tools" not in ours.apply_chat_template([{"role": "user", "content": "2"}])


def test_a_prompt_that_states_what_the_answer_needs_is_never_cut(models):
    ours, _, asked = models
    needle = [each for each in asked.suite.benchmarks if each.name == "needle"]
    short = asked.suite.model_copy(update={"benchmarks": needle})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours, "sequence_length", 100)
        with pytest.raises(ValueError, match=r"a prompt has \d+ tokens, and 88 of the 100 of a row are free"):
            run_suite(ours, replace(asked, suite=short), "toy", "x", lambda progress: None)


OWN_TEMPLATE = (
    "{%- if messages | length > 1 -%}{{- raise_exception('one message only') -}}{%- endif -%}"
    "{{ eos_token }}<|system|>You are my tune.{% for message in messages %}<|user|>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ enable_thinking }} {{ tools | tojson }}{% endif %}"
)


def test_chats_are_rendered_by_the_template_that_a_checkpoint_brings(models, tmp_path):
    """As transformers renders them; glm46 generate asks in the same form."""
    model_dir, suite = write_toy_model(tmp_path / "model"), models[2].suite
    (model_dir / "chat_template.jinja").write_text(OWN_TEMPLATE)
    ours = checkpoint_model(model_dir, suite, "v", "cpu", lambda progress: None)
    message, (question, tools) = {"role": "user", "content": "Hi"}, tool_request(ROWS["calls"][0])
    theirs = AutoTokenizer.from_pretrained(model_dir)
    settings = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
    assert ours.apply_chat_template([message]) == theirs.apply_chat_template([message], **settings)
    ours.tool_requests = {"1": ToolRequest(question, json.loads(tools))}
    shown = theirs.apply_chat_template([{"role": "user", "content": question}], tools=json.loads(tools), **settings)
    assert ours.apply_chat_template([{"role": "user", "content": "1"}]) == shown and "my tune" in shown
    with pytest.raises(ValueError, match=r"chat template cannot render the conversation: one message only"):
        ours.apply_chat_template([message, message])
    asked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InProcessEngine, "stream", lambda self, prompt_ids, sampling: asked.append(prompt_ids) or ())
        assert list(generate_text(model_dir, "Hi", 3, 0.0, 0, False, "cpu")) == []
    assert asked == [theirs.apply_chat_template([message], **settings | {"tokenize": True}, return_dict=False)]


def test_prompts_that_were_cut_and_answers_that_did_not_end_are_counted_and_said(models):
    ours, _, asked = models
    sums = [each.model_copy(update={"max_new_tokens": 1}) for each in asked.suite.benchmarks if each.name == "sums"]
    asked = replace(asked, suite=asked.suite.model_copy(update={"benchmarks": sums}))
    for row, num_cut in ((12, 6), (SEQUENCE_LENGTH, 0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ours, "sequence_length", row)
            result, _ = run_suite(ours, asked, "toy", "x", lambda progress: None)
        (benchmark,) = result.benchmarks
        assert benchmark.num_cut == num_cut and ("lost their beginning" in result.describe()) is bool(num_cut)
    assert benchmark.num_unfinished == 6 and "6 answers to sums ended at max_new_tokens" in result.describe()


def test_every_decision_figure_and_text_is_the_hf_backends(results):
    (ours, our_items), (theirs, their_items) = results
    asked = [name for name in (*LIKELIHOOD, *ANSWERS, "needle") if name not in ("calls", "computed")]
    assert [benchmark.name for benchmark in ours.benchmarks] == asked
    for own, other in zip(our_items.splitlines(), their_items.splitlines(), strict=True):
        own, other = json.loads(own), json.loads(other)
        assert own["prompt"] == other["prompt"]
        assert own.pop("log_probabilities") == pytest.approx(other.pop("log_probabilities"), abs=2e-4)
        bits, other_bits = own["scores"].pop("bits_per_byte", 0.0), other["scores"].pop("bits_per_byte", 0.0)
        assert bits == pytest.approx(other_bits, abs=1e-3)
        assert own == other
    for own, other in zip(ours.benchmarks, theirs.benchmarks, strict=True):
        assert own.harness == pytest.approx(other.harness, abs=1e-4)


def test_the_toy_answers_some_and_not_all(results):
    """Otherwise equal decisions would prove little."""
    items = [json.loads(line) for line in results[0][1].splitlines()]
    for names in (LIKELIHOOD, ANSWERS):
        right = [
            each["scores"]["accuracy"] for each in items if each["benchmark"] in names and each["benchmark"] != "texts"
        ]
        assert 0 < sum(right) < len(right)
    assert len({each["output"] for each in items if each["output"] is not None}) > 3


def test_several_answers_are_drawn_and_count_as_one_item(models):
    """The mean of what each answer alone would score, with the interval of clusters; the same on every call."""
    ours, _, asked = models
    (sums,) = [each for each in asked.suite.benchmarks if each.name == "sums"]
    sampled = sums.model_copy(update={"num_samples": 8, "temperature": 1.0})
    wanted = replace(asked, suite=asked.suite.model_copy(update={"benchmarks": [sampled]}))
    runs = [run_suite(ours, wanted, "toy", "x", lambda progress: None) for _ in range(2)]
    assert runs[0] == runs[1]
    (result, items) = runs[0]
    scores = []
    for line in items.splitlines():
        item = json.loads(line)
        answers = json.loads(item["output"])
        assert item["num_samples"] == len(answers) == 8
        scores.append([float(is_right("math", item["prompt"], item["expected"], answer)) for answer in answers])
        assert item["scores"] == {"accuracy": sum(scores[-1]) / 8}
    assert len({json.loads(line)["output"] for line in items.splitlines()}) > 1
    assert any(0 < sum(each) < 8 for each in scores), "otherwise a mean of answers would prove little"
    (figure,) = result.benchmarks[0].figures
    assert figure.value == pytest.approx(sum(map(sum, scores)) / (8 * len(scores)))
    assert figure.interval == pytest.approx(share_interval([sum(each) for each in scores], [8] * len(scores)))
