"""Property tests draw the same examples in every run: a failure is then the change's, not the draw's."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("subquad", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("subquad")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tensors this small keep one thread busy, and the bits of a sum may depend on how many threads share it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
