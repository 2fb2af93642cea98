"""Predicted work is what torch counts, predicted memory what the system hands out, parameters what modules hold."""

import itertools
import platform
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from calls import allocated
from subquad import (
    Auto,
    Cost,
    Exact,
    Linear,
    MultiheadAttention,
    Multipole,
    RandomFeatures,
    Separable,
    Taylor,
    attention,
    cost,
    crossover,
    multihead_cost,
    native,
)
from subquad._calls.call import Call
from subquad._engines import run
from subquad.methods import resolve
from subquad.planning.crossover import find_crossover
from subquad.planning.shape import Shape
from subquad_lab.options.methods import parse_method
from subquad_lab.system.timing import Request, measure

pytestmark = pytest.mark.filterwarnings("ignore:.*weights can be negative")
# For work and memory that torch counts: those of its own operations.
by_torch = pytest.mark.usefixtures("torch_alone")


class Layer(nn.Module):
    """A map of a user's own, with a product of matrices in it."""

    positive = True

    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self.matrix, self.scaled = nn.LazyLinear(7), scaled

    def size(self, width: int) -> int:
        return 7

    def forward(self, x: torch.Tensor, *, is_query: bool) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        features = self.matrix(x).square()
        return (features, x.sum(-1)) if self.scaled else features


METHODS = {
    **{f"taylor{p}": Taylor(p) for p in range(4)},
    **{f"diagonal{p}": Taylor(p, basis="diagonal") for p in range(4)},
    **{kind: RandomFeatures(16, kind) for kind in ("positive", "hyperbolic", "trigonometric")},
    **{name: Linear(name) for name in ("identity", "elu", "relu")},
    "separable": Separable(),
    "own": None,
    "own scaled": None,
}

# batch, key heads, query heads per key head, queries, keys, width, value width
SHAPES = (
    (2, 1, 1, 100, 100, 4, 4),
    (1, 3, 2, 300, 300, 5, 3),
    (1, 1, 1, 2100, 2100, 4, 6),  # several units
    (2, 1, 2, 150, 70, 4, 4),
    (2, 2, 1, 70, 150, 4, 2),
    (1, 1, 1, 1, 1, 4, 4),
    (2, 3, 3, 64, 65, 3, 2),
    (1, 1, 2, 65, 2, 6, 1),
)


def method_of(name: str, width: int) -> object:
    if METHODS[name] is not None:
        return METHODS[name]
    layer = Layer(scaled=name == "own scaled")
    layer(torch.ones(1, width), is_query=True)
    return layer


def inputs_of(shape: tuple[int, ...], training: bool = False) -> list[torch.Tensor]:
    b, h, g, n, m, d, e = shape
    generator = torch.Generator().manual_seed(0)
    sizes = (b, h * g, n, d), (b, h, m, d), (b, h, m, e)
    return [torch.randn(size, generator=generator).requires_grad_(training) for size in sizes]


def predicted(method: object, shape: tuple[int, ...], **options) -> Cost:
    b, h, g, n, m, d, e = shape
    return cost(method, query_length=n, key_length=m, head_dim=d, value_dim=e, heads=h * g, key_heads=h, batch=b,
                **options)  # fmt: skip


def counted(method: object, shape: tuple[int, ...], is_causal: bool, form: str | None, training: bool) -> int:
    inputs = inputs_of(shape, training)
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(training):
        output = run(method, Call.of(*inputs, is_causal=is_causal, enable_gqa=True), form).output
        if training:
            output.sum().backward()
    return counter.get_total_flops()


@by_torch
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_work_is_what_torch_counts(name, training) -> None:
    """Exactly, for every form: 17 methods, 8 shapes, causal or not, three choices of the form; 816 calls each way."""
    for shape, is_causal, form in itertools.product(SHAPES, (False, True), ("dense", "chunked", None)):
        method = method_of(name, shape[-2])
        expected = counted(method, shape, is_causal, form, training)
        assert predicted(method, shape, is_causal=is_causal, form=form, training=training).flops == expected
        assert expected > 0 or shape[3] == 1  # One token of Separable is its own value.


@by_torch
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_a_step_costs_the_same_at_any_length(name, training) -> None:
    for group, e in ((1, 4), (2, 4), (1, 7), (3, 2)):
        method = method_of(name, 4)
        _, state = attention(*inputs_of((2, 2, group, 9, 9, 4, e)), is_causal=True, enable_gqa=True, method=method,
                             return_state=True)  # fmt: skip
        shape = (2, 2, group, 1, 1, 4, e)
        with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(training):
            output, state = attention(*inputs_of(shape, training), is_causal=True, enable_gqa=True, method=method,
                                      state=state.detach(), return_state=True)  # fmt: skip
            if training:
                output.sum().backward()
        step = predicted(method, shape, form="step", training=training)
        assert step.flops == counter.get_total_flops() > 0
        assert step == predicted(method, (2, 2, group, 1, 1000, 4, e), form="step", training=training)
        assert step.state_bytes == state.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", [*METHODS, "exact"])
