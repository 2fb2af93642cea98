"""Multipole: what it is, query by query; and that nothing else decides what a query gets.

The oracle is the definition, one query at a time, in float64. How a segment is sorted is tested in test_bisection.py.
"""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from math import log, sqrt
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from calls import INF, NAN, attended, normal_inputs, relative, resumed, same_bits, with_gradients
from subquad import Decoder, Exact, Multipole, attention, native
from subquad._calls.call import Call
from subquad._engines import run
from subquad._engines.multipole.bisection import like_order
from subquad.methods import multipole as settings
from subquad.planning.cost import cost_of
from subquad.planning.shape import Shape

SMALL = Multipole(window=5, sinks=2, block=2, top=2)
METHODS = {
    "small": SMALL,
    "no sinks": Multipole(window=3, sinks=0, block=3, top=1),
    "many sinks": Multipole(window=1, sinks=19, block=2, top=5),
    "nothing chosen": Multipole(window=4, sinks=3, block=2, top=0),
    "default": Multipole(),
}
by_method = pytest.mark.parametrize("name", METHODS)
by_form = pytest.mark.parametrize("form", ["dense", "fused"])  # torch's operations, and the kernels
needs_kernels = pytest.mark.skipif(not native.available(), reason="the native kernels are not available")


@pytest.fixture
def groups(monkeypatch) -> None:
    """From 3 segments on, only two are opened."""
    monkeypatch.setattr(settings, "GROUPED_FROM_SEGMENTS", 3)
    monkeypatch.setattr(settings, "OPENED_SEGMENTS", 2)


@dataclass(frozen=True)
class Unit:
    """Keys (t, d) that are seen by their moments, or read. The moments are computed once, for all queries."""

    keys: Tensor
    values: Tensor

    @cached_property
    def center(self) -> Tensor:
        return self.keys.mean(0)

    @cached_property
    def variance(self) -> Tensor:
        """Of the keys, per dimension."""
        return (self.keys - self.center).square().mean()

    @cached_property
    def mean_value(self) -> Tensor:
        return self.values.mean(0)

    def likely_most(self, q: Tensor) -> float:
        deviation = q.detach().norm() * self.variance.detach().sqrt()
        return float(q.detach() @ self.center.detach() + sqrt(2 * log(len(self.keys))) * deviation)

    def look(self, q: Tensor) -> float:
        """The largest logit, with the query and the offsets of the keys in 8 bits."""
        query_scale, scale = q.abs().max() / 127, (self.keys - self.center).abs().max() / 127
        coarse = (q / query_scale).round()
        found = ((self.keys - self.center) / scale).round() if scale > 0 else 0 * self.keys
        return float(q @ self.center + (found @ coarse).max() * query_scale * scale)

    def weighed(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """The weight, and the weight times the value."""
        variance = q.square().sum() * self.variance
        weight = len(self.keys) * (q @ self.center + variance.clamp(max=settings.MAX_VARIANCE) / 2).exp()
        return weight, weight * self.mean_value


class Segment(NamedTuple):
    whole: Unit
    blocks: list[Unit]


def segments_of(method: Multipole, k: Tensor, v: Tensor) -> list[Segment]:
    """The segments of keys (t, d)."""
    found = []
    for start in range(method.sinks, len(k) - method.segment + 1, method.segment):
        own, values = k[start : start + method.segment], v[start : start + method.segment]
        order = like_order(own.detach()[None], method.block)[0]
        blocks = [Unit(own[part], values[part]) for part in order.split(method.block)]
        found.append(Segment(Unit(own[order], values[order]), blocks))
    return found


def best(scores: list[float], count: int) -> set[int]:
    return set(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count])


