"""What a call costs before it is made: work, memory, parameters, and how they grow.

Each engine has its own counts: `exact_cost`, `feature_cost`, `hybrid_cost`, `multipole_cost` and `sparse_cost`.

Axes: n queries, m keys, d width, e value width, r features.
"""

from dataclasses import replace
from typing import Any

import torch

from subquad import native
from subquad._engines import engine_of
from subquad._engines.features.choose_form import is_fusable
from subquad.methods import AnyMethod, BlockSparse, Hybrid, MethodLike, for_layer, label_of, resolve
from subquad.methods.checks import check_whole
from subquad.methods.method import feature_method
from subquad.planning.cost_result import Cost
from subquad.planning.exact_cost import exact_cost
from subquad.planning.feature_cost import feature_cost
from subquad.planning.hybrid_cost import far_shape, hybrid_cost
from subquad.planning.multipole_cost import multipole_cost
from subquad.planning.shape import Shape, as_int, check_dtype
from subquad.planning.sparse_cost import has_kernel, sparse_cost

__all__ = ["cost", "cost_of", "multihead_cost"]

PRICES = {
    "exact": exact_cost, "features": feature_cost, "hybrid": hybrid_cost, "multipole": multipole_cost,
    "sparse": sparse_cost,
}  # fmt: skip
FORMS = {
    "exact": ("exact", "step"),
    "features": ("dense", "linear", "chunked", "fused", "step"),
    "hybrid": ("fused", "dense", "step"),
    "multipole": ("fused", "dense", "step"),
    "sparse": ("fused", "dense", "step"),
}


def cost(
    method: MethodLike, *, query_length: int, key_length: int | None = None, head_dim: int,
    value_dim: int | None = None, heads: int = 1, key_heads: int | None = None, batch: int = 1, is_causal: bool = False,
    training: bool = False, form: str | None = None, dtype: torch.dtype = torch.float32,
) -> Cost:  # fmt: skip
    """Return the cost of one call of `attention` on the CPU, without masks, and of its backward pass if `training`.

    The work of torch's forms is exactly what torch's FlopCounterMode counts; that of the native kernels is the same
    products, as they schedule them. The work of `Exact` is that of the pairs that are seen; torch's kernel rounds
    causal rows up to blocks. A user's map is run on one token to count its layers; what it holds in memory beyond its
    result is not known and left out.

    Args:
        method: A method or its name.
        query_length: Queries per head.
        key_length: Keys per head, query_length by default.
        head_dim: Width of queries and keys.
        value_dim: Width of values, head_dim by default.
        heads: Query heads.
        key_heads: Key heads, `heads` by default.
        batch: Sequences.
        is_causal: Whether the call is causal.
        training: Whether to include the backward pass.
        form: The form that `attention` would choose here, by default; or "dense", "linear", "chunked", "fused" (the
            native kernels) or "step" (one token after key_length - 1 others in a state).
        dtype: Dtype of the inputs.

    Example:
        >>> cost("taylor", query_length=1000, head_dim=64, form="linear").flops  # 2 * 2000 tokens * 2145 features * 65
        557700000
        >>> cost("taylor", query_length=1000, head_dim=64, is_causal=True, form="dense").form
        'dense'
        >>> cost("exact", query_length=1000, head_dim=64).order
        'time O(n m (d + e)), memory O(n e): n queries, m keys, d = 64 width, e = 64 value width'
    """
    resolved = fixed_method(method)
    shape = Shape.of(
        query_length=query_length, key_length=key_length, head_dim=head_dim, value_dim=value_dim, heads=heads,
        key_heads=key_heads, batch=batch, is_causal=is_causal, training=training,
    )  # fmt: skip
    check_dtype(dtype)
    engine = engine_of(resolved)
    forms = [name for name in FORMS[engine] if name != "step" or not isinstance(resolved, BlockSparse)]
    if form is not None and form not in forms:
        names = ", ".join(map(repr, forms))
        raise ValueError(f"form: {label_of(resolved)} has {names}, got {form!r}")
    if form == "linear" and is_causal:
        raise ValueError("form: a causal call has no linear form: expected 'chunked' or 'dense', got 'linear'")
    if form == "fused" and not is_fused(resolved, shape, dtype):
        raise ValueError(f"form: the native kernels do not compute this call of {label_of(resolved)}, got 'fused'")
    if form == "step" and shape.query_length != 1:
        raise ValueError(f"query_length: a step is one token, expected 1, got {query_length}")
    return cost_of(resolved, shape, form, dtype)


