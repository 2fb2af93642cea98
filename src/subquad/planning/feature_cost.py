"""What a feature method costs, in the form that the engine would choose.

Work is counted in `flops`, memory in `peak_bytes`.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from subquad._engines.features.choose_form import Form, Sizes, choose_form, is_fusable, sizes_of
from subquad.methods.method import FeatureMethod, feature_method
from subquad.planning.cost_result import Cost, order_of
from subquad.planning.flops import FormCall
from subquad.planning.peak_bytes import peak_bytes
from subquad.planning.shape import Shape


def form_of(
    method: FeatureMethod, shape: Shape, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> Form:
    """Return the form that the engine chooses for a call of this shape, without masks or a state."""
    layout = shape.layout_on(device or torch.device("cpu"))
    by_kernels = is_fusable(method, layout, dtype, is_causal=shape.is_causal)
    return choose_form(method, layout, is_causal=shape.is_causal, is_fusable=by_kernels)


def form_call(method: FeatureMethod, shape: Shape, form: Any) -> FormCall:
    """Return the call in one form, with the sizes in which torch computes it."""
    if form == "step":
        shape = replace(shape, key_length=1)
        sizes = Sizes(1, 1, 1, 1, shape.layout.rows)
    else:
        form = "linear" if form == "chunked" and not shape.is_causal else form
        sizes = sizes_of(method.size(shape.head_dim), shape.layout)
    return FormCall(shape, sizes, method, method.traits(shape.head_dim), form)


def feature_cost(method: Any, shape: Shape, form: str | None, dtype: torch.dtype) -> Cost:
    """Return the cost of a call of a feature method, or of a user's map."""
    features = feature_method(method)
    call = form_call(features, shape, form or form_of(features, shape, dtype=dtype))
    number, wide = dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize
    inputs, outputs, made = call.shape.inputs, call.shape.outputs, call.made()
    # The backward pass makes everything again, and a gradient of everything; it reads the inputs and the result's
    # gradient.
    moved = (2 * inputs + 2 * outputs + inputs, 6 * made) if shape.training else (inputs + outputs, 2 * made)
    parameters = sum(p.numel() for p in method.parameters() if p.requires_grad) if isinstance(method, nn.Module) else 0
    return Cost(
        flops=call.flops(),
        bytes_moved=number * moved[0] + wide * moved[1],
        peak_bytes=peak_bytes(call, number, wide),
        state_bytes=wide * call.sums,
        parameters=parameters,
        form=call.form,
        order=_order(call),
    )


def _order(call: FormCall) -> str:
    time, memory = {
        "dense": ("n m (d + e)", "n e + m d"),
        "linear": ("(n + m) r e", f"n e + m r e / {call.sizes.wave}" if call.shape.training else "n e + r e"),
        "chunked": ("n r e", f"n e + n r e / {call.sizes.unit}"),
        "fused": ("n m (d + e)", "n e") if call.by_pairs else ("(n + m) r e", "n e + r e"),
        "step": ("r e", "r e"),
    }[call.form]
    return order_of(time, memory, call.shape, call.r)