def seen_by_one(method: Multipole, q: Tensor, k: Tensor, v: Tensor, segments: list[Segment]) -> Tensor:
    """(e,): a scaled query (d,) that sees all of the keys (t, d), whose segments are given."""
    t = len(k)
    far = max(0, t - method.sinks - method.window) // method.segment
    total, output = q.new_zeros(()), v.new_zeros(v.shape[1])
    blocks = []
    opened = set(range(far))
    if far >= settings.GROUPED_FROM_SEGMENTS:
        opened = best([segment.whole.likely_most(q) for segment in segments[:far]], settings.OPENED_SEGMENTS)
    for i, segment in enumerate(segments[:far]):
        if i in opened:
            blocks += segment.blocks
        else:
            weight, value = segment.whole.weighed(q)
            total, output = total + weight, output + value
    looked = sorted(best([block.likely_most(q) for block in blocks], method.looks))
    with torch.no_grad():
        chosen = {looked[i] for i in best([blocks[i].look(q) for i in looked], method.top)}
    near = min(t, method.sinks + far * method.segment)
    keys, values = [k[: min(method.sinks, t)], k[near:]], [v[: min(method.sinks, t)], v[near:]]
    for i, block in enumerate(blocks):
        if i in chosen:
            keys.append(block.keys)
            values.append(block.values)
        else:
            weight, value = block.weighed(q)
            total, output = total + weight, output + value
    weights = (torch.cat(keys) @ q).exp()
    return (output + weights @ torch.cat(values)) / (total + weights.sum()) if t else output


def oracle(method: Multipole, q: Tensor, k: Tensor, v: Tensor, is_causal: bool, keep: Tensor | None = None) -> Tensor:
    """(h, n, e) of q (h, n, d), k (key heads, m, d), v; keep (m,)."""
    shown = torch.ones(k.shape[1], dtype=torch.bool) if keep is None else keep
    group, rows = len(q) // len(k), []
    for h, head in enumerate(q):
        own_k, own_v = k[h // group, shown], v[h // group, shown]
        segments = segments_of(method, own_k, own_v)
        for i, row in enumerate(head):
            sees = int(shown[: i + 1].sum()) if is_causal else len(own_k)
            rows.append(seen_by_one(method, row / sqrt(len(row)), own_k[:sees], own_v[:sees], segments))
    return torch.stack(rows).unflatten(0, q.shape[:2])


def inputs(n: int, m: int | None = None, group: int = 2, **options) -> list[Tensor]:
    q, _, _ = normal_inputs(2 * group, n=n, d=6, e=5, dtype=torch.float64, **options)
    return [q, *normal_inputs(2, n=n if m is None else m, d=6, e=5, dtype=torch.float64, seed=1, **options)[1:]]


@lru_cache
def defined(name: str, n: int, m: int, is_causal: bool) -> Tensor:
    """What the definition says, for both forms."""
    return oracle(METHODS[name], *inputs(n, m, std=1.5), is_causal)


@by_method
@by_form
@pytest.mark.parametrize("is_causal", [True, False])
def test_every_query_gets_what_the_definition_says(name, form, is_causal) -> None:
    for n, m in ((110, 110), (1, 1), (7, 100), (100, 7)):
        if is_causal and n != m:
            continue
        found = attended(METHODS[name], *inputs(n, m, std=1.5), form=form, is_causal=is_causal)[0]
        torch.testing.assert_close(found, defined(name, n, m, is_causal), rtol=1e-9, atol=1e-9)


@by_form
@pytest.mark.parametrize("is_causal", [True, False])
def test_groups(form, is_causal, groups) -> None:
    q, k, v = inputs(230, std=1.5)
    found = attended(SMALL, q, k, v, form=form, is_causal=is_causal)[0]
    expected = (
        oracle(SMALL, q[:, -3:], k, v, is_causal=False) if not is_causal else oracle(SMALL, q, k, v, True)[:, -3:]
    )
    torch.testing.assert_close(found[:, -3:], expected, rtol=1e-9, atol=1e-9)


@by_form
@pytest.mark.parametrize(("name", "value"), [
    ("GROUPED_FROM_SEGMENTS", 100), ("OPENED_SEGMENTS", 1), ("MAX_VARIANCE", 0.01), ("LOOKS_PER_READ", 1),
])  # fmt: skip
def test_constants_are_read_when_they_are_used(form, name, value, groups, monkeypatch) -> None:
    """By torch's operations, by the kernel, by a state that is resumed, and by the cost."""
    q, k, v = inputs(230, std=1.5)
    shape = Shape.of(query_length=230, head_dim=6, value_dim=5, heads=4, key_heads=2, is_causal=True)
    before, price = attended(SMALL, q, k, v, form=form)[0], cost_of(SMALL, shape, "fused")
    monkeypatch.setattr(settings, name, value)
    found = attended(SMALL, q, k, v, form=form)[0]
    assert relative(found, before) > 1e-6
    assert (cost_of(SMALL, shape, "fused").flops != price.flops) == (name != "MAX_VARIANCE")
    expected = oracle(SMALL, q[3:, 229:], k[1:], v[1:], is_causal=False)
    torch.testing.assert_close(found[3, 229], expected[0, 0], rtol=1e-9, atol=1e-9)
    cut, _ = resumed(SMALL, q[None], k[None], v[None], pieces=[150, 1, 79], form=form)
    torch.testing.assert_close(cut[0], found, rtol=1e-9, atol=1e-9)


@lru_cache
def without(hidden: range, name: str) -> tuple[Tensor, dict[bool, Tensor]]:
    """Which of 90 keys are left; and what the definition says, causal or not."""
    keep = torch.ones(90, dtype=torch.bool)
    keep[list(hidden)] = False
    return keep, {is_causal: oracle(METHODS[name], *inputs(90), is_causal, keep) for is_causal in (True, False)}


@by_method
@by_form
def test_hidden_keys_have_no_place(name, form) -> None:
    """Left padding, right padding and holes: as if the hidden keys had never been there."""
    q, k, v = inputs(90)
    for hidden in (range(13), range(80, 90), range(0, 90, 5)):
        keep, expected = without(hidden, name)
        for is_causal in (True, False):
            for fill in (0.0, NAN):
                given = [q, *(torch.where(keep[:, None], x, fill) for x in (k, v))]
                found = attended(METHODS[name], *given, form=form, is_causal=is_causal, keep=keep)[0]
                torch.testing.assert_close(found, expected[is_causal], rtol=1e-9, atol=1e-9)


@by_form
@pytest.mark.parametrize("is_causal", [True, False])
def test_segments_are_sequences_of_their_own(form, is_causal) -> None:
    q, k, v = (x[None] for x in inputs(180))
    segments = torch.tensor([3] * 75 + [4] + [3] * 60 + [9] * 44)[None]
    keep = torch.arange(180)[None] % 7 != 2
    found = attended(SMALL, q, k, v, form=form, is_causal=is_causal, keep=keep, segments=segments)[0]
    for part in torch.arange(180).split([75, 1, 60, 44]):
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
    q, k, v = (x[None] for x in inputs(180))
    segments = torch.tensor([3] * 75 + [4] * 61 + [9] * 44)[None]
    whole = attended(SMALL, q, k, v, segments=segments)[0]
    for pieces in ([30, 150], [75, 105], [90, 15, 75], [50, 1, 1, 128], [75, 1, 1, 103], [180]):
        found, _ = resumed(SMALL, q, k, v, pieces=pieces, segments=segments)
        torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-9)


