"""What Window and BlockSparse cost, and where the planner takes a window: against masks, counters and calls."""

import itertools
import json
import math
import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from calls import SAMPLE_LENGTH, SAMPLE_MASKS, allocated
from subquad import (
    Auto,
    BlockSparse,
    Cost,
    Exact,
    Multipole,
    Window,
    attention,
    cost,
    crossover,
    error,
    measure_error,
    native,
    plan,
)
from subquad._calls.call import Call
from subquad._engines import run
from subquad.methods.error_estimate import NO_ERROR, UNKNOWN_ERROR
from subquad.planning import auto as auto_module
from subquad.planning import calibration_file as cache
from subquad.planning import rows as rows_module
from subquad.planning import window_rows as window_module
from subquad.planning.calibration import grid
from subquad.planning.candidates import offered_methods
from subquad.planning.cost import cost_of
from subquad.planning.seconds import Calibration, family, name_of, work
from subquad.planning.shape import Shape
from subquad.planning.sparse_pairs import has_places, pairs_of, tile_pairs
from subquad.planning.window_rows import window_rows

needs_kernels = pytest.mark.skipif(not native.available(), reason="no kernels")
by_torch = pytest.mark.usefixtures("torch_alone")


def window_mask(method: Window, n: int, m: int, is_causal: bool) -> Tensor:
    """(n, m), by the definition."""
    i, j = torch.arange(n)[:, None], torch.arange(m)
    size = 10**6 if method.size is None else method.size
    if is_causal:
        return (j <= i) & ((j > i - size) | (j < method.sinks))
    return ((i - j).abs() < size) | (j < method.sinks)


