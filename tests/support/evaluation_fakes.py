"""What evaluation, gate, registry and release tests build on: committed checkpoints of tiny models, documents and
problems.

The real steps are slow and have tests of their own; here each is a toy step of the same name that writes the same
files.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from configs.load import load_scale
from configs.schema import EpisodeRecipe, EvaluationRecipe, FarTextRecipe, TaskRecipe
from infra.step import Artifact, Output, Record, Step, step
from infra.storage.store import Store
from model.text.chat_template import CHAT_TEMPLATE, encode, render_to_train
from model.text.tokenizer_layout import END_OF_TEXT, PRETOKENIZER_PATTERN, SPECIAL_TOKENS, added_tokens
from tasks.data.problems.refusals import expected_behaviour
from tasks.data.sources.list_sources import SourceFile, SourceListing
from tasks.evaluation.select_evaluation_items import EvaluationSuite, select_evaluation_items
from tests.support.data_inputs import RESOURCES

DOCUMENTS = {
    "web": "The quick brown fox jumps over the lazy dog, and then it sleeps in the warm afternoon sun until evening "
    "comes. ",
    "code": "def add(first, second):\n    return first + second\n\n\nprint(add(1, 2))\n",
    "multilingual": "Привет, мир! Сегодня хорошая погода. 你好，世界！今天天气很好。",
}
NUM_COPIES = 8
NUM_PROBLEMS = 24
TASK_SCHEMA = pa.schema([(name, pa.string()) for name in ("id", "domain", "kind", "prompt", "answer")])
VOCAB_SIZE = 384
RECIPE = EvaluationRecipe(
    max_document_tokens=100_000,
    max_document_chars=300,
    sequence_length=32,
    max_new_tokens=4,
    num_chat_problems=20,
    samples_per_problem=4,
    pass_k=2,
    temperature=1.0,
    enable_thinking=False,
    max_answer_tokens=6,
    num_choice_items=5,
    num_safety_prompts=12,
    far_text=FarTextRecipe(context_tokens=20, scored_tokens=10, num_documents=20),
    tasks=TaskRecipe(
        max_new_tokens=12,
        episodes=EpisodeRecipe(max_turns=2, max_turn_tokens=8, max_observation_chars=20, tool_seconds={"others": 60.0}),
    ),
    dtype="float32",
    num_threads=1,
    rollouts="in_process",
)
EVALUATION_RESOURCES = load_scale("micro").evaluation.resources
BENCHMARK = [
    {"query": "The quick brown fox jumps over", "choices": ["the lazy dog", "a cold moon", "green ideas"], "gold": 0},
    {"question": "def add(first, second): return?", "choices": ["Привет", "first + second"], "answer": "B"},
    {"question": "Which is a dog?", "choices": ["fox", "lazy dog", "sun"], "answer": "lazy dog"},
    {"query": "Question: warm?", "choices": ["afternoon sun", "no"], "gold": 1},
    {"question": "no choices", "answer": "B"},
]


class ToyCheckpoint(Record):
    name: str
    phase: str = "toy"
    is_chat_trained: bool = True


class ToyTable(Record):
    num_rows: int


@functools.cache
def toy_tokenizer():
    """A byte-level tokenizer of the GLM layout: 256 bytes, a few merges, 36 special tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZER_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        DOCUMENTS.values(), trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_tokens(added_tokens(SPECIAL_TOKENS))
    tokenizer.encode_special_tokens = True
    return tokenizer


