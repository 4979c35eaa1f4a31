"""Episodes: what is a turn, what ends one, what is trained; every episode is the same whatever is played beside it."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from typing import get_args

import pytest
import torch
from pydantic import ValidationError

from configs.schema import EpisodeRecipe
from configs.schema.policy_objectives import TimedEnvironment
from model.architecture.losses import IGNORED
from model.generation.generation import Generation, InProcessEngine, Sampling, sampling_draws
from model.text.chat_template import encode, observation, problem_prompt, render, render_closed
from model.text.tokenizer_layout import tokenizer_for_text
from tasks.data.environments.environment import Environment, Parameter, Tool, ToolTimeoutError
from tasks.data.environments.environments import OPENERS
from tasks.data.prompts.verifiers import AskedPrompt, verify_answers
from tasks.data.sandbox.code_sandbox import NoSandboxError
from tasks.data.tokenizer.bpe_tokenizer import train_bpe
from tasks.training.policy.answer_rows import lay_out, target_log_probabilities
from tasks.training.policy.critic import generalized_advantages
from tasks.training.policy.episode_messages import conversation
from tasks.training.policy.episodes import Episode, EpisodePlayer, episode_metrics
from tasks.training.policy.policy import group_advantages
from tasks.training.policy.rollouts import Rollout
from tasks.training.policy.tool_calls import ToolThreads
from tests.support.model_recipes import GLM46, random_model
from tests.training.policy.test_policy import CPU, OBJECTIVE, backward, prompt_named, reward_of, updates_of

DIGIT = Parameter("digit", "string", "One")
LIMITS = EpisodeRecipe(max_turns=3, max_turn_tokens=150, max_observation_chars=40, tool_seconds={"others": 60.0})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_bpe(iter(()), 256).save(str(path))
    return tokenizer_for_text(str(path))


def call(expression: str, name: str = "calculator", key: str = "expression") -> str:
    return f"\n<tool_call>{name}\n<arg_key>{key}</arg_key>\n<arg_value>{expression}</arg_value>\n</tool_call>"


def token_ids(tokenizer, text: str) -> list[int]:
    """Of a text in which special tokens are written out."""
    tokenizer.encode_special_tokens = False
    try:
        return tokenizer.encode(text, add_special_tokens=False).ids
    finally:
        tokenizer.encode_special_tokens = True


def calculator(result: str = "57") -> Environment:
    return OPENERS["calculator"](json.dumps({"answer": result}))


def scripted(tokenizer, scripts: dict[str, list[str]]):
    """Continues the row of each question by the next line of its script, as far as it has draws."""

    def generate(rows, draws) -> Generation:
        written = []
        for row, own in zip(rows, draws, strict=True):
            text = tokenizer.decode(row, skip_special_tokens=False)
            question = text.split("<|user|>\n")[1].split("<|assistant|>")[0].split("/nothink")[0]
            written.append(token_ids(tokenizer, scripts[question][text.count("<|assistant|>") - 1])[: len(own)])
        numbers = [[-0.5] * len(ids) for ids in written]
        return Generation(written, numbers, numbers, numbers, "0")

    return generate


def play(tokenizer, scripts, environments, limits=LIMITS, room: int = 400, enable_thinking: bool = False, kinds=None):
    prompts = [encode(tokenizer, problem_prompt(question, enable_thinking))[0] for question in scripts]
    episodes = [
        Episode(prompt, [0.5] * room, environment, kind)
        for prompt, environment, kind in zip(prompts, environments, kinds or ["calculator"] * len(prompts), strict=True)
    ]
    stops = [tokenizer.token_to_id(token) for token in ("<|endoftext|>", "<|user|>", "<|observation|>")]
    EpisodePlayer(tokenizer, limits, stops, enable_thinking).play(scripted(tokenizer, scripts), episodes)
    return episodes


@pytest.mark.parametrize("enable_thinking", [True, False])
def test_the_row_of_an_episode_is_the_chat_template_of_its_messages(tokenizer, enable_thinking):
    thought = "\n<think>so</think>" if enable_thinking else ""
    turns = [
        f"{thought}{call('12+7')}{call('19*3')}<|observation|>",
        f"{thought}\nSo{call('1/0')}<|observation|>",
        f"{thought}\n57<|user|>",
    ]
    (episode,) = play(tokenizer, {"q": turns}, [calculator()], enable_thinking=enable_thinking)
    asked = [{"name": "calculator", "arguments": {"expression": text}} for text in ("12+7", "19*3", "1/0")]
    reasoning = "so" if enable_thinking else ""
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "reasoning": reasoning, "tool_calls": asked[:2]},
        {"role": "tool", "content": "19"},
        {"role": "tool", "content": "57"},
        {"role": "assistant", "content": "So", "reasoning": reasoning, "tool_calls": asked[2:]},
        {"role": "tool", "content": "Error: division by zero"},
        {"role": "assistant", "content": "57", "reasoning": reasoning},
    ]
    whole, trained = encode(
        tokenizer, render(messages, (), enable_thinking=enable_thinking, add_generation_prompt=False)
    )
    assert episode.row == [*whole, tokenizer.token_to_id("<|user|>")]
    kept = conversation(replace(prompt_named("p"), question="q"), episode.turns, enable_thinking)
    assert encode(tokenizer, render_closed(kept, (), enable_thinking=enable_thinking))[0] == episode.row
    from_tools = {at for start, stop in episode.tool_spans for at in range(start, stop)}
    own = [at not in from_tools for at in range(len(episode.token_ids) - 1)]
    assert own == trained[len(episode.prompt_ids) :], "what a supervised phase would train on of the same messages"
    assert [value != 0 for value in episode.log_probabilities] == [*own, True]
    assert (episode.num_calls, episode.num_failed_calls, episode.ending) == (3, 1, "answered")
    assert verify_answers([AskedPrompt("q", "calculator", "")], [episode.written]) == [True]


@pytest.mark.parametrize(
    ("turns", "ending"),
    [
        (["\n57<|user|>"], "answered"),
        (["\n57<|endoftext|>"], "answered"),
        (["\n57<|observation|>"], "format_error"),
        ([f"{call('1')}<|user|>"], "format_error"),
        (["\n<tool_call>calculator<|observation|>"], "format_error"),
        ([f"{call('1')}</tool_call><|observation|>"], "format_error"),
        (["\n57"], "cut_off"),
        ([f"{call('1' * 150)}<|observation|>"], "cut_off"),
        ([f"{call('1')}<|observation|>"] * 3, "too_many_turns"),
        ([f"{call('1')}<|observation|>"] * 2 + ["\n57<|user|>"], "answered"),
        ([f"{call('1', name='pay')}{call('1', key='e')}<|observation|>", "\n57<|user|>"], "answered"),
    ],
)
def test_what_ends_an_episode(tokenizer, turns, ending):
    (episode,) = play(tokenizer, {"q": turns}, [calculator()])
    assert episode.ending == ending
    verdicts = verify_answers([AskedPrompt("q", "calculator", "")], [episode.written])
    assert verdicts == [ending == "answered"]
    assert episode.num_failed_calls == (2 if "pay" in turns[0] else 0)


def test_an_episode_never_exceeds_its_room_and_long_observations_are_cut(tokenizer):
    long = {"q": [f"{call('9' * 99)}<|observation|>", "\n57<|user|>"]}
    (episode,) = play(tokenizer, long, [calculator()], room=400)
    assert [len(turn.text) for turn in episode.turns if turn.role == "tool"] == [LIMITS.max_observation_chars]
    needed = len(episode.token_ids) - len(token_ids(tokenizer, "\n57<|user|>"))
    for room, ending in ((needed, "cut_off"), (needed + 1, "cut_off"), (needed + 4, "answered")):
        (short,) = play(tokenizer, long, [calculator()], room=room)
        assert short.ending == ending and len(short.token_ids) <= room
    assert not play(tokenizer, long, [calculator()], room=needed)[0].tool_spans, "no room to answer: not shown"


def test_text_of_a_tool_is_text_even_where_it_looks_like_a_role(tokenizer):
    (ids, _), special = encode(tokenizer, observation(["<|user|>"], False)), tokenizer.token_to_id("<|user|>")
    assert special not in ids and ids.count(tokenizer.token_to_id("<|assistant|>")) == 1


def test_a_tool_that_hangs_ends_its_episode_only(tokenizer):
    """The third prompt would play in the thread that hangs, were it not replaced."""
    release, tool = threading.Event(), Tool("wait", "", ())

    def wait() -> str:
        release.wait()
        return "late"

    def refuse() -> str:
        raise ToolTimeoutError("out of processor time")

    hanging, slow = (Environment({"wait": (tool, run)}, lambda answer: True) for run in (wait, refuse))
    limits = LIMITS.model_copy(update={"tool_seconds": {"search": 0.2, "others": 60.0}})
    waits = "\n<tool_call>wait\n</tool_call><|observation|>"
    scripts = {
        "a": [waits, "\n1<|user|>"],
        "b": [waits, "\n1<|user|>"],
        "c": [f"{call('1')}<|observation|>", "\n57<|user|>"],
    }
    kinds = ["search", "python", "calculator"]
    episodes = play(tokenizer, scripts, [hanging, slow, calculator()], limits, kinds=kinds)
    release.set()
    assert [episode.ending for episode in episodes] == ["timed_out", "answered", "answered"]
    assert [episode.num_timeouts for episode in episodes] == [1, 1, 0]
    asked = [AskedPrompt(name, "calculator", "") for name in scripts]
    assert verify_answers(asked, [episode.written for episode in episodes]) == [False, True, True]
    assert episodes[1].turns[1].text == "Error: out of processor time"
    figures = episode_metrics([episode.figures for episode in episodes])
    assert figures["tool_success"] == pytest.approx(1 / 3), "the calls of a turn without an answer failed too"
    timeouts = {name: value for name, value in figures.items() if name.startswith("tool_timeouts")}
    by_kind = {f"tool_timeouts_{kind}": value for kind, value in zip(kinds, (1.0, 1.0, 0.0), strict=True)}
    assert timeouts == {"tool_timeouts": 2.0} | by_kind


def test_each_call_has_a_time_of_its_own():
    """The last one comes back while the first is waited for, and has run longer than it may."""
    threads = ToolThreads(1)
    assert threads.run([threading.Event().wait, lambda: 2], [0.1, 60.0]) == [None, 2]
    with pytest.raises(ZeroDivisionError):
        threads.run([lambda: 1 // 0], [60.0])
    slow = [lambda: time.sleep(0.4) or 1, lambda: time.sleep(0.2) or 2]
    assert ToolThreads(2).run(slow, [60.0, 0.1]) == [1, None] and ToolThreads(2).run(slow, [60.0, 60.0]) == [1, 2]


def test_an_environment_without_a_time_of_its_own_has_that_of_the_others():
    limits = LIMITS.model_copy(update={"tool_seconds": {"python": 5.0, "others": 2.0}})
    assert [limits.seconds_of(kind) for kind in ("python", "search", "pantry")] == [5.0, 2.0, 2.0]
    assert {*get_args(TimedEnvironment)} - {"others"} <= {*OPENERS}
    values = LIMITS.model_dump()
    for times, said in (
        ({"python": 5.0}, "tool_seconds names python, and not others"),
        ({"pyhton": 5.0, "others": 2.0}, "tool_seconds.pyhton"),
        ({"others": 0.0}, "greater than 0"),
    ):
        with pytest.raises(ValidationError, match=said):
            EpisodeRecipe.model_validate(values | {"tool_seconds": times})


def test_a_tool_that_fails_itself_ends_its_episode_only_and_is_logged(tokenizer, capsys):
    def divide(digit: str) -> str:
        return str(1 // int(digit))

    broken = Environment({"divide": (Tool("divide", "", (DIGIT,)), divide)}, lambda answer: True)
    scripts = {
        "a": [f"{call('0', 'divide', 'digit')}<|observation|>", "\n1<|user|>"],
        "b": [f"{call('1')}<|observation|>", "\n57<|user|>"],
    }
    episodes = play(tokenizer, scripts, [broken, calculator()])
    assert [episode.ending for episode in episodes] == ["tool_failed", "answered"]
    asked = [AskedPrompt(name, "calculator", "") for name in scripts]
    assert verify_answers(asked, [episode.written for episode in episodes]) == [False, True]
    figures = episode_metrics([episode.figures for episode in episodes])
    assert (figures["tool_failed_share"], figures["tool_success"]) == (0.5, 0.5)
    logged = f"{__name__}: the tool divide failed on {{'digit': '0'}} (ZeroDivisionError("
    assert logged in capsys.readouterr().err


@pytest.mark.parametrize("error", [NoSandboxError("this machine cannot make one"), BlockingIOError("no process left")])
def test_what_the_machine_lacks_stops_the_phase(tokenizer, error):
    """Otherwise every episode would earn nothing, and the phase would go on."""

    def run(digit: str) -> str:
        raise error

    lacking = Environment({"run": (Tool("run", "", (DIGIT,)), run)}, lambda answer: True)
    with pytest.raises(type(error)):
        play(tokenizer, {"a": [f"{call('0', 'run', 'digit')}<|observation|>", "\n1<|user|>"]}, [lacking])


def test_half_a_character_that_a_tool_writes_can_be_read(tokenizer):
    def write(digit: str) -> str:
        return "a\ud800b"

    environment = Environment({"write": (Tool("write", "", (DIGIT,)), write)}, lambda answer: True)
    (episode,) = play(tokenizer, {"a": [f"{call('0', 'write', 'digit')}<|observation|>", "\n1<|user|>"]}, [environment])
    assert episode.ending == "answered" and episode.turns[1].text == "a?b"


def test_metrics_count_turns_calls_and_endings(tokenizer):
    scripts = {
        "a": [f"{call('1')}<|observation|>", "\n57<|user|>"],
        "b": [f"{call('1/0')}<|observation|>", "\n57<|observation|>"],
    }
    episodes = play(tokenizer, scripts, [calculator(), calculator()])
    figures = episode_metrics([episode.figures for episode in episodes])
    spans = [stop - start for episode in episodes for start, stop in episode.tool_spans]
    expected = {"episode_turns": 2.0, "tool_calls": 1.0, "tool_success": 0.5, "tool_timeouts": 0.0}
    expected["tool_timeouts_calculator"] = 0.0
    expected |= {"format_error_share": 0.5, "cut_off_share": 0.0, "too_many_turns_share": 0.0, "tool_failed_share": 0.0}
    assert figures == expected | {"tool_tokens": sum(spans) / 2} and len(spans) == 2
    assert episode_metrics([]) == {}


class EveryTurnCalls(EpisodePlayer):
    """A random model makes no readable call: here whatever it writes in its first two turns counts as one."""

    def _take_turn(self, episode, token_ids, log_probabilities):
        super()._take_turn(episode, token_ids, log_probabilities)
        is_last = len(episode.tool_spans) == 2
        episode.ending = "answered" if is_last else None
        return [] if is_last else [("echo", {})]


def sampled_episodes(tokenizer, model, questions: str, batch_sequences: int) -> list[Episode]:
    """Three turns of a random model for each letter, with a tool that answers between them."""
    engine = InProcessEngine(model, weights_version="0", batch_sequences=batch_sequences)
    stops = tuple(range(200, 320))
    sampling = Sampling(200, 1.0, stop_token_ids=stops, seed=5)
    draws = dict(zip("abcdef", sampling_draws(sampling, 6), strict=True))
    environments = [
        Environment({"echo": (Tool("echo", "", ()), lambda text=letter: text * 3)}, lambda answer: True)
        for letter in questions
    ]
    episodes = [
        Episode(
            encode(tokenizer, problem_prompt(letter * (1 + ord(letter) % 4), False))[0],
            draws[letter],
            environment,
            "echo",
        )
        for letter, environment in zip(questions, environments, strict=True)
    ]
    limits = LIMITS.model_copy(update={"max_turn_tokens": 9})
    player = EveryTurnCalls(tokenizer, limits, stops, enable_thinking=False)
    player.play(lambda rows, given: engine.generate(rows, sampling, "0", given), episodes)
    return episodes


def rollouts_of(episodes: list[Episode], rewards: list[float]) -> list[Rollout]:
    return [
        Rollout(
            prompt_named(str(number)),
            episode.prompt_ids,
            episode.token_ids,
            episode.log_probabilities,
            "",
            reward_of(reward),
            tool_spans=episode.tool_spans,
            episode=episode.figures,
        )
        for number, (episode, reward) in enumerate(zip(episodes, rewards, strict=True))
    ]


def test_an_episode_does_not_depend_on_what_is_played_beside_it(tokenizer):
    model = random_model(GLM46)
    together = sampled_episodes(tokenizer, model, "abcdef", batch_sequences=4)
    assert len({len(episode.token_ids) for episode in together}) > 2
    for letters in ("c", "fb"):
        for episode, letter in zip(sampled_episodes(tokenizer, model, letters, 1), letters, strict=True):
            beside = together["abcdef".index(letter)]
            assert (episode.token_ids, episode.tool_spans) == (beside.token_ids, beside.tool_spans)


@pytest.mark.parametrize("loss_mean", ["tokens", "answers"])
def test_the_gradient_is_that_of_the_sampled_tokens_alone(tokenizer, loss_mean):
    """The tools' tokens are read, and are no part of the loss, its means and the importance weights."""
    model, rewards = random_model(GLM46), [1.0, 0.0, 0.0, 0.0, 1.0, 1.0]
    episodes = sampled_episodes(tokenizer, model, "abcdef", batch_sequences=6)
    rollouts = rollouts_of(episodes, rewards)
    (update,), metrics = updates_of(model, rollouts, OBJECTIVE.model_copy(update={"loss_mean": loss_mean}))
    ours = backward(model, update())
    advantages = group_advantages(torch.tensor(rewards).view(2, 3)).flatten().tolist()
    model.zero_grad()
    terms, num_tool_tokens = [], 0
    for episode, advantage in zip(episodes, advantages, strict=True):
        logits = model(torch.tensor([episode.row[:-1]])).logits_BTV[0]
        from_tools = {at for start, stop in episode.tool_spans for at in range(start, stop)}
        num_tool_tokens += len(from_tools)
        own = []
        for at, token_id in enumerate(episode.token_ids):
            if at not in from_tools:
                now = logits[len(episode.prompt_ids) + at - 1].log_softmax(-1)[token_id]
                own.append(-min(2.0, float((now - episode.log_probabilities[at]).exp())) * advantage * now)
        terms.append(torch.stack(own))
    assert num_tool_tokens > 6 * 2 * 10
    assert metrics["answer_tokens"] == pytest.approx(sum(map(len, terms)) / 6)
    mean = torch.cat(terms).mean() if loss_mean == "tokens" else torch.stack([term.mean() for term in terms]).mean()
    mean.backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-3, atol=1e-6)


