"""Queries meet keys and the moments of blocks: by the native kernel, or by its torch twin below.

Axes: b batch and key heads, g query heads per key head, n queries, m keys, d width, e value width, u units (blocks or
groups), r directions, c keys that are read one by one.
"""

import ctypes
from math import log, sqrt
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad import native
from subquad._engines.finite import NEVER
from subquad._engines.multipole.memory import Memory
from subquad._engines.multipole.moments import Units
from subquad._engines.recompute import Recomputed
from subquad._torch_internals import is_transformed
from subquad.methods import multipole as settings
from subquad.methods.multipole import Multipole, group_size
from subquad.native.calls import LEVELS, PADDING, Level, MultipoleCall, check_result
from subquad.native.loader import FOUND

TILE_ROWS = 64  # queries whose weights are made at once


def is_served(q: Tensor, k: Tensor, v: Tensor, needs_torch: bool = False) -> bool:
    """Return whether the kernel computes this call: q (b, g, n, d), k (b, m, d), v (b, m, e), wide."""
    return (
        not needs_torch
        and native.available()
        and all(x.device.type == "cpu" and x.dtype == q.dtype for x in (q, k, v))
        and q.dtype in (torch.float32, torch.float64)
        and q.numel() > 0
        and k.numel() > 0
        and v.shape[-1] % PADDING == 0
        and not torch.compiler.is_compiling()
        and not is_transformed(q, k, v)
    )