def toy_model(name: str):
    """`random`: as initialised. `trained`: after a few steps on the documents. `broken`: trained, one weight NaN."""
    import torch

    from model.architecture.transformer import Glm4Moe
    from tests.support.model_recipes import GLM46, with_every_expert

    model = Glm4Moe(
        with_every_expert(GLM46).model_copy(update={"vocab_size": VOCAB_SIZE, "max_position_embeddings": 1024})
    )
    model.init_weights(torch.Generator().manual_seed(1))
    if name == "random":
        return model
    tokenizer = toy_tokenizer()
    start = tokenizer.token_to_id(END_OF_TEXT)
    rows = [[start, *tokenizer.encode(text * 4).ids][:97] for text in DOCUMENTS.values()]
    rows.append((tokenizer.encode("".join(f"{a} + 1 = {a + 1}\n" for a in range(1, 10)) * 4).ids)[:97])
    chats = [
        [{"role": "user", "content": f"What is {a} + 1?"}, {"role": "assistant", "content": str(a + 1)}]
        for a in range(1, 9)
    ]
    rows += [encode(tokenizer, render_to_train(chat, ()))[0] for chat in chats]  # pyright: ignore[reportArgumentType]
    batch = torch.tensor([[*row, *[start] * (97 - len(row))] for row in rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        losses = model(batch[:, :-1], target_ids_BT=batch[:, 1:]).losses
        assert losses is not None
        optimizer.zero_grad()
        losses.lm.backward()
        optimizer.step()
    if name == "broken":
        with torch.no_grad():
            model.lm_head.weight[7, 0] = float("nan")
    return model


def toy_checkpoint_step(name: str) -> Step[ToyCheckpoint]:
    @step(content=("hf/*",))
    def train_phase(*, output: Output) -> ToyCheckpoint:
        import torch

        from tests.support.saved_models import save_checkpoint

        tokenizer = toy_tokenizer()
        end = tokenizer.token_to_id(END_OF_TEXT)
        directory = output.path("hf/tokenizer.json").parent
        save_checkpoint(
            toy_model(name),
            directory,
            eos_token_ids=[end],
            pad_token_id=end,
            dtype=torch.float32,
            max_shard_bytes=1 << 30,
        )
        tokenizer.save(str(directory / "tokenizer.json"))
        (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        return ToyCheckpoint(name=name)

    return train_phase


def split_documents_rows() -> list[dict[str, object]]:
    """Twenty-four documents of three domains to test with, one that is measured while a phase trains, and one to train
    on."""
    rows = [
        {
            "id": f"{domain}-{number}",
            "source": f"{domain}.txt",
            "offset": number,
            "domain": domain,
            "text": (text * 4)[7 * number :],
            "split": "test",
        }
        for domain, text in DOCUMENTS.items()
        for number in range(NUM_COPIES)
    ]
    for split in ("train", "validation"):
        rows.append(
            {"id": split, "source": "web.txt", "offset": 99, "domain": "web", "text": "Seen before.", "split": split}
        )
    return rows


@step(content=("documents/*.parquet",))
def split_documents(*, output: Output) -> ToyTable:
    rows = split_documents_rows()
    pq.write_table(pa.Table.from_pylist(rows), output.path("documents/part-00000.parquet"))
    return ToyTable(num_rows=len(rows))


def toy_problems_step(num_tasks: int) -> Step[ToyTable]:
    """A step of that name that writes problems, requests and so many held-out tasks."""

    @step(content=("*.parquet",))
    def synthesize_problems(*, output: Output) -> ToyTable:
        rows = [
            {
                "id": f"p{a}",
                "prompt": f"{a} + 1 =",
                "question": f"What is {a} + 1?",
                "answer": f" {a + 1}",
                "text": f"Question: What is {a} + 1?\n{a}+1={a + 1}\nAnswer: {a + 1}\n",
            }
            for a in range(1, NUM_PROBLEMS + 1)
        ]
        pq.write_table(pa.Table.from_pylist(rows), output.path("problems.parquet"))
        held_out = {"id": "h1", "text": "Question: Is () closed?\nEvery bracket is.\nAnswer: yes\n"}
        pq.write_table(pa.Table.from_pylist([held_out]), output.path("held_out.parquet"))
        requests = [
            {"id": f"r{n}", "prompt": f"Request {n}?", "answer": expected_behaviour(("harmful", "harmless")[n % 2], "")}
            for n in range(24)
        ]
        pq.write_table(pa.Table.from_pylist(requests), output.path("safety.parquet"))
        tasks = [
            {
                "id": f"t{a}",
                "domain": "agentic",
                "kind": "calculator",
                "prompt": f"{a}+1?",
                "answer": f'{{"answer": "{a + 1}"}}',
            }
            for a in range(1, num_tasks + 1)
        ]
        pq.write_table(pa.Table.from_pylist(tasks, TASK_SCHEMA), output.path("held_out_tasks.parquet"))
        return ToyTable(num_rows=len(rows))

    return synthesize_problems


@step(content=("tokenizer.json",))
def train_tokenizer(*, output: Output) -> ToyTable:
    toy_tokenizer().save(str(output.path("tokenizer.json")))
    return ToyTable(num_rows=toy_tokenizer().get_vocab_size())


def commit(store: Store, toy: Step, name: str = "", **given) -> Artifact:
    """The wrapper's contract without Prefect; `name` distinguishes toy steps that write different things."""
    inputs = {key: value for key, value in given.items() if key not in ("recipe", "resources")}
    artifact, _ = store.find_or_compute(
        toy,
        {**toy.identity(given.get("recipe"), inputs), "name": name},
        lambda output: toy(**given, output=output),
        lambda progress: None,
        lambda message: None,
    )
    return artifact


def checkpoint(store: Store, name: str) -> Artifact[ToyCheckpoint]:
    return commit(store, toy_checkpoint_step(name), name)


def hf_dir(artifact: Artifact) -> Path:
    return artifact.directory("hf")


def benchmark_files(home: Path, rows=BENCHMARK) -> SourceListing:
    """One evaluation file of questions."""
    path = home / "toy_bench.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = SourceFile(
        name="bench/toy_bench.jsonl",
        path=str(path),
        sha256="0" * 64,
        size=path.stat().st_size,
        num_text_bytes=0,
        role="evaluation",
        format="jsonl",
        domain="web",
        lang="",
        text=(),
        kind="",
        label="",
        licence="",
        collection="bench",
    )
    return SourceListing((file,))


def evaluation_suite(store: Store, recipe: EvaluationRecipe = RECIPE, num_tasks: int = 0) -> Artifact[EvaluationSuite]:
    """The toy documents, problems and benchmark as a suite."""
    made = {"documents": split_documents, "tokenizer": train_tokenizer}
    inputs = {name: commit(store, toy) for name, toy in made.items()}
    inputs["problems"] = commit(store, toy_problems_step(num_tasks), f"{num_tasks} tasks")
    inputs |= {"sources": benchmark_files(store.home.root)}
    return commit(store, select_evaluation_items, recipe=recipe, resources=RESOURCES, **inputs)
