"""Each optimiser is torch's own where torch has it, its formula where torch has not, and good for every experiment."""

import json

import pytest
import torch
from torch import nn

from subquad_lab.cli import main
from subquad_lab.optimizers import make_optimizer

RATE = 0.004
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


@pytest.mark.parametrize("name", ["sgd", "sgdw", "average", "corrected", "adam", "adamw"])
def test_a_language_model_trains_with_each(name, text, tmp_path, capsys):
    options = ["--model", "rnn", "--width", "16", "--embedding", "8", "--context", "5", "--batch", "4", "--lr", "0.1",
               "--momentum", "0.8", "--weight-decay", "0.001", "--steps", "30", "--warmup", "0"]  # fmt: skip
    if name.startswith("adam"):
        options[options.index("--lr") + 1] = "0.01"
    assert main(["train", "language", "--data", str(text), "--optimizer", name, *options, "--out", str(tmp_path)]) == 0
    log = (tmp_path / "language-001" / "metrics.jsonl").read_text().splitlines()
    losses = [line["loss"] for line in map(json.loads, log) if "loss" in line]
    assert sum(losses[-5:]) < sum(losses[:5])
