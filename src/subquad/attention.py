"""Attention, exact or in sub-quadratic time, behind the signature of torch's own function.

    out_i = sum_j w_ij v_j / sum_j w_ij    over the keys j that query i may see,   x_ij = q_i.k_j * scale

    Exact            w = exp(x)                        cost ~ n m d
    Taylor           w = 1 + x + ... + x^p/p!          cost ~ (n + m) r e, with r features
    RandomFeatures   w ~ exp(x), from r projections
    Linear           w = x, or products of elu + 1, or of relu
    Separable        w = softmax of q over the width, times softmax of k over the length
    Hedgehog         w = products of softmax features that are learned
    Window           w = exp(x) for the nearest keys and the first ones, 0 for all others
    Hybrid           w = exp(x) for the nearest keys, those of a feature method for all earlier ones
    BlockSparse      w = exp(x) in the blocks of a layout, 0 elsewhere
    Multipole        w = exp(x) for near and important keys, the moments of blocks for all others
    Auto             the cheapest within an error budget

Axes: (..., heads, length, width). n queries, m keys, d width, e value width, r features.
"""

import warnings
from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeAlias, cast, overload

import torch
from torch import Tensor

# By its own name, so that a program which puts `attention` in its place does not make it call itself.
from torch.nn.functional import scaled_dot_product_attention

from subquad._calls.call import Call, check_tensors
from subquad._calls.state import State
from subquad._engines import engine_of, run
from subquad._engines.finite import widen
from subquad._torch_internals import has_numbers, outside_graph
from subquad.methods import AnyMethod, Exact, Method, MethodName, feature_method
from subquad.methods import resolve as resolve_named
from subquad.planning.auto import AUTO_IN_GRAPH, Auto, Choice
from subquad.planning.far_range import warn_far_range

MethodLike: TypeAlias = AnyMethod | Auto | MethodName | str


class Redirect(Protocol):
    """What computes the calls of a model over several processes; see `subquad.distributed.sequence_parallel`."""

    @property
    def is_running(self) -> bool:
        """Whether the call that is made now belongs to its model."""

    def attend(self, method: AnyMethod | Auto, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        """Compute a call of `quiet_attention`."""


# What takes the calls of modules while `fit_attention` runs a model; the last one counts.
recorders: list[Callable[..., Tensor]] = []
redirects: list[Redirect] = []  # those in effect, the last one first asked


def redirect() -> Redirect | None:
    """Return what computes the calls that are made now; None for this process alone."""
    return next((each for each in reversed(redirects) if each.is_running), None) if redirects else None


def resolve(method: MethodLike) -> AnyMethod | Auto:
    """Return the method with this name, or the method itself."""
    if isinstance(method, Auto):
        return method
    if isinstance(method, str) and method.partition(":")[0] == "auto":
        return _auto_named(method)
    return resolve_named(method, ("auto",))


def _auto_named(spec: str) -> Auto:
    """Return `Auto()` for "auto", and `Auto(0.1)` for "auto:0.1"."""
    _, colon, text = spec.partition(":")
    try:
        return Auto(float(text)) if colon else Auto()
    except ValueError:
        raise ValueError(f"method: expected a positive number for max_error in {spec!r}, got {text!r}") from None


def warn_about(method: AnyMethod | Auto, stacklevel: int) -> None:
    """Warn if outputs of the method can be far from those of softmax attention for any input."""
    text = method.warning if isinstance(method, Method) and not torch.compiler.is_compiling() else None
    if text is not None:
        warnings.warn(text, stacklevel=stacklevel + 1)


@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *, method: MethodLike = ...,
    key_padding_mask: Tensor | None = None, segment_ids: Tensor | None = None, state: State | None = None,
    return_state: Literal[False] = False,
) -> Tensor: ...  # fmt: skip


@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *, method: MethodLike = ...,
    key_padding_mask: Tensor | None = None, segment_ids: Tensor | None = None, state: State | None = None,
    return_state: Literal[True],
) -> tuple[Tensor, State]: ...  # fmt: skip


