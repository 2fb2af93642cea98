"""For all tests and doctests: a calibrated machine with round figures; never the user's own cache or a network."""

import json
import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

collect_ignore = [] if find_spec("lm_eval") else ["src/subquad/integrations/lm_eval.py"]
os.environ["HF_HUB_OFFLINE"] = "1"  # Nothing is downloaded. It is read when transformers is imported.

COEFFICIENTS = {
    "exact": [width * 2e-11 for _ in range(6) for width in (16, 64, 128)],  # of a pair, by length and width
    "dense": [2e-4, 1.2e-11, 4e-10, 2e-11, 1e-9],
    "fused": [3e-5, 1.2e-11, 2e-11, 1.2e-11, 1e-9],
    "chunked": [3e-4, 1e-5, 2e-11, 1.2e-11, 2e-10, 1.2e-11, 2e-10, 1e-9],
}
BY_FAMILY = {"multipole": [2e-3, 1.2e-11, 1e-6, 1e-11, 1e-9], "sparse": [5e-5, 1e-11, 5e-10, 5e-12, 1e-7]}


@pytest.fixture(scope="session", autouse=True)
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Times in seconds, like those of two cores."""
    before, folder = os.environ.get("SUBQUAD_CACHE"), tmp_path_factory.mktemp("cache")
    os.environ["SUBQUAD_CACHE"] = str(folder)
    import torch

    from subquad import native
    from subquad.planning.calibration import grid
    from subquad.planning.calibration_file import file_of, machine
    from subquad.planning.seconds import family, name_of

    for with_kernels in {native.available(), False}:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "available", lambda answer=with_kernels: answer)
            found = {}
            for method, form, shape in grid():
                row = BY_FAMILY.get(family(method)) or COEFFICIENTS[form]
                found[name_of(method, form, shape)] = [c * (3 if shape.training else 1) for c in row]
            for threads in {1, torch.get_num_threads()}:
                of = machine(torch.device("cpu"), torch.float32) | {"threads": threads}
                file_of(of).write_text(json.dumps({"machine": of, "coefficients": found}))
    yield
    if before is None:
        del os.environ["SUBQUAD_CACHE"]
    else:
        os.environ["SUBQUAD_CACHE"] = before
