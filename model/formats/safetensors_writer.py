"""Writes a safetensors file tensor by tensor: one tensor is in memory, where the library's writer needs all of a file.

The bytes are those that safetensors.torch.save_file writes for the same tensors.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""In the order of the tensors in a file: the library sorts by dtype, then by name."""
_ALIGNMENT = 8


def write_safetensors(
    path: Path, layout: Mapping[str, tuple[torch.Size, torch.dtype]], read: Callable[[str], Tensor]
) -> None:
    """Write the tensors of these names, shapes and dtypes; each is read once, and cast."""
    dtypes = list(DTYPE_NAMES)
    names = sorted(layout, key=lambda name: (dtypes.index(layout[name][1]), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        shape, dtype = layout[name]
        end = offset + shape.numel() * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            shape, dtype = layout[name]
            tensor = read(name)
            assert tensor.shape == shape, (name, tensor.shape, shape)
            file.write(tensor_bytes(tensor.detach().to("cpu", dtype)))


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on the CPU, row by row; of a contiguous one they are not copied."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
