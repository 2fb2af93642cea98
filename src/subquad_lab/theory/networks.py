"""Convolutions and graphs."""

import torch

from subquad_lab.data.graphs import load_graph
from subquad_lab.models import parameters
from subquad_lab.models.graphs import Normalisation, propagation
from subquad_lab.models.images import ConvNet, Downsample, halved_twice
from subquad_lab.plots import axes_of, svg
from subquad_lab.theory import Finding, Setting, at_least, at_most, claim, equal
from subquad_lab.theory.attention import normal

CLASSES = 4


def convolution(inward: int, outward: int, side: int = 3) -> int:
    return side**2 * inward * outward + outward


def linear(inward: int, outward: int) -> int:
    return inward * outward + outward


def network_parameters(side: int, downsample: Downsample) -> int:
    """Layer by layer. Pooling has none, and leaves as many places as strides do."""
    places = halved_twice(side, downsample) ** 2
    return convolution(1, 8) + convolution(8, 16) + linear(16 * places, 320) + linear(320, 120) + linear(120, CLASSES)


@claim(
    21, "The pooled and the strided network both have 224,892 parameters: pooling removes none.",
    r"80 + 1{,}168 + 184{,}640 + 38{,}520 + 484 = 224{,}892",
    "Pooling makes the network smaller.",
)  # fmt: skip
def pooling_removes_none(setting: Setting) -> Finding:
    counts = {how: parameters(ConvNet(1, 28, 28, CLASSES, how, 0.0))["total"] for how in ("pool", "stride")}
    pixels = setting.of(28, 60, 92)
    others = {how: parameters(ConvNet(1, pixels, pixels, CLASSES, how, 0.0))["total"] for how in ("pool", "stride")}
    parts = [convolution(1, 8), convolution(8, 16), linear(576, 320), linear(320, 120), linear(120, CLASSES)]
    return Finding(
        [
            *(equal(f"parameters, {how}, 28 x 28, counted", count, network_parameters(28, how))
              for how, count in counts.items()),
            equal("both", counts["pool"], counts["stride"]),
            *(equal(f"parameters, {how}, {pixels} x {pixels}", count, network_parameters(pixels, how))
              for how, count in others.items()),
            at_most("parameters with pooling by those with strides", counts["pool"] / counts["stride"], 0.999,
                    mistake=True),
        ],
        [
            "A convolution has 3 x 3 weights for each pair of channels and a bias for each channel, at any step.",
            "Pooling takes the largest of four numbers, and has nothing to learn.",
            f"Pooled, a side goes 28 - 14 - 12 - 6; strided, 28 - 14 - 6. Both leave 16 x 6 x 6 = {16 * 36} numbers.",
            f"Layers: {' + '.join(f'{part:,}' for part in parts)} = {sum(parts):,}.",
            f"Counted in the lab's networks: pooled {counts['pool']:,}, strided {counts['stride']:,}.",
        ],
    )  # fmt: skip


PROPAGATIONS = 10


def matrix(self_loops: bool, normalisation: Normalisation) -> torch.Tensor:
    """Of the karate club, dense."""
    graph = load_graph()
    edges, weights = propagation(graph.edges, graph.nodes, self_loops, normalisation)
    made = torch.zeros(graph.nodes, graph.nodes, dtype=torch.float64)
    return made.index_put((edges[1], edges[0]), weights.double(), accumulate=True)


def largest_eigenvalue_of_fixed() -> float:
    return 1.0


@claim(
    22, "With self-loops and symmetric normalisation the largest eigenvalue is 1, so that features keep their size; "
    "rows do not sum to 1. Without the fix they grow by a factor in each propagation.",
    r"\tilde A = A + I, \quad P = \tilde D^{-1/2} \tilde A \tilde D^{-1/2}, \quad \lambda_1(P) = 1, \quad P "
    r"\mathbf{1} \ne \mathbf{1}",
    "Symmetric normalisation makes rows sum to 1.",
)  # fmt: skip
def normalised_propagation(setting: Setting) -> Finding:
    steps = setting.of(6, PROPAGATIONS, 20)
    plain, fixed, by_row = matrix(False, "none"), matrix(True, "symmetric"), matrix(True, "row")
    loops = plain + torch.eye(len(plain), dtype=torch.float64)
    root = loops.sum(-1) ** -0.5
    by_hand = root[:, None] * loops * root
    largest = float(torch.linalg.eigvalsh(fixed).abs().max())
    sums = fixed.sum(-1)
    x = normal(len(plain), 4, seed=setting.seed)
    grown, kept = (float((torch.linalg.matrix_power(p, steps) @ x).norm() / x.norm()) for p in (plain, fixed))
    return Finding(
        [
            at_most("the lab's matrix from D^-1/2 (A + I) D^-1/2", float((fixed - by_hand).abs().max()), 1e-6),
            equal("largest |eigenvalue|", largest, largest_eigenvalue_of_fixed(), within=1e-6),
            at_most("row normalisation: sums of rows from 1", float((by_row.sum(-1) - 1).abs().max()), 1e-6),
            at_most(f"size of the features after {steps} propagations", kept, 1.0),
            at_least("the same without the fix", grown, 10.0**(steps / 2)),
            at_most("symmetric: sums of rows from 1", float((sums - 1).abs().max()), 0.01, mistake=True),
        ],
        [
            "A + I lets a node see itself. D^-1 (A + I) has rows that sum to 1, so its largest eigenvalue is 1.",
            "D^-1/2 (A + I) D^-1/2 is similar to it and has the same eigenvalues, but other rows:",
            f"on the karate club they sum to {float(sums.min()):.3f} ... {float(sums.max()):.3f}; the largest "
            f"eigenvalue is {largest:.6f}.",
            f"After {steps} propagations random features have {kept:.2g} of their size;",
            f"by A alone, whose largest eigenvalue is {float(torch.linalg.eigvalsh(plain).max()):.2f}, they are "
            f"{grown:.1e} times as large.",
        ],
        lambda: growth_picture(setting),
    )  # fmt: skip


def growth_picture(setting: Setting) -> bytes:
    figure, (axes,) = axes_of(1)
    kinds: dict[str, tuple[bool, Normalisation]] = {
        "A": (False, "none"), "A + I": (True, "none"), "D^-1 (A + I)": (True, "row"),
        "D^-1/2 (A + I) D^-1/2": (True, "symmetric"),
    }  # fmt: skip
    for name, (loops, how) in kinds.items():
        p = matrix(loops, how)
        x = start = normal(len(p), 4, seed=setting.seed)
        sizes = [1.0]
        for _ in range(PROPAGATIONS):
            x = p @ x
            sizes.append(float(x.norm() / start.norm()))
        axes.semilogy(range(PROPAGATIONS + 1), sizes, "o-", markersize=3, label=name)
    axes.set(xlabel="propagations", ylabel="norm of the features, at first 1")
    axes.legend(fontsize="small")
    return svg(figure)
