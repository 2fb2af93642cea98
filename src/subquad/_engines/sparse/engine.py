"""The engine of sparse attention: from the call to the pattern of its pairs, and to the kernels.

    keys of the state and of the call -> which of them each query sees -> exact softmax over those

Axes: b batch and key heads, g query heads per key head, n queries, m keys, d width, e value width.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad._calls.call import Call
from subquad._calls.masks import NotServed
from subquad._calls.state import State
from subquad._engines.finite import widen
from subquad._engines.result import Result
from subquad._engines.sparse.at_once import attend_at_once
from subquad._engines.sparse.bounds import Places, bounds_of
from subquad._engines.sparse.by_torch import attend_by_torch
from subquad._engines.sparse.fused import attend_natively
from subquad._engines.sparse.memory import Tokens, folded, grown, held, state_after
from subquad._engines.sparse.native_call import is_served
from subquad._engines.sparse.pattern import Pattern
from subquad._torch_internals import has_numbers, in_trace
from subquad.methods.block_sparse import BlockSparse
from subquad.methods.sparse import SparseMethod
from subquad.methods.window import Window


class Met(NamedTuple):
    """What the queries of a call have met."""

    output: Tensor  # (b, g, n, e)
    level: Tensor  # (b, g, n): the logarithm of the sum of weights; +inf in rows that see nothing
    state: State | None
    form: str


def run(method: SparseMethod, call: Call, form: str | None = None) -> Result:
    """Compute the call; the form "dense" or "chunked" asks for torch's operations."""
    call = call.factored()
    check_lengths(method, call)
    wide: AbstractContextManager[Any] = nullcontext()
    if call.is_autocast:
        wide = torch.autocast(call.layout.device.type, enabled=False)
    with wide:
        met = meet(method, call, form in ("dense", "chunked"))
        return Result(call.unfolded(met.output), met.state, met.form)


def check_lengths(method: SparseMethod, call: Call) -> None:
    """Raise ValueError if queries have no place among the keys, or need keys that a state does not hold."""
    n, m = call.layout.queries, call.layout.keys
    if isinstance(method, BlockSparse):
        if call.is_stateful:
            raise ValueError("state: BlockSparse describes a whole sequence and has no state; expected none")
    elif isinstance(method, Window) and method.size is not None:
        if n != m and not call.is_causal and call.first_row is None:
            raise NotServed(
                f"key: a window on both sides compares positions; expected {n} keys, as many as queries, got {m}. For "
                'cross-attention, use method="exact".'
            )
        if call.state is not None and call.state.length and n > m:
            raise ValueError(f"query: with a state, expected at most {m} queries, one per new key, got {n}")


def meet(method: SparseMethod, call: Call, by_torch: bool, keeper: Window | None = None) -> Met:
    """Compute a checked call.

    Args:
        method: The method.
        call: The call, in which an attn_mask hides keys.
        by_torch: Whether to use torch's operations.
        keeper: The window whose keys a state keeps, if it is not the method.
    """
    q, k, v = call.folded()
    new, prefix, state = Tokens(k, v, call.keep()), None, call.state
    seen = tokens = new
    after = _grown(method, call, new)
    if after is not None:  # The new keys are in the room of the state, behind its own.
        tokens, front = held(after)
    elif state is not None and state.keys is not None:
        prefix, tail = folded(state, call.layout)
        seen = tail.followed_by(new)  # the tail and what follows it
        front = prefix.keys.shape[1]
        tokens = prefix.followed_by(seen) if front else seen
    else:
        front = 0
    pattern = _pattern(method, call, tokens, front)
    sinks = method.logits_of_sinks(
        call.layout.key_heads * call.layout.group, torch.promote_types(q.dtype, torch.float32)
    )
    if sinks is not None:  # (b, g)
        copies = call.layout.rows // max(1, call.layout.key_heads)
        sinks = sinks.unflatten(0, (call.layout.key_heads, call.layout.group)).repeat(copies, 1)
    given = (q, tokens.keys, tokens.values)
    if not by_torch and is_served(*given, sinks):
        (output, level), used = attend_natively(*given, pattern, call.logit_scale, method.softcap, sinks), "fused"
    else:
        (output, level), used = _by_torch(method, call, given, pattern, sinks), "dense"
    if call.return_state and after is None:
        assert isinstance(method, Window)
        after = _next_state(keeper or method, call, prefix, seen)
    return Met(output, level, after, used)


