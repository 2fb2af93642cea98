"""Attention weights other than exponentials, and softmax attention on special vectors.

separable      W = softmax_D(Q) softmax_L(K)^T     rows are distributions, rank at most D
without exp    Q (K^T V) = (Q K^T) V               weights of both signs
copying        x1 = d + b, x2 = a, x3 = c + d      each attends to itself, more so the longer a, b, c, d are
"""

import math
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

import subquad
from subquad import Exact, Linear, Separable
from subquad_lab.theory.claims import Check, Finding, Setting, at_least, at_most, claim, equal, small
from subquad_lab.theory.counting import ORDERS, Term, attention, counted, misfit, written
from subquad_lab.theory.inputs import ROUNDING, distance, farthest, normal

LENGTHS = (512, 768, 1024)


def weights_of(q: Tensor, k: Tensor, method: Any) -> Tensor:
    """Return the weight matrix (L, L) of a method: its output for unit vectors as values."""
    identity = torch.eye(k.shape[-2], dtype=k.dtype)
    return subquad.attention(q[None], k[None], identity[None], scale=1.0, method=method)[0]


# --- 7 ------------------------------------------------------------------------------------------------------------

SEPARABLE_TIME: list[Term] = [(1, 2), (1, 1)]  # L, D


def separable_rank(length: int, width: int) -> int:
    """Return the largest possible rank of the weight matrix."""
    return min(length, width)


@claim(
    7, "Separable attention applies softmax to the queries over the width and to the keys over the tokens. Its weight "
       "rows "
    "are distributions and it costs O(L D^2), but its weight matrix has rank at most D, not up to L.",
    r"W = \mathrm{softmax}_D(Q) \, \mathrm{softmax}_L(K)^T, \quad W \mathbf{1} = \mathbf{1}, \quad "
    r"\mathrm{rank}\, W \le D",
)  # fmt: skip
def separable(setting: Setting) -> Finding:
    length, width = setting.of(24, 48, 72), 6
    q, k = normal(2, length, width, seed=setting.seed, spread=2.0)
    weights, exact = weights_of(q, k, Separable()), weights_of(q, k, Exact())
    by_hand = q.softmax(-1) @ k.softmax(-2).mT
    rank = int(torch.linalg.matrix_rank(weights, rtol=1e-10))
    exact_rank = int(torch.linalg.matrix_rank(exact, rtol=1e-10))
    sizes = list(product(LENGTHS, (4, 8, 16)))
    inputs = [normal(3, *size, seed=setting.seed) for size in sizes]
    works = [counted(partial(attention, *x, method=Separable())).flops for x in inputs]
    of_time, factors = misfit(SEPARABLE_TIME, sizes, works)
    return Finding(
        [
            at_most("weights of the library, relative deviation from the "
                    "formula", distance(weights, by_hand), ROUNDING),
            at_least("smallest weight", float(weights.min()), 0.0),
            at_most("row sums, deviation from 1", farthest(weights.sum(-1), 1), ROUNDING),
            at_most(f"counted FLOPs, relative deviation from {written(SEPARABLE_TIME, 'LD', factors)}", of_time, 1e-6),
            equal(f"rank, L = {length}, D = {width}", rank, separable_rank(length, width)),
            at_least("rank of softmax attention", exact_rank, 3 * width),
        ],
        [
            "Each row of softmax(Q) sums to 1 over D; each column of softmax(K) sums to 1 over L.",
            "A row of the product is thus a weighted mean of D distributions over the tokens, and a distribution "
            "itself.",
            f"The smallest weight is {float(weights.min()):.1g}; row sums deviate from 1 by at most "
            f"{small(farthest(weights.sum(-1), 1))}.",
            "Evaluated from the right, the product of keys and values has D x D numbers, independent of L. Counted for "
            f"L = {LENGTHS[0]} to {LENGTHS[-1]:,}: {written(SEPARABLE_TIME, 'LD', factors)} operations.",
            "The product of an L x D and a D x L matrix has rank at most D.",
            f"Measured at L = {length}, D = {width}: rank {rank}; softmax attention with the same queries and keys has "
            f"rank {exact_rank}.",
        ],
    )  # fmt: skip


# --- 9 ------------------------------------------------------------------------------------------------------------

WITHOUT_RIGHT: list[Term] = [(1, 2), (1, 1)]  # L, D
WITHOUT_LEFT: list[Term] = [(2, 1), (2, 0)]


