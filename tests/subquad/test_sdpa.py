"""`subquad.sdpa`: torch's own function, routed to a method."""

import functools
import sys
import threading
import types
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import subquad
from subquad import Taylor, attention, sdpa

TORCH = F.scaled_dot_product_attention


def drawn(*shape: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, *(shape or (2, 4, 30, 8)), generator=generator).mul(0.5).unbind()


@pytest.fixture(autouse=True)
def torch_is_back():
    fast_path = torch.backends.mha.get_fastpath_enabled()
    yield
    assert F.scaled_dot_product_attention is TORCH
    assert torch.backends.mha.get_fastpath_enabled() == fast_path


def by(method: object) -> Tensor:
    return attention(*drawn(), is_causal=True, method=method)


def called() -> Tensor:
    return F.scaled_dot_product_attention(*drawn(), is_causal=True)


def test_calls_in_the_block_take_the_method():
    with sdpa("taylor") as routing:
        assert torch.equal(called(), by("taylor"))
    assert torch.equal(called(), TORCH(*drawn(), is_causal=True))
    (found,) = routing.calls
    assert (found.method, found.reason, found.count, found.is_causal) == (Taylor(2), "", 1, True)
    assert (found.queries, found.keys, found.heads, found.width) == ((30, 30), (30, 30), 4, 8)


def test_a_decorator_routes_each_call_and_keeps_one_report():
    routing = sdpa("taylor")

    @routing
    def decorated(depth: int) -> Tensor:
        """Doc."""
        return called() if depth == 0 else decorated(depth - 1)

    assert decorated.__doc__ == "Doc."
    assert F.scaled_dot_product_attention is TORCH
    assert torch.equal(decorated(2), by("taylor"))
    assert torch.equal(decorated(0), by("taylor"))
    assert [each.count for each in routing.calls] == [2]
    assert F.scaled_dot_product_attention is TORCH


def test_a_plain_call_lasts_until_undo():
    routing = sdpa("linear")
    try:
        assert torch.equal(called(), by("linear"))
    finally:
        routing.undo()
    routing.undo()
    assert torch.equal(called(), TORCH(*drawn(), is_causal=True))


def test_the_innermost_decides_and_they_may_end_in_any_order():
    first, second = sdpa("taylor"), sdpa("linear")
    assert torch.equal(called(), by("linear"))
    first.undo()
    assert torch.equal(called(), by("linear"))
    second.undo()
    with sdpa("taylor"):
        with sdpa("exact"):
            assert torch.equal(called(), TORCH(*drawn(), is_causal=True))
        assert torch.equal(called(), by("taylor"))


def test_an_error_ends_the_block_too():
    with pytest.raises(ZeroDivisionError), sdpa("taylor"):
        1 / 0  # noqa: B018


def test_threads_do_not_see_each_other():
    methods = ["taylor", "linear", "separable", "exact", None] * 2
    expected = {method: TORCH(*drawn(), is_causal=True) if method is None else by(method) for method in set(methods)}
    faults, barrier = [], threading.Barrier(len(methods))

    def work(method: str | None) -> None:
        barrier.wait()
        try:
            for _ in range(30):
                if method is None:
                    found = called()
                else:
                    with sdpa(method):
                        found = called()
                assert torch.equal(found, expected[method])
        except Exception as error:
            faults.append((method, error))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(method,)) for method in methods]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert faults == []


@pytest.mark.parametrize("all_threads", [False, True])
def test_another_thread_is_routed_only_on_request(all_threads):
    found = []
    routing = sdpa("taylor", all_threads=all_threads)
    try:
        thread = threading.Thread(target=lambda: found.append(called()))
        thread.start()
        thread.join()
    finally:
        routing.undo()
    assert torch.equal(found[0], by("taylor") if all_threads else TORCH(*drawn(), is_causal=True))


def test_a_thread_that_ended_without_undo_leaves_nothing_to_the_next():
    left = []
    for _ in range(20):  # The system soon gives the same number to another thread.
        thread = threading.Thread(target=lambda: left.append(sdpa("taylor")))
        thread.start()
        thread.join()
        found = []
        other = threading.Thread(target=lambda found=found: found.append(called()))
        other.start()
        other.join()
        assert torch.equal(found[0], TORCH(*drawn(), is_causal=True))
    for routing in left:
        routing.undo()


