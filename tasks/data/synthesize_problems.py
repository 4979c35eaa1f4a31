"""Step: verified arithmetic -> documents/ to train on (domain synthetic) and problems.parquet to be evaluated with, operands disjoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from infra.step import Output, Progress, Record, step
from tasks.data.arithmetic import OPERATIONS, answers, choose_problems, prompts, verify_lines
from tasks.data.documents import TRAIN, content_digest, document_id

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from configs.schema import SynthesisRecipe

SOURCE = "synthetic/arithmetic"
EVALUATION_SOURCE = "synthetic/arithmetic-evaluation"


class SynthesizedProblems(Record):
    num_documents: int
    num_bytes: int
    num_training_problems: int
    num_evaluation_problems: int


@step(content=("documents/*.parquet", "problems.parquet"), distributions=("pyarrow", "numpy"))
def synthesize_problems(*, recipe: SynthesisRecipe, output: Output) -> SynthesizedProblems:
    """Write problems whose stated results were read back from the text and checked. Raises ValueError if max_operand gives too few."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    output.report(Progress(0, recipe.num_training_problems, "problems"))
    training = _lines(recipe.num_training_problems, recipe.max_operand, for_evaluation=False)
    evaluation = _lines(recipe.num_evaluation_problems, recipe.max_operand, for_evaluation=True)
    size = recipe.problems_per_document
    texts = ["\n".join(training[start : start + size]) + "\n" for start in range(0, len(training), size)]
    documents = pa.Table.from_pylist([_document(number, text) for number, text in enumerate(texts)]).sort_by("id")
    pq.write_table(documents, output.path("documents/part-00000.parquet"), compression="zstd")
    problems = [_problem(number, line) for number, line in enumerate(evaluation)]
    pq.write_table(pa.Table.from_pylist(problems).sort_by("id"), output.path("problems.parquet"), compression="zstd")
    return SynthesizedProblems(
        num_documents=len(texts), num_bytes=sum(len(text.encode()) for text in texts),
        num_training_problems=len(training), num_evaluation_problems=len(evaluation),
    )  # fmt: skip


def _lines(count: int, max_operand: int, for_evaluation: bool) -> list[str]:
    """`12 + 7 = 19` for each problem of one side, verified."""
    import numpy as np

    operation, a, b = choose_problems(count, max_operand, for_evaluation)
    results: NDArray[np.str_] = answers(operation, a, b).astype(np.str_)
    lines = np.strings.add(np.strings.add(prompts(operation, a, b), " "), results)
    wrong = lines[~verify_lines(lines)]
    assert not len(wrong), wrong[:3]
    return lines.tolist()


def _document(number: int, text: str) -> dict[str, object]:
    identity = document_id(SOURCE, number, 0)
    place = {
        "id": identity,
        "source": SOURCE,
        "offset": number,
        "piece": 0,
        "collection": SOURCE,
        "url": "",
        "licence": "",
        "domain": "synthetic",
    }
    sizes = {"content_digest": content_digest(text), "num_chars": len(text), "num_bytes": len(text.encode())}
    return {**place, "lang": "", "text": text, **sizes, "cluster": identity, "split": TRAIN}


def _problem(number: int, line: str) -> dict[str, str]:
    prompt, _, answer = line.rpartition(" ")
    operation = next(sign for sign in OPERATIONS if f" {sign} " in prompt)
    return {"id": document_id(EVALUATION_SOURCE, number, 0), "operation": operation, "prompt": prompt, "answer": f" {answer}"}
