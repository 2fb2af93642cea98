"""Route torch's own function to a method: `with subquad.sdpa("taylor"): model(x)`.

    F.scaled_dot_product_attention(...)  ->  the method              if it supports the call
                                         ->  torch's own function    otherwise; the report says why

While a routing is active, the function is replaced in `torch.nn.functional`, where models look it up at every call. A
routing applies to the thread or asyncio task that started it, or to all of them.
"""

import inspect
import sys
import threading
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from itertools import count
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import handle_torch_function, has_torch_function

from subquad._calls.masks import NotServed
from subquad._torch_internals import in_trace, mark_constant
from subquad.attention import MethodLike, decided, quiet_attention, redirect, resolve, warn_about
from subquad.methods import AnyMethod
from subquad.nn.report import describe, table
from subquad.planning.auto import Auto

P = ParamSpec("P")
R = TypeVar("R")

NOBODY = 0  # the number of no routing
SPLIT = (
    "scaled_dot_product_attention: inside subquad.distributed.sequence_parallel torch's function would see only the "
    "tokens of this rank. Let the model call subquad.attention, replace its attention by subquad.replace_attention or "
    "subquad.integrations.transformers.replace_attention, or route the call by subquad.sdpa to a method that supports "
    "it"
)


def sdpa(method: MethodLike, *, all_threads: bool = False) -> "Routing":
    """Compute calls of `torch.nn.functional.scaled_dot_product_attention` by a method, whatever model makes them.

    Use it in a `with` statement, as a decorator, or as a plain call that `undo()` ends. Calls that the method does not
    serve are left to torch: dropout on the weights, biases added to the logits, masks that treat every pair separately.
    Inside, `nn.MultiheadAttention` does not take its fused path of eval mode, which does not call the function; with
    `need_weights=True` it never does. With gradient checkpoints, call `backward()` inside too: it computes again.

    Args:
        method: A method or its name, as for `attention`.
        all_threads: Route the calls of all threads and tasks, not just of this one.

    Raises:
        RuntimeError: Later, in a call that `torch.compile`, `torch.export` or `torch.jit.trace` records: its mask is a
            matrix or has numbers, which cannot be read there.

    Returns:
        A `Routing`, which is already active. Its `calls` say which calls took which method, and which were left to
        torch and why; it prints as a table.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(16, 4, dropout=0.0, batch_first=True).eval()
        >>> with sdpa("taylor") as routing:
        ...     y = layer(torch.randn(2, 100, 16))
        >>> print(routing)
        calls  queries  keys  heads  width  is_causal  by
        1      100      100   4      4      no         Taylor(2)
    """
    found = resolve(method)
    routing = Routing(found, all_threads)
    _begin(routing)
    warn_about(found, stacklevel=2)
    return routing


@dataclass(frozen=True)
class RoutedCalls:
    """Calls of one kind, in the report of `sdpa`.

    Attributes:
        method: The method that computed them; None for torch's own function.
        reason: Why they were left to torch.
        heads: Number of query heads.
        width: Width of a head.
        is_causal: Whether `is_causal` was passed; a mask may be causal too.
        count: Number of calls.
        queries: Fewest and most queries of a call.
        keys: Fewest and most keys of a call.
    """

    method: AnyMethod | Auto | None
    reason: str
    heads: int
    width: int
    is_causal: bool
    count: int
    queries: tuple[int, int]
    keys: tuple[int, int]


