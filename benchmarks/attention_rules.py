"""The attention rules of the decoder benchmarks: exact attention, Multipole, and others at equal cost.

Each takes the queries of the last n of m positions, so that one rule can process a context and another the tokens after
it.
"""

import block_selection as selection
import torch
from decoder import Attend
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

import subquad
from subquad import Multipole

EXACT, WINDOW = "exact", "window + sinks"


def rules(method: Multipole) -> dict[str, Attend]:
    """Return the rules that are compared, by name, at the budget of a method."""
    return {
        EXACT: exact,
        method.label: by_method(method),
        WINDOW: selection.window(method),
        "blocks by centroid": selection.select(method, selection.by_centroid, scan=0.5),
        "blocks by min-max bound (Quest)": selection.select(method, selection.by_bound, scan=1.0),
        "blocks by antidiagonal (XAttention)": selection.antidiagonal(method),
        "blocks by true mass (oracle)": selection.select(method, selection.by_mass, scan=0.0),
    }


def exact(query: Tensor, key: Tensor, value: Tensor, scale: float, layer: int) -> Tensor:
    """Attend to all keys up to each query."""
    n, m = query.shape[-2], key.shape[-2]
    if n == m:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    outputs = []
    for start, end in selection.chunks(m - n, m):
        shown = torch.arange(end) <= torch.arange(start, end)[:, None]
        rows = query[..., start - (m - n) : end - (m - n), :]
        outputs.append(
            scaled_dot_product_attention(
                rows, key[..., :end, :], value[..., :end, :], shown, scale=scale, enable_gqa=True
            )
        )
    return torch.cat(outputs, -2)


def by_method(method: Multipole) -> Attend:
    """Return the rule that calls `subquad.attention`."""

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, layer: int) -> Tensor:
        before = key.shape[-2] - query.shape[-2]
        whole = pad(query, (0, 0, before, 0))  # A causal call has as many queries as keys.
        output = subquad.attention(whole, key, value, is_causal=True, scale=scale, enable_gqa=True, method=method)
        return output[..., before:, :]

    return attend
