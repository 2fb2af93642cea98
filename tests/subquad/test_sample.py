"""What a sample of rows shows, against all rows."""

import math
from functools import partial

import pytest
import torch

from calls import SAMPLE_LENGTH, SAMPLE_MASKS
from reference import METHODS
from subquad import Auto, Exact, attention, logit_range, measure_error
from subquad._calls.call import Call
from subquad.planning.rows import BLOCK_PAIRS, pick_rows, row_blocks

N, MASKS = SAMPLE_LENGTH, SAMPLE_MASKS
KEEP = MASKS["padded"]["key_padding_mask"]


def tensors(n: int = N, m: int = N, scale: float = 1.0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, n, 4), (2, 2, m, 4), (2, 2, m, 5)
    q, k, v = (torch.randn(s, generator=generator) for s in shapes)
    return q * scale, k, v


@pytest.mark.filterwarnings("ignore:.*weights can be negative")
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("mask", MASKS)
def test_all_rows_give_the_error_itself(name, mask) -> None:
    q, k, v = tensors()
    options = MASKS[mask] | dict(enable_gqa=True)
    exact = attention(q.double(), k.double(), v.double(), **options)
    output = attention(q.double(), k.double(), v.double(), method=METHODS[name], **options).detach()
    wanted = float((output - exact).norm() / exact.norm())
    found = measure_error(q.double(), k.double(), v.double(), rows=N, method=METHODS[name], **options)
    assert found.known_by == "sample"
    assert math.isclose(found.relative, wanted, rel_tol=1e-6)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_few_rows_come_near(is_causal) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 2000, 8, generator=generator).unbind()
    for factor in (0.3, 1.0, 2.0):
        whole = measure_error(q * factor, k, v, rows=2000, is_causal=is_causal, method="taylor").relative
        part = measure_error(q * factor, k, v, rows=100, is_causal=is_causal, method="taylor").relative
        assert math.isclose(part, whole, rel_tol=0.2)
        assert part == measure_error(q * factor, k, v, rows=100, is_causal=is_causal, method="taylor").relative


def test_rows_of_high_risk_are_all_taken() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, 1000, 8, generator=generator).unbind()
    q[0, 0, [17, 503, 998]] *= 50
    picked = pick_rows(Call.of(q, k, v), 40)
    assert {17, 503, 998} <= set(picked.places[0, 0, : picked.certain].tolist())
    assert math.isclose(float(picked.weights.sum()), 1000)
    assert len(set(picked.places.flatten().tolist())) == 40
    k[0, 0, 990] *= 50  # In a causal call only the rows from there on see it.
    q[0, 0, [17, 503, 998]] /= 50
    picked = pick_rows(Call.of(q, k, v, is_causal=True), 40)
    assert set(range(10)) <= set(picked.places[0, 0, : picked.certain].tolist())
    assert set(picked.places[0, 0, : picked.certain].tolist()) >= set(range(990, 1000))


def test_the_standard_error_tells_how_far_a_sample_is_off() -> None:
    off = []
    for seed in range(50):
        q, k, v = torch.randn(3, 1, 2, 600, 8, generator=torch.Generator().manual_seed(seed)).unbind()
        call = Call.of(q, k, v)
        picked = pick_rows(call, 40, seed)
        squares = v.square().sum(-1).double().transpose(0, 1)  # (b, g, n)
        total, doubt = picked.total(squares.gather(-1, picked.places))
        off.append((total - float(squares.sum())) / doubt)
    spread = torch.tensor(off)
    assert spread.abs().max() < 4
    assert 0.3 < float(spread.std()) < 1.5


@pytest.mark.parametrize("mask", MASKS)
def test_logits_stay_in_their_range(mask) -> None:
    q, k, _ = tensors()
    options = MASKS[mask]
    scale = options.get("scale", 0.5)
    logits = torch.matmul(q, k.repeat_interleave(2, 1).mT) * scale
    seen = torch.ones(2, 1, N, N, dtype=torch.bool)
    if options.get("is_causal"):
        seen = seen.tril()
    if mask in ("padded", "masked", "packed"):
        seen = seen & KEEP[:, None, None, :]
    if "segment_ids" in options:
        ids = options["segment_ids"]
        seen = seen & (ids[:, None, :, None] == ids[:, None, None, :])
    own = logits[seen.expand_as(logits)]
    low, high = logit_range(q, k, enable_gqa=True, **options)
    assert low <= own.min() and own.max() <= high
    sharp = logit_range(q, k, enable_gqa=True, rows=N, **options)
    torch.testing.assert_close(torch.tensor(sharp), torch.stack([own.min(), own.max()]))
    part = logit_range(q, k, enable_gqa=True, rows=8, **options)
    assert sharp[0] <= part[0] <= part[1] <= sharp[1]


