"""Convolutions and graphs: numbers of parameters, and the growth of features under propagation."""

import torch

from subquad_lab.data.graphs import load_graph
from subquad_lab.figures.plots import axes_of, svg
from subquad_lab.models import parameters
from subquad_lab.models.graphs import Normalization, propagation
from subquad_lab.models.images import ConvNet, Downsample
from subquad_lab.theory.claims import Finding, Setting, at_least, at_most, claim, equal
from subquad_lab.theory.inputs import distance, farthest, normal

CLASSES = 4
KINDS: tuple[Downsample, ...] = ("pool", "stride")


def convolution(inward: int, outward: int, side: int = 3) -> int:
    return side**2 * inward * outward + outward


def linear(inward: int, outward: int) -> int:
    return inward * outward + outward


def layers(places: int) -> list[int]:
    """Return the parameters of each layer if the convolutions output `places` pixels. Pooling has none."""
    return [convolution(1, 8), convolution(8, 16), linear(16 * places, 320), linear(320, 120), linear(120, CLASSES)]


def network(side: int, how: Downsample) -> ConvNet:
    return ConvNet(1, side, side, CLASSES, how, 0.0)


def places_left(network: ConvNet, side: int) -> int:
    """Return the number of output pixels of the convolutions for images of this side."""
    with torch.no_grad():
        seen = network.halve(network.second(network.halve(network.first(torch.zeros(1, 1, side, side)))))
    return int(seen.shape[-2] * seen.shape[-1])


AT_28 = layers(6 * 6)
SUM_AT_28 = f"{' + '.join(f'{each:,}' for each in AT_28)} = {sum(AT_28):,}"


@claim(
    21, f"At 28 x 28 pixels the networks with pooling and with strides both have {sum(AT_28):,} parameters: pooling "
        "does "
    "not remove parameters.",
    SUM_AT_28.replace(",", "{,}"),
    "Pooling makes the network smaller.",
)  # fmt: skip
def pooling_removes_none(setting: Setting) -> Finding:
    sides = (28, 30, setting.of(29, 61, 90))
    made = {(side, how): network(side, how) for side in sides for how in KINDS}
    places = {each: places_left(net, each[0]) for each, net in made.items()}
    counts = {each: parameters(net)["total"] for each, net in made.items()}
    pooled, strided = (counts[28, how] for how in KINDS)
    left = [[places_left(made[28, how], side) for how in KINDS] for side in range(10, 100)]
    different = sum(one != other for one, other in left)
    return Finding(
        [
            *(equal(f"parameters, {how}, {side} x {side}, counted", count, sum(layers(places[side, how])))
              for (side, how), count in counts.items()),
            equal("both, 28 x 28", pooled, strided),
            equal("parameters of the pooling itself", parameters(made[28, "pool"].halve)["total"], 0),
            at_most("parameters with pooling / with strides, 28 x 28", pooled / strided, 0.999, mistake=True),
        ],
        [
            "A convolution has 3 x 3 weights for each pair of channels and a bias for each channel, with any stride.",
            "Pooling takes the largest of four numbers and has no parameters.",
            f"With pooling, the side shrinks 28 - 14 - 12 - 6; with strides, 28 - 14 - 6. Both leave "
            f"{places[28, 'pool']} pixels.",
            f"Layers: {SUM_AT_28}.",
            f"Counted in the lab's networks: {pooled:,} with pooling, {strided:,} with strides.",
            f"Other sides are rounded differently: of 30 x 30 pixels, pooling leaves {places[30, 'pool']} and strides "
            f"leave {places[30, 'stride']}. The following linear layer then has another size, and the networks have "
            f"{counts[30, 'pool']:,} and {counts[30, 'stride']:,} parameters.",
            f"The numbers differ for {different} of the {len(left)} sides from 10 to 99; the convolutions never "
            "differ.",
        ],
    )  # fmt: skip


PROPAGATIONS = 10


def matrix(self_loops: bool, normalization: Normalization) -> torch.Tensor:
    """Return the propagation matrix of the karate club, dense."""
    graph = load_graph()
    edges, weights = propagation(graph.edges, graph.nodes, self_loops, normalization)
    made = torch.zeros(graph.nodes, graph.nodes, dtype=torch.float64)
    return made.index_put((edges[1], edges[0]), weights.double(), accumulate=True)


def largest_eigenvalue_of_fixed() -> float:
    return 1.0


