"""The plan: the right choice, and the reason in words."""

import re

import pytest
import torch

from subquad import (
    Auto,
    BlockSparse,
    Exact,
    Linear,
    Multipole,
    RandomFeatures,
    Separable,
    Taylor,
    Window,
    cost,
    crossover,
    error,
    measure_error,
    multihead_cost,
    native,
    plan,
)  # fmt: skip
from subquad.methods import label_of
from subquad.planning.calibration_file import predicted_seconds
from subquad.planning.seconds import Calibration
from subquad.planning.shape import Shape
from subquad.planning.text import many

CPU = torch.device("cpu")


def test_short_sequences_are_exact() -> None:
    found = plan(query_length=512, head_dim=64, heads=8, logit_range=0.5)
    assert found.method == Exact()
    assert found.reason.startswith("Exact(): the fastest at this length, ")
    assert "the fastest approximation within 0.05, takes" in found.reason
    assert " tokens on." in found.reason


def test_the_first_approximation_that_wins_is_named() -> None:
    """Not the one that is fastest here, if another one overtakes exact attention earlier."""
    shape = dict(head_dim=64, heads=8, is_causal=True, logit_range=0.5)
    found = plan(query_length=512, **shape)
    length = int(re.search(r"wins from about ([\d,]+) tokens on", found.reason)[1].replace(",", ""))
    assert plan(query_length=int(0.9 * length), **shape).method == Exact()
    assert plan(query_length=int(1.1 * length), **shape).method != Exact()


def test_random_features_rest_on_norms_that_a_range_does_not_tell() -> None:
    found = plan(query_length=100_000, head_dim=64, heads=8, is_causal=True, logit_range=0.5)
    assert isinstance(found.method, RandomFeatures)
    assert "if queries and keys have similar norms" in found.reason


def test_a_short_sample_of_a_long_plan_is_said() -> None:
    q, k, v = torch.randn(3, 1, 1, 64, 16, generator=torch.Generator().manual_seed(0)).mul(0.3).unbind()
    assert "of a sample of 64 tokens" in plan(sample=(q, k, v), query_length=100_000).reason
    assert "of a sample" not in plan(sample=(q, k, v), max_error=0.5).reason


def test_the_margin_of_a_sample_is_said_and_holds_for_all_errors() -> None:
    q, k, v = torch.randn(3, 1, 2, 512, 16, generator=torch.Generator().manual_seed(0)).mul(0.55).unbind()
    found = plan(sample=(q, k, v), query_length=100_000, max_error=0.1)
    known = [c for c in found.candidates if c.error.relative is not None]
    assert {"sample", "prediction"} <= {c.error.known_by for c in known}
    assert any(0.05 < c.error.relative <= 0.1 for c in known if c.error.known_by == "prediction")
    assert all(c.is_acceptable == (2 * c.error.relative <= 0.1) for c in known)
    assert "Within budget: 2 times the error is at most 0.1, because rows" in str(found)
    assert "within 0.1 with a safety margin of 2." in found.reason
    assert "Within budget:" not in str(plan(query_length=4096, head_dim=64, logit_range=0.5))


def test_a_range_that_is_not_hopeless_asks_for_a_sample() -> None:
    found = plan(query_length=8192, head_dim=16, logit_range=3)
    assert found.method == Exact()
    assert "no approximation can promise 0.05 from the range alone" in found.reason
    assert "a sample may show that fewer suffice." in found.reason


def test_exact_attention_costs_more_in_wider_heads_and_never_nothing() -> None:
    def seconds(**shape) -> float:
        return predicted_seconds(Exact(), Shape.of(**shape))

    narrow, wide = (seconds(query_length=2048, head_dim=d) for d in (256, 1024))
    assert wide == pytest.approx(4 * narrow)
    assert seconds(query_length=1, key_length=100_000, head_dim=64, is_causal=True) > 1e-6


def test_few_keys_make_few_pairs(torch_alone) -> None:
    """Blocks of rows are counted with the keys that there are."""
    shapes = (Shape.of(query_length=10_000, key_length=m, head_dim=16, is_causal=True) for m in (10, 10_000))
    short, square = (predicted_seconds(Taylor(2), shape) for shape in shapes)
    assert short < square / 3


@pytest.mark.parametrize("name", ["is_causal", "training"])
def test_flags_are_true_or_false(name) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected True or False, got 'no'"):
        plan(query_length=10, head_dim=4, **{name: "no"})


