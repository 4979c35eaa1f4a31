"""Step: chooses what a candidate is asked: held-out documents, problems, questions with choices, requests, tasks.

Where a run prepares no documents, held-out conversations take their place.

Problems are asked as text and as conversations, and scored as documents work them out. Of long documents the far end
is scored. In: documents with a column
`split`, generated problems, the source listing, whose evaluation files may hold questions and requests. Out:
suite.parquet, sorted by item id. The suite is an artifact of its own, so that candidate and champion are asked the
same, whatever their tokenizers. Its documents are of side `test`: no training reads them, and none that is measured
while a phase trains is among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from infra.step import Artifact, Output, Record, step
from tasks.evaluation.choice_questions import order_hash, questions_from_documents, questions_from_files
from tasks.evaluation.engine import load_tokenizer
from tasks.evaluation.held_out_documents import choose_chats, choose_far_texts, held_out_chats, held_out_documents
from tasks.evaluation.intervals import MIN_ITEMS
from tasks.evaluation.items import ARITHMETIC, CHAT_PROBLEM, DOCUMENT, TASK, WORKED, suite_digest
from tasks.evaluation.safety_questions import choose_requests
from tasks.evaluation.suite import Question, write_suite

if TYPE_CHECKING:
    from configs.schema import EvaluationRecipe, SparkResources
    from tasks.data.chats.collect_chats import CollectedChats
    from tasks.data.decontamination.decontaminate_documents import DecontaminatedDocuments
    from tasks.data.problems.synthesize_problems import SynthesizedProblems
    from tasks.data.repositories.concatenate_repositories import ConcatenatedRepositories
    from tasks.data.sources.list_sources import SourceListing
    from tasks.data.tokenizer.train_tokenizer import TrainedTokenizer

PROBLEM_DOMAIN = "synthetic"


class EvaluationSuite(Record):
    """What suite.parquet holds."""

    suite_digest: str
    """sha256 over item ids and prompt digests."""
    num_documents: int
    """Conversations where the run has no documents."""
    num_problems: int
    num_worked_problems: int
    num_chat_problems: int
    num_choice_items: int
    """0 where neither the evaluation files nor the held-out documents gave a question."""
    num_safety_requests: int
    num_tasks: int
    """Held-out tasks of environments."""
    num_far_texts: int = 0
    """Held-out documents that are long enough for evaluation.recipe.far_text."""
    num_document_tokens: int
    """Counted with the tokenizer of the token budget."""
    num_document_bytes: int


@step(content=("suite.parquet",), distributions=("tokenizers", "pyarrow", "pyspark"))
def select_evaluation_items(
    *,
    documents: Artifact[DecontaminatedDocuments] | None,
    problems: Artifact[SynthesizedProblems],
    sources: SourceListing,
    tokenizer: Artifact[TrainedTokenizer],
    recipe: EvaluationRecipe,
    resources: SparkResources,
    output: Output,
    repositories: Artifact[ConcatenatedRepositories] | None = None,
    chats: Artifact[CollectedChats] | None = None,
) -> EvaluationSuite:
    """`chats` instead of `documents`, where the run has none. Raises ValueError when the budget does not hold a single
    document."""
    held_out: list[dict[str, str]] = []
    if documents is not None:
        held_out = held_out_documents(documents.files("documents/*.parquet"), recipe, resources)
        whole = [] if repositories is None else repositories.files("documents/*.parquet")
        concatenated = held_out_documents(whole, recipe, resources) if whole else []
        chosen, num_tokens = _choose_documents([*held_out, *concatenated], tokenizer.path("tokenizer.json"), recipe)
    else:
        assert chats is not None, "neither documents nor conversations"
        rows = held_out_chats(chats.files("chats/*.parquet"), recipe, resources)
        chosen, num_tokens = choose_chats(rows, load_tokenizer(tokenizer.path("tokenizer.json")), recipe)
    problem_rows = _read_problems(problems.path("problems.parquet"))
    asked, talked = list(_plain_problems(problem_rows)), list(_chat_problems(problem_rows, recipe.num_chat_problems))
    choices = questions_from_files(sources.files, recipe.num_choice_items)
    choices = choices or questions_from_documents(held_out, recipe.num_choice_items)
    worked = list(_worked_problems(problems))
    requests = choose_requests(sources.files, problems.path("safety.parquet"), recipe.num_safety_prompts)
    tasks = list(_held_out_tasks(problems.path("held_out_tasks.parquet")))
    far: list[Question] = []
    if documents is not None and recipe.far_text is not None:
        opened = load_tokenizer(tokenizer.path("tokenizer.json"))
        far = choose_far_texts(documents.files("documents/*.parquet"), opened, recipe.far_text, resources)
    every = [*chosen, *worked, *asked, *talked, *choices, *requests, *tasks, *far]
    questions = sorted(every, key=lambda question: question.item_id)
    write_suite(output.path("suite.parquet"), questions)
    return EvaluationSuite(
        suite_digest=suite_digest({question.item_id: question.prompt_digest for question in questions}),
        num_documents=len(chosen),
        num_problems=len(asked),
        num_worked_problems=len(worked),
        num_chat_problems=len(talked),
        num_choice_items=len(choices),
        num_safety_requests=len(requests),
        num_tasks=len(tasks),
        num_far_texts=len(far),
        num_document_tokens=num_tokens,
        num_document_bytes=sum(len(question.text.encode()) for question in chosen),
    )


def _choose_documents(
    rows: list[dict[str, str]], tokenizer_path: Path, recipe: EvaluationRecipe
) -> tuple[list[Question], int]:
    """A document of every domain in turn until each has one of MIN_ITEMS records, then the others in the order of their
    hash."""
    tokenizer = load_tokenizer(tokenizer_path)
    num_domains = len({row["domain"] for row in rows})
    share = recipe.max_document_tokens // (MIN_ITEMS * max(1, num_domains))
    chosen: list[Question] = []
    num_tokens = 0
    for turn, row in sorted(_turns(rows), key=lambda entry: (entry[0], order_hash(entry[1]["id"]))):
        text = row["text"][: recipe.max_document_chars]
        encoded = tokenizer.encode(text, add_special_tokens=False)
        # Every domain's first MIN_ITEMS records fit the budget together, the long ones cut.
        length = min(len(encoded.ids), share) if turn < MIN_ITEMS else len(encoded.ids)
        if not length or num_tokens + length > recipe.max_document_tokens:
            break
        num_tokens += length
        text = text if length == len(encoded.ids) else text[: encoded.offsets[length - 1][1]]
        chosen.append(Question(f"{DOCUMENT}/{row['id']}", DOCUMENT, row["domain"], row["unit"], text, ""))
    if not chosen:
        raise ValueError(
            f"the first of {len(rows)} held-out documents does not fit evaluation.recipe.max_document_tokens "
            f"({recipe.max_document_tokens}): raise it; where there is no document, raise data.recipe.split.test_share"
        )
    return chosen, num_tokens


def _turns(rows: list[dict[str, str]]) -> Iterator[tuple[int, dict[str, str]]]:
    """(turn in which a document is taken, the document): the first document of a domain's n-th record in turn n, all
    others in turn MIN_ITEMS."""
    records: dict[str, set[str]] = {}
    for row in rows:
        seen = records.setdefault(row["domain"], set())
        yield (MIN_ITEMS if row["unit"] in seen else min(len(seen), MIN_ITEMS)), row
        seen.add(row["unit"])


def _read_problems(path: Path) -> list[dict[str, str]]:
    import pyarrow.parquet as pq

    return pq.read_table(path, columns=["id", "prompt", "question", "answer"]).to_pylist()


def _plain_problems(rows: list[dict[str, str]]) -> Iterator[Question]:
    """Every problem, to be continued as plain text."""
    for row in rows:
        item_id = f"{ARITHMETIC}/{row['id']}"
        yield Question(item_id, ARITHMETIC, PROBLEM_DOMAIN, item_id, row["prompt"], row["answer"])


def _worked_problems(problems: Artifact[SynthesizedProblems]) -> Iterator[Question]:
    """Every problem, and those of the other families, as documents work them out."""
    import pyarrow.parquet as pq

    for name in ("problems.parquet", "held_out.parquet"):
        for row in pq.read_table(problems.path(name), columns=["id", "text"]).to_pylist():
            item_id = f"{WORKED}/{row['id']}"
            yield Question(item_id, WORKED, PROBLEM_DOMAIN, item_id, row["text"], "")


def _chat_problems(rows: list[dict[str, str]], num_problems: int) -> Iterator[Question]:
    """The problems of smallest hash, asked in a user's words; the answer has no space before it."""
    for row in sorted(rows, key=lambda row: order_hash(row["id"]))[:num_problems]:
        item_id = f"{CHAT_PROBLEM}/{row['id']}"
        yield Question(item_id, CHAT_PROBLEM, PROBLEM_DOMAIN, item_id, row["question"], row["answer"].strip())


def _held_out_tasks(path: Path) -> Iterator[Question]:
    """Every held-out task; its item id names the environment."""
    import pyarrow.parquet as pq

    for row in pq.read_table(path, columns=["id", "domain", "kind", "prompt", "answer"]).to_pylist():
        item_id = f"{TASK}/{row['kind']}/{row['id']}"
        yield Question(item_id, TASK, row["domain"], item_id, row["prompt"], row["answer"])
