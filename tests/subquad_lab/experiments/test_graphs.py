"""Graph networks: a propagation is the matrix that it is said to be, attention sees what it should, runs are whole."""

import json
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from torch_geometric.nn import GCNConv
from torch_geometric.utils import to_undirected

import subquad
from small_runs import reseal
from subquad_lab import UsageError
from subquad_lab.cli import main
from subquad_lab.data.graphs import load_graph
from subquad_lab.experiments import graphs
from subquad_lab.experiments.graphs import Config, flattened, make_model, neighbors, norms, variants
from subquad_lab.figures.classification import Predictions
from subquad_lab.models.graphs import Attention, Convolution, Normalization, propagation
from subquad_lab.training.run import Run


def some_edges(nodes: int = 7) -> torch.Tensor:
    """Node 6 is alone."""
    return to_undirected(torch.tensor([[0, 0, 1, 2, 3, 4], [1, 2, 2, 3, 4, 5]]), num_nodes=nodes)


def dense(edges: torch.Tensor, weights: torch.Tensor, nodes: int = 7) -> torch.Tensor:
    matrix = torch.zeros(nodes, nodes)
    matrix[edges[1], edges[0]] = weights
    return matrix


# --- The GCN ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("self_loops", "normalization"), product((True, False), get_args(Normalization)))
def test_a_propagation_is_its_matrix(self_loops, normalization):
    adjacency = dense(some_edges(), torch.ones(some_edges().shape[1])) + self_loops * torch.eye(7)
    degrees = adjacency.sum(1)
    inverse = torch.where(degrees > 0, 1 / degrees, 0.0)
    wanted = {"none": adjacency, "row": inverse[:, None] * adjacency,
              "symmetric": inverse.sqrt()[:, None] * adjacency * inverse.sqrt()}[normalization]  # fmt: skip
    edges, weights = propagation(some_edges(), 7, self_loops, normalization)
    assert torch.allclose(dense(edges, weights), wanted)
    x = torch.randn(7, 3)
    layer = Convolution(3, 2, edges, weights)
    with torch.no_grad():
        layer.convolve.bias.copy_(torch.tensor([0.5, -0.5]))
        assert torch.allclose(layer(x), wanted @ x @ layer.convolve.lin.weight.T + layer.convolve.bias, atol=1e-6)


def test_with_both_fixes_it_is_the_layer_of_torch_geometric():
    theirs, x = GCNConv(5, 3), torch.randn(7, 5)
    ours = Convolution(5, 3, *propagation(some_edges(), 7, True, "symmetric"))
    ours.convolve.load_state_dict(theirs.state_dict())
    assert torch.allclose(ours(x), theirs(x, some_edges()), atol=1e-6)


def test_what_the_normalizations_keep():
    """The symmetric one keeps the largest eigenvalue at 1, and its rows do not sum to 1; those of the row one do."""
    symmetric = dense(*propagation(some_edges(), 7, True, "symmetric"))
    assert torch.linalg.eigvalsh(symmetric).abs().max() == pytest.approx(1, abs=1e-6)
    assert (symmetric.sum(1) - 1).abs().max() > 0.05
    row = dense(*propagation(some_edges(), 7, True, "row"))
    assert torch.allclose(row.sum(1), torch.ones(7))


def test_the_norms_are_those_of_the_powers():
    graph = load_graph()
    found = norms(graph, graph.features)
    assert len(found) == 6
    for (name, sizes), (self_loops, kind) in zip(
        found.items(), product((True, False), get_args(Normalization)), strict=True
    ):
        assert name.startswith(kind)
        assert ("without" in name) is not self_loops
        matrix = dense(*propagation(graph.edges, 34, self_loops, kind), 34).double()
        wanted = [float(torch.linalg.matrix_power(matrix, k).norm() / 34**0.5) for k in range(17)]
        assert sizes == pytest.approx(wanted, rel=1e-4)
    assert found["none, with self-loops"][-1] > 1e6
    assert found["symmetric, with self-loops"][-1] < 1


# --- Attention ----------------------------------------------------------------------------------------------------


def test_a_node_attends_to_its_neighbors_and_itself_alone():
    graph = load_graph()
    mask = neighbors(graph, 1)
    assert mask.sum() == graph.edges.shape[1] + 34
    assert mask.diagonal().all()
    torch.manual_seed(0)
    layer, x = Attention(34, 5, 4, 2, mask, None), graph.features
    q, k, v = (part(x).view(34, 2, -1).permute(1, 0, 2) for part in (layer.query, layer.key, layer.value))
    scores = (q @ k.mT / 2).masked_fill(~mask, -torch.inf)
    assert torch.allclose(layer(x), (scores.softmax(-1) @ v).mean(0) + layer.bias, atol=1e-6)
    changed = x.clone()
    changed[~mask[3]] += 1  # nodes that node 3 does not see
    assert torch.equal(layer(changed)[3], layer(x)[3])


