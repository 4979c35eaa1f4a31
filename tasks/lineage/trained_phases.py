"""The phases that a checkpoint was trained in, and the documents that they read.

Packed orders are joined with the shards' sidecars, one shard at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from infra.step import Manifest
from infra.storage.manifest_graph import ManifestGraph
from tasks.data.packing.packed_order import ORDER_FILES
from tasks.data.packing.packed_rows import PACKING_FILE

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa

TRAIN_STEP, IMPORT_STEP, SOLUTIONS_STEP = "train_phase", "import_checkpoint", "sample_solutions"
PROMPTS_FILE = "prompts.parquet"


@dataclass(frozen=True)
class TrainedPhase:
    """A phase as its manifests describe it."""

    checkpoint: Manifest
    packed: Manifest | None
    """None in a policy phase."""
    shards: tuple[Manifest, ...]
    """What the packed order reads from: documents, and conversations where there are any."""
    prompts: Manifest | None
    """What a policy phase asked; None elsewhere."""

    @property
    def name(self) -> str:
        return self.checkpoint.record["phase"]


@dataclass(frozen=True)
class ShardReads:
    """What the phases read of one shard, or of the prompts."""

    shard: str
    sha256: str
    tokens_by_phase: Mapping[int, int]
    """Index of the phase in the chain -> tokens read, with repetitions; 0 for prompts, where it trains on its own
    answers."""
    documents_by_phase: Mapping[int, int]
    table: pa.Table
    """One row per document that any of them read: id, source, offset, piece, shard, sequence, phases, tokens (of all
    phases)."""


def trained_phases(graph: ManifestGraph, checkpoint: Manifest) -> tuple[list[TrainedPhase], Manifest]:
    """The phases that led to a checkpoint, each after those that it needed, and the manifest at the chain's root: the
    first phase, or imported weights. With the phases of the experts whose answers one of them learned."""
    chain = [checkpoint]
    while chain[-1].step == TRAIN_STEP and (start := graph.input_of(chain[-1], "start")) is not None:
        chain.append(start)
    phases: dict[str, TrainedPhase] = {}
    for manifest in reversed(chain):
        if manifest.step == TRAIN_STEP:
            own = [phase for expert in experts_of(graph, manifest) for phase in trained_phases(graph, expert)[0]]
            for phase in (*own, phase_of(graph, manifest)):
                phases.setdefault(phase.checkpoint.digest, phase)
    return [*phases.values()], chain[-1]


def experts_of(graph: ManifestGraph, checkpoint: Manifest) -> list[Manifest]:
    """The checkpoints whose sampled answers a phase trained on: of rejection sampling its start."""
    chats = graph.input_of(checkpoint, "chats")
    solutions = None if chats is None else graph.input_of(chats, "chats")
    if solutions is None or solutions.step != SOLUTIONS_STEP:
        return []
    answering = (graph.input_of(solutions, name) for name in solutions.identity["inputs"] if name != "prompts")
    return [manifest for manifest in answering if manifest is not None]


def phase_of(graph: ManifestGraph, checkpoint: Manifest) -> TrainedPhase:
    """What one training step read."""
    sources = (graph.input_of(checkpoint, name) for name in ("shards", "chats"))
    shards = tuple(source for source in sources if source is not None)
    return TrainedPhase(checkpoint, graph.input_of(checkpoint, "packed"), shards, graph.input_of(checkpoint, "prompts"))


def shard_reads(graph: ManifestGraph, phases: list[TrainedPhase]) -> Iterator[ShardReads]:
    """What the phases read, shard by shard: memory holds one sidecar and a block of an order."""
    readers: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for index, phase in enumerate(phases):
        for number, name in enumerate(packed_shards(graph, phase)):
            readers.setdefault((shards_with(phase, name).digest, name), []).append((index, number))
    for (digest, name), numbered in readers.items():
        shards = graph.by_digest[digest]
        sidecar = _sidecar(graph, shards, name)
        size = len(sidecar)
        tokens = {index: tokens_by_sequence(graph, phases[index], number, size) for index, number in numbered}
        yield _joined(name, shards.content[f"shards/{name}.bin"].sha256, sidecar, tokens, phases)
    asked = [(index, phase.prompts) for index, phase in enumerate(phases) if phase.prompts is not None]
    for digest in dict.fromkeys(prompts.digest for _, prompts in asked):
        yield _prompt_reads(
            graph, graph.by_digest[digest], [index for index, prompts in asked if prompts.digest == digest], phases
        )


def packed_shards(graph: ManifestGraph, phase: TrainedPhase) -> list[str]:
    """Names of the shards in the order in which the packed order numbers them."""
    return [] if phase.packed is None else json.loads(graph.open(phase.packed).path(PACKING_FILE).read_text())["shards"]


def shards_with(phase: TrainedPhase, name: str) -> Manifest:
    """The artifact of the phase that holds a shard."""
    return next(shards for shards in phase.shards if f"shards/{name}.parquet" in shards.content)


def tokens_by_sequence(graph: ManifestGraph, phase: TrainedPhase, shard_number: int, num_sequences: int) -> np.ndarray:
    """Tokens that a phase's packed order reads of every sequence of one shard, with repetitions."""
    import numpy as np

    tokens = np.zeros(num_sequences, dtype=np.int64)
    for block in _order_blocks(graph, phase):
        own = block[block[:, 0] == shard_number]
        np.add.at(tokens, own[:, 1], own[:, 3])
    return tokens


