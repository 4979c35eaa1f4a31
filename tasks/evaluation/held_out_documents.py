"""The held-out documents that an evaluation may ask about: enough for its budget, whatever the size of the corpus; and
the held-out conversations where a run prepares no documents.

Executors read the parts. Of each domain they give the documents whose hash is below a bound, as many as the budget can
need: the driver holds about CHARS_PER_TOKEN characters per token of it. Where all fit, all are given.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

from infra.machine.spark import spark_session
from tasks.data.records.document_files import read_documents
from tasks.data.records.documents import CHAT, NUM_HASHES, REPOSITORY, TEST, VALIDATION, document_id
from tasks.evaluation.choice_questions import order_hash
from tasks.evaluation.intervals import MIN_ITEMS
from tasks.evaluation.items import DOCUMENT, FAR
from tasks.evaluation.scored_text import scored_text
from tasks.evaluation.suite import Question

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from tokenizers import Tokenizer

    from configs.files.stored_files import StoredFile
    from configs.schema import EvaluationRecipe, FarTextRecipe, SparkResources

COLUMNS = ("id", "source", "offset", "domain")
CHARS_PER_TOKEN = 8
"""Twice what a token of prose has."""
MIN_DOCUMENTS = 100 * MIN_ITEMS
"""Documents of a domain that are given at least, so that MIN_ITEMS different records are among them."""
CANDIDATES = 8
"""Long documents that are read for each one that is wanted: some have fewer tokens than characters suggest."""


def held_out_documents(
    files: list[StoredFile], recipe: EvaluationRecipe, resources: SparkResources
) -> list[dict[str, str]]:
    """id, domain, text and unit of documents of side `test`, in the order of their hash; texts end at
    max_document_chars. A unit is a record; a repository, which gives a record per data.repositories.max_document_chars,
    is one."""
    from pyspark.sql import functions as F

    documents = read_documents(spark_session(resources), files, resources, *COLUMNS, "text", "split")
    text = F.substring("text", 1, recipe.max_document_chars).alias("text")
    return chosen_rows(documents.where(F.col("split") == TEST).select(*COLUMNS, text), recipe)


def chosen_rows(held_out: DataFrame, recipe: EvaluationRecipe) -> list[dict[str, str]]:
    """The rows (COLUMNS and text) of smallest hash that the token budget can need, in the order of their hash, each
    with its unit."""
    from pyspark.sql import Column
    from pyspark.sql import functions as F

    held_out = held_out.persist()
    leading = F.conv(F.substring(F.sha2("id", 256), 1, 8), 16, 10).cast("long")
    bounds = _hash_bounds(held_out, recipe.max_document_tokens * CHARS_PER_TOKEN)
    is_chosen = [(F.col("domain") == domain) & (leading < bound) for domain, bound in bounds.items()]
    rows = held_out.where(reduce(Column.__or__, is_chosen, F.lit(False))).toArrow().to_pylist()
    held_out.unpersist()
    ordered = sorted(rows, key=lambda row: order_hash(row["id"]))
    return [
        row | {"unit": document_id(row["source"], 0 if row["domain"] == REPOSITORY else row["offset"], 0)}
        for row in ordered
    ]


def _hash_bounds(held_out: DataFrame, max_chars: int) -> dict[str, int]:
    """Per domain the first 32 bits of the hash below which documents are given."""
    from pyspark.sql import functions as F

    num_chars = F.char_length("text").cast("long")
    sizes = held_out.groupBy("domain").agg(F.count("id").alias("rows"), F.sum(num_chars).alias("num_chars")).collect()
    total = max(sum(row["num_chars"] for row in sizes), 1)
    shares = {row["domain"]: max(max_chars / total, MIN_DOCUMENTS / row["rows"]) for row in sizes}
    return {domain: int(NUM_HASHES * min(share, 1.0)) for domain, share in sorted(shares.items())}


def choose_far_texts(
    files: list[StoredFile], tokenizer: Tokenizer, recipe: FarTextRecipe, resources: SparkResources
) -> list[Question]:
    """Of the held-out documents that are long enough those of smallest hash, one of each record; fewer, or none, where
    there are no more. The leading tokens are a question's text, those after them its answer. Documents with fewer
    characters than tokens are wanted are not tried."""
    from pyspark.sql import functions as F

    num_tokens = recipe.context_tokens + recipe.scored_tokens
    documents = read_documents(spark_session(resources), files, resources, *COLUMNS, "text", "split")
    long = documents.where((F.col("split") == TEST) & (F.char_length("text") >= num_tokens))
    text = F.substring("text", 1, num_tokens * CHARS_PER_TOKEN).alias("text")
    first = long.select(*COLUMNS, text).orderBy(F.sha2("id", 256)).limit(CANDIDATES * recipe.num_documents)
    questions: dict[str, Question] = {}
    for row in first.toArrow().to_pylist():
        encoded, unit = (
            tokenizer.encode(row["text"], add_special_tokens=False),
            document_id(row["source"], row["offset"], 0),
        )
        if len(encoded.ids) >= num_tokens and unit not in questions and len(questions) < recipe.num_documents:
            start, end = (encoded.offsets[count - 1][1] for count in (recipe.context_tokens, num_tokens))
            context, scored = row["text"][:start], row["text"][start:end]
            questions[unit] = Question(f"{FAR}/{row['id']}", FAR, row["domain"], unit, context, scored)
    return list(questions.values())


def held_out_chats(
    files: list[StoredFile], recipe: EvaluationRecipe, resources: SparkResources
) -> list[dict[str, str]]:
    """id, domain, text and unit of conversations of side `validation`, in the order of their hash; text is the JSON of
    messages and tools. Those of more than max_document_chars are left out: half a conversation is none."""
    from pyspark.sql import functions as F

    columns = ("id", "source", "offset", "messages", "tools", "split")
    chats = read_documents(spark_session(resources), files, resources, *columns).where(F.col("split") == VALIDATION)
    text = F.concat(F.lit('{"messages":'), "messages", F.lit(',"tools":'), "tools", F.lit("}")).alias("text")
    whole = chats.select("id", "source", "offset", F.lit(CHAT).alias("domain"), text)
    return chosen_rows(whole.where(F.char_length("text") <= recipe.max_document_chars), recipe)


def choose_chats(
    rows: list[dict[str, str]], tokenizer: Tokenizer, recipe: EvaluationRecipe
) -> tuple[list[Question], int]:
    """The conversations of smallest hash that the token budget holds, and their tokens. Raises ValueError where it is
    too few for any gate."""
    chosen: list[Question] = []
    num_tokens = 0
    for row in rows:
        question = Question(f"{DOCUMENT}/{row['id']}", DOCUMENT, CHAT, row["unit"], row["text"], "")
        scored = scored_text(tokenizer, question)
        if num_tokens + len(scored.token_ids) > recipe.max_document_tokens:
            break
        if scored.num_bytes:
            chosen.append(question)
            num_tokens += len(scored.token_ids)
    if len(chosen) < MIN_ITEMS:
        raise ValueError(
            f"{len(chosen)} held-out conversations can be asked, a gate decides by at least {MIN_ITEMS}: {len(rows)} "
            f"have at most evaluation.recipe.max_document_chars ({recipe.max_document_chars}) characters, of which "
            f"max_document_tokens ({recipe.max_document_tokens}) holds these: raise the bound that leaves them out or "
            f"data.recipe.chats.validation_share, or bring more conversations"
        )
    return chosen, num_tokens
