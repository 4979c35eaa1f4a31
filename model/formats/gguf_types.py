"""Which type each tensor of a GGUF file has, and its bytes in that type, computed by llama.cpp's own quantizer.

Q6_K, Q5_K_M and Q4_K_M are llama.cpp's mixtures. In those of 4 and 5 bits the value projection and the second matrix
of the MLPs have 6 bits in some layers. Rows that are no multiple of 256 long take the type that llama.cpp takes for
them. Embedding, head and MTP layer are Q8_0 in these three, above llama.cpp's own choice; router, router bias, norms,
biases and the MTP layer's eh_proj are F32 in every file.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Stored

from configs.schema import GgufType

FILE_TYPES: dict[GgufType, gguf.LlamaFileType] = {
    "F32": gguf.LlamaFileType.ALL_F32,
    "BF16": gguf.LlamaFileType.MOSTLY_BF16,
    "F16": gguf.LlamaFileType.MOSTLY_F16,
    "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "Q6_K": gguf.LlamaFileType.MOSTLY_Q6_K,
    "Q5_K_M": gguf.LlamaFileType.MOSTLY_Q5_K_M,
    "Q4_K_M": gguf.LlamaFileType.MOSTLY_Q4_K_M,
}
_MATRIX: dict[GgufType, Stored] = {"Q6_K": Stored.Q6_K, "Q5_K_M": Stored.Q5_K, "Q4_K_M": Stored.Q4_K}
_SHORT_ROWS = {Stored.Q6_K: Stored.Q8_0, Stored.Q5_K: Stored.Q5_1, Stored.Q4_K: Stored.Q5_0}
"""llama.cpp's tensor_type_fallback."""
_HALF_SENSITIVE = ("attn_v.weight", "ffn_down.weight", "ffn_down_exps.weight", "ffn_down_shexp.weight")
_OUTSIDE_LAYERS = ("token_embd.weight", "output.weight")
_KEPT = ("ffn_gate_inp.weight", "nextn.eh_proj.weight")


def stored_type(gguf_name: str, shape: tuple[int, ...], gguf_type: GgufType, num_layers: int) -> Stored:
    """The type of one tensor in a file of a type; `num_layers` without the MTP layer. Raises ValueError where its rows
    are no whole blocks."""
    if gguf_type == "F32" or len(shape) < 2 or gguf_name.endswith(_KEPT):
        return Stored.F32
    layer = num_layers if gguf_name in _OUTSIDE_LAYERS else int(gguf_name.split(".")[1])
    if gguf_type not in _MATRIX:
        chosen = Stored[gguf_type]
    elif layer >= num_layers:
        chosen = Stored.Q8_0
    else:
        chosen = _MATRIX[gguf_type]
        if gguf_name.endswith(_HALF_SENSITIVE) and _has_more_bits(layer, num_layers):
            chosen = Stored.Q6_K
        if shape[-1] % _block(chosen):
            chosen = _SHORT_ROWS[chosen]
    if shape[-1] % _block(chosen):
        raise ValueError(
            f"{gguf_name}: rows of {shape[-1]} elements cannot be {gguf_type}, which needs a multiple of "
            f"{_block(chosen)}: use F32"
        )
    return chosen


def _has_more_bits(layer: int, num_layers: int) -> bool:
    """llama.cpp's use_more_bits: the first and last eighth, and every third layer between them."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def _block(stored: Stored) -> int:
    return gguf.GGML_QUANT_SIZES[stored][0]


def num_stored_bytes(shape: tuple[int, ...], stored: Stored) -> int:
    """Bytes of a tensor in a type."""
    elements, num_bytes = gguf.GGML_QUANT_SIZES[stored]
    return int(np.prod(shape)) // elements * num_bytes


def quantize(array: np.ndarray, stored: Stored, importance: np.ndarray | None) -> np.ndarray:
    """A float32 tensor in a type. `importance`: mean square of what each column is multiplied with, for all matrices of
    a stack or one row per matrix; None rounds every column alike. Threads change no byte."""
    if stored == Stored.F32:
        return array
    quantize_chunk = _llama_quantizer()
    matrices = np.ascontiguousarray(array).reshape(-1, *array.shape[-2:])
    num_rows, num_columns = matrices.shape[1:]
    out = np.empty((len(matrices), num_stored_bytes(matrices.shape[1:], stored)), dtype=np.uint8)
    if importance is not None:
        importance = np.ascontiguousarray(np.broadcast_to(importance, (len(matrices), num_columns)), dtype=np.float32)

    def quantize_matrix(number: int) -> None:
        weights = None if importance is None else importance[number].ctypes.data
        written = quantize_chunk(
            int(stored), matrices[number].ctypes.data, out[number].ctypes.data, 0, num_rows, num_columns, weights
        )
        assert written == out.shape[1], (stored, written, out.shape)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(quantize_matrix, range(len(matrices))))
    return out.reshape(*array.shape[:-1], -1)


@cache
def _llama_quantizer() -> Any:
    """ggml_quantize_chunk of the llama.cpp that serves the files: it is a part of xllamacpp's module."""
    module = importlib.import_module("xllamacpp.xllamacpp")
    assert module.__file__ is not None, module
    function = ctypes.CDLL(module.__file__).ggml_quantize_chunk
    function.argtypes = (ctypes.c_int, *(ctypes.c_void_p,) * 2, *(ctypes.c_int64,) * 3, ctypes.c_void_p)
    function.restype = ctypes.c_size_t
    return function
