"""One canary for each private API of torch that the library uses: a release that changes it fails here first."""

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from subquad import State, Taylor, attention
from subquad import _torch_internals as internals

X = torch.arange(6.0).reshape(2, 3)


class Recorder(TorchDispatchMode):
    """Lets every operation pass."""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        return function(*arguments, **(options or {}))


def seen_inside(transform, question) -> list:
    """What the question answers inside a transform of torch.func, which calls the function with one tensor."""
    answers = []

    def function(x: Tensor) -> Tensor:
        answers.append(question(x))
        return x.sum()

    transform(function)
    return answers


def grad(function) -> None:
    torch.func.grad(function)(X)


def vmap(function) -> None:
    torch.func.vmap(function)(X)


def jvp(function) -> None:
    torch.func.jvp(function, (X,), (X,))


def vmap_of_grad(function) -> None:
    torch.func.vmap(torch.func.grad(function))(X)


def test_a_name_that_torch_does_not_have_is_reported_with_the_versions_that_were_tested() -> None:
    assert internals.find_internal("nn.functional.relu") is torch.nn.functional.relu
    with pytest.raises(ImportError, match=r"subquad uses torch\.nothing\.here, which torch .* does not have") as found:
        internals.find_internal("nothing.here")
    assert internals.TESTED_VERSIONS in str(found.value)
    assert torch.__version__ in str(found.value)


def test_in_backward() -> None:
    answers = []
    x = X.clone().requires_grad_()
    x.register_hook(lambda grad: answers.append(internals.in_backward()))
    x.sum().backward()
    assert answers == [True] and not internals.in_backward()


@pytest.mark.parametrize("transform", [grad, vmap, jvp, vmap_of_grad])
def test_in_transform(transform) -> None:
    assert not internals.in_transform()
    assert seen_inside(transform, lambda x: internals.in_transform()) == [True]
    assert not internals.in_transform()


@pytest.mark.parametrize(("transform", "expected"), [(grad, False), (vmap, True), (jvp, False), (vmap_of_grad, True)])
def test_in_vmap(transform, expected) -> None:
    assert not internals.in_vmap()
    assert seen_inside(transform, lambda x: internals.in_vmap()) == [expected]


def test_is_transformed() -> None:
    assert not internals.is_transformed(X, X)
    for transform in (grad, vmap, jvp):
        assert seen_inside(transform, internals.is_transformed) == [True]
    with forward_ad.dual_level():
        assert not internals.is_transformed(X)
        assert internals.is_transformed(X, forward_ad.make_dual(X, torch.ones_like(X)))
    assert not internals.is_transformed(X)
    assert not internals.is_transformed(X.clone().requires_grad_())


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_is_recorded() -> None:
    assert not internals.is_recorded()
    with Recorder():
        assert internals.is_recorded() and not internals.in_trace()
    answers = []

    def function(x: Tensor) -> Tensor:
        answers.append(internals.is_recorded() and internals.in_trace())
        return x + 1

    torch.jit.trace(function, X, check_trace=False)
    assert answers == [True]
    assert not internals.is_recorded()


@pytest.mark.parametrize("vectorize", ["torch.func", "legacy"])
def test_is_batched(vectorize) -> None:
    """Many gradients at once, from `torch.func.vmap` or from `torch.autograd.grad(is_grads_batched=True)`."""
    assert not internals.is_batched(X)
    answers = []

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx, gradient: Tensor) -> Tensor:
            answers.append(internals.is_batched(gradient))
            return gradient

    if vectorize == "torch.func":
        assert seen_inside(vmap, internals.is_batched) == [True]
    x = X.clone().requires_grad_()
    torch.autograd.grad(Identity.apply(x), x, torch.ones_like(x))
    torch.autograd.grad(Identity.apply(x), x, torch.ones(4, *x.shape), is_grads_batched=True)
    assert answers == [False, True]


def test_legacy_batched_gradients_are_known() -> None:
    batched = torch._C._functorch  # The old way of batching has no function of its own that is public.
    assert not internals._is_legacy_batched(X)
    answers = []

    def function(x: Tensor) -> Tensor:
        answers.append(internals.is_batched(x))
        return x * 2

    torch._vmap_internals._vmap(function)(X)
    assert answers == [True]
    assert batched.is_legacy_batchedtensor is internals._is_legacy_batched


