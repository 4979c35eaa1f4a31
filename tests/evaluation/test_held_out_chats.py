"""Held-out conversations in a suite: what an assistant writes is scored, by a plain forward pass."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from configs.files.stored_files import given_file
from infra.home import Home
from infra.storage.open_store import open_store
from model.text.chat_template import encode, render_to_train
from tasks.evaluation.document_scores import score_documents
from tasks.evaluation.engine import load_engine, load_tokenizer
from tasks.evaluation.held_out_documents import choose_chats, held_out_chats
from tests.support.data_inputs import RESOURCES
from tests.support.evaluation_fakes import RECIPE, checkpoint, toy_tokenizer
from tests.support.toy_steps import local_output


def turns(number: int, reasoning: str = "") -> list[dict]:
    answer = {"role": "assistant", "content": f"It is {number + 1}.", "reasoning": reasoning, "tool_calls": []}
    asked = {"role": "user", "content": f"What is {number} + 1? <|user|>", "reasoning": "", "tool_calls": []}
    return [asked, answer, asked | {"content": "And then?"}, answer | {"content": f"{number + 2} ü"}]


@pytest.fixture
def chats(tmp_path):
    rows = [
        {"id": f"chat{number}", "source": "mine.jsonl", "offset": number, "tools": "[]", "split": split}
        | {"messages": json.dumps(turns(number, "One more." if number % 2 else ""))}
        for number, split in enumerate(["train", *["validation"] * 24])
    ]
    rows.append(rows[1] | {"id": "long", "messages": json.dumps([*turns(1) * 200])})
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "chats.parquet")
    return [given_file(tmp_path / "chats.parquet")]


def test_whole_held_out_conversations_are_chosen_up_to_the_budget(chats, tmp_path):
    toy_tokenizer().save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    recipe = RECIPE.model_copy(update={"max_document_chars": 2000, "max_document_tokens": 10**6})
    rows = held_out_chats(chats, recipe, RESOURCES)
    chosen, num_tokens = choose_chats(rows, tokenizer, recipe)
    assert {question.item_id for question in chosen} == {f"document/chat{number}" for number in range(1, 25)}
    assert {question.domain for question in chosen} == {"chat"} and len({each.unit for each in chosen}) == 24
    few, _ = choose_chats(rows, tokenizer, recipe.model_copy(update={"max_document_tokens": num_tokens - 1}))
    assert few == chosen[:23]
    with pytest.raises(
        ValueError, match=r"^0 held-out .* at least 20: .* max_document_tokens \(3\) holds these: raise the bound that"
    ):
        choose_chats(rows, tokenizer, recipe.model_copy(update={"max_document_tokens": 3}))


@pytest.mark.parametrize("sequence_length", [16, 512], ids=["in windows", "whole"])
def test_of_a_conversation_the_tokens_count_that_training_trains(sequence_length, chats, tmp_path):
    store = open_store(None, Home(tmp_path / "home"))
    directory = checkpoint(store, "good").directory("hf")
    tokenizer, engine = (
        load_tokenizer(directory / "tokenizer.json"),
        load_engine(directory, weights_version="v", batch_sequences=2),
    )
    recipe = RECIPE.model_copy(update={"max_document_chars": 2000, "max_document_tokens": 10**6})
    chosen, _ = choose_chats(held_out_chats(chats, recipe, RESOURCES), tokenizer, recipe)
    items = list(score_documents(engine, tokenizer, chosen, sequence_length, local_output(tmp_path)))
    for question, item in zip(chosen, items, strict=True):
        segments = render_to_train(json.loads(question.text)["messages"], [])
        ids, is_trained = encode(tokenizer, segments)
        expected = 0.0
        for position in range(1, len(ids)):
            if is_trained[position]:
                first = (position - 1) // sequence_length * sequence_length
                with torch.no_grad():
                    logits = engine.model(torch.tensor([ids[first:position]])).logits_BTV[0, -1]
                expected += torch.log_softmax(logits.double(), -1)[ids[position]].item()
        assert item.log_probability == pytest.approx(expected, rel=1e-4)
        written = [segment.text for segment in segments if segment.is_trained and not segment.is_special]
        assert item.num_bytes == len("".join(written).encode()) < len(question.text)
        assert "What is" not in "".join(written) and "ü" in "".join(written)
