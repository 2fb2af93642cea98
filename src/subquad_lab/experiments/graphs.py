"""How do self-loops and normalization affect a graph network, and can attention replace both?

    loss = mean over the training nodes of -log p(class | graph)

Each step processes the whole graph. Feature rows are L1-normalized.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from subquad_lab import UsageError
from subquad_lab.data.graphs import Graph, load_graph
from subquad_lab.figures.classification import PREDICTIONS, Predictions, confusion_picture, figures
from subquad_lab.figures.plots import axes_of, plain, svg
from subquad_lab.models import parameters, refuse_too_large
from subquad_lab.models.graphs import Attention, Convolution, GraphNet, Mixer, Normalization, propagation
from subquad_lab.options.methods import parse_method, refuse_many_features
from subquad_lab.system.memory import memory
from subquad_lab.training import optimizers
from subquad_lab.training.config import Training
from subquad_lab.training.experiment import Carry, Experiment, PartName, Rows
from subquad_lab.training.run import Run

NORMS, EMBEDDING = "norms", "embedding"
PROPAGATIONS = 16  # for which feature norms are shown

PUBLISHED = [{"what": "two-layer GCN", "data": "cora", "figure": 0.815}]


@dataclass(frozen=True)
class Config(Training):
    """Train a two-layer network to classify the nodes of a graph.

    Args:
        batch: Must be 1: a batch is the whole graph.
        data: Folder with Planetoid files, or an npz file of such a graph. Default: the embedded karate club.
        mixer: How nodes are combined: gcn (graph convolution), attention to neighbors, attention to all nodes, or both
            kinds of attention.
        self_loops: Add self-loops to the graph convolution.
        normalization: Normalization of the graph convolution: symmetric, row (mean) or none.
        method: Method of attention to all nodes: taylor:DEGREE, random:FEATURES, linear:ACTIVATION, separable, exact.
        width: Hidden size, and dimension of queries and keys.
        heads: Number of attention heads, each of the full width.
        dropout: Dropout probability on the input of each layer.
    """

    seeds: int = 10
    epochs: int = 200
    batch: int = 1
    optimizer: optimizers.Name = "adam"
    lr: float = 0.01
    weight_decay: float = 5e-4
    evaluate_every: int | None = 10
    data: str | None = None
    mixer: Mixer = "gcn"
    self_loops: bool = True
    normalization: Normalization = "symmetric"
    method: str = "linear:elu"
    width: int = 16
    heads: int = 1
    dropout: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch != 1:
            raise UsageError(f"batch: expected 1 (the whole graph), got {self.batch}")
        for name in ("width", "heads"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}: expected a positive integer, got {getattr(self, name)}")
        if not 0 <= self.dropout < 1:
            raise UsageError(f"dropout: expected a number in [0, 1), got {self.dropout}")
        parse_method(self.method)
        if self.mixer in ("all", "both"):
            refuse_many_features(self.method, self.width)


def make_model(config: Config, graph: Graph, classes: int) -> GraphNet:
    inward, width = graph.features.shape[1], config.width
    total = inward * width if config.mixer == "gcn" else 3 * inward * width * config.heads  # of the first layer
    refuse_too_large(total, f"width: a layer of width {width}")
    layers: tuple[nn.Module, nn.Module]
    if config.mixer == "gcn":
        sums = propagation(graph.edges, graph.nodes, config.self_loops, config.normalization)
        layers = Convolution(inward, width, *sums), Convolution(width, classes, *sums)
    else:
        mask = neighbors(graph, config.heads) if config.mixer != "all" else None
        method = parse_method(config.method) if config.mixer != "neighbors" else None
        layers = (Attention(inward, width, width, config.heads, mask, method),
                  Attention(width, classes, width, config.heads, mask, method))  # fmt: skip
    first, second = layers
    return GraphNet(first, second, config.dropout, graph.features)


def neighbors(graph: Graph, heads: int) -> Tensor:
    """Return the attention mask (n, n), True for the node itself and the sources of its incoming edges."""
    needed = (1 + 16 * heads) * graph.nodes**2  # the mask, and the weights of both layers with their gradients
    if needed > memory():
        raise UsageError(f"mixer: masked attention over {graph.nodes:,} nodes with {heads} heads needs "
                         f"{needed / 2**30:,.0f} GiB, but this machine has {memory() / 2**30:,.0f} GiB; use gcn or "
                         "all")  # fmt: skip
    mask = torch.eye(graph.nodes, dtype=torch.bool)
    mask[graph.edges[1], graph.edges[0]] = True
    return mask


class Graphs:
    """The task of the training loop: each step processes the whole graph."""

    batches = 1

    def __init__(self, config: Config, graph: Graph) -> None:
        self.config, self.graph = config, graph
        self.classes = [str(i) for i in range(max(2, int(graph.classes.max()) + 1))]
        self.model = make_model(config, graph, len(self.classes))
        self.features = F.normalize(graph.features, p=1, dim=1)

    def about(self) -> dict[str, Any]:
        graph = self.graph
        sizes = {part: len(getattr(graph, part)) for part in ("train", "valid", "test")}
        data = {"name": graph.name, "sha256": graph.checksum, "nodes": graph.nodes, "edges": graph.edges.shape[1] // 2,
                "features": graph.features.shape[1], "classes": len(self.classes), "sizes": sizes}  # fmt: skip
        return {"data": data, "parameters": parameters(self.model)}

    def batch(self, epoch: int, index: int) -> Rows:
        return (self.graph.train[None],)

    def begin(self, rows: int) -> Carry:
        return {}

    def loss(self, model: nn.Module, rows: Rows, carry: Carry) -> tuple[Tensor, Carry]:
        nodes = rows[0][0]
        return F.nll_loss(model(self.features.to(nodes.device))[nodes], self.graph.classes.to(nodes.device)[nodes]), {}

    def count(self, rows: Rows) -> int:
        return self.graph.nodes

    def evaluate(self, part: PartName, check: Callable[[], None]) -> dict[str, float]:
        check()
        nodes = getattr(self.graph, part)
        return figures(self.log_probabilities()[nodes], self.graph.classes[nodes])

    @torch.no_grad()
    def log_probabilities(self) -> Tensor:
        found: Tensor = self.model(self.features.to(next(self.model.parameters()).device)).cpu()
        return found

    @torch.no_grad()
    def records(self) -> dict[str, Any]:
        self.model.eval()
        graph = self.graph
        found = self.log_probabilities().argmax(-1)
        predictions = Predictions(self.classes, graph.classes[graph.test].tolist(), found[graph.test].tolist())
        hidden = self.model.embed(self.features.to(next(self.model.parameters()).device)).cpu()
        points = {"points": flattened(hidden).tolist(), "classes": graph.classes.tolist()}
        return {PREDICTIONS: predictions.record(), EMBEDDING: points, NORMS: norms(graph, self.features)}


def flattened(points: Tensor) -> Tensor:
    """Project points (n, w) to their first two principal components."""
    centered = (points - points.mean(0)).double()
    _, _, directions = torch.linalg.svd(centered, full_matrices=False)
    directions = directions[:2]
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    return F.pad(centered @ (directions * largest.sign()).T, (0, 2 - len(directions)))  # with a fixed sign


def norms(graph: Graph, features: Tensor) -> dict[str, list[float]]:
    """Return |P^k X| / |X| for k = 0, 1, ... and each propagation matrix P."""
    from scipy.sparse import csr_matrix

    found = {}
    for self_loops, normalization in product((True, False), get_args(Normalization)):
        edges, weights = propagation(graph.edges, graph.nodes, self_loops, normalization)
        matrix = csr_matrix((weights.double().numpy(), edges.flip(0).numpy()), (graph.nodes, graph.nodes))
        x, sizes = features.double().numpy(), []
        for _ in range(PROPAGATIONS + 1):
            sizes.append(float(np.linalg.norm(x) / max(float(features.double().norm()), 1e-30)))
            x = matrix @ x
        found[f"{normalization}, {'with' if self_loops else 'without'} self-loops"] = sizes
    return found


def build(config: Config) -> Graphs:
    if config.mixer in ("gcn", "neighbors") and config.method != Config.method:
        warnings.warn(f"--method {config.method} has no effect with --mixer {config.mixer}; use --mixer all or both",
                      stacklevel=2)  # fmt: skip
    return Graphs(config, load_graph(config.data))


def label(config: Config) -> str:
    """Return a short description that distinguishes a run from others."""
    if config.mixer != "gcn":
        return config.mixer if config.mixer == "neighbors" else f"{config.mixer}, {config.method}"
    return f"gcn, {config.normalization}, {'with' if config.self_loops else 'without'} self-loops"


def variants(config: Config) -> dict[str, Config]:
    """Return the GCN with each setting, and attention instead; everything else is equal."""
    base = replace(config, mixer="gcn", self_loops=True, normalization="symmetric", method=Config.method)
    found = {}
    for normalization, self_loops in product(get_args(Normalization), (True, False)):
        name = f"gcn {normalization}{'' if self_loops else ' no-loops'}"
        found[name] = replace(base, normalization=normalization, self_loops=self_loops)
    found["neighbors"] = replace(base, mixer="neighbors")
    return found | {mixer: replace(base, mixer=mixer, method=config.method) for mixer in ("all", "both")}


# --- Pictures -----------------------------------------------------------------------------------------------------


def pictures(run: Run, config: Config) -> dict[str, bytes]:
    predictions = Predictions.of(run.folder)
    if predictions is None:
        return {}
    return {"confusion": confusion_picture(predictions), NORMS: norms_picture(run), EMBEDDING: embedding_picture(run)}


def norms_picture(run: Run) -> bytes:
    """Plot feature norms by number of propagations: without normalization they grow exponentially."""
    figure, (left, right) = axes_of(2)
    for name, sizes in run.read_json(f"{NORMS}.json").items():
        if not is_finite(sizes):
            raise UsageError(f"{run.folder / NORMS}.json: expected numbers for {name!r}")
        axes, style = left if name.startswith("none") else right, "--" if "without" in name else "-"
        axes.plot(range(len(sizes)), sizes, style, marker="o", markersize=3, label=plain(name))
    left.set_yscale("log")
    for axes in (left, right):
        axes.set(xlabel="propagations", ylabel="norm of the features, relative to the input")
        axes.legend(fontsize="small")
    return svg(figure)


def is_finite(values: Any) -> bool:
    """Return whether the values are a list of finite numbers."""
    return isinstance(values, list) and all(isinstance(x, int | float) and abs(x) < 1e300 for x in values)


def embedding_picture(run: Run) -> bytes:
    content = run.read_json(f"{EMBEDDING}.json")
    points, classes = content.get("points"), content.get("classes")
    path = f"{run.folder / EMBEDDING}.json"
    if not isinstance(points, list) or not all(is_finite(point) and len(point) == 2 for point in points):
        raise UsageError(f"{path}: expected points of two numbers")
    if not isinstance(classes, list) or len(classes) != len(points) or not all(type(c) is int for c in classes):
        raise UsageError(f"{path}: expected a class for each point")
    figure, (axes,) = axes_of(1, square=True)
    for number in sorted(set(classes)):
        own = [point for point, c in zip(points, classes, strict=True) if c == number]
        axes.scatter(*zip(*own, strict=True), s=6, label="unknown" if number < 0 else f"class {number}")
    axes.set(xlabel="first principal component of the hidden layer", ylabel="second principal component")
    axes.legend(fontsize="small")
    return svg(figure)


EXPERIMENT = Experiment(
    name="graphs",
    about=__doc__,
    config=Config,
    measure="accuracy",
    higher_is_better=True,
    unit="nodes",
    loss_unit="node",
    build=build,
    label=label,
    variants=variants,
    varied=("mixer", "self_loops", "normalization"),
    pictures=pictures,
    published=PUBLISHED,
)
