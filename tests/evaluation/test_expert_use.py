"""Routed validation tokens against the counts of a training pass over the same rows."""

from __future__ import annotations

import pytest
import torch

from model.generation.generation import InProcessEngine
from tasks.evaluation.engine import document_token_ids
from tasks.evaluation.expert_use import ExpertUse, measure_expert_use, read_expert_use, write_expert_use
from tasks.evaluation.items import DOCUMENT
from tasks.evaluation.suite import Question
from tests.support.evaluation_fakes import DOCUMENTS, toy_tokenizer
from tests.support.model_recipes import GLM46, random_model
from tests.support.toy_steps import local_output

pytestmark = pytest.mark.usefixtures("clear_routing")
LENGTH = 24


def test_counts_are_those_of_a_pass_over_whole_rows_and_survive_the_table(tmp_path):
    tokenizer = toy_tokenizer()
    recipe = GLM46.model_copy(update={"vocab_size": tokenizer.get_vocab_size()})
    model = random_model(recipe, seed=4)
    documents = [Question(f"{DOCUMENT}/{name}", DOCUMENT, name, name, text, "") for name, text in DOCUMENTS.items()]
    output = local_output(tmp_path)
    engine = InProcessEngine(model, weights_version="v", batch_sequences=2)
    actual = measure_expert_use(engine, tokenizer, documents, LENGTH, 2, output)

    stream = [token for document in documents for token in document_token_ids(tokenizer, document.text)]
    rows = torch.tensor([stream[start : start + LENGTH] for start in range(0, len(stream) - LENGTH + 1, LENGTH)])
    with torch.no_grad():
        counts_LE = model(rows, target_ids_BT=rows).expert_counts_LE
    num_layers = recipe.num_hidden_layers - recipe.first_k_dense_replace
    assert [list(use.num_tokens) for use in actual] == counts_LE[:num_layers].tolist()
    assert {(use.num_routed, use.num_per_token) for use in actual} == {(rows.numel(), recipe.num_experts_per_tok)}
    assert not [hook for module in model.modules() for hook in module._forward_hooks.values()], "a hook was not removed"

    write_expert_use(tmp_path / "experts.parquet", actual)
    assert read_expert_use(tmp_path / "experts.parquet") == actual


def test_balance_and_dead_experts():
    even, lame = ExpertUse(0, (4, 4, 4, 4), 8), ExpertUse(1, (8, 8, 0, 0), 8)
    assert (even.load, even.cv, even.num_dead) == (1.0, 0.0, 0)
    assert (lame.load, lame.cv, lame.num_dead) == (2.0, 1.0, 2)
