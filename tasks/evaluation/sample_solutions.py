"""Step: asks a checkpoint every prompt k times and counts right answers; rejection sampling keeps some of them.

In: a trained checkpoint (hf/ with tokenizer.json) and the decontaminated prompts. Out: solved.parquet with the right
and the kept answers to every prompt, counted, and chats/ with those that are kept, in the shape in which collect_chats
leaves conversations; none where a policy phase only measures how hard its prompts are (objective.difficulty). The
verifiers are those of reinforcement learning. rollouts.jsonl shows some answers. The whole model is on one device.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from infra.step import Artifact, Output, Progress, Record, canonical_json, step
from model.text.chat_template import encode, render_to_train
from model.text.tokenizer_layout import END_TOKENS
from tasks.data.environments.environments import OPENERS
from tasks.data.prompts.function_calls import written_calls
from tasks.data.prompts.verifiers import WrittenAnswer, verify_answers
from tasks.data.records.documents import CHAT_COLUMNS, TRAIN, document_id
from tasks.data.seeds.verify_solutions import write_rows
from tasks.evaluation.engine import end_token_ids, load_engine, load_tokenizer, reproducible_arithmetic
from tasks.evaluation.intervals import Interval, pass_at_k, share_interval
from tasks.training.policy.prompt_difficulty import SOLVED_FILE

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from configs.schema import EvaluationResources, SolutionRecipe
    from model.generation.generation import InProcessEngine
    from tasks.data.decontamination.decontaminate_documents import DecontaminatedDocuments
    from tasks.training.policy.prompts import Prompt
    from tasks.training.state.trained_checkpoint import TrainedCheckpoint

SOURCE = "solutions"
"""Beginning of the source's name of a kept answer; the digest of the weights follows."""
CHATS_FILE, ROLLOUTS_FILE = "chats/part-00000.parquet", "rollouts.jsonl"
SOLVED_COLUMNS = "id string, domain string, kind string, num_samples long, num_right long, num_kept long"
PROMPTS_PER_BLOCK, ANSWERS_PER_BLOCK = 64, 4096
"""Most prompts, and answers to them, that are sampled between two progress reports; the seeds count these blocks."""
NUM_SHOWN_PROMPTS = 8
REPEATED, OTHER_FORM, ENOUGH, SHORT = "repeated", "other_form", "enough_kept", "short"


class PassAtK(BaseModel):
    """Share of the prompts to which one of k answers is right, estimated without bias from all that were sampled."""

    k: int
    share: float
    interval: Interval | None
    """95 %; None with fewer than two prompts."""


class SampledSolutions(Record):
    num_prompts: int
    num_too_long: int
    """Prompts that leave no room for an answer; they are not asked."""
    num_answers: int
    num_right: int
    num_without_verdict: int
    num_solved_prompts: int
    """Prompts with a right answer."""
    num_kept: int
    num_kept_tokens: int
    left_out: dict[str, int]
    """Right answers that are not kept: repeated, other_form (the conversation would not be the sampled tokens again),
    enough_kept (max_kept_per_prompt), short (dropped_shortest_share)."""
    pass_at: tuple[PassAtK, ...]
    """For k = 1, 2, 4 ... and samples_per_prompt: what best-of-k with this verifier reaches."""


