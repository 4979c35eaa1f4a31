"""`glm46 eval` on a checkpoint, a GGUF file and a server, and what each refuses."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
import yaml
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from typer.testing import CliRunner

from configs.load import load_suite
from flows.cli.command import app
from flows.cli.serving import evaluate_target
from infra.serving.model_client import ModelClient
from model.formats.gguf_checkpoint import write_gguf
from model.formats.quantized_checkpoint import write_quantized
from model.formats.quantized_model import load_original
from model.generation.generation import Sampling
from tasks.evaluation.benchmarks.run_suite import read_suite_items
from tasks.evaluation.engine import end_token_ids, load_engine
from tasks.release.served_scoring import ServedScorer
from tests.evaluation.benchmarks.toy_suite import LIKELIHOOD, toy_suite, write_suite, write_toy_model

EXACT = ("accuracy", "accuracy_normalised")


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """Directory with model/, model.gguf, toy.yaml and data/."""
    directory = tmp_path_factory.mktemp("targets")
    write_toy_model(directory / "model")
    write_gguf(
        directory / "model", directory / "model" / "tokenizer.json", directory / "model.gguf", gguf_type="F32", name="t"
    )
    write_suite(directory)
    return directory


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("GLM46_HOME", str(tmp_path / "home"))
    return tmp_path


def evaluate(*arguments):
    """(exit code, standard error)."""
    done = CliRunner().invoke(app, ["eval", *map(str, arguments)])
    return done.exit_code, done.stderr, done.stdout


def compare(*arguments):
    """The same of `glm46 compare`."""
    done = CliRunner().invoke(app, ["compare", *map(str, arguments)])
    return done.exit_code, done.stderr, done.stdout


def options(toy, output, suite="toy.yaml"):
    return ["--suite", toy / suite, "--data", toy / "data", "--output", output]


def suite_of(toy, *names) -> str:
    """A suite with only some of the toy's benchmarks."""
    suite = toy_suite()
    suite["benchmarks"] = [each for each in suite["benchmarks"] if each["name"] in names]  # pyright: ignore
    path = toy / f"{'-'.join(names)}.yaml"
    path.write_text(yaml.safe_dump(suite))
    return path.name


@pytest.fixture(scope="module")
def own_items(toy, tmp_path_factory):
    """Items of the checkpoint, evaluated in this process."""
    directory = tmp_path_factory.mktemp("own")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLM46_HOME", str(directory / "home"))
        code, errors, printed = evaluate(toy / "model", *options(toy, directory / "own.json"))
    assert code == 0, errors
    assert "bits_per_byte" in printed
    return directory / "own.json"


def items_of(path):
    return [json.loads(line) for line in path.with_name(f"{path.stem}.items.jsonl").read_text().splitlines()]


def test_a_result_says_what_decided_it(own_items, toy):
    result = json.loads(own_items.read_text())
    assert (result["target"], result["engine"]) == (str(toy / "model"), "glm46")
    assert result["versions"]["lm_eval"] == "0.4.13"
    by_name = {benchmark["name"]: benchmark for benchmark in result["benchmarks"]}
    assert by_name["forms"]["left_out"] == {"unsupported_constraint": 1}
    assert by_name["forms"]["figures"][0]["interval"] is None, "one item says nothing about others"
    for benchmark in result["benchmarks"]:
        figure = benchmark["figures"][0]
        if figure["interval"] is not None:
            assert figure["interval"][0] <= figure["value"] <= figure["interval"][1]
    lettered = [item for item in items_of(own_items) if item["benchmark"] == "lettered"]
    assert all(len(item["example_ids"]) == 2 and item["item_id"] not in item["example_ids"] for item in lettered)
    assert all(item["prompt"].count("Answer:") == 3 for item in lettered)
    subjects = {item["item_id"]: "more sums" in item["prompt"] for item in lettered}
    assert all(subjects[shot] == subjects[item["item_id"]] for item in lettered for shot in item["example_ids"])