@pytest.mark.parametrize("method", ["linear:elu", "taylor:2", "random:8", "separable", "exact"])
def test_attention_to_all_is_a_method_of_subquad(method):
    torch.manual_seed(0)
    model = make_model(Config(mixer="all", method=method, heads=2), load_graph(), 4).eval()
    layer, x = model.first, torch.randn(34, 34)
    q, k, v = (part(x).view(34, 2, -1).permute(1, 0, 2) for part in (layer.query, layer.key, layer.value))
    wanted = subquad.attention(q, k, v, method=graphs.parse_method(method)).mean(0) + layer.bias
    assert torch.allclose(layer(x), wanted, atol=1e-6)
    assert layer.mask is None


def test_both_is_the_sum():
    torch.manual_seed(0)
    graph = load_graph()
    model = make_model(Config(mixer="both", method="taylor:2"), graph, 4)
    layer, x = model.first, torch.randn(34, 34)
    parts = []
    for mask, method in ((layer.mask, None), (None, layer.method)):
        part = Attention(34, 16, 16, 1, mask, method)
        part.load_state_dict(layer.state_dict())
        parts.append(part(x))
    assert torch.allclose(layer(x), parts[0] + parts[1] - layer.bias, atol=1e-5)


def test_a_graph_whose_mask_would_not_fit_is_refused(monkeypatch):
    monkeypatch.setattr(graphs, "memory", lambda: 10_000)
    with pytest.raises(UsageError, match=r"over 34 nodes with 1 heads needs 0 GiB, .*; use gcn or all"):
        graphs.build(Config(mixer="neighbors"))
    graphs.build(Config(mixer="all"))


def test_dropout_of_the_features_drops_each_entry_as_often_and_keeps_the_mean():
    graph = load_graph()
    features = torch.rand(34, 34) * (torch.rand(34, 34) < 0.3)
    model = make_model(Config(dropout=0.25), replace(graph, features=features), 4)
    seen = []
    model.first.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    torch.manual_seed(0)
    for _ in range(2000):
        model.embed(features)
    drawn = torch.stack(seen)
    kept = features > 0
    assert not drawn[:, ~kept].any()
    shares = (drawn[:, kept] == 0).float().mean(0)
    assert (shares - 0.25).abs().max() < 5 * (0.25 * 0.75 / 2000) ** 0.5
    assert torch.allclose(drawn.max(0).values, features / 0.75)
    model.eval().embed(features)
    assert torch.equal(seen[-1], features)


# --- Runs ---------------------------------------------------------------------------------------------------------


def test_the_plane_of_an_embedding_is_that_of_its_principal_components():
    from sklearn.decomposition import PCA

    torch.manual_seed(0)
    points = torch.randn(40, 6) * torch.arange(1, 7)
    theirs = torch.from_numpy(PCA(2).fit_transform(points.numpy()))
    assert torch.allclose(flattened(points).abs(), theirs.double().abs(), atol=1e-4)
    assert flattened(points[:, :1]).shape == (40, 2)
    assert flattened(torch.zeros(5, 3)).tolist() == [[0.0, 0.0]] * 5
    opposite = torch.tensor([[1.0, -1.0]]) * torch.arange(6)[:, None]  # along a direction whose entries sum to 0
    assert flattened(opposite)[:, 0].abs().max() > 3


def test_a_network_that_would_not_fit_is_refused():
    with pytest.raises(UsageError, match="width: a layer of width 1000000000000 needs"):
        graphs.build(Config(width=10**12))


def test_a_method_without_effect_is_told():
    with pytest.warns(UserWarning, match="--method taylor:2 has no effect with --mixer gcn; use --mixer all or both"):
        graphs.build(Config(method="taylor:2"))
    found = variants(Config(method="taylor:2"))
    assert {name: config.method for name, config in found.items() if config.method != "linear:elu"} == {
        "all": "taylor:2", "both": "taylor:2"}  # fmt: skip


def test_a_graph_without_edges_is_a_network_without_neighbors():
    club = load_graph()
    alone = replace(club, edges=club.edges[:, :0])
    task = graphs.Graphs(Config(), alone)
    task.loss(task.model, task.batch(0, 0), {})[0].backward()
    task.model.eval()
    assert 0 <= task.evaluate("test", lambda: None)["accuracy"] <= 1
    sizes = norms(alone, task.features)
    assert sizes["symmetric, with self-loops"] == [1.0] * 17
    assert sizes["row, without self-loops"] == [1.0] + [0.0] * 16