def tokens_of_sequence(graph: ManifestGraph, phase: TrainedPhase, shard: str, sequence: int) -> int:
    """Tokens that a phase's packed order reads of one sequence; 0 where it reads none."""
    names = packed_shards(graph, phase)
    if shard not in names:
        return 0
    number = names.index(shard)
    return sum(
        int(block[(block[:, 0] == number) & (block[:, 1] == sequence), 3].sum())
        for block in _order_blocks(graph, phase)
    )


def _order_blocks(graph: ManifestGraph, phase: TrainedPhase) -> Iterator[np.ndarray]:
    """The packed order's lines (shard, sequence, offset, length and others), one part at a time."""
    import numpy as np

    assert phase.packed is not None, phase.name
    paths = graph.open(phase.packed).paths(ORDER_FILES)
    return (np.load(path, allow_pickle=False) for path in paths)


def asked_prompt_ids(graph: ManifestGraph, checkpoint: Manifest, prompts: Manifest) -> list[str]:
    """Ids of the prompts that a policy phase asked, each once, in the order of its groups. Raises ValueError where the
    phase was trained by a version of glm46 with other settings: the order is computed again from them."""
    from pydantic import ValidationError

    from configs.schema import PolicyObjective, TrainingRecipe
    from model.text.tokenizer_layout import tokenizer_for_text
    from tasks.training.policy.prompt_difficulty import SOLVED_FILE
    from tasks.training.policy.prompt_order import PromptOrder
    from tasks.training.state.state import STATE_FILE, read_position

    tokenizer = graph.input_of(checkpoint, "tokenizer")
    assert tokenizer is not None, checkpoint.key
    opened = tokenizer_for_text(str(graph.open(tokenizer).path("tokenizer.json")))
    try:
        recipe = TrainingRecipe.model_validate(checkpoint.identity["recipe"])
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"]))
        raise ValueError(
            f"the prompts of checkpoint {checkpoint.key[:12]} are not known: a version of glm46 with other settings "
            f"trained it ({key} differs): use that version"
        ) from None
    measured = graph.input_of(checkpoint, "pass_rates")
    solved_path = None if measured is None else graph.open(measured).path(SOLVED_FILE)
    order = PromptOrder(graph.open(prompts).path(PROMPTS_FILE), opened, recipe, solved_path)
    assert isinstance(recipe.objective, PolicyObjective), checkpoint.key
    if not recipe.objective.max_refills:
        return [prompt.id for prompt in order.asked({})]
    position = read_position(graph.open(checkpoint).path(f"handover/{STATE_FILE}").parent)
    assert position.policy is not None, checkpoint.key
    return [prompt.id for prompt in order.asked(position.policy.num_refilled)]


def _sidecar(graph: ManifestGraph, shards: Manifest, name: str) -> pa.Table:
    import pyarrow.parquet as pq

    path = graph.open(shards).path(f"shards/{name}.parquet")
    return pq.read_table(path, columns=["id", "source", "offset", "piece", "sequence"]).sort_by("sequence")


def _joined(
    shard: str,
    sha256: str,
    rows: pa.Table,
    tokens: Mapping[int, np.ndarray],
    phases: list[TrainedPhase],
    was_read: Mapping | None = None,
) -> ShardReads:
    """The rows that any phase read; `tokens` are aligned with them. A row was read if it has tokens; `was_read`
    overrides this."""
    import numpy as np
    import pyarrow as pa

    read = {index: counts > 0 for index, counts in tokens.items()} if was_read is None else was_read
    bits = sum(
        (read[index].astype(np.int64) << number for number, index in enumerate(tokens)),
        np.zeros(len(rows), dtype=np.int64),
    )
    names = [
        [phases[index].name for number, index in enumerate(tokens) if value >> number & 1]
        for value in range(1 << len(tokens))
    ]
    table = rows.append_column("tokens", pa.array(sum(tokens.values())))
    table = table.append_column("phases", pa.array([names[value] for value in bits.tolist()], pa.list_(pa.string())))
    table = table.append_column("shard", pa.array([shard] * len(rows), pa.string()))
    columns = ["id", "source", "offset", "piece", "shard", "sequence", "phases", "tokens"]
    return ShardReads(
        shard,
        sha256,
        {index: int(counts.sum()) for index, counts in tokens.items()},
        {index: int(read[index].sum()) for index in tokens},
        table.select(columns).filter(pa.array(bits > 0)),
    )


def _prompt_reads(
    graph: ManifestGraph, prompts: Manifest, indices: list[int], phases: list[TrainedPhase]
) -> ShardReads:
    import numpy as np
    import pyarrow.parquet as pq

    table = pq.read_table(graph.open(prompts).path(PROMPTS_FILE), columns=["id", "source", "offset"])
    ids, zeros = table["id"].to_numpy(), np.zeros(len(table), dtype=np.int64)
    table = table.append_column("piece", [zeros]).append_column("sequence", table["offset"])
    read = {index: np.isin(ids, asked_prompt_ids(graph, phases[index].checkpoint, prompts)) for index in indices}
    return _joined(
        PROMPTS_FILE, prompts.content[PROMPTS_FILE].sha256, table, dict.fromkeys(indices, zeros), phases, read
    )
