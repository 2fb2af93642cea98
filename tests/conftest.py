"""For all tests: the same examples in every run, so that a failure is the change's and not the draw's; and fixtures."""

import copy
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from subquad import native
from subquad.planning import calibration
from subquad.planning.seconds import work

settings.register_profile("subquad", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("subquad")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tensors this small keep one thread busy, and the bits of a sum may depend on how many threads share it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute by torch's own operations, also in processes that the test starts."""
    monkeypatch.setattr(native, "available", lambda: False)
    monkeypatch.setenv("SUBQUAD_NATIVE", "0")


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Use an empty cache, and a machine that takes 1 nanosecond per unit of work; return the methods measured on it."""
    measured: list[Any] = []

    def known(method: Any, form: str, shape: Any, device: object, dtype: object, before: float) -> float:
        measured.append(method)
        return 1e-9 * sum(work(method, form, shape))

    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(calibration, "measured_seconds", known)
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    return measured


@pytest.fixture(scope="session")
def smollm2() -> Callable[[], tuple[Any, Any]]:
    """Return a function that gives SmolLM2, for the caller to change, and its tokenizer: reading it takes 20 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
        model, tokenizer = importlib.import_module("decoder").load()
    return lambda: (copy.deepcopy(model), tokenizer)
