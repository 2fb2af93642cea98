"""Bits that must not change: a row alone and in a batch, on 1 and 2 threads, and the past under edits of the future.

With the kernels every method keeps all three promises, forward and backward. Bidirectional `Separable`, trigonometric
features and packed sequences of feature methods are torch operations, whose bits may depend on the batch and on the
number of threads; they only keep the third.
"""

import math
import random
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from calls import Squares
from stress.draws import generator_of
from stress.parts import Failure, Part, draw_for
from subquad import BlockSparse, Linear, Multipole, RandomFeatures, Separable, Taylor, Window, attention, native
from subquad._engines import engine_of

METHODS: dict[str, Any] = {
    "taylor 1": Taylor(1),
    "taylor 2": Taylor(2),
    "taylor 3": Taylor(3),
    "positive": RandomFeatures(64),
    "hyperbolic": RandomFeatures(32, "hyperbolic"),
    "trigonometric": RandomFeatures(16, "trigonometric"),
    "elu": Linear("elu"),
    "relu": Linear("relu"),
    "identity": Linear("identity"),
    "separable": Separable(),
    "multipole": Multipole(),
    "small multipole": Multipole(window=5, sinks=2, block=2, top=2),
    "window": Window(20, sinks=2),
    "capped window": Window(7, sinks=1, softcap=3.0),
    "blocks": None,  # drawn for the length
    "user": Squares(),
}
LENGTHS, MAX_LENGTH_OF_USER = (1, 2, 17, 64, 100, 257, 500), 100
EDITS = (math.nan, math.inf, -math.inf, 3e38, -3e38, 0.0, 1e-40)
BY_TORCH = ("trigonometric", "user")  # whose own products are torch's


class Drawn(NamedTuple):
    """A call with several rows."""

    name: str
    method: Any
    inputs: tuple[Tensor, Tensor, Tensor]
    options: dict[str, Any]
    is_differentiated: bool

    def __str__(self) -> str:
        shapes = ", ".join(str(tuple(x.shape)) for x in self.inputs)
        options = {name: tuple(x.shape) if isinstance(x, Tensor) else x for name, x in self.options.items()}
        return f"{self.name} {shapes} {self.inputs[0].dtype} {options}{', backward' * self.is_differentiated}"


def draw(rng: random.Random, name: str) -> Drawn:
    """Return a call of this method."""
    generator, pick = generator_of(rng), rng.choice
    batch, heads, group = pick((2, 3)), pick((1, 2, 5)), pick((1, 1, 2))
    n = pick(LENGTHS)
    n = min(n, MAX_LENGTH_OF_USER) if name == "user" else n
    d, e, dtype = pick((1, 3, 8, 16)), pick((1, 16, 20)), pick((torch.float32, torch.float32, torch.float64))
    shapes = (batch, heads * group, n, d), (batch, heads, n, d), (batch, heads, n, e)
    inputs = tuple(torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    is_causal = rng.random() < 0.6
    options: dict[str, Any] = dict(is_causal=is_causal, enable_gqa=group > 1)
    if rng.random() < 0.4:
        options["key_padding_mask"] = torch.rand(batch, n, generator=generator) > 0.2
    if rng.random() < 0.2:
        options["segment_ids"] = (torch.arange(n) // pick((3, 50))).expand(batch, -1)
    method = METHODS[name]
    if name == "blocks":
        size = pick((1, 8, 33))
        count = math.ceil(n / math.ceil(n / math.ceil(n / size)))
        method = BlockSparse(torch.rand(1, count, count, generator=generator) < 0.6)
    return Drawn(name, method, inputs, options, rng.random() < 0.5)


def computed(drawn: Drawn, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> list[Tensor]:
    """Return the output, and the gradients if the call is differentiated."""
    leaves = tuple(x.clone().requires_grad_(drawn.is_differentiated) for x in inputs)
    output = attention(*leaves, method=drawn.method, **options)
    if not drawn.is_differentiated:
        return [output]
    slope = torch.arange(output.shape[-2] * output.shape[-1], dtype=output.dtype).cos().reshape(output.shape[-2:])
    return [output.detach(), *torch.autograd.grad((output * slope).sum(), leaves)]


def differing(one: list[Tensor], other: list[Tensor]) -> int:
    """Return how many numbers have other bits."""
    width = {torch.float32: torch.int32, torch.float64: torch.int64}
    pairs = [(x.contiguous().view(width[x.dtype]), y.contiguous().view(width[y.dtype])) for x, y in
             zip(one, other, strict=True)]  # fmt: skip
    return sum(int((x != y).sum()) for x, y in pairs)


def check_rows_and_threads(drawn: Drawn) -> None:
    """Raise Failure unless rows alone, and 2 threads, give the bits of the batch on one thread."""
    torch.set_num_threads(1)
    whole = computed(drawn, drawn.inputs, drawn.options)
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            if count := differing(whole, computed(drawn, drawn.inputs, drawn.options)):
                raise Failure("threads change bits", f"{count} numbers differ on {threads} threads: {drawn}")
            for i in range(len(drawn.inputs[0])):
                rows = tuple(x[i : i + 1] for x in drawn.inputs)
                masks = {name: x[i : i + 1] for name, x in drawn.options.items() if isinstance(x, Tensor)}
                alone = computed(drawn, rows, drawn.options | masks)
                if count := differing([x[i : i + 1] for x in whole], alone):
                    raise Failure("other rows change bits", f"{count} numbers of row {i} on {threads} threads: {drawn}")
    finally:
        torch.set_num_threads(1)


def check_past(drawn: Drawn, rng: random.Random) -> int:
    """Raise Failure if an edit of the future changes a bit of the past; return the number of edits."""
    n = drawn.inputs[0].shape[-2]
    drawn.options["is_causal"] = True
    plain = attention(*drawn.inputs, method=drawn.method, **drawn.options)
    for _ in range(4):
        cut, edit = rng.randint(1, max(1, n - 1)), rng.choice(EDITS)
        changed = [x.clone() for x in drawn.inputs]
        for x in rng.sample(changed, rng.randint(1, 3)):
            x[..., cut:, :] = torch.where(torch.rand(x[..., cut:, :1].shape, generator=generator_of(rng)) < 0.5, edit,
                                          x[..., cut:, :])  # fmt: skip
        found = attention(*changed, method=drawn.method, **drawn.options)
        if count := differing([plain[..., :cut, :]], [found[..., :cut, :]]):
            raise Failure("the future changes the past", f"{count} numbers before {cut}, after {edit}: {drawn}")
    return 4


def case(number: int, shared: Path) -> Counter[str]:
    """Check the promises for one call."""
    rng = draw_for("bits", number)
    name = rng.choice(list(METHODS))
    drawn = draw(rng, name)
    counts: Counter[str] = Counter()
    is_packed = engine_of(drawn.method) == "features" and "segment_ids" in drawn.options
    is_by_torch = name in BY_TORCH or is_packed or (name == "separable" and not drawn.options["is_causal"])
    if native.available() and not is_by_torch:
        check_rows_and_threads(drawn)
        counts["comparisons"] += 2 * (1 + len(drawn.inputs[0]))
    counts["comparisons"] += check_past(drawn, rng)
    return counts


PART = Part("bits", "comparisons", 0.1, 60.0, case)