def test_what_the_method_does_not_serve_is_left_to_torch_with_the_reason():
    q, k, v = drawn()
    bias = torch.linspace(-1, 1, 900).reshape(30, 30)
    with sdpa("taylor") as routing:
        assert torch.equal(F.scaled_dot_product_attention(q, k, v, bias), TORCH(q, k, v, bias))
        assert torch.equal(F.scaled_dot_product_attention(q, k, v, bias > 0), TORCH(q, k, v, bias > 0))
        assert F.scaled_dot_product_attention(q, k, v, dropout_p=0.5).shape == q.shape
        with pytest.raises(ValueError, match="key: expected width 8, like the query, got 3"):
            F.scaled_dot_product_attention(q, k[..., :3], v)
    reasons = [each.reason.partition(":")[0] for each in routing.calls if each.method is None]
    assert reasons == ["attn_mask", "attn_mask", "dropout_p"]
    with sdpa("window:4") as routing:  # A window has no meaning across two sequences.
        assert torch.equal(F.scaled_dot_product_attention(q[:, :, :7], k, v), TORCH(q[:, :, :7], k, v))
    assert routing.calls[0].method is None
    assert "torch" in str(routing)


def test_lengths_of_one_kind_are_one_row():
    q, k, v = drawn()
    with sdpa("linear") as routing:
        for length in (5, 3, 9):
            F.scaled_dot_product_attention(q[:, :, :1], k[:, :, :length], v[:, :, :length])
    assert [(x.count, x.queries, x.keys) for x in routing.calls] == [(3, (1, 1), (3, 9))]
    assert "3 to 9" in str(routing)
    assert repr(routing) == "Routing(Linear('elu'), calls=3)"


def test_auto_tells_what_it_chose():
    with sdpa("auto") as routing:
        assert torch.equal(called(), TORCH(*drawn(), is_causal=True))
    assert routing.calls[0].method == subquad.Exact()


def test_gradients_flow():
    inputs = [x.requires_grad_() for x in drawn()]
    with sdpa("taylor"):
        found = torch.autograd.grad(F.scaled_dot_product_attention(*inputs).square().sum(), inputs)
    expected = torch.autograd.grad(attention(*inputs, method="taylor").square().sum(), inputs)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_compiled_code_follows_the_routing():
    compiled = torch.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), fullgraph=True, backend="eager")
    q, k, v = drawn()
    exact = TORCH(q, k, v)
    assert torch.equal(compiled(q, k, v), exact)
    for method in ("taylor", "linear"):
        with sdpa(method):
            torch.testing.assert_close(compiled(q, k, v), attention(q, k, v, method=method), rtol=0, atol=1e-6)
    assert torch.equal(compiled(q, k, v), exact)


@pytest.mark.parametrize("method", ["exact", "auto", "taylor", "multipole"])
def test_the_naive_patch_does_not_call_itself(monkeypatch, method):
    monkeypatch.setattr(F, "scaled_dot_product_attention", functools.partial(attention, method=method))
    q, k, v = drawn()
    assert F.scaled_dot_product_attention(q, k, v).shape == q.shape
    keep = torch.arange(30) < 20
    options = dict(is_causal=True, key_padding_mask=keep.expand(2, 30), return_state=method != "auto")
    F.scaled_dot_product_attention(q, k, v, **options)
    layer = nn.TransformerEncoderLayer(16, 4, batch_first=True, dropout=0.0)
    for mode in (True, False):
        layer.train(mode)(torch.randn(2, 30, 16), src_key_padding_mask=~keep.expand(2, 30))
    with sdpa("linear"):
        assert torch.equal(F.scaled_dot_product_attention(q, k, v), attention(q, k, v, method="linear"))
    monkeypatch.undo()


