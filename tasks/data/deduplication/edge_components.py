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
        nodes, indices = np.unique(ends, return_inverse=True)
        roots = smallest_members(len(nodes), *indices.reshape(ends.shape))
        yield pa.RecordBatch.from_arrays([id_strings(nodes), id_strings(nodes[roots])], names=["id", "root"])


def star_rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """STAR_COLUMNS of EDGES parcels: the larger id of an edge is the node."""
    import pyarrow as pa

    for edges in unpacked(batches).values():
        left, right = (edges.column(name).to_numpy() for name in ("left", "right"))
        columns = [id_strings(np.maximum(left, right)), id_strings(np.minimum(left, right))]
        yield pa.RecordBatch.from_arrays(columns, names=["node", "centre"])


def smallest_members(num_nodes: int, left: I64, right: I64) -> I64:
    """The smallest node of each node's component."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    edges = coo_array((np.ones(len(left), dtype=bool), (left, right)), shape=(num_nodes, num_nodes))
    _, components = connected_components(edges, directed=False)
    smallest = np.full(num_nodes, num_nodes)
    np.minimum.at(smallest, components, np.arange(num_nodes))
    return smallest[components]