def fixed_method(method: Any) -> AnyMethod:
    """Return the method with this name, or the method itself; or raise ValueError if it depends on numbers."""
    if (isinstance(method, str) and method == "auto") or hasattr(method, "choose"):
        raise ValueError(
            "method: Auto decides by the numbers of each call, so its cost is not known before; expected a method "
            f"such as Taylor(2), got {method!r}"
        )
    return resolve(method)


def is_fused(method: object, shape: Shape, dtype: torch.dtype) -> bool:
    """Return whether the native kernels compute a call of this shape."""
    engine = engine_of(method)
    if engine == "multipole":
        return native.available()
    if engine == "sparse":
        return has_kernel(shape, dtype)
    if isinstance(method, Hybrid):
        return has_kernel(shape, dtype) and is_fused(method.far, far_shape(method, shape), dtype)
    return is_fusable(feature_method(method), shape.layout, dtype, is_causal=shape.is_causal)


def cost_of(method: object, shape: Shape, form: str | None = None, dtype: torch.dtype = torch.float32) -> Cost:
    """Return the cost of a call of this shape; arguments are not checked."""
    own = for_layer(method, shape.head_dim, shape.heads, shape.key_heads)
    return PRICES[engine_of(own)](own, shape, form, dtype)


def multihead_cost(
    embed_dim: int, num_heads: int, *, query_length: int, head_dim: int | None = None, output: bool = True,
    bias: bool = True, method: MethodLike = "exact", is_causal: bool = False, batch: int = 1, training: bool = False,
) -> Cost:  # fmt: skip
    """Return the cost of a multi-head attention module: three input projections, attention, and the output projection.

    Args:
        embed_dim: Width of the input and output.
        num_heads: Heads; 1 is single-head attention.
        query_length: Tokens; each is a query and a key, in float32.
        head_dim: Width of a head; embed_dim // num_heads by default, as in torch, where the number of parameters does
            not depend on the number of heads. `head_dim=embed_dim` gives every head the full width.
        output: Whether there is an output projection.
        bias: Whether projections have biases.
        method: A method or its name.
        is_causal: Whether the call is causal.
        batch: Sequences.
        training: Whether to include the backward pass.

    Example:
        >>> multihead_cost(64, 1, query_length=100, output=False, bias=False).parameters == 3 * 64**2
        True
        >>> layer = torch.nn.MultiheadAttention(64, 8)
        >>> multihead_cost(64, 8, query_length=100).parameters == sum(p.numel() for p in layer.parameters())
        True
    """
    embed_dim, num_heads, query_length, batch = map(as_int, (embed_dim, num_heads, query_length, batch))
    sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "query_length": query_length, "batch": batch}
    for name, number in sizes.items():
        check_whole(name, number, 1)
    if head_dim is None and embed_dim % num_heads:
        raise ValueError(f"num_heads: expected a number that divides embed_dim={embed_dim}, got {num_heads}")
    head_dim = embed_dim // num_heads if head_dim is None else as_int(head_dim)
    inner, tokens = num_heads * head_dim, batch * query_length
    inside = cost(
        method, query_length=query_length, head_dim=head_dim, heads=num_heads, batch=batch, is_causal=is_causal,
        training=training,
    )  # fmt: skip
    matrices = (3 + output) * embed_dim * inner
    parameters = matrices + (3 * inner + output * embed_dim if bias else 0)
    kept = tokens * (3 * inner + (embed_dim if output else 0))  # q, k, v, and the result of the output projection
    moved = tokens * (3 + output) * (embed_dim + inner) + matrices
    times = 3 if training else 1  # the product, and the gradients of its two factors
    return replace(
        inside,
        flops=inside.flops + times * 2 * tokens * matrices,
        bytes_moved=inside.bytes_moved + times * 4 * moved,
        peak_bytes=inside.peak_bytes + 4 * (kept + (parameters + tokens * embed_dim if training else 0)),
        parameters=inside.parameters + parameters,
        order=f"{inside.order}; the projections: time O(n w h d), w = {embed_dim} embedding, h = {num_heads} heads",
    )
