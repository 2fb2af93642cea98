"""Random calls of attention: methods, shapes with 0 and 1 in them, strides, masks, dtypes, cuts.

Each has the arguments as `attention` takes them, and the same in one plain form for the oracle: (b, h, n, d), with
every head and batch written out.
"""

import math
import random
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from calls import Squares
from subquad import BlockSparse, Exact, Linear, Multipole, RandomFeatures, Separable, Taylor, Window

MAX_NUMBERS = 3_000_000  # of the largest tensor of the oracle
LENGTHS = (1, 2, 3, 5, 8, 17, 33, 64, 100, 300)
FAMILIES = ("exact", "taylor", "diagonal", "random", "linear", "separable", "window", "multipole", "blocks", "user")


class Sizes(NamedTuple):
    """The sizes of a call; `group` query heads share each of `heads` key heads."""

    batch: tuple[int, ...]
    heads: int
    group: int
    n: int
    m: int
    d: int
    e: int
    is_headless: bool  # tensors of two dimensions

    @property
    def lead(self) -> tuple[int, ...]:
        """The leading sizes of a result."""
        return () if self.is_headless else (*self.batch, self.heads * self.group)


@dataclass
class Drawn:
    """One call."""

    sizes: Sizes
    method: Any
    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, Any] = field(default_factory=dict)
    cuts: list[int] | None = None  # lengths of the pieces, each resumed from the state of those before it
    is_stepped: bool = False  # the last pieces are tokens for a Decoder
    is_differentiated: bool = False
    use_kernels: bool = True

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    def __str__(self) -> str:
        def shown(x: Any) -> str:
            return f"{str(x.dtype)[6:]}{tuple(x.shape)}" if isinstance(x, Tensor) else str(x)

        named = dict(zip(("query", "key", "value"), self.inputs, strict=True)) | self.options
        text = ", ".join(f"{name}={shown(x)}" for name, x in named.items())
        extra = f", cuts={self.cuts}" * (self.cuts is not None) + ", kernels" * self.use_kernels
        return f"{getattr(self.method, 'label', type(self.method).__name__)}({text}){extra}"


def draw_method(rng: random.Random, family: str, heads: int, n: int, m: int, d: int) -> Any:
    """Return a method of a family that fits the sizes."""
    pick, shift = rng.choice, None
    if d and rng.random() < 0.15:
        shift = [rng.gauss(0, 0.5) for _ in range(d)]
    match family:
        case "exact":
            return Exact()
        case "taylor":
            return Taylor(pick((0, 1, 2, 2, 2, 3, 4)), key_shift=shift)
        case "diagonal":
            return Taylor(pick((1, 2, 3)), basis="diagonal", key_shift=shift)
        case "random":
            kind = pick(("positive", "hyperbolic", "trigonometric"))
            features = pick((2, 6, 16, 34)) - (kind == "positive" and pick((0, 1)))
            scale = 0.0 if kind == "trigonometric" else pick((0.0, 0.0, -0.1, 0.05, "auto"))
            coupling = pick(("orthogonal", "simplex", "independent"))
            return RandomFeatures(features, kind, coupling, rng.randrange(5), scale, key_shift=shift)
        case "linear":
            return Linear(pick(("elu", "relu", "identity")))
        case "separable":
            return Separable()
        case "window":
            sinks = torch.tensor([rng.gauss(0, 2) for _ in range(pick((1, max(1, heads))))])
            sinks = sinks if rng.random() < 0.3 else None
            size = pick((None, 1, 2, 5, 16, 64, 400))
            return Window(size, pick((0, 0, 1, 3, 20)), softcap=pick((None, None, 0.5, 30.0)), sink_logits=sinks)
        case "multipole":
            return pick(
                (Multipole(), Multipole(window=5, sinks=2, block=2, top=2), Multipole(window=1, sinks=0, block=3))
            )
        case "blocks":
            counts = [_blocks(rng, length) for length in (n, m)]
            shown = torch.rand(pick((1, max(1, heads))), *counts, generator=generator_of(rng)) < pick((0.2, 0.6, 1.0))
            return BlockSparse(shown, softcap=pick((None, None, 2.0)))
    return Squares()


