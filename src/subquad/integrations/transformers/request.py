"""What a layer asks for besides plain attention, and the method that serves it.

    a bias of positions, chunks            Exact()
    a sliding window of w keys             Window(w); the chosen method, if it has states, up to w tokens
    logit soft-capping, learned sinks      Window(w or None, softcap=..., sink_logits=...), which is exact
    none of these                          the method that was chosen for the layer

The size counts the query's own key, as transformers' `sliding_window` does. At a call the mask decides whether there is
a window. Before it, `request_of` reads what the layer is going to ask for, for the report and for the cache.
"""

import inspect
import re
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter
from typing import Any

from torch import Tensor

from subquad._engines import engine_of
from subquad.integrations.transformers.layers import keeps_state
from subquad.methods import AnyMethod
from subquad.methods.exact import Exact
from subquad.methods.window import Window
from subquad.nn.report import describe
from subquad.planning.auto import Auto


@dataclass(frozen=True, eq=False)
class Request:
    """What a layer asks for.

    Attributes:
        window: The number of nearest keys that a query sees, on either side if the layer is not causal; None for all.
        softcap: Soft-capping of the logits, or None.
        sink_logits: A learned logit for each query head, or None.
    """

    window: int | None = None
    softcap: float | None = None
    sink_logits: Tensor | None = None

    @property
    def changes_weights(self) -> bool:
        """Whether it asks for more than a choice of keys, which a mask could express."""
        return self.softcap is not None or self.sink_logits is not None

    @property
    def reason(self) -> str:
        """The request in words; empty if there is none."""
        given = (self.window, self.softcap, self.sink_logits)
        names = ("its sliding window", "logit soft-capping", "learned sinks")
        return " and ".join(name for name, value in zip(names, given, strict=True) if value is not None)


def serve(method: AnyMethod | Auto, request: Request) -> AnyMethod | Auto:
    """Return the method that serves a request of a layer for which `method` was chosen."""
    if not request.reason:
        return method
    given = dict(softcap=request.softcap, sink_logits=request.sink_logits)
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if request.window is None and engine_of(method) == "sparse":
        return replace(method, **options)  # type: ignore[type-var]
    return Window(request.window, **options)


def planned(layer: Any, method: AnyMethod | Auto | None) -> tuple[AnyMethod | Auto | None, str]:
    """Return the method that will serve a layer for which `method` was chosen, and a note if it is another one."""
    if method is None:
        return None, ""
    if engine_of(method) != "exact" and (reason := needs_exact(layer)):
        return Exact(), f"because of {reason}"
    request = request_of(layer)
    if not request.reason:
        return method, ""
    is_replaced = request.window is not None or engine_of(method) != "sparse"
    prefix = "exact, " if is_replaced and engine_of(method) != "exact" else ""
    length = short_length(layer, method)
    suffix = f"; {describe(method)} up to {length:,} tokens" if length else ""
    return serve(method, request), f"{prefix}because of {request.reason}{suffix}"


def needs_exact(layer: Any) -> str:
    """Return what a layer asks for that exact attention alone serves; empty if there is nothing."""
    if "position_bias" in _keywords(layer.__class__):
        return "its position bias"
    return "its chunks of keys" if _type_of(layer) == "chunked_attention" else ""


def short_length(layer: Any, method: AnyMethod | Auto | None) -> int:
    """Return the length up to which a layer with a window gets the chosen method; 0 if it does not depend on that."""
    request = request_of(layer)
    return request.window if request.window is not None and has_no_window(method, request, request.window) else 0


def has_no_window(method: AnyMethod | Auto | None, request: Request, length: float) -> bool:
    """Return whether a sequence is so short that its layer, with a window, gets the chosen method.

    `Window` is exact, so it stays where exact attention was chosen, and where the weights have to be changed anyway.
    """
    is_short = request.window is not None and length <= request.window
    return is_short and keeps_state(method) and not request.changes_weights


def request_of(layer: Any) -> Request:
    """Return what a layer is going to ask for, read from its attributes and its config."""
    passed = _keywords(layer.__class__)
    return Request(
        window=_window_of(layer),
        softcap=getattr(layer, "attn_logit_softcapping", None) if "softcap" in passed else None,
        sink_logits=getattr(layer, "sinks", None) if "s_aux" in passed else None,
    )


def dropout_of(layer: Any, chosen: AnyMethod | Auto, method: AnyMethod | Auto) -> float:
    """Return the dropout on the weights of a layer, if the method that serves it does not support that; otherwise 0."""
    request = request_of(layer)
    # Windows alone are masks, so exact attention serves them with dropout.
    if engine_of(method) == "exact" or (engine_of(chosen) == "exact" and not request.changes_weights):
        return 0.0
    return max((attrgetter(name)(layer) for name in _dropout_attributes(layer.__class__)), default=0.0)


@cache
def _dropout_attributes(kind: Any) -> frozenset[str]:
    """Return the attributes in what `forward` passes as `dropout=`, such as "attn_dropout.p"."""
    try:
        source = inspect.getsource(inspect.unwrap(kind.forward))
    except OSError:  # A class that was typed in has none; its dropout, if any, raises at the first call.
        return frozenset()
    passed = re.findall(r"\bdropout=([^,\n]*)", source)
    return frozenset(re.findall(r"self\.([\w.]+)", " ".join(passed))) - {"training"}


def _window_of(layer: Any) -> int | None:
    if _type_of(layer) not in (None, "sliding_attention"):
        return None
    # Cross-attention shares the config of a decoder but not its window.
    shared = getattr(layer.config, "sliding_window", None) if getattr(layer, "is_causal", True) else None
    found = getattr(layer, "sliding_window", shared)
    return found if isinstance(found, int) and found > 0 else None


def _type_of(layer: Any) -> str | None:
    """Return the entry of a layer in the config's `layer_types`, or None."""
    types, index = getattr(layer.config, "layer_types", None), getattr(layer, "layer_idx", None)
    return types[index] if types is not None and index is not None and index < len(types) else None


@cache
def _keywords(kind: Any) -> frozenset[str]:
    """Return the constants in the code of `forward`, which contain the names of the arguments that it passes."""
    constants = inspect.unwrap(kind.forward).__code__.co_consts
    groups = (constant if isinstance(constant, tuple) else (constant,) for constant in constants)
    return frozenset(name for group in groups for name in group if isinstance(name, str))