@claim(
    9, "Without the exponential, Q (K^T V) costs O(L D^2) instead of O(L^2 D) for (Q K^T) V. About half of the "
       "weights are "
    "negative, so their sum can vanish and cannot serve as a normalizer.",
    r"Q (K^T V) = (Q K^T) V, \quad O(L D^2) \text{ instead of } O(L^2 D)",
)  # fmt: skip
def without_exponential(setting: Setting) -> Finding:
    sizes, right, left, apart = list(product(LENGTHS, (4, 8, 16))), [], [], 0.0
    for size in sizes:
        q, k, v = normal(3, *size, seed=setting.seed)
        by_sums, by_pairs = (
            counted(partial(attention, q, k, v, method=Linear("identity"), order=order)) for order in ORDERS
        )
        right.append(by_sums.flops)
        left.append(by_pairs.flops)
        apart = max(apart, *(distance(each.result, q @ (k.mT @ v)) for each in (by_sums, by_pairs)))
    of_right, factors = misfit(WITHOUT_RIGHT, sizes, right)
    of_left, factors_of_left = misfit(WITHOUT_LEFT, sizes, left)
    length = setting.of(400, 800, 1600)
    q, k, v = normal(3, 1, length, 16, seed=setting.seed)
    weights = weights_of(q[0], k[0], Linear("identity"))
    negative = float((weights < 0).double().mean())
    divided = subquad.attention(q, k, v, scale=1.0, method=Linear("identity")) / weights.sum(-1, keepdim=True)
    outside = float(divided.abs().max() / v.abs().max())
    inside = float(subquad.attention(q, k, v, scale=1.0, method=Exact()).abs().max() / v.abs().max())
    return Finding(
        [
            at_most("both orders of the library, relative deviation from Q (K^T V)", apart, ROUNDING),
            at_most(f"counted FLOPs from the right, relative deviation from {written(WITHOUT_RIGHT, 'LD', factors)}",
                    of_right, 1e-6),
            at_most("counted FLOPs from the left, relative deviation from "
                    f"{written(WITHOUT_LEFT, 'LD', factors_of_left)}",
                    of_left, 1e-6),
            equal("fraction of negative weights", negative, 0.5, within=0.1),
            at_least("largest output / largest value, if divided by the sum of the weights", outside, 10.0),
            at_most("the same with the exponential", inside, 1.0),
        ],
        [
            "K^T V is D x D. Computing it needs 2 L D^2 operations, and multiplying it with L queries as many again.",
            f"Counted: {written(WITHOUT_RIGHT, 'LD', factors)} operations from the right, "
            f"{written(WITHOUT_LEFT, 'LD', factors_of_left)} from the left; the results agree to {small(apart)}.",
            "For inputs without a preferred direction, q.k is positive as often as negative: "
            f"{negative:.2%} of {length:,} x {length:,} weights are negative.",
            "The weights of a row therefore nearly cancel, and in some rows their sum nearly vanishes.",
            f"Divided by this sum, an output is not a mean of values: the largest is {outside:,.0f} times the largest "
            "value.",
            f"exp(q.k) is positive, so nothing cancels: the largest output is {inside:.2f} times the largest value.",
        ],
    )  # fmt: skip


# --- 10 -----------------------------------------------------------------------------------------------------------


def copied_weight(size: float) -> tuple[float, float]:
    """Return w11 = w33 and w22 for orthogonal vectors of norm B."""
    once, twice = math.exp(-(size**2)), math.exp(-2 * size**2)
    return 1 / (1 + once + twice), 1 / (1 + 2 * once)


def copied_norm(size: float) -> float:
    return math.sqrt(2) * size


def shared_product(size: float) -> float:
    """Return x1.x3."""
    return size**2


@claim(
    10, "With x1 = d + b, x2 = a, x3 = c + d as queries, keys and values, where a, b, c, d are orthogonal with norm B, "
    "unscaled attention copies its inputs, but only in the limit of large B.",
    r"|x_1| = \sqrt{2} B, \quad x_1 \cdot x_3 = B^2, \quad w_{11} = w_{33} = \frac{1}{1 + e^{-B^2} + e^{-2 B^2}}, "
    r"\quad w_{22} = \frac{1}{1 + 2 e^{-B^2}}",
    "|x1| = 2 B, as if norms added; or x1.x3 = 0, so that w11 = 1 / (1 + 2 exp(-2 B^2)).",
)  # fmt: skip
def copying(setting: Setting) -> Finding:
    width = setting.of(4, 8, 16)
    basis = torch.linalg.qr(normal(width, width, seed=setting.seed))[0]
    checks: list[Check] = []
    errors, lines = [], []
    for size in (0.5, 1.0, 2.0, 3.0):
        a, b, c, d = basis[:4] * size
        x = torch.stack([d + b, a, c + d])
        w11, w22, w33 = weights_of(x, x, Exact()).diagonal().tolist()
        norm, shared = float(x[0].norm()), float(x[0] @ x[2])
        errors.append(distance(subquad.attention(x[None], x[None], x[None], scale=1.0)[0], x))
        of_pairs, of_one = copied_weight(size)
        checks += [
            equal(f"|x1| at B = {size}", norm, copied_norm(size)),
            equal(f"x1.x3 at B = {size}", shared, shared_product(size)),
            equal(f"w11 at B = {size}", w11, of_pairs),
            equal(f"w22 at B = {size}", w22, of_one),
            equal(f"w33 at B = {size}", w33, of_pairs),
        ]
        if size == 1.0:
            without_shared = 1 / (1 + 2 * math.exp(-2))
            mistakes = [
                equal("|x1| at B = 1", norm, 2.0, mistake=True),
                equal("x1.x3 at B = 1", shared, 0.0, mistake=True),
                equal("w11 at B = 1", w11, without_shared, mistake=True),
            ]
        lines.append(f"B = {size}: w11 = {w11:.4f}, w22 = {w22:.4f}, relative error of the copy {errors[-1]:.2g}.")
    return Finding(
        [
            *checks,
            at_most("relative deviation of the output from the input at B = 3", errors[-1], 1e-3),
            at_least("the same at B = 0.5", errors[0], 0.1),
            *mistakes,
        ],
        [
            "d and b are orthogonal, so |d + b|^2 = |d|^2 + |b|^2 = 2 B^2, and |x1| is 1.4142 at B = 1, not 2.",
            "x1 and x3 share d: x1.x3 = d.d = B^2, x1.x2 = 0 and x1.x1 = 2 B^2.",
            "Divided by exp(2 B^2), the weights of x1 are 1, exp(-2 B^2) and exp(-B^2).",
            "x2.x2 = B^2, and x2 is orthogonal to the others, so its weights divided by exp(B^2) are 1 and twice "
            "exp(-B^2).",
            *lines,
            f"x1.x3 = 0 would give w11 = {without_shared:.4f} at B = 1.",
        ],
    )  # fmt: skip
