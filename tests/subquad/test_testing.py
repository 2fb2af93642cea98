"""Every map of ours passes the conformance suite, and the suite notices maps that break a promise."""

import pytest
import torch
from torch import Tensor

from reference import METHODS, Squares
from subquad import FeatureMap, Separable, Taylor
from subquad.testing import FeatureMapConformance, check_feature_map

MAPS = {name: method for name, method in METHODS.items() if not isinstance(method, Separable)}


@pytest.mark.parametrize("name", MAPS)
def test_our_maps_pass(name) -> None:
    assert isinstance(MAPS[name], FeatureMap)
    check_feature_map(MAPS[name], width=4)


class TestInherited(FeatureMapConformance):
    """One class gives a user all checks as tests."""

    method = Squares()
    width = 3


class Honest:
    positive = True

    def size(self, width: int) -> int:
        return width

    def __call__(self, x: Tensor, *, is_query: bool) -> Tensor:
        return x.square() + 0.1


class WrongSize(Honest):
    def size(self, width: int) -> int:
        return width + 1


class Negative(Honest):
    def __call__(self, x: Tensor, *, is_query: bool) -> Tensor:
        return x


class LooksAhead(Honest):
    """Stabilized by a maximum over all tokens: the classic leak."""

    def __call__(self, x: Tensor, *, is_query: bool) -> Tensor:
        return (x - x.amax((-1, -2), keepdim=True)).exp()


class Overflows(Honest):
    def __call__(self, x: Tensor, *, is_query: bool) -> Tensor:
        return (x * 1000).exp()


class Restless(Honest):
    """Draws anew on every call."""

    def __call__(self, x: Tensor, *, is_query: bool) -> Tensor:
        return (x + torch.rand(())).square()


def test_an_honest_map_passes() -> None:
    check_feature_map(Honest(), width=3)


@pytest.mark.parametrize("broken", [WrongSize, Negative, LooksAhead, Overflows, Restless])
def test_the_suite_notices(broken) -> None:
    with pytest.raises((AssertionError, ValueError)):
        check_feature_map(broken(), width=3)


def test_every_check_is_run_by_the_call(monkeypatch) -> None:
    ran = []
    names = [name for name in dir(FeatureMapConformance) if name.startswith("test_")]
    for name in names:
        monkeypatch.setattr(FeatureMapConformance, name, lambda self, name=name: ran.append(name))
    check_feature_map(Honest())
    assert ran == names
    assert len(names) >= 9


@pytest.mark.filterwarnings("error")
def test_the_suite_is_quiet_about_methods_whose_calls_warn() -> None:
    for method in (Taylor(3), Taylor(2, basis="diagonal"), Taylor(2)):
        check_feature_map(method, width=4)


def test_a_map_with_float32_parameters_is_taken_with_room_for_rounding() -> None:
    class Learned(torch.nn.Module):
        positive = True

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 5)

        def size(self, width: int) -> int:
            return 5

        def forward(self, x: Tensor, *, is_query: bool) -> Tensor:
            return self.layer(x).square() + 0.1

    torch.manual_seed(0)
    check_feature_map(Learned(), width=3, tolerance=1e-4)