def test_long_sequences_with_small_logits_are_taylor() -> None:
    found = plan(query_length=1_000_000, head_dim=16, logit_range=0.5)
    assert found.method == Taylor(2)
    assert " times as fast as exact attention (" in found.reason
    assert re.search(r"with a relative error of (at most|up to about) [\d.]+, within 0.05\.", found.reason)
    assert "with a relative error of up to about 0.022, within 0.05." in found.reason
    assert found.choice.seconds == min(c.seconds for c in found.candidates if c.is_acceptable and c.is_chosen_form)


def test_large_logits_are_exact_and_it_says_why() -> None:
    found = plan(query_length=1_000_000, head_dim=64, logit_range=20)
    assert found.method == Exact()
    assert found.reason.startswith("Exact(): no feature map is accurate enough. With logits up to 20")
    assert "degree 71, 10^39 features at width 64, or 10^12 random features" in found.reason
    assert not any(c.is_acceptable for c in found.candidates if c.method != Exact())


def test_extremes_have_a_sentence_too() -> None:
    assert "of a degree above 500, or 10^55 random features" in plan(
        query_length=10**6, head_dim=64, logit_range=1000).reason  # fmt: skip
    assert plan(query_length=10**6, head_dim=64, logit_range=0.5, max_error=1e-300).method == Exact()
    assert plan(query_length=10**6, head_dim=64, logit_range=0).method == Taylor(0)


def test_unknown_logits_are_exact() -> None:
    found = plan(query_length=1_000_000, head_dim=64)
    assert found.method == Exact()
    assert "pass logit_range= or sample=" in found.reason
    assert all(c.error.relative is None for c in found.candidates if c.method != Exact())


def test_a_sample_tells_more_than_a_range() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 1500, 8, generator=generator).unbind()
    k = k * 0.3 + 4
    found = plan(sample=(q * 0.3, k, v), query_length=100_000)
    assert found.method.key_shift is not None
    assert label_of(found.method).endswith("centered")
    assert found.choice.error.known_by == "sample"
    assert found.choice.error.relative * 2 <= 0.05
    methods = {type(c.method) for c in found.candidates}
    assert methods >= {Exact, Taylor, RandomFeatures, Separable}
    with pytest.raises(ValueError, match="query_length: expected a positive integer, got 0"):
        plan(sample=(q, k, v), query_length=0)
    with pytest.raises(ValueError, match="sample: expected finite numbers"):
        plan(sample=(q / 0, k, v))
    hard = plan(sample=(q * 30, k, v), query_length=100_000, max_error=1e-7)
    assert hard.method == Exact()
    assert "no approximation stays within 1e-07 on the sample, with a safety margin of 2; the closest, " in hard.reason