@step(
    content=(CHATS_FILE, SOLVED_FILE),
    evidence=(ROLLOUTS_FILE,),
    distributions=("torch", "tokenizers", "pyarrow", "safetensors", "numpy", "scipy"),
)
def sample_solutions(
    *,
    checkpoint: Artifact[TrainedCheckpoint],
    prompts: Artifact[DecontaminatedDocuments],
    recipe: SolutionRecipe,
    resources: EvaluationResources,
    output: Output,
) -> SampledSolutions:
    """Every prompt is asked; too few right answers are refused later, so that another budget samples nothing again. An
    answer's draws depend on seed, block and its position in the block, not on batches. Raises VerifierError for a
    verifier that failed, NonFiniteLogitsError for broken weights."""
    from tasks.training.policy.prompts import read_prompts

    checkpoint_dir, objective = checkpoint.directory("hf"), recipe.objective
    tokenizer = load_tokenizer(checkpoint_dir / "tokenizer.json")
    # A conversation that is kept has one answer: tasks of environments are not asked.
    every = [
        prompt
        for prompt in read_prompts(prompts.path("prompts.parquet"))
        if prompt.kind not in OPENERS and (not recipe.domains or prompt.domain in recipe.domains)
    ]
    room = recipe.sequence_length - objective.max_new_tokens
    asked = [prompt for prompt in every if len(prompt.token_ids(tokenizer, objective.enable_thinking)) <= room]
    solving = Solving(tokenizer, recipe, f"{SOURCE}/{checkpoint.digest[:12]}")
    with reproducible_arithmetic(recipe.num_threads):
        engine = load_engine(
            checkpoint_dir,
            weights_version=checkpoint.digest,
            batch_sequences=resources.batch_sequences,
            device=resources.device,
            dtype=recipe.dtype,
        )
        size = min(PROMPTS_PER_BLOCK, ANSWERS_PER_BLOCK // objective.samples_per_prompt)
        for start in range(0, len(asked), size):
            output.report(Progress(start, len(asked), "prompts", "sampling answers"))
            solving.solve(engine, asked[start : start + size], start)
    solving.leave_out_shortest(objective.dropped_shortest_share)
    write_rows(output.path(CHATS_FILE), solving.chats, f"{CHAT_COLUMNS}, split string")
    write_rows(output.path(SOLVED_FILE), solving.solved, SOLVED_COLUMNS)
    output.path(ROLLOUTS_FILE).write_text("".join(json.dumps(line) + "\n" for line in solving.shown))
    right = [row["num_right"] for row in solving.solved]
    return SampledSolutions(
        num_prompts=len(asked),
        num_too_long=len(every) - len(asked),
        num_answers=len(asked) * objective.samples_per_prompt,
        num_right=sum(right),
        num_without_verdict=solving.num_without_verdict,
        num_solved_prompts=sum(map(bool, right)),
        num_kept=len(solving.chats),
        num_kept_tokens=sum(solving.chat_tokens),
        left_out=dict(sorted(solving.left_out.items())),
        pass_at=best_of_k(right, objective.samples_per_prompt),
    )


class Solving:
    """What was kept of the prompts so far."""

    def __init__(self, tokenizer: Tokenizer, recipe: SolutionRecipe, source: str) -> None:
        self.tokenizer, self.recipe, self.source = tokenizer, recipe, source
        self.stops = end_token_ids(tokenizer)
        self.specials = {*tokenizer.get_added_tokens_decoder()}
        self.chats: list[dict[str, Any]] = []
        self.solved: list[dict[str, Any]] = []
        self.shown: list[dict[str, Any]] = []
        self.left_out: Counter[str] = Counter()
        self.num_without_verdict = 0
        self.answer_tokens: list[int] = []
        """Of each conversation, the sampled ones."""
        self.chat_tokens: list[int] = []
        """Of each conversation, all of them."""

    def solve(self, engine: InProcessEngine, prompts: Sequence[Prompt], start: int) -> None:
        """Sample and judge the answers to a block of prompts; `start` is the number of its first."""
        from model.generation.generation import Sampling
        from tasks.training.policy.rollouts import sampling_seed

        objective, size = self.recipe.objective, self.recipe.objective.samples_per_prompt
        asked = [prompt for prompt in prompts for _ in range(size)]
        asked_ids = [prompt.token_ids(self.tokenizer, objective.enable_thinking) for prompt in prompts]
        sampling = Sampling(
            objective.max_new_tokens,
            objective.temperature,
            stop_token_ids=self.stops,
            seed=sampling_seed(self.recipe.seed, start),
        )
        repeated = [token_ids for token_ids in asked_ids for _ in range(size)]
        answers = engine.generate(repeated, sampling, engine.weights_version).token_ids
        texts = [self.tokenizer.decode(token_ids, skip_special_tokens=False) for token_ids in answers]
        written = [WrittenAnswer(text, ids[-1] in self.stops) for text, ids in zip(texts, answers, strict=True)]
        verdicts = verify_answers([prompt.asked for prompt in asked], written)
        self.num_without_verdict += sum(verdict is None for verdict in verdicts)
        for number, prompt in enumerate(prompts):
            own = slice(number * size, (number + 1) * size)
            right = [verdict is True for verdict in verdicts[own]]
            num_kept = 0
            if self.recipe.keeps_answers:
                num_kept = self._keep(prompt, start + number, asked_ids[number], answers[own], texts[own], right)
            counted = {"num_samples": size, "num_right": sum(right), "num_kept": num_kept}
            self.solved.append({"id": prompt.id, "domain": prompt.domain, "kind": prompt.kind} | counted)
            if len(self.shown) < NUM_SHOWN_PROMPTS:
                line = {"prompt_id": prompt.id, "question": prompt.question, "answer": prompt.answer}
                self.shown.append({"step": 0} | line | {"samples": texts[own], "rewards": list(map(float, right))})

    def _keep(
        self,
        prompt: Prompt,
        number: int,
        prompt_ids: list[int],
        answers: Sequence[list[int]],
        texts: Sequence[str],
        right: Sequence[bool],
    ) -> int:
        """Make conversations of the first right answers to a prompt that differ; their number."""
        kept: set[str] = set()
        for piece, (token_ids, text) in enumerate(zip(answers, texts, strict=True)):
            if not right[piece]:
                continue
            messages = conversation(prompt, text, self.recipe.objective.enable_thinking)
            again, _ = encode(self.tokenizer, render_to_train(messages, json.loads(prompt.tools)))
            if text in kept:
                self.left_out[REPEATED] += 1
            elif not self._reads_alike(again, [*prompt_ids, *token_ids]):
                self.left_out[OTHER_FORM] += 1
            elif len(kept) == self.recipe.objective.max_kept_per_prompt:
                self.left_out[ENOUGH] += 1
            else:
                kept.add(text)
                self.answer_tokens.append(len(token_ids))
                self.chat_tokens.append(len(again))
                self.chats.append(self._row(prompt, number, piece, canonical_json(messages)))
        return len(kept)

    def leave_out_shortest(self, share: float) -> None:
        """Drop the conversations of this share of the prompts that have some, those with the shortest answers; of equal
        ones those that were asked first."""
        sizes: dict[int, list[int]] = {}
        for chat, size in zip(self.chats, self.answer_tokens, strict=True):
            sizes.setdefault(chat["offset"], []).append(size)
        means = sorted((sum(own) / len(own), number) for number, own in sizes.items())
        dropped = {number for _, number in means[: int(share * len(means))]}
        self.left_out.update({SHORT: sum(len(sizes[number]) for number in dropped)} if dropped else {})
        for number in dropped:
            self.solved[number]["num_kept"] = 0
        kept = [place for place, chat in enumerate(self.chats) if chat["offset"] not in dropped]
        self.chats = [self.chats[place] for place in kept]
        self.answer_tokens = [self.answer_tokens[place] for place in kept]
        self.chat_tokens = [self.chat_tokens[place] for place in kept]

    def _reads_alike(self, first: Sequence[int], second: Sequence[int]) -> bool:
        """Whether two sequences are the same text with the same special tokens."""
        texts = {self.tokenizer.decode(token_ids, skip_special_tokens=False) for token_ids in (first, second)}
        specials = {tuple(each for each in token_ids if each in self.specials) for token_ids in (first, second)}
        return len(texts) == len(specials) == 1

    def _row(self, prompt: Prompt, number: int, piece: int, messages: str) -> dict[str, Any]:
        return {
            "id": document_id(self.source, number, piece),
            "source": self.source,
            "offset": number,
            "piece": piece,
            "collection": f"{SOURCE}/{prompt.domain}",
            "licence": "",
            "kind": prompt.kind,
            "messages": messages,
            "tools": prompt.tools,
            "num_bytes": len(messages.encode()) + len(prompt.tools.encode()),
            "split": TRAIN,
        }


def conversation(prompt: Prompt, text: str, enable_thinking: bool) -> list[Any]:
    """The messages (chat_template.Message) of a prompt and what an assistant wrote, up to the token that ended it."""
    turn = next((text.removesuffix(token) for token in END_TOKENS if text.endswith(token)), text)
    reasoning, closed, said = turn.partition("</think>")
    if not enable_thinking or not closed:
        reasoning, said = "", turn
    calls = written_calls(said) or [] if "<tool_call>" in said else []
    return [
        {"role": "user", "content": prompt.question, "reasoning": "", "tool_calls": []},
        {
            "role": "assistant",
            "content": said.split("<tool_call>")[0].strip() if calls else said.strip(),
            "reasoning": reasoning.partition("<think>")[2].strip(),
            "tool_calls": [{"name": name, "arguments": arguments} for name, arguments in calls],
        },
    ]


def best_of_k(num_right: Sequence[int], num_samples: int) -> tuple[PassAtK, ...]:
    """pass@k for k = 1, 2, 4 ... and num_samples, from the number of right answers to every prompt."""
    if not num_right:
        return ()
    powers = [2**power for power in range(num_samples.bit_length()) if 2**power < num_samples]
    curve = []
    for k in (*powers, num_samples):
        passed = [pass_at_k(num_samples, right, k) for right in num_right]
        lower, upper = share_interval(passed, [1] * len(passed))
        interval = (round(lower, 6), round(upper, 6)) if math.isfinite(lower + upper) else None
        curve.append(PassAtK(k=k, share=round(sum(passed) / len(passed), 6), interval=interval))
    return tuple(curve)
