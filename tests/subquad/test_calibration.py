"""The machine, measured: the times that calls take, found again by the fit."""

import math
from types import SimpleNamespace

import pytest
import torch

from subquad import Exact, Multipole, RandomFeatures, Taylor, plan
from subquad._engines import Result
from subquad.planning import busyness, progress
from subquad.planning import calibration as module
from subquad.planning import calibration_file as cache
from subquad.planning.calibration import grid
from subquad.planning.calibration_file import calibration
from subquad.planning.reference import reference_seconds
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


@pytest.mark.parametrize("missing", [True, False])
def test_disturbed_times_never_make_long_calls_as_fast_as_short_ones(missing) -> None:
    """A busy machine: a few calls took 0.1 s whatever their size, and the others were not measured or did the same."""
    calls = [i for i, call in enumerate(module.grid_once()) if isinstance(call[0], Multipole) and not call[2].training]
    best = [reference_seconds(*call) for call in module.grid_once()]
    for number, i in enumerate(calls):
        best[i] = math.inf if missing and number % 6 > 1 else 0.1
    found = module.fitted(best)
    for is_causal in (True, False):
        short, long = (Shape(n, n, 64, 64, 8, 8, is_causal=is_causal) for n in (4096, 65536))
        assert found.seconds(Multipole(), long, "fused") > 10 * found.seconds(Multipole(), short, "fused")


class Clock:
    """A clock that only calls move, by `slow` times what the reference figures say."""

    def __init__(self, monkeypatch, slow: float, noise: float = 0.0) -> None:
        self.now, self.slow, self.noise, self.calls = 0.0, slow, noise, 0
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(module, "measured_seconds", self.measure)

    def measure(self, method, form, shape, *_) -> float:
        turn = self.calls // len(module.grid_once())
        self.calls += 1
        seconds = self.slow * (1 + self.noise * (turn % 2)) * reference_seconds(method, form, shape)
        self.now += 2 * seconds  # with its warm-up
        return seconds


def test_a_quiet_machine_is_measured_in_all_turns(fresh, monkeypatch, one_thread) -> None:
    clock = Clock(monkeypatch, slow=0.5)
    found = calibration()
    assert clock.calls == module.TURNS * len(list(grid()))
    assert found.note == "" and clock.now < module.CALIBRATION_SECONDS


def test_a_slow_machine_is_measured_as_far_as_time_allows(fresh, monkeypatch, one_thread) -> None:
    """The rest comes from the reference figures, scaled by what was measured; and the note says so."""
    clock = Clock(monkeypatch, slow=20.0)
    steps = []
    found = calibration(progress=lambda done, total: steps.append(done / total))
    assert clock.now <= module.CALIBRATION_SECONDS
    assert 20 < clock.calls < len(list(grid()))
    assert steps == sorted(steps) and steps[-1] == 1
    for method, form, shape in grid():
        assert found.seconds(method, shape, form) == pytest.approx(20 * reference_seconds(method, form, shape), rel=0.1)
    assert found.note.startswith(" Times are rough: there was not enough time when it was calibrated (load 0.0 on ")
    assert f"{clock.calls / len(list(grid())):.0%} of the benchmark finished" in found.note
    assert plan(query_length=4096, head_dim=64).reason.endswith(found.note)
    assert "measures again" not in found.note


def test_a_busy_machine_is_noticed_by_its_load_and_by_times_that_vary(fresh, monkeypatch, one_thread, caplog) -> None:
    monkeypatch.setattr(busyness, "cores", lambda: 2)
    assert [busyness.is_loaded(load) for load in (0.0, 1.0, 2.5)] == [False, False, True]  # one thread of two cores
    assert busyness.note_on(0.0, 1.1, 1.0) == ""
    assert "the machine was busy when it was calibrated (load 2.5 on 2 cores" in busyness.note_on(2.5, 1.0, 1.0)
    Clock(monkeypatch, slow=0.5, noise=0.8)
    found = calibration()
    assert "Times are rough: the machine was busy" in found.note and "repeated timings differed by 40%" in found.note
    assert found.note.endswith("A later run on a quiet machine measures again.")
    assert not [r for r in caplog.records if r.levelname != "INFO"], "the reason of a plan says it, once"