def test_two_calls_from_one_state_do_not_meet() -> None:
    q, k, v = (x[None] for x in inputs(64))
    _, state = attended(SMALL, q, k, v, return_state=True)
    steps = [[x[:, :, i : i + 1] + i for x in (q, k, v)] for i in range(40)]
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


@by_form
def test_more_queries_than_new_keys(form) -> None:
    """After a state they are aligned at the end: the first ones see only keys of the state."""
    q, k, v = (x[None] for x in inputs(60))
    _, state = attended(SMALL, *(x[:, :, :50] for x in (q, k, v)), return_state=True)
    new = [x[:, :, 50:53] for x in (k, v)]
    found, _ = attended(SMALL, q[:, :, :5], *new, state=state, form=form)
    none = [x[:, :, :0] for x in (k, v)]
    before, _ = attended(SMALL, q[:, :, :2], *none, state=state, form=form, is_causal=False)
    after, _ = attended(SMALL, q[:, :, 2:5], *new, state=state, form=form)
    torch.testing.assert_close(found, torch.cat([before, after], 2), rtol=1e-9, atol=1e-9)


@needs_kernels
def test_a_step_copies_nothing() -> None:
    """Not even when it finishes a segment: those before are shared."""
    q, k, v = (x[None].float() for x in inputs(120))
    _, state = attended(SMALL, *(x[:, :, :80] for x in (q, k, v)), return_state=True)
    pages, raw, shared = state.parts[6:], state.parts[3], 0
    for i in range(80, 120):
        _, state = attended(SMALL, *(x[:, :, i : i + 1] for x in (q, k, v)), state=state, return_state=True)
        shared += state.parts[3].data_ptr() == raw.data_ptr()
    assert 10 < shared < 40  # until a segment is finished, which leaves the old state its own raw keys
    assert len(state.parts[6:]) > len(pages)
    assert all(new.data_ptr() == old.data_ptr() for new, old in zip(state.parts[6:], pages, strict=False))


