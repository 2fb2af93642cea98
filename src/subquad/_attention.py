"""The heart: attention, exact or in linear time, behind the signature of torch's own function.

    out_i = sum_j w_ij v_j / sum_j w_ij    over the keys j that query i may see,   x_ij = q_i.k_j * scale

    Exact            w = exp(x)                        cost ~ n m d
    Taylor           w = 1 + x + ... + x^p/p!          cost ~ (n + m) r e, with r features
    RandomFeatures   w ~ exp(x), from r projections
    Linear           w = x, or products of elu + 1, or of relu
    Separable        w = softmax of q over the width, times softmax of k over the length
    Multipole        w = exp(x) for near and important keys, the moments of blocks for all others
    Auto             the cheapest that keeps a promised error

Axes: (..., heads, length, width). Inside: b batch and key heads, g query heads per key head, n queries, m keys,
d width, e value width, r features.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from math import sqrt
from typing import Literal, cast, overload

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad._auto import Auto
from subquad._dispatch import Form, choose_form, fusable, run_form
from subquad._exact import exact_attention
from subquad._features import Exact, Linear, RandomFeatures, Taylor
from subquad._kernel import FeatureKernel, Sums, widen
from subquad._layout import check_shapes, check_state, check_tensors
from subquad._masks import is_per_query_head, key_mask, refuse_unfactored, segment_runs
from subquad._methods import Method, kernel_of, recipe_of, resolve, shifted
from subquad._multipole import Multipole
from subquad._multipole_keys import multipole_attention
from subquad._separable import Separable
from subquad._state import State
from subquad.native._fused import serves


@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *, method: Method | str = ...,
    key_padding_mask: Tensor | None = None, segment_ids: Tensor | None = None, state: State | None = None,
    return_state: Literal[False] = False,
) -> Tensor: ...  # fmt: skip


@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *, method: Method | str = ...,
    key_padding_mask: Tensor | None = None, segment_ids: Tensor | None = None, state: State | None = None,
    return_state: Literal[True],
) -> tuple[Tensor, State]: ...  # fmt: skip


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
    method: Method | str = Exact(),  # noqa: B008  (a frozen value)
    key_padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    state: State | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, State]:
    """Attention by `method`; the first eight arguments are those of torch's `scaled_dot_product_attention`.

    query: (..., heads, n, d). key: (..., key heads, m, d). value: (..., key heads, m, e). Any batch dimensions.
    attn_mask: True = attend. Linear methods take a boolean mask with a query dimension of 1, and refuse others.
    dropout_p: on the weights; `Exact` only.
    is_causal: query i sees keys 0..i; with a `state`, the new keys are aligned to the new queries at their ends.
    scale: of the logits, default 1/sqrt(d). Maps that are not functions of the logit see q and k times its root.
    enable_gqa: several query heads share a key head, as in torch.
    method: a method, an object with the `FeatureMap` protocol, or "exact", "taylor", "random", "linear", "separable",
        "multipole", "auto".
    key_padding_mask: (..., m), True = attend; also (..., key heads, m).
    segment_ids: (..., n), integers, with n = m: tokens see their own segment only, a run of equal ids.
    state: what an earlier call returned; its keys come before these. return_state: also return the new state.
    Returns (..., heads, n, e), in the dtype of the query, or of autocast; a row that sees no key is 0.

    >>> q, k, v = torch.randn(3, 2, 8, 1000, 16).unbind()
    >>> attention(q, k, v, is_causal=True, method=Taylor(2)).shape
    torch.Size([2, 8, 1000, 16])
    >>> head, state = attention(q[:, :, :900], k[:, :, :900], v[:, :, :900], is_causal=True, method="taylor",
    ...                         return_state=True)
    >>> tail = attention(q[:, :, 900:], k[:, :, 900:], v[:, :, 900:], is_causal=True, method="taylor", state=state)
    >>> whole = attention(q, k, v, is_causal=True, method="taylor")
    >>> torch.allclose(torch.cat([head, tail], -2), whole, atol=1e-5)
    True
    """
    output, new_state = attend(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, resolve(method), key_padding_mask,
        segment_ids, state, return_state,
    )  # fmt: skip
    return (output, cast(State, new_state)) if return_state else output


def normalizer(
    query: Tensor, key: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, *, method: Method | str, key_padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """(..., heads, n): the sum of each row's weights, up to a positive factor per row.

    Where it is not positive, the output of that row is not an average: counts such rows after the run, at the cost of
    another call. Arguments as for `attention`.

    >>> q, k = torch.randn(2, 1, 4, 100, 8, generator=torch.Generator().manual_seed(0)).mul(2).unbind()
    >>> int((normalizer(q, k, method=Taylor(2)) <= 0).sum())
    0
    """
    method = resolve(method)
    if isinstance(method, Exact | Separable | Multipole | Auto):
        raise ValueError(f"method: expected a feature map, whose weights are divided by their sum, got {method}")
    query, key = widen(query), widen(key)
    ones = key.new_ones(*key.shape[:-1], 1)
    output, _ = attend(
        query, key, ones, attn_mask, 0.0, is_causal, scale, enable_gqa, method, key_padding_mask, segment_ids, None,
        return_state=False, normalized=False,
    )  # fmt: skip
    return output.squeeze(-1)


def attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool,
    scale: float | None, enable_gqa: bool, method: Method, key_padding_mask: Tensor | None, segment_ids: Tensor | None,
    state: State | None, return_state: bool, form: Form | None = None, chunk: int | None = None,
    normalized: bool = True,
) -> tuple[Tensor, State | None]:  # fmt: skip
    """`attention`, where tests can also choose the form and the chunk, and `normalizer` leaves out the division.

    form "chunked" stands for "linear" too: whichever of the two the masks ask for.
    """
    if isinstance(method, Auto):
        if state is not None or return_state:
            raise ValueError("state: Auto decides by the whole sequence; name the method where it comes in pieces")
        method = method.choose(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa,
                               key_padding_mask=key_padding_mask, segment_ids=segment_ids).method  # fmt: skip
    if isinstance(method, Exact):
        structured = key_padding_mask is not None or segment_ids is not None or (attn_mask is not None and is_causal)
        if state is None and not return_state and not structured:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            ), None  # fmt: skip
    elif dropout_p != 0:
        raise ValueError(
            f"dropout_p: expected 0, got {dropout_p}: dropout on the weights has no linear form. "
            'Use method="exact", or dropout on the output.'
        )
    check_tensors(query=query, key=key, value=value)
    if state is not None and not isinstance(state, State):
        raise TypeError(f"state: expected what attention(..., return_state=True) returned, got {type(state).__name__}")
    device, stateful = query.device.type, state is not None or return_state
    autocast = torch.is_autocast_enabled(device) and query.dtype != torch.float64
    if autocast and not isinstance(method, Exact):  # It makes inputs of different precision alike.
        query, key, value = widen(query), widen(key), widen(value)
    plain = attn_mask is None and key_padding_mask is None and segment_ids is None and form is None and not autocast
    if state is not None and return_state and plain:
        next_token = decode(query, key, value, scale, enable_gqa, method, state)
        if next_token is not None:
            return next_token
    layout = check_shapes(query, key, value, enable_gqa)
    check_state(state, method, layout, segment_ids is not None, query.dtype)
    headless = query.dim() == 2
    query, key, value = (x[None] if x.dim() == 2 else x for x in (query, key, value))
    for_keys = (
        attn_mask is not None and attn_mask.dtype == torch.bool and (attn_mask.dim() < 2 or attn_mask.shape[-2] == 1)
    )
    if attn_mask is not None and not for_keys and (state is not None or not isinstance(method, Exact)):
        refuse_unfactored(attn_mask, isinstance(method, Exact))
    if not isinstance(method, Exact | Multipole):
        key = shifted(method, key, layout.key_heads)
    if is_per_query_head(attn_mask, layout) and (state is not None or not isinstance(method, Exact)):
        if stateful:
            raise ValueError(
                "attn_mask: expected the same for all query heads that share a key head, where a state is used; "
                "key_padding_mask takes one per key head"
            )
        # Query heads that share a key head see different keys: each gets its own copy of the head.
        key, value = (x.repeat_interleave(layout.group, -3) for x in (key, value))
        layout = check_shapes(query.to(key.dtype), key, value.to(key.dtype), enable_gqa=False)
    runs = last_segment = None
    if segment_ids is not None:
        runs, last_segment = segment_runs(layout, segment_ids, None if state is None else state.segment)

    if isinstance(method, Exact):
        # A state remembers which keys are hidden from all queries; any other mask is for this call alone.
        remembered = stateful and for_keys and not is_per_query_head(attn_mask, layout)
        keep = key_mask(layout, key_padding_mask, attn_mask if remembered else None)
        output, new_state = exact_attention(
            layout, query, key, value, attn_mask=None if remembered else attn_mask, keep=keep, runs=runs,
            last_segment=last_segment, state=state, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
        )  # fmt: skip
        return output[0] if headless else output, new_state

    keep = key_mask(layout, key_padding_mask, attn_mask)
    dtype = torch.get_autocast_dtype(device) if autocast else query.dtype
    # Features, sums and normalisers are never in half precision.
    off: AbstractContextManager[None] = torch.autocast(device, enabled=False) if autocast else nullcontext()
    with off:
        q, k, v = layout.fold_query(query), layout.fold_key(key), layout.fold_key(value)
        scale = 1 / sqrt(layout.width or 1) if scale is None else scale
        if isinstance(method, Multipole):
            # What it chose decides what it computes: nothing that a compiled graph could hold.
            by_blocks = multipole_attention
            by_blocks = torch.compiler.disable(by_blocks) if torch.compiler.is_compiling() else by_blocks
            output, resumable = by_blocks(
                method, layout, q, k, v, keep=keep, runs=runs, last_segment=last_segment, state=state,
                is_causal=is_causal, scale=scale, return_state=return_state, twin=form in ("dense", "chunked"),
            )  # fmt: skip
            output = layout.unfold_query(output).to(dtype)
            return output[0] if headless else output, resumable
        resumed = state is not None and state.sums is not None
        own = not isinstance(method, Taylor | RandomFeatures | Linear | Separable)  # A user's map may hold parameters.
        learned = torch.is_grad_enabled() and (own or any(
            x is not None and x.requires_grad for x in (q, k, v, None if state is None else state.sums)))  # fmt: skip
        by_kernels = fusable(method, layout, is_causal, stateful) and serves(recipe_of(method), q, k, v, runs)
        by_kernels = by_kernels and not (stateful and learned)  # They have no derivative for sums.
        form, sizes = choose_form(method, layout, is_causal, stateful, resumed, form, chunk, by_kernels)
        kernel, q, k = kernel_of(method, q, k, scale, pairs_alone=form == "dense")
        if not normalized and isinstance(kernel, FeatureKernel):
            kernel = replace(kernel, normalized=False)
        before = None
        if state is not None and state.sums is not None and state.poison is not None:
            run = None if runs is None else runs.new_zeros(layout.rows)
            log_scale = None if state.log_scale is None else state.log_scale.reshape(layout.rows, -1)
            values, poison = state.sums.reshape(layout.rows, *state.sums.shape[-2:]), state.poison.reshape(layout.rows)
            before = Sums(values, poison, log_scale, run)
        output, sums = run_form(form, sizes, kernel, q, k, v, keep, runs, before, is_causal, return_state)
        output = layout.unfold_query(output).to(dtype)
    resumable = None
    if return_state:
        resumable = State(
            method,
            layout.keys + (0 if state is None else state.length),
            sums=None if sums is None else layout.unfold(sums.values),
            poison=None if sums is None else layout.unfold(sums.poison),
            log_scale=None if sums is None or sums.log_scale is None else layout.unfold(sums.log_scale),
            segment=None if last_segment is None or sums is None else layout.unfold(last_segment),
        )
    return output[0] if headless else output, resumable


def decode(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, enable_gqa: bool, method: Method, state: State
) -> tuple[Tensor, State] | None:
    """One token, without masks, after its state: the inner loop of decoding, so with no more ceremony than it needs.

    None where anything is unusual, or wrong; `attend` then does it in the usual way, or says what is wrong.
    """
    sums, poison, log_scale, shape = state.sums, state.poison, state.log_scale, key.shape
    if sums is None or poison is None or state.segment is not None or state.method is not method:
        return None
    if not isinstance(method, Taylor | RandomFeatures | Linear) or getattr(method, "key_shift", None) is not None:
        return None
    width, group = shape[-1], 1
    if query.shape != shape:
        alike = query.dim() == key.dim() > 2 and query.shape[:-3] == shape[:-3] and query.shape[-2:] == shape[-2:]
        if not enable_gqa or not alike or shape[-3] == 0:
            return None
        group = query.shape[-3] // shape[-3]
    fits = shape[:-1] == (*poison.shape, 1) and value.shape == shape and query.numel() == group * key.numel() > 0
    of_sums = (*poison.shape, method.size(width), width + 1)
    if not fits or sums.shape != of_sums or not query.dtype == key.dtype == value.dtype == sums.dtype:
        return None
    rows = poison.numel()
    q, k, v = query.reshape(rows, group, 1, width), key.reshape(rows, 1, width), value.reshape(rows, 1, width)
    kernel, q, k = kernel_of(method, q, k, 1 / sqrt(width) if scale is None else scale)
    flat = None if log_scale is None else log_scale.reshape(rows, -1)
    found = kernel.advance(q, k, v, Sums(sums.flatten(0, -3), poison.flatten(), flat))
    if found is None:
        return None
    output, after = found
    log_scale = None if after.log_scale is None or log_scale is None else after.log_scale.reshape(log_scale.shape)
    new = State(method, state.length + 1, after.values.reshape(of_sums), after.poison.reshape(poison.shape), log_scale)
    return output.reshape(query.shape), new
