"""The whole library against the reference in a few seconds: run it after every change.

Sizes are tiny and odd, chunks of two tokens, so that every border between chunks, waves and units is crossed.
"""

import pytest
import torch

from reference import METHODS, Squares, reference
from subquad import Exact, Linear, RandomFeatures, Separable, State, Taylor, attention
from subquad._calls.call import Call
from subquad._engines import run
from subquad._engines.features import choose_form as form_module

pytestmark = pytest.mark.filterwarnings("ignore:.*weights can be negative")  # Odd series are meant to be here.

B, H, N, D, E = 2, 2, 13, 4, 3
NAMES = [*METHODS]
KEEP = torch.tensor([[0, 0, 0, 1, 1, 0, 1, 1, 1, 1, 1, 0, 1], [1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 0]]).bool()
SEGMENTS = torch.tensor([[4, 4, 4, 4, 4, 7, 4, 4, 4, 4, 4, 4, 4], [1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 0, 0]])


def tensors(n: int = N, m: int = N, heads: int = H, key_heads: int = H, seed: int = 0, **kind) -> tuple:
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, heads, n, D), (B, key_heads, m, D), (B, key_heads, m, E)
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_(**kind) for s in shapes)


def in_form(form, method, q, k, v, is_causal=False, keep=None, segments=None, state=None, return_state=False, chunk=2):
    call = Call.of(q, k, v, is_causal=is_causal, key_padding_mask=keep, segment_ids=segments, state=state,
                   return_state=return_state)  # fmt: skip
    return run(method, call, form=form, chunk=chunk)[:2]


