"""Each optimizer is torch's own where torch has it, its formula where torch has not, and good for every experiment."""

import json
from copy import deepcopy

import pytest
import torch
from torch import nn

from subquad_lab import UsageError
from subquad_lab.cli import main
from subquad_lab.training.config import Training
from subquad_lab.training.optimizers import SGD, Adam, make_optimizer

RATE = 0.004
NAMES = ["sgd", "sgdw", "average", "corrected", "adam", "adamw"]
TORCHS = {
    "sgd": lambda p, decay: torch.optim.SGD(p, RATE, 0.9, weight_decay=decay),
    "adam": lambda p, decay: torch.optim.Adam(p, RATE, weight_decay=decay),
    "adamw": lambda p, decay: torch.optim.AdamW(p, RATE, weight_decay=decay),
}


def path(make, steps: int = 40) -> torch.Tensor:
    """Of two weights of different sizes, down a valley with noise."""
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(3, 2, dtype=torch.float64, generator=generator)) for _ in range(2)]
    optimizer, places = make(weights), []
    for _ in range(steps):
        optimizer.zero_grad()
        noise = torch.randn(3, 2, dtype=torch.float64, generator=generator)
        ((weights[0] - 1) ** 2 + 100 * (weights[1] + 2) ** 2 + noise * weights[0]).sum().backward()
        optimizer.step()
        places.append(torch.stack([w.detach().clone() for w in weights]))
    return torch.stack(places)


