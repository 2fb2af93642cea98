"""Cost: what is predicted for one call."""

from dataclasses import dataclass

from subquad.planning.shape import Shape


@dataclass(frozen=True)
class Cost:
    """What `cost` predicts for one call of `attention`.

    Attributes:
        flops: Of the matrix products; a multiplication and an addition are 2.
        bytes_moved: Inputs and results once, and intermediate results (features, weights, sums) written and read once.
        peak_bytes: The most memory above the inputs that is held at one time, the result included; with training, the
            gradients too. With torch's forms the C library's heap can take more from the system, for the gaps between
            blocks.
        state_bytes: Of the `State` after the call, if one is returned; for `Window` with its room for more keys.
        parameters: Learnable ones: none, or those of a user's map.
        form: The form of the call: "exact", "dense", "linear", "chunked", "fused" or "step".
        order: How time and memory grow.
    """

    flops: int
    bytes_moved: int
    peak_bytes: int
    state_bytes: int
    parameters: int
    form: str
    order: str


def order_of(time: str, memory: str, shape: Shape, features: int = 0, more: str = "") -> str:
    """Return the growth of time and memory, with its letters explained; `more`: those of the method."""
    letters = f"n queries, m keys, d = {shape.head_dim} width, e = {shape.value_dim} value width"
    letters += f", r = {features} features" if features else ""
    return f"time O({time}), memory O({memory}): {letters}{more}"
