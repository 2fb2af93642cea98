"""The cost of exact attention with one or several heads.

one head              time 4 L^2 D            memory L^2 + L D
h heads in sequence   time h (L^2 d + L d^2)  memory L^2 + h L d + h d^2
h heads of width d/h  parameters 3 d^2, FLOPs 4 L^2 d, exponentials h L^2
"""

from functools import partial
from itertools import product

import torch
from torch import Tensor

import subquad
from subquad import Exact
from subquad_lab.models import parameters
from subquad_lab.theory.claims import Finding, Setting, at_least, at_most, claim, equal, small
from subquad_lab.theory.counting import Term, attention, counted, exact_in_plain_operations, misfit, written
from subquad_lab.theory.inputs import normal

HEAD_TIME: list[Term] = [(2, 1)]  # L, D
HEAD_MEMORY: list[Term] = [(2, 0), (1, 1)]


@claim(
    1, "One head needs time proportional to L^2 D, and memory proportional to L^2 + L D.",
    r"\text{time} = \Theta(L^2 D), \quad \text{memory} = \Theta(L^2 + L D)",
)  # fmt: skip
def one_head_costs(setting: Setting) -> Finding:
    sizes = list(product((512, 768, setting.of(1024, 1152, 1280)), (8, 32, 128)))
    inputs = [normal(3, *size, seed=setting.seed) for size in sizes]
    found = [counted(partial(attention, *x, method=Exact())) for x in inputs]
    times, held = [each.flops for each in found], [each.peak_bytes / 8 for each in found]
    of_time, factors = misfit(HEAD_TIME, sizes, times)
    of_memory, parts = misfit(HEAD_MEMORY, sizes, held)
    return Finding(
        [
            at_most(f"counted FLOPs, relative deviation from {written(HEAD_TIME, 'LD', factors)}", of_time, 1e-6),
            at_most(f"peak memory, relative deviation from {written(HEAD_MEMORY, 'LD', parts)}", of_memory, 0.02),
            at_least("numbers stored for each pair of tokens", parts[0], 1.0),
        ],
        [
            "The scores Q K^T are L x L inner products of D numbers: 2 L^2 D operations.",
            "The result has L rows, each a sum of L values of D numbers: again 2 L^2 D operations.",
            f"Counted over {len(sizes)} sizes, L = {sizes[0][0]} to {sizes[-1][0]} and D = {sizes[0][1]} to "
            f"{sizes[-1][1]}: {written(HEAD_TIME, 'LD', factors)} operations, within {small(of_time)}.",
            "Scores and weights are L^2 numbers each and exist at the same time, together with L D numbers of the "
            "result.",
            f"Measured: {written(HEAD_MEMORY, 'LD', parts)} numbers of 8 bytes, within {small(of_memory)}. (A fused "
            "kernel needs the same number of operations but computes the scores block by block and never stores L^2 "
            "numbers.)",
        ],
    )  # fmt: skip


IN_TURN_TIME: list[Term] = [(2, 1, 1), (1, 2, 1)]  # L, d, h
IN_TURN_MEMORY: list[Term] = [(2, 0, 0), (1, 1, 1), (0, 2, 1)]
LOWER: list[Term] = [(1, 1, 0)]  # queries, keys and values of the current head
IN_TURN_MISTAKE: list[Term] = [(2, 0, 1), (1, 1, 1), (0, 2, 1)]


def heads_in_turn(x: Tensor, heads: int, seed: int) -> list[Tensor]:
    """Run heads with separate matrices (d, d); the memory of one is free before the next starts."""
    width = x.shape[-1]
    matrices = [[normal(width, width, seed=seed + 3 * i + j, spread=width**-0.5) for j in range(3)]
                for i in range(heads)]  # fmt: skip
    return [attention(*(x @ matrix for matrix in own), method=Exact()) for own in matrices]


