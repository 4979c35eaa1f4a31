"""Tasks of environments that an expert plays: right episodes become conversations with their calls, word for word."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from configs.schema import SolutionRecipe
from model.text.chat_template import encode, render_to_train
from model.text.tokenizer_layout import tokenizer_for_text
from tasks.data.environments.environment import signatures
from tasks.data.environments.environments import TOOLS
from tasks.data.tokenizer.bpe_tokenizer import train_bpe
from tasks.evaluation.sample_solutions import Solving
from tasks.training.policy.prompts import Prompt
from tests.configs.test_phase_graph import DISTILLATION
from tests.training.policy.test_episodes import call, scripted

LIMITS = DISTILLATION["episodes"] | {"max_turns": 3, "max_turn_tokens": 150}
OBJECTIVE = DISTILLATION | {
    "samples_per_prompt": 3,
    "max_kept_per_prompt": 2,
    "max_new_tokens": 400,
    "episodes": LIMITS,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_bpe(iter(()), 256).save(str(path))
    return tokenizer_for_text(str(path))


def task(question: str, answer: str) -> Prompt:
    tools, expected = signatures(TOOLS["calculator"]), json.dumps({"answer": answer})
    return Prompt(question, "agentic", "calculator", question, tools, expected)


def test_right_episodes_are_kept_with_their_calls_and_wrong_ones_are_not(tokenizer):
    settings = {"keeps_answers": True, "domains": (), "sequence_length": 2048, "dtype": "float32", "num_threads": 1}
    recipe = SolutionRecipe(objective=OBJECTIVE, seed=46, **settings)
    scripts = {
        "What is 19 * 3?": [f"{call('19*3')}<|observation|>", "\n57<|user|>"],
        "What is 19 * 4?": [f"{call('19*4')}<|observation|>", "\n57<|user|>"],
        "What is 2 + 2?": [f"{call('2+2')}<|user|>"],
    }
    play = scripted(tokenizer, scripts)
    engine = SimpleNamespace(weights_version="0", generate=lambda rows, sampling, version, draws: play(rows, draws))
    solving = Solving(tokenizer, recipe, "solutions/rl_agentic/0", "rl_agentic")
    prompts = [task(question, answer) for question, answer in zip(scripts, ("57", "76", "4"), strict=True)]
    solving.solve(engine, prompts, 0)
    counted = [(row["num_samples"], row["num_right"], row["num_kept"]) for row in solving.solved]
    assert counted == [(3, 3, 1), (3, 0, 0), (3, 0, 0)] and solving.left_out == {"repeated": 2}
    (chat,) = solving.chats
    messages, tools = json.loads(chat["messages"]), json.loads(chat["tools"])
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1]["tool_calls"] == [{"name": "calculator", "arguments": {"expression": "19*3"}}]
    assert (messages[2]["content"], messages[3]["content"]) == ("57", "57")
    ids, trained = encode(tokenizer, render_to_train(messages, tools))
    learned = tokenizer.decode([each for each, own in zip(ids, trained, strict=True) if own], skip_special_tokens=False)
    assert learned == "".join(scripts["What is 19 * 3?"]), "what the expert wrote, and not what the tool answered"
    assert solving.chat_tokens == [len(ids)] and solving.answer_tokens == [sum(trained)]
