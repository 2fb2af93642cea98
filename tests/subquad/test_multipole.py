"""Multipole: what it is, query by query; and that nothing else decides what a query gets.

The oracle is the definition, one query at a time, in float64. The moments of a block are tested by themselves.
"""

from math import log, sqrt

import pytest
import torch
from torch import Tensor

from calls import INF, NAN, attended, normal_inputs, relative, resumed, same_bits, with_gradients
from subquad import Exact, Multipole, attention, native
from subquad._engines.multipole.moments import main_directions, moments
from subquad.methods import multipole as settings
from subquad.planning.cost import cost_of
from subquad.planning.shape import Shape

SMALL = Multipole(window=5, sinks=2, block=4, top=2, rank=2)
METHODS = {
    "small": SMALL,
    "no sinks": Multipole(window=3, sinks=0, block=3, top=1, rank=1),
    "no moments": Multipole(window=1, sinks=1, block=2, top=3, rank=0),
    "nothing chosen": Multipole(window=4, sinks=3, block=5, top=0, rank=3),
    "default": Multipole(),
}
by_method = pytest.mark.parametrize("name", METHODS)
by_form = pytest.mark.parametrize("form", ["dense", "fused"])  # torch's operations, and the kernels


@pytest.fixture
def groups(monkeypatch) -> None:
    """Groups from 6 far blocks on, of 16 blocks, two of which are opened."""
    monkeypatch.setattr(settings, "GROUPED_FROM_BLOCKS", 6)
    monkeypatch.setattr(settings, "OPENED_GROUPS", 2)


def best(scores: list[float], count: int) -> set[int]:
    return set(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count])