@pytest.mark.parametrize("name", TORCHS)
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_they_equal_those_of_torch(name, decay):
    ours = path(lambda p: make_optimizer(name, p, RATE, 0.9, decay))
    assert torch.allclose(ours, path(lambda p: TORCHS[name](p, decay)), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("name", ["sgd", "sgdw", "average", "corrected"])
def test_they_equal_their_formulas(name, decay):
    def by_formula() -> list[float]:
        x, v, places = 3.0, 0.0, []
        for t in range(1, 20):
            g = 2 * (x - 1)
            if name == "sgdw":
                x *= 1 - 0.02 * decay
            else:
                g += decay * x
            v = 0.8 * v + (0.2 if name in ("average", "corrected") else 1.0) * g
            x -= 0.02 * v / (1 - 0.8**t if name == "corrected" else 1)
            places.append(x)
        return places

    x = nn.Parameter(torch.tensor(3.0, dtype=torch.float64))
    optimizer, places = make_optimizer(name, [x], 0.02, 0.8, decay), []
    for _ in range(1, 20):
        x.grad = 2 * (x.detach() - 1)
        optimizer.step()
        places.append(x.item())
    assert places == pytest.approx(by_formula(), rel=1e-12)


def test_what_has_no_gradient_stays():
    x, y = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    x.grad = torch.ones(2)
    make_optimizer("adamw", [x, y], 0.1, decay=0.5).step()
    assert torch.equal(y.data, torch.ones(2))
    assert not torch.equal(x.data, torch.ones(2))


def test_an_average_begins_at_nothing_and_that_of_torch_at_the_first_gradient():
    def first_step(make) -> float:
        x = nn.Parameter(torch.zeros((), dtype=torch.float64))
        x.grad = torch.ones_like(x)
        make([x]).step()
        return x.item()

    assert first_step(lambda p: torch.optim.SGD(p, 1.0, 0.9, dampening=0.9)) == -1.0
    assert first_step(lambda p: make_optimizer("average", p, 1.0, 0.9)) == pytest.approx(-0.1)
    assert first_step(lambda p: make_optimizer("corrected", p, 1.0, 0.9)) == pytest.approx(-1.0)


def weight(value: float = 3.0) -> nn.Parameter:
    return nn.Parameter(torch.full((2,), value, dtype=torch.float64))


@pytest.mark.parametrize("name", NAMES)
def test_a_state_that_is_saved_and_loaded_goes_on_alike(name):
    def go_on(optimizer, x: nn.Parameter, steps: int) -> None:
        for _ in range(steps):
            x.grad = 2 * (x.detach() - 1)
            optimizer.step()

    x = weight()
    optimizer = make_optimizer(name, [x], 0.05, 0.8, 0.1)
    go_on(optimizer, x, 3)
    y = nn.Parameter(x.detach().clone())
    other = make_optimizer(name, [y], 0.05, 0.8, 0.1)
    other.load_state_dict(deepcopy(optimizer.state_dict()))
    go_on(optimizer, x, 3)
    go_on(other, y, 3)
    assert torch.equal(x, y)


@pytest.mark.parametrize(
    "make", [lambda groups, **own: SGD(groups, 0.1, **own), lambda groups, **own: Adam(groups, 0.1, **own)]
)
@pytest.mark.parametrize("decoupled", [False, True])
def test_each_group_has_its_own_rate_and_decay(make, decoupled):
    own = [dict(lr=0.1, decay=0.0), dict(lr=0.3, decay=0.0), dict(lr=0.1, decay=2.0)]
    together, alone = [weight() for _ in own], [weight() for _ in own]
    optimizers = [
        make([dict(params=[x], **settings) for x, settings in zip(together, own, strict=True)], decoupled=decoupled)
    ]
    optimizers += [
        make([dict(params=[x], **settings)], decoupled=decoupled) for x, settings in zip(alone, own, strict=True)
    ]
    for _ in range(3):
        for x in (*together, *alone):
            x.grad = x.detach() - 1
        for optimizer in optimizers:
            optimizer.step()
    assert all(torch.equal(x, y) for x, y in zip(together, alone, strict=True))
    assert len({x[0].item() for x in together}) == 3


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_stays_as_it_was(name):
    x = weight()
    x.grad = torch.ones_like(x)
    make_optimizer(name, [x], 0.1, 0.9, decay=0.5).step()
    assert torch.equal(x.grad, torch.ones_like(x))


@pytest.mark.parametrize("name", NAMES)
def test_a_closure_makes_the_gradients_before_the_step(name):
    x, y = weight(), weight()
    by_closure, plain = make_optimizer(name, [x], 0.1, 0.9, 0.1), make_optimizer(name, [y], 0.1, 0.9, 0.1)
    losses = []

    def closure() -> torch.Tensor:
        by_closure.zero_grad()
        loss = (x - 1).square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        losses.append(by_closure.step(closure).item())
        y.grad = 2 * (y.detach() - 1)
        assert plain.step() is None
    assert torch.equal(x, y)
    assert losses[0] == 8.0
    assert losses[2] < losses[1] < losses[0]


@pytest.mark.parametrize(("name", "said"), [("sgd", "SGD"), ("adamw", "Adam")])
def test_sparse_gradients_are_refused_and_nothing_changes(name, said):
    table, other = nn.Embedding(5, 2, sparse=True), weight()
    before, other.grad = table.weight.detach().clone(), torch.ones_like(other)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(
        UsageError, match=rf"{said}: expected dense gradients, got one of layout torch.sparse_coo .*\(5, 2\)"
    ):
        make_optimizer(name, [other, table.weight], 0.1).step()
    assert torch.equal(table.weight, before)
    assert torch.equal(other, weight())


@pytest.mark.parametrize("momentum", [1.0, 1.5, -0.1, float("nan")])
def test_a_momentum_that_never_forgets_is_refused(momentum):
    with pytest.raises(UsageError, match=rf"momentum: expected a number in \[0, 1\), got {momentum}"):
        Training(optimizer="corrected", momentum=momentum)


@pytest.mark.parametrize("name", NAMES)
def test_a_language_model_trains_with_each(name, text, tmp_path, capsys):
    options = ["--model", "rnn", "--width", "16", "--embedding", "8", "--context", "5", "--batch", "4", "--lr", "0.1",
               "--momentum", "0.8", "--weight-decay", "0.001", "--steps", "30", "--warmup", "0"]  # fmt: skip
    if name.startswith("adam"):
        options[options.index("--lr") + 1] = "0.01"
    assert main(["train", "language", "--data", str(text), "--optimizer", name, *options, "--out", str(tmp_path)]) == 0
    log = (tmp_path / "language-001" / "metrics.jsonl").read_text().splitlines()
    losses = [line["loss"] for line in map(json.loads, log) if "loss" in line]
    assert sum(losses[-5:]) < sum(losses[:5])
