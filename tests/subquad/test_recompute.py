"""Memory of a long sequence: what grows with the length is little more than inputs, outputs and gradients."""

import pytest

from subquad_lab.system.timing import Request, measure


@pytest.mark.parametrize("method", ["taylor:2", "separable"])
def test_memory_grows_with_the_inputs_alone(method) -> None:
    """All features of the longer call would take 13 times the inputs that it has more, its weights thousands."""
    short, long = (
        measure(Request(method, length, heads=1, width=16, backward=True, repeats=1)).peak_bytes
        for length in (40_000, 120_000)
    )
    more_inputs = 3 * 80_000 * 16 * 4
    assert long - short < 3 * more_inputs
