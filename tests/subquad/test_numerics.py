"""Where linear attention goes wrong elsewhere, and that it does not here.

Most sections hold the faulty formula as a small function beside a check: the check must reject the formula before its
word on the library counts for anything.

Axes: b batch, h heads, n queries, m keys, d width, e value width, r features.
"""

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from subquad import Exact, Linear, RandomFeatures, Separable, State, Taylor, attention
from subquad._attention import attend

NAN, INF = float("nan"), float("inf")


class Squares:
    """A user's own map: positive, and with a log-scale of its own."""

    positive = True

    def size(self, width: int) -> int:
        return width + 1

    def __call__(self, x: Tensor, *, is_query: bool) -> tuple[Tensor, Tensor]:
        return F.pad(x.square(), (1, 0), value=0.1), x.sum(-1) / 4


def odd_taylor(degree: int) -> Taylor:
    with pytest.warns(UserWarning, match="weights can be negative"):
        return Taylor(degree)


METHODS = {
    "taylor": Taylor(2),
    "odd taylor": odd_taylor(3),
    "positive": RandomFeatures(16),
    "hyperbolic": RandomFeatures(16, "hyperbolic"),
    "trigonometric": RandomFeatures(16, "trigonometric"),
    "identity": Linear(),
    "elu": Linear("elu"),
    "relu": Linear("relu"),
    "separable": Separable(),
    "own map": Squares(),
}
POSITIVE = [name for name, method in METHODS.items() if method.positive]
# Their normaliser can vanish, and what is divided by it then is rounding: inputs near zero keep it away from that.
UNSURE = ("odd taylor", "trigonometric")
RANDOM = [name for name, method in METHODS.items() if isinstance(method, RandomFeatures)]

by_method = pytest.mark.parametrize("name", METHODS)
by_causal_form = pytest.mark.parametrize("form", ["dense", "chunked"])


pytestmark = pytest.mark.usefixtures("one_thread")