def test_tokens_of_tools_are_no_targets_and_have_no_importance_weight(tokenizer):
    model = random_model(GLM46)
    rollouts = rollouts_of(sampled_episodes(tokenizer, model, "abc", 3), [1.0, 0.0, 0.0])
    rows = lay_out(rollouts, CPU)
    trainer_BT = target_log_probabilities(model, rows, 1.0, 3)
    for row, rollout in enumerate(rollouts):
        first = len(rollout.prompt_ids) - 1
        for start, stop in rollout.tool_spans:
            written = slice(first + start, first + stop)
            assert (rows.target_ids_BT[row, written] == IGNORED).all() and not trainer_BT[row, written].any()
            assert not rows.rollout_log_probabilities_BT[row, written].any()
        assert int(rows.is_answer_BT[row].sum()) == rollout.num_sampled


def test_advantages_pass_over_the_tokens_of_tools():
    """As if the sampled tokens stood side by side."""
    is_sampled = torch.tensor([[False, True, True, False, False, True, False]])
    rewards, values = torch.tensor([[0.0, 0.1, 0.2, 9.0, 9.0, 1.0, 9.0]]), torch.tensor([[9.0, 0.5, 0.2, 9, 9, 0.4, 9]])
    ours = generalized_advantages(rewards, values, is_sampled, 0.9, 0.8)
    dense = generalized_advantages(
        rewards[is_sampled][None], values[is_sampled][None], torch.ones(1, 3).bool(), 0.9, 0.8
    )
    assert torch.equal(ours[is_sampled], dense[0]) and not ours[~is_sampled].any()
