"""Connected components of edges in memory, as NumPy arrays. Runs in executors: imports no Spark."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from tasks.data.records.parcels import id_strings, unpacked

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    I64 = NDArray[np.int64]

ROOT_COLUMNS = "id string, root string"
STAR_COLUMNS = "node string, centre string"


def component_roots(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """ROOT_COLUMNS of all nodes of EDGES parcels."""
    import pyarrow as pa

    for edges in unpacked(batches).values():
        ends = np.stack([edges.column(name).to_numpy() for name in ("left", "right")])
        nodes, places = np.unique(ends, return_inverse=True)
        roots = smallest_members(len(nodes), *places.reshape(ends.shape))
        yield pa.RecordBatch.from_arrays([id_strings(nodes), id_strings(nodes[roots])], names=["id", "root"])


def star_rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """STAR_COLUMNS of EDGES parcels: the larger id of an edge is the node."""
    import pyarrow as pa

    for edges in unpacked(batches).values():
        left, right = (edges.column(name).to_numpy() for name in ("left", "right"))
        columns = [id_strings(np.maximum(left, right)), id_strings(np.minimum(left, right))]
        yield pa.RecordBatch.from_arrays(columns, names=["node", "centre"])


def smallest_members(num_nodes: int, left: I64, right: I64) -> I64:
    """The smallest node of each node's component: roots are hooked onto neighbouring roots and paths halved until no edge joins two.

    A root beside another has a smaller or a larger neighbour, so hooking in the direction in which more roots can go removes at least
    half of those that are left: log2(nodes) + 1 rounds suffice, and more are a fault and raise RuntimeError."""
    parent = np.arange(num_nodes)
    for _ in range(num_nodes.bit_length() + 2):
        one, other = parent[left], parent[right]
        is_open = one != other
        if not is_open.any():
            smallest = np.full(num_nodes, num_nodes)
            np.minimum.at(smallest, parent, np.arange(num_nodes))
            return smallest[parent]
        left, right = left[is_open], right[is_open]
        low, high = np.minimum(one, other)[is_open], np.maximum(one, other)[is_open]
        if len(np.unique(high)) >= len(np.unique(low)):
            np.minimum.at(parent, high, low)
        else:
            np.maximum.at(parent, low, high)
        while ((grandparent := parent[parent]) != parent).any():
            parent = grandparent
    raise RuntimeError(f"components of {num_nodes} nodes have not settled: the duplicate clusters would be wrong")
