"""Auto keeps its promise, says why, and costs nothing where it is not used."""

import copy
import logging
import math
import re
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad import (
    Auto,
    Exact,
    MultiheadAttention,
    Multipole,
    RandomFeatures,
    Taylor,
    Window,
    attention,
    cost,
    measure_error,
    native,
)  # fmt: skip
from subquad._calls.call import Call
from subquad.planning import asker
from subquad.planning import auto as module
from subquad.planning.asker import Asker
from subquad.planning.asking_cost import exact_rows_flops, method_rows_flops
from subquad.planning.multipole_rows import is_rowwise, multipole_rows
from subquad.planning.rows import exact_rows, method_rows, pick_rows, risks

ASKING_SHARE = module.MAX_ASKING_SHARE


@pytest.fixture(autouse=True, scope="module")
def patient() -> Iterator[None]:
    """Let short calls be asked too, which otherwise are exact: asking would cost more than a tenth of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_ASKING_SHARE", math.inf)
        yield


def drawn(seed: int, n: int, d: int, scale: float, kind: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 2, n, d, generator=generator) for _ in range(3))
    q, k = q * scale**0.5, k * scale**0.5
    if kind == "outliers":
        k[:, :, seed % n] *= 50
        q[:, :, (7 * seed) % n] *= 50
    elif kind == "mean":
        k, v = k + 2 * torch.randn(1, 2, 1, d, generator=generator), v + 1
    elif kind == "small spread":  # Any average is near the mean, but a vanishing normalizer is not.
        k, v = k + 3, 10 + 0.1 * v
        q = q * 0 + q[:, :, :1]
    elif kind == "rare rows":  # All of one norm; one in a hundred meets the one loud key head on.
        q = 3 * torch.nn.functional.normalize(q, dim=-1)
        k[:, :, 5] = 20 * torch.nn.functional.normalize(k[:, :, 5], dim=-1)
        q[:, :, 50::100] = 3 * torch.nn.functional.normalize(k[:, :, 5:6], dim=-1)
    elif kind == "clusters":
        q = q * 0.1 + torch.randn(1, 2, 4, d, generator=generator)[:, :, torch.randint(4, (n,), generator=generator)]
    elif kind == "near":  # Logits fall with the cosine of the distance between two places; `scale` is the reach.
        angle = math.pi / n * torch.arange(n)
        q, k = q * 0, 0.01 * k
        k[..., :2] = q[..., :2] = torch.stack([angle.cos(), angle.sin()], -1)
        q = q * (d**0.5 / (scale * angle[20]) ** 2)
    return [q, k, v]


@settings(max_examples=120)
@given(
    seed=st.integers(0, 10**6),
    n=st.sampled_from([300, 700, 1500]),
    d=st.sampled_from([2, 4, 8]),
    exponent=st.floats(-2, 1),
    kind=st.sampled_from(["normal", "outliers", "mean", "clusters", "small spread", "rare rows"]),
    max_error=st.sampled_from([0.5, 0.1, 0.01, 0.001]),
    is_causal=st.booleans(),
)
def test_the_promise_is_kept(seed, n, d, exponent, kind, max_error, is_causal) -> None:
    q, k, v = drawn(seed, n, d, 10**exponent, kind)
    output = attention(q, k, v, is_causal=is_causal, method=Auto(max_error))
    exact = attention(q.double(), k.double(), v.double(), is_causal=is_causal)
    assert float((output - exact).norm() / exact.norm()) <= max_error


@pytest.mark.parametrize("kind", ["small spread", "rare rows"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_promise_is_kept_where_it_is_hard(kind, is_causal) -> None:
    for seed in range(6):
        for max_error in (0.2, 0.1):
            q, k, v = drawn(seed, 4000, 4 if kind == "small spread" else 8, 0.3, kind)
            output = attention(q, k, v, is_causal=is_causal, method=Auto(max_error))
            exact = attention(q.double(), k.double(), v.double(), is_causal=is_causal)
            assert float((output - exact).norm() / exact.norm()) <= max_error


@pytest.mark.skipif(not native.available(), reason="no kernels")
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_promise_is_kept_by_windows(is_causal) -> None:
    found = set()
    for seed, reach in enumerate((2.0, 8.0, 20.0)):
        q, k, v = drawn(seed, 9000, 4, reach, "near")
        exact = attention(q.double(), k.double(), v.double(), is_causal=is_causal)
        for max_error in (0.3, 0.01):
            found.add(Auto(max_error).choose(q, k, v, is_causal=is_causal).method)
            output = attention(q, k, v, is_causal=is_causal, method=Auto(max_error))
            assert float((output - exact).norm() / exact.norm()) <= max_error
    assert {Exact(), Window(128, sinks=4)} <= found


def test_all_kinds_of_choices_are_among_those_tested() -> None:
    found = set()
    for seed in range(8):
        for scale in (0.001, 0.03, 0.3, 3.0):
            for kind in ("normal", "mean"):
                choice = Auto(0.1).choose(*drawn(seed, 1500, 4, scale, kind))
                found.add((type(choice.method).__name__, choice.error.known_by))
    assert {("Exact", "definition"), ("Taylor", "bound"), ("Taylor", "sample")} <= found


def test_a_graph_cannot_decide() -> None:
    compiled = torch.compile(lambda *x: attention(*x, method="auto"), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"Auto decides by numbers, which a fixed graph does not have"):
        compiled(*drawn(0, 20, 4, 0.1, "normal"))


@pytest.mark.parametrize("decide", [lambda *x: attention(*x, method="auto"), lambda *x: Auto().choose(*x)])
def test_a_recorded_program_says_the_same_of_attention_and_of_choose(decide) -> None:
    inputs = tuple(drawn(0, 20, 4, 0.1, "normal"))
    with pytest.raises(ValueError, match=f"^{re.escape(module.AUTO_IN_GRAPH)}$"):
        torch.jit.trace(decide, inputs, check_trace=False)
    with pytest.raises(Exception, match="which a fixed graph does not have"):
        torch.compile(decide, backend="eager", fullgraph=True)(*inputs)


def test_choose_breaks_a_graph_and_decides() -> None:
    inputs = drawn(0, 20, 4, 0.1, "normal")
    compiled = torch.compile(lambda *x: Auto(0.1).choose(*x).method, backend="eager")
    assert compiled(*inputs) == Auto(0.1).choose(*inputs).method


def test_autocast_and_precision() -> None:
    q, k, v = drawn(0, 3000, 4, 0.01, "normal")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = Auto(0.1).choose(q, k, v.bfloat16())
        assert attention(q, k, v.bfloat16(), method=Auto(0.1)).dtype == torch.bfloat16
        assert measure_error(q, k, v, method="taylor") == measure_error(q.clone(), k, v, method="taylor")
        inside = measure_error(q, k, v, method="taylor")
    assert isinstance(mixed.method, Taylor | RandomFeatures)
    assert inside == measure_error(q, k, v, method="taylor")
    for dtype in (torch.float64, torch.bfloat16):
        assert attention(q.to(dtype), k.to(dtype), v.to(dtype), method=Auto(0.1)).dtype == dtype
    negative = Auto(0.1).choose(q, k, v, scale=-0.5)
    assert measure_error(q, k, v, scale=-0.5, method=negative.method).relative <= 0.1
    ids = (torch.arange(3000) // 1000).expand(1, -1)
    packed = Auto(0.1).choose(q, k, v, segment_ids=ids)
    assert measure_error(q, k, v, segment_ids=ids, rows=3000, method=packed.method).relative <= 0.1


def test_easy_inputs_go_linear_and_hard_ones_do_not() -> None:
    q, k, v = drawn(0, 4000, 8, 0.1, "normal")
    easy = Auto(0.05).choose(q, k, v, is_causal=True)
    assert isinstance(easy.method, Taylor)
    assert easy.reason.startswith(f"Taylor({easy.method.degree}): its relative error is ")
    assert torch.equal(attention(q, k, v, is_causal=True, method=Auto(0.05)),
                       attention(q, k, v, is_causal=True, method=easy.method))  # fmt: skip
    hard = Auto(0.05).choose(q * 100, k, v, is_causal=True)
    assert hard.method == Exact()
    assert "no faster method stays within 0.05; closest is " in hard.reason
    short = Auto(0.05).choose(q[:, :, :30], k[:, :, :30], v[:, :, :30])
    assert short.reason == "Exact(): no approximation is faster at this shape."


def test_tiny_logits_have_a_bound_and_need_no_sample(monkeypatch) -> None:
    q, k, v = drawn(0, 4000, 8, 1e-4, "normal")
    monkeypatch.setattr(asker, "method_rows", lambda *_: pytest.fail("it looked at rows"))
    choice = Auto(0.01).choose(q, k, v + 3)
    assert choice.error.known_by == "bound"
    assert choice.error.relative <= 0.01


@pytest.mark.filterwarnings("ignore:.*weights can be negative")
@pytest.mark.parametrize("degree", [1, 2, 3, 4])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_bound_holds(degree, is_causal) -> None:
    """Also where an odd series is not positive: its bound is infinity."""
    for seed, scale in enumerate((0.01, 0.1, 0.3, 1.0, 3.0)):
        q, k, v = (x.double() for x in drawn(seed, 200, 4, scale, "normal"))
        call = Call.of(q, k, v, is_causal=is_causal)
        exact = attention(q, k, v, is_causal=is_causal)
        moved = (attention(q, k, v, is_causal=is_causal, method=Taylor(degree)) - exact).square().sum()
        bound = asked(call).bound(Taylor(degree))
        assert float(moved) <= bound
    assert (bound == math.inf) == (degree % 2 == 1)


def asked(call: Call, budget: float = math.inf, max_error: float = 0.1) -> Asker:
    """Questions on a call, of which 64 rows are known."""
    picked = pick_rows(call, 64)
    exact, shape = exact_rows(call, picked), module._shape(call, False)
    return Asker(call, shape, max_error, picked, exact, picked.total(exact.square().sum(-1))[0], risks(call), budget)


def test_a_common_mean_of_keys_is_taken_out_where_nobody_looks_ahead() -> None:
    q, k, v = drawn(0, 3000, 8, 0.3, "normal")
    k = k + 6
    centered = Auto(0.05).choose(q, k, v)
    assert centered.method.key_shift is not None
    assert "centered" in centered.reason
    assert measure_error(q, k, v, method=centered.method).relative <= 0.05
    assert getattr(Auto(0.05).choose(q, k, v, is_causal=True).method, "key_shift", None) is None


def test_odd_degrees_are_taken_by_bound_alone() -> None:
    """Their weights can be negative, so that one row that was not sampled can be off by any amount."""
    found = set()
    for seed in range(10):
        for scale in (0.001, 0.01, 0.1, 0.5):
            choice = Auto(0.3).choose(*drawn(seed, 3000, 4, scale, "mean"), is_causal=True)
            if isinstance(choice.method, Taylor) and choice.method.degree % 2:
                found.add(choice.error.known_by)
    assert found == {"bound"}


def test_what_has_no_linear_form_is_exact() -> None:
    q, k, v = drawn(0, 2000, 4, 0.01, "normal")
    assert not isinstance(Auto(0.1).choose(q, k, v).method, Exact)
    causal = torch.ones(2000, 2000, dtype=torch.bool).tril()
    for mask in (causal.T, torch.rand(2000), torch.where(causal, 0.5, -math.inf)):
        assert Auto(0.1).choose(q, k, v, mask).method == Exact()
    assert Auto(0.1).choose(q, k, v, dropout_p=0.1).method == Exact()
    for mask in (causal, torch.zeros(2000), torch.where(causal, 0.0, -math.inf)):
        assert not isinstance(Auto(0.1).choose(q, k, v, mask).method, Exact)
    keys = torch.rand(2000) > 0.5
    assert not isinstance(Auto(0.1).choose(q, k, v, keys).method, Exact)
    bad = k.clone()
    bad[..., 0, 0] = math.nan
    assert Auto(0.1).choose(q, bad, v).method == Exact()
    hidden = torch.arange(2000) > 0
    assert not isinstance(Auto(0.1).choose(q, bad, v, key_padding_mask=hidden.expand(1, -1)).method, Exact)
    assert Auto(0.1).choose(q, k, v * 0).method == Exact()
    assert Auto(0.1).choose(q[:, :, :0], k, v).reason == "Exact(): there is nothing to compute."


def test_masks_and_groups_count() -> None:
    q, k, v = drawn(0, 2000, 4, 0.01, "normal")
    k = k.clone()
    k[:, :, ::2] *= 1000
    assert Auto(0.05).choose(q, k, v).method == Exact()
    keep = (torch.arange(2000) % 2 == 1).expand(1, -1)
    choice = Auto(0.05).choose(q.repeat(1, 2, 1, 1), k, v, enable_gqa=True, key_padding_mask=keep)
    assert isinstance(choice.method, Taylor)
    alone = Auto(0.05).choose(q, k, v, key_padding_mask=keep)
    assert measure_error(q, k, v, key_padding_mask=keep, method=alone.method).relative <= 0.05


def test_it_says_what_it_took(caplog) -> None:
    with caplog.at_level(logging.INFO, logger="subquad"):
        attention(*drawn(0, 2000, 4, 0.01, "normal"), method="auto")
    assert len(caplog.records) == 1
    assert ": its relative error is " in caplog.records[0].getMessage()


def test_a_sequence_in_pieces_is_refused() -> None:
    q, k, v = drawn(0, 20, 4, 0.01, "normal")
    with pytest.raises(ValueError, match="state: Auto decides by the whole sequence"):
        attention(q, k, v, method="auto", return_state=True)


def test_gradients_flow_and_modules_take_it() -> None:
    q, k, v = (x.requires_grad_() for x in drawn(0, 3000, 4, 0.01, "normal"))
    grads = torch.autograd.grad(attention(q, k, v, method=Auto(0.1)).sum(), (q, k, v))
    assert all(grad.isfinite().all() for grad in grads)
    module_ = MultiheadAttention(16, 4, method=Auto(0.1), batch_first=True)
    x = torch.randn(1, 50, 16)
    assert module_(x, x, x, need_weights=False)[0].shape == x.shape


@pytest.mark.parametrize(("arguments", "message"), [
    (dict(max_error=0), "max_error: expected a positive number"),
    (dict(check_rows=3), "check_rows: expected an integer >= 8, got 3"),
    (dict(check_rows=16.0), "check_rows: expected an integer >= 8, got 16.0"),
])  # fmt: skip
def test_nonsense_is_refused(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        Auto(**arguments)


def test_a_method_named_by_hand_is_not_questioned(monkeypatch) -> None:
    questions = []
    monkeypatch.setattr(module, "_chosen", lambda *arguments: questions.append(arguments) or module._exact("asked"))
    inputs = drawn(0, 20, 4, 100.0, "normal")
    attention(*inputs, method="taylor")
    assert not questions
    attention(*inputs, method="auto")
    assert len(questions) == 1


def trained(n: int, seed: int = 0) -> list[torch.Tensor]:
    """Large logits, where no feature map is accurate, and keys in clusters."""
    generator = torch.Generator().manual_seed(seed)
    centers = torch.randn(1, 2, 40, 64, generator=generator)
    q, k = (centers[:, :, torch.randint(40, (n,), generator=generator)] for _ in range(2))
    noise = torch.randn(3, 1, 2, n, 64, generator=generator)
    return [3 * (q + 0.3 * noise[0]), k + 0.3 * noise[1], noise[2]]


@pytest.mark.parametrize(("n", "remember"), [(512, False), (4096, False), (4096, True)])
def test_all_questions_cost_a_tenth_of_exact_attention(n, remember, monkeypatch) -> None:
    """What is predicted for the rows that were computed, added up, stays within the share."""
    monkeypatch.setattr(module, "MAX_ASKING_SHARE", ASKING_SHARE)
    q, k, v = trained(n)
    shape, spent = module._shape(Call.of(q, k, v), False), []

    def rows(method, call, picked):
        spent.append(method_rows_flops(method, shape, picked.places.shape[-1]))
        return method_rows(method, call, picked)

    def exact(call, picked, dtype):
        spent.append(exact_rows_flops(shape, picked.places.shape[-1]))
        return exact_rows(call, picked, dtype)

    monkeypatch.setattr(asker, "method_rows", rows)
    monkeypatch.setattr(module, "exact_rows", exact)
    auto = Auto(0.01, remember=remember)
    if remember:  # a method that fails
        assert auto.choose(q / 300, k, v).method != Exact()
        spent.clear()
    reason = auto.choose(q, k, v).reason
    assert sum(spent) <= 0.1 * cost("exact", query_length=n, head_dim=64, heads=2).flops
    if n == 512:
        is_short = "would take too long for such a short call" if native.available() else "no approximation is faster"
        assert not spent and is_short in reason
    else:
        assert len(spent) > 1


def test_what_a_question_cost_is_gone() -> None:
    call = Call.of(*trained(1000), is_causal=True)
    price = method_rows_flops(Taylor(4), module._shape(call, False), 16)  # of the first rows, on which it fails
    poor = asked(call, budget=1.5 * price)
    assert [poor.ask(Taylor(4)).relative is None for _ in range(2)] == [False, True]


def test_a_method_that_is_far_off_is_tried_on_few_rows_only(monkeypatch) -> None:
    q, k, v = trained(3000)
    tried = []
    monkeypatch.setattr(asker, "method_rows", lambda m, call, picked: tried.append(
        (m, picked.places.shape[-1])) or method_rows(m, call, picked))  # fmt: skip
    questions = asked(Call.of(q, k, v, is_causal=True))
    assert questions.ask(Taylor(2)).relative > 0.1
    assert tried == [(Taylor(2), 16)]  # 32 of both heads together
    assert questions.ask(RandomFeatures(64, "hyperbolic")).known_by == "prediction" and len(tried) == 1
    assert "closest is Taylor(2)" in questions.conclusion()
    poor = asked(Call.of(q, k, v, is_causal=True), budget=0.0)
    assert poor.ask(Taylor(2)).relative is None or poor.ask(Taylor(2)).known_by == "bound"
    assert "checking Taylor(2) would cost too much here" in poor.conclusion()


@pytest.mark.skipif(not native.available(), reason="no kernels")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("sizes", [(900, 900, 4, 2), (300, 500, 2, 2), (500, 300, 2, 1)])
def test_rows_of_multipole_are_those_of_the_whole_call(is_causal, sizes) -> None:
    n, m, heads, key_heads = sizes
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, length, w, generator=generator) for h, length, w in (
        (heads, n, 16), (key_heads, m, 16), (key_heads, m, 10)))  # fmt: skip
    call = Call.of(q, k, v, is_causal=is_causal, enable_gqa=True, scale=0.4)
    places = pick_rows(call, 40).places
    whole = attention(q, k, v, is_causal=is_causal, enable_gqa=True, scale=0.4, method=Multipole())
    expected = call.layout.fold_query(whole).gather(2, places[..., None].expand(-1, -1, -1, 10))
    torch.testing.assert_close(multipole_rows(Multipole(), call, places), expected.double(), rtol=1e-5, atol=1e-6)
    hidden = Call.of(q, k, v, is_causal=is_causal, enable_gqa=True, key_padding_mask=torch.arange(m).expand(2, -1) > 3)
    assert is_rowwise(call) and not is_rowwise(hidden)


def test_an_answer_is_remembered_and_the_promise_stays(monkeypatch) -> None:
    questions = []
    original = module._chosen
    monkeypatch.setattr(module, "_chosen", lambda *a: questions.append(a[3:]) or original(*a))
    auto = Auto(0.1, remember=True)
    easy, hard = drawn(0, 2000, 4, 0.01, "normal"), drawn(0, 2000, 4, 100.0, "normal")
    first = auto.choose(*easy)
    assert not isinstance(first.method, Exact)
    assert auto.choose(*easy).method == first.method
    assert questions == [(None,), (first.method,)], "only the remembered method is checked"
    assert auto.choose(*hard).method == Exact(), "it failed the check, and so did all others"
    assert len(questions) == 3, "both with the same rows and the same budget"
    for _ in range(module.REMEMBERED_CALLS):
        reason = auto.choose(*easy).reason
        assert reason.startswith("Exact(): as for the last call of this shape: no faster method stays within 0.1; ")
    assert len(questions) == 3
    assert auto.choose(*easy).method == first.method, "asked again"
    assert "last call" not in auto.choose(*easy, is_causal=True).reason, "another shape"
    assert copy.copy(auto)._memory == {} and copy.copy(auto) == auto
    assert Auto(0.1).choose(*easy).method == first.method and not Auto(0.1)._memory
    layers = [MultiheadAttention(16, 4, method=auto, batch_first=True) for _ in range(2)]
    x = torch.randn(1, 50, 16)
    layers[0](x, x, x, need_weights=False)
    assert [len(layer.method._memory) for layer in layers] == [1, 0], "each module has its own memory"
    with pytest.raises(ValueError, match="remember: expected True or False, got 1"):
        Auto(remember=1)


def test_a_memory_has_a_limit() -> None:
    auto = Auto(0.1, remember=True)
    lengths = range(1, module.MAX_REMEMBERED_SHAPES + 6)
    for n in lengths:
        auto.choose(*drawn(0, n, 4, 1.0, "normal"))
        auto.choose(*drawn(0, 1, 4, 1.0, "normal"))  # used again and again: never the oldest one
    kept = [shape.query_length for shape, *_ in auto._memory]
    assert len(kept) == module.MAX_REMEMBERED_SHAPES and kept[-1] == 1 and kept[0] == 7


@settings(max_examples=60)
@given(
    seeds=st.lists(st.tuples(st.integers(0, 10**6), st.floats(-2, 1)), min_size=3, max_size=3),
    kind=st.sampled_from(["normal", "outliers", "mean", "small spread", "rare rows"]),
    max_error=st.sampled_from([0.3, 0.1, 0.01]),
    is_causal=st.booleans(),
)
def test_the_promise_is_kept_where_answers_are_remembered(seeds, kind, max_error, is_causal) -> None:
    """By calls of one shape whose numbers have nothing in common."""
    auto = Auto(max_error, remember=True)
    for seed, exponent in seeds:
        q, k, v = drawn(seed, 700, 4, 10**exponent, kind)
        output = attention(q, k, v, is_causal=is_causal, method=auto)
        exact = attention(q.double(), k.double(), v.double(), is_causal=is_causal)
        assert float((output - exact).norm() / exact.norm()) <= max_error


def test_it_works_where_the_machine_was_never_calibrated(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path))
    assert isinstance(Auto(0.05).choose(*drawn(0, 4000, 4, 0.01, "normal")).method, Taylor)
    monkeypatch.setattr(module, "MAX_ASKING_SHARE", ASKING_SHARE)
    assert Auto(0.05).choose(*drawn(0, 30, 4, 0.01, "normal")).method == Exact()
    assert not list(tmp_path.iterdir())
