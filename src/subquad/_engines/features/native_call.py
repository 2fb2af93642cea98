"""One call of the kernels: its tensors, its numbers, and the C structure made of them.

Axes: q (b, g, n, d), k (b, m, d), v (b, m, e). Sums are (b, e + 1, r) here: features are contiguous.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from subquad._engines.features.schedule import KernelSizes, Operation, schedule
from subquad.native.calls import FEATURE_CALL, MAPS, address, check_result, strided
from subquad.native.loader import kernels

MAP_NAMES = list(MAPS)
NO_GRADIENTS = (0,) * 11


class Operands(NamedTuple):
    """The tensors of a call."""

    q: Tensor
    k: Tensor
    v: Tensor
    keep: Tensor | None = None  # (b, m), True = may be seen
    table: Tensor | None = None
    turned: Tensor | None = None  # projections (d + 1, rows), the constants last; each row padded to whole vectors
    before: Tensor | None = None  # (b, e + 1, r)
    before_poison: Tensor | None = None  # (b,)
    before_scale: Tensor | None = None  # (b, 1)
    coordinates: Tensor | None = None  # (h, 5, d); see `Coordinates.packed`

    def contiguous(self) -> "Operands":
        """Return the same tensors, all but the first three contiguous."""
        return Operands(*self[:3], *(None if x is None else x.contiguous() for x in self[3:]))


class Numbers(NamedTuple):
    """The other arguments of a call."""

    map: int
    degree: int
    features: int
    query_scale: float
    key_scale: float
    is_causal: bool
    is_normalized: bool
    chunk: int = 0  # the largest number of tokens in a chunk; 0: the best
    feature_scale: float = 0.0  # of random features; the kernels read its effect from `turned`
    is_tilted: bool = False  # whether the coordinates give keys a log-scale


class Results(NamedTuple):
    """Addresses of what a kernel writes, 0 if it does not. The backward pass reads the output and the normalizer."""

    after: int = 0
    after_poison: int = 0
    after_scale: int = 0
    output: int = 0
    normalizer: int = 0
    poison: int = 0


def packed_call(
    operation: Operation, operands: Operands, numbers: Numbers, results: Results,
    gradients: tuple[int, ...] = NO_GRADIENTS,
) -> bytes:  # fmt: skip
    """Return the call structure. The operands are contiguous, and must stay alive until the kernel has returned.

    Args:
        operation: The operation to run.
        operands: The tensors.
        numbers: The other arguments.
        results: Where the results are.
        gradients: The fields of the output's gradient, and the addresses of the gradients of q, k and v, of the sums
            of all keys, and of the sums before them.
    """
    q, k, v, *others = operands
    b, g, n, d = q.shape
    _, m, e = v.shape
    sizes = KernelSizes(b, g, n, m, d, e, numbers.features)
    has_sums = operands.before is not None or results.after != 0 or gradients[-2] != 0
    plan = schedule(operation, MAP_NAMES[numbers.map], sizes, numbers.is_causal, has_sums, torch.get_num_threads(),
                    numbers.chunk)  # fmt: skip
    return FEATURE_CALL.pack(
        numbers.map, numbers.degree, q.dtype == torch.float64, plan.threads, numbers.is_causal, numbers.is_normalized,
        plan.chunk, plan.pairs, plan.parts, plan.is_shared, b, g, n, m, d, k.shape[2], e, numbers.features,
        0 if operands.coordinates is None else len(operands.coordinates), numbers.is_tilted, numbers.query_scale,
        numbers.key_scale, *strided(q), *strided(k), *strided(v), *map(address, others), *results, *gradients,
    )  # fmt: skip


def execute(
    operation: Operation, operands: Operands, numbers: Numbers, results: Results,
    gradients: tuple[int, ...] = NO_GRADIENTS,
) -> int:  # fmt: skip
    """Run a kernel and return its result code; arguments as for `packed_call`, but operands need not be contiguous."""
    operands = operands.contiguous()  # copies that live until the kernel has returned
    code = getattr(kernels(), operation)(packed_call(operation, operands, numbers, results, gradients))
    check_result(code)
    return int(code)