def seen_by_one(method: Multipole, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """(e,): a scaled query (d,) that sees all of the keys (t, d)."""
    t = len(k)
    far = max(0, t - method.sinks - (method.window if is_causal else 0)) // method.block

    def units(size: int, first: int, last: int) -> list:
        """(likely most, weight, weight times value, blocks) of each."""
        found = []
        for u in range(first, last):
            keys = slice(method.sinks + u * size * method.block, method.sinks + (u + 1) * size * method.block)
            count = size * method.block
            centers, spread, means = (
                x[0] for x in moments(k[None, keys], v[None, keys], method.rank * (1 + (size > 1)))
            )
            mean, along = q @ centers[0], centers[1:] @ q
            pairs = torch.triu_indices(len(along), len(along))
            variance = (spread * along[pairs[0]] * along[pairs[1]]).sum().clamp(min=0)
            weight = count * (mean + variance.clamp(max=settings.MAX_VARIANCE) / 2).exp()
            value = weight * (means[0] + along @ means[1:])
            likely = mean.detach() + sqrt(2 * log(count)) * variance.detach().sqrt()
            found.append((float(likely), weight, value, u))
        return found

    total, output = q.new_zeros(()), v.new_zeros(v.shape[1])
    size = settings.group_size(far)
    blocks = units(1, 0, far)
    if size > 1:
        groups = units(size, 0, far // size)
        opened = best([x[0] for x in groups], settings.OPENED_GROUPS)
        for _, weight, value, u in groups:
            if u not in opened:
                total, output = total + weight, output + value
        blocks = [x for x in blocks if x[3] // size in opened or x[3] >= far // size * size]
    chosen = best([x[0] for x in blocks], method.top)
    exact = [*range(min(method.sinks, t)), *range(min(t, method.sinks + far * method.block), t)]
    for i, (_, weight, value, u) in enumerate(blocks):
        if i in chosen:
            exact += range(method.sinks + u * method.block, method.sinks + (u + 1) * method.block)
        else:
            total, output = total + weight, output + value
    weights = (k[exact] @ q).exp()
    return (output + weights @ v[exact]) / (total + weights.sum()) if t else output


def oracle(method: Multipole, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, keep: Tensor | None = None) -> Tensor:
    """(h, n, e) of q (h, n, d), k (key heads, m, d), v; keep (m,)."""
    shown = torch.ones(k.shape[1], dtype=torch.bool) if keep is None else keep
    group, rows = len(q) // len(k), []
    for h, head in enumerate(q):
        for i, row in enumerate(head):
            seen = shown & (torch.arange(len(shown)) <= i) if is_causal else shown
            rows.append(seen_by_one(method, row / sqrt(len(row)), k[h // group, seen], v[h // group, seen], is_causal))
    return torch.stack(rows).unflatten(0, q.shape[:2])


def inputs(n: int, m: int | None = None, group: int = 2, **options) -> list[Tensor]:
    q, _, _ = normal_inputs(2 * group, n=n, d=6, e=5, dtype=torch.float64, **options)
    return [q, *normal_inputs(2, n=n if m is None else m, d=6, e=5, dtype=torch.float64, seed=1, **options)[1:]]


@by_method
@by_form
@pytest.mark.parametrize("is_causal", [True, False])
def test_every_query_gets_what_the_definition_says(name, form, is_causal) -> None:
    for n, m in ((50, 50), (1, 1), (7, 40), (40, 7)):
        if is_causal and n != m:
            continue
        q, k, v = inputs(n, m, std=1.5)
        found = attended(METHODS[name], q, k, v, form=form, is_causal=is_causal)[0]
        torch.testing.assert_close(found, oracle(METHODS[name], q, k, v, is_causal), rtol=1e-9, atol=1e-9)


@by_form
@pytest.mark.parametrize("is_causal", [True, False])
def test_groups(form, is_causal, groups) -> None:
    q, k, v = inputs(230, std=1.5)
    found = attended(SMALL, q, k, v, form=form, is_causal=is_causal)[0]
    for i in (0, 40, 70, 120, 200, 229):
        seen = i + 1 if is_causal else 230
        for h in range(4):
            row = seen_by_one(SMALL, q[h, i] / sqrt(6), k[h // 2, :seen], v[h // 2, :seen], is_causal)
            torch.testing.assert_close(found[h, i], row, rtol=1e-9, atol=1e-9)


@by_form
@pytest.mark.parametrize(("name", "value"), [
    ("GROUPED_FROM_BLOCKS", 100), ("MIN_GROUP_BLOCKS", 8), ("OPENED_GROUPS", 1), ("MAX_VARIANCE", 0.1),
])  # fmt: skip
def test_constants_are_read_when_they_are_used(form, name, value, groups, monkeypatch) -> None:
    """By torch's operations, by the kernel, by a state that is resumed, and by the cost."""
    assert settings.MAX_VARIANCE == 4
    q, k, v = inputs(230, std=1.5)
    shape = Shape.of(query_length=230, head_dim=6, value_dim=5, heads=4, key_heads=2, is_causal=True)
    before, price = attended(SMALL, q, k, v, form=form)[0], cost_of(SMALL, shape, "fused")
    monkeypatch.setattr(settings, name, value)
    found = attended(SMALL, q, k, v, form=form)[0]
    assert relative(found, before) > 1e-6
    assert (cost_of(SMALL, shape, "fused").flops != price.flops) == (name != "MAX_VARIANCE")
    row = seen_by_one(SMALL, q[3, 229] / sqrt(6), k[1], v[1], True)
    torch.testing.assert_close(found[3, 229], row, rtol=1e-9, atol=1e-9)
    cut, _ = resumed(SMALL, q[None], k[None], v[None], pieces=[150, 1, 79], form=form)
    torch.testing.assert_close(cut[0], found, rtol=1e-9, atol=1e-9)


@by_method
@by_form
def test_hidden_keys_have_no_place(name, form) -> None:
    """Left padding, right padding and holes: as if the hidden keys had never been there."""
    q, k, v = inputs(50)
    for hidden in (range(13), range(40, 50), range(0, 50, 3)):
        keep = torch.ones(50, dtype=torch.bool)
        keep[list(hidden)] = False
        for is_causal in (True, False):
            for fill in (0.0, NAN):
                given = [q, *(torch.where(keep[:, None], x, fill) for x in (k, v))]
                found = attended(METHODS[name], *given, form=form, is_causal=is_causal, keep=keep)[0]
                expected = oracle(METHODS[name], q, k, v, is_causal, keep)
                torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@by_form
@pytest.mark.parametrize("is_causal", [True, False])
def test_segments_are_sequences_of_their_own(form, is_causal) -> None:
    q, k, v = (x[None] for x in inputs(60))
    segments = torch.tensor([3] * 25 + [4] + [3] * 20 + [9] * 14)[None]
    keep = torch.arange(60)[None] % 7 != 2
    found = attended(SMALL, q, k, v, form=form, is_causal=is_causal, keep=keep, segments=segments)[0]
    for part in torch.arange(60).split([25, 1, 20, 14]):
        alone = [x[:, :, part] for x in (q, k, v)]
        expected = attended(SMALL, *alone, form="dense", is_causal=is_causal, keep=keep[:, part])[0]
        torch.testing.assert_close(found[:, :, part], expected, rtol=1e-9, atol=1e-9)


@by_method
@by_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_future_changes_no_bit(name, form, dtype, groups) -> None:
    """Nor do other queries of the tile: each chooses for itself."""
    q, k, v = (x.to(dtype)[None] for x in inputs(150, std=1.5))
    before = attended(METHODS[name], q, k, v, form=form)[0]
    for place in (1, 37, 64, 100, 149):
        for edit in (3.0, 1e4, 3e38, NAN, INF):
            edited = [x.clone() for x in (q, k, v)]
            for x in edited:
                x[..., place:, :] = x[..., place:, :] * edit
            after = attended(METHODS[name], *edited, form=form)[0]
            past = after[..., :place, :], before[..., :place, :]
            if form == "fused" and native.available():
                assert torch.equal(*past), (place, edit)
            else:  # In torch rows share a product with the blocks that any of them chose: its order of sums may change.
                torch.testing.assert_close(*past, rtol=1e-5, atol=1e-5)


@by_form
def test_what_is_not_finite_reaches_the_rows_that_see_it(form) -> None:
    q, k, v = (x[None] for x in inputs(40))
    k[:, 0, 10], v[:, 1, 20], q[:, 3, 5] = NAN, INF, NAN
    found = attended(SMALL, q, k, v, form=form)[0].isnan().any(-1)[0]
    expected = torch.zeros(4, 40, dtype=torch.bool)
    expected[:2, 10:] = expected[2:, 20:] = expected[3, 5] = True
    assert torch.equal(found, expected)


@by_method
@by_form
def test_cut_anywhere_and_resumed(name, form, groups) -> None:
    q, k, v = (x[None] for x in inputs(120, std=1.5))
    keep = torch.arange(120)[None] % 9 != 0
    for given in (None, keep):
        whole = attended(METHODS[name], q, k, v, form="dense", keep=given)[0]
        for pieces in ([1] * 120, [50, 1, 1, 60, 8], [7, 113]):
            found, state = resumed(METHODS[name], q, k, v, pieces=pieces, keep=given, form=form)
            torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-9)
            assert state.length == 120


def test_segments_go_on_from_a_state() -> None:
    q, k, v = (x[None] for x in inputs(60))
    segments = torch.tensor([3] * 25 + [4] * 21 + [9] * 14)[None]
    whole = attended(SMALL, q, k, v, segments=segments)[0]
    for pieces in ([10, 50], [25, 35], [30, 5, 25], [60]):
        found, _ = resumed(SMALL, q, k, v, pieces=pieces, segments=segments)
        torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-9)


def test_two_calls_from_one_state_do_not_meet() -> None:
    q, k, v = (x[None] for x in inputs(40))
    _, state = attended(SMALL, q, k, v, return_state=True)
    steps = [[x[:, :, i : i + 1] + i for x in (q, k, v)] for i in range(12)]
    alone = []
    for own in (state.to("cpu"), state[torch.tensor([0])], state.detach()):
        outputs = []
        for step in steps:
            output, own = attended(SMALL, *step, state=own, return_state=True)
            outputs.append(output)
        alone.append(torch.cat(outputs, 2))
    assert torch.equal(alone[0], alone[1]) and torch.equal(alone[0], alone[2])
    first, second, third = state, state, state.detach()
    for i, step in enumerate(steps):  # In turn, from the same state, with different keys.
        output, first = attended(SMALL, *step, state=first, return_state=True)
        assert torch.equal(output, alone[0][:, :, i : i + 1])
        others = [x * 3 for x in step]
        output, second = attended(SMALL, *others, state=second, return_state=True)
        expected, third = attended(SMALL, *others, state=third, return_state=True)
        assert torch.equal(output, expected)


@pytest.mark.parametrize("segment", [None, 7])
def test_a_step_copies_nothing(segment) -> None:
    q, k, v = (x[None].float() for x in inputs(40))
    segments = [None if segment is None else torch.full((1, n), segment) for n in (40, 1)]
    _, state = attended(SMALL, q, k, v, segments=segments[0], return_state=True)
    step = (x[:, :, :1] for x in (q, k, v))
    _, after = attended(SMALL, *step, segments=segments[1], state=state, return_state=True)
    assert after.keys.data_ptr() == state.keys.data_ptr()


@by_method
def test_kernels_and_torch_agree(name, groups) -> None:
    for dtype, most in ((torch.float64, 1e-12), (torch.float32, 3e-6)):
        for n in (3, 200):
            q, k, v = (x.to(dtype)[None] for x in inputs(n, std=0.7))
            found, expected = (attended(METHODS[name], q, k, v, form=form)[0] for form in ("fused", "dense"))
            assert relative(found, expected) < most


@pytest.mark.parametrize("is_causal", [True, False])
def test_gradients(is_causal) -> None:
    """Of the definition, with the choice and the directions held fast; each is so for small enough changes."""
    given = [x.requires_grad_() for x in inputs(18, group=1, std=0.5)]
    keep = torch.arange(18) % 5 != 1

    def function(*x: Tensor) -> Tensor:
        return attended(SMALL, *x, is_causal=is_causal, keep=keep)[0]

    without = Multipole(window=5, sinks=2, block=4, top=2, rank=0)  # Directions turn with the keys; centers are exact.
    plain = lambda *x: attended(without, *x, is_causal=is_causal, keep=keep)[0]
    assert torch.autograd.gradcheck(plain, given)
    assert torch.autograd.gradgradcheck(plain, given)
    found = with_gradients(function, *given)
    expected = with_gradients(lambda *x: oracle(SMALL, *x, is_causal, keep), *given)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    assert not found[2][:, ~keep].any() and not found[3][:, ~keep].any()


def test_gradients_of_a_state() -> None:
    q, k, v = (x[None] for x in inputs(60, std=0.7))

    def whole(*x: Tensor) -> Tensor:
        return attended(SMALL, *x)[0]

    def cut(*x: Tensor) -> Tensor:
        return resumed(SMALL, *x, pieces=[20, 1, 30, 9])[0]

    for a, b in zip(with_gradients(cut, q, k, v), with_gradients(whole, q, k, v), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_more_heads_than_a_tile_has_rows() -> None:
    q, k, v = (x[None] for x in inputs(60, group=50))
    found, expected = (attended(SMALL, q, k, v, form=form)[0] for form in ("fused", "dense"))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_more_first_keys_than_there_are() -> None:
    method = Multipole(window=3, sinks=100, block=4, top=2, rank=1)
    for n in (1, 9, 70):
        q, k, v = (x[None] for x in inputs(n))
        expected = attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(attended(method, q, k, v)[0], expected, rtol=1e-9, atol=1e-9)


def test_equal_scores_are_chosen_in_order() -> None:
    q, k, v = (x[None] for x in inputs(90, 400, group=1))
    k[:], k[:, :, 40:44] = 0.0, q[:, :, :1]
    method = Multipole(window=1, sinks=0, block=4, top=4, rank=1)
    found, expected = (attended(method, q, k, v, form=form, is_causal=False)[0] for form in ("fused", "dense"))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found[0], oracle(method, q[0], k[0], v[0], False), rtol=1e-9, atol=1e-9)


def test_settings_far_beyond_the_sequence() -> None:
    q, k, v = (x[None] for x in inputs(20))
    expected = attention(q, k, v, is_causal=True, enable_gqa=True)
    for method in (
        Multipole(top=1 << 31),
        Multipole(block=1 << 24),
        Multipole(window=1 << 31),
        Multipole(sinks=1 << 31),
    ):
        torch.testing.assert_close(attended(method, q, k, v)[0], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("who", ["query", "all"])
def test_a_step_in_between_leaves_the_graph_alone(who) -> None:
    q, k, v = (x[None] for x in inputs(40))
    for x in (q,) if who == "query" else (q, k, v):
        x.requires_grad_()
    output, state = attended(SMALL, q, k, v, return_state=True)
    step = [x[:, :, :1] for x in (q, k, v)]
    with torch.no_grad():
        attended(SMALL, *step, state=state, return_state=True)
    more, _ = attended(SMALL, *step, state=state, return_state=True)
    (output.sum() + more.sum()).backward()
    assert q.grad.isfinite().all()


def test_from_inference_mode_to_the_world_outside() -> None:
    q, k, v = (x[None] for x in inputs(40))
    with torch.inference_mode():
        _, state = attended(SMALL, q, k, v, return_state=True)
    found = attended(SMALL, *(x[:, :, :1] for x in (q, k, v)), state=state, return_state=True)[0]
    assert found.isfinite().all()


def test_short_sequences_are_exact() -> None:
    q, k, v = (x[None].float() for x in inputs(132))
    for method in (Multipole(), Multipole(top=1000)):
        found = attention(q, k, v, is_causal=True, enable_gqa=True, method=method)
        expected = attention(q, k, v, is_causal=True, enable_gqa=True, method=Exact())
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_more_of_everything_is_nearer() -> None:
    q, k, v = normal_inputs(1, 4, n=2000, d=16, e=16, std=1.5)
    exact = attention(q, k, v, is_causal=True)
    errors = [relative(attention(q, k, v, is_causal=True, method=method), exact) for method in (
        Multipole(window=16, top=0, rank=0), Multipole(window=16, top=0, rank=2), Multipole(window=16, top=16, rank=2),
        Multipole(window=256, top=128, rank=4))]  # fmt: skip
    assert errors == sorted(errors, reverse=True) and errors[-1] < errors[0] / 3, errors


def test_large_logits_overflow_nothing() -> None:
    q, k, v = normal_inputs(1, 2, n=300, d=8, e=8, std=30.0)
    for method in METHODS.values():
        found = attention(q, k, v, is_causal=True, method=method)
        assert found.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype) -> None:
    q, k, v = (x[None].to(dtype) for x in inputs(90))
    found = attended(SMALL, q, k, v)[0]
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), attended(SMALL, q.float(), k.float(), v.float())[0], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("form", [None, "dense"])
def test_empty_and_single(form) -> None:
    for n, m in ((0, 0), (0, 5), (3, 0), (1, 1)):
        q, k, v = (x[None].requires_grad_() for x in inputs(n, m))
        found = attended(SMALL, q, k, v, form=form, is_causal=n == m)[0]
        assert found.shape == (1, 4, n, 5) and (m > 0 or not found.any())
        found.sum().backward()
    q, k, v = (x[None] for x in inputs(9))
    assert not attended(SMALL, q, k, v, form=form, keep=torch.zeros(1, 9, dtype=torch.bool))[0].any()


# --- The moments ------------------------------------------------------------------------------------------------------


def test_moments_of_a_block() -> None:
    _, k, v = inputs(40)
    k, v = k[:1], v[:1]
    centers, spread, means = moments(k, v, 5)
    places = (k[0] - k[0].mean(0)) @ centers[0, 1:].mT
    torch.testing.assert_close(centers[0, 1:] @ centers[0, 1:].mT, torch.eye(5, dtype=torch.float64))
    pairs = torch.triu_indices(5, 5)
    second = (places.mT @ places / 40)[pairs[0], pairs[1]] * torch.where(pairs[0] == pairs[1], 1.0, 2.0)
    torch.testing.assert_close(spread[0], second)
    torch.testing.assert_close(means[0, 1:], places.mT @ (v[0] - v[0].mean(0)) / 40)


def test_directions_hold_most_of_the_spread() -> None:
    offsets = normal_inputs(20, n=32, d=64, dtype=torch.float64)[1] * torch.logspace(0, -3, 64, dtype=torch.float64)
    found = main_directions(offsets, 4)
    most = torch.linalg.svdvals(offsets)[:, :4].square().sum(1)
    assert ((offsets @ found.mT).square().sum((1, 2)) / most > 0.9).all()


def test_fewer_directions_than_asked_for() -> None:
    line = torch.outer(torch.arange(8.0), torch.tensor([3.0, 4.0, 0.0]))[None]
    found = main_directions(line - line.mean(1, keepdim=True), 2)
    torch.testing.assert_close(found[0].abs(), torch.tensor([[0.6, 0.8, 0.0], [0.0, 0.0, 0.0]]))
    assert not main_directions(torch.zeros(1, 8, 3), 2).any()


def test_gaussian_logits_are_exact_on_average() -> None:
    """Of many keys that are Gaussian around a center: both the weight and the value."""
    d, n = 4, 200_000
    k, noise = (torch.randn(1, n, d, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in (0, 1))
    k = 0.5 * k + 1
    v = 0.3 * k + noise
    q = torch.tensor([0.8, -0.4, 0.5, 0.2], dtype=torch.float64)
    weights = (k[0] @ q).exp()
    method = Multipole(window=1, sinks=0, block=n, top=0, rank=4)
    found = seen_by_one(method, q, torch.cat([k[0], k[0, :1] - 100]), torch.cat([v[0], v[0, :1]]), True)
    torch.testing.assert_close(found, weights @ v[0] / weights.sum(), rtol=0.01, atol=0.005)


# --- Complaints -------------------------------------------------------------------------------------------------------


def test_settings_that_mean_nothing_are_refused() -> None:
    for name, value in (("window", 0), ("sinks", -1), ("block", 1), ("top", 2.5), ("rank", -1), ("block", True)):
        with pytest.raises(ValueError, match=f"^{name}: expected a whole number from"):
            Multipole(**{name: value})
    with pytest.raises(
        ValueError, match=r"^rank: the 4 keys of a block span fewer than 4 directions .*expected at most 3, got 4"
    ):
        Multipole(block=4, rank=4)


def test_what_it_cannot_do_is_refused() -> None:
    q, k, v = (x[None] for x in inputs(9, group=1))
    with pytest.raises(ValueError, match="dropout_p"):
        attention(q, k, v, dropout_p=0.1, method="multipole")
    with pytest.raises(ValueError, match="attn_mask"):
        attention(q, k, v, torch.ones(9, 9, dtype=torch.bool), method="multipole")
    _, state = attention(q, k, v, is_causal=True, method="multipole", return_state=True)
    with pytest.raises(ValueError, match="state: expected one made by"):
        attention(q, k, v, is_causal=True, method=SMALL, state=state)
    with pytest.raises(ValueError, match="state: expected"):
        attention(q, k, v[..., :4], is_causal=True, method="multipole", state=state)
    with pytest.raises(ValueError, match="state: expected"):
        attention(q[..., :4], k[..., :4], v, is_causal=True, method="multipole", state=state)
    with pytest.raises(ValueError, match=r"method: Multipole selects blocks from data, which torch\.func\.vmap hides"):
        torch.func.vmap(torch.func.grad(lambda q: attention(q, k[0], v[0], method="multipole").sum()))(q)
    assert torch.func.grad(lambda q: attention(q, k, v, method="multipole").sum())(q).shape == q.shape


def test_a_compiled_function_goes_around_it() -> None:
    q, k, v = (x[None] for x in inputs(60))
    around = lambda q, k, v: attention(q * 2, k, v, is_causal=True, enable_gqa=True, method=SMALL) + 1
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(around, backend="eager")(q, k, v), around(q, k, v))


def test_bits_do_not_depend_on_other_heads_or_threads() -> None:
    q, k, v = normal_inputs(2, 3, n=400, d=16, e=16, std=1.5)
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(attention(q, k, v, is_causal=True, method=Multipole()))
    torch.set_num_threads(before)
    assert all(same_bits(x, found[0]).all() for x in found)
    assert same_bits(
        attention(q[:1, :1], k[:1, :1], v[:1, :1], is_causal=True, method=Multipole()), found[0][:1, :1]
    ).all()