def assert_close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("keep", [None, KEEP], ids=["all", "padded"])
@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["whole", "packed"])
def test_every_form_means_the_same(name, is_causal, keep, segments) -> None:
    q, k, v = tensors(requires_grad=False)
    expected = reference(METHODS[name], q, k, v, is_causal, keep, segments).detach()
    for form in ("dense", "chunked"):
        output, _ = in_form(form, METHODS[name], q, k, v, is_causal, keep, segments)
        assert_close(output.detach(), expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_of_every_form(name, is_causal) -> None:
    inputs = tensors(requires_grad=True)
    cotangent = tensors(seed=1, requires_grad=False)[2]
    expected = torch.autograd.grad(
        reference(METHODS[name], *inputs, is_causal, KEEP, SEGMENTS), inputs, cotangent, materialize_grads=True
    )
    for form in ("dense", "chunked"):
        output, _ = in_form(form, METHODS[name], *inputs, is_causal, KEEP, SEGMENTS)
        for found, wanted in zip(torch.autograd.grad(output, inputs, cotangent), expected, strict=True):
            assert_close(found, wanted)


@pytest.mark.parametrize("name", [*NAMES, "exact"])
@pytest.mark.parametrize("masked", ["plain", "padded", "packed"])
def test_cut_anywhere_and_resumed_in_pieces_and_steps(name, masked) -> None:
    method = METHODS.get(name, Exact())
    q, k, v = tensors(requires_grad=False)
    keep, segments = KEEP if masked == "padded" else None, SEGMENTS if masked == "packed" else None
    expected = reference(method, q, k, v, True, keep, segments).detach()
    for sizes in ((5, 1, 6, 1), (1,) * N, (6, 7), (0, 12, 1)):
        state, outputs, start = None, [], 0
        for size in sizes:
            part = slice(start, start + size)
            start += size
            output, state = attention(
                q[:, :, part], k[:, :, part], v[:, :, part], is_causal=True, method=method, state=state,
                return_state=True, key_padding_mask=None if keep is None else keep[:, part],
                segment_ids=None if segments is None else segments[:, part],
            )  # fmt: skip
            outputs.append(output)
        assert state.length == N
        assert_close(torch.cat(outputs, -2).detach(), expected)


@pytest.mark.parametrize("name", [*NAMES, "exact"])
@pytest.mark.parametrize(("n", "m"), [(5, 9), (9, 5), (1, 7), (7, 1), (130, 150)])
def test_queries_and_keys_of_different_number(name, n, m) -> None:
    method = METHODS.get(name, Exact())
    q, k, v = tensors(n, m, requires_grad=False)
    for is_causal in (False, True):
        expected = reference(method, q, k, v, is_causal).detach()
        assert_close(attention(q, k, v, is_causal=is_causal, method=method).detach(), expected)
        output, state = attention(q, k, v, is_causal=is_causal, method=method, return_state=True)
        assert_close(output.detach(), expected)
        # With a state, the new keys are aligned to the new queries at their ends.
        q2, k2, v2 = tensors(4, 6, seed=2, requires_grad=False)
        for new_q, new_k, new_v in ((q2, k2, v2), (q2, k2[:, :, :2], v2[:, :, :2]), (q2, k2[:, :, :0], v2[:, :, :0])):
            resumed = attention(new_q, new_k, new_v, is_causal=is_causal, method=method, state=state)
            keys, values = torch.cat([k, new_k], 2), torch.cat([v, new_v], 2)
            assert_close(resumed.detach(), reference(method, new_q, keys, values, is_causal, past=m).detach())


@pytest.mark.parametrize("name", [*NAMES, "exact"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_grouped_heads_share_keys_and_states(name, is_causal) -> None:
    method = METHODS.get(name, Exact())
    q, k, v = tensors(heads=6, key_heads=2, requires_grad=False)
    keep = KEEP[:, None].expand(B, 2, N).clone()
    keep[:, 1] = True  # A mask for each key head.
    wide_k, wide_v = k.repeat_interleave(3, 1), v.repeat_interleave(3, 1)
    expected = torch.cat(
        [reference(method, q[:, i : i + 1], wide_k[:, i : i + 1], wide_v[:, i : i + 1], is_causal, keep[:, i // 3])
         for i in range(6)], 1
    ).detach()  # fmt: skip
    output, state = attention(
        q, k, v, is_causal=is_causal, enable_gqa=True, method=method, key_padding_mask=keep, return_state=True
    )
    assert_close(output.detach(), expected)
    assert (state.sums if state.sums is not None else state.keys).shape[:2] == (B, 2)
    per_query_head = keep.repeat_interleave(3, 1)[:, :, None, :]
    masked = attention(q, k, v, per_query_head, is_causal=is_causal, enable_gqa=True, method=method)
    assert_close(masked.detach(), expected)


@pytest.mark.parametrize("name", [*NAMES, "exact"])
def test_sizes_that_the_call_chooses_itself(name, monkeypatch) -> None:
    """Without a form given, over several chunks, and with so little cache that heads go one after another."""
    method = METHODS.get(name, Exact())
    q, k, v = tensors(150, 150, requires_grad=False)
    for is_causal in (False, True):
        expected = reference(method, q, k, v, is_causal).detach()
        assert_close(attention(q, k, v, is_causal=is_causal, method=method).detach(), expected)
        monkeypatch.setattr(form_module, "WAVE_TOKENS", 64)
        output, state = attention(q, k, v, is_causal=is_causal, method=method, return_state=True)
        assert_close(output.detach(), expected)
        again = attention(q[:, :, :1], k[:, :, :1], v[:, :, :1], is_causal=True, method=method, state=state)
        keys, values = torch.cat([k, k[:, :, :1]], 2), torch.cat([v, v[:, :, :1]], 2)
        assert_close(again.detach(), reference(method, q[:, :, :1], keys, values).detach())
        monkeypatch.undo()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("form", ["dense", "chunked"])
def test_what_is_not_finite_reaches_the_rows_that_see_it_and_no_other(name, form) -> None:
    q, k, v = tensors(requires_grad=False)
    for poison in (float("nan"), float("inf"), -float("inf")):
        for spoiled in (k, v):
            clean = in_form(form, METHODS[name], q, k, v, True, None, SEGMENTS)[0]
            kept, spoiled[1, 0, 5] = spoiled[1, 0, 5].clone(), poison
            output = in_form(form, METHODS[name], q, k, v, True, None, SEGMENTS)[0]
            sees = torch.zeros(B, H, N, dtype=torch.bool)
            sees[1, 0, 5:11] = True
            assert output[sees].isnan().all()
            assert torch.equal(output[~sees], clean[~sees])
            assert not in_form(form, METHODS[name], q, k, v, False, KEEP & (torch.arange(N) != 5))[0].isnan().any()
            spoiled[1, 0, 5] = kept
    _, state = in_form("chunked", METHODS[name], q * 1, k.index_fill(2, torch.tensor(3), float("nan")), v, True,
                       return_state=True)  # fmt: skip
    assert attention(q[:, :, :1], k[:, :, :1], v[:, :, :1], method=METHODS[name], state=state).isnan().all()


@pytest.mark.parametrize("name", [*NAMES, "exact"])
def test_nothing_to_see_is_zero_with_zero_gradient(name) -> None:
    method = METHODS.get(name, Exact())
    q, k, v = tensors(requires_grad=True)
    nothing = torch.zeros(B, N, dtype=torch.bool)
    output = attention(q, k, v, key_padding_mask=nothing, is_causal=True, method=method)
    assert torch.equal(output, torch.zeros_like(output))
    output.sum().backward()
    for tensor in (q, k, v):
        assert torch.equal(tensor.grad, torch.zeros_like(tensor))
    q, k, v = tensors(requires_grad=False)
    assert attention(q[:, :, :0], k, v, method=method).shape == (B, H, 0, E)
    assert torch.equal(attention(q, k[:, :, :0], v[:, :, :0], method=method), torch.zeros(B, H, N, E).double())
    assert attention(q[:0], k[:0], v[:0], is_causal=True, method=method).shape == (0, H, N, E)


def test_shapes_without_heads_and_with_many_batches() -> None:
    q, k, v = tensors(requires_grad=False)
    for method in (Taylor(2), Separable(), Exact()):
        whole = attention(q, k, v, is_causal=True, method=method)
        assert torch.equal(attention(q[0, 0], k[0, 0], v[0, 0], is_causal=True, method=method), whole[0, 0])
        assert attention(q[0], k[0], v[0], key_padding_mask=KEEP[0], method=method).shape == (H, N, E)
        deep = [x.reshape(1, B, 1, H, *x.shape[-2:]) for x in (q, k, v)]
        assert_close(attention(*deep, is_causal=True, method=method).reshape_as(whole), whole)
        broadcast = attention(q, k[:1], v[:1, :1], method=method)
        assert_close(broadcast, attention(q, k[:1].expand_as(k), v[:1, :1].expand_as(v), method=method))


def test_scale_is_that_of_the_logits() -> None:
    q, k, v = tensors(requires_grad=False)
    for name in NAMES:
        assert_close(
            attention(q, k, v, scale=0.3, method=METHODS[name]).detach(),
            reference(METHODS[name], q, k, v, scale=0.3).detach(),
        )
    assert_close(attention(q, k, v, scale=-0.3, method="taylor"), attention(-q, k, v, scale=0.3, method="taylor"))


def test_names_stand_for_methods() -> None:
    q, k, v = tensors(requires_grad=False)
    named = {
        "taylor": Taylor(2), "taylor:3": Taylor(3), "random": RandomFeatures(256), "random:16": RandomFeatures(16),
        "linear": Linear("elu"), "linear:identity": Linear("identity"), "separable": Separable(), "exact": Exact(),
    }  # fmt: skip
    for name, method in named.items():
        assert torch.equal(attention(q, k, v, method=name), attention(q, k, v, method=method))


def test_a_learned_map_learns() -> None:
    method = Squares()
    q, k, v = tensors(requires_grad=False)
    found = torch.autograd.grad(attention(q, k, v, is_causal=True, method=method).square().sum(), method.factor)
    wanted = torch.autograd.grad(reference(method, q, k, v, True).square().sum(), method.factor)
    assert_close(found[0], wanted[0])
    assert wanted[0].abs() > 1e-3


def test_states_are_reordered_moved_and_detached() -> None:
    q, k, v = tensors(requires_grad=True)
    for method in (Taylor(2), RandomFeatures(7), Separable(), Exact()):
        _, state = attention(q, k, v, is_causal=True, method=method, return_state=True, segment_ids=SEGMENTS)
        assert isinstance(state, State)
        assert state.nbytes > 0
        last = [x[:, :, -1:].detach() for x in (q, k, v)]
        ids = SEGMENTS[:, -1:]
        whole = attention(*last, method=method, state=state, segment_ids=ids)
        order = torch.tensor([1, 0, 1])
        picked = attention(*(x[order] for x in last), method=method, state=state[order], segment_ids=ids[order])
        assert_close(picked, whole[order])
        assert whole.requires_grad
        assert not attention(*last, method=method, state=state.detach().to("cpu"), segment_ids=ids).requires_grad


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_dense_in_several_blocks_and_chunks_in_one_unit(name, is_causal, monkeypatch) -> None:
    inputs = tensors(requires_grad=True)
    cotangent = tensors(seed=1, requires_grad=False)[2]
    expected = reference(METHODS[name], *inputs, is_causal, KEEP)
    wanted = torch.autograd.grad(expected, inputs, cotangent, materialize_grads=True)
    monkeypatch.setattr(form_module, "DENSE_PAIRS", 1)
    monkeypatch.setattr(form_module, "CHUNK_TOKENS", 4)
    output, _ = in_form("dense", METHODS[name], *inputs, is_causal, KEEP)
    assert_close(output.detach(), expected.detach())
    for a, b in zip(torch.autograd.grad(output, inputs, cotangent), wanted, strict=True):
        assert_close(a, b)
    monkeypatch.undo()
    q, k, v = tensors(192, 192, requires_grad=False)  # Three chunks side by side, with nothing before them.
    assert_close(
        in_form("chunked", METHODS[name], q, k, v, is_causal, chunk=64)[0].detach(),
        reference(METHODS[name], q, k, v, is_causal).detach(),
    )
    output, _ = attention(q, k, v, is_causal=is_causal, method=METHODS[name], return_state=True)
    assert_close(output.detach(), reference(METHODS[name], q, k, v, is_causal).detach())


@pytest.mark.parametrize("name", ["positive", "hyperbolic", "separable"])
def test_a_segment_does_not_drown_in_the_one_before_it(name) -> None:
    """The largest exponent that a row subtracts is one that it sees: each half of the keys has by far the smaller one
    for some method, and must give what it gives alone."""
    q, k, v = tensors(requires_grad=False)
    ids = (torch.arange(N) >= 6).long().expand(B, -1)
    for keys in (torch.cat([k[:, :, :6] + 1000, k[:, :, 6:]], 2), torch.cat([k[:, :, :6] * 0, k[:, :, 6:] * 60], 2)):
        alone = in_form("dense", METHODS[name], q[:, :, 6:], keys[:, :, 6:], v[:, :, 6:], True)[0]
        assert alone.any(-1).all()
        for form in ("dense", "chunked"):
            assert_close(in_form(form, METHODS[name], q, keys, v, True, None, ids)[0][:, :, 6:], alone)


def test_masks_of_few_dimensions() -> None:
    q, k, v = tensors(requires_grad=False)
    for method in (Taylor(2), Separable(), Exact()):
        expected = reference(method, q, k, v, False, KEEP[:1].expand(2, -1), scale=0.4)
        for mask in (KEEP[0], KEEP[:1], KEEP[None, None, :1]):
            assert_close(attention(q, k, v, mask, scale=0.4, method=method, return_state=True)[0], expected)
        assert_close(attention(q, k, v, scale=0.4, method=method, key_padding_mask=KEEP[0]), expected)