def test_a_state_is_little_larger_than_its_keys() -> None:
    q, k, v = normal_inputs(1, 1, n=4000, d=64, e=64)
    _, state = attention(q, k, v, is_causal=True, method="multipole", return_state=True)
    assert k.nbytes + v.nbytes < state.nbytes < 1.3 * (k.nbytes + v.nbytes)


@pytest.mark.parametrize(
    ("dtype", "e", "scale", "is_direct"),
    [
        (torch.float32, 16, None, True),
        (torch.float64, 32, -1.0, True),
        (torch.float32, 16, 1.5, False),
        (torch.float32, 16, -1.5, False),
        (torch.float32, 5, None, False),
        (torch.bfloat16, 16, None, False),
    ],
)
def test_a_decoder_continues_the_sequence(dtype, e, scale, is_direct, groups) -> None:
    """Through finished segments, with tokens that the kernel takes as they are and others."""
    q, _, _ = normal_inputs(1, 4, n=130, d=6, dtype=dtype)
    _, k, v = normal_inputs(1, 2, n=130, d=6, e=e, dtype=dtype, seed=1)
    options = dict(is_causal=True, enable_gqa=True, scale=scale, method=SMALL)
    expected = attention(*(x.double() for x in (q, k, v)), **options)
    _, state = attention(*(x[:, :, :40] for x in (q, k, v)), return_state=True, **options)
    decoder, outputs, states = Decoder(state, scale=scale, enable_gqa=True), [], []
    for i in range(40, 130):
        outputs.append(decoder(*(x[:, :, i : i + 1] for x in (q, k, v))))
        states.append(decoder.state)
    assert outputs[0].dtype == dtype
    assert (decoder._steps is not None) == (is_direct and native.available())
    tolerance = {torch.float32: 1e-4, torch.float64: 1e-9, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(torch.cat(outputs, 2).double(), expected[:, :, 40:], rtol=tolerance, atol=tolerance)
    assert [state.length for state in states] == list(range(41, 131))
    for i in (41, 77, 100):  # A state is a copy: what the decoder did since has not changed it.
        rest = attention(*(x[:, :, i:] for x in (q, k, v)), state=states[i - 41], **options)
        torch.testing.assert_close(rest.double(), expected[:, :, i:], rtol=tolerance, atol=tolerance)


@needs_kernels
def test_an_old_state_outlives_the_steps_after_it() -> None:
    q, k, v = (x[None] for x in inputs(200, std=1.5))
    _, old = attended(SMALL, *(x[:, :, :100] for x in (q, k, v)), return_state=True)
    step = [x[:, :, 100:101] for x in (q, k, v)]
    first, state = attended(SMALL, *step, state=old, return_state=True)
    for i in range(101, 200):
        _, state = attended(SMALL, *(x[:, :, i : i + 1] for x in (q, k, v)), state=state, return_state=True)
    again, _ = attended(SMALL, *step, state=old, return_state=True)
    assert torch.equal(first, again)


def test_steps_may_change_their_query_heads() -> None:
    """What the steps share is prepared for a number of heads."""
    q, k, v = (x[None].float() for x in inputs(100, group=4))
    _, state = attended(SMALL, q, k, v, return_state=True)
    step = [x[:, :, :1] for x in (q, k, v)]
    for heads in (8, 2, 8):
        found, after = attended(SMALL, step[0][:, :heads], *step[1:], state=state, return_state=True)
        expected, _ = attended(SMALL, step[0][:, :heads], *step[1:], state=state.detach(), return_state=True)
        torch.testing.assert_close(found, expected)
        state = after


def test_beams_may_be_slices() -> None:
    q, k, v = normal_inputs(6, 1, n=90, d=8, e=8)
    keep = torch.arange(90) >= torch.tensor([0, 20, 3, 50, 9, 70])[:, None]
    _, state = attended(SMALL, q, k, v, keep=keep, return_state=True)
    step = [x[::2, :, :1] for x in (q, k, v)]
    slices, chosen = (
        attended(SMALL, *step, state=state[index])[0] for index in (slice(0, 6, 2), torch.tensor([0, 2, 4]))
    )
    torch.testing.assert_close(slices, chosen)


def test_a_state_can_be_copied_and_pickled_after_steps() -> None:
    q, k, v = (x[None] for x in inputs(100))
    _, state = attended(SMALL, q, k, v, return_state=True)
    step = [x[:, :, :1] for x in (q, k, v)]
    _, state = attended(SMALL, *step, state=state, return_state=True)
    copies = [copy.deepcopy(state), pickle.loads(pickle.dumps(state))]
    expected, _ = attended(SMALL, *step, state=state, return_state=True)
    for own in copies:
        assert torch.equal(attended(SMALL, *step, state=own, return_state=True)[0], expected)


def test_threads_may_continue_one_state() -> None:
    q, k, v = (x[None] for x in inputs(100))
    _, state = attended(SMALL, q, k, v, return_state=True)

    def decode(seed: int) -> Tensor:
        own, outputs = state, []
        for i in range(30):
            step = [x[:, :, i : i + 1] + seed for x in (q, k, v)]
            output, own = attended(SMALL, *step, state=own, return_state=True)
            outputs.append(output)
        return torch.cat(outputs, 2)

    expected = [decode(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(decode, range(4)))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_gradients_reach_every_part_of_a_state() -> None:
    """Sinks alone, values alone, and after a step without gradients."""
    for n, who in ((2, "k"), (30, "v"), (60, "v")):
        q, k, v = (x[None] for x in inputs(n))
        (k if who == "k" else v).requires_grad_()
        _, state = attended(SMALL, q, k, v, return_state=True)
        step = [x[:, :, :1].detach() for x in (q, k, v)]
        with torch.no_grad():
            _, state = attended(SMALL, *step, state=state.detach() if n == 2 else state, return_state=True)
        _, state = attended(SMALL, q, k, v, return_state=True)
        assert attended(SMALL, *step, state=state, return_state=True)[0].requires_grad


def test_future_values_leave_no_trace_in_gradients() -> None:
    q, k, v = (x[None].float().requires_grad_() for x in inputs(150))
    huge = torch.where(torch.arange(150)[:, None] > 100, 1e38, v)
    attended(SMALL, q, k, huge)[0][:, :, :100].sum().backward()
    assert q.grad[:, :, :100].isfinite().all()


def test_many_gradients_at_once() -> None:
    q, k, v = (x[None].requires_grad_() for x in inputs(80))
    output = attended(SMALL, q, k, v)[0]
    many = torch.stack([torch.ones_like(output), output.detach()])
    found = torch.autograd.grad(output, (q, k, v), many, is_grads_batched=True, retain_graph=True)
    for i in range(2):
        for a, b in zip(found, torch.autograd.grad(output, (q, k, v), many[i], retain_graph=True), strict=True):
            torch.testing.assert_close(a[i], b, rtol=1e-9, atol=1e-9)


@by_form
def test_a_state_is_read_without_a_new_key(form) -> None:
    """As in cross-attention; and keys without queries make a state."""
    q, k, v = (x[None] for x in inputs(120))
    _, state = attended(SMALL, q[:, :, :0], k, v, form=form, return_state=True)
    found, _ = attended(SMALL, q, k[:, :, :0], v[:, :, :0], form=form, is_causal=False, state=state)
    torch.testing.assert_close(found, attended(SMALL, q, k, v, form=form, is_causal=False)[0], rtol=1e-9, atol=1e-9)


def _output(method: Multipole, form: str | None, options: dict, *inputs: Tensor) -> Tensor:
    return attended(method, *inputs, form=form, **options)[0]


@needs_kernels
@pytest.mark.parametrize("is_causal", [True, False])
def test_gradients_of_the_kernels(is_causal, groups) -> None:
    for name, method in METHODS.items():
        q, k, v = (x[None] for x in inputs(150, std=0.8))
        keep = torch.arange(150)[None] % 9 != 1
        for given in (None, keep):
            options = dict(is_causal=is_causal, keep=given)
            found, expected = (
                with_gradients(partial(_output, method, form, options), q, k, v) for form in (None, "dense")
            )
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=name)


@needs_kernels
def test_gradients_are_those_of_exact_attention_where_everything_is_read() -> None:
    q, k, v = (x[None].float() for x in inputs(300))
    method = Multipole(window=3, sinks=1, block=4, top=1000)
    exact = lambda *x: attention(*x, is_causal=True, enable_gqa=True)
    for a, b in zip(
        with_gradients(lambda *x: attended(method, *x)[0], q, k, v), with_gradients(exact, q, k, v), strict=True
    ):
        assert relative(a, b) < 2e-6


@by_method
def test_kernels_and_torch_agree(name, groups) -> None:
    for dtype, most in ((torch.float64, 1e-12), (torch.float32, 3e-6)):
        for n in (3, 200):
            q, k, v = (x.to(dtype)[None] for x in inputs(n, std=0.7))
            found, expected = (attended(METHODS[name], q, k, v, form=form)[0] for form in ("fused", "dense"))
            assert relative(found, expected) < most


@by_form
@pytest.mark.parametrize("is_causal", [True, False])
def test_gradients(form, is_causal) -> None:
    """Of the definition, with order and choice held fast; each is so for small enough changes."""
    method = Multipole(window=2, sinks=1, block=2, top=1)
    given = [x.requires_grad_() for x in inputs(42, group=1, std=0.5)]
    given = [x[:1, :, :3].detach().requires_grad_() for x in given]
    keep = torch.arange(42) % 9 != 1

    def function(*x: Tensor) -> Tensor:
        return attended(method, *x, form=form, is_causal=is_causal, keep=keep)[0]

    assert torch.autograd.gradcheck(function, given, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, given, fast_mode=True)
    found = with_gradients(function, *given)
    expected = with_gradients(lambda *x: oracle(method, *x, is_causal, keep), *given)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    assert not found[2][:, ~keep].any() and not found[3][:, ~keep].any()


def test_gradients_of_a_state() -> None:
    q, k, v = (x[None] for x in inputs(120, std=0.7))

    def whole(*x: Tensor) -> Tensor:
        return attended(SMALL, *x)[0]

    def cut(*x: Tensor) -> Tensor:
        return resumed(SMALL, *x, pieces=[60, 1, 40, 19])[0]

    for a, b in zip(with_gradients(cut, q, k, v), with_gradients(whole, q, k, v), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_more_heads_than_a_tile_has_rows() -> None:
    q, k, v = (x[None] for x in inputs(100, group=50))
    found, expected = (attended(SMALL, q, k, v, form=form)[0] for form in ("fused", "dense"))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_more_first_keys_than_there_are() -> None:
    method = Multipole(window=3, sinks=100, block=4, top=2)
    for n in (1, 9, 70):
        q, k, v = (x[None] for x in inputs(n))
        expected = attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(attended(method, q, k, v)[0], expected, rtol=1e-9, atol=1e-9)


def test_equal_scores_are_chosen_in_order() -> None:
    q, k, v = (x[None] for x in inputs(90, 400, group=1))
    k[:], k[:, :, 40:44] = 0.0, q[:, :, :1]
    method = Multipole(window=1, sinks=0, block=4, top=4)
    found, expected = (attended(method, q, k, v, form=form, is_causal=False)[0] for form in ("fused", "dense"))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found[0], oracle(method, q[0], k[0], v[0], False), rtol=1e-9, atol=1e-9)


def test_settings_far_beyond_the_sequence() -> None:
    q, k, v = (x[None] for x in inputs(20))
    expected = attention(q, k, v, is_causal=True, enable_gqa=True)
    for method in (
        Multipole(top=1 << 31),
        Multipole(window=1 << 31),
        Multipole(sinks=1024),
    ):
        torch.testing.assert_close(attended(method, q, k, v)[0], expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(resumed(method, q, k, v, pieces=[10] + [1] * 10)[0], expected, rtol=1e-9, atol=1e-9)


@needs_kernels
def test_a_window_that_is_longer_than_the_sequence_grows() -> None:
    q, k, v = (x[None] for x in inputs(700))
    method = Multipole(window=10_000)
    expected = attention(q, k, v, is_causal=True, enable_gqa=True)
    found, state = resumed(method, q, k, v, pieces=[10] + [1] * 690)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert state.nbytes < 3 * (k.nbytes + v.nbytes) * 16 / 5  # values of width 5 are padded to 16


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
        Multipole(window=16, top=0), Multipole(window=16, top=4), Multipole(window=16, top=16),
        Multipole(window=256, top=128))]  # fmt: skip
    assert errors == sorted(errors, reverse=True) and errors[-1] < errors[0] / 3, errors


