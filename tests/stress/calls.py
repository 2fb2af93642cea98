"""Random calls of `attention` against the oracle: right within the rounding error, or refused by name.

A result is compared with the definition in float64; where `Multipole` approximates, with its torch twin. An exception
must be a ValueError, TypeError, RuntimeError or NotImplementedError whose message begins with the name of an argument;
`Exact()` may raise what torch raises for the same arguments. Everything else is an internal error.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from stress.draws import Drawn, draw_call
from stress.oracle import Golden, golden
from stress.parts import Failure, Part, draw_for
from stress.plain import Plain, plain
from stress.wrong_calls import break_call
from subquad import BlockSparse, Decoder, Exact, Linear, Multipole, Taylor, Window, attention, native

ARGUMENTS = (
    "query|key|value|attn_mask|dropout_p|is_causal|scale|enable_gqa|method|key_padding_mask|segment_ids|state|"
    "return_state|layout|sink_logits|softcap|key_shift|matrix"
)
OURS = re.compile(rf"^({ARGUMENTS})(, ({ARGUMENTS}))*: \S")
EXPECTED = (ValueError, TypeError, RuntimeError, NotImplementedError)
OUTPUT_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
GRADIENT_TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-10}
ROUNDINGS = 32  # c of the oracle's bound
WRONG_SHARE = 0.15
MASKS = ("key_padding_mask", "segment_ids", "attn_mask")
OF_LOGITS = (Exact, Taylor, Window, BlockSparse, Multipole)
TWIN_TOLERANCE, LARGEST_FOR_TWINS = 1e-6, 1e9  # Kernels look at keys in float32.
APART = 1e-4  # of the largest number of the keys


@contextmanager
def kernels(are_used: bool) -> Iterator[None]:
    """Compute with the kernels, or by torch's operations."""
    before = native.available
    native.available = before if are_used else lambda: False
    try:
        yield
    finally:
        native.available = before


def computed(drawn: Drawn, inputs: tuple[Tensor, ...] | None = None) -> Tensor:
    """Return the output of the call, in pieces if it is cut."""
    inputs = drawn.inputs if inputs is None else inputs
    with kernels(drawn.use_kernels):
        if drawn.cuts is None:
            return attention(*inputs, method=drawn.method, **drawn.options)
        return _resumed(drawn, inputs)


def _resumed(drawn: Drawn, inputs: tuple[Tensor, ...]) -> Tensor:
    state, outputs, start = None, [], 0
    masks = {name: drawn.options[name] for name in MASKS if name in drawn.options}
    others = {name: value for name, value in drawn.options.items() if name not in masks}
    for number, length in enumerate(drawn.cuts or ()):
        place = slice(start, start + length)
        start += length
        tokens = [x[..., place, :] for x in inputs]
        is_step = drawn.is_stepped and length == 1 and number > 1 and not masks and not any(
            x.requires_grad for x in inputs)  # fmt: skip
        if is_step and state is not None and state.length:
            decoder = Decoder(state, scale=others.get("scale"), enable_gqa=others.get("enable_gqa", False))
            output, state = decoder(*tokens), decoder.state
        else:
            own = {name: mask[..., place] for name, mask in masks.items()}
            output, state = attention(
                *tokens, method=drawn.method, state=state, return_state=True, **others, **own
            )  # fmt: skip
        outputs.append(output)
    return torch.cat(outputs, -2)


def case(number: int, shared: Path) -> Counter[str]:
    """Draw a call and check it."""
    rng = draw_for("calls", number)
    drawn = draw_call(rng)
    wrong = break_call(rng, drawn) if rng.random() < WRONG_SHARE else None
    counts = Counter({"calls": 1})
    try:
        inputs = _leaves(drawn)
        output = computed(drawn, inputs)
    except Exception as error:
        counts.update(judge_error(drawn, error, wrong))
        return counts
    if wrong is not None:
        raise Failure("wrong call accepted", f"{wrong}: {drawn}")
    counts.update(check(drawn, inputs, output))
    return counts


def _leaves(drawn: Drawn) -> tuple[Tensor, ...]:
    if not drawn.is_differentiated or not all(isinstance(x, Tensor) and x.is_floating_point() for x in drawn.inputs):
        return drawn.inputs
    return tuple(x.detach().requires_grad_() for x in drawn.inputs)


