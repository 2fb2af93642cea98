"""Window: exact attention under the corresponding dense mask, in every form, with every mask, whole or in pieces."""

import copy
import pickle
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from subquad import Decoder, Multipole, State, Window, attention, native
from subquad._calls.call import Call
from subquad._engines import run

NAN, INF = float("nan"), float("inf")
KEEP = torch.tensor([[j not in (0, 1, 9, 10, 30) for j in range(41)], [j < 33 for j in range(41)]])
SEGMENTS = torch.tensor([0] * 5 + [3] + [0] * 19 + [2] * 16).expand(2, -1)
MASKS = {
    "none": {},
    "padding": {"key_padding_mask": KEEP},
    "segments": {"segment_ids": SEGMENTS},
    "both": {"key_padding_mask": KEEP, "segment_ids": SEGMENTS},
}
SIZES = [(1, 0), (1, 3), (2, 1), (7, 0), (7, 2), (16, 16), (40, 3), (41, 0), (1000, 5), (None, 0), (None, 2)]
by_form = pytest.mark.parametrize("form", ["dense", "fused"])  # torch's operations, and the kernels
by_size = pytest.mark.parametrize(("size", "sinks"), SIZES)
by_mask = pytest.mark.parametrize("mask", MASKS)
needs_kernels = pytest.mark.skipif(not native.available(), reason="the native kernels are not available")
by_causality = pytest.mark.parametrize("is_causal", [True, False])


