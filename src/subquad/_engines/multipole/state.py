"""The memory of Multipole as a `State`, and back.

The tensors of a memory are the state's `parts`: base, sink_keys, sink_values, raw_keys, raw_values, roots, then pages.
"""

from torch import Tensor

from subquad._calls.call import Call
from subquad._calls.layout import Layout
from subquad._calls.state import State
from subquad._engines.multipole.memory import Memory
from subquad.methods.multipole import Multipole


def folded(state: State, layout: Layout) -> Memory:
    """Return the memory that a state holds."""

    def fold(x: Tensor | None) -> Tensor:
        assert x is not None
        return x.reshape(layout.rows, *x.shape[len(layout.batch) + 1 :]).contiguous()

    base, sink_keys, sink_values, raw_keys, raw_values, roots, *pages = (fold(x) for x in state.parts)
    return Memory(
        state.length, fold(state.filled), fold(state.poison), base, sink_keys, sink_values, raw_keys, raw_values, roots,
        tuple(pages), permit=state.permit,
    )  # fmt: skip


def unfolded(memory: Memory, method: Multipole, call: Call) -> State:
    """Return the state that holds the memory after a call."""
    layout, last_segment = call.layout, call.last_segment
    parts = (
        memory.base, memory.sink_keys, memory.sink_values, memory.raw_keys, memory.raw_values, memory.roots,
        *memory.pages,
    )  # fmt: skip
    return State(
        method, memory.length, call.logit_scale, poison=layout.unfold(memory.poison),
        filled=layout.unfold(memory.filled), parts=tuple(layout.unfold(x) for x in parts), permit=memory.permit,
        widths=(layout.width, layout.value_width),
        segment=None if last_segment is None else layout.unfold(last_segment),
    )  # fmt: skip