@needs_kernels
def test_large_logits_overflow_nothing() -> None:
    """Looks in 8 bits are then off by more than exp can bear, in both directions."""
    for std in (10.0, 100.0, 1e4):
        for d in (8, 64):
            q, k, v = normal_inputs(1, 2, n=300, d=d, e=8, std=std, dtype=torch.float64)
            for method in METHODS.values():
                found, expected = (attended(method, q, k, v / std, form=form)[0] for form in ("fused", "dense"))
                torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_a_width_of_zero_gives_the_mean_of_the_values() -> None:
    q, v = torch.zeros(1, 1, 100, 0), normal_inputs(1, 1, n=100, e=16)[2]
    found = attended(SMALL, q, q, v)[0]
    torch.testing.assert_close(found, v.cumsum(2) / torch.arange(1, 101)[:, None])


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


# --- Complaints -------------------------------------------------------------------------------------------------------


def test_settings_that_mean_nothing_are_refused() -> None:
    for name, value in (("window", 0), ("sinks", -1), ("block", 1), ("top", 2.5), ("block", True)):
        with pytest.raises(ValueError, match=f"^{name}: expected an integer from"):
            Multipole(**{name: value})
    for name, most in (("block", 16), ("sinks", 1024)):
        with pytest.raises(ValueError, match=f"^{name}: expected an integer up to {most:,}, got {most + 1:,}"):
            Multipole(**{name: most + 1})