@pytest.mark.parametrize("method", ["taylor", "random", "linear", "multipole"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_an_encoder_of_torch_computes_as_after_replace_attention(method, training, padded):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training)
    x, hidden = torch.randn(2, 30, 16), torch.arange(30) >= torch.tensor([[20], [30]])
    options = dict(src_key_padding_mask=hidden) if padded else {}
    with torch.set_grad_enabled(training):
        with sdpa(method) as routing:
            found = model(x, **options)
        with subquad.replace_attention(model, method):
            expected = model(x, **options)
    assert [each.reason for each in routing.calls] == [""]
    assert routing.calls[0].count == 2
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_block_without_calls_says_what_may_be_wrong(monkeypatch):
    module = sys.modules[sdpa.__module__]
    holder, empty = types.ModuleType("my_model"), types.ModuleType("another")
    holder.attend = TORCH
    for modules, message in (
        ({"another": empty, "gone": None}, "need_weights=True"),
        ({"my_model": holder}, "my_model"),
    ):
        monkeypatch.setattr(module, "sys", types.SimpleNamespace(modules=modules))
        with pytest.warns(UserWarning, match=f"sdpa: no call .* {message}"), sdpa("taylor"):
            pass


def test_a_routing_that_makes_calls_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with sdpa("linear") as routing:
            called()
    assert len(routing.calls) == 1 and routing.calls[0].method is not None


def test_an_unknown_method_changes_nothing():
    with pytest.raises(ValueError, match=r"did you mean 'taylor'\?"):
        sdpa("tailor")
    assert F.scaled_dot_product_attention is TORCH


def test_a_learned_bias_stays_with_torch_whatever_it_is_now():
    q, k, v = drawn()
    bias = nn.Parameter(torch.zeros(30, 30))
    with sdpa("taylor") as routing:
        F.scaled_dot_product_attention(q, k, v, bias).square().sum().backward()
    assert bias.grad is not None
    assert routing.calls[0].method is None
    with pytest.raises(ValueError, match="a bias added to each logit"):
        attention(q, k, v, bias, method="taylor")


@pytest.mark.parametrize("method", ["exact", "taylor"])
def test_masks_with_a_function_of_their_own_keep_it(method):
    from torch.nn.attention.bias import causal_upper_left

    q, k, v = drawn()
    with sdpa(method) as routing:
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=causal_upper_left(30, 30))
    assert torch.equal(found, attention(q, k, v, is_causal=True, method=method))
    assert [(each.is_causal, each.reason) for each in routing.calls] == [(True, "")]


def test_another_wrapper_around_ours_does_not_make_it_call_itself(monkeypatch):
    routing = sdpa("taylor")
    inner = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *x, **options: inner(*x, **options))
    routing.undo()
    q, k, v = drawn()
    bias = torch.linspace(-1, 1, 900).reshape(30, 30)
    with sdpa("linear"):
        assert torch.equal(F.scaled_dot_product_attention(q, k, v), attention(q, k, v, method="linear"))
        assert torch.equal(F.scaled_dot_product_attention(q, k, v, bias), TORCH(q, k, v, bias))
    assert torch.equal(F.scaled_dot_product_attention(q, k, v), TORCH(q, k, v))
    monkeypatch.undo()
    F.scaled_dot_product_attention = TORCH


def test_an_error_inside_a_map_is_not_hidden():
    class Broken:
        positive = True

        def size(self, width: int) -> int:
            return width

        def __call__(self, x: Tensor, *, is_query: bool = False) -> Tensor:
            raise ValueError("a mistake in my map")

    with pytest.raises(ValueError, match="a mistake in my map"), sdpa(Broken()):
        called()


@pytest.mark.parametrize("method", ["multipole", "auto"])
def test_methods_that_no_program_can_record_raise_in_it(method):
    with pytest.raises(ValueError, match="trace"), sdpa(method):
        torch.jit.trace(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), drawn(), check_trace=False)


def test_a_program_cannot_read_a_mask_and_says_so():
    mask = torch.ones(30, 30, dtype=torch.bool).tril()
    compiled = torch.compile(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask), backend="eager", fullgraph=True
    )
    with pytest.raises(Exception, match=r"a recorded program cannot tell .* pass is_causal=True"), sdpa("taylor"):
        compiled(*drawn())
    with sdpa("taylor"), warnings.catch_warnings():
        warnings.simplefilter("error")  # A block whose calls are compiled still has calls.
        q, k, v = drawn()
        torch.compile(lambda q: F.scaled_dot_product_attention(q, k, v), backend="eager")(q)


def test_generators_and_coroutines_are_refused():
    def generator():
        yield called()

    async def coroutine():
        return called()

    for function in (generator, coroutine):
        with pytest.raises(TypeError, match=r"computes after it has returned; write `with subquad\.sdpa"):
            sdpa("taylor")(function)


def test_tasks_do_not_see_each_other():
    import asyncio

    async def routed() -> Tensor:
        with sdpa("linear"):
            await asyncio.sleep(0.01)
            found = called()
            await asyncio.sleep(0.01)
        return found

    async def plain() -> Tensor:
        await asyncio.sleep(0.005)
        return called()

    async def both() -> list[Tensor]:
        return await asyncio.gather(routed(), plain(), routed())

    first, middle, last = asyncio.run(both())
    assert torch.equal(first, by("linear")) and torch.equal(last, first)
    assert torch.equal(middle, TORCH(*drawn(), is_causal=True))


def test_a_routing_can_be_entered_again_and_inside_itself():
    routing = sdpa("linear")
    with routing:
        with routing:
            assert torch.equal(called(), by("linear"))
        assert torch.equal(called(), by("linear"))
    assert F.scaled_dot_product_attention is TORCH
    with routing:
        assert torch.equal(called(), by("linear"))
    assert [each.count for each in routing.calls] == [3]
