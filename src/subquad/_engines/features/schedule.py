"""How the kernels execute a call: by sums or by pairs, in which chunks, on how many threads.

The kernels only execute; all their decisions are made here, so that cost and planner know them too. What decides the
order of sums (chunk, pairs, parts) follows from the sizes of one head: a head has the same bits in any batch and on any
number of threads.
"""

from functools import lru_cache
from typing import Literal, NamedTuple

from subquad.native.calls import PAIR_BLOCK

Operation = Literal["forward", "backward", "step"]

MIN_WORK_PER_THREAD = 2e6  # multiply-adds
MAX_THREADS = 1024
# Threads that can share the forward pass of a head: each maps all tokens again, so that more of them would gain little.
# A part with this many features is worth its own sum: adding it costs less than 1 % of making it.
MAX_PARTS, MIN_PART_FEATURES = 2, 64
# Products that a pass makes, of sums with features and of pairs.
PRODUCTS: dict[Operation, tuple[float, float]] = {"forward": (2.0, 2.0), "backward": (5.0, 7.0), "step": (2.0, 2.0)}
# With many features more tokens should share each number of the sums that is loaded; with few, the pairs inside a chunk
# dominate. Width 16 (153 features): 22.9 ms with 32 tokens, 24.2 with 64, 28.5 with 128; width 64 (2,145 features):
# 27.6, 25.9, 25.9.
SHORT_CHUNK, LONG_CHUNK, LONG_CHUNK_FEATURES = 32, 64, 512


class KernelSizes(NamedTuple):
    """The sizes of a call as the kernels see them."""

    batch: int
    group: int
    queries: int
    keys: int
    width: int  # of queries, after a user's map
    values: int
    features: int


class Schedule(NamedTuple):
    """Fields of the kernels' call."""

    threads: int
    chunk: int  # tokens
    pairs: bool  # meet pair by pair instead of adding up features
    parts: int  # of a head: of its features, summed up one after another; or by pairs of its rows
    is_shared: bool  # whether threads share a head, by its parts or in the backward pass by its two passes


@lru_cache(maxsize=512)
def schedule(
    operation: Operation, native_map: str, sizes: KernelSizes, is_causal: bool, has_sums: bool, threads: int,
    chunk: int = 0,
) -> Schedule:  # fmt: skip
    """Choose threads, chunk, pairs or sums, and parts of a head.

    Args:
        operation: The operation to run.
        native_map: The kernels' name of the feature map.
        sizes: The sizes of the call.
        is_causal: Whether a query sees only the keys up to its own position.
        has_sums: Whether the call reads or writes sums; pairs do neither.
        threads: The largest number of threads.
        chunk: The largest number of tokens in a chunk, which rules out pairs; 0 chooses the best.

    Returns:
        The schedule. In a step, and for "separable", a thread takes whole heads; the kernels use at most one per head.
    """
    b, g, n, m, d, e, r = sizes
    sum_products, pair_products = PRODUCTS[operation]
    by_sums = sum_products * (g * n + m) / 2 * r * (e + 1)  # of one head
    by_pairs = pair_products * (float(g) * n * m / (2 if is_causal else 1)) * (d + e + 1) / 2
    tokens = min(chunk or (SHORT_CHUNK if r <= LONG_CHUNK_FEATURES else LONG_CHUNK), max(n, m))
    if operation == "step" or native_map == "separable":
        return Schedule(int(min(threads, 1 + b * by_sums / MIN_WORK_PER_THREAD)), tokens, False, 1, False)
    pairs = native_map == "taylor" and not has_sums and not chunk and by_pairs < by_sums
    work = by_pairs if pairs else by_sums
    threads = max(1, min(threads, int(min(b * work / MIN_WORK_PER_THREAD, MAX_THREADS))))
    is_shared = b % threads != 0 and b < 4 * threads  # Else each thread has about the same number of whole heads.
    if pairs:
        return Schedule(threads, tokens, True, min(threads, -(-n // PAIR_BLOCK)) if is_shared else 1, is_shared)
    parts = max(1, min(MAX_PARTS, r // MIN_PART_FEATURES, int(min(work / MIN_WORK_PER_THREAD, MAX_PARTS))))
    shares = 2 if operation == "backward" else parts  # The backward pass of a head is two passes.
    is_shared = is_shared and shares > 1
    return Schedule(min(threads, b * (shares if is_shared else 1)), tokens, False, parts, is_shared)
