"""Record the calls of attention that the layers of a model make, while exact attention computes them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from subquad._calls.call import Call
from subquad._engines import run
from subquad.attention import recorders
from subquad.methods import Exact, MethodLike
from subquad.planning.fit import Fit, fit

MASKS = ("attn_mask", "is_causal", "scale", "enable_gqa", "key_padding_mask", "segment_ids")


class Recorded(NamedTuple):
    """The tensors and options of one call."""

    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, Any]

    def fit(self, method: MethodLike, rows: int, seed: int) -> Fit:
        """Fit a method to the call."""
        options = {name: self.options[name] for name in MASKS if name in self.options}
        return fit(method, self.query, self.key, self.value, rows=rows, seed=seed, **options)


@contextmanager
def recorded(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, Recorded]]:
    """Yield the last call of each layer by name, filled in as the model runs."""
    calls: dict[str, Recorded] = {}
    running: list[str] = []

    def record(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        if running:
            calls[running[-1]] = Recorded(query.detach(), key.detach(), value.detach(), options)
        return run(Exact(), Call.of(query, key, value, **options)).output

    def enter(name: str) -> Callable[..., None]:
        return lambda *_: running.append(name)

    with ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.enter_context(layer.register_forward_pre_hook(enter(name)))
            hooks.enter_context(layer.register_forward_hook(lambda *_: running.pop() and None, always_call=True))
        recorders.append(record)
        try:
            yield calls
        finally:
            recorders.remove(record)