def _blocks(rng: random.Random, length: int) -> int:
    """Return a number of equal blocks, the last one shorter, that a length has."""
    if length == 0:
        return rng.choice((1, 2))
    size = rng.randint(1, length)
    count = math.ceil(length / size)
    return count if count == math.ceil(length / math.ceil(length / count)) else 1


def generator_of(rng: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(rng.getrandbits(40))


def draw_sizes(rng: random.Random, family: str) -> Sizes:
    """Return sizes for which the oracle's tensors are small."""
    batch = rng.choice([(), (), (1,), (2,), (2,), (3,), (2, 2), (1, 2)])
    is_headless = not batch and rng.random() < 0.2
    heads, group = (1, 1) if is_headless else (rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 1, 2, 3)))
    n = m = rng.choice(LENGTHS)
    if rng.random() < 0.25:
        m = rng.choice((0, *LENGTHS))
    inner = {"separable": 16, "random": 34}.get(family, 1)
    while math.prod(batch) * heads * group * n * m * inner > MAX_NUMBERS:
        n, m = (n + 1) // 2, (n + 1) // 2 if m == n else (m + 1) // 2
    sizes = Sizes(batch, heads, group, n, m, rng.choice((1, 2, 4, 7, 8, 16)), rng.choice((1, 3, 8, 17)), is_headless)
    if rng.random() < 0.08:
        zeros = [dict(n=0), dict(m=0), dict(n=0, m=0), dict(d=0), dict(e=0)]
        return sizes._replace(**rng.choice(zeros if is_headless else [*zeros, dict(batch=(0,))]))
    return sizes


def draw_call(rng: random.Random, family: str | None = None) -> Drawn:
    """Return a call whose arguments fit each other, whether or not its method supports it."""
    family = family or rng.choice(FAMILIES)
    sizes = draw_sizes(rng, family)
    heads = sizes.heads * sizes.group
    method = draw_method(rng, family, heads, sizes.n, sizes.m, sizes.d)
    drawn = Drawn(sizes, method, *draw_inputs(rng, sizes))
    # One key head is also broadcast without being told.
    if sizes.group > 1 and (sizes.heads > 1 or rng.random() < 0.5):
        drawn.options["enable_gqa"] = True
    if rng.random() < 0.5:
        drawn.options["is_causal"] = True
    if rng.random() < 0.25:
        drawn.options["scale"] = rng.choice((0.3, 1.0, 1e-4, 2.5))
    draw_masks(rng, drawn)
    drawn.use_kernels = rng.random() < 0.6
    drawn.is_differentiated = rng.random() < 0.35
    if sizes.n == sizes.m and rng.random() < 0.3:
        drawn.cuts, drawn.is_stepped = draw_cuts(rng, sizes.n), rng.random() < 0.3
    return drawn