def test_llama_cpp_answers_a_suite_as_our_engine_does(toy, own_items, tmp_path):
    code, errors, _ = evaluate(toy / "model.gguf", *options(toy, tmp_path / "gguf.json"))
    assert code == 0, errors
    for own, served in zip(items_of(own_items), items_of(tmp_path / "gguf.json"), strict=True):
        assert {name: own["scores"].get(name) for name in EXACT} == {name: served["scores"].get(name) for name in EXACT}
        if own["benchmark"] in ("calls", "computed"):
            continue  # llama.cpp writes the prompt with tools by itself, and not as our template does
        # The server cuts white space around what an assistant says.
        is_equal = own["output"] is served["output"] is None or own["output"].strip() == served["output"].strip()
        assert is_equal, (own["benchmark"], own["prompt"], own["output"], served["output"])
        assert own["log_probabilities"] == pytest.approx(served["log_probabilities"], abs=2e-3)
    code, _, printed = compare(own_items, tmp_path / "gguf.json", "--json")
    compared = {difference["benchmark"] for difference in json.loads(printed)["differences"]}
    assert code == 0 and compared == {benchmark["name"] for benchmark in toy_suite()["benchmarks"]}  # pyright: ignore


def test_transformers_answers_a_suite_as_our_engine_does(toy, own_items, tmp_path, monkeypatch):
    """The engine of quantized checkpoints, with the weights of the unquantized one: so a difference is the format's."""
    monkeypatch.setattr("model.formats.quantized_model.is_quantized", lambda directory: True)
    monkeypatch.setattr("model.formats.quantized_model.load_quantized", load_original)
    code, errors, _ = evaluate(toy / "model", *options(toy, tmp_path / "same.json"))
    assert code == 0, errors
    assert json.loads((tmp_path / "same.json").read_text())["engine"] == "transformers"
    for own, same in zip(items_of(own_items), items_of(tmp_path / "same.json"), strict=True):
        assert {name: own["scores"].get(name) for name in EXACT} == {name: same["scores"].get(name) for name in EXACT}
        assert own["output"] == same["output"], (own["benchmark"], own["prompt"])
        assert own["log_probabilities"] == pytest.approx(same["log_probabilities"], abs=2e-3)


@pytest.fixture(scope="module")
def quantized(toy):
    write_quantized(toy / "model", toy / "fp8", "FP8_DYNAMIC", [])
    return toy / "fp8"


