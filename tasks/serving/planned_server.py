"""The records of a plan: what is served, what the user asks for, the sum, and the server that fits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from configs.schema import ModelRecipe
from tasks.serving.fleet import Fleet
from tasks.serving.served_bytes import Layout

Engine = Literal["llamacpp", "vllm", "sglang"]
ScenarioName = Literal["high_throughput", "balanced", "low_latency"]
DIRECTORY_ENGINES: tuple[Engine, ...] = ("vllm", "sglang")
"""They serve a directory in the Hugging Face layout, llama.cpp a GGUF file."""
PAGE_TOKENS = 128
"""Keys and values that vLLM keeps together on processors; it keeps one page for itself."""


@dataclass(frozen=True)
class Scenario:
    """What a server is tuned for."""

    num_slots: int
    """Requests computed at the same time on GPUs."""
    num_slots_cpu: int
    """The same on processors, where memory holds the whole context of each."""
    is_drafting: bool
    """The MTP layer drafts where few requests leave GPUs waiting for memory; under many it only adds work."""
    prefers_groups: bool
    """Many attention groups with experts shared among them, instead of one group with the most GPUs."""


SCENARIOS: dict[ScenarioName, Scenario] = {
    "low_latency": Scenario(8, 1, is_drafting=True, prefers_groups=False),
    "balanced": Scenario(64, 4, is_drafting=True, prefers_groups=False),
    "high_throughput": Scenario(256, 16, is_drafting=False, prefers_groups=True),
}


@dataclass(frozen=True)
class PlannedModel:
    """What is served, as far as a plan needs it."""

    name: str
    """Under which clients ask for it."""
    recipe: ModelRecipe
    stored_format: str
    """A key of FORMATS; of llama.cpp the GGUF type."""
    is_chat_trained: bool
    """Whether it has a chat template: only then the engines parse reasoning and tool calls."""
    file_bytes: int = 0
    """Of llama.cpp's file."""


@dataclass(frozen=True)
class Wishes:
    """What the user asks for; None: the plan decides."""

    engine: Engine
    scenario: ScenarioName
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    ep: int | None = None
    context: int | None = None
    slots: int | None = None
    drafts: bool | None = None
    quantization: str | None = None
    rollouts: bool = False
    routes: bool = False


@dataclass(frozen=True)
class Needs:
    """Bytes of one GPU, or of the node where its processors compute, in 1e9 bytes."""

    weights: float
    kv_per_token: float
    context: int
    num_contexts: int
    """Requests of the whole context that must fit: one on GPUs, where pages are shared, every slot on processors."""
    overhead: float
    usable: float
    of: str
    """What `usable` is a share of."""

    @property
    def kv(self) -> float:
        return self.kv_per_token * self.context * self.num_contexts

    @property
    def total(self) -> float:
        return self.weights + self.kv + self.overhead

    @property
    def fits(self) -> bool:
        return self.total <= self.usable

    @property
    def cached_tokens(self) -> int:
        """Tokens whose keys and values fit beside the rest."""
        return max(0, int((self.usable - self.weights - self.overhead) / self.kv_per_token))

    def __str__(self) -> str:
        requests = "one request" if self.num_contexts == 1 else f"{self.num_contexts} requests"
        cached = f"keys and values of {requests} of {self.context:,} tokens {gigabytes(self.kv)}"
        parts = f"weights {gigabytes(self.weights)} + {cached} + overhead {gigabytes(self.overhead)}"
        return f"{parts} = {gigabytes(self.total)} of {gigabytes(self.usable)} ({self.of})"


@dataclass(frozen=True)
class ServingPlan:
    """A server that fits."""

    model: PlannedModel
    fleet: Fleet
    engine: Engine
    scenario: ScenarioName
    layout: Layout
    num_nodes: int
    context: int
    num_slots: int
    is_drafting: bool
    quantization: str
    """What the engine rounds to while loading; empty: weights are served as they are stored."""
    memory_share: float
    """Of a GPU, in the words of the engine: SGLang's leaves out the overhead. Of the node's memory on processors."""
    needs: Needs
    samples_rollouts: bool = False
    """Whether a policy phase gives it weights and asks it for answers as token ids."""
    names_experts: bool = False
    """Whether its answers name the experts that each token was sent to."""

    @property
    def is_on_gpus(self) -> bool:
        return self.engine in DIRECTORY_ENGINES and bool(self.fleet.num_gpus)

    @property
    def dtype(self) -> str:
        """What an engine of DIRECTORY_ENGINES computes in; on processors that in which a release was compared."""
        return "bfloat16" if self.is_on_gpus else "float32"

    @property
    def cache_bytes(self) -> int:
        """Of vLLM on processors: whole pages of every slot, and its own."""
        pages = self.num_slots * -(-self.context // PAGE_TOKENS) + 1
        return round(1e9 * self.needs.kv_per_token * PAGE_TOKENS * pages)

    def describe(self) -> str:
        """The sum, for people."""
        where = str(self.fleet)
        if self.is_on_gpus:
            where = f"{self.layout}, {self.layout.num_gpus} GPUs of {where}"
        stored = self.quantization or self.model.stored_format
        if self.engine in DIRECTORY_ENGINES and not self.is_on_gpus:
            stored = self.dtype
        lines = [
            f"{self.model.name} in {stored} by {self.engine}, {self.scenario}: {where}",
            f"each {'GPU' if self.is_on_gpus else 'node'}: {self.needs}",
        ]
        if self.is_on_gpus:
            total = self.needs.cached_tokens * self.layout.dp
            lines.append(
                f"keys and values of {total:,} tokens fit, {total / self.context:.1f} requests of the whole context; "
                f"at most {self.num_slots} requests at a time"
            )
        return "\n".join(lines)


def gigabytes(value: float) -> str:
    """1e9 bytes in words, small ones in 1e6."""
    return f"{value:.1f} GB" if value >= 1 else f"{value * 1e3:.1f} MB"
