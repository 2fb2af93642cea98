"""Which form a call takes: the one place where that is decided.

    dense      all weights, pair by pair                      cost ~ n m (d + e)
    linear     keys are added up, then read; not causal       cost ~ (n + m) r e
    chunked    pairs inside a chunk, sums before it; causal   cost ~ n r e
    step       one token after a state                        cost ~ r e
    fused      linear or chunked, in one native kernel        wherever the kernels serve the call

Axes: b batch and key heads, g query heads per key head, n queries, m keys, d width, e value width, r features.
"""

from typing import Literal, NamedTuple

import torch

from subquad import native
from subquad._calls.layout import Layout
from subquad._torch_internals import has_open_size, in_onnx_export
from subquad.methods.memory_limit import fits_memory
from subquad.methods.method import FeatureMethod
from subquad.native.calls import TYPES

Form = Literal["dense", "linear", "chunked", "step", "fused"]

# Measured on two cores: below, the interpreter costs more than the arithmetic; above, the data leaves the cache.
CHUNK_TOKENS = 64
WAVE_TOKENS = 1 << 13  # tokens times heads that are computed at once
WAVE_FEATURES = 1 << 22  # features of all tokens that are made at once
UNIT_TOKENS = 1024  # between two states that are kept for the backward pass
DENSE_PAIRS = 1 << 21  # weights of the dense form that are made at once
# What an operation on a pair, or on a feature, costs besides its products.
PAIR_OVERHEAD, FEATURE_OVERHEAD = 64, 32


class Sizes(NamedTuple):
    """How many tokens are computed at once by torch's operations."""

    chunk: int  # tokens that meet pair by pair
    wave: int  # tokens whose chunks are computed side by side, a multiple of the chunk
    unit: int  # tokens between two kept states, a multiple of the wave
    rows: int  # rows of the dense form
    batch: int  # batches and heads


def is_fusable(
    method: FeatureMethod, layout: Layout, dtype: torch.dtype, *, is_causal: bool, is_stateful: bool = False,
    has_segments: bool = False,
) -> bool:  # fmt: skip
    """Return whether the native kernels compute calls of this kind."""
    if layout.device.type != "cpu" or method.native_map is None or has_segments or not native.available():
        return False
    if in_onnx_export():
        return False
    sizes = (layout.rows, layout.group, layout.width, method.size(layout.width))
    if dtype not in TYPES or 0 in sizes or not _has_tokens(layout, is_stateful):
        return False
    if not fits_memory(method, layout.width, layout.value_width + 1):
        return False
    if method.normalizer == "feature":
        return is_causal and not is_stateful and layout.queries == layout.keys
    return not is_causal or layout.queries == layout.keys


def _has_tokens(layout: Layout, is_stateful: bool) -> bool:
    """Return whether there is something to compute; with a state, keys alone are added up, and queries alone read."""
    if is_stateful:
        return layout.queries != 0 or layout.keys != 0
    return layout.queries != 0 and layout.keys != 0


def choose_form(
    method: FeatureMethod, layout: Layout, *, is_causal: bool, is_fusable: bool, is_stateful: bool = False,
    is_resumed: bool = False,
) -> Form:  # fmt: skip
    """Return the cheapest form, by the multiplications that each would make.

    Args:
        method: The method.
        layout: The sizes of the call.
        is_causal: Whether a query sees only the keys up to its own position.
        is_fusable: Whether the kernels serve the call.
        is_stateful: Whether the call has a state or returns one, which needs sums.
        is_resumed: Whether there are sums before these keys.
    """
    n, m, d, e, g = layout.queries, layout.keys, layout.width, layout.value_width, layout.group
    if is_resumed and n == m == 1:
        return "step"
    if is_fusable:
        return "fused"
    by_sums: Form = "chunked" if is_causal else "linear"
    if is_stateful or method.normalizer == "feature" or has_open_size(layout.rows, n, m):
        return by_sums
    r = method.size(d)
    pairs = n * m * g / (2 if is_causal and n == m else 1)
    dense = pairs * ((r if method.of_logits is None else d) + e + PAIR_OVERHEAD)
    return "dense" if dense < (n * g + m) * r * (e + FEATURE_OVERHEAD) else by_sums


def sizes_of(features: int, layout: Layout, chunk: int | None = None) -> Sizes:
    """Return how many tokens torch's operations compute at once; tests give a short `chunk` to cross all borders."""
    n, m, b, g = layout.queries, layout.keys, max(1, layout.rows), layout.group
    rows = max(1, min(n, max(CHUNK_TOKENS, DENSE_PAIRS // max(1, b * g * m))))
    if chunk is not None:
        return Sizes(chunk, 2 * chunk, 4 * chunk, rows, b)
    chunk = max(1, min(n if n <= 2 * CHUNK_TOKENS else CHUNK_TOKENS, WAVE_FEATURES // max(1, features)))
    at_once = min(WAVE_TOKENS, WAVE_FEATURES // max(features, chunk))
    wave = chunk * max(1, at_once // (b * g * chunk))
    return Sizes(chunk, wave, wave * max(1, UNIT_TOKENS // wave), rows, max(1, at_once // (g * chunk)))