def doubled(directory, target, factor):
    """A copy of which every scale of one expert is so many times what it was."""
    shutil.copytree(directory, target)
    tensors = load_file(target / "model.safetensors")
    changed = {name: factor * tensors[name] for name in tensors if ".experts.0." in name and name.endswith("_scale")}
    assert changed
    save_file(tensors | changed, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_a_quantized_directory_is_evaluated_with_its_own_weights(toy, quantized, tmp_path):
    suite = suite_of(toy, "texts", "choice")
    given = ["--suite", toy / suite, "--data", toy / "data", "--json"]
    code, errors, printed = compare(toy / "model", quantized, *given)
    assert code == 0, errors
    made = json.loads(printed)
    assert (made["first"]["engine"], made["second"]["engine"]) == ("glm46", "transformers")
    assert (made["second"]["tokens_per_second"], made["routing_agreement"]) == (None, None)
    assert made["not_measured"].startswith("of a quantized checkpoint neither speed nor experts")
    lost = {each["figure"]: each["difference"] for each in made["differences"]}["bits_per_byte"]
    broken = doubled(quantized, tmp_path / "broken", 2.0)
    (each,) = [
        each
        for each in json.loads(compare(quantized, broken, *given)[2])["differences"]
        if each["figure"] == "bits_per_byte"
    ]
    assert 0 < abs(lost) < 0.02 < 0.1 < each["difference"]


def test_what_cannot_be_read_of_a_quantized_directory_is_one_sentence(toy, quantized, tmp_path):
    given = options(toy, tmp_path / "a.json", suite_of(toy, "choice"))
    code, errors, _ = evaluate(quantized, *given, "--device", "cuda")
    assert code == 1 and "is quantized, and is computed on a CPU here: leave --device out" in errors
    endless = doubled(quantized, tmp_path / "endless", float("inf"))
    code, errors, _ = evaluate(endless, *given)
    assert code == 1 and "has numbers that are not finite: quantize the checkpoint again" in errors
    tensors = load_file(endless / "model.safetensors")
    name = next(name for name in tensors if name.endswith("q_proj.weight_scale"))
    save_file({key: tensors[key] for key in tensors if key != name}, endless / "model.safetensors")
    code, errors, _ = evaluate(endless, *given)
    assert code == 1 and f"1 tensors are missing, 0 are unknown, first ['{name}']" in errors
    assert errors.count("glm46:") == 1 and not list(tmp_path.glob("a*"))


class Endpoint(BaseHTTPRequestHandler):
    """A server with OpenAI's completions over our engine; `echo` reports the prompt's log-probabilities."""

    engine, tokenizer, reports, answers_left = None, None, True, 10**9
    asked: ClassVar[dict[int, set[tuple[str, str]]]] = {}
    """By port, the models and keys of its requests."""

    def do_GET(self):
        self.send({"object": "list", "data": [{"id": "toy", "object": "model"}]})

    def do_POST(self):
        if self.server.answers_left == 0:
            self.server.is_over.wait(self.server.silent_seconds)
            self.close_connection = True
            self.connection.close()
            return
        self.server.answers_left -= 1
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        named = (asked["model"], self.headers["authorization"])
        self.asked.setdefault(self.server.server_port, set()).add(named)
        choice = {"index": 0, "finish_reason": "stop", "text": "", "logprobs": None}
        encoded = self.server.tokenizer.encode(asked["prompt"], add_special_tokens=False)
        if asked.get("echo"):
            choice["text"] = asked["prompt"]
            choice["logprobs"] = self.report(encoded) if self.server.reports else None
        elif asked.get("stream"):
            choice["text"] = "a"
        else:
            sampling = Sampling(asked["max_tokens"], stop_token_ids=end_token_ids(self.server.tokenizer))
            drawn = self.server.engine.generate([encoded.ids], sampling, "v").token_ids[0]
            choice["text"] = self.server.tokenizer.decode(drawn, skip_special_tokens=True)
        answer = {"id": "1", "object": "text_completion", "created": 0, "model": "toy", "choices": [choice]}
        self.send(answer, num_pieces=asked["max_tokens"] if asked.get("stream") else 0)

    def report(self, encoded):
        ids = encoded.ids
        scores = self.server.engine.score_continuations([(ids[:end], ids[end : end + 1]) for end in range(1, len(ids))])
        best = [{"x": score.log_probability + (0 if score.is_greedy else 1)} for score in scores]
        tokens = [self.server.tokenizer.decode([each], skip_special_tokens=False) for each in ids]
        offsets, end = [start for start, _ in encoded.offsets], encoded.offsets[-1][1]
        report = {
            "tokens": [*tokens, "a"],
            "token_logprobs": [None, *(score.log_probability for score in scores), -9.0],
            "top_logprobs": [None, *best, {"a": -9.0}],
            "text_offset": [*offsets, end],
        }
        return self.server.as_reported(report)

    def send(self, value, num_pieces=0):
        """At once, or as a stream of that many times the same text."""
        text = json.dumps(value)
        body = (f"data: {text}\n\n" * num_pieces + "data: [DONE]\n\n").encode() if num_pieces else text.encode()
        self.send_response(200)
        self.send_header("content-type", "text/event-stream" if num_pieces else "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


def test_texts_have_a_figure_per_domain(toy, tmp_path):
    """Each is what a file with only these texts gives."""
    _, data = write_suite(tmp_path)
    rows = [json.loads(line) for line in (data / "texts.jsonl").read_text().splitlines()]
    named = [
        row | {"domain": "prose"} if number % 2 else row | {"source": "web", "domain": None}
        for number, row in enumerate(rows)
    ]
    figures = {}
    for part in ("", "prose", "web"):
        kept = [row for row in named if part in ("", row["domain"] or row.get("source"))]
        (data / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
        output = tmp_path / f"{part or 'all'}.json"
        suite = toy / suite_of(toy, "texts")
        code, errors, printed = evaluate(toy / "model", "--suite", suite, "--data", data, "--output", output)
        assert code == 0 and (part or "prose") in printed, errors
        (benchmark,) = json.loads(output.read_text())["benchmarks"]
        figures[part] = {each["part"]: (each["value"], each["num_items"]) for each in benchmark["figures"]}
    assert {part: figures[part][part] for part in ("prose", "web")} == {
        part: figures[""][part] for part in ("prose", "web")
    }
    assert figures["prose"][""] == figures["prose"]["prose"] != figures[""][""]
    (data / "texts.jsonl").write_text("".join(json.dumps(row | {"source": "https://a.b/c"}) + "\n" for row in rows))
    asked = read_suite_items("toy", load_suite(str(suite)), str(data), None)
    assert {item.question.part for item in asked.items["texts"].items} == {""}, "addresses are no domains"


def as_sglang(report):
    return report | {"text_offset": [-1] * len(report["tokens"])}


def after_a_start_token(report):
    """As vLLM reports a prompt that its tokenizer begins with a token of its own."""
    start = "<|begin_of_text|>"
    return {
        "tokens": [start, *report["tokens"]],
        "token_logprobs": [None, -1.0, *report["token_logprobs"][1:]],
        "top_logprobs": [None, {"x": -1.0}, *report["top_logprobs"][1:]],
        "text_offset": [0, *(len(start) + each for each in report["text_offset"])],
    }


def as_parts_of_characters(report):
    return report | {"tokens": ["\ufffd"] * len(report["tokens"])}


def as_ids(report):
    return as_sglang(as_parts_of_characters(report))


@contextmanager
def endpoint(toy, *, reports=True, as_reported=dict, answers_left=10**9, silent_seconds=0) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    server.engine = load_engine(toy / "model", weights_version="v", batch_sequences=8)
    server.tokenizer = Tokenizer.from_file(str(toy / "model" / "tokenizer.json"))
    server.reports, server.answers_left, server.silent_seconds = reports, answers_left, silent_seconds
    server.as_reported = as_reported
    server.is_over = threading.Event()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.is_over.set()
        server.shutdown()
        server.server_close()


def test_a_server_that_echoes_decides_as_the_checkpoint_does(toy, own_items, tmp_path):
    names = ("choice", "lettered", "contexts", "words", "copies", "functions")
    with endpoint(toy) as url:
        code, errors, _ = evaluate(url, *options(toy, tmp_path / "url.json", suite_of(toy, *names)))
    assert code == 0, errors
    expected = [item for item in items_of(own_items) if item["benchmark"] in names]
    for own, served in zip(expected, items_of(tmp_path / "url.json"), strict=True):
        assert (own["scores"], own["output"]) == (served["scores"], served["output"])
        assert own["log_probabilities"] == pytest.approx(served["log_probabilities"], abs=1e-4)


@pytest.mark.parametrize("as_reported", [as_sglang, after_a_start_token, as_parts_of_characters])
def test_the_tokens_of_a_continuation_are_found_however_a_server_places_them(as_reported, toy):
    with endpoint(toy) as plain, endpoint(toy, as_reported=as_reported) as other:
        scores = [ModelClient(url, "", 60, "toy").score("The quick brown", " fox jumps") for url in (plain, other)]
    assert scores[0] == scores[1]


def test_tokens_that_have_no_place_in_the_text_are_not_scored(toy):
    with endpoint(toy, as_reported=as_ids) as url, pytest.raises(ValueError, match="not where each begins"):
        ModelClient(url, "", 60, "toy").score("The quick brown", " fox jumps")


def test_a_server_without_log_probabilities_is_refused_for_likelihoods_and_taken_for_answers(toy, tmp_path):
    with endpoint(toy, reports=False) as url:
        code, errors, _ = evaluate(url, *options(toy, tmp_path / "a.json", suite_of(toy, "choice")))
        assert code == 1 and errors.count("glm46:") == 1
        assert f"{url} reports no log-probabilities of a given text" in errors
        code, errors, _ = evaluate(url, *options(toy, tmp_path / "b.json", suite_of(toy, "copies")))
        assert code == 0, errors
        code, errors, _ = evaluate(url, *options(toy, tmp_path / "c.json", suite_of(toy, "texts")))
    assert code == 1 and "scores whole texts, which needs the tokens" in errors
    assert sorted(path.name for path in tmp_path.glob("*.json*")) == ["b.items.jsonl", "b.json"]


@pytest.mark.parametrize(
    ("silent_seconds", "said"),
    [(0, "stopped answering after 3 answers"), (60, "took longer than 2.0 s after 3 answers")],
)
def test_a_server_that_stops_answering_midway_leaves_only_its_answers(silent_seconds, said, toy, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate_target, "NUM_RETRIES", 0)
    suite = toy / suite_of(toy, "copies")
    suite.write_text(yaml.safe_dump(yaml.safe_load(suite.read_text()) | {"timeout_seconds": 2}))
    with endpoint(toy, answers_left=2, silent_seconds=silent_seconds) as url:
        code, errors, _ = evaluate(url, *options(toy, tmp_path / "a.json", suite.name), "--concurrency", 1)
    assert code == 1
    assert f"{url} {said}" in errors and f"the answers so far are in {tmp_path / 'a.answers.jsonl'}" in errors
    assert [path.name for path in tmp_path.glob("a*")] == ["a.answers.jsonl"]


def test_what_a_gguf_file_has_answered_is_not_computed_again(toy, own_items, tmp_path, monkeypatch):
    """A server that dies after three continuations; the second command asks only the rest, and ends as one alone."""
    given, scored = options(toy, tmp_path / "a.json", suite_of(toy, "choice")), []
    score = ServedScorer.score_continuation

    def score_three(scorer, *arguments):
        if len(scored) == 3:
            raise ConnectionResetError("gone")
        scored.append(arguments)
        return score(scorer, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(ServedScorer, "score_continuation", score_three)
        code, errors, _ = evaluate(toy / "model.gguf", *given)
    assert code == 1 and "stopped answering (gone)" in errors

    def score_rest(scorer, *arguments):
        scored.append(arguments)
        return score(scorer, *arguments)

    monkeypatch.setattr(ServedScorer, "score_continuation", score_rest)
    code, errors, _ = evaluate(toy / "model.gguf", *given)
    assert code == 0 and f"3 earlier answers are in {tmp_path / 'a.answers.jsonl'}" in errors
    served = items_of(tmp_path / "a.json")
    assert len(scored) == sum(len(item["log_probabilities"]) for item in served)
    for own, item in zip([each for each in items_of(own_items) if each["benchmark"] == "choice"], served, strict=True):
        assert own["scores"] == item["scores"]
        assert own["log_probabilities"] == pytest.approx(item["log_probabilities"], abs=2e-3)
    assert sorted(path.name for path in tmp_path.glob("a*")) == ["a.items.jsonl", "a.json"]


def test_a_checkpoint_that_lacks_a_tensor_is_one_sentence(toy, tmp_path):
    from safetensors.torch import load_file, save_file

    broken = write_toy_model(tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.layers.0.mlp.down_proj.weight"]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    code, errors, _ = evaluate(broken, *options(toy, tmp_path / "a.json"))
    assert code == 1 and errors.count("glm46:") == 1
    assert "tensor model.layers.0.mlp.down_proj.weight is missing" in errors
    silent = write_toy_model(tmp_path / "silent")
    (silent / "tokenizer.json").unlink()
    assert "export the checkpoint with its tokenizer" in evaluate(silent, *options(toy, tmp_path / "a.json"))[1]
    assert not list(tmp_path.glob("a*"))


@pytest.mark.parametrize("benchmark", ["choice", "copies"])
def test_a_model_whose_numbers_are_not_finite_is_refused(benchmark, toy, tmp_path):
    """Also where it would only write: a likeliest token is found among numbers that are none."""
    broken = write_toy_model(tmp_path / "broken", "broken")
    code, errors, _ = evaluate(broken, *options(toy, tmp_path / "a.json", suite_of(toy, benchmark)))
    assert code == 1 and "has numbers that are not finite: take an earlier checkpoint" in errors
    assert not list(tmp_path.glob("a*"))


def test_a_tokenizer_of_another_model_is_refused(toy, tmp_path):
    other = write_toy_model(tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    ends = {token["content"]: token for token in tokenizer["added_tokens"]}
    ends["<|user|>"]["content"], ends["<think>"]["content"] = "<think>", "<|user|>"
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    code, errors, _ = evaluate(other, *options(toy, tmp_path / "a.json", suite_of(toy, "copies")))
    assert code == 1 and "is the tokenizer of another model" in errors
    assert not list(tmp_path.glob("a*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model", "--suite", "mmul"], "no suite 'mmul': the suites are agents, aime, answers, hellaswag"),
        (["nowhere/model"], "nowhere/model: name a checkpoint in the Hugging Face layout that exists"),
        (["nowhere.gguf"], "name a GGUF file that exists"),
        (["ftp/x.json"], "no directory"),
        (["model", "--output", "result.txt"], "must end in .json"),
        (["model", "--output", "absent/result.json"], "make it first"),
        (["model", "--data", "absent"], "absent does not exist"),
    ],
)
def test_a_wrong_command_line_is_one_sentence_and_exit_code_2(toy, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(toy)
    given = {"--suite": "toy.yaml", "--data": "data", "--output": str(tmp_path / "a.json")}
    target, *rest = arguments
    given |= dict(zip(rest[::2], rest[1::2], strict=True))
    code, errors, _ = evaluate(target, *(part for pair in given.items() for part in pair))
    assert code == 2 and errors.count("glm46:") == 1 and message in errors
    assert not list(tmp_path.glob("a*"))


def test_results_of_other_items_are_not_compared(toy, own_items, tmp_path):
    short = tmp_path / "short.json"
    assert evaluate(toy / "model", *options(toy, short), "--limit", 2)[0] == 0
    shorter = [item["item_id"] for item in items_of(short)]
    assert len(shorter) == 25 and set(shorter) < {item["item_id"] for item in items_of(own_items)}
    code, errors, _ = compare(own_items, short)
    assert code == 2 and "benchmark choice:" in errors and "has 4 items" in errors and "--limit" in errors
    other = tmp_path / "other.json"
    other.with_name("other.items.jsonl").write_bytes(own_items.with_name(f"{own_items.stem}.items.jsonl").read_bytes())
    other.write_text(own_items.read_text().replace('"enable_thinking": false', '"enable_thinking": true'))
    code, errors, _ = compare(own_items, other)
    assert code == 2 and "has enable_thinking False and" in errors and "True: evaluate both with the same" in errors
    items = short.with_name("short.items.jsonl")
    items.write_bytes(items.read_bytes().replace(b'"accuracy":1.0', b'"accuracy":0.0'))
    code, errors, _ = compare(short, short)
    assert code == 2 and "evaluate again" in errors


def test_a_suite_that_makes_its_items_needs_no_data(toy, tmp_path):
    """The same items as with a directory; a suite with files names the first one and who reads it."""
    made, both = toy / suite_of(toy, "needle"), toy / suite_of(toy, "needle", "words")
    assert evaluate(toy / "model", "--suite", made, "--output", tmp_path / "a.json")[0] == 0
    assert evaluate(toy / "model", *options(toy, tmp_path / "b.json", made.name))[0] == 0
    assert items_of(tmp_path / "a.json") == items_of(tmp_path / "b.json") != []
    code, errors, _ = compare(toy / "model", toy / "model", "--suite", made, "--json")
    assert code == 0, errors
    code, errors, _ = evaluate(toy / "model", "--suite", both, "--output", tmp_path / "c.json")
    assert code == 2 and f"benchmark words of suite {both} reads words.jsonl: name with --data" in errors
    assert "with the role evaluation" in errors and not list(tmp_path.glob("c*"))
    code, errors, _ = evaluate(toy / "model", "--suite", made)
    assert code == 2 and "name --output, a new file" in errors


def test_an_existing_result_is_not_overwritten(toy, own_items):
    code, errors, _ = evaluate(toy / "model", *options(toy, own_items))
    assert code == 2 and "exists: name a new file" in errors


def test_every_kind_of_likelihood_is_in_the_toy_suite():
    from tasks.evaluation.benchmarks.run_suite import LIKELIHOOD_KINDS

    assert set(LIKELIHOOD.values()) == set(LIKELIHOOD_KINDS)


def test_a_model_is_compared_with_a_worse_one_on_the_same_items(toy, tmp_path):
    """A copy whose head was shuffled; size and speed are measured."""
    worse, output = tmp_path / "worse", tmp_path / "compared.json"
    shutil.copytree(toy / "model", worse)
    for path in worse.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if name.endswith(("mlp.gate.weight", "lm_head.weight")):
                tensors[name] = tensor.flip(0).contiguous()
        save_file(tensors, path, metadata={"format": "pt"})
    suite = suite_of(toy, "texts", "choice")
    given = ["--suite", toy / suite, "--data", toy / "data"]
    code, errors, printed = compare(toy / "model", worse, *given, "--output", output)
    assert code == 0, errors
    made = json.loads(output.read_text())
    bits = next(each for each in made["differences"] if each["figure"] == "bits_per_byte")
    assert bits["verdict"] == "worse" and bits["difference"] == pytest.approx(bits["second"] - bits["first"])
    assert made["first"]["num_bytes"] == made["second"]["num_bytes"] == (toy / "model/model.safetensors").stat().st_size
    assert made["routing_agreement"] == 1, "the toy's tokens go to every expert"
    assert made["first"]["tokens_per_second"] > 0 and not made["not_measured"]
    assert "worse" in printed and "same experts: " in printed

    code, errors, printed = compare(toy / "model", toy / "model.gguf", *given, "--json")
    assert code == 0, errors
    made = json.loads(printed)
    assert (
        made["second"]["num_bytes"] == (toy / "model.gguf").stat().st_size and made["second"]["engine"] == "llama.cpp"
    )
    assert made["second"]["tokens_per_second"] > 0 and made["routing_agreement"] is None
    assert made["not_measured"].startswith("experts are compared of two checkpoints")
    for each in made["differences"]:
        assert each["difference"] == pytest.approx(0, abs=1e-3) and each["verdict"] == "undecided"


def test_two_servers_are_compared_each_with_its_model_and_its_key(toy, tmp_path, monkeypatch):
    given = ["--suite", toy / suite_of(toy, "copies"), "--data", toy / "data", "--limit", 1, "--json"]
    monkeypatch.setenv("KEY_OF_A", "a")
    monkeypatch.setenv("KEY_OF_B", "b")
    with endpoint(toy) as first, endpoint(toy) as second:
        code, errors, _ = compare(first, second, *given, "--model", "one,two", "--api-key-env", "KEY_OF_A,KEY_OF_B")
        ports = [int(url.rpartition(":")[2]) for url in (first, second)]
    assert code == 0, errors
    assert [Endpoint.asked[port] for port in ports] == [{("one", "Bearer a")}, {("two", "Bearer b")}]
    code, errors, _ = compare(first, second, *given, "--model", "one,two,three")
    assert code == 2 and "--model one,two,three: write it once for both, or as OF_A,OF_B" in errors


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (["model", "model"], "benchmark mmlu of suite smoke reads bench/mmlu_dev"),
        (["model", "own.json", "--data", "data"], "is a result: compare it with another result"),
        (["model", "nowhere/at/all", "--data", "data"], "no directory"),
        (["model", "model", "--data", "data", "--output", "nowhere/a.json"], "must be a new file in a directory"),
    ],
)
def test_what_cannot_be_compared_is_refused(toy, named, message, monkeypatch):
    monkeypatch.chdir(toy)
    code, errors, _ = compare(*named)
    assert code == 2 and message in errors, errors
