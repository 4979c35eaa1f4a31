"""A phase small enough to train in a second: recipe, real shards, conversations, prompts, packed order and tokenizer as
committed artifacts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from configs.files.block_reader import BlockReader
from configs.files.stored_files import StoredFile, given_file
from configs.load import load_scale
from configs.schema import Frozen, PackingRecipe, TrainingRecipe, TrainingResources
from infra.home import Home
from infra.step import Artifact, Output, Record, Step, step
from infra.storage.open_store import open_store
from infra.storage.store import Store, step_key
from model.text.chat_template import encode, render_to_train
from model.text.tokenizer_layout import SPECIAL_TOKENS, tokenizer_for_text
from tasks.data.packing.pack_phase import pack_phase
from tasks.data.packing.packed_order import ORDER_FILES, PackedOrder, part_name, write_part
from tasks.data.packing.packed_rows import PACKING_FILE, PackedRows
from tasks.data.packing.row_order import shuffled_rows
from tasks.data.shards.token_shard import append_tokens, token_dtype, write_index
from tasks.data.tokenizer.bpe_tokenizer import train_bpe
from tasks.training.state.trained_checkpoint import TrainedCheckpoint
from tasks.training.train_phase import train_phase
from tests.support.model_recipes import GLM46

SEQUENCE_LENGTH, ROWS_PER_STEP, NUM_STEPS, SEED = 16, 4, 6, 46
RESOURCES = (
    load_scale("micro")
    .phases[0]
    .resources.model_copy(
        update={
            "micro_batch_sequences": 4,
            "save_interval_steps": 2,
            "log_interval_steps": 1,
            "num_kept_checkpoints": 2,
        }
    )
)


class Nothing(Record):
    """These inputs are asked for files only."""


class ToyTokenizer(Record):
    """What training asks of a tokenizer's record."""

    num_tokens: int
    special_ids: dict[str, int]


class ToyShards(Record):
    """What packing asks of the record of shards."""

    shards: tuple[str, ...]
    domains: dict[str, str]


class ToyPrompts(Record):
    """What training asks of the record of synthesized problems."""

    num_prompts: int


class PromptAnswers(Frozen):
    """The answers that the toy's prompts want, one prompt each."""

    answers: tuple[str, ...]
    domains: tuple[str, ...] = ()
    """Of each prompt; empty: all are synthetic."""


class RowRange(Frozen):
    """Which of the toy's blocks a phase reads, in this order."""

    first_row: int
    num_rows: int


def small_recipe(num_steps: int = NUM_STEPS, first_step: int = 0, **changes) -> TrainingRecipe:
    """Steps [first_step, first_step + num_steps) of a course of NUM_STEPS, 64 tokens each."""
    scale = load_scale("micro")
    course = scale.courses[0].recipe.model_dump() | {
        "warmup_share": 100 / (NUM_STEPS * ROWS_PER_STEP * SEQUENCE_LENGTH),
        "start_batch_tokens": ROWS_PER_STEP * SEQUENCE_LENGTH,
        "peak_batch_tokens": ROWS_PER_STEP * SEQUENCE_LENGTH,
    }
    recipe = scale.training_recipe(scale.phases[0])
    values = recipe.model_dump() | {
        "model": GLM46.model_dump(),
        # Routers that move as fast as other matrices keep experts apart: rounding must not choose between them.
        "optimizer": recipe.optimizer.model_dump() | {"router_rate_ratio": 1.0},
        "course": course,
        "sequence_length": SEQUENCE_LENGTH,
        "num_threads": 1,
        "prompt_mixture": [{"at_share": share, "mixture": {"synthetic": 1.0}} for share in (0.0, 1.0)],
        "course_start_tokens": first_step * ROWS_PER_STEP * SEQUENCE_LENGTH,
        "course_num_tokens": NUM_STEPS * ROWS_PER_STEP * SEQUENCE_LENGTH,
        "num_tokens": num_steps * ROWS_PER_STEP * SEQUENCE_LENGTH,
    }
    return TrainingRecipe.model_validate(values | changes)


def documents() -> list[list[int]]:
    """Two per row: counting sequences of different lengths and strides, closed by token 0. Every row begins with token
    1, so that rows may be put in any order: the last target of each is the same."""
    draw = np.random.default_rng(7)
    texts = []
    for number in range(NUM_STEPS * ROWS_PER_STEP):
        cut = int(draw.integers(3, SEQUENCE_LENGTH - 3))
        for length in (cut, SEQUENCE_LENGTH - cut):
            stride = int(draw.integers(1, 5))
            texts.append([(stride * index + number) % 250 + 1 for index in range(length - 1)] + [0])
        texts[-2][0] = 1
    return texts


