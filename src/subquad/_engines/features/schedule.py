"""How the kernels execute a call: by sums or by pairs, in which chunks, on how many threads.

The kernels only execute; all their decisions are made here, so that cost and planner know them too. A schedule depends
only on sizes and the number of threads: equal calls give equal bits.
"""

from functools import lru_cache
from typing import Literal, NamedTuple

from subquad.native.calls import PADDING, PAIR_BLOCK

Operation = Literal["forward", "backward", "step"]

MIN_WORK_PER_THREAD = 2e6  # multiply-adds
MAX_THREADS = 1024
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
    parts: int  # of a head, shared out among threads


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
    by_sums = sum_products * b * (g * n + m) / 2 * r * (e + 1)
    by_pairs = pair_products * (float(b) * g * n * m / (2 if is_causal else 1)) * (d + e + 1) / 2
    tokens = min(chunk or (SHORT_CHUNK if r <= LONG_CHUNK_FEATURES else LONG_CHUNK), max(n, m))
    if operation == "step" or native_map == "separable":
        return Schedule(int(min(threads, 1 + by_sums / MIN_WORK_PER_THREAD)), tokens, False, 1)
    pairs = native_map == "taylor" and not has_sums and not chunk and by_pairs < by_sums
    work = by_pairs if pairs else by_sums
    threads = max(1, min(threads, int(min(work / MIN_WORK_PER_THREAD, MAX_THREADS))))
    is_even = b % threads == 0 or b >= 4 * threads  # Each thread has about the same number of whole heads.
    most_parts = -(-n // PAIR_BLOCK) if pairs else -(-r // PADDING)
    return Schedule(threads, tokens, pairs, 1 if is_even else min(threads, most_parts))