def draw(n: int = 41, m: int | None = None, d: int = 8, e: int = 5, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(n)
    m = n if m is None else m
    shapes = (2, 4, n, d), (2, 2, m, d), (2, 2, m, e)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def seen_pairs(method: Window, n: int, m: int, is_causal: bool, masks: dict[str, Tensor]) -> Tensor:
    """(batch, n, m): which keys a query sees, by the definition, one query after another."""
    shown = masks.get("key_padding_mask", torch.ones(2, m, dtype=torch.bool))
    segments = masks.get("segment_ids", torch.zeros(2, m, dtype=torch.long))
    runs = torch.cat([torch.zeros(2, 1, dtype=torch.long), segments.diff(dim=1).ne(0).cumsum(1)], 1)
    seen = torch.zeros(2, n, m, dtype=torch.bool)
    size = 10**6 if method.size is None else method.size
    for b in range(2):
        for i in range(n):
            own = [j for j in range(m) if shown[b, j] and runs[b, j] == runs[b, min(i, m - 1)]]
            near = [j for j in own if (i - size < j <= i if is_causal else abs(i - j) < size)]
            sinks = [j for j in own[: method.sinks] if j <= i or not is_causal]
            seen[b, i, near + sinks] = True
    return seen


def expected(method: Window, inputs: list[Tensor], is_causal: bool, masks: dict[str, Tensor]) -> Tensor:
    """The definition: softmax over the seen pairs, soft-capped, with a learned sink; rows without keys are 0."""
    q, k, v = inputs
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    logits = q @ k.mT / q.shape[-1] ** 0.5
    if method.softcap is not None:
        logits = method.softcap * (logits / method.softcap).tanh()
    seen = seen_pairs(method, q.shape[2], k.shape[2], is_causal, masks)[:, None]
    weights = torch.where(seen, logits, -INF).exp()
    total = weights.sum(-1, keepdim=True)
    if method.sink_logits is not None:
        total = total + method.sink_logits.exp()[:, None, None]
    return weights / torch.where(total == 0, 1.0, total) @ v


def computed(method: Window, inputs: list[Tensor], form: str | None, **options):
    result = run(method, Call.of(*inputs, enable_gqa=True, **options), form)
    assert result.form == ("fused" if form != "dense" and native.available() else "dense")
    return result


def with_gradients(output: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    cotangent = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=output.dtype)
    return [output.detach(), *torch.autograd.grad(output, inputs, cotangent)]


def assert_close(found: Tensor, wanted: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@by_form
@by_size
@by_mask
@by_causality
def test_window_is_attention_under_a_dense_mask(form, size, sinks, mask, is_causal) -> None:
    method, inputs = Window(size, sinks), [x.requires_grad_() for x in draw()]
    found = computed(method, inputs, form, is_causal=is_causal, **MASKS[mask]).output
    wanted = expected(method, inputs, is_causal, MASKS[mask])
    for a, b in zip(with_gradients(found, inputs), with_gradients(wanted, inputs), strict=True):
        assert_close(a, b)


@by_form
@pytest.mark.parametrize(("n", "m"), [(5, 23), (23, 5), (1, 9), (9, 1), (300, 700)])
def test_lengths_may_differ_in_causal_calls(form, n, m) -> None:
    method, inputs = Window(6, 2), [x.requires_grad_() for x in draw(n, m)]
    found = computed(method, inputs, form, is_causal=True).output
    wanted = expected(method, inputs, True, {})
    for a, b in zip(with_gradients(found, inputs), with_gradients(wanted, inputs), strict=True):
        assert_close(a, b)


@by_form
@pytest.mark.parametrize("length", [1, 127, 128, 129, 513, 1100])
@pytest.mark.parametrize("size", [3, 130, 600])
def test_tiles_and_strips_have_no_seams(form, length, size) -> None:
    method, inputs = Window(size, 3), [x.requires_grad_() for x in draw(length, d=19, e=17)]
    near = torch.ones(length, length, dtype=torch.bool).tril().triu(1 - size)
    near[:, :3] |= torch.ones(length, length, dtype=torch.bool).tril()[:, :3]
    wanted = F.scaled_dot_product_attention(*inputs, near, enable_gqa=True)
    found = computed(method, inputs, form, is_causal=True).output
    for a, b in zip(with_gradients(found, inputs), with_gradients(wanted, inputs), strict=True):
        assert_close(a, b, 1e-10)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
@by_form
def test_dtypes(dtype, tolerance, form) -> None:
    inputs = draw(200, d=16, e=16, dtype=dtype)
    found = computed(Window(50, 4), inputs, form, is_causal=True).output
    assert found.dtype == dtype
    wanted = computed(Window(50, 4), [x.double() for x in inputs], "dense", is_causal=True).output
    assert_close(found.double(), wanted, tolerance)


def test_autocast_computes_in_float32() -> None:
    inputs = draw(60, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = attention(*inputs, is_causal=True, enable_gqa=True, method=Window(9))
    assert found.dtype == torch.bfloat16
    assert_close(found.float(), attention(*inputs, is_causal=True, enable_gqa=True, method=Window(9)), 1e-2)


@by_form
@by_causality
@pytest.mark.parametrize("size", [6, None])
def test_soft_capping_and_learned_sinks(form, is_causal, size) -> None:
    sinks = torch.tensor([0.3, -2.0, 4.0, 0.0], dtype=torch.float64, requires_grad=True)
    method = Window(size, 1, softcap=0.8, sink_logits=sinks)
    inputs = [x.requires_grad_() for x in draw()]
    found = computed(method, inputs, form, is_causal=is_causal, key_padding_mask=KEEP).output
    wanted = expected(method, inputs, is_causal, {"key_padding_mask": KEEP})
    given = [*inputs, sinks]
    for a, b in zip(with_gradients(found, given), with_gradients(wanted, given), strict=True):
        assert_close(a, b)


def test_soft_capping_in_float32_keeps_small_and_large_logits() -> None:
    for size in (1e-3, 0.3, 1.0, 30.0, 1e4):
        inputs = [x * size**0.5 for x in draw(70, d=16, dtype=torch.float32)[:2]] + draw(70, dtype=torch.float32)[2:]
        method = Window(20, softcap=30.0)
        found = computed(method, inputs, None, is_causal=True).output
        assert_close(found.double(), expected(method, [x.double() for x in inputs], True, {}), 1e-5)


@by_form
@by_mask
@by_size
@pytest.mark.parametrize("cuts", [(0, 1, 41), (0, 5, 6, 30, 41), (0, 40, 41), tuple(range(42))])
def test_a_sequence_in_pieces_is_the_whole(form, mask, size, sinks, cuts) -> None:
    method, inputs, masks = Window(size, sinks), draw(), MASKS[mask]
    outputs, state = [], None
    for begin, end in pairwise(cuts):
        part = {name: x[:, begin:end] for name, x in masks.items()}
        pieces = [x[:, :, begin:end] for x in inputs]
        output, state, _ = computed(method, pieces, form, is_causal=True, state=state, return_state=True, **part)
        outputs.append(output)
    assert state.length == 41
    assert_close(torch.cat(outputs, 2), expected(method, inputs, True, masks))


def test_a_state_is_a_value() -> None:
    """Two calls continue the same state, in either order, and a copy of it: none sees what another wrote."""
    inputs, method = draw(60, dtype=torch.float32), Window(9, 2)
    state = attention(*(x[:, :, :30] for x in inputs), is_causal=True, enable_gqa=True, method=method,
                      return_state=True)[1]  # fmt: skip
    copies = [copy.deepcopy(state), pickle.loads(pickle.dumps(state))]

    def follow(start: State, shift: float) -> tuple[Tensor, State]:
        outputs, own = [], start
        for i in range(30, 60):
            token = [x[:, :, i : i + 1] + shift for x in inputs]
            output, own = attention(*token, is_causal=True, enable_gqa=True, method=method, state=own,
                                    return_state=True)  # fmt: skip
            outputs.append(output)
        return torch.cat(outputs, 2), own

    first, end = follow(state, 0.0)
    follow(state, 1.0)
    for start in (state, *copies):
        assert_close(follow(start, 0.0)[0], first, 1e-6)
    whole = attention(*inputs, is_causal=True, enable_gqa=True, method=method)
    assert_close(first, whole[:, :, 30:], 1e-6)
    assert end.length == 60


@pytest.mark.parametrize("learned", ["query", "sinks"])
def test_steps_can_be_differentiated_together(learned) -> None:
    """Keys that a backward pass needs are not overwritten by the next step."""
    inputs = draw(20)
    sinks = torch.zeros(4, dtype=torch.float64, requires_grad=learned == "sinks")
    inputs[0].requires_grad_(learned == "query")
    method, leaf = Window(5, sink_logits=sinks), sinks if learned == "sinks" else inputs[0]
    options = dict(is_causal=True, enable_gqa=True, method=method)
    outputs, state = [], None
    for i in range(20):
        token = [x[:, :, i : i + 1] for x in inputs]
        output, state = attention(*token, state=state, return_state=True, **options)
        outputs.append(output)
    (found,) = torch.autograd.grad(torch.cat(outputs, 2).square().sum(), leaf)
    (wanted,) = torch.autograd.grad(attention(*inputs, **options).square().sum(), leaf)
    assert_close(found, wanted)


def test_beams_select_rows_of_a_state() -> None:
    inputs, method = draw(30), Window(6, 1)
    state = attention(*inputs, is_causal=True, enable_gqa=True, method=method, return_state=True)[1]
    token = [x[:, :, -1:] for x in inputs]
    both = attention(*token, is_causal=True, enable_gqa=True, method=method, state=state)
    chosen = torch.tensor([1, 1, 0])
    found = attention(*(x[chosen] for x in token), is_causal=True, enable_gqa=True, method=method, state=state[chosen])
    assert_close(found, both[chosen])


@pytest.mark.parametrize("method", [Window(6), Window(6, 3), Window(None), Window(4, softcap=2.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_decoder_continues_the_sequence(method, dtype) -> None:
    inputs = draw(400, dtype=dtype)
    whole = attention(*inputs, is_causal=True, enable_gqa=True, method=method)
    state = attention(*(x[:, :, :2] for x in inputs), is_causal=True, enable_gqa=True, method=method,
                      return_state=True)[1]  # fmt: skip
    decoder = Decoder(state, enable_gqa=True)
    outputs = [decoder(*(x[:, :, i : i + 1] for x in inputs)) for i in range(2, 400)]
    assert_close(torch.cat(outputs, 2), whole[:, :, 2:], 1e-5 if dtype == torch.float32 else 1e-12)
    assert decoder.state.length == 400
    last = attention(*(x[:, :, :1] for x in inputs), is_causal=True, enable_gqa=True, method=method,
                     state=decoder.state)  # fmt: skip
    assert_close(decoder(*(x[:, :, :1] for x in inputs)), last, 1e-5)


def test_the_state_has_a_constant_size() -> None:
    method, inputs = Window(50, 3), draw(20, dtype=torch.float32)
    state, most = None, 0
    for _ in range(100):
        _, state = attention(*inputs, is_causal=True, enable_gqa=True, method=method, state=state, return_state=True)
        most = max(most, state.permit.prepared.keys.shape[1])
    assert state.length == 2000
    assert most <= 3 + 49 + max(64, 50)


@by_form
def test_no_edit_of_the_future_changes_a_bit_of_the_past(form, one_thread) -> None:
    generator = torch.Generator().manual_seed(5)
    inputs, method = draw(300, d=16, e=16, dtype=torch.float32), Window(40, 3)
    before = computed(method, inputs, form, is_causal=True).output
    for value in (NAN, INF, -INF, 3e38, 0.0, 1.5):
        for _ in range(20):
            place = int(torch.randint(1, 300, (), generator=generator))
            edited = [x.clone() for x in inputs]
            for x in edited:
                x[:, :, place:] = value if torch.rand((), generator=generator) < 0.7 else x[:, :, place:]
            after = computed(method, edited, form, is_causal=True).output
            assert torch.equal(after[:, :, :place], before[:, :, :place])


@by_form
@by_causality
def test_nonfinite_numbers_reach_the_rows_that_see_them_and_no_others(form, is_causal) -> None:
    method, inputs = Window(6, 2), draw(41, dtype=torch.float32)
    clean = computed(method, inputs, form, is_causal=is_causal, key_padding_mask=KEEP).output
    seen = seen_pairs(method, 41, 41, is_causal, {"key_padding_mask": KEEP})
    for place in (0, 2, 9, 20, 40):
        for which in (1, 2):
            edited = [x.clone() for x in inputs]
            edited[which][:, :, place, 0] = NAN
            found = computed(method, edited, form, is_causal=is_causal, key_padding_mask=KEEP).output
            poisoned = seen[:, None, :, place].expand(-1, 4, -1)
            assert torch.equal(found.isnan().all(-1), poisoned)
            assert torch.equal(found[~poisoned], clean[~poisoned])


@by_form
def test_a_hidden_key_may_overflow(form) -> None:
    q, k, v = draw(41, dtype=torch.float32)
    k[:, :, 9] = 3e38
    hidden = torch.ones(2, 41, dtype=torch.bool)
    hidden[:, 9] = False
    found = computed(Window(20), [q * 4, k, v], form, is_causal=True, key_padding_mask=hidden).output
    assert bool(found.isfinite().all())


@by_form
@pytest.mark.parametrize("number", [NAN, INF])
def test_gradients_that_are_not_finite_are_not_lost(form, number) -> None:
    inputs = [x.requires_grad_() for x in draw(60)]
    output = computed(Window(5), inputs, form, is_causal=True).output
    cotangent = torch.ones_like(output)
    cotangent[0, 0, 30, 0] = number
    grads = torch.autograd.grad(output, inputs, cotangent)
    assert not bool(grads[0][0, 0, 30].isfinite().all())
    for grad in grads[1:]:
        assert not bool(grad[0, 0, 26:31].isfinite().all())
    assert bool(grads[0][1].isfinite().all())


@by_form
def test_a_poisoned_row_passes_no_gradient_on(form) -> None:
    inputs = draw(30)
    inputs[0][0, 0, 10, 0] = NAN
    inputs[1][1, 1, 20, 3] = INF
    inputs = [x.requires_grad_() for x in inputs]
    output = computed(Window(4, 1), inputs, form, is_causal=True).output
    dense = computed(Window(4, 1), inputs, "dense", is_causal=True).output
    cotangent = torch.ones_like(output)
    for a, b in zip(*(torch.autograd.grad(x, inputs, cotangent) for x in (output, dense)), strict=True):
        assert bool(a.isfinite().all())
        assert_close(a, b)


def test_gradients_of_some_inputs_are_those_of_all() -> None:
    for wanted in range(3):
        inputs = draw(60)
        inputs[wanted].requires_grad_()
        output = attention(*inputs, is_causal=True, enable_gqa=True, method=Window(7))
        (found,) = torch.autograd.grad(output.square().sum(), inputs[wanted])
        everything = [x.detach().requires_grad_() for x in inputs]
        output = attention(*everything, is_causal=True, enable_gqa=True, method=Window(7))
        assert_close(found, torch.autograd.grad(output.square().sum(), everything)[wanted])


@by_form
def test_sinks_without_weight_are_no_sinks(form) -> None:
    """A logit of -infinity, as in a head that has no learned sink."""
    sinks = torch.tensor([-INF, 0.5, -INF, -1.0], dtype=torch.float64)
    found = computed(Window(9, sink_logits=sinks), draw(), form, is_causal=True).output
    without = computed(Window(9), draw(), form, is_causal=True).output
    assert_close(found[:, [0, 2]], without[:, [0, 2]])
    assert not torch.allclose(found[:, [1, 3]], without[:, [1, 3]])


@needs_kernels
def test_rows_of_longer_calls_have_the_same_bits(one_thread) -> None:
    inputs = draw(600, d=16, e=16, dtype=torch.float32)
    whole = attention(*inputs, is_causal=True, enable_gqa=True, method=Window(30, 2))
    for length in (5, 255, 256, 257, 259, 513):
        part = attention(*(x[:, :, :length] for x in inputs), is_causal=True, enable_gqa=True, method=Window(30, 2))
        assert torch.equal(part, whole[:, :, :length])


def test_states_under_autocast_and_from_inference_mode() -> None:
    inputs, method = draw(40, dtype=torch.bfloat16), Window(9)
    first, rest = ([x[:, :, part] for x in inputs] for part in (slice(0, 30), slice(30, 40)))
    options = dict(is_causal=True, enable_gqa=True, method=method)
    with torch.autocast("cpu", torch.bfloat16):
        whole = attention(*inputs, **options)
        state = attention(*first, return_state=True, **options)[1]
        assert_close(attention(*rest, state=state, **options).float(), whole[:, :, 30:].float(), 1e-2)
    with torch.inference_mode():
        state = attention(*first, return_state=True, **options)[1]
    after, longer = attention(*rest, state=state, return_state=True, **options)
    assert longer.length == 40
    assert after.shape == (2, 4, 10, 5)
    Decoder(state, enable_gqa=True)(*(x[:, :, :1] for x in rest))


def test_a_decoder_checks_its_tokens() -> None:
    inputs = draw(20, dtype=torch.float32)
    state = attention(*inputs, is_causal=True, enable_gqa=True, method=Window(6), return_state=True)[1]
    token = [x[:, :, :1] for x in inputs]
    wrong = {
        "dtype": [x.double() for x in token], "width": [token[0][..., :3], token[1][..., :3], token[2]],
        "batch": [x[:1] for x in token], "values": [*token[:2], token[2][..., :1]],
    }  # fmt: skip
    for given in wrong.values():
        with pytest.raises(ValueError, match="state: expected"):
            Decoder(state, enable_gqa=True)(*given)
    shared = Decoder(state, enable_gqa=True)(token[0][:1], *token[1:])  # one query for both sequences
    wanted = attention(token[0][:1].expand(2, -1, -1, -1), *token[1:], is_causal=True, enable_gqa=True,
                       method=Window(6), state=state)  # fmt: skip
    assert_close(shared, wanted, 1e-6)
    shared = Decoder(state, enable_gqa=True)(*token[:2], token[2][:1])  # one value for both sequences
    wanted = attention(*token[:2], token[2][:1].expand(2, -1, -1, -1), is_causal=True, enable_gqa=True,
                       method=Window(6), state=state)  # fmt: skip
    assert_close(shared, wanted, 1e-6)


def test_hidden_keys_get_no_gradient() -> None:
    inputs = [x.requires_grad_() for x in draw()]
    output = attention(*inputs, is_causal=True, enable_gqa=True, method=Window(9, 2), key_padding_mask=KEEP)
    for grad in torch.autograd.grad(output.sum(), inputs[1:]):
        assert not bool(grad.transpose(1, 2)[~KEEP].any())


@needs_kernels
def test_rows_of_a_batch_and_threads_do_not_change_bits() -> None:
    inputs = [x.requires_grad_() for x in draw(700, d=16, e=16, dtype=torch.float32)]
    method, threads, found = Window(100, 4), torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(with_gradients(attention(*inputs, is_causal=True, enable_gqa=True, method=method), inputs))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    alone = attention(*(x[1:] for x in inputs), is_causal=True, enable_gqa=True, method=method)
    assert torch.equal(alone, found[0][0][1:])


def test_rows_without_keys_are_zero() -> None:
    inputs = [x.requires_grad_() for x in draw(20)]
    hidden = torch.zeros(2, 20, dtype=torch.bool)
    output = attention(*inputs, enable_gqa=True, method=Window(3), key_padding_mask=hidden)
    assert not bool(output.any())
    assert not any(bool(grad.any()) for grad in torch.autograd.grad(output.sum(), inputs))


@pytest.mark.parametrize(("n", "m"), [(0, 5), (5, 0), (0, 0)])
def test_empty_calls(n, m) -> None:
    inputs = [x.requires_grad_() for x in draw(n, m)]
    output = attention(*inputs, is_causal=True, enable_gqa=True, method=Window(3, 1))
    assert output.shape == (2, 4, n, 5)
    assert not bool(output.any())
    assert not any(bool(grad.any()) for grad in torch.autograd.grad(output.sum(), inputs))


def test_gradients_of_gradients() -> None:
    sinks = torch.tensor([0.1, 0.4], dtype=torch.float64, requires_grad=True)
    shapes = (1, 2, 5, 3), (1, 1, 5, 3), (1, 1, 5, 2)
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]

    def compute(q: Tensor, k: Tensor, v: Tensor, a: Tensor) -> Tensor:
        return attention(q, k, v, is_causal=True, enable_gqa=True, method=Window(3, 1, softcap=2.0, sink_logits=a))

    assert torch.autograd.gradcheck(compute, (*inputs, sinks))
    assert torch.autograd.gradgradcheck(compute, (*inputs, sinks))


def test_transforms_of_torch() -> None:
    q, k, v = torch.randn(3, 3, 2, 20, 8, dtype=torch.float64).unbind()
    compute = lambda q, k, v: attention(q, k, v, is_causal=True, method=Window(5, 1))
    whole = compute(q, k, v)
    assert_close(torch.func.vmap(compute)(q, k, v), whole)
    assert_close(torch.compile(compute)(q, k, v), whole)
    assert_close(torch.func.jvp(lambda x: compute(x, k, v), (q,), (q,))[0], whole)


REFUSED = {
    "size: expected an integer": lambda: Window(0),
    "sinks: expected an integer": lambda: Window(3, -1),
    "softcap: expected a positive number or None, got 0": lambda: Window(3, softcap=0),
    "sink_logits: expected one floating-point number per query head": lambda: Window(3, sink_logits=[1.0]),
    "sink_logits: expected one number for each of the 4 query heads, got 3": lambda: attention(
        *draw(), enable_gqa=True, method=Window(3, sink_logits=torch.zeros(3))
    ),
    "key: a window on both sides compares positions; expected 5 keys": lambda: attention(
        *draw(5, 9), enable_gqa=True, method=Window(3)
    ),
    "query: with a state, expected at most 1 queries": lambda: attention(
        *draw(3, 1),
        is_causal=True,
        enable_gqa=True,
        method=Window(4),
        state=attention(*draw(9), is_causal=True, enable_gqa=True, method=Window(4), return_state=True)[1],
    ),
    "dropout_p: expected 0": lambda: attention(*draw(), dropout_p=0.1, enable_gqa=True, method=Window(3)),
    "attn_mask: .* a choice for each pair": lambda: attention(
        *draw(), torch.eye(41, dtype=torch.bool), enable_gqa=True, method=Window(3)
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_is_refused_by_name(message) -> None:
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()


def test_other_methods_do_not_take_the_options_of_a_softmax() -> None:
    from subquad import Multipole, Taylor

    for kind in (Taylor, Multipole):
        for option in ("softcap", "sink_logits"):
            with pytest.raises(TypeError, match=option):
                kind(**{option: 1.0})


def test_labels_are_short() -> None:
    assert Window(64).label == "Window(64)"
    assert Window(64, 4, softcap=50.0, sink_logits=torch.zeros(2)).label == (
        "Window(64, sinks=4, softcap=50, sink_logits)"
    )
    assert Window(None).label == "Window(None)"


@pytest.mark.parametrize("method", [Window(None), Window(5), Multipole(window=4, sinks=2, block=2, top=2)])
def test_gradients_of_huge_logits_are_shares(method) -> None:
    """The backward pass of few queries computes the logits again in another order, and rounding exceeds their level."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(1, 2, 8, 16, generator=generator) for _ in range(3))
        q, k = 1e4 * q, 1e4 * k  # logits of 1e9, whose neighbors in float32 are 64 apart
        v.requires_grad_()
        outputs, state = [], None
        for piece in (slice(0, 3), slice(3, 5), slice(5, 8)):
            tokens = (x[:, :, piece] for x in (q, k, v))
            output, state = attention(*tokens, is_causal=True, method=method, state=state, return_state=True)
            outputs.append(output)
        (grad,) = torch.autograd.grad(torch.cat(outputs, 2).sum(), v)
        assert grad.isfinite().all() and float(grad.abs().max()) <= 8.001  # shares of 8 queries


def test_a_state_with_room_is_continued_three_times() -> None:
    """Only one continuation may write into the room of a state: none may see what another wrote."""
    method, (q, k, v) = Window(16), torch.randn(3, 1, 2, 40, 8, generator=torch.Generator().manual_seed(0))

    def follow(start: State | None, begin: int, end: int, shift: float = 0.0) -> tuple[Tensor, State]:
        tokens = (x[:, :, begin:end] + shift for x in (q, k, v))
        return attention(*tokens, is_causal=True, method=method, state=start, return_state=True)

    state = None
    for i in range(20):  # token by token, so that the buffers have room
        _, state = follow(state, i, i + 1)
    shifts = (0.0, 1.0, 2.0)
    states = [follow(state, 20, 21, shift)[1] for shift in shifts]
    for shift, own in zip(shifts, states, strict=True):
        found, _ = follow(own, 21, 22)
        tokens = [x[:, :, :22].clone() for x in (q, k, v)]
        for x in tokens:
            x[:, :, 20] += shift
        assert_close(found, attention(*tokens, is_causal=True, method=method)[:, :, 21:], 1e-6)


def test_sinks_may_come_after_hidden_keys() -> None:
    """While fewer than `sinks` keys are visible, the next visible ones become sinks, also without a mask."""
    method, inputs = Window(4, sinks=3), torch.randn(3, 1, 2, 30, 8, generator=torch.Generator().manual_seed(0))
    keep = torch.ones(1, 30, dtype=torch.bool)
    keep[:, :5] = False
    keep[:, 2] = True  # one visible key among the first six
    outputs, state = [], None
    for begin, end in pairwise((0, 6, 7, 8, 9, 10, 20, 30)):
        mask = keep[:, begin:end] if begin == 0 else None
        output, state = attention(*inputs[:, :, :, begin:end], is_causal=True, method=method, state=state,
                                  key_padding_mask=mask, return_state=True)  # fmt: skip
        outputs.append(output)
    whole = attention(*inputs, is_causal=True, method=method, key_padding_mask=keep)
    assert_close(torch.cat(outputs, 2), whole, 1e-6)