@claim(
    2, "For h heads of full width d in sequence, the L^2 term of the memory does not grow with h, because the scores "
       "of "
    "one head are freed before the next starts.",
    r"\text{time} = \Theta(h (L^2 d + L d^2)), \quad \text{memory} = \Theta(L^2 + h L d + h d^2)",
    "The memory grows as h L^2.",
)  # fmt: skip
def heads_in_turn_cost(setting: Setting) -> Finding:
    base = setting.of(64, 96, 128)
    sizes = list(product((base, 2 * base, 4 * base), (8, 16, 32), (1, 2, 4, 8)))
    times, held = [], []
    for length, width, heads in sizes:
        found = counted(partial(heads_in_turn, normal(length, width, seed=setting.seed), heads, setting.seed))
        times.append(found.flops)
        held.append(found.peak_bytes / 8)
    of_time, factors = misfit(IN_TURN_TIME, sizes, times)
    of_memory, parts = misfit(IN_TURN_MEMORY + LOWER, sizes, held)
    of_mistake, _ = misfit(IN_TURN_MISTAKE + LOWER, sizes, held)
    longest = [held[i] for i, size in enumerate(sizes) if size[:2] == (4 * base, 8)]
    return Finding(
        [
            at_most(f"counted FLOPs, relative deviation from {written(IN_TURN_TIME, 'Ldh', factors)}", of_time, 1e-6),
            at_most("peak memory, relative deviation from "
                    f"{written(IN_TURN_MEMORY + LOWER, 'Ldh', parts)}", of_memory, 0.05),
            at_most(f"peak memory, relative deviation from a fit by {written(IN_TURN_MISTAKE + LOWER, 'Ldh')}",
                    of_mistake, 0.05, mistake=True),
        ],
        [
            "A head computes queries, keys and values, 3 products of 2 L d^2 operations, and attends in 4 L^2 d.",
            f"Counted for h = 1 to 8: {written(IN_TURN_TIME, 'Ldh', factors)} operations.",
            "Its scores and weights, L^2 each, and its queries, keys and values, 3 L d, are needed only until its "
            "result is computed.",
            "Each head then keeps its result, L d, and its three matrices, d^2 each.",
            f"Measured: {written(IN_TURN_MEMORY + LOWER, 'Ldh', parts)} numbers, within {small(of_memory)}.",
            f"From 1 to 8 heads at L = {4 * base}, d = 8, the memory grows by a factor of "
            f"{longest[3] / longest[0]:.2f}, "
            f"not 8; a fit by h L^2 is off by up to {of_mistake:.0%}.",
        ],
    )  # fmt: skip


def head_parameters(width: int, heads: int) -> int:
    """Return the parameters of queries, keys and values, for any number of heads of width d / h."""
    return 3 * width**2


def layer_work(length: int, width: int, heads: int) -> int:
    """Return the FLOPs of the four projections and of attention, for any number of heads."""
    return 8 * length * width**2 + 4 * length**2 * width


def softmax_work(length: int, heads: int) -> int:
    """Return the number of exponentials."""
    return heads * length**2


@claim(
    3, "h heads of width d/h have the same number of parameters and FLOPs as one head of width d, except that the "
       "softmax "
    "needs h times as many exponentials.",
    r"3 d^2 \;(+\, d^2 \text{ for the output}), \quad 4 L^2 d \;(+\, 8 L d^2) \text{ operations}, \quad h L^2 "
    r"\text{ exponentials}",
)  # fmt: skip
def multi_head_costs(setting: Setting) -> Finding:
    width, length = setting.of(16, 32, 64), 512
    x = normal(1, length, width, seed=setting.seed)
    counts, works, powers = {}, {}, {}
    for heads in (1, 2, 4, 8):
        layer = subquad.MultiheadAttention(width, heads, bias=False, batch_first=True).double()
        counts[heads] = parameters(layer)["total"]
        with torch.no_grad(), exact_in_plain_operations():
            found = counted(partial(layer, x, x, x, need_weights=False))
        works[heads], powers[heads] = found.flops, found.exponentials
    output = width**2
    return Finding(
        [
            *(equal(f"parameters with h = {h}, without the output", counts[h] - output, head_parameters(width, h))
              for h in counts),
            *(equal(f"FLOPs with h = {h}", works[h], layer_work(length, width, h)) for h in counts),
            *(equal(f"exponentials with h = {h}", powers[h], softmax_work(length, h)) for h in counts),
        ],
        [
            f"A head of width d/h has three matrices of d x d/h; h heads have 3 d^2 parameters, here 3 x {width}^2 = "
            f"{counts[1] - output:,}, and the output matrix adds {output:,}.",
            f"Counted in `MultiheadAttention`: {', '.join(f'{c:,} with h = {h}' for h, c in counts.items())}.",
            "The scores of a head need 2 L^2 d/h operations, and those of all heads 2 L^2 d: h cancels.",
            f"Counted in the layer at L = {length}: {works[1]:,} operations with one head, {works[8]:,} with eight.",
            f"Each head has its own L^2 weights: {powers[1]:,} exponentials with one head, {powers[8]:,} with eight.",
        ],
    )  # fmt: skip