@step(content=("shards/*",))
def shard_toy_documents(*, output: Output) -> ToyShards:
    dtype = token_dtype(GLM46.vocab_size)
    with open(output.path("shards/toy.bin"), "wb") as file:
        lengths = append_tokens(file, documents(), dtype)
    write_index(output.path("shards/toy.idx"), lengths, dtype)
    return ToyShards(shards=("toy",), domains={"toy": "web"})


@step(content=("shards/*",))
def shard_toy_chats(*, tokenizer: Artifact[ToyTokenizer], output: Output) -> ToyShards:
    """Questions `a?` to `h?`, each answered with 0 as often as with 1: one conversation fills a row of 16 but for two
    tokens."""
    opened = tokenizer_for_text(str(tokenizer.path("tokenizer.json")))
    chats = [
        encode(
            opened,
            render_to_train([{"role": "user", "content": f"{letter}?"}, {"role": "assistant", "content": answer}], ()),
        )
        for letter in "abcdefgh"
        for answer in "01"
    ]
    dtype = token_dtype(GLM46.vocab_size)
    with open(output.path("shards/chat.bin"), "wb") as file:
        lengths = append_tokens(file, [token_ids for token_ids, _ in chats], dtype)
    write_index(output.path("shards/chat.idx"), lengths, dtype)
    output.path("shards/chat.mask").write_bytes(b"".join(bytes(trained) for _, trained in chats))
    return ToyShards(shards=("chat",), domains={"chat": "chat"})


@step(content=("prompts.parquet",))
def write_toy_prompts(*, recipe: PromptAnswers, output: Output) -> ToyPrompts:
    rows = [
        {
            "id": f"prompt-{number}",
            "domain": recipe.domains[number] if recipe.domains else "synthetic",
            "kind": "exact",
            "prompt": f"{chr(97 + number)}?",
            "tools": "[]",
            "answer": answer,
            "source": "toys.jsonl",
            "messages": "[]",
        }
        for number, answer in enumerate(recipe.answers)
    ]
    pq.write_table(pa.Table.from_pylist(rows), output.path("prompts.parquet"))
    return ToyPrompts(num_prompts=len(rows))


@step(content=(ORDER_FILES, PACKING_FILE))
def pack_toy_documents(*, recipe: RowRange, output: Output) -> Nothing:
    lengths = [len(document) for document in documents()]
    # The k-th block is where the shuffle looks for the k-th row, so that a phase reads its blocks in order.
    blocks = np.empty(recipe.num_rows, dtype=np.int64)
    blocks[shuffled_rows(np.arange(recipe.num_rows), recipe.num_rows, SEED)] = recipe.first_row + np.arange(
        recipe.num_rows
    )
    order, slot = [], 0
    for number in [2 * block + half for block in blocks.tolist() for half in (0, 1)]:
        order.append([0, number, 0, lengths[number], slot, number])
        slot += lengths[number]
    order.append([0, 0, 0, 1, slot, number + 1])
    part = write_part(output.path(part_name(0)), np.array(order, dtype=np.int64))
    output.path(PACKING_FILE).write_text(
        json.dumps(
            {
                "packing": "stream",
                "sequence_length": SEQUENCE_LENGTH,
                "seed": SEED,
                "shards": ["toy"],
                "has_glue": False,
                "parts": [part],
            }
        )
    )
    return Nothing()


@step(content=("*.json",))
def make_toy_tokenizer(*, output: Output) -> ToyTokenizer:
    train_bpe(iter(()), 256).save(str(output.path("tokenizer.json")))
    config = {"eos_token": "<|endoftext|>", "chat_template": "a template"}
    output.path("tokenizer_config.json").write_text(json.dumps(config))
    return ToyTokenizer(
        num_tokens=256 + len(SPECIAL_TOKENS),
        special_ids={name: 256 + number for number, name in enumerate(SPECIAL_TOKENS)},
    )


def files_in(directory: Path) -> list[StoredFile]:
    """The files of a directory, of which nobody knows a digest."""
    return [given_file(path) for path in sorted(directory.iterdir()) if path.is_file()]


def packed_lines(packed: Artifact | Path) -> np.ndarray:
    """All lines of a packed order (COLUMNS), as ranks read them."""
    own = {file.name: file for file in (files_in(packed) if isinstance(packed, Path) else packed.files("*"))}
    path = packed / PACKING_FILE if isinstance(packed, Path) else packed.path(PACKING_FILE)
    order = PackedOrder(own, json.loads(path.read_text())["parts"], BlockReader())
    return order.lines(np.arange(len(order)))