def test_features_are_divided_by_their_sum_and_empty_rows_stay():
    graph = load_graph()
    features = torch.rand(34, 5)
    features[7] = 0
    features[8, 0] *= -1
    task = graphs.Graphs(Config(), replace(graph, features=features))
    sums = task.features.abs().sum(1)
    assert sums[7] == 0
    assert torch.allclose(sums[torch.arange(34) != 7], torch.ones(33))


def test_train_leaves_pictures_and_records_over_seeds(tmp_path, capfd):
    assert main(["train", "graphs", "--seeds=3", "--epochs=60", f"--out={tmp_path}"]) == 0
    shown = capfd.readouterr().out
    assert "test, mean of 3 seeds and 95 % confidence interval: accuracy 0." in shown
    folder = tmp_path / "graphs-001" / "seed-2"
    for name in ("confusion", "norms", "embedding", "curves"):
        assert b"<svg" in (folder / f"{name}.svg").read_bytes()
        assert f"seed-0/{name}.svg" in shown or name == "curves"
    run = Run(folder)
    assert np.mean(Predictions.of(run.folder).right) == pytest.approx(run.result()["test"]["accuracy"])
    about = run.about()["data"]
    assert (about["nodes"], about["edges"], about["classes"]) == (34, 78, 4)
    assert about["sizes"] == {"train": 4, "valid": 10, "test": 20}
    assert main(["report", "--root", str(tmp_path), "--out", str(tmp_path / "r.html")]) == 0
    page = (tmp_path / "r.html").read_text()
    assert page.count("data:image/svg+xml") == 1 + 3  # the curves of all seeds, and the pictures of the best one
    assert "graphs-001, 3 seeds" in page
    assert "0.815" in page  # published, in our unit


@pytest.fixture(scope="module")
def small_run(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("graphs")
    assert main(["train", "graphs", "--seeds=1", "--steps=2", f"--out={out}"]) == 0
    return out / "graphs-001"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("predictions", {"classes": ["a"], "wanted": [0, 1], "found": [0, 0]}),
        ("predictions", {"classes": [1], "wanted": [0], "found": [0]}),
        ("predictions", {"classes": ["a", "b"], "wanted": [0, 1], "found": [0]}),
        ("predictions", {"classes": ["a", "b"], "wanted": [True], "found": [0]}),
        ("embedding", {"points": [[1, 2, 3]], "classes": [0]}),
        ("embedding", {"points": [[1, "x"]], "classes": [0]}),
        ("embedding", {"points": [[1, 2]], "classes": []}),
        ("norms", {"none": "x"}),
        ("norms", {"none": [1, None]}),
        ("norms", {"none": [10**400]}),
        ("embedding", {"points": [[1, float("nan")]], "classes": [0]}),
        ("norms", [1]),
    ],
)
def test_records_that_are_wrong_are_told(name, content, small_run, tmp_path, complaint):
    shutil.copytree(small_run, tmp_path / "graphs-001")
    file = tmp_path / "graphs-001" / f"{name}.json"
    file.write_text(json.dumps(content))
    reseal(file.parent)
    assert f"{file}: expected" in complaint(["report", "--root", str(tmp_path), "--out", str(tmp_path / "r.html")])


def test_the_variants_are_the_switches_and_attention():
    found = variants(Config(self_loops=False, lr=0.5))
    assert list(found) == ["gcn symmetric", "gcn symmetric no-loops", "gcn row", "gcn row no-loops", "gcn none",
                           "gcn none no-loops", "neighbors", "all", "both"]  # fmt: skip
    assert len({graphs.label(config) for config in found.values()}) == 9
    assert {config.lr for config in found.values()} == {0.5}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(batch=2), "batch: expected 1 .the whole graph., got 2"),
        (dict(width=0), "width: expected a positive integer, got 0"),
        (dict(heads=0), "heads: expected a positive integer, got 0"),
        (dict(dropout=-0.1), r"dropout: expected a number in \[0, 1\), got -0.1"),
        (dict(method="fast"), "fast"),
        (
            dict(mixer="all", method="random:1000000000"),
            "method: expected at most 65,536 features, got 1,000,000,000 for random:1000000000 at width 16",
        ),
    ],
)
def test_configs_that_do_not_fit_are_told(change, message):
    with pytest.raises(UsageError, match=message):
        Config(**change)
