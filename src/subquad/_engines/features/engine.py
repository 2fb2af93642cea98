"""The engine of all feature methods: fold the call, choose the form, compute, unfold the result.

    out_i = sum_j phi(q_i).phi(k_j) v_j / sum_j phi(q_i).phi(k_j)    over the keys j that query i may see

Axes: b batch and key heads, g query heads per key head, n queries, m keys, d width, e value width, r features.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from subquad._calls.call import Call
from subquad._calls.state import State
from subquad._calls.sums import Sums
from subquad._engines.features.alignment import Coordinates, packed
from subquad._engines.features.at_once import run_at_once
from subquad._engines.features.choose_form import Form, choose_form, is_fusable, sizes_of
from subquad._engines.features.forms import Beside, run_form
from subquad._engines.features.fused import PLAIN_TYPES, fused, fused_separable, fused_step
from subquad._engines.features.kernel import FeatureKernel, Kernel
from subquad._engines.features.mapped import mapped
from subquad._engines.features.method_kernel import kernel_of
from subquad._engines.features.sums import Tokens
from subquad._engines.result import Result
from subquad._torch_internals import has_open_size, is_recorded, is_transformed
from subquad.methods.memory_limit import check_memory, needs_features
from subquad.methods.method import FeatureMethod, feature_method


def run(method: Any, call: Call, form: Form | None = None, chunk: int | None = None) -> Result:
    """Compute the call; tests may choose the form and the chunk."""
    features = feature_method(method)
    call = call.factored()
    # Features, sums and normalizers are never in half precision.
    wide: AbstractContextManager[Any] = nullcontext()
    if call.is_autocast:
        wide = torch.autocast(call.layout.device.type, enabled=False)
    with wide:
        whole = call
        if features.is_learned:
            features, call = mapped(method, call)[:2]
        q, k, v = call.folded()
        k = k if call.log_scales is None else torch.cat([k, call.log_scales[..., None]], -1)
        tokens = Tokens(q, k, v, call.keep(), call.segments)
        before, following = _sums_before(call), _sums_following(call)
        is_served = _is_served(features, call, tokens, before)
        form = _form_of(features, call, is_served, before is not None, form)
        is_step = form == "step" and is_served and before is not None and _is_simple_step(tokens, before)
        coordinates = None
        if features.is_aligned:
            if form == "fused" or is_step:  # The kernels do it where they read the tokens.
                coordinates = packed(features, call.layout, call.logit_scale, k)
            else:
                q, k = Coordinates.of(features, call.layout, call.logit_scale, k)(q, k)
                tokens = tokens._replace(q=q, k=k)
        if needs_features(features, form) and not has_open_size(call.layout.rows):
            # Without a state, the sums of few heads exist at a time.
            held = call.layout.rows if call.is_stateful else 1
            check_memory(features, call.layout.width, held * (call.layout.value_width + 1))
        kernel, q, k = kernel_of(
            features, tokens.q, tokens.k, call.logit_scale, call.is_normalized, pairs_alone=form == "dense"
        )
        if q is not tokens.q:
            tokens = tokens._replace(q=q, k=k)
        if is_step:
            assert isinstance(kernel, FeatureKernel) and before is not None
            found: tuple[Tensor, Sums | None] = fused_step(features, kernel, tokens, before, coordinates)
        elif form == "fused" and isinstance(kernel, FeatureKernel):
            found = fused(features, kernel, tokens, before, call.is_causal, call.return_state, chunk or 0, coordinates)
        else:
            found = _computed(features, kernel, form, tokens, (before, following), call, chunk)
        output, sums = found
        state = _state_after(method, whole, sums) if call.return_state else None
        return Result(call.unfolded(output), state, form)


def _computed(
    method: FeatureMethod, kernel: Kernel, form: Form, tokens: Tokens, beside: Beside, call: Call, chunk: int | None
) -> tuple[Tensor, Sums | None]:
    """Return the output (b, g, n, e), and the sums of all keys if the call returns a state."""
    before, _ = beside
    lay = call.layout
    if form not in ("fused", "dense") and has_open_size(lay.rows, lay.queries, lay.keys):
        return run_at_once(form, kernel, tokens, before, call.is_causal)
    sizes = sizes_of(method.size(lay.width), lay, chunk)
    if form == "fused":
        output, left = fused_separable(kernel, tokens, chunk or 0)
        if left is None:
            return output, None
        by_torch, _ = run_form("chunked", sizes, kernel, tokens, (None, None), True, False)
        return torch.where(left[..., None], by_torch, output), None
    return run_form(form, sizes, kernel, tokens, beside, call.is_causal, call.return_state)


def _is_served(method: FeatureMethod, call: Call, tokens: Tokens, before: Sums | None) -> bool:
    """Return whether the kernels compute this call: its kind, and what autograd and torch.func do with it."""
    q, k, v = tokens[:3]
    if call.layout.keys == 0 and before is None:  # nothing to read
        return False
    if not is_fusable(method, call.layout, q.dtype, is_causal=call.is_causal, is_stateful=call.is_stateful,
                      has_segments=call.segments is not None):  # fmt: skip
        return False
    # Which rows of this map are left to torch depends on the numbers, and a recorded call is for other numbers too.
    if method.normalizer == "feature" and (torch.compiler.is_compiling() or is_recorded()):
        return False
    return not is_transformed(q, k, v, *(x for x in (before or ()) if x is not None and x.is_floating_point()))


def _is_simple_step(tokens: Tokens, before: Sums) -> bool:
    """Return whether the kernels compute this step directly: no mask, and nothing that records."""
    if tokens.keep is not None or torch.compiler.is_compiling() or is_recorded():
        return False
    learns = torch.is_grad_enabled()
    return all(type(x) in PLAIN_TYPES and not (learns and x.requires_grad) for x in (*tokens[:3], before.values))


def _form_of(method: FeatureMethod, call: Call, is_served: bool, is_resumed: bool, wanted: Form | None) -> Form:
    """Return the form that was asked for, as far as the call has it; else the cheapest."""
    if wanted is None:
        return choose_form(
            method, call.layout, is_causal=call.is_causal, is_fusable=is_served, is_stateful=call.is_stateful,
            is_resumed=is_resumed,
        )  # fmt: skip
    if wanted in ("dense", "step") or (wanted == "fused" and is_served):
        return wanted
    return "chunked" if call.is_causal else "linear"


def _sums_before(call: Call) -> Sums | None:
    """Return the sums of the state, (b, r, e + 1) and so on."""
    state, rows = call.state, call.layout.rows
    if state is None or state.sums is None or state.poison is None:
        return None
    log_scale = None if state.log_scale is None else state.log_scale.reshape(rows, -1)
    segment = None if call.segments is None else call.segments.new_zeros(rows)
    return Sums(state.sums.reshape(rows, *state.sums.shape[-2:]), state.poison.reshape(rows), log_scale, segment)


def _sums_following(call: Call) -> Sums | None:
    """Return the sums of the keys after these, with the number of the segment that they continue."""
    state, rows = call.following, call.layout.rows
    if state is None or state.sums is None or state.poison is None or call.segments is None:
        return None
    assert state.segment is not None and call.last_segment is not None
    log_scale = None if state.log_scale is None else state.log_scale.reshape(rows, -1)
    continues = state.segment.reshape(rows) == call.last_segment
    segment = torch.where(continues, call.segments[:, -1], -1) if call.layout.keys else call.last_segment
    return Sums(state.sums.reshape(rows, *state.sums.shape[-2:]), state.poison.reshape(rows), log_scale, segment)


def _state_after(method: Any, call: Call, sums: Sums | None) -> State:
    unfold, length = call.layout.unfold, call.layout.keys + (0 if call.state is None else call.state.length)
    if sums is None:
        return State(method, length, call.logit_scale)
    return State(
        method,
        length,
        call.logit_scale,
        sums=unfold(sums.values),
        poison=unfold(sums.poison),
        log_scale=None if sums.log_scale is None else unfold(sums.log_scale),
        segment=None if call.last_segment is None else unfold(call.last_segment),
        is_whole=None if call.segments is None else unfold(_is_whole(call)),
    )


def _is_whole(call: Call) -> Tensor:
    """Return (b,): whether all keys, also those of the state, are of the last segment."""
    assert call.segments is not None
    is_whole = (call.segments == 0).all(1)
    before = None if call.state is None else call.state.is_whole
    return is_whole if before is None else is_whole & before.reshape(-1)
