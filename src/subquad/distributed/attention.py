"""Attention over several processes, each of which holds a contiguous slice of the sequence.

    method               what travels                                         volume per rank
    feature methods      sums of keys                                         constant
    Window               the keys next to a slice's border, and the sinks     constant
    Exact                keys and values, around a ring                       grows with the length
    Multipole            keys and values, gathered                            grows with the length

Axes: (..., heads, length, width). n queries and m keys of this rank, d width, e value width.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from subquad._calls.call import Call
from subquad._calls.masks import NotServed
from subquad._calls.state import State, check_state
from subquad._engines import engine_of, run
from subquad.attention import quiet_attention, resolve, warn_about
from subquad.distributed import exact, features, multipole, window
from subquad.distributed.peers import Peers, agree
from subquad.distributed.segments import Runs, number_runs
from subquad.methods import AnyMethod, BlockSparse, Exact, Hybrid, MethodLike, Window
from subquad.planning.auto import Auto


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    method: MethodLike = Exact(),  # noqa: B008  (a frozen value)
    key_padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    state: State | None = None,
    return_state: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Tensor | tuple[Tensor, State]:
    """Compute `subquad.attention` over a sequence whose tokens are split over the ranks of a group.

    Rank 0 holds the first tokens, rank 1 those that follow, and so on. Slices may differ in length, and may be empty.
    All ranks must make the same call, forward and backward, with their own tensors; the results equal those of one
    process up to rounding, and with one rank to the bit.

    Args:
        query: (..., heads, n, d), the queries of this rank.
        key: (..., key heads, m, d), the keys of this rank.
        value: (..., key heads, m, e).
        attn_mask: A mask of this rank's keys, with a query dimension of 1; True = attend. With `enable_gqa`, either all
            ranks have one for each query head, or none has.
        dropout_p: Must be 0.
        is_causal: A query sees the keys of earlier ranks, and its own rank's keys up to its position: n = m.
        scale: Factor of the logits, 1/sqrt(d) by default.
        enable_gqa: Let several query heads share a key head.
        method: A method, an object with the `FeatureMap` protocol, or a name, as for `subquad.attention`, except `Auto`
            and `BlockSparse`, which need the whole sequence.
        key_padding_mask: (..., m) or (..., key heads, m), True = attend.
        segment_ids: (..., n), integers, with n = m; segments may cross ranks.
        state: Of an earlier call over the same group, whose keys precede those of all ranks; feature methods only.
        return_state: Also return the state of the keys of all ranks, the same on every rank; feature methods only.
        group: The ranks that share the sequence; all by default.

    Returns:
        (..., heads, n, e), the output of this rank's queries; with `return_state`, a pair of that and the state.

    Raises:
        ValueError: On every rank, if an argument does not fit, or differs between ranks.
        ExchangeError: A rank has ended, or did not make this call within the timeout of the group.

    Example:
        >>> import torch, torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> q, k, v = torch.randn(3, 1, 8, 1000, 16)  # this rank's slice
        >>> attention(q, k, v, is_causal=True, method="taylor").shape
        torch.Size([1, 8, 1000, 16])
        >>> dist.destroy_process_group()
    """
    peers = Peers.of(group)
    options: dict[str, Any] = dict(
        attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa,
        key_padding_mask=key_padding_mask, segment_ids=segment_ids, state=state, return_state=return_state,
    )  # fmt: skip
    if peers.size == 1:
        found = resolve(method)
        warn_about(found, stacklevel=2)
        alone: Tensor | tuple[Tensor, State] = quiet_attention(query, key, value, method=found, **options)
        return alone
    output, new_state = attend(method, query, key, value, peers, **options)
    if not return_state:
        return output
    assert new_state is not None
    return output, new_state


def attend(
    method: MethodLike, query: Tensor, key: Tensor, value: Tensor, peers: Peers, **options: Any
) -> tuple[Tensor, State | None]:
    """Return the output of this rank, and the state if wanted."""
    given, call, named, problem, facts = None, None, None, None, {"method": method}
    try:
        facts["method"] = named = _divisible(resolve(method))
        given = Call.of(query, key, value, **options)
        _check(named, given)
        call = given.factored()
        facts |= _facts(given, call)
    except Exception as error:  # Whatever is wrong on this rank, the others must not wait for it.
        problem = error
    peers = agree(peers, facts, 0 if call is None else call.layout.keys, problem)
    assert given is not None and call is not None and named is not None
    warn_about(named, stacklevel=3)
    if call.layout.rows * call.layout.group == 0:  # no heads: nothing to compute, and nothing to exchange
        output, state, _ = run(named, call)
        return output, state
    runs = None if options["segment_ids"] is None else number_runs(given, options["segment_ids"], peers)
    if runs is not None and call.layout.rows != given.layout.rows:  # a copy of each key head for every query head
        runs = Runs(*(x.repeat_interleave(given.layout.group, 0) for x in runs))
    name = engine_of(named)
    engines = {"exact": exact, "sparse": window, "multipole": multipole}
    with torch.autocast(call.layout.device.type, enabled=False):  # The call knows its dtype.
        if name == "features":
            return features.attend(named, call, peers, runs)
        return engines[name].attend(named, call, peers, runs), None


def _divisible(method: AnyMethod | Auto) -> AnyMethod:
    """Return the method; raise for one that has to see the whole sequence."""
    if isinstance(method, Auto | BlockSparse):
        raise NotServed(
            f"method: {type(method).__name__} needs the whole sequence, which no rank holds; use a feature method, "
            "Window, Multipole or Exact"
        )
    if isinstance(method, Hybrid):
        raise NotServed(f"method: {method.label} is not supported on several ranks; use Window or a feature method")
    return method


def _check(method: AnyMethod, call: Call) -> None:
    """Raise for a call that cannot be computed on several ranks."""
    if call.dropout_p != 0:
        raise NotServed(f"dropout_p: expected 0 on several ranks, got {call.dropout_p}; use dropout on the output")
    if call.mask_kind == "pairs":
        raise NotServed(
            "attn_mask: expected a mask of this rank's keys, with a query dimension of 1; use is_causal for causality, "
            "key_padding_mask for padding and segment_ids for packed sequences"
        )
    layout = call.layout
    if call.is_causal and layout.queries != layout.keys:
        raise ValueError(
            f"is_causal: expected as many queries as keys on each rank, got {layout.queries} and {layout.keys}"
        )
    engine = engine_of(method)
    if engine == "sparse" and cast(Window, method).size is not None and layout.queries != layout.keys:
        raise NotServed(
            f"key: a window compares positions; expected as many keys as queries on each rank, got {layout.keys} and "
            f'{layout.queries}. For cross-attention, use method="exact".'
        )
    if engine != "features":
        if call.is_stateful:
            raise NotServed(f"state: on several ranks only feature methods have a state, {method} has none")
    elif call.state is not None:
        check_state(call.state, method, layout, call.segments is not None, call.key.dtype, call.logit_scale)


def _facts(given: Call, call: Call) -> dict[str, Any]:
    """Return what must be equal on all ranks, of a call as it was given and as it is computed."""
    layout = given.layout
    heads = layout.key_heads * layout.group
    sums = None if call.state is None else call.state.sums
    named = {"query": call.query, "key": call.key, "value": call.value, "state": sums}
    # Every tensor by itself: its gradient may be exchanged apart from the others.
    with_grad = [name for name, x in named.items() if x is not None and x.requires_grad] * torch.is_grad_enabled()
    return {
        "query": f"{call.query.dtype}, batch {layout.batch}, {heads} heads, width {layout.width}",
        "key": f"{call.key.dtype}, {layout.key_heads} heads",
        "value": f"{call.value.dtype}, width {layout.value_width}",
        "autocast": call.dtype if call.is_autocast else None,
        "attn_mask": "one for each key head" if call.layout.group == layout.group else "one for each query head",
        "is_causal": call.is_causal,
        "scale": call.logit_scale,
        "segment_ids": call.segments is not None,
        "state": None if call.state is None else f"{call.state.length} keys",
        "return_state": call.return_state,
        "requires_grad": ", ".join(with_grad) or None,
    }