def judge_error(drawn: Drawn, error: Exception, wrong: str | None) -> Counter[str]:
    """Return what to count for an exception that is ours or torch's; raise Failure for any other."""
    message = str(error)
    is_ours = isinstance(error, EXPECTED) and OURS.match(message)
    if not is_ours and not (isinstance(drawn.method, Exact) and _is_torchs(drawn, error)):
        line = message.strip().splitlines()[0] if message.strip() else ""
        raise Failure("internal error", f"{type(error).__name__}: {line[:160]}: {wrong or 'valid'}: {drawn}") from error
    if wrong is not None:
        return Counter({"refused by name, as expected": 1})
    pattern = re.sub(r"\(?[\d][\d, ]*\)?", "N", message.split(";")[0])[:70]
    return Counter({f"not supported: {type(drawn.method).__name__}: {pattern}": 1, "refused": 1})


def _is_torchs(drawn: Drawn, error: Exception) -> bool:
    """Return whether torch's own function raises the same."""
    names = ("attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    options = {name: drawn.options[name] for name in names if name in drawn.options}
    if drawn.cuts is not None or len(options) != len(drawn.options):
        return False
    try:
        F.scaled_dot_product_attention(*drawn.inputs, **options)
    except Exception as own:
        return type(own) is type(error) and str(own) == str(error)
    return False


def check(drawn: Drawn, inputs: tuple[Tensor, ...], output: Tensor) -> Counter[str]:
    """Raise Failure unless the output is right, and the gradients where there are any; return what was compared."""
    sizes = drawn.sizes
    expected_shape = (*sizes.lead, sizes.n, sizes.e)
    if output.shape != expected_shape or output.dtype != drawn.query.dtype:
        raise Failure("wrong shape", f"{tuple(output.shape)} {output.dtype}, expected {expected_shape}: {drawn}")
    given = plain(drawn)
    if isinstance(drawn.method, Exact) and bool(given.poisoned.any() | ~_all_finite(drawn)):
        return Counter()  # It keeps torch's behavior.
    if isinstance(drawn.method, Multipole) and not _is_exact_range(drawn):
        _check_twin(drawn, output)
        return Counter({"compared with its twin": 1})
    leaves = [x.requires_grad_(drawn.is_differentiated) for x in (given.q, given.k, given.v)]
    found = golden(drawn.method, *leaves, given.seen, given.scale)
    _check_output(drawn, given, found, output.detach().double().reshape(found.output.shape))
    counts = Counter({"compared with the definition": bool((found.firm & ~given.poisoned).any())})
    if drawn.is_differentiated and output.requires_grad and _all_finite(drawn) and found.is_smooth:
        _check_gradients(drawn, inputs, output, found)
        counts["gradients compared"] += 1
    return counts


def _all_finite(drawn: Drawn) -> bool:
    return all(bool(x.isfinite().all()) for x in drawn.inputs)


def _is_exact_range(drawn: Drawn) -> bool:
    """Return whether a query of Multipole has no finished segment, whatever is hidden."""
    return drawn.sizes.m < drawn.method.sinks + drawn.method.window + drawn.method.segment


def precision(drawn: Drawn) -> tuple[torch.dtype, float]:
    """Return the dtype of the computation, and the rounding of the result in the dtype of the inputs."""
    dtype = drawn.query.dtype
    wide = torch.promote_types(dtype, torch.float32)
    if isinstance(drawn.method, Exact) and dtype != wide:  # Torch multiplies in half precision.
        return wide, 16 * torch.finfo(dtype).eps
    return wide, 0.0 if dtype == wide else torch.finfo(dtype).eps


def _check_output(drawn: Drawn, given: Plain, found: Golden, output: Tensor) -> None:
    wide, rounding = precision(drawn)
    poisoned = given.poisoned[..., None].expand_as(output)
    if not bool(output.isnan()[poisoned].all()):
        raise Failure("poison lost", f"a row that sees a number that is not finite is finite: {drawn}")
    compared = (found.firm & ~given.poisoned)[..., None].expand_as(output)
    largest = given.v.detach().abs().amax() if given.v.numel() else torch.zeros(())
    base = 0.0 if drawn.method == Linear("identity") else OUTPUT_TOLERANCE[wide]
    smallest = torch.finfo(drawn.query.dtype).tiny
    allowed = (base + rounding) * largest + ROUNDINGS * torch.finfo(wide).eps * found.slack + smallest
    allowed = allowed + rounding * (found.output.detach().abs() + found.slack)
    error = (output - found.output.detach()).abs()
    wrong = compared & ~(error <= allowed) & (found.output.detach().abs() < torch.finfo(drawn.query.dtype).max / 2)
    if bool(wrong.any()):
        place = tuple(wrong.nonzero()[0].tolist())
        kind = "NaN" if bool(output[place].isnan()) else "wrong output"
        detail = f"{output[place]:.8g} at {place}, expected {found.output[place]:.8g} +- {allowed[place]:.2g}"
        raise Failure(kind, f"{detail}, {int(wrong.sum())} of {wrong.numel()}: {drawn}")


def _check_gradients(drawn: Drawn, inputs: tuple[Tensor, ...], output: Tensor, found: Golden) -> None:
    """Compare the gradients of a loss in which each number counts differently."""
    wide, rounding = precision(drawn)
    counts = torch.arange(output.numel(), dtype=torch.float64).add(1).sin()
    grads = torch.autograd.grad(output, inputs, counts.reshape(output.shape).to(output), allow_unused=True)
    given = plain(drawn)
    leaves = [x.detach().double().requires_grad_() for x in drawn.inputs]
    again = plain(_with_inputs(drawn, leaves))
    wanted = golden(drawn.method, again.q, again.k, again.v, given.seen, given.scale).output
    references = torch.autograd.grad((wanted.flatten() * counts).sum(), leaves, allow_unused=True)
    rows = max(1, output.shape[-2] if output.dim() > 1 else 1)
    natural = _natural(drawn, given, rows)
    unit = ROUNDINGS * torch.finfo(wide).eps
    # Activations of small numbers are small; their products do not have a largest weight of 1.
    unit = unit / found.smallest_sum if isinstance(drawn.method, Linear) else unit
    tolerance = GRADIENT_TOLERANCE[wide] + unit * found.condition**2 + 8 * rounding
    numbers = torch.finfo(drawn.query.dtype)
    smallest, largest = numbers.tiny * numbers.eps, numbers.max / 4
    if max((float(x.abs().max()) for x in references if x is not None and x.numel()), default=0.0) > largest:
        return
    for name, grad, reference in zip(natural, grads, references, strict=True):
        grad = torch.zeros(()) if grad is None else grad.double()
        reference = torch.zeros(()) if reference is None else reference
        allowed = tolerance * (natural[name] + (reference.abs().amax() if reference.numel() else 0)) + smallest
        error = (grad - reference).abs()
        if error.numel() and not bool((error <= allowed).all()):
            worst = float(error.nan_to_num(torch.inf).max())
            raise Failure("wrong gradient", f"of the {name}: off by {worst:.3g}, allowed {float(allowed):.2g}: {drawn}")


def _natural(drawn: Drawn, given: Plain, rows: int) -> dict[str, Tensor]:
    """Return the size of the terms whose sum is a gradient, by input."""
    q, k, v = (x.detach().abs().amax() if x.numel() else torch.zeros(()) for x in (given.q, given.k, given.v))
    k = k + max(map(abs, getattr(drawn.method, "key_shift", None) or [0.0]))
    if isinstance(drawn.method, OF_LOGITS):
        slopes = k * given.scale, q * given.scale
    else:  # Maps of q and k themselves have terms whose gradients cancel, however small the other one is.
        root = math.sqrt(given.scale)
        slopes = root * (k * root).clamp(1.0), root * (q * root).clamp(1.0)
    return {"query": v * slopes[0], "key": rows * v * slopes[1], "value": torch.tensor(float(rows))}


def _with_inputs(drawn: Drawn, inputs: Any) -> Drawn:
    return Drawn(drawn.sizes, drawn.method, *inputs, options=drawn.options, cuts=drawn.cuts)


def _check_twin(drawn: Drawn, output: Tensor) -> None:
    """Compare Multipole by kernels with Multipole by torch's operations, in float64, where no choice is close.

    Equal keys are moved apart: which of them share a block is left to the order of sums.
    """
    if not _all_finite(drawn) or any(bool((x.abs() > LARGEST_FOR_TWINS).any()) for x in drawn.inputs):
        return
    query, key, value = (x.double() for x in drawn.inputs)
    apart = torch.randn(key.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wide = _with_inputs(drawn, [query, key + APART * key.abs().amax() * apart if key.numel() else key, value])
    by_kernels, by_torch = (computed(Drawn(**vars(wide) | {"use_kernels": use})) for use in (True, False))
    scale = by_torch.abs().max() if by_torch.numel() else 0.0
    error = (by_kernels - by_torch).abs()
    if error.numel() and not bool((error <= TWIN_TOLERANCE * scale).all()):
        raise Failure("twins differ", f"by {float(error.max() / scale):.2g} of the largest number: {drawn}")


PART = Part("calls", "calls", 0.1, 30.0, case)
