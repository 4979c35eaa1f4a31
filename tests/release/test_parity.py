"""The gate before an alias moves: every engine chooses our greedy tokens, with our log-probabilities."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.schema import ConversionRecipe
from infra.home import Home
from infra.storage.open_store import open_store
from model.formats.gguf_checkpoint import write_gguf
from tasks.release import check_parity as parity
from tasks.release.check_parity import OptionalEngines, check_parity, optional_engines
from tasks.release.convert_to_gguf import convert_to_gguf
from tasks.release.generate_reference import generate_reference
from tasks.release.served_requests import MadeCall, MadeCalls
from tests.release.test_release import RECIPE, RELEASE_RESOURCES, SERVING, answers_of
from tests.support.engines.engine_servers import VLLM_VERSION, write_vllm_program
from tests.support.evaluation_fakes import checkpoint, commit, evaluation_suite
from tests.support.toy_steps import local_output

PARITY = RECIPE.model_copy(update={"parity_prompts": 4})


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """What the step reads of an intact release."""
    store = open_store(None, Home(tmp_path_factory.mktemp("parity")))
    trained = checkpoint(store, "trained")
    asked = {"suite": evaluation_suite(store), "recipe": PARITY.reference_recipe(), "resources": RELEASE_RESOURCES}
    return {
        "reference": commit(store, generate_reference, checkpoint=trained, **asked),
        "checkpoint": trained,
        "gguf": commit(store, convert_to_gguf, checkpoint=trained, recipe=RECIPE.conversion_recipe()),
        "optional": OptionalEngines(vllm=""),
    }


@pytest.fixture
def vllm_on_path(tmp_path, monkeypatch):
    """A program that speaks as vLLM does and computes with our model."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return write_vllm_program(tmp_path / "bin")


def checked(given, directory, **changed):
    asked = {"recipe": PARITY.parity_recipe(), "resources": SERVING}
    return check_parity(**{**given, **asked, **changed}, output=local_output(directory))


def test_every_engine_computes_the_model_that_was_trained(given, tmp_path):
    report = checked(given, tmp_path)
    assert report.accepted and report.num_prompts == 4, report.refusals
    answers = answers_of(given["reference"])[:4]
    for name in ("transformers", "llama.cpp"):
        engine = report.engines[name]
        assert engine.num_tokens == sum(answer.num_clear for answer in answers) > 40
        assert engine.max_log_probability_difference < 1e-4
    drafting = report.engines["llama.cpp with drafts"]
    assert drafting.skipped == "" and drafting.num_tokens > 20 and drafting.max_log_probability_difference is None
    assert report.engines["vllm"].skipped == "vllm is not on PATH"
    assert json.loads((tmp_path / "parity.json").read_text())["vllm"]["num_tokens"] == 0


def test_a_call_that_drafts_change_is_refused_by_number(given, tmp_path, monkeypatch):
    """And of a model that knows no conversations none is asked."""

    def calls_of_file(path, resources, log_path, num_calls, *, is_drafting):
        said = [number + (is_drafting and number > 1) for number in range(num_calls)]
        return MadeCalls([MadeCall("add", json.dumps({"first": first}), 9) for first in said], 0)

    monkeypatch.setattr(parity, "calls_of_file", calls_of_file)
    refused = checked(given, tmp_path, recipe=PARITY.parity_recipe().model_copy(update={"parity_calls": 9}))
    assert not refused.accepted and len(refused.refusals) == 4
    first, *_, rest = refused.refusals
    assert first == (
        'parity: llama.cpp with drafts writes call 3 of 9 as add({"first": 3}), without drafts add({"first": 2})'
    )
    assert rest == "parity: llama.cpp with drafts differs at 4 further calls"
    told = given["checkpoint"].record.model_copy(update={"is_chat_trained": False})
    report = checked(given, tmp_path, checkpoint=replace(given["checkpoint"], record=told))
    assert report.accepted and report.engines["llama.cpp with drafts"].skipped == "the model knows no conversations"


