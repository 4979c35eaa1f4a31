"""The steps of benchmarks/training/rl_gain.py that the pipeline takes with Spark: tokenizer and shards of arithmetic
only, and its answers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

from configs.schema import EvaluationRecipe, Frozen
from infra.step import Artifact, Output, Record, canonical_json, step
from model.text.tokenizer_layout import END_OF_TEXT, SPECIAL_TOKENS
from tasks.data.problems.synthesize_problems import SynthesizedProblems
from tasks.data.records.documents import NUM_HASHES, UNBUCKETED, sampling_hash
from tasks.data.shards.shard_chats import ChatShards
from tasks.data.shards.shard_documents import TokenShards, shards_of
from tasks.data.shards.tokenize_chats import write_chat_shard
from tasks.data.shards.tokenize_parts import write_shard
from tasks.data.tokenizer.bpe_tokenizer import tokenizer_config, train_bpe, write_json
from tasks.data.tokenizer.train_tokenizer import TrainedTokenizer
from tasks.evaluation.engine import load_engine, load_tokenizer, reproducible_arithmetic
from tasks.evaluation.generated_answers import answer_chats
from tasks.evaluation.suite import Question
from tasks.training.state.trained_checkpoint import TrainedCheckpoint

if TYPE_CHECKING:
    import pyarrow as pa


class Vocabulary(Frozen):
    num_ordinary_tokens: int


class Demonstrations(Frozen):
    wrong_share: float
    """Share of the conversations whose answer is one too high."""


class Answers(Record):
    """Share of right answers per problem, in the order of the problems' ids."""

    scores: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.scores))


@step(content=("tokenizer.json", "tokenizer_config.json"))
def learn_tokenizer(*, problems: Artifact[SynthesizedProblems], recipe: Vocabulary, output: Output) -> TrainedTokenizer:
    """train_tokenizer without Spark, from the questions without their digits: a number stays a sequence of digits,
    which adds up with fewer examples than one token per number does."""
    questions = _column(problems, "prompts.parquet", "prompt")
    texts = [question.translate(dict.fromkeys(map(ord, "0123456789"))) for question in questions]
    tokenizer = train_bpe(iter(texts), recipe.num_ordinary_tokens)
    tokenizer.save(str(output.path("tokenizer.json")))
    write_json(tokenizer_config(tokenizer), output.path("tokenizer_config.json"))
    return TrainedTokenizer(
        num_tokens=tokenizer.get_vocab_size(),
        num_ordinary_tokens=recipe.num_ordinary_tokens,
        special_ids={token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS},
        tokenizer_digest="",
        num_sample_documents=len(texts),
        num_sample_chars=sum(map(len, texts)),
    )


@step(content=("shards/*", "members.parquet"))
def shard_arithmetic(
    *, problems: Artifact[SynthesizedProblems], tokenizer: Artifact[TrainedTokenizer], output: Output
) -> TokenShards:
    """shard_documents without Spark."""
    end = tokenizer.record.special_ids[END_OF_TEXT]
    directory, file = str(output.path("shards/x").parent), tokenizer.file("tokenizer.json")
    batches = _batches(problems, "documents/part-00000.parquet", "synthetic-00000")
    return write_members(list(write_shard(iter(batches), directory, file, end, tokenizer.record.num_tokens)), output)


@step(content=("shards/*", "members.parquet"))
def shard_questions(
    *,
    problems: Artifact[SynthesizedProblems],
    tokenizer: Artifact[TrainedTokenizer],
    recipe: Demonstrations,
    output: Output,
) -> ChatShards:
    """shard_chats without Spark, and with answers that nobody verified."""
    import pyarrow as pa

    directory, file = str(output.path("shards/x").parent), tokenizer.file("tokenizer.json")
    batches = []
    for batch in _batches(problems, "chats.parquet", "chat-00000"):
        messages = [
            _with_wrong_answer(text) if sampling_hash(identity) < recipe.wrong_share * NUM_HASHES else text
            for text, identity in zip(batch["messages"].to_pylist(), batch["id"].to_pylist(), strict=True)
        ]
        batches.append(batch.set_column(batch.schema.get_field_index("messages"), "messages", pa.array(messages)))
    rows = list(write_chat_shard(iter(batches), directory, file, tokenizer.record.num_tokens))
    num_trained = sum(count or 0 for batch in rows for count in batch["num_trained_tokens"].to_pylist())
    return ChatShards(**write_members(rows, output).model_dump(), num_trained_tokens=num_trained)


def _with_wrong_answer(messages: str) -> str:
    """The conversation with an answer that is one too high."""
    conversation = json.loads(messages)
    conversation[-1]["content"] = str(int(conversation[-1]["content"]) + 1)
    return canonical_json(conversation)


@step(content=("nothing",))
def answer_problems(
    *,
    problems: Artifact[SynthesizedProblems],
    checkpoint: Artifact[TrainedCheckpoint],
    recipe: EvaluationRecipe,
    output: Output,
) -> Answers:
    """Sampled answers to the evaluation problems, asked as a conversation."""
    rows = sorted(
        zip(*(_column(problems, "problems.parquet", name) for name in ("id", "question", "answer")), strict=True)
    )
    questions = [
        Question(identity, "chat_problem", "synthetic", identity, question, answer.strip())
        for identity, question, answer in rows
    ]
    engine = load_engine(checkpoint.directory("hf"), weights_version=checkpoint.digest, batch_sequences=512)
    tokenizer = load_tokenizer(checkpoint.path("hf/tokenizer.json"))
    with reproducible_arithmetic(recipe.num_threads):
        items = list(answer_chats(engine, tokenizer, questions, recipe, checkpoint.digest, output))
    return Answers(scores=tuple(item.score for item in items))


def _column(problems: Artifact[SynthesizedProblems], name: str, column: str) -> list[str]:
    import pyarrow.parquet as pq

    return pq.read_table(problems.path(name), columns=[column]).column(column).to_pylist()


def _batches(problems: Artifact[SynthesizedProblems], name: str, shard: str) -> list[pa.RecordBatch]:
    """The rows of a file as one batch of a shard."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(problems.path(name)).combine_chunks()
    table = table.append_column("shard", pa.array([shard] * table.num_rows))
    if "quality_bucket" not in table.column_names:  # conversations have none
        table = table.append_column("quality_bucket", pa.array([UNBUCKETED] * table.num_rows, pa.int32()))
    return table.to_batches()


def write_members(batches: list[pa.RecordBatch], output: Output) -> TokenShards:
    """members.parquet from the rows that shards were written with; their record."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    rows = pa.concat_tables([pa.Table.from_batches([batch]) for batch in batches], promote_options="permissive")
    members = rows.filter(pc.field("file").is_null())
    pq.write_table(members.select(["id", "shard", "sequence"]).sort_by("id"), output.path("members.parquet"))
    sums = members.group_by("shard").aggregate([("id", "count"), ("num_tokens", "sum")]).to_pylist()
    return shards_of({row["shard"]: (row["id_count"], row["num_tokens_sum"]) for row in sums})