def test_causality_makes_the_rigorous_range_smaller() -> None:
    q, k, _ = tensors()
    q[:, :, :-1] *= 0.01
    k = k.clone()
    k[:, :, -1] *= 100
    q[:, :, -1] = 0
    assert logit_range(q, k, is_causal=True, enable_gqa=True)[1] < 0.05 * logit_range(q, k, enable_gqa=True)[1]


def test_edges() -> None:
    q, k, v = tensors()
    assert measure_error(q, k, v, enable_gqa=True, method=Exact()).relative == 0
    assert measure_error(q[:, :, :0], k, v, enable_gqa=True, method="taylor").relative == 0
    assert measure_error(q, k[:, :, :0], v[:, :, :0], enable_gqa=True, method="taylor").relative == 0
    assert logit_range(q, k[:, :, :0], enable_gqa=True) == (0.0, 0.0)
    bare = measure_error(q[0, 0], k[0, 0], v[0, 0], rows=N, method="taylor")
    assert bare == measure_error(q[:1, :1], k[:1, :1], v[:1, :1], rows=N, method="taylor")
    nothing_seen = torch.zeros(2, N, dtype=torch.bool)
    assert measure_error(q, k, v, enable_gqa=True, key_padding_mask=nothing_seen, method="taylor").relative == 0
    bad = v.clone()
    bad[0, 0, 3, 0] = math.nan
    assert measure_error(q, k, bad, enable_gqa=True, method="taylor").worse_than_zeros
    with pytest.raises(ValueError, match="rows: expected a positive integer"):
        measure_error(q, k, v, enable_gqa=True, rows=0, method="taylor")
    with pytest.raises(ValueError, match=r"attn_mask: got shape .* a choice for each pair"):
        measure_error(q, k, v, torch.ones(N, N).bool().triu(), enable_gqa=True, method="taylor")
    causal = measure_error(q, k, v, torch.ones(N, N).bool().tril(), enable_gqa=True, rows=N, method="taylor")
    flagged = measure_error(q, k, v, is_causal=True, enable_gqa=True, rows=N, method="taylor")
    assert causal.relative == pytest.approx(flagged.relative, rel=1e-6)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_is_no_tensor_is_named(place) -> None:
    q, k, v = torch.randn(3, 1, 2, 8, 4).unbind()
    given = [q, k, v]
    given[place] = "text"
    name = ("query", "key", "value")[place]
    for function in (partial(measure_error, method="taylor"), Auto().choose):
        with pytest.raises(TypeError, match=f"{name}: expected a tensor, got str"):
            function(*given)
    if place < 2:
        with pytest.raises(TypeError, match=f"{name}: expected a tensor, got str"):
            logit_range(*given[:2])


def test_memory_stays_small_at_long_lengths() -> None:
    """Blocks of rows hold no more weights than they should, whatever the lengths."""
    q, k, v = torch.randn(3, 1, 8, 20_000, 4).unbind()
    for rows in (64, 1000):
        call = Call.of(q, k, v, is_causal=True)
        for wide in (1, 4):
            for block in row_blocks(call, pick_rows(call, rows), wide):
                assert block.seen.numel() * wide <= max(BLOCK_PAIRS, 20_000 * wide)


def test_what_is_not_a_number_is_not_dropped() -> None:
    q, k, _ = tensors()
    q[0, 0, 3, 0] = math.nan
    assert all(map(math.isnan, logit_range(q, k, enable_gqa=True, rows=N)))
    assert all(map(math.isnan, logit_range(q, k, enable_gqa=True)))
    tiny = logit_range(tensors()[0] * 1e-24, k, enable_gqa=True, scale=1e24)
    assert tiny[1] > 1
