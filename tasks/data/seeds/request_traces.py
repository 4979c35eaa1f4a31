"""Step: seed problems -> a teacher at an OpenAI-compatible URL -> verifier -> chats.parquet.

rejected.parquet says why the other answers are not kept. The step runs only where teacher.request.base_url is set;
the key is in GLM46_TEACHER_API_KEY. A teacher's answers differ from call to call: the step's key covers the request
and the seeds, its content the answers (responses.parquet). A killed run continues where it stopped.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING

from infra.step import Output, Progress, Record, step
from infra.teacher_client import teacher_client
from tasks.data.records.documents import sampling_hash
from tasks.data.seeds.seed_problems import Seed, check_solution, conversation, read_seeds
from tasks.data.seeds.teacher import Response, ResponseLog, ask_all
from tasks.data.seeds.verify_solutions import CHATS, REJECTED, write_rows

if TYPE_CHECKING:
    from configs.schema import TeacherLimits, TeacherRequest
    from tasks.data.sources.list_sources import SourceListing

SUFFIX = "#teacher"
RESPONSES = (
    "id string, content string, reasoning string, finish_reason string, prompt_tokens long, completion_tokens long, "
    "num_attempts long, "
    "failure string, detail string, model string"
)


class RequestedTraces(Record):
    model: str
    num_seeds: int
    num_chats: int
    rejected: dict[str, int]
    """Seeds by reason: the answer is wrong, was cut off, or never came."""
    num_attempts: int
    prompt_tokens: int
    completion_tokens: int
    cost: float
    """Cost at the configured prices, including earlier runs that were resumed. Tokens are the server's count, also of
    answers that could not be read; where the server counts none, they are estimated from the text."""
    answered_by: dict[str, int]
    """Answers by the model that the server names, which may differ from the requested one."""


@step(content=("chats.parquet", "rejected.parquet", "responses.parquet"), distributions=("pyarrow",))
def request_traces(
    *, sources: SourceListing, recipe: TeacherRequest, resources: TeacherLimits, output: Output
) -> RequestedTraces:
    """Ask the teacher, and keep answers that verify. Raises ValueError without seeds or where no answer verifies,
    CostExceededError, or the client's error for a wrong key or model."""
    seeds = [seed for seed in read_seeds(sources.files) if seed.question]
    seeds = sorted(seeds, key=lambda seed: (sampling_hash(seed.id), seed.id))[: recipe.num_seeds]
    if not seeds:
        raise ValueError(
            "teacher: the sources hold no seed problem: give files of problems with answers the role prompts and the "
            "kind math or "
            "code_with_tests in glm46-data.yaml, or leave teacher.request.base_url empty"
        )
    log = ResponseLog(output.work_dir / "responses.jsonl")
    client = teacher_client(recipe.base_url, resources.timeout_seconds)
    ask_all(client, seeds, recipe, resources, log, lambda count: output.report(Progress(count, len(seeds), "seeds")))
    answered = [(seed, log.responses[seed.id]) for seed in seeds]
    chats, rejected, reasons = [], [], {}
    for seed, response in answered:
        reason = _reason(seed, response)
        if reason:
            rejected.append({"id": seed.id, "source": seed.source, "offset": seed.offset, "reason": reason})
            reasons[reason] = reasons.get(reason, 0) + 1
        else:
            chats.append(conversation(seed, SUFFIX, response.reasoning, response.content))
    if not chats:
        said = next((response.detail for _, response in answered if response.detail), "")
        raise ValueError(
            f"teacher {recipe.model}: none of {len(seeds)} answers verified ({reasons}): look at {output.work_dir}"
            + (f". The server said: {said}" if said else "")
        )
    write_rows(output.path("chats.parquet"), chats, CHATS)
    write_rows(output.path("rejected.parquet"), rejected, REJECTED)
    write_rows(output.path("responses.parquet"), [asdict(response) for _, response in answered], RESPONSES)
    responses = [response for _, response in answered]
    prompt_tokens, completion_tokens = log.num_tokens
    return RequestedTraces(
        model=recipe.model,
        num_seeds=len(seeds),
        num_chats=len(chats),
        rejected=dict(sorted(reasons.items())),
        num_attempts=sum(one.num_attempts for one in responses),
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        cost=round(log.cost(resources), 6),
        answered_by=dict(sorted(Counter(one.model for one in responses if one.content).items())),
    )


def _reason(seed: Seed, response: Response) -> str:
    """Why an answer is not kept; empty where it verifies."""
    if response.failure:
        return response.failure
    return "cut_off" if response.finish_reason == "length" else check_solution(seed, response.content)