def _grown(method: SparseMethod, call: Call, new: Tokens) -> State | None:
    """Return the state with the new keys in its room; None if that cannot be done in place."""
    state = call.state
    if state is None or not call.return_state or call.segments is not None or torch.compiler.is_compiling():
        return None
    # A backward pass must find the keys as they are now.
    parts = (call.query, new.keys, new.values, *state._tensors().values())
    has_learned_sinks = method.sink_logits is not None and method.sink_logits.requires_grad
    if torch.is_grad_enabled() and (has_learned_sinks or any(x.requires_grad for x in parts)):
        return None
    assert isinstance(method, Window)
    # As long as there are fewer than `sinks` visible keys, new ones may become sinks.
    has_sinks = state.length >= method.sinks and (state.keep is None or method.sinks == 0)
    return grown(state, call.layout, new) if has_sinks else None


def _by_torch(
    method: SparseMethod, call: Call, given: tuple[Tensor, Tensor, Tensor], pattern: Pattern, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    q, k, v = (widen(x) for x in given)
    q = q * call.logit_scale
    if torch.compiler.is_compiling() or in_trace() or not has_numbers(q):
        return attend_at_once(q, k, v, pattern, method.softcap, sinks)
    return attend_by_torch(q, k, v, pattern, method.softcap, sinks)


def _pattern(method: SparseMethod, call: Call, tokens: Tokens, prefix: int) -> Pattern:
    """Return the pairs that are seen."""
    layout, keys = call.layout, tokens.keys.shape[1]
    before = keys - layout.keys
    first = before + (layout.keys - layout.queries if call.state is not None and call.is_causal else 0)
    first += call.first_row or 0
    segments = call.segments
    if segments is not None and before:
        segments = torch.cat([segments.new_zeros(len(segments), before), segments], 1)
    if isinstance(method, BlockSparse):
        query_block, key_block = method.blocks(layout.key_heads * layout.group, layout.queries, layout.keys)
        places = Places(layout.queries, keys, first, call.is_causal, 0, tokens.keep, segments)
        bounds = bounds_of(Window(None), places, layout.device)
        blocks = method.layout.to(layout.device)
        return Pattern(bounds, tokens.keep, blocks, query_block, key_block, layout.key_heads)
    assert isinstance(method, Window)
    places = Places(layout.queries, keys, first, call.is_causal, prefix, tokens.keep, segments)
    found = Pattern(bounds_of(method, places, layout.device), tokens.keep, key_heads=layout.key_heads)
    if method.size is None or call.state is not None or call.segments is not None or call.first_row is not None:
        return found
    return found._replace(reach=method.size, sinks=method.sinks, is_causal=call.is_causal)


def _next_state(method: Window, call: Call, prefix: Tokens | None, seen: Tokens) -> State:
    """Return the state after the call, in buffers of its own."""
    segments = call.segments
    if segments is not None and segments.shape[1]:  # Keys of earlier segments are hidden for good.
        own = segments == segments[:, -1:]
        old = (segments[:, -1:] == 0).expand(-1, seen.keys.shape[1] - own.shape[1])
        seen = Tokens(seen.keys, seen.values, seen.shown() & torch.cat([old, own], 1))
        if prefix is not None:
            prefix = Tokens(prefix.keys, prefix.values, prefix.shown() & (segments[:, -1:] == 0))
    return state_after(method, call, prefix, seen)
