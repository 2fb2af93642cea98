"""Calls with one fault, which must be refused by name."""

import random
from collections.abc import Callable
from typing import Any

import torch

from stress.draws import Drawn
from subquad import Exact, Taylor, attention


def break_call(rng: random.Random, drawn: Drawn) -> str | None:
    """Put one fault into a call, and return its name; None if that fault does not apply to it."""
    name = rng.choice(list(FAULTS))
    drawn.cuts = None
    return name if FAULTS[name](drawn) else None


def _changed(which: str, change: Callable[[Any], Any]) -> Callable[[Drawn], bool]:
    def apply(drawn: Drawn) -> bool:
        before = getattr(drawn, which)
        setattr(drawn, which, change(before))
        after = getattr(drawn, which)
        return not isinstance(after, torch.Tensor) or after.shape != before.shape or after.dtype != before.dtype

    return apply


def _given(make: Callable[[Drawn], dict[str, Any] | None]) -> Callable[[Drawn], bool]:
    def apply(drawn: Drawn) -> bool:
        options = make(drawn)
        if options is None:
            return False
        drawn.options.update(options)
        return True

    return apply


def _other_dtype(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float64 if x.dtype == torch.float32 else torch.float32)


def _state_of_other(method: Any) -> Any:
    x = torch.ones(1, 1, 3, 5)
    other = Taylor(7) if isinstance(method, Exact) else Exact()
    return attention(x, x, x, method=other, is_causal=True, return_state=True)[1]


def _many_heads(drawn: Drawn) -> dict[str, Any] | None:
    """Give the query a number of heads that no number of key heads above 1 divides."""
    if drawn.sizes.heads == 1:
        return None
    drawn.query = torch.cat([drawn.query] * 6 + [drawn.query[..., :1, :, :]], -3)
    return {}


FAULTS: dict[str, Callable[[Drawn], bool]] = {
    "key of another dtype": _changed("key", _other_dtype),
    "value of another dtype": _changed("value", _other_dtype),
    "query of another dtype": _changed("query", _other_dtype),
    "integers": _changed("query", lambda x: x.nan_to_num(0, 0, 0).clamp(-9, 9).long()),
    "complex numbers": _changed("value", lambda x: x.to(torch.complex64)),
    "another width": _changed("key", lambda x: torch.cat([x, x[..., :1], x[..., :1]], -1) if x.shape[-1] else x),
    "a longer value": _changed("value", lambda x: torch.cat([x, x[..., :1, :]], -2) if x.shape[-2] > 1 else x),
    "one dimension": _changed("query", lambda x: x.flatten()),
    "no tensor": _changed("key", lambda x: None),
    "a list": _changed("value", lambda x: [[1.0]]),
    "heads that do not divide": _given(_many_heads),
    "padding of numbers": _given(lambda drawn: {"key_padding_mask": torch.ones(drawn.sizes.m)}),
    "padding too long": _given(
        lambda drawn: {"key_padding_mask": torch.ones(drawn.sizes.m + 2, dtype=torch.bool)} if drawn.sizes.m else None
    ),
    "mask too long": _given(
        lambda drawn: {"attn_mask": torch.ones(1, drawn.sizes.m + 2, dtype=torch.bool)} if drawn.sizes.m else None
    ),
    "segments of numbers": _given(lambda drawn: {"segment_ids": torch.ones(drawn.sizes.n)}),
    "segments too long": _given(
        lambda drawn: {"segment_ids": torch.ones(drawn.sizes.n + 2, dtype=torch.int64)} if drawn.sizes.n else None
    ),
    "a name without a method": _changed("method", lambda method: "tailor"),
    "a degree that is no number": _changed("method", lambda method: "taylor:many"),
    "the class of a method": _changed("method", lambda method: Taylor),
    "a method of another kind": _changed("method", lambda method: 3),
    "a state of another method": _given(lambda drawn: {"state": _state_of_other(drawn.method)}),
    "a state that is a tensor": _given(lambda drawn: {"state": torch.ones(3)}),
    "dropout": _given(lambda drawn: None if isinstance(drawn.method, Exact) else {"dropout_p": 0.5}),
    "dropout above 1": _given(lambda drawn: {"dropout_p": 1.5}),
    "a scale that is text": _given(lambda drawn: {"scale": "big"}),
    "a scale that is not a number": _given(
        lambda drawn: None if isinstance(drawn.method, Exact) else {"scale": float("nan")}
    ),
}
