"""Every private API of torch that the library uses, named once.

Private names can disappear in any release of torch. They are looked up here, on import, so that a missing one gives one
clear message; `tests/subquad/test_torch_internals.py` has a canary for each.
"""

from collections.abc import Callable
from functools import reduce, wraps
from typing import Any

import torch
from torch import Tensor

TESTED_VERSIONS = "2.10 to 2.13"


def find_internal(name: str) -> Any:
    """Return the attribute of torch with this dotted name, or explain which versions have it."""
    try:
        return reduce(getattr, name.split("."), torch)
    except AttributeError:
        raise ImportError(
            f"subquad uses torch.{name}, which torch {torch.__version__} does not have; subquad was tested with torch "
            f"{TESTED_VERSIONS}: install one of these versions, or a newer subquad"
        ) from None


_transforms_active = find_internal("_C._are_functorch_transforms_active")
_interpreter_stack = find_internal("_C._functorch.get_interpreter_stack")
_vmap = find_internal("_C._functorch.TransformType.Vmap")
_is_batched = find_internal("_C._functorch.is_batchedtensor")
_is_legacy_batched = find_internal("_C._functorch.is_legacy_batchedtensor")
_tracing_state = find_internal("_C._get_tracing_state")
_dispatch_modes = find_internal("_C._len_torch_dispatch_stack")
_forward_ad = find_internal("autograd.forward_ad")
_graph_task = find_internal("_C._current_graph_task_id")
_register_pytree_node = find_internal("utils._pytree.register_pytree_node")
_assert_async = find_internal("_assert_async")
find_internal("autograd.forward_ad._current_level")  # read at call time below


def in_transform() -> bool:
    """Return whether a transform of torch.func (grad, vmap, jvp, ...) is active."""
    return bool(_transforms_active())


def in_vmap() -> bool:
    """Return whether `torch.func.vmap` is one of the active transforms."""
    return in_transform() and any(level.key() == _vmap for level in _interpreter_stack() or [])


def is_transformed(*tensors: Tensor) -> bool:
    """Return whether torch.func is active, or one of the tensors carries a forward-mode tangent."""
    if _transforms_active():
        return True
    if torch.compiler.is_compiling() or _forward_ad._current_level < 0:
        return False
    return any(_forward_ad.unpack_dual(x).tangent is not None for x in tensors)


def is_recorded() -> bool:
    """Return whether `torch.jit.trace` or a dispatch mode records the operations of this call."""
    return _dispatch_modes() > 0 or in_trace()


def in_trace() -> bool:
    """Return whether `torch.jit.trace` records this call."""
    return _tracing_state() is not None


def in_backward() -> bool:
    """Return whether autograd computes gradients now, in this thread."""
    return bool(_graph_task() != -1)


def has_open_size(*sizes: int) -> bool:
    """Return whether a program is recorded for other values of one of these sizes too."""
    if torch.compiler.is_compiling():
        return not all(torch.fx.experimental.symbolic_shapes.has_static_value(size) for size in sizes)
    return in_trace() or any(isinstance(size, torch.SymInt) for size in sizes)


def has_numbers(tensor: Tensor) -> bool:
    """Return whether a tensor is more than a shape: neither on the device "meta" nor of a FakeTensorMode."""
    return not tensor.is_meta and type(tensor).__name__ != "FakeTensor"  # by name: the class is slow to import


def assert_later(condition: Tensor, text: str) -> None:
    """Check a condition when the recorded program runs; raise RuntimeError with the text if it does not hold."""
    _assert_async(condition, text)


def outside_graph(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """Return the function as one that is never recorded, because it depends on numbers.

    `torch.compile` breaks the graph here; with fullgraph=True it raises, with the reason.

    Raises:
        ValueError: torch.export or torch.jit.trace records this call.
    """
    if in_trace() or torch.compiler.is_exporting():
        raise ValueError(reason)
    if not torch.compiler.is_compiling():
        return function
    torch._dynamo.graph_break(msg=reason)
    return torch.compiler.disable(function)  # type: ignore[no-any-return]


def never_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that `torch.compile` must not record, such as one that communicates.

    This is what `torch.compiler.disable` does, which would import the whole compiler at once.
    """

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        return outside_graph(function, f"{function.__name__} communicates with other processes")(*args, **options)

    return call


def exponential(temporary: Tensor) -> Tensor:
    """Return the exponential of a tensor that is not used further: in place, except in recorded programs."""
    return temporary.exp() if torch.compiler.is_compiling() or is_recorded() else temporary.exp_()


def in_onnx_export() -> bool:
    """Return whether torch.onnx.export records this call; its format does not have our operators."""
    return (torch.compiler.is_compiling() or in_trace()) and torch.onnx.is_in_onnx_export()


def is_batched(*tensors: Tensor | None) -> bool:
    """Return whether a gradient stands for many gradients, in either of torch's two ways."""
    return any(x is not None and bool(_is_batched(x) or _is_legacy_batched(x)) for x in tensors)


def mark_constant(function: Callable[..., Any], name: str) -> None:
    """Let torch.compile take the function's result for a constant of the graph.

    This is what `torch.compiler.assume_constant_result` does, which would import the whole compiler. The compiler names
    constants by the function's code object, so two functions must not share a name.
    """
    function.__code__ = function.__code__.replace(co_name=name)
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]


def with_fixed_sizes(tensor: Tensor) -> Tensor:
    """Return the tensor as one whose sizes torch.compile(dynamic=True) treats as constants.

    This is what `torch._dynamo.mark_static` does, which would import the whole compiler. Without it, a size of a table
    that equals the first length is mistaken for that length, and the program is wrong at all others.
    """
    tensor._dynamo_static_indices = set(range(tensor.dim()))  # type: ignore[attr-defined]
    return tensor


def register_container(kind: type, flatten: Callable[[Any], Any], unflatten: Callable[[Any, Any], Any]) -> None:
    """Make a class a container of tensors, so that functions under torch.func can take and return it."""
    _register_pytree_node(kind, flatten, unflatten, serialized_type_name=f"subquad.{kind.__name__}")