def normal(*shape: int, seed: int = 0, std: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(std).to(dtype)


def normal_inputs(*batch: int, n: int, m: int | None = None, d: int = 4, e: int = 3, **options) -> list[Tensor]:
    lengths, widths = (n, n if m is None else m, n if m is None else m), (d, d, e)
    seed = options.pop("seed", 0)
    shapes = zip(lengths, widths, strict=True)
    return [normal(*batch, *shape, seed=3 * seed + i, **options) for i, shape in enumerate(shapes)]


def attended(
    method,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    form: str | None = None,
    chunk: int | None = None,
    is_causal: bool = True,
    keep: Tensor | None = None,
    segments: Tensor | None = None,
    state: State | None = None,
    return_state: bool = False,
) -> tuple[Tensor, State | None]:
    """The output and the state, in the form of the test's choice; query heads share key heads where there are fewer."""
    grouped = q.dim() > 2 and q.shape[-3] != k.shape[-3]
    return attend(
        q, k, v, None, 0.0, is_causal, None, grouped, method, keep, segments, state, return_state, form, chunk
    )  # fmt: skip


def resumed(
    method, q: Tensor, k: Tensor, v: Tensor, *, pieces: list[int], keep=None, segments=None, **options
) -> tuple[Tensor, State]:
    """The sequence cut into pieces of the given lengths, each resumed from the state of those before it."""

    def cut(x: Tensor | None, dim: int) -> list:
        return [None] * len(pieces) if x is None else list(x.split(pieces, dim))

    state, outputs = None, []
    parts = zip(*(cut(x, -2) for x in (q, k, v)), *(cut(x, -1) for x in (keep, segments)), strict=True)
    for q_part, k_part, v_part, keep_part, segments_part in parts:
        output, state = attended(
            method, q_part, k_part, v_part, keep=keep_part, segments=segments_part, state=state, return_state=True,
            **options,
        )  # fmt: skip
        outputs.append(output)
    return torch.cat(outputs, -2), state


def in_form(form: str, method, q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    """One output in any of the four forms, the chunked one in short chunks."""
    if form == "step":
        return resumed(method, q, k, v, pieces=[1] * q.shape[-2], form="step", **options)[0]
    return attended(method, q, k, v, form=form, chunk=4, **options)[0]


def with_gradients(function: Callable[..., Tensor], *inputs: Tensor, rows: Tensor | None = None) -> list[Tensor]:
    """The output, and the gradients of a loss in which each of its numbers counts differently; those of `rows` only."""
    inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)
    output = function(*inputs)
    counts = torch.arange(output.numel()).reshape(output.shape).add(1).sin().to(output)
    if rows is not None:
        counts = counts * rows[..., None]
    return [output.detach(), *torch.autograd.grad(output, inputs, counts)]


def relative(found: Tensor, expected: Tensor) -> float:
    """RMS(difference) / RMS(expected); infinite where something is not finite, so that no comparison lets it pass."""
    found, expected = found.double(), expected.double()
    ratio = (found - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    return ratio.nan_to_num(INF).item()


def same_bits(a: Tensor, b: Tensor) -> Tensor:
    return a.view(torch.int32) == b.view(torch.int32)


# --- The future: no edit of it, whatever the numbers, changes a bit of the past ---------------------------------------

COPIES, ROUNDS, LENGTH = 500, 20, 32  # 10,000 edits
POISON, HUGE, MILD = ("nan", "inf", "-inf"), ("huge",), ("times 1.1", "times 3", "others")


def edited(x: Tensor, cut: Tensor, kinds: tuple[str, ...], generator: torch.Generator) -> Tensor:
    """x (b, 1, n, d) with some or all tokens from the `cut` (b,) of each copy on replaced, each copy in its own way."""
    copies, _, n, _ = x.shape
    others = torch.randn(x.shape, generator=generator)
    powers = torch.rand(copies, 1, n, 1, generator=generator) * 30
    new = {
        "nan": torch.full_like(x, NAN),
        "inf": torch.full_like(x, INF),
        "-inf": torch.full_like(x, -INF),
        "huge": others.sign() * 10**powers,
        "times 1.1": x * 1.1,
        "times 3": x * 3,
        "others": others,
    }
    kind = torch.randint(len(kinds), (copies,), generator=generator)
    replaced = torch.stack([new[name] for name in kinds])[kind, torch.arange(copies)]
    share = torch.rand(copies, 1, 1, 1, generator=generator)
    chosen = torch.rand(copies, 1, n, 1, generator=generator) < share
    return torch.where(chosen & ~before(cut, n)[..., None], replaced, x)


def before(cut: Tensor, n: int) -> Tensor:
    """(b, 1, n): the rows of each copy that lie before its cut."""
    return torch.arange(n) < cut[:, None, None]


def leaks(function: Callable[..., Tensor], kinds: tuple[str, ...], rounds: int = ROUNDS, of_gradients=False) -> int:
    """How many of `rounds` * COPIES edits of the future change a bit of the past: of its outputs, or of the gradients
    of a loss of them. Each copy is compared with an unedited one at the same place of a call of the same shape.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = [x.expand(COPIES, -1, -1, -1).contiguous() for x in normal_inputs(1, 1, n=LENGTH)]
    plain, leaking = function(*inputs), 0
    for _ in range(rounds):
        cut = torch.randint(1, LENGTH, (COPIES,), generator=generator)
        past = before(cut, LENGTH)
        changed = [edited(x, cut, kinds, generator) for x in inputs]
        if of_gradients:
            pairs = zip(
                with_gradients(function, *changed, rows=past)[1:],
                with_gradients(function, *inputs, rows=past)[1:],
                strict=True,
            )
        else:
            pairs = iter([(function(*changed), plain)])
        differs = [~(same_bits(a, b).all(-1) | ~past).flatten(1).all(1) for a, b in pairs]
        leaking += int(torch.stack(differs).any(0).sum())
    return leaking


def stabilised_over_all_keys(epsilon: float) -> Callable[..., Tensor]:
    """The fault: one maximum over all keys, future ones too, taken out of the features of every key."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        projections, root = RandomFeatures(16).draw(q.shape[-1]).to(q), q.shape[-1] ** -0.25

        def features(x: Tensor, dims: tuple[int, ...]) -> Tensor:
            projected = x * root @ projections.mT
            half_norm = (x * root).square().sum(-1, keepdim=True) / 2
            return (projected - half_norm - projected.amax(dims, keepdim=True)).exp() + epsilon

        w = (features(q, (-1,)) @ features(k, (-2, -1)).mT).tril()
        return w @ v / w.sum(-1, keepdim=True)

    return function


def test_a_maximum_over_all_keys_is_noticed():
    """Also without the epsilon, where the formula is causal but for its rounding: only the bits show that."""
    half = LENGTH // 2
    q, k, v = normal_inputs(1, 1, n=LENGTH)
    k_edited = torch.cat([k[..., :half, :], 3 * k[..., half:, :]], -2)

    def change_of_the_past(function: Callable[..., Tensor]) -> float:
        return relative(function(q, k_edited, v)[..., :half, :], function(q, k, v)[..., :half, :])

    leaking, rounding = stabilised_over_all_keys(epsilon=1e-4), stabilised_over_all_keys(epsilon=0.0)
    assert change_of_the_past(leaking) > 0.05
    assert 0 < change_of_the_past(rounding) < 1e-6
    assert leaks(leaking, MILD, rounds=2) > 200
    assert leaks(rounding, MILD, rounds=2) > 200
    assert leaks(rounding, POISON, rounds=2) > 200


@by_method
@by_causal_form
def test_ten_thousand_edits_of_the_future_leave_the_past_bitwise_the_same(name, form):
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attended(METHODS[name], q, k, v, form=form, chunk=6)[0]

    assert leaks(function, (*POISON, *HUGE, *MILD)) == 0


@by_method
def test_the_form_that_a_call_chooses_keeps_the_past_too(name):
    """Several chunks of the default length, and more copies than are computed at once."""
    copies, n, generator = 200, 300, torch.Generator().manual_seed(1)
    inputs = [x.expand(copies, -1, -1, -1).contiguous() for x in normal_inputs(1, 1, n=n)]
    cut = torch.randint(1, n, (copies,), generator=generator)
    changed = [edited(x, cut, (*POISON, *HUGE, *MILD), generator) for x in inputs]
    plain, found = (attention(*x, is_causal=True, method=METHODS[name]) for x in (inputs, changed))
    assert bool((same_bits(found, plain).all(-1) | ~before(cut, n)).all())


@by_method
@by_causal_form
@pytest.mark.parametrize("kinds", [MILD, POISON], ids=["mild", "poison"])
def test_edits_of_the_future_leave_the_gradients_of_the_past_bitwise_the_same(name, form, kinds):

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attended(METHODS[name], q, k, v, form=form, chunk=6)[0]

    assert leaks(function, kinds, rounds=1, of_gradients=True) == 0


# --- Padding: a padded call is the call without the hidden tokens ----------------------------------------------------

PADDINGS = {"left": range(7), "right": range(18, 24), "scattered": (0, 3, 4, 5, 11, 12, 20, 23)}  # hidden, of 24 tokens


def padding(which: str) -> Tensor:
    keep = torch.ones(24, dtype=torch.bool)
    keep[list(PADDINGS[which])] = False
    return keep


def padding_error(function: Callable[..., Tensor], keep: Tensor, garbage: float | None) -> float:
    """The largest difference, in outputs and gradients, between a padded call and the call without the hidden tokens.

    function(q, k, v, keep). `garbage` fills the hidden keys and values, which are ordinary numbers otherwise.
    """
    q, *inputs = normal_inputs(2, 2, n=len(keep), dtype=torch.float64)
    inputs = [q, *(x if garbage is None else torch.where(keep[:, None], x, garbage) for x in inputs)]
    hidden = with_gradients(lambda *x: function(*x, keep.expand(2, -1))[..., keep, :], *inputs)
    shorter = with_gradients(lambda *x: function(*x, None), *(x[..., keep, :] for x in inputs))
    if any(bool(grad[..., ~keep, :].any()) for grad in hidden[1:]):  # They must be exactly 0, and not NaN.
        return INF
    found = [hidden[0], *(grad[..., keep, :] for grad in hidden[1:])]
    errors = [(a - b).abs().max() / b.abs().max() for a, b in zip(found, shorter, strict=True)]
    return torch.stack(errors).max().nan_to_num(INF).item()


def masks_only_values(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
    """The fault: hidden keys stay in the normaliser."""
    v = v if keep is None else v * keep[:, None, :, None]
    w = (F.elu(q) + 1) @ (F.elu(k) + 1).mT
    return w @ v / w.sum(-1, keepdim=True)


@pytest.mark.parametrize("which", PADDINGS)
def test_a_mask_on_values_alone_is_noticed(which):
    assert padding_error(masks_only_values, padding(which), None) == INF  # The hidden keys have gradients.
    keep, inputs = padding(which), normal_inputs(2, 2, n=24)
    found = masks_only_values(*inputs, keep.expand(2, -1))[..., keep, :]
    assert relative(found, masks_only_values(*(x[..., keep, :] for x in inputs), None)) > 0.2


@by_method
@pytest.mark.parametrize("which", PADDINGS)
@pytest.mark.parametrize("garbage", [None, NAN, INF])
def test_padded_is_unpadded_in_outputs_and_gradients(name, which, garbage):
    for is_causal, forms in ((True, ("dense", "chunked", "step")), (False, ("dense", "linear"))):
        for form in forms:

            def function(
                q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, form=form, is_causal=is_causal
            ) -> Tensor:
                return in_form(form, METHODS[name], q, k, v, keep=keep, is_causal=is_causal)

            assert padding_error(function, padding(which), garbage) < 1e-10, (form, is_causal)


@by_method
@pytest.mark.parametrize("which", PADDINGS)
def test_padded_is_unpadded_in_the_state(name, which):
    keep, inputs = padding(which), normal_inputs(2, 2, n=24, dtype=torch.float64)
    shorter = totals(attended(METHODS[name], *(x[..., keep, :] for x in inputs), return_state=True)[1])
    hidden = [torch.where(keep[:, None], x, NAN) for x in inputs]
    for options in ({"is_causal": True, "chunk": 4}, {"is_causal": False}):
        _, whole = attended(METHODS[name], *hidden, keep=keep.expand(2, -1), return_state=True, **options)
        assert_same(totals(whole), shorter)
    _, steps = resumed(METHODS[name], *hidden, pieces=[1] * 24, keep=keep.expand(2, -1))
    assert_same(totals(steps), shorter)


def totals(state: State) -> Tensor:
    """(..., r, e + 1): the sums with their normaliser, whatever log-scale they are kept at."""
    return state.sums if state.log_scale is None else state.sums * state.log_scale.exp()[..., None]


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


# --- The hull: with positive weights an output lies between the values that it sees ----------------------------------

HULL_ROWS = 4 * 80 * 256  # of each method and form: four standard deviations, sequences, length


def outside_the_hull(method, form: str, std: float) -> tuple[int, int]:
    """How many rows lie outside the hull, of 80 * 256, and how many have a normaliser of exactly 0.

    A channel of ones among the values shows the normaliser: it is 1 where there is one, and 0 where not.
    """
    q, k = (normal(80, 1, 256, 8, seed=seed, std=std) for seed in (0, 1))
    v = normal(80, 1, 256, 3, seed=2)
    out = attended(method, q, k, F.pad(v, (0, 1), value=1.0), form=form)[0]
    empty = out[..., -1] == 0
    assert not bool(out[empty].any())
    low, high = v.cummin(-2).values, v.cummax(-2).values
    # The range is 0 where a row sees one key: there its value may be rounded.
    slack = 1e-5 * (high - low) + 1e-6 * v.abs()
    inside = ((out[..., :-1] >= low - slack) & (out[..., :-1] <= high + slack)).all(-1)  # False for NaN
    return int((~inside & ~empty).sum()), int(empty.sum())


def test_odd_taylor_leaves_the_hull():
    assert outside_the_hull(odd_taylor(3), "chunked", 2.0)[0] > 1000
    assert outside_the_hull(odd_taylor(3), "dense", 4.0)[0] > 4000


@pytest.mark.parametrize(("std", "share"), [(2.0, 0.04), (4.0, 0.28)])
def test_share_of_odd_taylors_normalisers_that_are_not_positive(std, share):
    """The figures for which odd degrees warn: width 8, length 256, causal."""
    method, root = odd_taylor(3), 8**-0.25
    q, k = (normal(64, 256, 8, seed=seed, std=std, dtype=torch.float64) for seed in (0, 1))
    v = normal(64, 256, 8, seed=2, dtype=torch.float64)
    normalizers = (method(q * root) * method(k * root).cumsum(-2)).sum(-1)
    assert (normalizers <= 0).double().mean().item() == pytest.approx(share, abs=0.015)
    out = attention(q, k, v, is_causal=True, method=method)
    assert out.abs().max() > 80 * v.abs().max()


@pytest.mark.parametrize("name", POSITIVE)
@by_causal_form
def test_positive_maps_stay_inside_the_hull(name, form):
    found = [outside_the_hull(METHODS[name], form, std) for std in (0.5, 1.0, 2.0, 4.0)]
    violations, empty = (sum(counts) for counts in zip(*found, strict=True))
    assert violations == 0
    assert (empty > 0) == (name == "relu")  # Queries or keys without a positive entry.
    assert 2 * len(POSITIVE) * HULL_ROWS >= 1_000_000


@pytest.mark.parametrize("name", POSITIVE)
@pytest.mark.parametrize("std", [0.5, 1.0, 2.0, 4.0])
def test_the_first_step_gives_the_value_itself(name, std):
    """The narrowest hull: a row that sees one key. The first token of a stream meets its key pair by pair, because the
    series near its minimum 1/2, summed from features, would be the small rest of large terms."""
    q, k = (normal(20_000, 1, 1, 8, seed=seed, std=std) for seed in (0, 1))
    v = normal(20_000, 1, 1, 3, seed=2)
    out, _ = attention(q, k, v, is_causal=True, method=METHODS[name], return_state=True)
    seen = out.flatten(1).any(1)  # relu: others have no normaliser
    assert bool(seen.all()) or name == "relu"
    assert bool(((out - v).abs() <= 1e-5 * v.abs().amax(-1, keepdim=True))[seen].all())


# --- One meaning, four forms -----------------------------------------------------------------------------------------

SEGMENTS = torch.tensor([0] * 5 + [7] + [0] * 9 + [2] * 6)  # The same id after another one is a new segment.
KEEP = torch.tensor([i not in (0, 1, 8, 9, 20) for i in range(21)])
MASKS = {
    "none": {"is_causal": False},
    "padding": {"is_causal": False, "keep": KEEP.expand(2, -1)},
    "causal": {"is_causal": True},
    "causal, padding": {"is_causal": True, "keep": KEEP.expand(2, -1)},
    "segments": {"is_causal": False, "segments": SEGMENTS.expand(2, -1)},
    "causal, segments": {"is_causal": True, "segments": SEGMENTS.expand(2, -1), "keep": KEEP.expand(2, -1)},
}
by_mask = pytest.mark.parametrize("mask", MASKS)


def forms_of(mask: str) -> tuple[str, ...]:
    """Those beside the dense one."""
    return ("chunked", "step") if MASKS[mask]["is_causal"] else ("linear",)


def visible(mask: str, n: int = 21) -> Tensor:
    """(n, n): which key each row may see."""
    options, seen = MASKS[mask], torch.ones(n, n, dtype=torch.bool)
    if options["is_causal"]:
        seen = seen.tril()
    if "segments" in options:
        runs = (SEGMENTS.diff(prepend=SEGMENTS[:1]) != 0).cumsum(0)
        seen = seen & (runs[:, None] == runs)
    return seen & KEEP if "keep" in options else seen


def assert_agree(inputs: list[Tensor], run_form: Callable[..., Tensor], form: str) -> None:
    """In float32 a form may be as far from the dense one as that is from itself in float64, times 3 in RMS, and times 2
    in the worst number of the output, or by a rounding error. In float64 they are equal.
    """
    wide = [x.double() for x in inputs]
    reference, golden = (with_gradients(lambda *x: run_form("dense", *x), *x) for x in (inputs, wide))
    found, found_wide = (with_gradients(lambda *x: run_form(form, *x), *x) for x in (inputs, wide))
    assert (found[0] - golden[0]).abs().max() <= max(1e-5, 2 * (reference[0] - golden[0]).abs().max()), form
    for what, floor in enumerate((2e-6, 2e-5, 2e-5, 2e-5)):  # output, and gradients of query, key, value
        own_error = relative(reference[what], golden[what])
        assert relative(found[what], reference[what]) <= max(3 * own_error, floor), (form, what)
        difference = (found_wide[what] - golden[what]).abs().max()
        assert difference <= 1e-11 * max(1.0, golden[what].abs().max()), (form, what)


def std_of(name: str) -> float:
    return 0.5 if name in UNSURE else 1.0


@by_method
@by_mask
def test_forms_agree(name, mask):
    """Two query heads share each key head."""
    shapes = [(2, 4, 21, 4), (2, 2, 21, 4), (2, 2, 21, 3)]
    inputs = [normal(*shape, seed=i, std=std_of(name)) for i, shape in enumerate(shapes)]

    def run_form(form: str, *x: Tensor) -> Tensor:
        return in_form(form, METHODS[name], *x, **MASKS[mask])

    for form in forms_of(mask):
        assert_agree(inputs, run_form, form)


@by_method
@pytest.mark.parametrize(("n", "m", "chunk"), [(300, 300, 16), (30, 11, 4), (11, 30, 4)])
def test_forms_agree_at_length_and_where_lengths_differ(name, n, m, chunk):
    inputs = normal_inputs(1, 2, n=n, m=m, std=std_of(name))
    for form, is_causal in (("chunked", True), ("linear", False)):

        def run_form(form: str, *x: Tensor, is_causal=is_causal) -> Tensor:
            return attended(METHODS[name], *x, form=form, chunk=chunk, is_causal=is_causal)[0]

        assert_agree(inputs, run_form, form)


@by_method
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_forms_agree_in_half_precision(name, dtype):
    inputs = normal_inputs(1, 2, n=100, dtype=dtype)
    golden = attended(METHODS[name], *(x.double() for x in inputs), form="dense")[0]
    reference = attended(METHODS[name], *inputs, form="dense")[0]
    found = attended(METHODS[name], *inputs, form="chunked", chunk=16)[0]
    assert found.dtype == dtype
    assert (found - golden).abs().max() <= 2 * (reference - golden).abs().max()


@by_method
@by_mask
def test_gradients_are_those_of_finite_differences(name, mask):
    """The forms share the constants that they hide from the derivative, so that agreement alone proves nothing."""
    options = {key: x[:1, 3:9] if isinstance(x, Tensor) else x for key, x in MASKS[mask].items()}
    inputs = [x.requires_grad_() for x in normal_inputs(1, 1, n=6, d=2, e=2, dtype=torch.float64)]
    for form in ("dense", *forms_of(mask)[:1]):

        def function(*x: Tensor, form=form) -> Tensor:
            return in_form(form, METHODS[name], *x, **options)

        assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
        assert form == "dense" or torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


# --- No small constant in the normaliser -----------------------------------------------------------------------------

SCALES = [10.0**power for power in (-8, -6, -4, -2, 0, 2, 4)]


def with_epsilon(q: Tensor, k: Tensor, v: Tensor, epsilon: float) -> Tensor:
    """The fault: a constant that the normaliser of small queries drowns in."""
    w = (q.relu() @ k.relu().mT).tril()
    return w @ v / (w.sum(-1, keepdim=True) + epsilon)


def test_a_constant_in_the_normaliser_is_noticed():
    q, k, v = normal_inputs(2, n=40)
    prefill, decode = (with_epsilon(q * 1e-8, k, v, epsilon) for epsilon in (1e-6, 1e-10))
    assert relative(decode, prefill) > 0.5
    assert relative(prefill, with_epsilon(q, k, v, 1e-6)) > 0.5
    for scale in SCALES:  # relu's weights grow with the query, so its outputs do not.
        assert relative(attended(Linear("relu"), q * scale, k, v)[0], with_epsilon(q, k, v, 0.0).nan_to_num(0.0)) < 1e-6


@by_method
@pytest.mark.parametrize("scale", SCALES)
def test_forms_agree_whatever_the_size_of_the_queries(name, scale):
    inputs = normal_inputs(2, n=20, std=std_of(name))
    inputs[0] = inputs[0] * (min(scale, 1.0) if name in UNSURE else scale)
    for form, is_causal in (("chunked", True), ("step", True), ("linear", False)):

        def run_form(form: str, *x: Tensor, is_causal=is_causal) -> Tensor:
            return in_form(form, METHODS[name], *x, is_causal=is_causal)

        assert_agree(inputs, run_form, form)


# --- Half precision ends at the door ---------------------------------------------------------------------------------


def in_half_precision(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The fault: Taylor's features, sums and normaliser in the dtype of the inputs."""
    root = q.shape[-1] ** -0.25
    q_features, k_features = (Taylor(2)(x * root) for x in (q, k))
    values, sums, rows = F.pad(v, (0, 1), value=1.0), 0, []
    for i in range(len(q)):
        sums = sums + k_features[i, :, None] * values[i]
        rows.append(q_features[i] @ sums)
    totals = torch.stack(rows)
    return totals[:, :-1] / totals[:, -1:]


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_states_of_half_precision_inputs_are_wide(dtype, allowed):
    """10,000 tokens. `allowed` is the rounding of the output: half a unit in its last place."""
    q, k, v = (x.to(dtype) for x in normal_inputs(n=10_000, d=8, e=4))
    v = v + 1
    wide = attended(Taylor(2), q.double(), k.double(), v.double())[0]
    assert relative(in_half_precision(q, k, v), wide) > 10 * allowed
    for name, method in METHODS.items():
        out, state = attended(method, q, k, v, return_state=True)
        before_the_cast = attended(method, q.float(), k.float(), v.float(), return_state=True)[0]
        assert (out.dtype, state.sums.dtype) == (dtype, torch.float32)
        assert torch.equal(out, before_the_cast.to(dtype))
        if method.positive:  # The others divide by what is left of cancelled terms.
            wide = attended(method, q.double(), k.double(), v.double())[0]
            assert relative(out, wide) <= allowed, name
            assert relative(before_the_cast, wide) <= 2e-6, name
        if state.log_scale is not None:
            assert state.log_scale.dtype == torch.float32


def test_states_of_float64_inputs_are_float64():
    for method in METHODS.values():
        out, state = attended(method, *normal_inputs(2, n=5, dtype=torch.float64), return_state=True)
        assert out.dtype == state.sums.dtype == torch.float64


# --- The backward computes states again, and never recovers them by subtraction --------------------------------------


def query_gradient_by_subtraction(k: Tensor, v: Tensor, grad: Tensor) -> Tensor:
    """The fault: from the last state back, each key taken out of the sum that it was added to. For w = x."""
    sums, rows = k.mT @ v, []
    for i in reversed(range(len(k))):
        rows.append(sums @ grad[i])
        sums = sums - k[i, :, None] * v[i]
    return torch.stack(rows[::-1]) / math.sqrt(k.shape[-1])


def worst_row(found: Tensor, expected: Tensor) -> float:
    """The largest relative error of a row; rows that are zero but for rounding, as the first one is, do not count."""
    size = expected.norm(dim=-1)
    counts = size > 1e-6 * size.square().mean().sqrt()
    return ((found - expected).norm(dim=-1) / size)[counts].max().item()


@by_method
def test_worst_row_of_the_query_gradient_at_length_8192(name):
    q, k, v = normal_inputs(n=8192, d=16, e=16)
    grad = normal(8192, 16, seed=9)

    def query_gradient(form: str, dtype: torch.dtype) -> Tensor:
        x = q.to(dtype).requires_grad_()
        out, _ = attended(METHODS[name], x, k.to(dtype), v.to(dtype), form=form)
        return torch.autograd.grad(out, x, grad.to(dtype))[0].double()

    # In float64 the forms are equal, and the dense one is slow at this length.
    golden = query_gradient("dense" if name == "taylor" else "chunked", torch.float64)
    allowed = 5e-6
    if name in (*RANDOM, "odd taylor", "relu"):
        # Some rows of these are small differences of large terms, in any float32 computation.
        allowed = max(allowed, worst_row(query_gradient("dense", torch.float32), golden))
    assert worst_row(query_gradient("chunked", torch.float32), golden) <= allowed
    if name == "identity":
        assert worst_row(query_gradient_by_subtraction(k, v, grad), golden) > 20 * allowed


# --- A sequence cut anywhere and resumed is the whole ----------------------------------------------------------------


def without_normalizer(q: Tensor, k: Tensor, v: Tensor, sums: Tensor | None) -> tuple[Tensor, Tensor]:
    """The fault: the state holds the numerator alone, so each call divides by the weights of its own keys."""
    q_features, k_features = F.elu(q) + 1, F.elu(k) + 1
    w = (q_features @ k_features.mT).tril()
    numerator = w @ v + (0 if sums is None else q_features @ sums)
    return numerator / w.sum(-1, keepdim=True), k_features.mT @ v + (0 if sums is None else sums)


def random_pieces(n: int, seed: int) -> list[int]:
    """Lengths of pieces that add up to n, cut at random places."""
    generator = random.Random(seed)
    cuts = [0, *sorted(generator.sample(range(1, n), generator.randint(1, n // 3))), n]
    return [end - start for start, end in itertools.pairwise(cuts)]


def test_a_state_without_its_normaliser_is_noticed():
    q, k, v = normal_inputs(2, n=21, dtype=torch.float64)
    head, sums = without_normalizer(*(x[:, :13] for x in (q, k, v)), None)
    tail, _ = without_normalizer(*(x[:, 13:] for x in (q, k, v)), sums)
    whole, _ = without_normalizer(q, k, v, None)
    assert relative(torch.cat([head, tail], 1), whole) > 0.5


@pytest.mark.parametrize("name", ["exact", *METHODS])
@pytest.mark.parametrize("mask", [mask for mask in MASKS if MASKS[mask]["is_causal"]])
def test_whole_is_chunks_is_steps_is_cut_and_resumed(name, mask):
    """Outputs, gradients and the sums with their normaliser, with two query heads for each key head."""
    method, options, n = {"exact": Exact(), **METHODS}[name], MASKS[mask], 21
    inputs = [
        normal(2, heads, n, d, seed=i, dtype=torch.float64) for i, (heads, d) in enumerate([(4, 4), (2, 4), (2, 3)])
    ]
    cuts = [[n], [1] * n, [20, 1], [1, 20], [13, 1, 1, 1, 5], *(random_pieces(n, seed) for seed in range(5))]
    expected = with_gradients(lambda *x: attended(method, *x, **options, form="dense")[0], *inputs)
    _, whole = attended(method, *inputs, **options, return_state=True)
    for pieces in cuts:
        found = with_gradients(lambda *x, pieces=pieces: resumed(method, *x, pieces=pieces, **options)[0], *inputs)
        for a, b in zip(found, expected, strict=True):
            assert (a - b).abs().max() <= 1e-10 * max(1.0, b.abs().max()), pieces
        _, state = resumed(method, *inputs, pieces=pieces, chunk=3, **options)
        assert state.length == whole.length == n
        if name != "exact":
            assert_same(totals(state), totals(whole))


@by_method
def test_the_state_holds_the_sums_of_the_formula(name):
    """The normaliser, the last column, is the sum of the features themselves."""
    method, (q, k, v) = METHODS[name], normal_inputs(2, n=21, dtype=torch.float64)
    _, state = attended(method, q, k, v, chunk=4, return_state=True)
    if name == "separable":
        features = (k * 4**-0.25).exp()
    else:
        features = method(k * 4**-0.25, is_query=False)
        features = features[0] * features[1].exp()[..., None] if isinstance(features, tuple) else features
    if isinstance(method, Taylor):  # The weights of the monomials stand in the sums, not half in each feature.
        features = features * method(torch.ones(1, 4, dtype=torch.float64))
    assert_same(totals(state), features.mT @ F.pad(v, (0, 1), value=1.0))


@by_method
def test_keys_without_causality_are_added_piece_by_piece(name):
    """Queries see what the state holds and the new keys, all of them."""
    q, k, v = normal_inputs(2, n=9, m=30, dtype=torch.float64)
    method = METHODS[name]
    _, state = attended(method, q[:, :0], k[:, :17], v[:, :17], is_causal=False, return_state=True)
    found, state = attended(method, q, k[:, 17:], v[:, 17:], is_causal=False, state=state, return_state=True)
    assert_same(found, attended(method, q, k, v, is_causal=False, form="dense")[0])
    again, _ = attended(method, q, k[:, :0], v[:, :0], is_causal=False, state=state, return_state=True)
    assert_same(again, found)


# --- What is not finite reaches exactly the rows that see it ---------------------------------------------------------


def zero_times_nan(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """The fault: hidden keys and values are multiplied by 0."""
    w = ((F.elu(q) + 1) @ ((F.elu(k) + 1) * keep[:, None, :, None]).mT).tril()
    return w @ (v * keep[:, None, :, None]) / w.sum(-1, keepdim=True)


def poisoned_rows(found: Tensor, plain: Tensor) -> Tensor:
    """(n,): the rows that are NaN, in every batch, head and channel; all the others must have the bits of `plain`."""
    poisoned = found.isnan().flatten(0, 1)
    assert torch.equal(poisoned.any(-1).any(0), poisoned.all(-1).all(0))
    rows = poisoned.any(-1).any(0)
    assert bool(same_bits(found, plain)[..., ~rows, :].all())
    return rows


def test_zero_times_nan_is_noticed():
    inputs = normal_inputs(2, 2, n=21)

    def function(*x: Tensor) -> Tensor:
        return zero_times_nan(*x, KEEP.expand(2, -1))

    plain = function(*inputs)[..., 2:, :]
    assert plain.isfinite().all()
    inputs[2][..., 8, :] = NAN  # hidden
    assert poisoned_rows(function(*inputs)[..., 2:, :], plain).any()


@by_method
@by_mask
def test_what_is_not_finite_reaches_exactly_the_rows_that_see_it(name, mask):
    inputs, seen = normal_inputs(2, 2, n=21), visible(mask)
    for form in ("dense", *forms_of(mask)):
        plain = in_form(form, METHODS[name], *inputs, **MASKS[mask])
        for which, (place, garbage) in itertools.product(
            range(3), [(0, NAN), (5, INF), (8, NAN), (12, -INF), (20, NAN)]
        ):
            changed = [x.clone() for x in inputs]
            changed[which][..., place, :] = garbage
            found = in_form(form, METHODS[name], *changed, **MASKS[mask])
            expected = torch.arange(21) == place if which == 0 else seen[:, place]
            assert torch.equal(poisoned_rows(found, plain), expected), (form, which, place)


@by_method
@pytest.mark.parametrize("mask", ["segments", "causal, segments"])
@pytest.mark.parametrize("is_dense", [True, False])
def test_what_is_not_finite_leaves_the_gradients_of_other_segments_alone(name, mask, is_dense):
    inputs, form = normal_inputs(2, 2, n=21), "dense" if is_dense else forms_of(mask)[0]
    rows = ~visible("segments")[:, 10]

    def gradients(k: Tensor, v: Tensor) -> list[Tensor]:
        found = with_gradients(lambda *x: in_form(form, METHODS[name], *x, **MASKS[mask]), inputs[0], k, v, rows=rows)
        return [grad[..., rows, :] for grad in found[1:]]

    here = torch.arange(21)[:, None] == 10
    poisoned = gradients(*(x.masked_fill(here, NAN) for x in inputs[1:]))
    for found, plain in zip(poisoned, gradients(*inputs[1:]), strict=True):
        assert torch.equal(found, plain)


@by_method
def test_a_query_that_is_not_finite_gets_no_gradient_from_a_row_that_does_not_count(name):
    """As in the slots of padding, whose rows are left out of a loss."""
    inputs = normal_inputs(2, 2, n=21)
    inputs[0][..., 8, :] = NAN
    for form in ("dense", "chunked"):

        def function(*x: Tensor, form=form) -> Tensor:
            return in_form(form, METHODS[name], *x, is_causal=True)

        _, *grads = with_gradients(function, *inputs, rows=torch.arange(21) != 8)
        assert all(bool(grad.isfinite().all()) for grad in grads)
        assert not bool(grads[0][..., 8, :].any())


# --- Rows without keys, and calls without rows -----------------------------------------------------------------------


def divided_by_nothing(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """The fault: 0 / 0."""
    w = (F.elu(q) + 1) @ (F.elu(k) + 1).mT * keep[:, None, None]
    return w @ v / w.sum(-1, keepdim=True)


def gives_nothing(function: Callable[..., Tensor], inputs: list[Tensor]) -> bool:
    """Whether output and gradients are exactly 0."""
    return all(bool((x == 0).all()) for x in with_gradients(function, *inputs))


def test_zero_divided_by_zero_is_noticed():
    hidden = torch.zeros(2, 9, dtype=torch.bool)
    assert not gives_nothing(lambda *x: divided_by_nothing(*x, hidden), normal_inputs(2, 2, n=9))


@by_method
def test_rows_without_keys_are_zero_with_zero_gradient(name):
    method, inputs = METHODS[name], normal_inputs(2, 2, n=9)
    hidden = torch.zeros(2, 9, dtype=torch.bool)
    for form, is_causal in (("dense", True), ("chunked", True), ("step", True), ("dense", False), ("linear", False)):

        def function(*x: Tensor, form=form, is_causal=is_causal) -> Tensor:
            return in_form(form, method, *x, keep=hidden, is_causal=is_causal)

        assert gives_nothing(function, inputs), form
        assert gives_nothing(function, [inputs[0], *(x * NAN for x in inputs[1:])]), form
    one_hidden = torch.arange(9).expand(2, -1) > 3
    for form in ("dense", "chunked", "step"):
        found = with_gradients(lambda *x, f=form: in_form(f, method, *x, keep=one_hidden, is_causal=True), *inputs)
        assert not any(bool(x[..., :4, :].any()) for x in found), form
        assert all(bool(x.isfinite().all()) for x in found)


by_few_tokens = pytest.mark.parametrize(("n", "m"), [(0, 0), (0, 5), (5, 0), (1, 1), (1, 5), (5, 1), (0, 1), (1, 0)])


@by_method
@by_few_tokens
def test_calls_with_no_token_or_one(name, n, m):
    method, inputs = METHODS[name], normal_inputs(2, 2, n=n, m=m)
    for is_causal, return_state in itertools.product((True, False), repeat=2):
        out = attended(method, *inputs, is_causal=is_causal, return_state=return_state)[0]
        expected = attended(method, *inputs, is_causal=is_causal, form="dense")[0]
        assert out.shape == expected.shape == (2, 2, n, 3)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        assert m > 0 or not bool(out.any())
        for shape in ((0, 2), (2, 0)):  # no batch, no heads
            none = attended(method, *normal_inputs(*shape, n=n, m=m), is_causal=is_causal, return_state=return_state)[0]
            assert none.shape == (*shape, n, 3)


@by_method
@by_few_tokens
def test_gradients_of_calls_with_no_token_or_one(name, n, m):
    inputs = normal_inputs(2, 2, n=n, m=m)
    for is_causal in (True, False):
        _, *grads = with_gradients(lambda *x, c=is_causal: attended(METHODS[name], *x, is_causal=c)[0], *inputs)
        assert [grad.shape for grad in grads] == [x.shape for x in inputs]
        assert all(bool(grad.isfinite().all()) for grad in grads)


def test_exact_keeps_the_behaviour_of_torch():
    q, k, v = normal_inputs(2, 2, n=6, m=9)
    hidden = torch.zeros(6, 9, dtype=torch.bool)
    poisoned = v.clone()
    poisoned[..., 8, :] = NAN
    cases = [
        ((q, k, v), {"attn_mask": hidden}),
        ((q, k, poisoned), {"attn_mask": ~hidden.index_fill(1, torch.tensor([8]), True)}),
        ((q[..., :0, :], k, v), {}),
        ((q, k[..., :0, :], v[..., :0, :]), {}),
        ((q, k, v), {"is_causal": True, "scale": -2.0}),
    ]
    for inputs, options in cases:
        expected = F.scaled_dot_product_attention(*inputs, **options)
        torch.testing.assert_close(attention(*inputs, **options), expected, rtol=0, atol=0, equal_nan=True)


# --- Nothing is random but the draw, and that follows from the seed --------------------------------------------------


def redrawn_on_every_call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The fault: projections from the global generator, inside the call."""
    return attended(RandomFeatures(16, matrix=torch.randn(16, q.shape[-1])), q, k, v)[0]


def is_deterministic(function: Callable[..., Tensor]) -> bool:
    """Whether a call has the same bits again, whatever the global generators hold, and leaves these as they were."""
    inputs, outputs, untouched = normal_inputs(2, 2, n=70), [], True
    for seed in (0, 1, 1):
        torch.manual_seed(seed)
        random.seed(seed)
        states = torch.get_rng_state(), random.getstate()
        outputs.append(torch.cat([x.flatten() for x in with_gradients(function, *inputs)]))
        untouched = untouched and torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    return untouched and all(bool(same_bits(x, outputs[0]).all()) for x in outputs)


def test_redrawing_inside_a_call_is_noticed():
    assert not is_deterministic(redrawn_on_every_call)


@by_method
def test_same_call_same_bits(name):
    assert is_deterministic(lambda *x: attended(METHODS[name], *x)[0])


@pytest.mark.parametrize("name", RANDOM)
def test_the_seed_decides_and_redrawing_gives_another_method(name):
    inputs, kind = normal_inputs(2, 2, n=30), METHODS[name].kind
    # A width and seed that nothing has drawn before: the global generators must stay untouched by the first draw too.
    assert is_deterministic(lambda *x: attended(RandomFeatures(18, kind, seed=1234), *x)[0])
    method = METHODS[name]
    other = method.redraw(seed=1)
    assert other != method
    assert other == RandomFeatures(16, kind, seed=1)
    out, again, redrawn = (attended(m, *inputs)[0] for m in (method, RandomFeatures(16, kind), other))
    assert torch.equal(out, again)
    assert not torch.equal(out, redrawn)


# --- What cannot be honoured is refused ------------------------------------------------------------------------------


def drops_what_it_cannot_do(q: Tensor, k: Tensor, v: Tensor, **_ignored) -> Tensor:
    """The fault."""
    return attention(q, k, v, method="taylor")


REFUSED = {
    "attn_mask, bias": {"attn_mask": torch.linspace(-1, 1, 9).expand(6, 9)},
    "attn_mask, bias without queries": {"attn_mask": torch.linspace(-1, 1, 9).expand(1, 9)},
    "attn_mask, pairs": {"attn_mask": torch.arange(54).reshape(6, 9) % 5 > 0},
    "attn_mask, pairs that are causal": {"attn_mask": torch.ones(6, 9, dtype=torch.bool).tril()},
    "attn_mask, pairs by head": {"attn_mask": torch.ones(2, 2, 6, 9, dtype=torch.bool).tril()},
    "dropout_p": {"dropout_p": 0.1},
    "key_padding_mask, not boolean": {"key_padding_mask": torch.zeros(2, 9)},
    "segment_ids, of unequal lengths": {"segment_ids": torch.zeros(2, 9, dtype=torch.int64)},
}


def refusal(function: Callable[..., Tensor], options: dict) -> str:
    """The message of the refusal, or nothing."""
    try:
        function(*normal_inputs(2, 2, n=6, m=9), **options)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(case):
    argument = case.partition(",")[0]
    assert argument not in refusal(drops_what_it_cannot_do, REFUSED[case])
    for method in METHODS.values():
        message = refusal(lambda *x, m=method, **options: attention(*x, method=m, **options), REFUSED[case])
        assert message.startswith(f"{argument}: "), (method, message)


def test_a_mask_of_keys_is_honoured_and_not_refused():
    q, k, v = normal_inputs(2, 2, n=6, m=9)
    keep = torch.arange(9) % 4 > 0
    for method in METHODS.values():
        expected = attended(method, q, k[..., keep, :], v[..., keep, :], is_causal=False, form="dense")[0]
        for mask in (keep, keep[None], keep.expand(2, 1, 1, 9), keep.expand(2, 2, 1, 9)):
            found = attention(q, k, v, attn_mask=mask, method=method)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# --- The maps: random ones right on average, Taylor's right to the last digit ----------------------------------------


def estimates(make: Callable[[int], RandomFeatures], q: Tensor, k: Tensor, seeds: int) -> Tensor:
    """(seeds, pairs): phi(q).phi(k), for pairs of rows of q and k."""

    def one(method: RandomFeatures) -> Tensor:
        (q_features, q_scale), (k_features, k_scale) = method(q, is_query=True), method(k, is_query=False)
        return (q_features * k_features).sum(-1) * (q_scale + k_scale).exp()

    return torch.stack([one(make(seed)) for seed in range(seeds)])


def standard_errors_off(found: Tensor, expected: Tensor) -> Tensor:
    return (found.mean(0) - expected).abs() / (found.std(0) / math.sqrt(len(found)))


PAIRS = [normal(4, 4, seed=seed, std=0.4, dtype=torch.float64) for seed in (0, 1)]


def test_orthogonal_draws_without_random_lengths_are_noticed():
    """The fault: all projections of length sqrt(d), which is biased."""

    def make(seed: int) -> RandomFeatures:
        method = RandomFeatures(8, seed=seed)
        return replace(method, matrix=F.normalize(method.draw(4), dim=-1) * 2)

    found, expected = estimates(make, *PAIRS, seeds=2000), (PAIRS[0] * PAIRS[1]).sum(-1).exp()
    assert standard_errors_off(found, expected).max() > 6


@pytest.mark.parametrize("kind", ["positive", "hyperbolic", "trigonometric"])
@pytest.mark.parametrize("orthogonal", [True, False])
def test_random_features_are_unbiased(kind, orthogonal):
    found = estimates(lambda seed: RandomFeatures(8, kind, orthogonal, seed), *PAIRS, seeds=2000)
    assert standard_errors_off(found, (PAIRS[0] * PAIRS[1]).sum(-1).exp()).max() <= 3
    if kind != "trigonometric":
        assert bool((found > 0).all())


@pytest.mark.parametrize("kind", ["positive", "hyperbolic", "trigonometric"])
def test_variance_of_independent_random_features_falls_with_their_number(kind):
    counts, pairs = (4, 16, 64), [x / 2 for x in PAIRS]  # Near zero the tails are light, and variances easy to measure.
    variances = [estimates(lambda seed, m=m: RandomFeatures(m, kind, False, seed), *pairs, 600).var(0) for m in counts]
    products = torch.stack([m * variance for m, variance in zip(counts, variances, strict=True)])
    assert bool((products / products.mean(0) - 1).abs().max() < 0.25)


@pytest.mark.parametrize("degree", range(7))
@pytest.mark.parametrize("width", range(1, 9))
def test_taylor_features_are_the_monomials_and_their_products_the_series(degree, width):
    """Monomials are listed one by one: the formula of the library is not used to check itself."""
    method = Taylor(degree) if degree % 2 == 0 else odd_taylor(degree)
    q, k = (normal(5, width, seed=seed, dtype=torch.float64) for seed in (0, 1))
    features = method(k, is_query=False)
    variables = [
        chosen for power in range(degree + 1) for chosen in itertools.combinations_with_replacement(range(width), power)
    ]
    assert features.shape == (5, len(variables))
    assert method.size(width) == len(variables)
    expected = [
        k[:, list(chosen)].prod(-1) / math.sqrt(math.prod(math.factorial(chosen.count(i)) for i in set(chosen)))
        for chosen in variables
    ]
    torch.testing.assert_close(
        features.sort(-1).values, torch.stack(expected, -1).sort(-1).values, rtol=1e-12, atol=1e-12
    )
    x = q @ k.mT
    series = sum(x**power / math.factorial(power) for power in range(degree + 1))
    error = (method(q, is_query=True) @ features.mT - series).abs()
    # Relative to the sum of the sizes of the terms, which is what is added up.
    size = sum((q.abs() @ k.abs().mT) ** power / math.factorial(power) for power in range(degree + 1))
    assert bool((error <= 1e-12 * size).all())
    assert bool(((method.series(x) - series).abs() <= 1e-12 * size).all())
