"""Route torch's own function to a method: `with subquad.sdpa("taylor"): model(x)`.

    F.scaled_dot_product_attention(...)  ->  the method              where it serves the call
                                         ->  torch's own function    elsewhere; the report says why

The function is exchanged in `torch.nn.functional`, where models look it up at every call, as long as a routing is
active. What it does depends on the thread: a routing is for the thread that began it, or for all threads.
"""

import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from itertools import count
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad._torch_internals import mark_constant
from subquad.attention import MethodLike, decided, quiet_attention, resolve, warn_about
from subquad.methods import AnyMethod
from subquad.nn.report import describe, table
from subquad.planning.auto import Auto

P = ParamSpec("P")
R = TypeVar("R")

ALL_THREADS = 0


def sdpa(method: MethodLike, *, all_threads: bool = False) -> "Routing":
    """Compute calls of `torch.nn.functional.scaled_dot_product_attention` by a method, whatever model makes them.

    Use it in a `with` statement, as a decorator, or as a plain call that `undo()` ends. Calls that the method does not
    serve are left to torch: dropout on the weights, biases added to the logits, masks that treat every pair separately.
    Inside, `nn.MultiheadAttention` does not take its fused path of eval mode, which does not call the function; with
    `need_weights=True` it never does.

    Args:
        method: A method or its name, as for `attention`.
        all_threads: Route the calls of all threads, not just of this one.

    Returns:
        A `Routing`, which is already active. Its `calls` say which calls took which method, and which were left to
        torch and why; it prints as a table.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(16, 4, dropout=0.0, batch_first=True).eval()
        >>> with sdpa("taylor") as routing:
        ...     y = layer(torch.randn(2, 100, 16))
        >>> print(routing)
        calls  queries  keys  heads  width  causal  by
        1      100      100   4      4      no      Taylor(2)
    """
    found = resolve(method)
    routing = Routing(found, all_threads)
    _add(routing)
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
        is_causal: Whether `is_causal` was passed.
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
        self._calls: dict[Any, RoutedCalls] = {}

    @property
    def calls(self) -> tuple[RoutedCalls, ...]:
        """The calls so far, those of one kind together; without those of compiled models."""
        return tuple(self._calls.values())

    def undo(self) -> None:
        """Stop routing. A second call does nothing, and nested routings may end in any order."""
        _remove(self)

    def __enter__(self) -> "Routing":
        with _lock:
            is_active = any(self in routings for routings in _active.values())
        if not is_active:
            _add(self)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.undo()
        # A compiled model makes its calls without us.
        if not self._calls and kind is None and "torch._dynamo" not in sys.modules:
            warnings.warn(f"sdpa: {_no_calls()}", stacklevel=2)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Decorate a function, so that the calls inside it are routed."""
        self.undo()

        @wraps(function)
        def routed_function(*args: P.args, **kwargs: P.kwargs) -> R:
            _add(self)
            try:
                return function(*args, **kwargs)
            finally:
                _remove(self)

        return routed_function

    def __repr__(self) -> str:
        return f"Routing({describe(self.method)}, {sum(each.count for each in self.calls):,} calls)"

    def __str__(self) -> str:
        rows = [["calls", "queries", "keys", "heads", "width", "causal", "by", "reason"]]
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
        kind = (str(method), reason, heads, query.shape[-1], is_causal)
        with _lock:
            before, n, m = self._calls.get(kind), query.shape[-2], key.shape[-2]
            queries, keys = (n, n) if before is None else before.queries, (m, m) if before is None else before.keys
            self._calls[kind] = RoutedCalls(
                method, reason, heads, query.shape[-1], is_causal, 1 if before is None else before.count + 1,
                (min(n, queries[0]), max(n, queries[1])), (min(m, keys[0]), max(m, keys[1])),
            )  # fmt: skip


_lock = threading.Lock()
_active: dict[int, tuple[Routing, ...]] = {}  # by thread; the last one decides
_original: Callable[..., Tensor] = F.scaled_dot_product_attention  # what `_routed` stands for while it is in place
_had_fast_path = True
_threads, _local = count(ALL_THREADS + 1), threading.local()


def _this_thread() -> int:
    """Return a number of this thread; unlike those of the system, none is given twice."""
    if not hasattr(_local, "number"):
        _local.number = next(_threads)
    return int(_local.number)


mark_constant(_this_thread, "subquad_this_thread")


def _add(routing: Routing) -> None:
    global _original, _had_fast_path
    with _lock:
        if not _active:
            _original, _had_fast_path = F.scaled_dot_product_attention, torch.backends.mha.get_fastpath_enabled()
            F.scaled_dot_product_attention = _routed
            torch.backends.mha.set_fastpath_enabled(False)
        thread = ALL_THREADS if routing.all_threads else _this_thread()
        _active[thread] = (*_active.get(thread, ()), routing)


def _remove(routing: Routing) -> None:
    with _lock:
        own = ALL_THREADS if routing.all_threads else _this_thread()
        for thread in (own, *_active):  # `undo` may be called in another thread.
            routings = _active.get(thread, ())
            if routing in routings:
                place = len(routings) - 1 - routings[::-1].index(routing)
                _active[thread] = routings[:place] + routings[place + 1 :]
                if not _active[thread]:
                    del _active[thread]
                break
        else:
            return
        if not _active:
            torch.backends.mha.set_fastpath_enabled(_had_fast_path)
            if F.scaled_dot_product_attention is _routed:  # Somebody may have put another function in its place.
                F.scaled_dot_product_attention = _original


def _routed(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Compute a call by the method of the last routing of this thread, or by torch."""
    routings = _active.get(_this_thread()) or _active.get(ALL_THREADS)
    options: dict[str, Any] = dict(
        attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )
    if not routings:
        return _original(query, key, value, **options)
    # torch.compile takes nn.MultiheadAttention whole, and calls it with tensors that only have shapes.
    if torch.compiler.is_compiling() and not (torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()):
        raise RuntimeError(
            "sdpa: torch.compile does not look into torch.nn.MultiheadAttention, so its calls cannot be routed; use "
            "subquad.replace_attention(model, method) instead, or compile without sdpa"
        )
    routing = routings[-1]
    method, reason = routing.method, ""
    try:
        if query.is_nested:
            raise ValueError("nested tensors")
        method = decided(method, query, key, value, **options)
        output: Tensor = quiet_attention(query, key, value, method=method, warns=True, **options)
    except ValueError as error:  # what the method does not serve; torch names what is wrong with any other call
        output, reason = _original(query, key, value, **options), str(error)
    if not torch.compiler.is_compiling():
        routing._record(None if reason else method, reason, query, key, is_causal)
    return output


def _no_calls() -> str:
    text = "no call of torch.nn.functional.scaled_dot_product_attention was seen, so nothing was routed"
    holders = [name for name, module in list(sys.modules.items()) if _holds_function(name, module)]
    if holders:
        names = ", ".join(holders[:3])
        return f"{text}; {names} imported the function by name: there, call it as F.scaled_dot_product_attention"
    return (
        f"{text}; the model may compute attention by itself, or by nn.MultiheadAttention with need_weights=True, for "
        "which there is replace_attention"
    )


def _holds_function(name: str, module: Any) -> bool:
    return name.partition(".")[0] not in ("torch", "subquad") and any(
        value is _original for value in vars(module).values()
    )