def test_a_rough_calibration_is_made_again_once_the_machine_is_quiet(fresh, monkeypatch, one_thread) -> None:
    clock = Clock(monkeypatch, slow=0.5, noise=0.8)
    rough = calibration()
    calls, clock.noise = clock.calls, 0.0
    assert calibration() == rough, "too soon"
    monkeypatch.setattr(cache, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr("os.getloadavg", lambda: (100.0, 0.0, 0.0))
    assert calibration() == rough and clock.calls == calls, "still busy"
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    clock.now = 0.0
    assert calibration().note == "" and clock.calls > calls
    calls = clock.calls
    assert calibration().note == "" and clock.calls == calls


@pytest.mark.parametrize(("slow", "noise", "retries"), [(20.0, 0.0, 0), (0.5, 0.8, module.MAX_RETRIES)])
def test_a_machine_that_stays_rough_is_not_measured_forever(fresh, monkeypatch, one_thread, slow, noise, retries):
    """A slow one is measured once: nothing would change. One whose times vary gets a few chances."""
    monkeypatch.setattr(cache, "RETRY_SECONDS", 0.0)
    clock, measured = Clock(monkeypatch, slow, noise), []
    for _ in range(6):
        clock.calls, clock.now = 0, 0.0
        found = calibration()
        measured.append(clock.calls > 0)
    assert measured == [True] * (1 + retries) + [False] * (5 - retries)
    assert "Times are rough" in found.note and "measures again" not in found.note


def test_a_rough_calibration_that_is_removed_meanwhile_raises_nothing(fresh, monkeypatch, one_thread) -> None:
    Clock(monkeypatch, slow=0.5, noise=0.8)
    found = calibration()
    monkeypatch.setattr(cache, "cached", lambda *_: found)
    cache.file_of(cache.machine(CPU, torch.float32)).unlink()
    assert calibration() == found


def test_the_load_is_that_of_other_programs(monkeypatch, one_thread) -> None:
    """What this process has computed itself in the last minute does not count, and only cores that it may use do."""
    monkeypatch.setattr("os.getloadavg", lambda: (2.0, 0.0, 0.0))
    monkeypatch.setattr(busyness.time, "process_time", lambda: 0.0)
    assert busyness.load() == 2.0
    monkeypatch.setattr(busyness.time, "process_time", lambda: 600.0)
    assert busyness.load() == pytest.approx(1.0, abs=1e-3)
    monkeypatch.setattr("os.getloadavg", lambda: (0.5, 0.0, 0.0))
    assert busyness.load() == 0.0
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3}, raising=False)
    assert busyness.cores() == 1 and busyness.is_loaded(1.0)
    monkeypatch.delattr("os.sched_getaffinity")
    assert busyness.cores() == 64 and not busyness.is_loaded(1.0)


def test_progress_on_a_terminal_has_an_estimate(monkeypatch) -> None:
    written, now = [], iter([0.0, 0.0, 10.0, 11.0, 12.0])
    terminal = SimpleNamespace(isatty=lambda: True, write=written.append, flush=lambda: None)
    monkeypatch.setattr(progress.sys, "stderr", terminal)
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    show = progress.progress_line(26.0)
    for done in (0, 100, 101, 200):
        show(done, 200)
    text = "".join(written)
    assert "0%, about 26 s left" in text and "50%, about 10 s left" in text
    assert text.endswith("\r")
    terminal.isatty = lambda: False
    written.clear()
    progress.progress_line(26.0)(0, 200)
    assert not written


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
    assert module.measured_seconds(Exact(), "exact", shape, CPU, torch.float32, known=1e-9) > 1e-9
    assert len(calls) == 11  # short: one to warm up and ten
    calls.clear()
    assert module.measured_seconds(Exact(), "exact", shape, CPU, torch.float32, known=60.0) < 1
    assert len(calls) == 10  # no warm-up; these empty calls are short themselves