def test_what_is_inferred_from_a_sample_is_measured_before_it_is_taken() -> None:
    """A few loud heads, as in trained models: there the error of random features hardly falls with their number."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, 600, 16, generator=generator).unbind()
    q = q * torch.tensor([0.3, 0.3, 8.0, 8.0])[:, None, None]
    for max_error in (0.9, 0.7, 0.5):
        found = plan(sample=(q, k, v), query_length=10**7, max_error=max_error)
        assert found.choice.error.known_by in ("sample", "definition")
        if found.method != Exact():
            assert measure_error(q, k, v, rows=600, method=found.method).relative <= max_error


def test_both_forms_are_listed_and_only_the_one_that_runs_is_chosen(torch_alone) -> None:
    found = plan(query_length=4096, head_dim=16, logit_range=0.5, is_causal=True)
    assert {c.form for c in found.candidates} == {"exact", "dense", "chunked"}
    assert {c.form for c in plan(query_length=4096, head_dim=16, logit_range=0.5).candidates} == {
        "exact", "dense", "linear"}  # fmt: skip
    assert found.choice.is_chosen_form
    text = str(found).splitlines()
    assert text[0].split() == ["method", "form", "time", "peak", "memory", "relative", "error", "within", "budget"]
    assert text[-1] == found.reason
    assert sum(line.endswith("chosen") for line in text) == 1
    assert [c.seconds for c in found.candidates] == sorted(c.seconds for c in found.candidates)


def test_worse_than_zeros_is_said() -> None:
    assert "worse than returning zeros" in str(plan(query_length=4096, head_dim=16, logit_range=3))


@pytest.mark.parametrize(("arguments", "message"), [
    (dict(query_length=-5, head_dim=8), "query_length: expected a positive integer, got -5"),
    (dict(query_length=5.5, head_dim=8), "query_length: expected a positive integer, got 5.5"),
    (dict(query_length=5), "head_dim: expected an integer, or a sample to take it from, got None"),
    (dict(query_length=5, head_dim=8, heads=0), "heads: expected a positive integer, got 0"),
    (dict(query_length=5, head_dim=8, heads=4, key_heads=3), "key_heads: expected a number that divides the 4 heads"),
    (dict(query_length=5, head_dim=8, max_error=0), "max_error: expected a positive number"),
    (dict(query_length=5, head_dim=8, logit_range=-1), "logit_range: expected a finite number >= 0"),
    (dict(query_length=5, head_dim=8, logit_range=1, sample=(1, 2, 3)), "sample: expected either logit_range or"),
])  # fmt: skip
def test_nonsense_is_refused(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        plan(**arguments)


def test_the_crossover_in_time_is_where_the_predictions_cross() -> None:
    sizes = dict(head_dim=16, heads=4, is_causal=True)
    length = crossover("exact", "taylor", by="time", **sizes)

    def gain(n: int) -> float:
        shape = Shape.of(query_length=n, **sizes)
        return predicted_seconds(Exact(), shape) - predicted_seconds(Taylor(2), shape)

    assert gain(length) > 0 >= gain(length - 1)
    assert gain(4 * length) > 0


needs_kernels = pytest.mark.skipif(not native.available(), reason="Multipole and Window are timed with the kernels")


@needs_kernels
@pytest.mark.parametrize("knowledge", [{}, {"logit_range": 20}, {"logit_range": 0.5}])
def test_multipole_and_window_are_always_listed(knowledge) -> None:
    """Their time is known without a sample; their error is not, and the table says how to find it."""
    found = plan(query_length=8000, heads=12, head_dim=64, is_causal=True, **knowledge)
    listed = {type(c.method): c for c in found.candidates}
    assert {Multipole, Window} <= listed.keys()
    assert listed[Multipole].seconds > 0 and listed[Multipole].error.relative is None
    (line,) = (line for line in str(found).splitlines() if line.startswith("Multipole()"))
    assert "measure with sample=" in line and line.endswith("unknown")


@needs_kernels
def test_the_reason_says_what_a_sample_would_change() -> None:
    found = plan(query_length=8000, heads=12, head_dim=64, is_causal=True)
    assert found.method == Exact()
    speed = re.search(
        r"sample=\) would measure the error of .*Multipole\(\) \(([\d.]+) times as fast as exact", found.reason
    )[1]
    exact, multipole = (next(c for c in found.candidates if c.method == m) for m in (Exact(), Multipole()))
    assert float(speed) == pytest.approx(exact.seconds / multipole.seconds, rel=0.05)
    short = plan(query_length=64, heads=12, head_dim=64, is_causal=True)
    assert short.reason.endswith("A sample would not change that: nothing else is faster here.")
    sample = torch.randn(3, 1, 1, 3000, 16, generator=torch.Generator().manual_seed(0)).unbind()
    assert "A sample" not in plan(sample=sample, is_causal=True).reason


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_plan_for_training_from_scratch(is_causal) -> None:
    shape = dict(query_length=16_384, head_dim=64, heads=8, is_causal=is_causal)
    found = plan(**shape, purpose="train")
    assert found.choice is found.candidates[0], "the fastest"
    assert all(c.is_acceptable and c.is_chosen_form for c in found.candidates)
    methods = {type(c.method) for c in found.candidates}
    assert methods >= {Exact, Linear, Taylor, RandomFeatures, Separable}
    for c in found.candidates:  # One step of training, and the state afterwards.
        price = cost(c.method, **shape, training=True)
        assert (c.peak_bytes, c.state_bytes) == (price.peak_bytes, price.state_bytes)
    assert plan(**shape, purpose="train", training=False).choice.seconds < found.choice.seconds
    text = str(found).splitlines()
    assert text[0].split()[-4:] == ["state", "can", "recall", "choice"]
    recall = {c.method: c.recall for c in found.candidates}
    assert recall[Exact()] == "all tokens"
    assert recall[Taylor(2)] == "a summary of all tokens (2,145 features per head), not single ones"
    if native.available():
        near = "the last 128" if is_causal else "127 on either side"
        assert recall[Window(128, sinks=4)] == f"{near} and the first 4 tokens of each layer"
        assert "Multipole() is the fastest that can recall any token" in found.reason
    assert " times as fast as exact attention. It can recall a summary of all tokens (" in found.reason
    short = plan(query_length=16, head_dim=64, heads=8, is_causal=is_causal, purpose="train")
    assert short.method != Exact() or short.reason.endswith("It can recall all tokens.")


@pytest.mark.parametrize(("arguments", "message"), [
    (dict(purpose="serve"), "purpose: expected one of 'swap', 'train', got 'serve'"),
    (dict(purpose="train", logit_range=1), "logit_range: leave it out with purpose='train'"),
    (dict(purpose="train", max_error=0.1), "max_error: leave it out with purpose='train'"),
    (dict(purpose="train", sample=()), "sample: leave it out with purpose='train'"),
])  # fmt: skip
def test_a_purpose_has_its_own_arguments(arguments, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        plan(query_length=8, head_dim=8, **arguments)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plan_and_cost_name_one_memory_figure(is_causal, training, dtype) -> None:
    """`subquad bench` prints that of `cost`, see its tests."""
    shape = dict(query_length=8000, heads=12, head_dim=64, is_causal=is_causal, training=training)
    for c in plan(**shape, logit_range=0.5).candidates:
        if c.is_chosen_form:
            price = cost(c.method, **shape, dtype=torch.float32)
            assert (c.form, c.peak_bytes) == (price.form, price.peak_bytes), c.name
    for method in (Taylor(2), RandomFeatures(64), Linear("elu"), Separable(), Exact()):
        assert Calibration({}).form_of(method, Shape.of(**shape), dtype) == cost(method, **shape, dtype=dtype).form


def test_a_plan_has_a_short_repr_though_key_shifts_are_long() -> None:
    q, k, v = torch.randn(3, 1, 12, 256, 64, generator=torch.Generator().manual_seed(0)).unbind()
    found = plan(sample=(q * 0.3, k * 0.3 + 4, v), query_length=100_000)
    assert found.method.key_shift is not None
    assert repr(found) == f"Plan({label_of(found.method)}, purpose='swap', candidates={len(found.candidates)})"
    assert max(len(repr(c)) for c in found.candidates) < 200
    assert "centered" in repr(found.choice)


def test_sizes_may_be_integers_of_numpy() -> None:
    np = pytest.importorskip("numpy")
    n, d, two = np.int64(4096), np.int64(16), np.int32(2)
    shape = dict(query_length=n, head_dim=d, heads=two, key_heads=two, batch=two)
    plain = dict(query_length=4096, head_dim=16, heads=2, key_heads=2, batch=2)
    assert cost("taylor", **shape) == cost("taylor", **plain)
    assert plan(**shape, logit_range=two, max_error=np.float32(0.05)).method == plan(**plain, logit_range=2).method
    assert type(plan(**shape, logit_range=two).choice.peak_bytes) is int
    assert crossover("exact", "linear", head_dim=np.int64(64), max_length=np.int64(10**6)) == 66
    assert error("taylor", logit_range=np.int64(1)) == error("taylor", logit_range=1)
    assert multihead_cost(np.int64(64), np.int64(8), query_length=n) == multihead_cost(64, 8, query_length=4096)
    with pytest.raises(ValueError, match=r"head_dim: expected a positive integer, got np\.float64"):
        cost("taylor", query_length=8, head_dim=np.float64(16))


@pytest.mark.parametrize("method", ["auto", Auto()])
def test_auto_has_no_cost_before_a_call(method) -> None:
    for price in (cost, lambda method, query_length, head_dim: multihead_cost(8, 2, query_length=8, method=method)):
        with pytest.raises(ValueError, match="method: Auto decides by the numbers of each call, so its cost is not"):
            price(method, query_length=8, head_dim=4)


@pytest.mark.parametrize(("method", "kind", "message"), [
    ("auto", ValueError, "b: Auto decides by the numbers of each call"),
    (Auto(), ValueError, "b: Auto decides by the numbers of each call"),
    ("tailor", ValueError, "b: expected one of 'exact', "),
    (3, TypeError, "b: expected a name, a method such as"),
    (BlockSparse(torch.ones(1, 1, 1, dtype=torch.bool)), ValueError, "b: the layout of a BlockSparse"),
])  # fmt: skip
def test_a_crossover_names_the_argument_that_has_none(method, kind, message) -> None:
    with pytest.raises(kind, match=message):
        crossover("exact", method, head_dim=64)
    with pytest.raises(kind, match=f"a{message[1:]}"):
        crossover(method, "exact", head_dim=64)


def test_a_large_number_is_a_power_of_ten() -> None:
    assert [many(x) for x in (12, 123456, 2.0e9, float("inf"))] == ["12", "123,456", "10^9", "more than 10^300"]
