"""The kernels as operators of torch, with derivatives, and with shapes for torch.compile.

    forward(q, k, v, ...)            -> output, normalizer, poison; and the sums of all keys, if wanted
    backward(grad, output, ...)      -> the gradients of q, k, v and of the sums before them, if there are any

Axes: q (b, g, n, d), k (b, m, d), v (b, m, e). Sums are (b, e + 1, r) here: features are contiguous. The output is
finite; its poison, 0 or NaN, is to be added to it.
"""

from typing import Any

import torch
from torch import Tensor

from subquad._engines.features.double_backward import twin_gradients
from subquad._engines.features.native_call import Numbers, Operands, Results, execute
from subquad._torch_internals import is_batched
from subquad.native.calls import MAPS, address, strided

ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? keep, Tensor? table, Tensor? turned, Tensor? before, Tensor? before_poison, "
    "Tensor? before_scale, Tensor? coordinates, int map, int degree, int features, float query_scale, float key_scale, "
    "bool is_causal, bool is_normalized, int chunk, float feature_scale, bool is_tilted"
)
OPERANDS = len(Operands._fields)
LOG_SCALED = {MAPS[name] for name in ("positive", "hyperbolic", "logged")}  # maps whose features have a log-scale
torch.library.define("subquad::forward", f"({ARGUMENTS}, bool want_sums) -> Tensor[]")
torch.library.define(
    "subquad::backward", f"(Tensor grad, Tensor? after_grad, Tensor output, Tensor normalizer, {ARGUMENTS}) -> Tensor[]"
)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def forward(*arguments: Any) -> list[Tensor]:
    """Compute what `forward_shapes` describes."""
    made = forward_shapes(*arguments)
    output, normalizer, poison, *after = (x.data_ptr() if x.numel() else 0 for x in made)
    after = after or [0] * 3
    operands, numbers = Operands(*arguments[:OPERANDS]), Numbers(*arguments[OPERANDS:-1])
    check_shapes(operands, numbers)
    results = Results(after[0], after[1], after[2], output, normalizer, poison)
    execute("forward", operands, numbers, results)
    return made


def check_shapes(operands: Operands, numbers: Numbers) -> None:
    """Raise ValueError for shapes that the kernels would read beyond; a recorded program may be given any."""
    q, k, v, keep = operands.q, operands.k, operands.v, operands.keep
    has_width = k.shape[2] - q.shape[3] in (0, 1)  # The last column of keys may be their log-scale.
    fits = has_width and q.shape[0] == k.shape[0] == v.shape[0] and k.shape[1] == v.shape[1]
    if not fits or (keep is not None and keep.shape != k.shape[:2]):
        shapes = [tuple(x.shape) for x in (q, k, v) if x is not None]
        raise ValueError(f"subquad::forward: expected shapes (b, g, n, d), (b, m, d) and (b, m, e), got {shapes}")
    if numbers.is_causal and q.shape[2] != k.shape[1]:
        raise ValueError(
            "subquad::forward: this program was recorded with as many queries as keys, got "
            f"{q.shape[2]} queries and {k.shape[1]} keys"
        )


def forward_shapes(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> list[Tensor]:
    """Return empty results of the right shapes and dtypes."""
    native_map, _, features, *_, is_tilted, want_sums = others[OPERANDS - 3 :]
    b, g, n, e = *q.shape[:3], v.shape[2]
    shapes: list[tuple[int, ...]] = [(b, g, n, e), (b, g, n), (b, g, n)]
    if want_sums:
        has_scale = native_map in LOG_SCALED or is_tilted or k.shape[2] > q.shape[3]
        shapes += [(b, e + 1, features), (b,), (b, 1 if has_scale else 0)]
    dtype = wide(q.dtype)
    return [q.new_empty(shape, dtype=dtype) for shape in shapes]


def backward(
    grad: Tensor, after_grad: Tensor | None, output: Tensor, normalizer: Tensor, *arguments: Any
) -> list[Tensor]:
    """Compute what `backward_shapes` describes."""
    made = backward_shapes(grad, after_grad, output, normalizer, *arguments)
    operands, numbers = Operands(*arguments[:OPERANDS]), Numbers(*arguments[OPERANDS:])
    results = Results(output=output.data_ptr(), normalizer=normalizer.data_ptr())
    after_grad = None if after_grad is None else after_grad.contiguous()
    q_grad, k_grad, v_grad, *before_grad = (x.data_ptr() for x in made)
    gradients = (*strided(grad), q_grad, k_grad, v_grad, address(after_grad), *(before_grad or [0]))
    execute("backward", operands, numbers, results, gradients)
    return made


def backward_shapes(
    grad: Tensor, after_grad: Tensor | None, output: Tensor, normalizer: Tensor, *arguments: Any
) -> list[Tensor]:
    """Return empty gradients of q, k, v and of the sums before them."""
    before = Operands(*arguments[:OPERANDS]).before
    given = (*arguments[:3], *(() if before is None else (before,)))
    return [x.new_empty(x.shape, dtype=wide(x.dtype)) for x in given]


def save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.save_for_backward(*inputs[:OPERANDS], *output[:2])
    ctx.numbers = inputs[OPERANDS:-1]


def differentiate(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    """Differentiate output and sums. Poison has no derivative, and the log-scale of sums cancels out of all results."""
    *tensors, output, normalizer = ctx.saved_tensors
    operands, numbers = Operands(*tensors), Numbers(*ctx.numbers)
    grad, after_grad = grads[0], grads[3] if len(grads) > 3 else None
    if grad is None and after_grad is None:
        return (None,) * (OPERANDS + len(numbers) + 1)
    if grad is None:
        grad = output.new_zeros(()).expand(output.shape)
    if torch.is_grad_enabled() or is_batched(grad, after_grad):  # a second derivative, or many gradients at once
        with torch.enable_grad():
            found = twin_gradients(grad, after_grad, operands, numbers)
    else:
        found = torch.ops.subquad.backward(grad, after_grad, output, normalizer, *operands, *numbers)
    given = {name: x for name in ("q", "k", "v", "before") if (x := getattr(operands, name)) is not None}
    by_name = {name: own.to(x.dtype) for (name, x), own in zip(given.items(), found, strict=True)}
    return *(by_name.get(name) for name in Operands._fields), *(None,) * (len(numbers) + 1)


torch.library.impl("subquad::forward", "CPU", forward)
torch.library.impl("subquad::backward", "CPU", backward)
torch.library.register_fake("subquad::forward", forward_shapes)
torch.library.register_fake("subquad::backward", backward_shapes)
torch.library.register_autograd("subquad::forward", differentiate, setup_context=save)
