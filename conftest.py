"""For all tests and doctests: a calibrated machine with round figures; never the user's own cache or a network."""

import gc
import json
import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

collect_ignore = [] if find_spec("lm_eval") else ["src/subquad/integrations/lm_eval.py"]
os.environ["HF_HUB_OFFLINE"] = "1"  # Nothing is downloaded. It is read when transformers is imported.


def pytest_collection_finish() -> None:
    """Keep the garbage collector from visiting thousands of tests and imported modules, which live to the end."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Times in seconds, like those of two cores."""
    before, folder = os.environ.get("SUBQUAD_CACHE"), tmp_path_factory.mktemp("cache")
    os.environ["SUBQUAD_CACHE"] = str(folder)
    import torch

    from subquad import native
    from subquad.planning.calibration import grid
    from subquad.planning.calibration_file import _checksum, file_of, machine
    from subquad.planning.reference import reference_coefficients
    from subquad.planning.seconds import name_of

    for with_kernels in {native.available(), False}:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "available", lambda answer=with_kernels: answer)
            found = {name_of(*call): reference_coefficients(*call) for call in grid()}
            for threads in {1, torch.get_num_threads()}:
                of = machine(torch.device("cpu"), torch.float32) | {"threads": threads}
                content = {"machine": of, "note": "", "retries": 0, "coefficients": found}
                file_of(of).write_text(json.dumps(content | {"sha256": _checksum(content)}))
    yield
    if before is None:
        del os.environ["SUBQUAD_CACHE"]
    else:
        os.environ["SUBQUAD_CACHE"] = before
