"""The fused form: linear or chunked attention in one native kernel, and one token after a state.

Axes: b batch and key heads, g query heads per key head, n queries, m keys, d width, e value width, r features.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad._calls.sums import Sums
from subquad._engines.features import operators  # noqa: F401  (registers the torch operators)
from subquad._engines.features.kernel import FeatureKernel, Kernel
from subquad._engines.features.native_call import Numbers, Operands, Results, execute
from subquad._engines.features.sums import Tokens
from subquad._torch_internals import has_numbers, is_recorded
from subquad.methods.method import FeatureMethod
from subquad.methods.tables import constant
from subquad.native.calls import MAPS, POISONED, address, padded

PLAIN_TYPES = (Tensor, nn.Parameter)


def fused(
    method: FeatureMethod, kernel: FeatureKernel, tokens: Tokens, before: Sums | None, is_causal: bool,
    want_sums: bool, chunk: int = 0, coordinates: Tensor | None = None,
) -> tuple[Tensor, Sums | None]:  # fmt: skip
    """Return the output (b, g, n, e), and the sums of all keys if wanted.

    Args:
        method: The method.
        kernel: Its kernel.
        tokens: Queries, keys, values and padding.
        before: The sums of the keys before these.
        is_causal: Whether a query sees only the keys up to its own position.
        want_sums: Whether to return the sums.
        chunk: The largest number of tokens in a chunk; 0: the best.
        coordinates: `Coordinates.packed`, if the tokens are not in the coordinates of the method yet.
    """
    sums: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    if before is not None:
        sums = before.values.mT, before.poison, before.log_scale
    operands = Operands(*tokens[:4], kernel.table, turned(method, kernel.table), *sums, coordinates)
    numbers = numbers_of(method, kernel, is_causal, chunk, coordinates is not None)
    if not want_sums:
        output, _, poison = _forward(operands, numbers)
        return _poisoned(output, poison).to(tokens.q.dtype), None
    output, _, poison, values, all_poison, log_scale = torch.ops.subquad.forward(*operands, *numbers, True)
    output = _poisoned(output, _if_any(poison)).to(tokens.q.dtype)
    return output, Sums(values.mT, all_poison, log_scale if log_scale.numel() else None)


def fused_separable(kernel: Kernel, tokens: Tokens, chunk: int = 0) -> tuple[Tensor, Tensor | None]:
    """Return the causal output (b, g, n, e), and (b, g, n), True in the rows left to torch, if there are any.

    The kernel has no running maximum of exponents, so rows that see too large a key or value are computed by torch.
    """
    numbers = Numbers(MAPS["separable"], 0, tokens.q.shape[-1], *kernel.root_scale, True, True, chunk)
    output, done, poison = _forward(Operands(*tokens[:4]), numbers)
    return _poisoned(output, poison).to(tokens.q.dtype), None if bool(done.all()) else done == 0


def fused_step(
    method: FeatureMethod, kernel: FeatureKernel, tokens: Tokens, before: Sums, coordinates: Tensor | None = None
) -> tuple[Tensor, Sums]:
    """Return the output (b, g, 1, e) of one token and the new sums; `before` is not changed."""
    q, _, v, *_ = tokens
    sums = before.values.mT.contiguous()  # (b, e + 1, r), as the kernels leave them
    after, after_poison = torch.empty_like(sums), torch.empty_like(before.poison)
    after_scale = None if before.log_scale is None else torch.empty_like(before.log_scale)
    output = sums.new_empty(*q.shape[:3], v.shape[-1])
    normalizer, poison = sums.new_empty(2, *q.shape[:2]).unbind()
    operands = Operands(*tokens[:3], None, kernel.table, turned(method, kernel.table), sums, before.poison,
                        before.log_scale, coordinates)  # fmt: skip
    results = Results(*map(address, (after, after_poison, after_scale, output, normalizer, poison)))
    if execute("step", operands, numbers_of(method, kernel, True, 0, coordinates is not None), results) == POISONED:
        output += poison[..., None, None]
    return output.to(q.dtype), Sums(after.mT, after_poison, after_scale)


def numbers_of(
    method: FeatureMethod, kernel: FeatureKernel, is_causal: bool, chunk: int = 0, has_coordinates: bool = False
) -> Numbers:
    """Return a call's numbers."""
    name = method.native_map
    assert name is not None
    feature_scale = 0.0 if kernel.table is None else method.scale_at(kernel.table.shape[-1])
    return Numbers(MAPS[name], method.degree, kernel.size, *kernel.root_scale, is_causal, kernel.is_normalized, chunk,
                   feature_scale, has_coordinates and method.query_shift is not None)  # fmt: skip


def turned(method: FeatureMethod, table: Tensor | None) -> Tensor | None:
    """Return (d + 1, rows): the projections, and their constants; rows padded to whole vectors. None for other maps."""
    if table is None or method.is_weighted:
        return None
    is_drawn = getattr(method, "matrix", None) is None and not torch.compiler.is_compiling() and has_numbers(table)
    if is_drawn:  # Then it is made once: for one token it would take a third of the time.
        return _turned_draw(method, table.shape[-1], table.dtype, table.device)
    return _turned(method, table)


@constant
def _turned_draw(method: FeatureMethod, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    table = method.table(width, dtype, device)
    assert table is not None
    return _turned(method, table)


def _turned(method: FeatureMethod, table: Tensor) -> Tensor:
    stretch, constants = method.exponents(table)
    padding = padded(table.size(0)) - table.size(0)
    if constants is None:
        return F.pad(table.mT, (0, padding, 0, 1)).contiguous()
    return F.pad(torch.cat([stretch * table.mT, constants[None]]), (0, padding)).contiguous()


def _forward(operands: Operands, numbers: Numbers) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return output, normalizer and poison, None if there is none.

    Calls the kernel without the torch operator, which takes a third of a short call's time, where neither autograd nor
    a compiler or dispatch mode takes part.
    """
    q = operands.q
    learns = torch.is_grad_enabled()
    given = (*operands[:3], *(() if operands.before is None else (operands.before,)))
    is_plain = all(type(x) in PLAIN_TYPES and not (learns and x.requires_grad) for x in given)
    if not is_plain or torch.compiler.is_compiling() or is_recorded():
        output, normalizer, poison = torch.ops.subquad.forward(*operands, *numbers, False)
        return output, normalizer, _if_any(poison)
    b, g, n, _ = q.shape
    dtype = q.dtype if q.dtype == torch.float64 else torch.float32
    output = torch.empty((b, g, n, operands.v.shape[2]), dtype=dtype, device=q.device)
    rows = torch.empty((2, b, g, n), dtype=dtype, device=q.device)  # normalizer and poison
    start = rows.data_ptr()
    results = Results(0, 0, 0, output.data_ptr(), start, start + rows.stride(0) * dtype.itemsize)
    code = execute("forward", operands, numbers, results)
    return output, rows[0], rows[1] if code == POISONED else None


def _if_any(poison: Tensor) -> Tensor | None:
    """Return the poison, None if all is 0. A recorded call is recorded for other numbers too."""
    is_needed = torch.compiler.is_compiling() or is_recorded() or not has_numbers(poison) or bool(poison.sum() != 0)
    return poison if is_needed else None


def _poisoned(output: Tensor, poison: Tensor | None) -> Tensor:
    if poison is None:
        return output
    poison = poison[..., None]
    return torch.where(poison == 0, output, output + poison)  # The other rows keep their bits.
