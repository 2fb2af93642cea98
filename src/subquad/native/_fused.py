"""Which calls the kernels serve, and how the forms call them: the one place of that choice."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad.native import _library, _operators
from subquad.native._library import HYPERBOLIC, POSITIVE, SEPARABLE, TAYLOR, TYPES

DEGREES = range(1, 5)


class Recipe(NamedTuple):
    """A feature map that the kernels know."""

    map: int
    degree: int = 0


def knows(recipe: Recipe | None) -> bool:
    """Whether the kernels are there, and the map is one of theirs."""
    return _library.AVAILABLE and recipe is not None and (recipe.map != TAYLOR or recipe.degree in DEGREES)


def serves(recipe: Recipe | None, q: Tensor, k: Tensor, v: Tensor, runs: Tensor | None) -> bool:
    """q (b, g, n, d), k (b, m, d), v (b, m, e). Segments, other devices and torch.func are left to torch."""
    if not knows(recipe) or runs is not None or any(x.device.type != "cpu" for x in (q, k, v)):
        return False
    if any(x.dtype not in TYPES for x in (q, k, v)):
        return False
    # Some rows of this map are left to torch; which ones, depends on the numbers, and a record is for others too.
    if recipe == Recipe(SEPARABLE) and (torch.compiler.is_compiling() or _recorded()):
        return False
    wide = {torch.promote_types(x.dtype, torch.float32) for x in (q, k, v)}
    return len(wide) == 1 and 0 not in (*q.shape, *k.shape) and not transformed(q, k, v)


def transformed(*tensors: Tensor) -> bool:
    """Inside torch.func, or in forward mode."""
    if torch.compiler.is_compiling():
        return torch._C._are_functorch_transforms_active()
    dual = torch.autograd.forward_ad._current_level >= 0
    return torch._C._are_functorch_transforms_active() or (
        dual and any(torch.autograd.forward_ad.unpack_dual(x).tangent is not None for x in tensors)
    )


def turned(recipe: Recipe, table: Tensor | None) -> Tensor | None:
    """(d, rows) of the projections (rows, d), each row padded to whole vectors."""
    projected = recipe.map in (POSITIVE, HYPERBOLIC)
    return F.pad(table.mT, (0, -table.shape[0] % 16)).contiguous() if projected and table is not None else None


def _recorded() -> bool:
    """By torch.jit.trace, or by a dispatch mode."""
    return torch._C._get_tracing_state() is not None or torch._C._len_torch_dispatch_stack() > 0


def _forward(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> list[Tensor]:
    """By the operator; or by what it does, where nobody asks for a derivative or looks on: a third of a short call's
    time in Python is the operator's."""
    plain = all(type(x) in (Tensor, nn.Parameter) for x in (q, k, v))
    learned = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if learned or not plain or torch.compiler.is_compiling() or _recorded():
        found: list[Tensor] = torch.ops.subquad.forward(q, k, v, *others)
        return found
    return _operators.forward(q, k, v, *others)


def fused(
    recipe: Recipe, roots: tuple[float, float], table: Tensor | None, features: int, normalized: bool, q: Tensor,
    k: Tensor, v: Tensor, keep: Tensor | None, before: tuple[Tensor, Tensor, Tensor | None] | None, is_causal: bool,
    want_sums: bool, chunk: int,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor | None] | None]:  # fmt: skip
    """(b, g, n, e), and values (b, r, e + 1), poison (b,) and log-scale (b, 1) of the sums of all keys, if wanted."""
    sums = (None, None, None) if before is None else (before[0].mT, *before[1:])
    output, _, poison, *found = _forward(
        q, k, v, keep, table, turned(recipe, table), *sums, *recipe, features, *roots, is_causal, normalized, chunk,
        want_sums,
    )  # fmt: skip
    output = _poisoned(output, poison).to(q.dtype)
    if not want_sums:
        return output, None
    values, told, log_scale = found
    return output, (values.mT, told, log_scale if log_scale.numel() else None)


def separable(
    roots: tuple[float, float], q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor | None]:
    """Causal: (b, g, n, e), and (b, g, n), True in the rows that are left to torch, if there are any."""
    numbers = (*Recipe(SEPARABLE), q.shape[-1], *roots, True, True, chunk)
    output, done, poison = _forward(q, k, v, keep, *[None] * 5, *numbers, False)
    return _poisoned(output, poison).to(q.dtype), None if bool(done.all()) else done == 0


def _poisoned(output: Tensor, poison: Tensor) -> Tensor:
    # Nearly always there is none; but who records the call, records it for other numbers too.
    if torch.compiler.is_compiling() or _recorded() or bool(poison.sum() != 0):
        sick = poison[..., None]
        return torch.where(sick == 0, output, output + sick)  # Not a bit of the others changes.
    return output