def meet(method: Multipole, q: Tensor, memory: Memory, sees: Tensor, far: Tensor, by_torch: bool = False) -> Tensor:
    """Return (b, g, n, e): scaled queries that see the first `sees` (b, n) keys, the first `far` (b, n) blocks as far.

    Args:
        method: The method.
        q: (b, g, n, d), scaled.
        memory: Keys (b, m, d), values (b, m, e) and the moments of blocks and groups.
        sees: How many keys each query sees.
        far: How many blocks are far for it.
        by_torch: Use torch's operations also where the kernel would serve.
    """
    k, v, levels = memory.keys, memory.values, memory.levels
    if q.numel() == 0 or k.shape[1] == 0:  # no query, or nothing to see
        nothing = q[..., :0].sum(-1, keepdim=True) + v[:, :0].sum((1, 2))[:, None, None, None]
        return nothing.expand(*q.shape[:3], v.shape[-1])
    inputs = [q, k, v, *(x for level in levels for x in level[1:])]
    is_learned = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    if is_served(q, k, v, is_learned or by_torch):
        return _meet_natively(method, q, memory, sees, far)
    sizes = [level.size for level in levels]

    def body(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        *moments, sees, far = rest
        own = [Units(size, *moments[3 * i : 3 * i + 3]) for i, size in enumerate(sizes)]
        return (_tile(method, q, k, v, own, sees, far),)

    outputs = []
    for first in range(0, q.shape[2], TILE_ROWS):
        rows = slice(first, first + TILE_ROWS)
        tensors = (q[:, :, rows], *inputs[1:], sees[:, rows], far[:, rows])
        if is_learned:
            outputs.append(Recomputed.apply(body, len(inputs), *tensors)[0])  # type: ignore[no-untyped-call]
        else:
            outputs.append(body(*tensors)[0])
    return torch.cat(outputs, 2)


def _meet_natively(method: Multipole, q: Tensor, memory: Memory, sees: Tensor, far: Tensor) -> Tensor:
    """Call the kernel. Heads of keys and values may lie apart; their rows are contiguous."""
    k, v, levels = memory.keys, memory.values, memory.levels
    b, g, n, d = q.shape
    m, e = v.shape[1:]
    q, sees, far = q.contiguous(), sees.contiguous(), far.contiguous()
    k, v = (x if x[0].is_contiguous() else x.contiguous() for x in (k, v))
    output = q.new_empty(b, g, n, e)

    def level(units: Units) -> Level:
        assert all(x.is_contiguous() for x in units[1:])
        count = max(0, m - method.sinks) // (units.size * method.block)
        return Level(units.size, units.rank, count, units.room, *(x.data_ptr() for x in units[1:]))

    call = MultipoleCall(
        wide=q.dtype == torch.float64, threads=torch.get_num_threads(), batch=b, group=g, queries=n, keys=m, width=d,
        values=e, block=method.block, sinks=method.sinks,
        top=min(method.top, max(0, m - method.sinks) // method.block), opened=settings.OPENED_GROUPS,
        grouped_from=settings.GROUPED_FROM_BLOCKS, least_group=settings.MIN_GROUP_BLOCKS, groups_count=len(levels) - 1,
        k_batch=k.stride(0), v_batch=v.stride(0), widest=settings.MAX_VARIANCE, q=q.data_ptr(), k=k.data_ptr(),
        v=v.data_ptr(), sees=sees.data_ptr(), far=far.data_ptr(), blocks=level(levels[0]),
        groups=(Level * LEVELS)(*map(level, levels[1:])), output=output.data_ptr(),
    )  # fmt: skip
    assert FOUND.library is not None
    check_result(FOUND.library.multipole(ctypes.byref(call)))
    return output


class Far(NamedTuple):
    """Units that rows see by their moments."""

    log_weights: Tensor  # (b, g, n, u)
    along: Tensor  # (b, g, n, r, u): coordinates of the queries
    values: Tensor  # (b, 1 + r, u, e)


def _tile(method: Multipole, q: Tensor, k: Tensor, v: Tensor, levels: list[Units], sees: Tensor, far: Tensor) -> Tensor:
    """Compute `meet` for a few queries with torch's operations: the slow twin of native/src/multipole.h."""
    blocks, *groups = levels
    most = int(far.max())
    candidate, parts = _open_groups(method, q, groups, far, most)
    mean, along, variance = _described(q, blocks, most)
    chosen = _best(_likely_most(mean, variance, method.block), candidate, method.top)
    parts.append(Far(_log_weights(mean, variance, method.block, candidate & ~chosen), along, blocks.values))
    tokens, seen = _read_keys(method, chosen, sees, far, k.shape[1])
    read_k, read_v = (x.gather(1, tokens[..., None].expand(-1, -1, x.shape[-1])) for x in (k, v))
    pairs = torch.where(seen, torch.einsum("bgnd,bcd->bgnc", q, read_k), NEVER)
    return _combined(pairs, read_v, parts)


def _open_groups(method: Multipole, q: Tensor, groups: list[Units], far: Tensor, most: int) -> tuple[Tensor, list[Far]]:
    """Return the blocks (b, g, n, u) that each row looks at, and the groups that it sees by their moments."""
    b, g, n, _ = q.shape
    place = torch.arange(most, device=q.device)
    candidate = (place < far[..., None])[:, None].expand(-1, g, -1, -1)  # (b, g, n, u)
    parts: list[Far] = []
    group = torch.tensor([[group_size(x) for x in row] for row in far.tolist()], device=q.device).reshape(b, n)
    for level in groups:
        count = most // level.size
        if count == 0 or not bool((group == level.size).any()):
            continue
        mine = group == level.size
        whole = torch.where(mine, far // level.size, 0)  # (b, n)
        mean, along, variance = _described(q, level, count)
        there = (torch.arange(count, device=q.device) < whole[..., None])[:, None].expand(-1, g, -1, -1)
        keys = level.size * method.block
        is_open = _best(_likely_most(mean, variance, keys), there, settings.OPENED_GROUPS)
        parts.append(Far(_log_weights(mean, variance, keys, there & ~is_open), along, level.values))
        in_open = F.pad(is_open.repeat_interleave(level.size, -1), (0, most - count * level.size))
        beyond = place >= (whole * level.size)[..., None]
        candidate = torch.where(mine[:, None, :, None], candidate & (in_open | beyond[:, None]), candidate)
    return candidate, parts


def _read_keys(method: Multipole, chosen: Tensor, sees: Tensor, far: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """Return the keys (b, c) that are read one by one, and which row (b, g, n, c) sees each of them.

    They are the first keys, the near ones, and those of the blocks that any of the rows chose.
    """
    b, g, n, _ = chosen.shape
    device = chosen.device
    begin = method.sinks + far * method.block
    low = begin.amin(1, keepdim=True)  # (b, 1)
    near = low + torch.arange(max(0, int((sees - low).max())), device=device)  # (b, c)
    union = chosen.any(2).any(1)  # (b, u)
    width = int(union.sum(1).max()) if union.numel() else 0
    picked = union.int().argsort(dim=1, descending=True, stable=True)[:, :width]
    of_blocks = method.sinks + (picked[..., None] * method.block + torch.arange(method.block, device=device)).flatten(1)
    first = torch.arange(min(method.sinks, keys), device=device).expand(b, -1)
    tokens = torch.cat([first, near.clamp(max=max(0, keys - 1)), of_blocks], 1)
    seen = torch.cat([
        (first[:, None] < sees[..., None])[:, None].expand(-1, g, -1, -1),
        ((near[:, None] >= begin[..., None]) & (near[:, None] < sees[..., None]))[:, None].expand(-1, g, -1, -1),
        chosen.gather(-1, picked[:, None, None].expand(-1, g, n, -1)).repeat_interleave(method.block, -1),
    ], -1)  # fmt: skip
    return tokens, seen


def _combined(pairs: Tensor, read_v: Tensor, parts: list[Far]) -> Tensor:
    """Return (b, g, n, e) of logits (b, g, n, c), their values (b, c, e), and the units seen by their moments."""
    top = torch.cat([x.detach() for x in (pairs, *(part.log_weights for part in parts))], -1)
    top = F.pad(top, (1, 0), value=NEVER).amax(-1, keepdim=True)
    top = torch.where(top == NEVER, 0.0, top)
    weights = (pairs - top).exp()
    total, output = weights.sum(-1, keepdim=True), torch.einsum("bgnc,bce->bgne", weights, read_v)
    for log_weights, along, means in parts:
        weights, count = (log_weights - top).exp(), log_weights.shape[-1]
        total = total + weights.sum(-1, keepdim=True)
        output = output + torch.einsum("bgnu,bue->bgne", weights, means[:, 0, :count])
        output = output + torch.einsum("bgnu,bgnru,brue->bgne", weights, along, means[:, 1:, :count])
    empty = total == 0
    return torch.where(empty, 0.0, output / torch.where(empty, 1.0, total))


def _described(q: Tensor, units: Units, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return means (b, g, n, u), coordinates (b, g, n, r, u) and variances (b, g, n, u) of the first units' logits."""
    keys, rank = units.keys[..., :count], units.rank
    mean = torch.einsum("bgnd,bdu->bgnu", q, keys[:, 0])
    along = torch.einsum("bgnd,brdu->bgnru", q, keys[:, 1:])
    rows, columns = torch.triu_indices(rank, rank, device=q.device)
    variance = (along[..., rows, :] * along[..., columns, :] * units.spread[:, None, None, :, :count]).sum(-2)
    return mean, along, variance.clamp(min=0.0)


def _likely_most(mean: Tensor, variance: Tensor, keys: int) -> Tensor:
    """Return the likely maximum of `keys` Gaussian logits."""
    return mean.detach() + sqrt(2 * log(keys)) * variance.detach().sqrt()


def _log_weights(mean: Tensor, variance: Tensor, keys: int, seen: Tensor) -> Tensor:
    return torch.where(seen, mean + variance.clamp(max=settings.MAX_VARIANCE) / 2 + log(keys), NEVER)


def _best(scores: Tensor, candidate: Tensor, count: int) -> Tensor:
    """Return (b, g, n, u): the candidates with the highest scores, ties going to the first."""
    order = torch.where(candidate, scores, NEVER).sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return torch.zeros_like(candidate).scatter(-1, order, True) & candidate
