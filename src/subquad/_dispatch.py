"""How a linear method is computed: the one place where a form is chosen, and run.

    dense      all weights, pair by pair                  cost ~ n m (d + e)
    chunked    pairs inside a chunk, sums before it       cost ~ (n + m) r e; not causal: linear
    step       one token after a state                    cost ~ r e
    fused      chunked, by the native kernels             wherever they serve the call

Axes: b batch and key heads, g query heads per key head, n queries, m keys, d width, e value width, r features.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from subquad import _forms as forms
from subquad._features import Linear, Taylor
from subquad._kernel import FeatureKernel, Kernel, Sums
from subquad._layout import Layout
from subquad._methods import Approximation, recipe_of
from subquad._separable import Separable, SeparableKernel
from subquad.native._fused import knows

Form = Literal["dense", "chunked", "step", "fused"]

# Measured on two cores: shorter and the interpreter costs more than the arithmetic, longer and the cache is left.
CHUNK = 64  # tokens of a chunk
WAVE = 1 << 13  # tokens times heads that are computed at once
CACHE = 1 << 22  # features, of all of them together, that are made at once
UNIT = 1024  # tokens between two states that are kept for the backward
PAIRS = 1 << 21  # weights of the dense form that are made at once

# glibc returns a large block to the system when it is freed, and takes it back page by page, until one block of such a
# size has been freed before. This one is never written to, so it costs nothing.
torch.empty(31 << 20, dtype=torch.uint8, device="cpu")


class Sizes(NamedTuple):
    """How many tokens are computed at once."""

    chunk: int  # tokens that meet pair by pair
    wave: int  # tokens whose chunks are computed side by side, a multiple of the chunk
    unit: int  # tokens between two kept states, a multiple of the wave
    rows: int  # rows of the dense form
    batch: int  # batches and heads
    fused: int = 0  # tokens of a chunk of the kernels; 0: as they like


def fusable(method: Approximation, layout: Layout, is_causal: bool, stateful: bool = False) -> bool:
    """Whether the native kernels know the method, and calls of this kind."""
    if layout.device.type != "cpu" or not knows(recipe_of(method)) or method.size(layout.width) == 0:
        return False
    alongside = layout.queries == layout.keys
    if isinstance(method, Separable):
        return is_causal and alongside and not stateful
    return alongside or not is_causal


def choose_form(
    method: Approximation, layout: Layout, is_causal: bool, stateful: bool, resumed: bool,
    form: Form | None, chunk: int | None, fusable: bool = False,
) -> tuple[Form, Sizes]:  # fmt: skip
    """The cheapest form, by the multiplications that each would make; `fusable`: whether the kernels serve the call."""
    n, m, d, e, b = layout.queries, layout.keys, layout.width, layout.value_width, max(1, layout.rows)
    r = method.size(d)
    separable = isinstance(method, Separable)
    # Where weights come from logits, a pair costs d and not r.
    polynomial = (isinstance(method, Taylor) and method.basis == "symmetric") or method == Linear("identity")
    if chunk is not None:  # A test that crosses all borders.
        wave, unit, batch, fused = 2 * chunk, 4 * chunk, b, chunk
    else:
        chunk = max(1, min(n if n <= 2 * CHUNK else CHUNK, CACHE // max(1, r)))
        wave = chunk * max(1, min(WAVE, CACHE // max(r, chunk)) // (b * layout.group * chunk))
        unit = wave * max(1, UNIT // wave)
        batch, fused = max(1, min(WAVE, CACHE // max(r, chunk)) // (layout.group * chunk)), 0
    rows = max(1, min(n, max(CHUNK, PAIRS // max(1, b * layout.group * m))))
    sizes = Sizes(chunk, wave, unit, rows, batch, fused)
    if form is not None:
        return ("chunked" if form == "fused" and not fusable else form), sizes
    if stateful and resumed and n == m == 1:
        return "step", sizes
    if fusable or stateful:
        return ("fused" if fusable else "chunked"), sizes
    pairs = n * m * layout.group / (2 if is_causal and n == m else 1)
    dense = pairs * ((d if polynomial else r) + e + 64)
    linear = (n * layout.group + m) * r * (e + 32)
    return ("dense" if dense < linear and not separable else "chunked"), sizes


def run_form(
    form: Form, sizes: Sizes, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, runs: Tensor | None,
    before: Sums | None, is_causal: bool, want_sums: bool,
) -> tuple[Tensor, Sums | None]:  # fmt: skip
    """(b, g, n, e), and the sums of all keys where they are wanted."""
    n, m = q.shape[2], k.shape[1]
    if form == "fused" and isinstance(kernel, SeparableKernel):
        chunked = lambda: run_form("chunked", sizes, kernel, q, k, v, keep, runs, before, is_causal, want_sums)[0]
        return forms.fused_separable(kernel, q, k, v, keep, sizes.fused, chunked), None
    if form == "fused":
        return forms.fused(cast(FeatureKernel, kernel), q, k, v, keep, before, is_causal, want_sums, sizes.fused)
    if q.shape[0] > sizes.batch:
        return run_in_batches(form, sizes, kernel, q, k, v, keep, runs, before, is_causal, want_sums)
    if q.shape[0] * q.shape[1] * n == 0 or (m == 0 and before is None):  # Nobody asks, or there is nothing to see.
        sums = before
        if want_sums and q.shape[0] and m:
            sums = forms.summed(kernel, k, v, keep, before, sizes.wave)
        nothing = q[..., :0].sum(-1, keepdim=True) + k[..., :0].sum() + v[..., :0].sum()  # 0, with gradients
        return nothing.to(q.dtype).expand(*q.shape[:3], v.shape[-1]), sums
    if m == 0:
        assert before is not None
        return forms.reading(kernel, q, before, sizes.wave), before
    if form == "dense":
        return forms.dense(kernel, q, k, v, keep, runs, is_causal, sizes.rows), None
    if form == "step":
        return forms.step(kernel, q, k, v, keep, runs, before)
    if not is_causal:
        if runs is not None:
            return forms.segmented(kernel, q, k, v, keep, runs, before, sizes.chunk)
        return forms.linear(kernel, q, k, v, keep, before, sizes.wave)
    if n == m:
        return forms.chunked(kernel, q, k, v, keep, runs, before, sizes.chunk, sizes.wave, sizes.unit, want_sums)
    return forms.uneven(kernel, q, k, v, keep, before, sizes.chunk, sizes.wave, sizes.unit, want_sums)


def run_in_batches(
    form: Form, sizes: Sizes, kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, runs: Tensor | None,
    before: Sums | None, is_causal: bool, want_sums: bool,
) -> tuple[Tensor, Sums | None]:  # fmt: skip
    """`run_form` for a few batches and heads at a time, so that what each makes stays in the cache."""

    def parts(tensor: Tensor | None) -> Sequence[Tensor | None]:
        return [None] * -(-q.shape[0] // sizes.batch) if tensor is None else tensor.split(sizes.batch)

    tensors = (q, k, v, keep, runs, *(before or (None,) * len(Sums._fields)))
    outputs, found = [], []
    for q_b, k_b, v_b, keep_b, runs_b, *sums_b in zip(*map(parts, tensors), strict=True):
        own = None if before is None else Sums(*cast(Any, sums_b))
        output, sums = run_form(form, sizes, kernel, q_b, k_b, v_b, keep_b, runs_b, own, is_causal, want_sums)
        outputs.append(output)
        found.append(sums)
    if any(sums is None for sums in found):
        return torch.cat(outputs), None
    joined = [None if parts[0] is None else torch.cat(parts) for parts in zip(*cast(Any, found), strict=True)]
    return torch.cat(outputs), Sums(*cast(Any, joined))
