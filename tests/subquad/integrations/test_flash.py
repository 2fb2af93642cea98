"""The functions of flash_attn against their documented meaning, in float64 and all pairs."""

import inspect
import itertools
import math

import pytest
import torch

import subquad
from subquad import Auto, BlockSparse, Linear, Multipole, RandomFeatures, Taylor, Window
from subquad.integrations.flash import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, rows

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = [(5, 5), (3, 7), (7, 3), (1, 6), (6, 1), (0, 4), (4, 0), (0, 0)]
WINDOWS = [(-1, -1), (2, 2), (3, 1), (0, 4), (-1, 1), (2, -1), (2, 0), (0, 0), (100, 100), (100, 1)]


# --- The meaning, as plainly as can be --------------------------------------------------------------------------------


def visible(n, m, causal, window):
    """Return (n, m): which keys a query sees, pair by pair."""
    seen = torch.zeros(n, m, dtype=torch.bool)
    for i in range(n):
        for j in range(m):
            place = i + m - n
            is_left = window[0] < 0 or j >= place - window[0]
            is_right = window[1] < 0 or j <= place + window[1]
            seen[i, j] = is_left and is_right and (not causal or j <= place)
    return seen


def reference(q, k, v, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, softmax_scale=None):
    """Return the output (b, n, h, e) and the log-sum-exp (b, h, n), from all pairs in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    (b, n, h, d), m = q.shape, k.shape[1]
    k, v = (x.repeat_interleave(h // x.shape[2], 2) for x in (k, v))
    logits = torch.einsum("bihd,bjhd->bhij", q, k) * (1 / math.sqrt(d) if softmax_scale is None else softmax_scale)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if alibi_slopes is not None:
        distance = torch.tensor([[abs(i + m - n - j) for j in range(m)] for i in range(n)]).reshape(n, m)
        logits = logits - alibi_slopes.double().expand(b, h)[..., None, None] * distance
    seen = visible(n, m, causal, window_size)
    weights = logits.exp() * seen
    total = weights.sum(-1, keepdim=True)
    output = torch.einsum("bhij,bjhe->bihe", weights / torch.where(total == 0, 1.0, total), v)
    return output, total[..., 0].log()


def inputs(n, m, heads=4, key_heads=2, batch=2, width=4, value_width=4, dtype=torch.float64):
    draw = torch.Generator().manual_seed(100 * n + m)
    shapes = (batch, n, heads, width), (batch, m, key_heads, width), (batch, m, key_heads, value_width)
    return [torch.randn(s, generator=draw, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def assert_same(found, expected, given, tolerance=1e-12):
    """Compare outputs, and gradients for all inputs that have elements."""
    assert found.shape == expected.shape
    assert torch.allclose(found.double(), expected, atol=tolerance, rtol=0)
    if found.numel():
        factor = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        gradients = [
            torch.autograd.grad(
                (out.double() * factor).sum(), given, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            for out in (found, expected)
        ]
        for own, other in zip(*gradients, strict=True):
            assert torch.allclose(own.double(), other.double(), atol=tolerance, rtol=0)


# --- flash_attn_func --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_masks(lengths, window, causal, softcap):
    given = inputs(*lengths)
    options = dict(causal=causal, window_size=window, softcap=softcap)
    assert_same(flash_attn_func(*given, **options), reference(*given, **options)[0], given)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (2, 1), (1, 4), (-1, 2), (3, -1)], ids=str)
def test_masks_where_rows_are_computed_in_several_parts(window, causal, monkeypatch):
    monkeypatch.setattr(rows, "MAX_ROWS", 3)
    for n, m in ((8, 8), (7, 11), (11, 7)):
        given = inputs(n, m)
        options = dict(causal=causal, window_size=window, alibi_slopes=torch.tensor([0.1, 0.2, 0.3, 0.4]))
        assert_same(flash_attn_func(*given, **options), reference(*given, **options)[0], given)
        del options["alibi_slopes"]
        assert_same(flash_attn_func(*given, **options), reference(*given, **options)[0], given)


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 2), (4, 1), (1, 1), (6, 3)])
@pytest.mark.parametrize("window", [(-1, -1), (2, 2), (3, 1)], ids=str)
def test_query_heads_share_key_heads(heads, key_heads, window):
    given = inputs(5, 5, heads, key_heads, value_width=3)
    assert_same(flash_attn_func(*given, window_size=window), reference(*given, window_size=window)[0], given)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("window", [(-1, -1), (2, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_the_scale_is_used(window, causal, softcap):
    given, options = inputs(4, 6), dict(window_size=window, causal=causal, softmax_scale=0.7, softcap=softcap)
    assert_same(flash_attn_func(*given, **options), reference(*given, **options)[0], given)


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("window", [(-1, -1), (2, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_alibi(lengths, causal, window, softcap):
    given = inputs(*lengths)
    for slopes in (torch.tensor([0.5, 0.25, 0.1, 2.0]), torch.rand(2, 4, generator=torch.Generator().manual_seed(0))):
        options = dict(causal=causal, window_size=window, softcap=softcap, alibi_slopes=slopes)
        assert_same(flash_attn_func(*given, **options), reference(*given, **options)[0], given)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_log_sum_exp(lengths, causal):
    given, options = inputs(*lengths), dict(causal=causal, window_size=(3, 2), softcap=1.5)
    output, lse, weights = flash_attn_func(*given, return_attn_probs=True, **options)
    expected, expected_lse = reference(*given, **options)
    assert_same(output, expected, given)
    assert weights is None
    assert torch.allclose(lse, expected_lse, atol=1e-12)  # -inf where no key is seen


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (30, 30), (9, 40)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype, window):
    given, options = inputs(70, 70, dtype=dtype), dict(window_size=window)
    found = flash_attn_func(*given, **options)
    assert found.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 5e-3}[dtype]
    assert_same(found, reference(*given, **options)[0], given, tolerance)
    lse = flash_attn_func(*given, return_attn_probs=True, **options)[1]
    assert lse.dtype == torch.float32


@pytest.mark.parametrize("options", [{}, dict(window_size=(2, 2)), dict(window_size=(3, 1))], ids=str)
def test_the_result_is_contiguous_and_ignores_autocast(options):
    given = inputs(5, 5, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = flash_attn_func(*given, **options)
    assert found.is_contiguous()
    assert torch.equal(found, flash_attn_func(*given, **options))


def watch_rows(monkeypatch):
    """Return a list to which the number of pairs of each group of rows will be added."""
    pairs, attend = [], rows._attend

    def watched(q, k, *rest):
        pairs.append(q[..., 0].numel() * k.shape[2])
        return attend(q, k, *rest)

    monkeypatch.setattr(rows, "_attend", watched)
    return pairs


def test_windows_are_computed_from_the_near_keys_alone(monkeypatch):
    pairs = watch_rows(monkeypatch)
    n = 4 * rows.MAX_ROWS
    flash_attn_func(*inputs(n, n, 1, 1, 1), window_size=(3, 7), alibi_slopes=torch.ones(1))
    assert 0 < sum(pairs) <= n * (rows.MAX_ROWS + 10)


def test_the_pairs_that_are_held_at_once_are_limited(monkeypatch):
    held = watch_rows(monkeypatch)
    monkeypatch.setattr(rows, "MAX_PAIRS", 2000)
    given = inputs(40, 40)
    slopes = torch.tensor([0.5, 0.25, 0.1, 2.0])
    assert_same(flash_attn_func(*given, alibi_slopes=slopes), reference(*given, alibi_slopes=slopes)[0], given)
    assert 0 < max(held) <= 2000


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("slopes", [None, torch.full((4,), 0.01)])
@pytest.mark.parametrize("n", [300, 200])
def test_dropout(n, slopes, causal):
    q, k, v = inputs(n, 300)
    options = dict(dropout_p=0.4, alibi_slopes=slopes, causal=causal)
    torch.manual_seed(0)
    found = flash_attn_func(q, k, torch.ones_like(v), **options)
    assert found.std() > 0.01
    assert abs(found.mean() - 1) < 0.01
    output = flash_attn_func(q, k, v, **options)
    (gradient,) = torch.autograd.grad(output.sum(), v)  # The output is linear in v: the same weights were dropped.
    assert torch.allclose((gradient * v).sum(), output.sum())


# --- Other methods ----------------------------------------------------------------------------------------------------

OTHERS = [Taylor(2), Linear("elu"), RandomFeatures(8), Multipole(window=3, sinks=1, block=2, top=1), Window(3, sinks=1)]


@pytest.mark.parametrize("method", OTHERS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_other_methods(method, causal):
    q, k, v = given = inputs(9, 9)
    expected = subquad.attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal, enable_gqa=True, method=method
    )
    assert_same(flash_attn_func(*given, causal=causal, method=method), expected.transpose(1, 2), given)


@pytest.mark.parametrize("method", OTHERS, ids=str)
def test_other_methods_are_aligned_to_the_last_key(method):
    q, k, v = given = inputs(9, 9)
    whole = flash_attn_func(*given, causal=True, method=method)
    for first in (0, 4, 8):  # fewer queries than keys
        found = flash_attn_func(q[:, first:], k, v, causal=True, method=method)
        assert_same(found, whole[:, first:], given, 1e-10)
    longer = flash_attn_func(torch.cat([q, q], 1), k, v, causal=True, method=method)
    expected = torch.cat([torch.zeros_like(whole), whole], 1)
    assert_same(longer, expected, given)


def test_auto_chooses_for_each_call():
    for n, m, causal in ((6, 6, True), (4, 6, False)):
        given = inputs(n, m)
        found = flash_attn_func(*given, causal=causal, method=Auto(max_error=1e-9))
        assert_same(found, reference(*given, causal=causal)[0], given, 1e-8)


def test_a_method_may_be_given_by_name():
    given = inputs(6, 6)
    found = flash_attn_func(*given, method="taylor")
    assert torch.equal(found, flash_attn_func(*given, method=Taylor()))
    assert not torch.allclose(found, flash_attn_func(*given))


# --- flash_attn_varlen_func -------------------------------------------------------------------------------------------

SIZES = [  # queries and keys of each sequence
    [(4, 4), (0, 0), (6, 6), (4, 4)],
    [(4, 4), (2, 5), (5, 2), (0, 3), (3, 0), (1, 6), (2, 5)],
    [(0, 3), (0, 0)],
    [],
]


def packed(sizes, padding=0, **shape):
    """Return q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k."""
    ends = [torch.tensor([0, *(size[i] for size in sizes)]).cumsum(0).to(torch.int32) for i in (0, 1)]
    q, k, v = inputs(int(ends[0][-1]) + padding, int(ends[1][-1]) + padding, batch=1, **shape)
    longest = [max((size[i] for size in sizes), default=0) for i in (0, 1)]
    return [x.detach()[0].requires_grad_() for x in (q, k, v)], *ends, *longest


def each_alone(given, ends_q, ends_k, slopes=None, **options):
    """Return the reference of every sequence, and 0 behind the last one."""
    q, k, v = given
    outputs, sums = [], []
    for b in range(len(ends_q) - 1):
        own, keys = slice(ends_q[b], ends_q[b + 1]), slice(ends_k[b], ends_k[b + 1])
        bias = {} if slopes is None else dict(alibi_slopes=slopes[b : b + 1] if slopes.dim() == 2 else slopes)
        output, lse = reference(q[None, own], k[None, keys], v[None, keys], **bias, **options)
        outputs.append(output[0])
        sums.append(lse[0])
    rest = q.shape[0] - sum(map(len, outputs))
    outputs.append(q.new_zeros(rest, q.shape[1], v.shape[2]))
    return torch.cat(outputs) + 0 * q.sum(), torch.cat([*sums, q.new_full((q.shape[1], rest), -math.inf)], 1)


@pytest.mark.parametrize("window", [(-1, -1), (2, 2), (3, 1), (1, 0)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_packed_sequences(sizes, padding, causal, window):
    given, *lengths = packed(sizes, padding, value_width=3)
    options = dict(causal=causal, window_size=window, softcap=2.0, softmax_scale=0.4)
    expected, expected_lse = each_alone(given, *lengths[:2], **options)
    assert_same(flash_attn_varlen_func(*given, *lengths, **options), expected, given)
    output, lse, _ = flash_attn_varlen_func(*given, *lengths, return_attn_probs=True, **options)
    assert_same(output, expected, given)
    assert torch.allclose(lse, expected_lse, atol=1e-12)


@pytest.mark.parametrize("sizes", SIZES[:2], ids=str)
def test_slopes_of_packed_sequences(sizes):
    given, *lengths = packed(sizes)
    for slopes in (torch.tensor([0.5, 0.25, 0.1, 2.0]), torch.rand(len(sizes), 4)):
        expected = each_alone(given, *lengths[:2], slopes=slopes)[0]
        assert_same(flash_attn_varlen_func(*given, *lengths, alibi_slopes=slopes), expected, given)


@pytest.mark.parametrize("method", OTHERS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_other_methods_see_each_packed_sequence_alone(method, causal):
    (q, k, v), *lengths = packed(SIZES[0])
    given, ends = (q, k, v), lengths[0]
    expected = torch.cat([
        flash_attn_func(*(x[None, a:b] for x in given), causal=causal, method=method)[0]
        for a, b in itertools.pairwise(ends)
    ])  # fmt: skip
    assert_same(flash_attn_varlen_func(*given, *lengths, causal=causal, method=method), expected, given)


def in_pages(x, ends, size):
    """Return pages (pages, size, ...) with the sequences of x in a scattered order, and their block table."""
    lengths = ends.diff().tolist()
    columns = max(1, *(math.ceil(length / size) for length in lengths))
    order = torch.randperm(len(lengths) * columns + 2, generator=torch.Generator().manual_seed(3))
    table = order[: len(lengths) * columns].reshape(len(lengths), columns)
    pages = torch.full((len(order), size, *x.shape[1:]), 100.0, dtype=x.dtype)
    for b, length in enumerate(lengths):
        for p in range(length):
            pages[table[b, p // size], p % size] = x[ends[b] + p]
    return pages, table.to(torch.int32)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_with_keys_in_pages(causal):
    (q, k, v), ends_q, ends_k, *longest = packed(SIZES[1])
    (keys, table), (values, _) = (in_pages(x.detach(), ends_k, 2) for x in (k, v))
    found = flash_attn_varlen_func(q, keys, values, ends_q, ends_k, *longest, causal=causal, block_table=table)
    assert torch.allclose(found, each_alone((q, k, v), ends_q, ends_k, causal=causal)[0], atol=1e-12)


# --- flash_attn_with_kvcache ------------------------------------------------------------------------------------------


def rotated(x, cos, sin, places, interleaved):
    """Rotate x (n, h, d), number by number."""
    half, result = cos.shape[1], x.clone()
    for i, place in enumerate(places):
        for r in range(half):
            a, b = (2 * r, 2 * r + 1) if interleaved else (r, r + half)
            result[i, :, a] = x[i, :, a] * cos[place, r] - x[i, :, b] * sin[place, r]
            result[i, :, b] = x[i, :, a] * sin[place, r] + x[i, :, b] * cos[place, r]
    return result


def cached_reference(q, k_cache, v_cache, new, lengths, rows, leftpad, rotary, interleaved, options):
    """Return the output, the log-sum-exp, and the caches afterwards: sequence by sequence, token by token."""
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    outputs, sums = [], []
    is_moving = options.get("causal", False) or options.get("window_size", (-1, -1)) != (-1, -1)
    for b, row in enumerate(rows):
        own, end = q[b], lengths[b]
        if new is not None:
            keys, t = new[0][b], new[0].shape[1]
            if rotary is not None:
                keys = rotated(keys, *rotary, [end + i for i in range(t)], interleaved)
                own = rotated(own, *rotary, [end + i * is_moving for i in range(len(own))], interleaved)
            for i in range(t):
                k_cache[row, end + i], v_cache[row, end + i] = keys[i], new[1][b, i]
            end += t
        slopes = options.get("alibi_slopes")
        bias = {} if slopes is None else dict(alibi_slopes=slopes[b : b + 1])
        span = slice(leftpad[b], end)
        others = {name: value for name, value in options.items() if name != "alibi_slopes"}
        output, lse = reference(own[None], k_cache[row, span][None], v_cache[row, span][None], **bias, **others)
        outputs.append(output)
        sums.append(lse)
    return torch.cat(outputs), torch.cat(sums), k_cache, v_cache


OPTIONS = [
    {}, dict(causal=True), dict(window_size=(2, 1)), dict(causal=True, window_size=(2, -1), softcap=2.0),
    dict(causal=True, softmax_scale=0.3, alibi_slopes=torch.rand(3, 4, generator=torch.Generator().manual_seed(0))),
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize("rotary_dim", [None, 4, 8])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("n", "t"), [(1, 1), (3, 3), (3, 1), (2, 4), (2, None)])
@pytest.mark.parametrize("where", ["in order", "by index"])
def test_cache(where, n, t, interleaved, rotary_dim, options):
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(3, n, 4, 8, generator=draw, dtype=torch.float64)
    k_cache, v_cache = torch.randn(2, 5, 12, 2, 8, generator=draw, dtype=torch.float64).unbind()
    new = None if t is None else torch.randn(2, 3, t, 2, 8, generator=draw, dtype=torch.float64).unbind()
    angles = torch.rand(12, (rotary_dim or 0) // 2, generator=draw, dtype=torch.float64) * 7
    rotary = None if rotary_dim is None or new is None else (angles.cos(), angles.sin())
    rows = [0, 1, 2] if where == "in order" else [4, 0, 3]
    for lengths, leftpad in (([5, 0, 8], None), ([5, 5, 5], None), ([5, 4, 8], [2, 0, 8]), ([6, 6, 6], [1, 1, 1])):
        pad = [0, 0, 0] if leftpad is None else leftpad
        expected = cached_reference(q, k_cache, v_cache, new, lengths, rows, pad, rotary, interleaved, options)
        keys, values = k_cache.clone(), v_cache.clone()
        found, lse = flash_attn_with_kvcache(
            q, keys, values, *(new or (None, None)), *(rotary or (None, None)),
            torch.tensor(lengths, dtype=torch.int32),
            None if where == "in order" else torch.tensor(rows, dtype=torch.int32),
            None if leftpad is None else torch.tensor(leftpad, dtype=torch.int32), rotary_interleaved=interleaved,
            return_softmax_lse=True, **options,
        )  # fmt: skip
        assert torch.allclose(found, expected[0], atol=1e-12)
        assert torch.allclose(lse, expected[1], atol=1e-12)
        assert torch.allclose(keys, expected[2], atol=1e-12)
        assert torch.equal(values, expected[3])
        assert found.is_contiguous()
        again = flash_attn_with_kvcache(
            q, k_cache.clone(), v_cache.clone(), *(new or (None, None)), *(rotary or (None, None)),
            torch.tensor(lengths), torch.tensor(rows), None if leftpad is None else torch.tensor(leftpad),
            rotary_interleaved=interleaved, **options,
        )  # fmt: skip
        assert torch.allclose(again, found, atol=1e-12)  # by other routes, as no log-sum-exp is needed


@pytest.mark.parametrize("options", OPTIONS[:4], ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize("t", [None, 3])
def test_cache_in_pages(t, options):
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(3, 2, 4, 8, generator=draw, dtype=torch.float64)
    k_cache, v_cache = torch.randn(2, 3, 12, 2, 8, generator=draw, dtype=torch.float64).unbind()
    new = None if t is None else torch.randn(2, 3, t, 2, 8, generator=draw, dtype=torch.float64).unbind()
    ends = torch.tensor([0, 12, 24, 36])
    (keys, table), (values, _) = (in_pages(x.flatten(0, 1), ends, 4) for x in (k_cache, v_cache))
    lengths = [5, 0, 8]
    expected = cached_reference(q, k_cache, v_cache, new, lengths, [0, 1, 2], [0, 0, 0], None, True, options)
    found = flash_attn_with_kvcache(
        q, keys, values, *(new or (None, None)), cache_seqlens=torch.tensor(lengths), block_table=table, **options
    )
    assert torch.allclose(found, expected[0], atol=1e-12)
    assert torch.equal(keys[table.long()].flatten(1, 2), expected[2])
    assert torch.equal(values[table.long()].flatten(1, 2), expected[3])


def test_lengths_of_a_cache_may_be_one_number_or_left_out():
    q, k_cache, v_cache = (x.detach() for x in inputs(2, 7))
    for length in (None, 7, 4, 0):
        found = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=length, causal=True)
        expected = reference(q, k_cache[:, :length], v_cache[:, :length], causal=True)[0]
        assert torch.allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize("method", ["exact", Taylor(2), Window(3)], ids=str)
def test_tokens_one_by_one_give_the_rows_of_a_causal_call(method):
    q, k, v = (x.detach() for x in inputs(6, 6))
    k_cache, v_cache = k.new_full((2, 2, 9, 2, 4), math.nan).unbind()  # What is not filled is not read.
    for i in range(6):
        token = [x[:, i : i + 1] for x in (q, k, v)]
        found = flash_attn_with_kvcache(
            token[0], k_cache, v_cache, *token[1:], cache_seqlens=i, causal=True, method=method
        )
        assert torch.allclose(found, flash_attn_func(q, k, v, causal=True, method=method)[:, i : i + 1], atol=1e-10)
    assert torch.equal(k_cache[:, :6], k)
    assert k_cache[:, 6:].isnan().all()


def test_a_cache_gives_no_gradients():
    q, k, v = inputs(2, 5)
    assert not flash_attn_with_kvcache(q, k, v, k[:, :1], v[:, :1], cache_seqlens=4).requires_grad
    assert k.grad_fn is None


# --- Signatures and refusals ------------------------------------------------------------------------------------------

SHARED = "dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 alibi_slopes=None"
SIGNATURES = {
    flash_attn_func: f"q k v {SHARED} deterministic=False return_attn_probs=False",
    flash_attn_varlen_func: "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "
    f"{SHARED} deterministic=False return_attn_probs=False block_table=None",
    flash_attn_with_kvcache: "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None "
    "cache_batch_idx=None cache_leftpad=None block_table=None softmax_scale=None causal=False window_size=(-1,-1) "
    "softcap=0.0 rotary_interleaved=True alibi_slopes=None num_splits=0 return_softmax_lse=False",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda function: function.__name__)
def test_signatures_are_those_of_flash_attn_and_a_method(function):
    *own, method = inspect.signature(function).parameters.values()
    empty = inspect.Parameter.empty
    shown = [p.name if p.default is empty else f"{p.name}={p.default}".replace(", ", ",") for p in own]
    assert " ".join(shown) == SIGNATURES[function]
    assert all(p.kind == p.POSITIONAL_OR_KEYWORD for p in own)
    assert (method.name, method.kind, method.default) == ("method", method.KEYWORD_ONLY, "exact")


SLOPES = torch.ones(4)
EYE = BlockSparse(torch.eye(2, dtype=torch.bool)[None])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(window_size=(2, 1), method="taylor"), r"window_size: expected \(-1, -1\) with Taylor.*method=\"exact\""),
        (dict(causal=True, window_size=(2, 0), method="linear"), r"window_size: .* got \(2, 0\)"),
        (dict(softcap=1.0, method="taylor"), r"softcap: expected 0.0 with Taylor.*got 1.0"),
        (dict(softcap=-1.0), r"softcap: expected 0.0 \(off\) or a positive number, got -1.0"),
        (dict(alibi_slopes=SLOPES, method="taylor"), "alibi_slopes: expected None with Taylor"),
        (dict(alibi_slopes=torch.ones(3)), r"alibi_slopes: .*\(4,\) or \(2, 4\), got torch.float32 of shape \(3,\)"),
        (dict(dropout_p=0.1, method="taylor"), "dropout_p: expected 0.0 with Taylor"),
        (dict(dropout_p=0.1, window_size=(2, 2)), r"dropout_p: .* together with window_size=\(2, 2\), got 0.1"),
        (dict(dropout_p=0.1, softcap=3.0), "dropout_p: expected 0.0 together with softcap=3.0, got 0.1"),
        (dict(dropout_p=0.1, return_attn_probs=True), "dropout_p: expected 0.0 together with return_attn_probs=True"),
        (dict(dropout_p=1.5), "dropout_p: expected a probability below 1, got 1.5"),
        (dict(return_attn_probs=True, method="taylor"), "return_attn_probs: expected False with Taylor"),
        (dict(window_size=3), r"window_size: expected two integers, \(left, right\), .*got 3"),
        (dict(window_size=(1.5, 2)), r"window_size: expected two integers.*got \(1.5, 2\)"),
        (dict(causal=True, method=Auto()), "causal: expected as many queries as keys with Auto.*got 4 and 6"),
        (dict(causal=True, method=EYE), "causal: expected as many queries as keys with BlockSparse.*got 4 and 6"),
        (dict(method=Window(2)), "method: expected as many queries as keys with Window.*got 4 and 6.*window_size"),
        (dict(method="flash"), "method: expected one of"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_arguments_that_cannot_be_honored_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        flash_attn_func(*inputs(4, 6), **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[0], k, v), r"q: expected shape \(batch, length, heads, width\), got \(4, 4, 4\)"),
        (lambda q, k, v: (q, k.float(), v), "k: expected torch.float64 on cpu, like q, got torch.float32"),
        (lambda q, k, v: (q.long(), k, v), "q: expected floating-point numbers, got torch.int64"),
        (
            lambda q, k, v: (q[:, :, :3], k, v),
            "k: expected width 4 and a number of heads that divides the 3 heads of q",
        ),
        (lambda q, k, v: (q, k[..., :3], v), r"k: expected width 4 .* got shape \(2, 6, 2, 3\)"),
        (lambda q, k, v: (q, k, v[:, 1:]), r"v: expected shape \(2, 6, 2, 'width'\), got \(2, 5, 2, 4\)"),
        (lambda q, k, v: (q[:1], k, v), "k: expected a batch of 1, like q, got 2"),
    ],
)
def test_shapes_are_checked(change, message):
    with pytest.raises(ValueError, match=message):
        flash_attn_func(*change(*inputs(4, 6)))


def test_a_list_is_not_a_tensor():
    q, k, _ = inputs(4, 6)
    with pytest.raises(TypeError, match="v: expected a tensor, got list"):
        flash_attn_func(q, k, [1.0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(cu_seqlens_q=torch.tensor([0, 5, 4])), r"cu_seqlens_q: expected numbers that grow.*got \[0, 5, 4\]"),
        (dict(cu_seqlens_q=torch.tensor([-1, 4, 10])), "cu_seqlens_q: expected numbers that grow from 0"),
        (dict(cu_seqlens_q=torch.tensor([0, 4, 11])), "cu_seqlens_q: expected numbers .* up to the 10 tokens"),
        (dict(cu_seqlens_k=torch.tensor([0, 10])), "cu_seqlens_k: expected 3 numbers, like cu_seqlens_q, got 2"),
        (dict(cu_seqlens_k=torch.tensor([0.0, 4.0, 10.0])), "cu_seqlens_k: expected a tensor of integers"),
        (dict(max_seqlen_q=5), "max_seqlen_q: expected at least 6, the longest sequence, got 5"),
        (dict(max_seqlen_k=5), "max_seqlen_k: expected at least 6, the longest sequence, got 5"),
        (dict(softcap=1.0, method="taylor"), "softcap: expected 0.0 with Taylor"),
    ],
)
def test_packed_arguments_are_checked(change, message):
    (q, k, v), ends, _, longest, _ = packed([(4, 4), (6, 6)])
    given = dict(cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=longest, max_seqlen_k=longest) | change
    with pytest.raises(ValueError, match=message):
        flash_attn_varlen_func(q, k, v, **given)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (torch.tensor([[0], [1]]), "block_table: expected pages for 6 keys, got 1 pages of 4; add columns"),
        (torch.tensor([[0, 1], [2, 9]]), "block_table: expected numbers from 0 to 3, got 2 to 9"),
        (torch.tensor([0, 1]), r"block_table: expected a tensor of integers of shape \(2, any\)"),
    ],
)
def test_block_tables_are_checked(table, message):
    (q, _, _), ends, _, *longest = packed([(4, 4), (6, 6)])
    pages = torch.zeros(4, 4, 2, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match=message):
        flash_attn_varlen_func(q, pages, pages, ends, ends, *longest, block_table=table)


NEW = torch.zeros(2, 1, 2, 4, dtype=torch.float64)
ONE = dict(k=NEW, v=NEW, cache_seqlens=1)
ANGLES = torch.zeros(9, 2)
PLACES = torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(k=NEW), "v: expected new keys and values together"),
        (dict(v=NEW), "k: expected new keys and values together"),
        (dict(k=NEW, v=NEW), "cache_seqlens: expected the filled length"),
        (dict(k=NEW[:1], v=NEW), r"k: expected torch.float64 of shape \(2, 1, 2, 4\), got .*\(1, 1, 2, 4\)"),
        (dict(k=NEW, v=NEW.float(), cache_seqlens=1), "v: expected torch.float64"),
        (dict(k=NEW, v=NEW, cache_seqlens=6), r"cache_seqlens: expected lengths from 0 to 5, .* got \[6, 6\]"),
        (dict(cache_seqlens=7), r"cache_seqlens: expected lengths from 0 to 6"),
        (dict(cache_seqlens=torch.tensor([-1, 2])), r"cache_seqlens: expected lengths from 0 to 6.*got \[-1, 2\]"),
        (dict(cache_seqlens=torch.tensor([1])), r"cache_seqlens: expected a tensor of integers of shape \(2\)"),
        (dict(cache_seqlens=4, cache_leftpad=torch.tensor([0, 5])), r"cache_leftpad: .* up to \[4, 4\], got"),
        (dict(cache_batch_idx=torch.tensor([0, 2])), r"cache_batch_idx: expected sequences 0 to 1.*got \[0, 2\]"),
        (dict(cache_batch_idx=PLACES, block_table=PLACES[:, None]), "cache_batch_idx: expected None with block_table"),
        (dict(rotary_cos=ANGLES, rotary_sin=ANGLES), "rotary_cos: expected None without new keys"),
        (dict(**ONE, rotary_cos=ANGLES), "rotary_sin: expected floating-point.*got None"),
        (dict(**ONE, rotary_cos=ANGLES, rotary_sin=ANGLES[:1]), r"rotary_sin: expected shape \(9, 2\)"),
        (dict(**ONE, rotary_cos=ANGLES[:1], rotary_sin=ANGLES[:1]), "rotary_cos: expected the angles of 2"),
        (dict(return_softmax_lse=True, method="taylor"), "return_softmax_lse: expected False with Taylor"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_arguments_of_a_cache_are_checked_before_it_is_written(options, message):
    q, k_cache, v_cache = (x.detach() for x in inputs(1, 6))
    before = k_cache.clone()
    with pytest.raises(ValueError, match=message):
        flash_attn_with_kvcache(q, k_cache, v_cache, **options)
    assert torch.equal(k_cache, before)


def test_the_batch_must_fit_into_the_cache():
    q, k_cache, v_cache = inputs(1, 6)
    with pytest.raises(ValueError, match="q: expected sequences 0 to 0"):
        flash_attn_with_kvcache(q, k_cache[:1], v_cache[:1])
    with pytest.raises(ValueError, match="q: expected at least one sequence"):
        flash_attn_with_kvcache(q[:0], k_cache, v_cache)