class Routing:
    """An exchange of torch's function by a method, made by `sdpa`; prints as a table of the calls.

    Attributes:
        method: The method.
        all_threads: Whether it is for all threads.
    """

    def __init__(self, method: AnyMethod | Auto, all_threads: bool) -> None:
        self.method = method
        self.all_threads = all_threads
        self._number = next(_numbers)
        self._entered = 0  # times that it was begun and has not ended
        self._calls: dict[Any, RoutedCalls] = {}
        self._was_recorded = False  # in a program, whose calls are not seen
        self._is_fresh = True  # made by `sdpa`, which has begun it

    @property
    def calls(self) -> tuple[RoutedCalls, ...]:
        """The calls so far, those of one kind together; without those of compiled and recorded programs."""
        return tuple(self._calls.values())

    def undo(self) -> None:
        """Stop routing. A second call does nothing, and nested routings may end in any order."""
        self._is_fresh = False
        while self._entered:
            _end(self)

    def __enter__(self) -> "Routing":
        if self._is_fresh:  # `sdpa` has begun it.
            self._is_fresh = False
        else:
            _begin(self)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        _end(self)
        if not self._calls and kind is None and not self._was_recorded:
            warnings.warn(f"sdpa: {_no_calls()}", stacklevel=2)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function, so that the calls inside it are routed.

        Raises:
            TypeError: It is a generator or a coroutine, which computes after it has returned.
        """
        self.undo()
        kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
        if any(is_kind(function) for is_kind in kinds):
            raise TypeError(
                f"sdpa: expected a plain function to decorate, got {function!r}, which computes after it has returned; "
                "write `with subquad.sdpa(method):` inside it"
            )

        @wraps(function)
        def routed_function(*args: P.args, **kwargs: P.kwargs) -> R:
            _begin(self)
            try:
                return function(*args, **kwargs)
            finally:
                _end(self)

        return routed_function

    def __repr__(self) -> str:
        return f"Routing({describe(self.method)}, calls={sum(each.count for each in self.calls)})"

    def __str__(self) -> str:
        rows = [["calls", "queries", "keys", "heads", "width", "is_causal", "by", "reason"]]
        for each in self.calls:
            lengths = [str(low) if low == high else f"{low} to {high}" for low, high in (each.queries, each.keys)]
            by = "torch" if each.method is None else describe(each.method)
            causal = "yes" if each.is_causal else "no"
            short = each.reason.partition("; ")[0].partition(". ")[0]
            rows.append([str(each.count), *lengths, str(each.heads), str(each.width), causal, by, short])
        return table(rows) if len(rows) > 1 else "no calls"

    def _record(
        self, method: AnyMethod | Auto | None, reason: str, query: Tensor, key: Tensor, is_causal: bool
    ) -> None:
        heads = query.shape[-3] if query.dim() > 2 else 1
        kind = (None if method is None else describe(method), reason, heads, query.shape[-1], is_causal)
        with _lock:
            before, n, m = self._calls.get(kind), query.shape[-2], key.shape[-2]
            queries, keys = (n, n) if before is None else before.queries, (m, m) if before is None else before.keys
            self._calls[kind] = RoutedCalls(
                method, reason, heads, query.shape[-1], is_causal, 1 if before is None else before.count + 1,
                (min(n, queries[0]), max(n, queries[1])), (min(m, keys[0]), max(m, keys[1])),
            )  # fmt: skip


_numbers = count(NOBODY + 1)
_lock = threading.Lock()
_active: dict[int, Routing] = {}  # by number; torch.compile sees a change of it
_in_context: ContextVar[tuple[Routing, ...]] = ContextVar("subquad_routings", default=())
_everywhere: list[Routing] = []
_original: Callable[..., Tensor] = scaled_dot_product_attention  # what `_routed` stands for while it is in place
_had_fast_path = True
_is_inside: ContextVar[bool] = ContextVar("subquad_is_inside", default=False)  # a call of `_original`


def _begin(routing: Routing) -> None:
    global _original, _had_fast_path
    with _lock:
        if not _active:
            _original, _had_fast_path = F.scaled_dot_product_attention, torch.backends.mha.get_fastpath_enabled()
            F.scaled_dot_product_attention = _routed
            torch.backends.mha.set_fastpath_enabled(False)
        _active[routing._number] = routing
        routing._entered += 1
        if routing.all_threads:
            _everywhere.append(routing)
    if not routing.all_threads:
        _in_context.set((*_in_context.get(), routing))


def _end(routing: Routing) -> None:
    if routing in _in_context.get():  # In another context it stays there, as one that has ended.
        _in_context.set(_without_last(routing, _in_context.get()))
    with _lock:
        if not routing._entered:
            return
        routing._entered -= 1
        if routing in _everywhere:
            _everywhere[:] = _without_last(routing, tuple(_everywhere))
        if not routing._entered:
            del _active[routing._number]
        if not _active:
            torch.backends.mha.set_fastpath_enabled(_had_fast_path)
            if F.scaled_dot_product_attention is _routed:  # Somebody may have put another function in its place.
                F.scaled_dot_product_attention = _original


def _without_last(routing: Routing, routings: tuple[Routing, ...]) -> tuple[Routing, ...]:
    place = len(routings) - 1 - routings[::-1].index(routing)
    return routings[:place] + routings[place + 1 :]


def _current_number() -> int:
    """Return the number of the routing that decides here."""
    for routing in (*reversed(_in_context.get()), *reversed(_everywhere)):
        if routing._entered:
            return routing._number
    return NOBODY


mark_constant(_current_number, "subquad_current_routing")


def _routed(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Compute a call by the method of the routing that decides here, or by torch."""
    options: dict[str, Any] = dict(
        attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )
    tensors = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    if has_torch_function(tensors):  # such as torch's own CausalBias, which looks for the function of this name
        output: Tensor = handle_torch_function(_routed, tensors, query, key, value, **options)
        return output
    routing = _active.get(_current_number())
    if routing is None:
        return _by_torch(query, key, value, options)
    # torch.compile takes nn.MultiheadAttention whole, and calls it with tensors that only have shapes.
    if torch.compiler.is_compiling() and not (torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()):
        raise RuntimeError(
            "sdpa: torch.compile does not look into torch.nn.MultiheadAttention, so its calls cannot be routed; use "
            "subquad.replace_attention(model, method) instead, or compile without sdpa"
        )
    is_recorded = torch.compiler.is_compiling() or in_trace()
    method, reason = routing.method, ""
    try:
        if query.is_nested:
            raise NotServed("query: got a nested tensor")
        method = decided(method, query, key, value, **options)
        output = quiet_attention(query, key, value, method=method, warns=True, **options)
    except NotServed as error:
        if is_recorded and str(error.args[0]).startswith("attn_mask"):
            raise RuntimeError(
                "sdpa: a recorded program cannot tell whether this attn_mask hides keys, is causal, or adds a bias; "
                "pass is_causal=True, or a boolean mask with a query dimension of 1, or record without sdpa"
            ) from error
        output, reason = _by_torch(query, key, value, options), str(error)
    if is_recorded:
        routing._was_recorded = True
    else:
        routing._record(None if reason else method, reason, query, key, is_causal)
    return output


