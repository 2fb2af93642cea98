"""Two-layer graph networks: y = mix(x W) + b, where `mix` combines the nodes.

    gcn           P x, a sum over incoming edges: P = A, D^-1 A or D^-1/2 A D^-1/2, with or without self-loops (A + I
                  instead of A)
    neighbors     softmax of q.k over the neighbors and the node itself: exact attention with a mask
    all           a subquad method over all nodes, in linear time
    both          the sum of the last two

Axes: n nodes, f features, w width, h heads.
"""

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import subquad
from subquad.methods import for_layer

Mixer = Literal["gcn", "neighbors", "all", "both"]
Normalization = Literal["symmetric", "row", "none"]


def propagation(edges: Tensor, nodes: int, self_loops: bool, normalization: Normalization) -> tuple[Tensor, Tensor]:
    """Return P as edges (2, e), from and to, with weights (e)."""
    from torch_geometric.nn.conv.gcn_conv import gcn_norm  # This import takes seconds; other experiments skip it.
    from torch_geometric.utils import add_self_loops, degree

    if self_loops:
        edges, _ = add_self_loops(edges, num_nodes=nodes)
    if normalization == "symmetric":
        edges, weights = gcn_norm(edges, num_nodes=nodes, add_self_loops=False)
        return edges, weights
    weights = torch.ones(edges.shape[1])
    if normalization == "row":
        weights = weights / degree(edges[1], nodes)[edges[1]]
    return edges, weights


class GraphNet(nn.Module):
    """Features (n, f) -> log probabilities (n, classes). `embed` returns the output of the first layer, (n, w).

    Graph features are mostly zeros, which dropout does not change, so random numbers are drawn for the other entries
    only. Drawing them for all entries would take ten times as long as the rest of a step.
    """

    places: Tensor

    def __init__(self, first: nn.Module, second: nn.Module, dropout: float, features: Tensor) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("places", features.nonzero().T, persistent=False)

    def embed(self, features: Tensor) -> Tensor:
        if self.training:
            places = tuple(self.places)
            features = torch.zeros_like(features).index_put(places, self.dropout(features[places]))
        return F.relu(self.first(features))

    def forward(self, features: Tensor) -> Tensor:
        return F.log_softmax(self.second(self.dropout(self.embed(features))), -1)


class Convolution(nn.Module):
    """torch_geometric's graph convolution with precomputed edge weights."""

    def __init__(self, inward: int, outward: int, edges: Tensor, weights: Tensor) -> None:
        from torch_geometric.nn import GCNConv

        super().__init__()
        self.convolve = GCNConv(inward, outward, normalize=False)
        self.register_buffer("edges", edges, persistent=False)
        self.register_buffer("weights", weights, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.convolve(x, self.edges, self.weights)
        return found


class Attention(nn.Module):
    """Attention averaged over heads: to the neighbors if a mask (n, n) is given, plus to all nodes if a method is."""

    mask: Tensor | None

    def __init__(self, inward: int, outward: int, width: int, heads: int, mask: Tensor | None, method: Any) -> None:
        super().__init__()
        self.heads, self.method = heads, for_layer(method, width, heads)
        self.query, self.key = (nn.Linear(inward, heads * width, bias=False) for _ in range(2))
        self.value = nn.Linear(inward, heads * outward, bias=False)
        self.bias = nn.Parameter(torch.zeros(outward))
        for layer in (self.query, self.key, self.value):
            nn.init.xavier_uniform_(layer.weight)
        self.register_buffer("mask", mask, persistent=False)
        drawn = method.draw(width) if isinstance(method, subquad.RandomFeatures) else None
        self.register_buffer("random_matrix", drawn)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(0, 1) for layer in (self.query, self.key, self.value)
        )
        mixed = torch.zeros_like(v)
        if self.mask is not None:
            mixed = mixed + subquad.attention(q, k, v, attn_mask=self.mask)
        if self.method is not None:
            method = self.method if self.random_matrix is None else replace(self.method, matrix=self.random_matrix)
            mixed = mixed + subquad.attention(q, k, v, method=method)
        return mixed.mean(0) + self.bias