def test_what_it_cannot_do_is_refused() -> None:
    q, k, v = (x[None] for x in inputs(9, group=1))
    with pytest.raises(ValueError, match="dropout_p"):
        attention(q, k, v, dropout_p=0.1, method="multipole")
    with pytest.raises(ValueError, match="attn_mask"):
        attention(q, k, v, torch.eye(9, dtype=torch.bool), method="multipole")
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
    q, k, v = (x[None] for x in inputs(100))
    around = lambda q, k, v: attention(q * 2, k, v, is_causal=True, enable_gqa=True, method=SMALL) + 1
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(around, backend="eager")(q, k, v), around(q, k, v))


def test_bits_do_not_depend_on_other_heads_or_threads() -> None:
    q, k, v = normal_inputs(2, 3, n=700, d=16, e=16, std=1.5)
    method = Multipole(top=2)
    function = lambda *x: attention(*x, is_causal=True, method=method)
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append([function(q, k, v), *with_gradients(function, q, k, v)])
    torch.set_num_threads(before)
    for others in found[1:]:
        assert all(same_bits(x, y).all() for x, y in zip(others, found[0], strict=True))
    alone = [x[:1, :1] for x in (q, k, v)]
    assert same_bits(function(*alone), found[0][0][:1, :1]).all()


@pytest.mark.parametrize("form", ["dense", None])
def test_no_edit_of_the_future_changes_a_bit_of_the_past(form):
    """Neither in the kernels nor in torch's operations, where rows of a tile once shared the order of their sums."""
    methods = [Multipole(window=8, block=4, top=2), Multipole(window=16, sinks=0, block=8, top=3)]
    for seed in range(24):
        generator, dtype = torch.Generator().manual_seed(seed), [torch.float32, torch.float64][seed % 2]
        n = [100, 200, 300][seed % 3]
        past = int(torch.randint(1, n, (), generator=generator))
        inputs = [torch.randn(2, heads, n, 20, generator=generator, dtype=dtype) for heads in (4, 2, 2)]
        changed = [x.clone() for x in inputs]
        for x in changed:
            x[..., past:, :] = torch.nan if seed % 5 == 0 else torch.randn(x[..., past:, :].shape, generator=generator)
        outputs = []
        for given in (inputs, changed):
            call = Call.of(*given, is_causal=True, enable_gqa=True)
            outputs.append(run(methods[seed % 2], call, form).output[..., :past, :])
        assert torch.equal(*outputs), seed
