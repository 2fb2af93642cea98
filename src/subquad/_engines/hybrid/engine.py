"""The engine of Hybrid: a window by the sparse engine, older keys by the feature engine, joined row by row.

    out = (exp(l) out_near + g z out_far) / (exp(l) + g z),    l = log sum_near exp(x),    z = sum_far phi(q).phi(k)

A state holds the last w keys, and the sums of all earlier ones: with each new key, one leaves the window for the sums.

Axes: b batch and key heads, g query heads per key head, n queries, m keys, d width, e value width, w near keys.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from subquad._calls.call import Call
from subquad._calls.masks import NotServed, is_true
from subquad._calls.state import State
from subquad._calls.sums import NEVER, finite
from subquad._engines.finite import inverse, widen
from subquad._engines.hybrid.far import Far, far_part
from subquad._engines.result import Result
from subquad._engines.sparse import engine as sparse
from subquad.methods.hybrid import Hybrid


def run(method: Hybrid, call: Call, form: Any = None, chunk: int | None = None) -> Result:
    """Compute the call; the form "dense" or "chunked" asks for torch's operations."""
    call = call.factored()
    _check(method, call)
    wide: AbstractContextManager[Any] = nullcontext()
    if call.is_autocast:
        wide = torch.autocast(call.layout.device.type, enabled=False)
    with wide:
        far = far_part(method, call, form, chunk)
        # A key that leaves the window with the next token is still needed for the sums.
        keeper = replace(method.window, size=method.window.reach + 1)
        near = sparse.meet(method.window, call, form in ("dense", "chunked"), keeper)
        output = near.output if far is None else _joined(near.output, near.level, far, _log_factor(method, call))
        state = None if near.state is None else _state_after(method, call, near.state, far)
        return Result(call.unfolded(output), state, near.form)


def _check(method: Hybrid, call: Call) -> None:
    """Raise for a call that is not causal, has segments, or whose queries are not the last keys."""
    n, m = call.layout.queries, call.layout.keys
    if not call.is_causal:
        raise NotServed(f"is_causal: far keys of {method.label} are earlier ones; expected True, got False")
    if call.segments is not None:
        raise NotServed(
            f"segment_ids: {method.label} does not support packed sequences; expected None, and a row of the batch for "
            "each sequence. Window and feature methods alone support them"
        )
    if n > m or (call.state is None and n not in (0, m)):
        expected = f"{m} queries, one per key" if call.state is None else f"at most {m} queries, one per new key"
        raise NotServed(f"query: {method.label} compares positions; expected {expected}, got {n}")


def _log_factor(method: Hybrid, call: Call) -> Tensor | None:
    """Return (b, g, 1): the logarithm of the factor of far weights, or None."""
    layout, factor = call.layout, method.log_factor
    if factor is None:
        return None
    heads = layout.key_heads * layout.group
    if len(factor) != heads:
        raise ValueError(f"method: {method.label} has factors for {len(factor)} query heads, got {heads} heads")
    copies = layout.rows // max(1, layout.key_heads)
    by_group: Tensor = factor.unflatten(0, (layout.key_heads, layout.group))
    return by_group.repeat(copies, 1)[..., None]


def _joined(near: Tensor, level: Tensor, far: Far, log_factor: Tensor | None) -> Tensor:
    """Return (b, g, n, e): both parts, weighted by the sums of their weights.

    Args:
        near: (b, g, n, e).
        level: (b, g, n), the logarithm of the sum of its weights; +inf in rows that see nothing.
        far: The far part of the last rows.
        log_factor: (b, g, 1), or None.
    """
    alone = near.shape[2] - far.total.shape[2]  # first rows, which see no far key
    first, near, level = near[:, :, :alone], widen(near[:, :, alone:]), level[:, :, alone:]
    sums, z = far.total[..., :-1], far.total[..., -1]
    # NaN fills whole rows. It goes around the arithmetic, in which its gradient would be NaN in all keys of a row.
    poisoned = z.isnan() | near[..., :1].isnan().any(-1)
    has_poison = is_true(poisoned.any()) is not False
    if has_poison:
        near, sums = (torch.where(poisoned[..., None], 0.0, x) for x in (near, sums))
        z = torch.where(poisoned, 0.0, z)
    near_share, far_share = _shares(level, z, far.log_scale, log_factor)
    output = torch.addcmul(near * near_share[..., None], sums, far_share[..., None])
    output = output.masked_fill(poisoned[..., None], float("nan")) if has_poison else output
    return torch.cat([first, output], 2) if alone else output


def _shares(level: Tensor, z: Tensor, log_scale: Tensor | None, log_factor: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the factors of the near output and of the far sums in the joint result; both 0 if nothing is seen.

    Args:
        level: (b, g, n), the logarithm of the sum of near weights; +inf in rows that see nothing.
        z: (b, g, n), the sum of far weights.
        log_scale: (b, g, n), z is to be multiplied by its exp(); or None.
        log_factor: (b, g, 1), the same.
    """
    is_empty = z == 0
    z = torch.where(is_empty, 1.0, z)
    far_level = z.abs().log()
    for part in (log_scale, log_factor):
        far_level = far_level if part is None else far_level + part
    level = level.masked_fill(level == torch.inf, NEVER)
    far_level = far_level.masked_fill(is_empty, NEVER)
    top = finite(torch.maximum(level, far_level).detach())
    near_weight, far_weight = (level - top).exp(), (far_level - top).exp()
    share = inverse(near_weight + far_weight * z.sign())
    return near_weight * share, far_weight * share / z.abs()


def _state_after(method: Hybrid, call: Call, near: State, far: Far | None) -> State:
    """Return the state of both parts: the keys of the window, and the sums of all earlier keys."""
    sums = call.state if far is None else far.state
    if sums is None or sums.sums is None:
        return replace(near, method=method)
    return replace(near, method=method, sums=sums.sums, poison=sums.poison, log_scale=sums.log_scale)