def test_state_bytes(name, dtype) -> None:
    method = Exact() if name == "exact" else method_of(name, 4)
    shape = (2, 3, 2, 50, 50, 4, 6)
    _, state = attention(*(x.to(dtype) for x in inputs_of(shape)), is_causal=True, enable_gqa=True, method=method,
                         return_state=True)  # fmt: skip
    assert predicted(method, shape, is_causal=True, dtype=dtype).state_bytes == state.nbytes


@pytest.mark.parametrize(("n", "m"), [(7, 7), (3, 9), (9, 3), (1, 5), (0, 4)])
def test_exact_attention_counts_the_pairs_that_are_seen(n, m) -> None:
    seen = torch.ones(n, m).tril().sum().int().item()
    for is_causal, pairs in ((True, seen), (False, n * m)):
        assert predicted("exact", (2, 1, 3, n, m, 4, 6), is_causal=is_causal).flops == 6 * 2 * pairs * (4 + 6)
        # Logits again, and the gradients of q, k, the weights and v.
        trained = predicted("exact", (2, 1, 3, n, m, 4, 6), is_causal=is_causal, training=True)
        assert trained.flops == 6 * 2 * pairs * (4 + 6 + 3 * 4 + 2 * 6)


def assert_priced_as_run(calls: int) -> set[str]:
    """Compare the form of the cost with the one that was executed, in random calls; return the forms."""
    choose, forms = random.Random(0), set()
    names = [*METHODS, "taylor4", "taylor5", "exact", "multipole"]
    others = {"taylor4": Taylor(4), "taylor5": Taylor(5), "exact": Exact(), "multipole": Multipole(window=9, block=4)}
    for _ in range(calls):
        name, is_causal, training = choose.choice(names), choose.random() < 0.5, choose.random() < 0.5
        n = choose.choice((1, 2, 7, 40, 65, 200, 500))
        m = n if choose.random() < 0.6 else choose.choice((1, 3, 50, 130))
        shape = (choose.randint(1, 2), choose.randint(1, 3), choose.randint(1, 3), n, m, choose.choice((1, 2, 4, 8)),
                 choose.choice((1, 3, 8)))  # fmt: skip
        method = others[name] if name in others else method_of(name, shape[-2])
        with torch.set_grad_enabled(training):
            call = Call.of(*inputs_of(shape, training), is_causal=is_causal, enable_gqa=True)
            executed = run(method, call).form
        assert predicted(method, shape, is_causal=is_causal, training=training).form == executed, (name, shape)
        forms.add(executed)
    return forms


@pytest.mark.skipif(not native.available(), reason="no kernels")
def test_the_form_that_is_priced_is_the_one_that_runs() -> None:
    assert assert_priced_as_run(200) == {"exact", "dense", "linear", "chunked", "fused"}


def test_the_form_that_is_priced_is_the_one_that_runs_without_kernels(torch_alone) -> None:
    assert assert_priced_as_run(50) == {"exact", "dense", "linear", "chunked"}


@pytest.mark.skipif(not native.available(), reason="no kernels")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ["taylor2", "positive", "elu", "separable"])
def test_work_of_the_kernels_is_that_of_sums_or_pairs(name, is_causal) -> None:
    """The same products as torch's forms, except for the length of chunks, and a backward pass of their own."""
    for shape in SHAPES[:3]:
        by_kernels = predicted(METHODS[name], shape, is_causal=is_causal)
        if by_kernels.form != "fused":
            assert name == "separable" and not is_causal
            continue
        forms = ("dense", "chunked") if is_causal else ("dense", "linear")
        others = [predicted(METHODS[name], shape, is_causal=is_causal, form=form).flops for form in forms]
        assert min(others) / 3 < by_kernels.flops < 3 * max(others)
        trained = predicted(METHODS[name], shape, is_causal=is_causal, training=True)
        assert trained.form == "fused" and 3 <= trained.flops / by_kernels.flops <= 5


@by_torch
def test_order_and_parameters() -> None:
    options = dict(query_length=4096, head_dim=16)
    assert cost("taylor", **options).order.startswith("time O((n + m) r e), memory O(n e + r e)")
    assert "r = 153 features" in cost("taylor", **options).order
    assert "memory O(n m)" in cost("exact", value_dim=8, **options).order  # torch has no fused kernel for it
    assert cost("random", **options).parameters == 0
    assert cost(method_of("own", 16), **options).parameters == 16 * 7 + 7