def test_mark_constant_keeps_a_function_out_of_a_compiled_graph() -> None:
    calls, graphs = [], []

    def make() -> Tensor:
        calls.append(1)
        return torch.tensor(list(map(float, "123")))  # nothing that a graph could hold

    def renamed(*arguments) -> Tensor:
        return make()

    internals.mark_constant(renamed, "constant_of_the_canary")
    assert renamed.__code__.co_name == "constant_of_the_canary"

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(lambda x: x * renamed() + renamed(), backend=backend, fullgraph=True)
    expected = X * torch.tensor([1.0, 2.0, 3.0]) + torch.tensor([1.0, 2.0, 3.0])
    assert torch.equal(compiled(X), expected)
    while_tracing = len(calls)
    assert torch.equal(compiled(X), expected)
    assert len(calls) == while_tracing and len(graphs) == 1
    assert not any("tensor" in str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function")


def test_register_container_lets_a_state_pass_through_transforms() -> None:
    q = k = v = torch.randn(2, 1, 5, 4, generator=torch.Generator().manual_seed(0))
    _, state = attention(q, k, v, is_causal=True, method=Taylor(2), return_state=True)
    leaves, shape = _pytree.tree_flatten(state)
    assert leaves and all(isinstance(leaf, Tensor) for leaf in leaves)
    again = _pytree.tree_unflatten(leaves, shape)
    assert isinstance(again, State) and again.method == state.method and again.length == state.length
    assert torch.equal(again.sums, state.sums)
    doubled = torch.func.vmap(lambda one: _pytree.tree_map(lambda x: 2 * x, one))(state)
    assert isinstance(doubled, State) and torch.equal(doubled.sums, 2 * state.sums)


def test_has_open_size() -> None:
    answers = []

    def function(x: Tensor) -> Tensor:
        answers.append((internals.has_open_size(x.shape[0]), internals.has_open_size(x.shape[1])))
        return x + 1

    function(X)
    torch.jit.trace(function, X, check_trace=False)

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    torch.export.export(Model(), (X,), dynamic_shapes=({0: torch.export.Dim("n")},))
    assert answers == [(False, False), (True, True), (True, False)]
    torch.compiler.reset()

    def branch(x: Tensor) -> Tensor:
        return x + 1 if internals.has_open_size(x.shape[0]) else x

    dynamic = torch.compile(branch, dynamic=True, fullgraph=True, backend="eager")
    static = torch.compile(branch, dynamic=False, fullgraph=True, backend="eager")
    assert torch.equal(dynamic(X), X + 1) and torch.equal(static(X), X)


def test_has_numbers() -> None:
    assert internals.has_numbers(X) and not internals.has_numbers(X.to("meta"))
    with torch._subclasses.FakeTensorMode() as mode:
        assert not internals.has_numbers(mode.from_tensor(X))


def test_outside_graph() -> None:
    def numbers(x: Tensor) -> Tensor:
        return x + int(x.sum())

    def function(x: Tensor) -> Tensor:
        return internals.outside_graph(numbers, "the reason")(x)

    assert torch.equal(function(X), X + 15)
    torch.compiler.reset()
    assert torch.equal(torch.compile(function, backend="eager")(X), X + 15)
    torch.compiler.reset()
    with pytest.raises(Exception, match="the reason"):
        torch.compile(function, backend="eager", fullgraph=True)(X)
    with pytest.raises(ValueError, match="the reason"):
        torch.jit.trace(function, X)


def test_never_compiled() -> None:
    recorded = []

    @internals.never_compiled
    def numbers(x: Tensor) -> Tensor:
        recorded.append(torch.compiler.is_compiling())
        return x + int(x.sum())

    torch.compiler.reset()
    assert torch.equal(torch.compile(lambda x: numbers(x) * 2, backend="eager")(X), (X + 15) * 2)
    assert torch.equal(numbers(X), X + 15) and recorded == [False, False]


def test_exponential_is_in_place_unless_a_program_is_recorded() -> None:
    x = X.clone()
    assert internals.exponential(x) is x and torch.equal(x, X.exp())
    with Recorder():
        assert torch.equal(internals.exponential(X), X.exp()) and not torch.equal(X, X.exp())


def test_in_onnx_export(monkeypatch) -> None:
    assert not internals.in_onnx_export()
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    answers = []

    def function(x: Tensor) -> Tensor:
        answers.append(internals.in_onnx_export())
        return x + 1

    function(X)  # Outside a recorded program nothing is asked: it would cost a microsecond in each call.
    torch.jit.trace(function, X, check_trace=False)
    assert answers == [False, True]


def test_with_fixed_sizes_keeps_the_sizes_of_a_constant_out_of_a_dynamic_program() -> None:
    table = internals.with_fixed_sizes(torch.ones(2, 3))

    def made() -> Tensor:
        return table

    internals.mark_constant(made, "table_of_the_canary")
    torch.compiler.reset()
    compiled = torch.compile(lambda x: x.sum() + made().size(0), dynamic=True, fullgraph=True, backend="eager")
    for n in (2, 5):  # The first length is that of the table.
        assert float(compiled(torch.zeros(n, 3))) == 2


def test_assert_later() -> None:
    def checked(x: Tensor) -> Tensor:
        internals.assert_later((x > 0).all(), "expected numbers above 0")
        return x + 1

    for function in (checked, torch.compile(checked, fullgraph=True, backend="aot_eager")):
        assert torch.equal(function(X + 1), X + 2)
        with pytest.raises(RuntimeError, match="expected numbers above 0"):
            function(X)


def test_every_function_has_a_canary() -> None:
    named = {name: value for name, value in vars(internals).items() if not name.startswith("__")}
    own = {name for name, value in named.items() if getattr(value, "__module__", "") == internals.__name__}
    tested = {"find_internal", "in_transform", "in_vmap", "is_transformed", "is_recorded", "is_batched",
              "mark_constant", "register_container", "in_trace", "has_open_size", "has_numbers", "outside_graph",
              "exponential", "in_backward", "in_onnx_export", "with_fixed_sizes", "assert_later",
              "never_compiled"}  # fmt: skip
    assert own == tested
