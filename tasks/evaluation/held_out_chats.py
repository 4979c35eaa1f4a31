"""The held-out conversations that an evaluation may score, where a run prepares no documents.

As with documents, the driver holds what the budget can need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from infra.machine.spark import spark_session
from tasks.data.records.document_files import read_documents
from tasks.data.records.documents import CHAT, VALIDATION
from tasks.evaluation.held_out_documents import chosen_rows
from tasks.evaluation.intervals import MIN_ITEMS
from tasks.evaluation.items import DOCUMENT
from tasks.evaluation.scored_text import scored_text
from tasks.evaluation.suite import Question

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from configs.files.stored_files import StoredFile
    from configs.schema import EvaluationRecipe, SparkResources

COLUMNS = ("id", "source", "offset", "messages", "tools", "split")


def held_out_chats(
    files: list[StoredFile], recipe: EvaluationRecipe, resources: SparkResources
) -> list[dict[str, str]]:
    """id, domain, text and unit of conversations of side `validation`, in the order of their hash; text is the JSON of
    messages and tools. Those of more than max_document_chars are left out: half a conversation is none."""
    from pyspark.sql import functions as F

    chats = read_documents(spark_session(resources), files, resources, *COLUMNS).where(F.col("split") == VALIDATION)
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
            f"{len(chosen)} held-out conversations can be asked, a gate decides by at least {MIN_ITEMS}: raise "
            f"data.recipe.chats.validation_share, or bring more; of {len(rows)} with at most "
            f"evaluation.recipe.max_document_chars ({recipe.max_document_chars}) characters, max_document_tokens "
            f"({recipe.max_document_tokens}) holds these"
        )
    return chosen, num_tokens