def largest_eigenvalue_without_fix() -> float:
    """Return the largest eigenvalue of I + D^-1/2 A D^-1/2, with self-loops added after the normalization."""
    return 2.0


@claim(
    22, "With self-loops and symmetric normalization the largest eigenvalue is 1, so features never grow, although "
        "rows "
    "do not sum to 1. Otherwise features grow exponentially with the number of propagations.",
    r"\tilde A = A + I, \quad P = \tilde D^{-1/2} \tilde A \tilde D^{-1/2}, \quad \lambda_1(P) = 1, \quad P "
    r"\mathbf{1} \ne \mathbf{1}; \qquad \lambda_1(I + D^{-1/2} A D^{-1/2}) = 2",
    "Symmetric normalization makes rows sum to 1.",
)  # fmt: skip
def normalized_propagation(setting: Setting) -> Finding:
    steps = setting.of(6, PROPAGATIONS, 20)
    plain, fixed, by_row = matrix(False, "none"), matrix(True, "symmetric"), matrix(True, "row")
    identity = torch.eye(len(plain), dtype=torch.float64)
    after = identity + matrix(False, "symmetric")
    loops = plain + identity
    root = loops.sum(-1) ** -0.5
    by_hand = root[:, None] * loops * root
    of_plain, of_fixed, of_after = (float(torch.linalg.eigvalsh(p).abs().max()) for p in (plain, fixed, after))
    sums = fixed.sum(-1)
    x = normal(len(plain), 4, seed=setting.seed)
    by_plain, by_fixed, by_after = (
        float((torch.linalg.matrix_power(p, steps) @ x).norm() / x.norm()) for p in (plain, fixed, after)
    )
    return Finding(
        [
            at_most("the lab's matrix, relative deviation from D^-1/2 (A + I) D^-1/2", distance(fixed, by_hand), 1e-6),
            equal("largest |eigenvalue|", of_fixed, largest_eigenvalue_of_fixed(), within=1e-6),
            equal("largest |eigenvalue| of I + D^-1/2 A "
                  "D^-1/2", of_after, largest_eigenvalue_without_fix(), within=1e-6),
            at_most("row normalization: deviation of row sums from 1", farthest(by_row.sum(-1), 1), 1e-6),
            at_most(f"relative norm of the features after {steps} propagations", by_fixed, 1.0),
            at_least("the same with I + D^-1/2 A D^-1/2", by_after, 1.3**steps),
            at_least("the same with A", by_plain, 3.0**steps),
            at_most("symmetric normalization: deviation of row sums from 1", farthest(sums, 1), 0.01, mistake=True),
        ],
        [
            "A + I includes each node in its own sum. The rows of D^-1 (A + I) sum to 1, so its largest eigenvalue is "
            "1.",
            "D^-1/2 (A + I) D^-1/2 is similar to it and has the same eigenvalues but different rows: for the karate "
            f"club they sum to {float(sums.min()):.3f} ... {float(sums.max()):.3f}. Its largest eigenvalue is "
            f"{of_fixed:.6f}.",
            f"Features therefore never grow: after {steps} propagations, random features have {by_fixed:.2g} of their "
            "initial norm.",
            f"Self-loops added after the normalization, I + D^-1/2 A D^-1/2, give the eigenvalue 1 + 1 = "
            f"{of_after:.6f} and {by_after:.1e} times the norm.",
            f"A alone has the eigenvalue {of_plain:.2f} and gives {by_plain:.1e} times the norm.",
        ],
        lambda: growth_picture(setting),
    )  # fmt: skip


def growth_picture(setting: Setting) -> bytes:
    figure, (axes,) = axes_of(1)
    normalized = matrix(False, "symmetric")
    kinds = {
        "A": matrix(False, "none"),
        "A + I": matrix(True, "none"),
        "I + D^-1/2 A D^-1/2": torch.eye(len(normalized), dtype=torch.float64) + normalized,
        "D^-1 (A + I)": matrix(True, "row"),
        "D^-1/2 (A + I) D^-1/2": matrix(True, "symmetric"),
    }
    for name, p in kinds.items():
        x = start = normal(len(p), 4, seed=setting.seed)
        sizes = [1.0]
        for _ in range(PROPAGATIONS):
            x = p @ x
            sizes.append(float(x.norm() / start.norm()))
        axes.semilogy(range(PROPAGATIONS + 1), sizes, "o-", markersize=3, label=name)
    axes.set(xlabel="propagations", ylabel="norm of the features, relative to the input")
    axes.legend(fontsize="small")
    return svg(figure)