def _by_torch(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
    """Call what was there before; torch's own function, if that was built around ours.

    Raises:
        ValueError: The tensors are one rank's slice of a sequence, to which torch's function would limit attention.
    """
    if redirect() is not None:
        raise ValueError(SPLIT)
    if torch.compiler.is_compiling() or _is_inside.get():
        return scaled_dot_product_attention(query, key, value, **options)
    token = _is_inside.set(True)
    try:
        return _original(query, key, value, **options)
    finally:
        _is_inside.reset(token)


def _no_calls() -> str:
    text = "no call of torch.nn.functional.scaled_dot_product_attention was seen, so nothing was routed"
    holders = [name for name, module in list(sys.modules.items()) if _holds_function(name, module)]
    if holders:
        names = ", ".join(holders[:3])
        return f"{text}; {names} imported the function by name: there, call it as F.scaled_dot_product_attention"
    return (
        f"{text}; the model may compute attention by itself, in another thread (all_threads=True routes them all), or "
        "by nn.MultiheadAttention with need_weights=True, for which there is replace_attention"
    )


def _holds_function(name: str, module: Any) -> bool:
    if name.partition(".")[0] in ("torch", "subquad"):
        return False
    return any(value is scaled_dot_product_attention for value in getattr(module, "__dict__", {}).values())