def draw_cuts(rng: random.Random, n: int) -> list[int]:
    """Return the lengths of pieces, some of them 0 or 1."""
    places = sorted(rng.randint(0, n) for _ in range(rng.randint(1, 4)))
    ends = [*places, n]
    if n > 2 and rng.random() < 0.4:
        ends = sorted({*ends, n - 1, n - 2})
    return [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def draw_inputs(rng: random.Random, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value with some strides, scales and dtype; some share batches, some are not finite."""
    draw = generator_of(rng)
    dtype = rng.choice([torch.float32] * 5 + [torch.float64] * 2 + [torch.bfloat16, torch.float16])
    stds = [rng.choice([1.0] * 12 + [1e-8, 1e-3, 3.0, 10.0, 100.0, 1e4, 1e18])] * 2
    stds.append(rng.choice([1.0] * 8 + [1e-6, 1e6]))
    made = []
    shapes = ((sizes.heads * sizes.group, sizes.n, sizes.d), (sizes.heads, sizes.m, sizes.d))
    whole = rng.randrange(3)  # has all batches
    for i, (shape, std) in enumerate(zip((*shapes, (sizes.heads, sizes.m, sizes.e)), stds, strict=True)):
        shape = shape[1:] if sizes.is_headless else (*sizes.batch, *shape)
        shape = shape if i == whole else _broadcast(rng, shape, sizes)
        made.append(_strided(rng, shape, draw, std, dtype))
    if rng.random() < 0.15:
        for _ in range(rng.randint(1, 3)):
            _spoil(rng, rng.choice(made))
    if rng.random() < 0.1 and sizes.batch:
        which = rng.randrange(3)
        made[which] = made[which][..., :1, :, :, :].expand(made[which].shape) if made[which].dim() > 3 else made[which]
    return tuple(made)


def _broadcast(rng: random.Random, shape: tuple[int, ...], sizes: Sizes) -> tuple[int, ...]:
    """Return a shape that may lack some of the batch."""
    if rng.random() > 0.15 or sizes.is_headless or 0 in sizes.batch or not sizes.batch:
        return shape
    kept = rng.randint(0, len(sizes.batch))
    lead = tuple(1 if rng.random() < 0.5 else size for size in sizes.batch[kept:])
    return (*lead, *shape[len(sizes.batch) :])


def _strided(
    rng: random.Random, shape: tuple[int, ...], draw: torch.Generator, std: float, dtype: torch.dtype
) -> Tensor:
    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=draw, dtype=torch.float64).mul(std).to(dtype)

    *lead, n, d = shape
    match rng.choice(("plain", "plain", "transposed", "gaps", "columns", "offset")):
        case "transposed" if lead:
            return normal(*lead[:-1], n, lead[-1], d).transpose(-2, -3)
        case "gaps":
            return normal(*lead, 2 * n, d)[..., ::2, :]
        case "columns":
            return normal(*lead, d, n).mT
        case "offset":
            return normal(*lead, n, 2 * d + 1)[..., 1 : d + 1]
    return normal(*shape)


def _spoil(rng: random.Random, x: Tensor) -> None:
    """Put something that is not finite into a token, or into one number of it."""
    if x.numel():
        row = x.flatten(0, -2)[rng.randrange(x.shape[:-1].numel())] if x.is_contiguous() else x[..., -1, :]
        place = slice(None) if rng.random() < 0.5 else rng.randrange(x.shape[-1])
        row[..., place] = rng.choice((math.nan, math.inf, -math.inf))


def draw_masks(rng: random.Random, drawn: Drawn) -> None:
    """Add padding, a mask of keys and segments, in any of their shapes."""
    sizes, draw, options = drawn.sizes, generator_of(rng), drawn.options
    batch, m = ((), sizes.m) if sizes.is_headless else (sizes.batch, sizes.m)

    def shown(*shape: int) -> Tensor:
        return torch.rand(shape, generator=draw) < rng.choice((0.3, 0.8, 0.8, 1.0, 0.0))

    if rng.random() < 0.3:
        shape = rng.choice([(m,), (*batch, m), (*batch, sizes.heads, m)])
        options["key_padding_mask"] = shown(*shape)
    if rng.random() < 0.25:
        lead = [(), (1,), (*batch, 1, 1), (*batch, sizes.heads * sizes.group, 1), (sizes.heads * sizes.group, 1)]
        options["attn_mask"] = shown(*rng.choice(lead[:2] if sizes.is_headless else lead), m)
    if rng.random() < 0.25 and sizes.n == m:
        ids = torch.randint(0, 3, rng.choice([(m,), (*batch, m)]), generator=draw)
        repeats = rng.choice((1, 4, 10))
        options["segment_ids"] = ids.repeat_interleave(repeats, -1)[..., :m].contiguous()