def test_bytes_moved() -> None:
    moved = cost("linear", query_length=10, head_dim=4, value_dim=3, form="linear").bytes_moved
    sums, features = 4 * (3 + 1), 20 * 4
    assert moved == 4 * (10 * 4 + 10 * 4 + 10 * 3 + 10 * 3 + 2 * (features + sums))
    assert cost("exact", query_length=10, head_dim=4).bytes_moved == 4 * 4 * 10 * 4


# --- Memory -----------------------------------------------------------------------------------------------------------


@by_torch
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs the high-water mark in /proc")
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs a heap that can return freed memory")
@pytest.mark.parametrize(
    "request_",
    [
        Request("exact", 4096, heads=8, width=64, backward=True, repeats=1),
        Request("taylor:2", 8192, heads=2, width=64, repeats=1),
        Request("random:256", 4096, heads=8, width=64, backward=True, repeats=1),
        Request("separable", 4096, heads=8, width=64, repeats=1),
    ],
    ids=lambda request: request.method,
)
def test_peak_memory_within_15_percent(request_, monkeypatch) -> None:
    """Blocks go back to the system as they are freed: else the heap's gaps are measured too."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    expected = cost(parse_method(request_.method), query_length=request_.length, head_dim=request_.width,
                    heads=request_.heads, is_causal=True, training=request_.backward).peak_bytes  # fmt: skip
    assert measure(request_).peak_bytes == pytest.approx(expected, rel=0.15)


@by_torch
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ["taylor", "random", "elu", "separable", "exact"])
def test_peak_memory_is_what_torch_allocates(name, is_causal, training) -> None:
    """One unit and several; heads that share keys; values of another width; the dense form too."""
    method = Linear("elu") if name == "elu" else resolve(name)
    for shape in ((1, 8, 1, 4608, 4608, 64, 64), (1, 2, 1, 4096, 4096, 64, 64), (1, 4, 3, 2048, 2048, 32, 80)):
        inputs = inputs_of(shape, training)

        def call(inputs=inputs) -> object:
            output = attention(*inputs, is_causal=is_causal, enable_gqa=True, method=method)
            return output, torch.autograd.grad(output.sum(), inputs) if training else None

        peak = allocated(call)
        if peak > 16 << 20:
            expected = predicted(method, shape, is_causal=is_causal, training=training).peak_bytes
            assert peak == pytest.approx(expected, rel=0.1)


@by_torch
def test_memory_of_the_linear_form_does_not_know_the_other_length() -> None:
    short, long = (cost(Linear("elu"), query_length=n, key_length=1 << 20, head_dim=16).peak_bytes
                   for n in (1 << 16, 1 << 17))  # fmt: skip
    assert long == pytest.approx(2 * short, rel=0.01)


# --- Crossover --------------------------------------------------------------------------------------------------------


def last_failure(price_a, price_b, max_length: int) -> int | None:
    """The definition: after the last length at which b does not cost less."""
    bad = [n for n in range(1, max_length + 1) if not price_b(n) < price_a(n)]
    return 1 if not bad else None if bad[-1] == max_length else bad[-1] + 1


@by_torch
@pytest.mark.parametrize("by", ["flops", "memory"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", ["taylor1", "taylor2", "positive", "elu", "separable"])
def test_crossover_is_after_the_last_length_that_is_dearer(name, is_causal, by) -> None:
    options = dict(head_dim=8, heads=4, is_causal=is_causal)

    def price(method):
        figures = [cost(method, query_length=n, **options) for n in range(1, 1001)]
        return lambda n: figures[n - 1].flops if by == "flops" else figures[n - 1].peak_bytes

    expected = last_failure(price(Exact()), price(METHODS[name]), 1000)
    assert crossover("exact", METHODS[name], by=by, max_length=1000, **options) == expected


def test_crossover_is_not_fooled_by_teeth_and_islands() -> None:
    for a, b in (
        (lambda n: n * n, lambda n: 100 * n + 3000 * (n % 64 == 1)),
        (lambda n: n, lambda n: 50 if n < 30 or n > 60 else 10),  # cheaper from 30 to 60 too, for a while
        (lambda n: 9, lambda n: 10 * (600 <= n <= 620)),
        (lambda n: 2, lambda n: 1),
        (lambda n: 1, lambda n: 1),
        (lambda n: n, lambda n: 700),
    ):
        assert find_crossover(a, b, 800) == last_failure(a, b, 800)
    assert find_crossover(lambda n: n, lambda n: 1 << 20, 1 << 24) == (1 << 20) + 1


@by_torch
def test_crossover_of_textbooks() -> None:
    """Two products of n x n x d against two of n x d x d: they meet near n = d, whatever the heads."""
    assert 64 <= crossover("exact", "linear", head_dim=64, heads=8) <= 68
    features = Taylor(2).size(64)
    assert features < crossover("exact", "taylor", head_dim=64) < 1.1 * features
    assert crossover("taylor", "exact", head_dim=64) is None


def test_crossover_in_time_asks_a_predictor() -> None:
    asked = []

    def seconds(method: object, shape: Shape) -> float:
        asked.append(replace(shape, query_length=0, key_length=shape.key_length - shape.query_length))
        return shape.query_length**2 if method == Exact() else 500 * shape.query_length

    assert crossover("exact", "taylor", by="time", head_dim=8, heads=2, is_causal=True, seconds=seconds) == 501
    assert set(asked) == {Shape(0, 0, 8, 8, 2, 2, 1, is_causal=True)}


# --- Modules ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("heads", [1, 4])
def test_parameters_of_modules(heads, bias) -> None:
    expected = multihead_cost(32, heads, query_length=10, bias=bias).parameters
    for module in (MultiheadAttention(32, heads, bias=bias), nn.MultiheadAttention(32, heads, bias=bias)):
        assert expected == sum(p.numel() for p in module.parameters())
    assert multihead_cost(32, heads, query_length=10, bias=bias, output=False).parameters == 3 * 32**2 + bias * 3 * 32


def test_heads_of_full_width_have_as_many_parameters_each() -> None:
    narrow, wide = (multihead_cost(32, 4, query_length=10, head_dim=d, bias=False).parameters for d in (8, 32))
    assert (narrow, wide) == (4 * 32**2, 4 * 4 * 32**2)


@by_torch
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_work_of_a_module(is_causal, training) -> None:
    layer = MultiheadAttention(32, 4, batch_first=True, method="taylor")
    x = torch.randn(2, 200, 32, requires_grad=True)
    # Layers whose input needs no gradient save a product: here each input is one of its own.
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(training):
        output, _ = layer(x, x, x, need_weights=False, is_causal=is_causal)
        if training:
            output.sum().backward()
    found = multihead_cost(32, 4, query_length=200, batch=2, method="taylor", is_causal=is_causal, training=training)
    assert found.flops == counter.get_total_flops()


# --- Refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(query_length=-1), "query_length: expected an integer >= 0, got -1"),
        (dict(key_length=2.0), "key_length: expected an integer >= 0, got 2.0"),
        (dict(head_dim=0), "head_dim: expected a positive integer, got 0"),
        (dict(batch=True), "batch: expected a positive integer, got True"),
        (dict(heads=4, key_heads=3), "key_heads: expected a number that divides the 4 heads, got 3"),
        (dict(dtype=torch.int32), "dtype: expected a floating point dtype, got torch.int32"),
        (dict(form="fast"), "form: .* has 'dense', 'linear', 'chunked', 'fused', 'step', got 'fast'"),
        (dict(form="linear", is_causal=True), "form: a causal call has no linear form"),
        (dict(form="step"), "query_length: a step is one token, expected 1, got 8"),
        (dict(method="exact", form="dense"), "form: .* has 'exact', 'step', got 'dense'"),
        (dict(method="auto"), "method: Auto decides by the numbers of each call.*, got 'auto'"),
        (dict(method="multipole", form="chunked"), "form: .* has 'fused', 'dense', 'step', got 'chunked'"),
        (dict(method="quick"), "method: expected one of .*, got 'quick'"),
    ],
)
def test_refusals_name_the_argument(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        cost(**{"method": "taylor", "query_length": 8, "head_dim": 4, **options})


def test_refusals_of_the_others() -> None:
    with pytest.raises(ValueError, match="by: expected one of 'flops', 'memory', 'time', got 'money'"):
        crossover("exact", "taylor", by="money", head_dim=4)
    with pytest.raises(ValueError, match="max_length: expected a positive integer, got 0"):
        crossover("exact", "taylor", head_dim=4, max_length=0)
    with pytest.raises(ValueError, match=r"method: Auto decides by the numbers of each call.*, got Auto"):
        cost(Auto(), query_length=8, head_dim=4)
    with pytest.raises(ValueError, match="num_heads: expected a number that divides embed_dim=32, got 5"):
        multihead_cost(32, 5, query_length=10)
    with pytest.raises(ValueError, match="length: expected a positive integer, got -1"):
        multihead_cost(32, 4, query_length=-1)


def test_the_kernels_are_priced_only_where_they_compute() -> None:
    for method in (Taylor(6), RandomFeatures(16, "trigonometric"), Separable()):
        with pytest.raises(ValueError, match=r"form: the native kernels do not compute this call of .*, got 'fused'"):
            cost(method, query_length=64, head_dim=8, form="fused")
