"""The machine, measured: the times that calls take, found again by the fit."""

import pytest
import torch

from subquad import Exact, RandomFeatures, Taylor
from subquad._engines import Result
from subquad.planning import calibration as module
from subquad.planning.calibration import grid
from subquad.planning.calibration_file import calibration
from subquad.planning.seconds import family, work
from subquad.planning.shape import Shape

CPU = torch.device("cpu")


def test_a_calibration_finds_the_times_it_was_given(fresh) -> None:
    found = calibration()
    for method, form, shape in grid():
        wanted = 1e-9 * sum(work(method, form, shape))
        assert found.seconds(method, shape, form) == pytest.approx(wanted, rel=0.02)
    unseen = Shape(5000, 5000, 48, 48, 6, 6, is_causal=True)
    wanted = 1e-9 * sum(work(Taylor(2), "chunked", unseen))
    assert found.seconds(Taylor(2), unseen, "chunked") == pytest.approx(wanted, rel=0.1)


def test_a_slow_machine_is_measured_in_fewer_turns(fresh, monkeypatch) -> None:
    monkeypatch.setattr(module, "CALIBRATION_SECONDS", 0.0)
    calibration()
    assert len(fresh) == len(list(grid()))


def test_measured_times_are_of_the_call_itself() -> None:
    """A real one, small: a longer call takes longer, and so does a backward."""
    short, long = (Shape(n, n, 16, 16, 2, 2, is_causal=True) for n in (64, 4096))
    times = [module.measured_seconds(Taylor(2), "chunked", shape, CPU, torch.float32) for shape in (short, long)]
    assert 0 < times[0] < times[1]
    training = Shape(4096, 4096, 16, 16, 2, 2, is_causal=True, training=True)
    assert module.measured_seconds(Taylor(2), "chunked", training, CPU, torch.float32) > times[1]
    assert family(RandomFeatures(8)) == "random"


def test_a_long_call_that_is_known_is_measured_once_more(monkeypatch) -> None:
    calls = []
    monkeypatch.setattr(module, "run", lambda *_: calls.append(1) or Result(torch.ones(1), None, "exact"))
    shape = Shape(8, 8, 4, 4)
    assert module.measured_seconds(Exact(), "exact", shape, CPU, torch.float32, known=1e-9) == 1e-9
    assert len(calls) == 11  # short: one to warm up and ten
    calls.clear()
    assert module.measured_seconds(Exact(), "exact", shape, CPU, torch.float32, known=60.0) < 1
    assert len(calls) == 10  # no warm-up; these empty calls are short themselves