@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, *, method: MethodLike = ...,
    key_padding_mask: Tensor | None = None, segment_ids: Tensor | None = None, state: State | None = None,
    return_state: bool,
) -> Tensor | tuple[Tensor, State]: ...  # fmt: skip


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
) -> Tensor | tuple[Tensor, State]:
    """Compute attention by `method`; the first eight arguments are those of torch's `scaled_dot_product_attention`.

    Args:
        query: (..., heads, n, d), with any batch dimensions.
        key: (..., key heads, m, d).
        value: (..., key heads, m, e).
        attn_mask: True = attend; or numbers, added to the logits. `Exact` takes any mask. Approximations take one that
            hides keys from all queries, is causal, or both; of booleans, or of 0 and -inf. A query dimension of 1 saves
            them from reading a matrix.
        dropout_p: Dropout on the weights; `Exact` only.
        is_causal: Query i sees keys 0..i; with a `state`, the new queries are aligned to the end of the new keys.
        scale: Factor of the logits, 1/sqrt(d) by default. Maps that are not functions of the logit see q and k times
            its square root.
        enable_gqa: Let several query heads share a key head, as in torch.
        method: A method, an object with the `FeatureMap` protocol, or a name: "exact", "taylor" or "taylor:DEGREE",
            "random:FEATURES", "linear:ACTIVATION", "separable", "window:SIZE", "multipole:TOP" or "auto:ERROR";
            "window:SIZE+METHOD" for a `Hybrid`; and in modules, which make its parameters, "hedgehog".
        key_padding_mask: (..., m) or (..., key heads, m), True = attend.
        segment_ids: (..., n), integers, with n = m, for packed sequences: tokens see only their own segment, a run of
            equal ids.
        state: What an earlier call returned; its keys precede these.
        return_state: Also return the new state.

    Returns:
        (..., heads, n, e) in the dtype of the query, or of autocast; a row that sees no key is 0. With `return_state`,
        a pair of that and the new state.

    Raises:
        ValueError: An argument does not fit the others, or the method does not support it.
        TypeError: An argument has the wrong type.

    Warns:
        UserWarning: The logits are so large that the method predicts a relative error above 1; once per line of code.

    Example:
        >>> from subquad import Taylor
        >>> q, k, v = torch.randn(3, 2, 8, 1000, 16).unbind()
        >>> attention(q, k, v, is_causal=True, method=Taylor(2)).shape
        torch.Size([2, 8, 1000, 16])
        >>> head, state = attention(
        ...     q[:, :, :900], k[:, :, :900], v[:, :, :900], is_causal=True, method="taylor", return_state=True
        ... )
        >>> tail = attention(q[:, :, 900:], k[:, :, 900:], v[:, :, 900:], is_causal=True, method="taylor", state=state)
        >>> whole = attention(q, k, v, is_causal=True, method="taylor")
        >>> torch.allclose(torch.cat([head, tail], -2), whole, atol=1e-5)
        True
    """
    found = resolve(method)
    warn_about(found, stacklevel=2)
    result: Tensor | tuple[Tensor, State] = quiet_attention(
        query, key, value, method=found, warns=True, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal,
        scale=scale, enable_gqa=enable_gqa, key_padding_mask=key_padding_mask, segment_ids=segment_ids, state=state,
        return_state=return_state,
    )  # fmt: skip
    return result


def decided(method: AnyMethod | Auto, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> AnyMethod:
    """Return the method itself, or the one that `Auto` chooses for this call."""
    if not isinstance(method, Auto):
        return method
    if options.pop("state", None) is not None or options.pop("return_state", False):
        raise ValueError("state: Auto decides by the whole sequence; name a method to compute it in pieces")
    choose = outside_graph(method.choose, AUTO_IN_GRAPH)
    if not has_numbers(query):
        return Exact()
    choice: Choice = choose(query, key, value, **options)
    return choice.method


def quiet_attention(
    query: Tensor, key: Tensor, value: Tensor, *, method: AnyMethod | Auto, warns: bool = False, **options: Any
) -> Any:
    """Compute `attention` by a method that was resolved; without warnings, for modules, unless `warns`."""
    if recorders:
        return recorders[-1](query, key, value, **options)
    if (elsewhere := redirect()) is not None:
        return elsewhere.attend(method, query, key, value, **options)
    method = decided(method, query, key, value, **options)
    if engine_of(method) == "exact" and _is_plain(query, key, value, **options):
        names = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
        given = {name: options[name] for name in names if name in options}
        return scaled_dot_product_attention(query, key, value, **given)
    call = Call.of(query, key, value, **options)
    if warns:
        warn_far_range(method, call, stacklevel=3)
    output, new_state, _ = run(method, call)
    return (output, cast(State, new_state)) if options.get("return_state") else output


def _is_plain(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> bool:
    """Return whether torch's function takes the call as it is."""
    if any(options.get(name) is not None for name in ("key_padding_mask", "segment_ids", "state")):
        return False
    mask = options.get("attn_mask")
    if options.get("return_state") or (mask is not None and (options.get("is_causal") or mask.dim() < 2)):
        return False
    return not _has_size_zero(query, key, value)


def _has_size_zero(*tensors: Tensor) -> bool:
    """Return whether a size is 0: torch's function then returns a result without the batch of the keys."""
    return not torch.compiler.is_compiling() and any(0 in x.shape for x in tensors if isinstance(x, Tensor))


def normalizer(
    query: Tensor, key: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, scale: float | None = None,
    enable_gqa: bool = False, *, method: MethodLike, key_padding_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the sum of each row's weights, up to a positive factor per row.

    Where it is not positive, the output of that row is not an average. Counts such rows after a run, at the cost of
    another call.

    Args:
        query: (..., heads, n, d).
        key: (..., key heads, m, d).
        attn_mask, is_causal, scale, enable_gqa: As for `attention`.
        method: A feature map whose weights are divided by their sum.
        key_padding_mask, segment_ids: As for `attention`.

    Returns:
        (..., heads, n).

    Example:
        >>> from subquad import Taylor
        >>> q, k = torch.randn(2, 1, 4, 100, 8, generator=torch.Generator().manual_seed(0)).mul(2).unbind()
        >>> int((normalizer(q, k, method=Taylor(2)) <= 0).sum())
        0
    """
    found = resolve(method)
    is_map = not isinstance(found, Auto) and engine_of(found) == "features"
    if not is_map or feature_method(found).normalizer == "feature":
        raise ValueError(f"method: expected a feature map, whose weights are divided by their sum, got {found}")
    check_tensors(query=query, key=key)
    query, key = widen(query), widen(key)
    call = Call.of(
        query, key, key.new_ones(*key.shape[:-1], 1), attn_mask=attn_mask, is_causal=is_causal, scale=scale,
        enable_gqa=enable_gqa, key_padding_mask=key_padding_mask, segment_ids=segment_ids, is_normalized=False,
    )  # fmt: skip
    return run(found, call).output.squeeze(-1)