def packed_rows(packed: Artifact | Path, *shards: Artifact | Path) -> PackedRows:
    """The rows of a packed order that points into these shards."""
    own = files_in(packed) if isinstance(packed, Path) else packed.files("*")
    parts = [files_in(each) if isinstance(each, Path) else each.files("shards/*") for each in shards]
    return PackedRows(own, [file for part in parts for file in part], BlockReader())


def compute(
    store: Store,
    step: Step,
    *,
    log_metrics=lambda number, values: None,
    report=lambda progress: None,
    say=lambda message: None,
    **arguments,
) -> Artifact:
    """Run a step and commit it, as flows/running/run_step.py does."""
    digested = {name: value for name, value in arguments.items() if name not in ("recipe", "resources")}
    artifact, _ = store.find_or_compute(
        step,
        step.identity(arguments.get("recipe"), digested),
        lambda output: step(**arguments, output=output),
        report,
        say,
        lambda rows: [log_metrics(*row) for row in rows],
    )
    return artifact


class TrainingInputs:
    """A home with shards and tokenizer; `train` trains a phase in it."""

    def __init__(self, root: Path, store_uri: str | None = None) -> None:
        """`store_uri` is a bucket; without one the store is in the home."""
        self.home = Home(root)
        for directory in (root / "work", root / "run"):
            directory.mkdir(parents=True)
        self.store = open_store(store_uri, self.home)
        self.shards = compute(self.store, shard_toy_documents)
        self.tokenizer = compute(self.store, make_toy_tokenizer)

    def arguments(
        self, recipe: TrainingRecipe, resources: TrainingResources = RESOURCES, start: Artifact | None = None
    ) -> dict:
        first_row, num_rows = recipe.course_start_tokens // SEQUENCE_LENGTH, recipe.num_tokens // SEQUENCE_LENGTH
        packed = compute(self.store, pack_toy_documents, recipe=RowRange(first_row=first_row, num_rows=num_rows))
        return self._arguments(recipe, resources, start, packed=packed, shards=self.shards)

    def chat_arguments(
        self, recipe: TrainingRecipe, resources: TrainingResources = RESOURCES, start: Artifact | None = None
    ) -> dict:
        """Of an SFT phase, its rows packed by the real step."""
        chats = compute(self.store, shard_toy_chats, tokenizer=self.tokenizer)
        packing = PackingRecipe(
            num_tokens=recipe.num_tokens,
            sequence_length=SEQUENCE_LENGTH,
            packing="best_fit",
            mixture={"chat": 1.0},
            bucket_weights=(),
            max_epochs=100.0,
            fim_rate=0.0,
            seed=SEED,
        )
        packed = compute(self.store, pack_phase, shards=self.shards, chats=chats, recipe=packing)
        return self._arguments(recipe, resources, start, packed=packed, shards=self.shards, chats=chats)

    def prompt_arguments(
        self,
        recipe: TrainingRecipe,
        answers: tuple[str, ...],
        resources: TrainingResources = RESOURCES,
        start: Artifact | None = None,
    ) -> dict:
        """Of a policy phase that asks `a?`, `b?` ... and wants these answers."""
        prompts = compute(self.store, write_toy_prompts, recipe=PromptAnswers(answers=answers))
        return self._arguments(recipe, resources, start, prompts=prompts)

    def _arguments(
        self, recipe: TrainingRecipe, resources: TrainingResources, start: Artifact | None, **inputs: Artifact
    ) -> dict:
        absent = dict.fromkeys(("packed", "shards", "chats", "prompts", "validation"))
        return {
            **absent,
            **inputs,
            "tokenizer": self.tokenizer,
            "start": start,
            "recipe": recipe,
            "resources": resources,
        }

    def work_dir(self, arguments: dict) -> Path:
        inputs = {name: value for name, value in arguments.items() if name not in ("recipe", "resources")}
        return self.home.work_dir(step_key(train_phase.identity(arguments["recipe"], inputs)))

    def train(self, arguments: dict, **calls) -> Artifact[TrainedCheckpoint]:
        return compute(self.store, train_phase, **calls, **arguments)


def metrics_of(path: Path) -> list[dict]:
    """Lines of metrics.jsonl without what depends on the clock."""
    clock = {
        "tokens_per_second",
        "data_wait_seconds",
        "optimizer_seconds",
        "weight_sync_seconds",
        "rollout_seconds",
        "reward_seconds",
        "training_seconds",
        "pause_seconds",
        "mfu",
        "memory_bytes",
    }
    return [
        {name: value for name, value in json.loads(line).items() if name not in clock}
        for line in path.read_text().splitlines()
    ]