def block_mask(method: BlockSparse, heads: int, n: int, m: int, is_causal: bool) -> Tensor:
    """(heads, n, m), by the definition."""
    query_block, key_block = (math.ceil(x / blocks) for x, blocks in zip((n, m), method.layout.shape[1:], strict=True))
    mask = method.layout[:, torch.arange(n)[:, None] // query_block, torch.arange(m) // key_block].expand(heads, -1, -1)
    return mask & torch.ones(n, m, dtype=torch.bool).tril() if is_causal else mask


# --- Pairs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
def test_pairs_of_a_window_are_those_of_its_mask(is_causal) -> None:
    """Row by row and in tiles; sinks inside and outside of the window, before and behind it; fewer or more keys."""
    sizes = itertools.product((0, 1, 2, 3, 7, 12), (0, 1, 2, 5, 9, 14), (1, 2, 3, 6, 20, None), (0, 1, 3, 8, 30))
    for n, m, size, sinks in sizes:
        method, shape = Window(size, sinks), Shape(n, m, 4, 4, 6, 3, 2, is_causal)
        mask = window_mask(method, n, m, is_causal)
        for rows in (1, 2, 3, 5):
            expected = sum(len(tile) * int(tile.any(0).sum()) for tile in mask.split(rows))
            assert tile_pairs(method, shape, rows) == expected, (n, m, size, sinks, rows)
        assert pairs_of(method, shape) == 12 * int(mask.sum())


def test_pairs_of_blocks_are_those_of_their_mask() -> None:
    draw, generator = random.Random(0), torch.Generator().manual_seed(0)
    counts = 0
    while counts < 200:
        n, m, rows, columns = draw.randint(1, 30), draw.randint(1, 30), draw.randint(1, 6), draw.randint(1, 6)
        heads, is_causal = draw.choice((1, 4)), draw.random() < 0.5
        method = BlockSparse(torch.rand(heads, rows, columns, generator=generator) > 0.4)
        try:
            method.blocks(4, n, m)
        except ValueError:
            continue
        counts += 1
        mask = block_mask(method, 4, n, m, is_causal)
        assert pairs_of(method, Shape(n, m, 4, 4, 4, 2, 3, is_causal)) == 3 * int(mask.sum())


def test_pairs_of_a_length_that_no_machine_could_hold() -> None:
    n = 1 << 29
    shape = Shape(n, n, 4, 4, is_causal=True)
    assert pairs_of(Window(100, sinks=4), shape) == n * 104 - 104 * 103 // 2
    assert pairs_of(Window(None), shape) == n * (n + 1) // 2


# --- Work -------------------------------------------------------------------------------------------------------------

# batch, key heads, query heads per key head, queries, keys
SIZES = ((2, 1, 1, 100, 100), (1, 3, 2, 300, 300), (2, 1, 2, 700, 70), (1, 2, 1, 70, 700), (1, 1, 1, 1, 1))
METHODS = (Window(1), Window(20), Window(20, sinks=5), Window(300, sinks=400), Window(None))


def inputs_of(sizes: tuple[int, ...], training: bool = False, d: int = 4, e: int = 6) -> list[Tensor]:
    b, h, g, n, m = sizes
    generator = torch.Generator().manual_seed(0)
    shapes = (b, h * g, n, d), (b, h, m, d), (b, h, m, e)
    return [torch.randn(shape, generator=generator).requires_grad_(training) for shape in shapes]


def predicted(method: object, sizes: tuple[int, ...], d: int = 4, e: int = 6, **options) -> Cost:
    b, h, g, n, m = sizes
    return cost(method, query_length=n, key_length=m, head_dim=d, value_dim=e, heads=h * g, key_heads=h, batch=b,
                **options)  # fmt: skip


@by_torch
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_work_of_torch_is_what_torch_counts(is_causal, training) -> None:
    for method, sizes in itertools.product(METHODS, SIZES):
        if not has_places(method, *sizes[3:], is_causal):
            continue
        inputs = inputs_of(sizes, training)
        with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(training):
            output = run(method, Call.of(*inputs, is_causal=is_causal, enable_gqa=True)).output
            if training:
                output.sum().backward()
        found = predicted(method, sizes, is_causal=is_causal, training=training)
        assert (found.form, found.flops) == ("dense", counter.get_total_flops())


@pytest.mark.parametrize("is_causal", [False, True])
def test_work_of_the_kernels_is_that_of_the_pairs(is_causal) -> None:
    """Two products in the forward pass; three in the pass by queries, and four in the pass by keys."""
    for method, sizes in itertools.product(METHODS, SIZES):
        b, h, g, n, m = sizes
        if not has_places(method, n, m, is_causal):
            continue
        pairs = b * h * g * int(window_mask(method, n, m, is_causal).sum())
        shape = Shape(n, m, 4, 6, h * g, h, b, is_causal)
        assert cost_of(method, shape, "fused").flops == 2 * pairs * (4 + 6)
        trained = cost_of(method, Shape(n, m, 4, 6, h * g, h, b, is_causal, training=True), "fused")
        assert trained.flops == 2 * pairs * ((4 + 6) + (4 + 6 + 4) + (4 + 6 + 4 + 6))
    blocks = BlockSparse(torch.eye(5, dtype=torch.bool)[None])
    assert cost_of(blocks, Shape(50, 50, 4, 6, 3, 3), "fused").flops == 2 * 3 * 5 * 100 * (4 + 6)


def test_a_window_of_all_keys_costs_what_exact_attention_costs() -> None:
    shape = dict(query_length=500, head_dim=16, heads=4, is_causal=True, training=True)
    found = cost_of(Window(None), Shape.of(**shape), "fused")
    assert found.flops == cost("exact", **shape).flops + 2 * Shape.of(**shape).pairs * (16 + 16)  # logits once more


def assert_priced_as_run(calls: int) -> set[str]:
    draw, forms = random.Random(0), set()
    for _ in range(calls):
        n = draw.choice((0, 1, 40, 300))
        m = n if draw.random() < 0.6 else draw.choice((0, 1, 130))
        sizes = (draw.randint(1, 2), draw.randint(1, 2), draw.randint(1, 2), n, m)
        method = draw.choice((Window(20), Window(None, softcap=5.0), BlockSparse(torch.ones(1, 1, 1).bool())))
        training, is_causal = draw.random() < 0.5, draw.random() < 0.5 or (n != m and method == Window(20))
        dtype = draw.choice((torch.float32, torch.float64, torch.bfloat16, torch.float16))
        inputs = [x.detach().to(dtype).requires_grad_(training) for x in inputs_of(sizes)]
        with torch.set_grad_enabled(training):
            executed = run(method, Call.of(*inputs, is_causal=is_causal, enable_gqa=True)).form
        assert predicted(method, sizes, is_causal=is_causal, training=training, dtype=dtype).form == executed, sizes
        forms.add(executed)
    return forms


@needs_kernels
def test_the_form_that_is_priced_is_the_one_that_runs() -> None:
    assert assert_priced_as_run(60) == {"fused", "dense"}  # dense for calls without queries or keys


@by_torch
def test_the_form_that_is_priced_is_the_one_that_runs_without_kernels() -> None:
    assert assert_priced_as_run(20) == {"dense"}


def test_a_step_sees_the_window_and_the_sinks() -> None:
    for size, sinks, m in itertools.product((1, 5, 30, None), (0, 2, 50), (1, 4, 20, 100)):
        method = Window(size, sinks)
        found = predicted(method, (2, 1, 3, 1, m), form="step")
        assert found.flops == 2 * 6 * int(window_mask(method, m, m, True)[-1].sum()) * (4 + 6)
        assert found.form == "step"
    long, longer = (predicted(Window(64, 4), (1, 2, 1, 1, m), form="step") for m in (1000, 1_000_000))
    assert long == longer


def test_order() -> None:
    options = dict(query_length=4096, head_dim=64)
    found = cost_of(Window(256, sinks=4), Shape.of(**options, is_causal=True), "fused").order
    assert found.startswith("time O(n w (d + e)), memory O(n e): n queries")
    assert found.endswith("w = 260 keys that a query sees")
    assert "w = 515 keys" in cost_of(Window(256, sinks=4), Shape.of(**options), "fused").order  # to both sides
    assert "time O(n m (d + e)), memory O(n e)" in cost_of(Window(None), Shape.of(**options), "fused").order
    assert "memory O(n w)" in cost_of(Window(256), Shape.of(**options, training=True), "dense").order
    blocks = BlockSparse(torch.eye(8, dtype=torch.bool)[None])
    assert "time O(p n m (d + e))" in cost_of(blocks, Shape.of(**options), "fused").order
    assert "p = 0.12 of the blocks" in cost_of(blocks, Shape.of(**options), "fused").order


def test_refusals_name_the_argument() -> None:
    blocks = BlockSparse(torch.ones(1, 4, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"form: BlockSparse\(4 x 4 blocks, 1 head\) has 'fused', 'dense', got 'step'"):
        cost(blocks, query_length=1, head_dim=4, form="step")
    with pytest.raises(ValueError, match=r"layout: .* 9 "):
        cost(blocks, query_length=9, head_dim=4)
    with pytest.raises(ValueError, match=r"layout: expected 1 head or the 3 query heads"):
        cost(BlockSparse(torch.ones(2, 1, 1).bool()), query_length=9, head_dim=4, heads=3)
    with pytest.raises(ValueError, match="key_length: a window on both sides compares positions; expected 9 "):
        cost(Window(5), query_length=9, key_length=8, head_dim=4)
    with pytest.raises(ValueError, match=r"form: Window\(5\) has 'fused', 'dense', 'step', got 'chunked'"):
        cost(Window(5), query_length=9, head_dim=4, form="chunked")


@by_torch
def test_the_kernels_are_priced_only_where_they_compute() -> None:
    with pytest.raises(ValueError, match=r"form: the native kernels do not compute this call of Window\(5\)"):
        cost(Window(5), query_length=9, head_dim=4, form="fused")


# --- Memory -----------------------------------------------------------------------------------------------------------


def assert_peak(method: object, sizes: tuple[int, ...], training: bool, dtype: torch.dtype, rel: float) -> None:
    for is_causal in (False, True) if sizes[3] == sizes[4] else (True,):
        inputs = [x.detach().to(dtype).requires_grad_(training) for x in inputs_of(sizes, d=32, e=48)]

        def call(inputs=inputs, is_causal=is_causal) -> object:
            output = attention(*inputs, is_causal=is_causal, enable_gqa=True, method=method)
            return output, torch.autograd.grad(output.sum(), inputs) if training else None

        found = predicted(method, sizes, 32, 48, is_causal=is_causal, training=training, dtype=dtype)
        assert allocated(call) == pytest.approx(found.peak_bytes, rel=rel)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [False, True])
def test_memory_of_the_kernels_is_results_and_gradients(training, dtype) -> None:
    for method in (Window(64), Window(None), BlockSparse(torch.ones(1, 4, 4, dtype=torch.bool))):
        assert_peak(method, (1, 2, 3, 1024, 1024), training, dtype, rel=0.02)
    assert_peak(Window(64, sinks=4), (2, 2, 1, 512, 2048), training, dtype, rel=0.02)


@by_torch
@pytest.mark.parametrize("training", [False, True])
def test_memory_of_torch_is_what_torch_allocates(training) -> None:
    for method in (Window(64), Window(400, sinks=4), Window(None)):
        assert_peak(method, (1, 2, 3, 1024, 1024), training, torch.float32, rel=0.15)
        assert_peak(method, (1, 4, 1, 1536, 1536), training, torch.float32, rel=0.15)


def test_bytes_moved() -> None:
    shape = Shape(10, 10, 4, 3)
    inputs, outputs = 10 * (4 + 4 + 3), 10 * 3
    assert cost_of(Window(5), shape, "fused").bytes_moved == 4 * (inputs + outputs)
    trained = cost_of(Window(5), Shape(10, 10, 4, 3, training=True), "fused")
    assert trained.bytes_moved == 4 * (inputs + outputs + 3 * inputs + 4 * outputs)
    assert cost_of(Window(5), shape, "dense").bytes_moved == 4 * (inputs + outputs + 2 * 100)
    step = cost_of(Window(5, sinks=2), Shape(1, 10, 4, 3), "step")
    assert step.bytes_moved == 4 * (4 + 3 + 7 * (4 + 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_bytes_of_a_state_are_those_of_its_buffers(dtype) -> None:
    methods = (Window(1), Window(50), Window(50, sinks=3), Window(None, 2))
    for method, n in itertools.product(methods, (1, 30, 200, 1500)):
        sizes = (2, 3, 2, n, n)
        inputs = [x.to(dtype) for x in inputs_of(sizes)]
        _, state = attention(*inputs, is_causal=True, enable_gqa=True, method=method, return_state=True)
        buffers = state.permit.prepared
        held = sum(x.nbytes for x in (buffers.keys, buffers.values, buffers.keep, *state.parts))
        assert predicted(method, sizes, is_causal=True, dtype=dtype).state_bytes == held
        assert state.nbytes <= held
    short, long = (predicted(Window(50, sinks=3), (1, 1, 1, n, n), is_causal=True).state_bytes for n in (200, 10**6))
    assert short == long
    assert predicted(BlockSparse(torch.ones(1, 1, 1).bool()), (1, 1, 1, 9, 9)).state_bytes == 0


# --- Crossover --------------------------------------------------------------------------------------------------------


@needs_kernels
def test_crossovers() -> None:
    window, options = Window(128, sinks=4), dict(head_dim=64, heads=8, is_causal=True)
    assert crossover("exact", window, **options) == 133  # where the first row leaves out a key
    assert crossover("exact", window, training=True, **options) > 133  # Its backward pass has more products.
    assert crossover(Window(256), Window(128), **options) == 129
    assert crossover("exact", window, by="memory", **options) is None  # Both hold the result and a number of each row.
    assert crossover("exact", window, by="memory", value_dim=32, **options) < 200  # Exact attention makes the matrix.
    length = crossover("exact", window, by="time", **options)
    assert 133 < length < 4096
    near = BlockSparse(torch.eye(8, dtype=torch.bool)[None])
    for name, pair in (("b", ("exact", near)), ("a", (near, "exact"))):
        with pytest.raises(ValueError, match=f"^{name}: the layout of a BlockSparse fits some lengths only"):
            crossover(*pair, head_dim=64)


# --- Time -------------------------------------------------------------------------------------------------------------


def test_windows_are_measured_where_the_kernels_compute_them(monkeypatch) -> None:
    for with_kernels in (True, False):
        monkeypatch.setattr(native, "available", lambda answer=with_kernels: answer)
        calls = [(method, form, shape) for method, form, shape in grid() if family(method) == "sparse"]
        names = {name_of(*call) for call in calls}
        orders, passes = ("causal", "open"), ("forward", "training")
        expected = {f"sparse/fused/{a}/{b}" for a in orders for b in passes} if with_kernels else set()
        assert names == expected
        assert len(calls) == 6 * len(expected)


def test_work_grows_with_the_window_and_not_with_the_square_of_the_length() -> None:
    short, long, wide = (
        work(Window(size), "fused", Shape(n, n, 16, 16, is_causal=True))
        for size, n in ((64, 4096), (64, 8192), (128, 4096))
    )
    assert 1.9 < long[1] / short[1] < 2.1
    assert 1.7 < wide[1] / short[1] < 2
    assert short[0] == long[0] and wide[4] == short[4]
    layout = torch.eye(4, dtype=torch.bool)[None]
    assert work(BlockSparse(layout), "fused", Shape(64, 64, 4, 4))[2] == 4 * 16 * 16


def test_without_a_timing_model_it_is_said() -> None:
    with pytest.raises(ValueError, match=r"method: no timing model for Window\(9\) without native kernels"):
        Calibration({}).seconds(Window(9), Shape(10, 10, 4, 4))


@needs_kernels
def test_a_calibration_from_before_windows_is_made_again(fresh) -> None:
    """Whatever it says about its version: it lacks the coefficients of windows."""
    first = cache.calibration()
    (path,) = cache.cache_folder().iterdir()
    content = json.loads(path.read_text())
    for version in (7, cache.VERSION):
        old = {"machine": content["machine"] | {"version": version}, "note": "", "retries": 0}
        old["coefficients"] = {k: v for k, v in content["coefficients"].items() if not k.startswith("sparse")}
        path.write_text(json.dumps({**old, "sha256": cache.checksum_of(old)}))
        assert cache.cached(torch.device("cpu")) is None
        assert cache.calibration() == first
        assert cache.cached(torch.device("cpu")).seconds(Window(64), Shape(512, 512, 16, 16)) > 0
    path.write_text(json.dumps({**old, "sha256": cache.checksum_of(old)}))
    assert plan(query_length=512, sample=near_sample(300)).candidates  # not a KeyError


# --- Errors -----------------------------------------------------------------------------------------------------------


def test_errors_are_unknown_until_measured() -> None:
    for method in (Window(100), Window(None, softcap=9.0), Window(None, sink_logits=torch.zeros(2)),
                   BlockSparse(torch.ones(1, 1, 1).bool())):  # fmt: skip
        assert error(method, logit_range=1.0) == UNKNOWN_ERROR
    assert error(Window(None), logit_range=1.0) == NO_ERROR


N = SAMPLE_LENGTH
HEAD_MASK = torch.rand(1, 4, 1, N, generator=torch.Generator().manual_seed(2)) > 0.2
MASKS = SAMPLE_MASKS | {"of query heads": dict(attn_mask=HEAD_MASK)}
MEASURED = {
    "window": Window(9),
    "sinks": Window(9, sinks=5),
    "softcap": Window(20, softcap=0.5),
    "learned sinks": Window(20, sink_logits=torch.tensor([0.0, 1.0, 2.0, -3.0])),
    "blocks": BlockSparse(torch.rand(1, 7, 10, generator=torch.Generator().manual_seed(0)) > 0.3),
    "blocks of heads": BlockSparse(torch.rand(4, 5, 3, generator=torch.Generator().manual_seed(0)) > 0.3),
}


@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.parametrize("mask", MASKS)
def test_all_rows_give_the_error_itself(name, mask) -> None:
    q, k, v = (x.double() for x in inputs_of((2, 2, 2, N, N)))
    options, method = MASKS[mask] | dict(enable_gqa=True), MEASURED[name]
    exact = attention(q, k, v, **options)
    output = attention(q, k, v, method=method, **options)
    found = measure_error(q, k, v, rows=N, method=method, **options)
    assert found.known_by == "sample"
    assert found.relative == pytest.approx(float((output - exact).norm() / exact.norm()), rel=1e-6)
    assert found.relative > 0.01


@pytest.mark.parametrize("name", [name for name, method in MEASURED.items() if isinstance(method, Window)])
@pytest.mark.parametrize("mask", MASKS)
def test_rows_alone_are_those_of_the_call(name, mask, monkeypatch) -> None:
    """Whatever the number of keys that are copied at once."""
    q, k, v = (x.double() for x in inputs_of((2, 2, 2, N, N)))
    call = rows_module.sampled_call(q, k, v, enable_gqa=True, **MASKS[mask])
    picked = rows_module.pick_rows(call, 20)
    whole = call.layout.fold_query(run(MEASURED[name], call).output)
    expected = whole.gather(2, picked.places[..., None].expand(-1, -1, -1, whole.shape[-1]))
    for numbers in (1 << 22, 1000, 1):
        monkeypatch.setattr(window_module, "BLOCK_NUMBERS", numbers)
        torch.testing.assert_close(window_rows(MEASURED[name], call, picked.places), expected)


def test_rows_alone_with_other_lengths_and_hidden_nan() -> None:
    for n, m in ((70, 40), (40, 70)):
        q, k, v = (x.double() for x in inputs_of((1, 2, 2, n, m)))
        keep = torch.arange(m).expand(1, -1) % 3 > 0
        v[:, :, 0] = k[:, :, 3] = math.nan  # hidden
        call = Call.of(q, k, v, is_causal=True, enable_gqa=True, key_padding_mask=keep)
        places = torch.arange(n).expand(2, 2, -1)
        for method in (Window(9, sinks=5), Window(1), Window(None)):
            expected = call.layout.fold_query(run(method, call).output)
            torch.testing.assert_close(window_rows(method, call, places), expected)


@needs_kernels
def test_few_rows_are_computed_alone_and_many_by_one_call(monkeypatch) -> None:
    monkeypatch.setattr(rows_module, "run", lambda *_: pytest.fail("it computed a whole call"))
    q, k, v = near_sample(8192)
    assert measure_error(q, k, v, rows=64, is_causal=True, method=Window(256)).relative < 1e-3
    with pytest.raises(pytest.fail.Exception):
        measure_error(q, k, v, rows=200, is_causal=True, method=Window(256))


@pytest.mark.parametrize("rows", [1, 200])
def test_a_window_on_both_sides_needs_as_many_keys_as_queries(rows) -> None:
    q, k, v = inputs_of((1, 1, 1, 200, 100))
    for function in (attention, partial(measure_error, rows=rows)):
        with pytest.raises(ValueError, match="key: a window on both sides compares positions; expected 200 keys"):
            function(q, k, v, method=Window(9))
        function(q, k, v, method=Window(9), is_causal=True)
        function(q, k, v, method=Window(None))
    assert not isinstance(Auto(0.5).choose(q, k, v).method, Window)
    assert not any(isinstance(c.method, Window) for c in plan(sample=(q, k, v)).candidates)


# --- Plans ------------------------------------------------------------------------------------------------------------


def near_sample(n: int, heads: int = 2, spread: float = 20.0) -> tuple[Tensor, Tensor, Tensor]:
    """Queries that look at the keys within about `spread` places: logits fall with the cosine of the distance."""
    angle = math.pi / n * torch.arange(n)
    place = torch.stack([angle.cos(), angle.sin(), 0 * angle, 0 * angle], -1)
    factor = math.sqrt(2) * (n / math.pi / spread) ** 2
    values = torch.randn(1, heads, n, 4, generator=torch.Generator().manual_seed(0))
    return (factor * place).expand(1, heads, -1, -1), place.expand(1, heads, -1, -1), values


@needs_kernels
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_to_near_keys_is_planned_as_a_window(is_causal) -> None:
    sample = near_sample(4096)
    found = plan(sample=sample, is_causal=is_causal, max_error=0.01)
    assert found.method == Window(128, sinks=4)
    assert found.choice.form == "fused"
    assert found.choice.error.known_by == "sample"
    assert found.reason.startswith("Window(128, sinks=4): ")
    assert "times as fast" in found.reason and "smaller part" not in found.reason
    assert {c.method for c in found.candidates} >= set(Window.candidates(64))
    assert "Window(2048, sinks=4)" in str(found)
    longer = plan(sample=sample, is_causal=is_causal, max_error=0.01, query_length=100_000)
    assert longer.method == Window(128, sinks=4)
    assert " of a sample of 4,096 tokens (a window sees a smaller part of a longer sequence), within" in longer.reason


@needs_kernels
def test_attention_to_far_keys_is_not_planned_as_a_window() -> None:
    q, k, v = near_sample(4096)
    found = plan(sample=(q.flip(2), k, v), max_error=0.01)
    assert not isinstance(found.method, Window)
    worst = next(c for c in found.candidates if c.method == Window(128, sinks=4))
    assert worst.error.relative > 0.5 and not worst.is_acceptable


def test_windows_are_offered_where_a_sample_can_judge_them() -> None:
    def offered(sample: int, keys: int, is_causal: bool = True, queries: int | None = None) -> tuple[object, ...]:
        x = torch.ones(1, 1, sample, 1)
        n = keys if queries is None else queries
        return offered_methods(Call.of(x, x, x, is_causal=is_causal), Shape(n, keys, 1, 1, is_causal=is_causal))

    def sizes(*arguments) -> list[int]:
        return [method.size for method in offered(*arguments) if isinstance(method, Window)]

    assert sizes(4096, 4096) == [128, 512, 2048]
    assert sizes(2049, 2049) == [128, 512, 2048]
    assert sizes(2048, 2048) == [128, 512]  # It would hold all keys.
    assert sizes(4096, 300) == [128]
    assert sizes(4096, 128) == []
    assert sizes(600, 600) == [128, 512]
    assert sizes(600, 100_000) == [128]  # On the sample, most rows would see all keys.
    assert sizes(200, 100_000) == []
    assert sizes(600, 600, False) == [128, 512]
    assert sizes(600, 600, False, 50) == []  # Without order, queries have no places among more keys.
    assert sizes(600, 600, True, 50) == [128, 512]
    assert any(isinstance(method, Multipole) for method in offered(10, 10))


def test_windows_need_the_kernels_and_a_sample_to_be_chosen(monkeypatch) -> None:
    windows = [
        c for c in plan(query_length=4096, head_dim=16, logit_range=5).candidates if isinstance(c.method, Window)
    ]
    assert not any(c.is_acceptable for c in windows)
    monkeypatch.setattr(native, "available", lambda: False)
    assert not any(isinstance(c.method, Window) for c in plan(sample=near_sample(1024)).candidates)


# --- Auto -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def patient(monkeypatch) -> None:
    """Let short calls with narrow heads be asked too, which otherwise are exact."""
    monkeypatch.setattr(auto_module, "MAX_ASKING_SHARE", float("inf"))


@needs_kernels
@pytest.mark.parametrize("is_causal", [False, True])
def test_auto_takes_a_window_where_near_keys_matter(is_causal, patient, monkeypatch) -> None:
    """It computes the sampled rows alone: no call of a window is made before the choice."""
    q, k, v = near_sample(8192)
    with monkeypatch.context() as patch:
        patch.setattr(rows_module, "run", lambda *_: pytest.fail("it computed a whole call"))
        choice = Auto(0.01).choose(q, k, v, is_causal=is_causal)
    assert choice.method == Window(128, sinks=4)
    assert choice.error.known_by == "sample"
    assert choice.reason.startswith("Window(128, sinks=4): its relative error is ")
    exact = attention(q, k, v, is_causal=is_causal)
    output = attention(q, k, v, is_causal=is_causal, method=Auto(0.01))
    assert float((output - exact).norm() / exact.norm()) <= 0.01
    wider = Auto(0.01).choose(*near_sample(16_384, spread=200.0), is_causal=is_causal)
    assert wider.method == Window(2048, sinks=4)


@needs_kernels
def test_auto_refuses_a_window_that_leaves_something_out(patient) -> None:
    q, k, v = near_sample(4096)
    for wrong in (q.flip(2), torch.where(torch.arange(4096)[:, None] % 10 == 0, q.flip(2), q)):  # all rows, one in ten
        found = Auto(0.05).choose(wrong, k, v).method
        assert not isinstance(found, Window)
        assert measure_error(wrong, k, v, rows=4096, method=found).relative <= 0.05


@needs_kernels
def test_auto_takes_masks_of_keys_and_no_others(patient) -> None:
    q, k, v = near_sample(4096)
    padding = torch.arange(4096).expand(1, -1) < 4000
    assert Auto(0.01).choose(q, k, v, key_padding_mask=padding).method == Window(128, sinks=4)
    assert Auto(0.01).choose(q, k, v, torch.zeros(4096, 4096)).method == Window(128, sinks=4)  # It hides nothing.
    bias, backward = torch.full((4096, 4096), 0.1), torch.ones(4096, 4096).bool().triu()
    for options in (dict(attn_mask=bias), dict(attn_mask=backward), dict(dropout_p=0.1)):
        assert Auto(0.01).choose(q, k, v, **options).method == Exact()


def test_auto_considers_windows_where_they_are_faster(monkeypatch, tmp_path) -> None:
    def considered(n: int, m: int | None = None, is_causal: bool = True) -> list[object]:
        shape = Shape(n, n if m is None else m, 64, 64, 8, 8, is_causal=is_causal)
        return [m for m in auto_module._faster(torch.ones(1), shape) if isinstance(m, Window)]

    if native.available():
        assert considered(300) == []
        assert considered(16_384) == Window.candidates(64)
        monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path))  # never calibrated
        assert considered(16_384) == Window.candidates(64)[:2]
        free = SimpleNamespace(seconds=lambda method, shape: float(method == Exact()))
        monkeypatch.setattr(auto_module, "cached", lambda *_: free)
        assert considered(128) == []  # The windows would hold all keys.
        assert considered(129) == considered(129, is_causal=False) == considered(500, 400) == [Window(128, sinks=4)]
        assert considered(500, 400, is_causal=False) == []  # Queries have no places among the keys.
    monkeypatch.setattr(native, "available", lambda: False)
    assert considered(16_384) == []