def test_a_served_file_of_16_bits_has_a_bound_of_its_own(given, tmp_path):
    """llama.cpp rounds activations to the type of the file; the others compute in float32 as before."""
    store = open_store(None, Home(tmp_path / "home"))
    recipe = ConversionRecipe(gguf_types=("Q8_0", "BF16"))
    narrow = {"gguf": commit(store, convert_to_gguf, checkpoint=given["checkpoint"], recipe=recipe)}
    refused = checked(given, tmp_path, **narrow)
    assert {each.removeprefix("parity: ").split()[0] for each in refused.refusals} == {"llama.cpp"}
    served = refused.engines["llama.cpp"].max_log_probability_difference
    assert refused.engines["transformers"].max_log_probability_difference < 1e-4 < 1e-3 < served
    wider = PARITY.parity_recipe().model_copy(update={"max_served_log_probability": 2 * served})
    (tmp_path / "wider").mkdir()
    accepted = checked(given, tmp_path / "wider", recipe=wider, **narrow)
    assert [reason for reason in accepted.refusals if "log-probability" in reason] == []


def test_vllm_is_asked_where_its_program_is_on_path(given, vllm_on_path, tmp_path):
    optional = optional_engines()
    assert optional == OptionalEngines(vllm=VLLM_VERSION)
    report = checked(given, tmp_path, optional=optional)
    assert report.accepted, report.refusals
    assert report.engines["vllm"].num_tokens == report.engines["transformers"].num_tokens > 40
    assert report.engines["vllm"].max_log_probability_difference < 1e-4
    vllm_on_path.write_text("#!/bin/sh\necho no CPU of this kind >&2\nexit 3\n")
    with pytest.raises(ValueError, match=r"vllm --version fails \(no CPU of this kind\): take it off PATH, or"):
        optional_engines()
    with pytest.raises(RuntimeError, match="no CPU of this kind"):
        checked(given, tmp_path, optional=optional)
    vllm_on_path.unlink()
    with pytest.raises(RuntimeError, match="vllm was on PATH where this run was started, and is not here"):
        checked(given, tmp_path, optional=optional)


def with_answers(answers, directory):
    """A reference that holds these answers."""
    path = directory / "reference.json"
    path.write_text(json.dumps([answer.model_dump(mode="json") for answer in answers]))
    return SimpleNamespace(path=lambda name: path)


def test_another_token_and_another_log_probability_are_refused_by_prompt_and_position(given, tmp_path):
    answers = answers_of(given["reference"])
    ids, values = list(answers[1].token_ids), list(answers[2].log_probabilities)
    ids[3] += 1
    values[2] += 0.01
    answers[1] = answers[1].model_copy(update={"token_ids": tuple(ids)})
    answers[2] = answers[2].model_copy(update={"log_probabilities": tuple(values)})
    report = checked(given, tmp_path, reference=with_answers(answers, tmp_path))
    assert not report.accepted and len(report.refusals) == 4, report.refusals
    named = (("transformers", "parity", report.refusals[:2]), ("llama.cpp", "served", report.refusals[2:]))
    for name, bound, refusals in named:
        at = f"parity: {name} at prompt {answers[1].prompt!r}, position 3"
        assert refusals[0] == f"{at}: would not choose our token {ids[3]}"
        assert refusals[1].startswith(f"parity: {name} at prompt {answers[2].prompt!r}, position 2: log-probability")
        assert refusals[1].endswith(f"release.recipe.max_{bound}_log_probability allows 0.001")
        assert report.engines[name].max_log_probability_difference == pytest.approx(0.01, abs=1e-4)


def test_an_exported_tensor_that_differs_is_found_by_the_engines_that_read_it(given, vllm_on_path, tmp_path):
    """The Hugging Face directory is right, the GGUF file is not, and the other way round."""
    directory = given["checkpoint"].directory("hf")
    other = tmp_path / "hf"
    other.mkdir()
    for path in directory.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    tensors = load_file(other / "model.safetensors")
    name = next(name for name in tensors if name.endswith("o_proj.weight"))
    tensors[name] = tensors[name] * torch.tensor(1.5)
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    write_gguf(other, other / "tokenizer.json", tmp_path / "m.gguf", gguf_type="F32", name="glm46")
    exported = SimpleNamespace(directory=lambda name: other, record=given["checkpoint"].record)
    served = SimpleNamespace(record=given["gguf"].record, path=lambda name: tmp_path / "m.gguf")
    for changed, engines in (({"checkpoint": exported}, {"transformers", "vllm"}), ({"gguf": served}, {"llama.cpp"})):
        report = checked(given, tmp_path, optional=optional_engines(), **changed)
        assert {each.removeprefix("parity: ").split()[0] for each in report.refusals} == engines


def test_too_few_prompts_are_refused(given, tmp_path):
    few = with_answers(answers_of(given["reference"])[:1], tmp_path)
    (refusal,) = checked(given, tmp_path, reference=few).refusals
    assert refusal.startswith("parity: 1 prompts have a token to compare, release.recipe.parity_prompts asks for 4")
