"""The warning about logits that are too large for a method: rare, and once for each line."""

import warnings

import pytest
import torch

from subquad import Linear, Multipole, RandomFeatures, Taylor, attention, sdpa
from subquad._calls.call import Call
from subquad.planning import far_range
from subquad.planning.far_range import typical_logit

pytestmark = pytest.mark.filterwarnings("always:.* is far outside its range:UserWarning")


@pytest.fixture(autouse=True)
def no_line_was_named(monkeypatch):
    monkeypatch.setattr(far_range, "_calls", {})


MESSAGE = "is far outside its range"


def drawn(scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 100, 16, generator=generator).unbind()
    return [scale * q, k, v]


def messages(call) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [each for each in found if MESSAGE in str(each.message)]


def test_the_typical_logit_is_their_root_mean_square():
    q, k, v = drawn()
    logits = q @ k.mT / 4
    found = typical_logit(Taylor(2), Call.of(q, k, v))
    assert found == pytest.approx(float(logits.square().mean().sqrt()), rel=0.1)
    assert typical_logit(Taylor(2), Call.of(q, k, v, scale=2.5)) == pytest.approx(10 * found)
    centered = typical_logit(Taylor(2, key_shift=[3.0] * 16), Call.of(q, k + 3, v))
    assert centered == pytest.approx(found, rel=1e-5)


def test_hidden_keys_do_not_count():
    q, k, v = drawn()
    keep = torch.ones(2, 100, dtype=torch.bool)
    keep[:, ::7] = False
    loud = torch.where(keep[:, None, :, None], k, torch.inf)
    expected = typical_logit(Taylor(2), Call.of(q, k, v, key_padding_mask=keep))
    assert typical_logit(Taylor(2), Call.of(q, loud, v, key_padding_mask=keep)) == expected


@pytest.mark.parametrize("method", [Taylor(2), Taylor(4), RandomFeatures(256)])
def test_usual_logits_are_fine_and_tenfold_ones_are_not(method):
    assert messages(lambda: attention(*drawn(), method=method)) == []
    (found,) = messages(lambda: attention(*drawn(10), method=method))
    assert found.filename == __file__
    assert "Multipole" in str(found.message)


@pytest.mark.parametrize("method", [Linear(), Multipole(), "exact", "window"])
def test_methods_without_a_prediction_say_nothing(method):
    assert messages(lambda: attention(*drawn(100), method=method)) == []


def test_a_line_is_named_once_and_each_line_for_itself():
    def first():
        for _ in range(9):
            attention(*drawn(10), method="taylor")

    def second():
        attention(*drawn(10), method="taylor")

    assert [each.lineno for each in messages(first)] == [first.__code__.co_firstlineno + 2]
    assert messages(first) == []
    assert len(messages(second)) == 1


def test_logits_that_grow_later_are_noticed():
    def step(scale):
        attention(*drawn(scale), method="taylor")

    def train():
        for number in range(40):
            step(1.0 if number < 20 else 10.0)

    assert len(messages(train)) == 1


def test_the_line_of_a_routed_model_is_named():
    def run():
        with sdpa("taylor"):
            torch.nn.functional.scaled_dot_product_attention(*drawn(10))

    (found,) = messages(run)
    assert (found.filename, found.lineno) == (__file__, run.__code__.co_firstlineno + 2)


def test_numbers_that_cannot_be_read_or_are_not_finite_say_nothing():
    q, k, v = drawn(10)
    q[0, 0, 0, 0] = torch.nan
    assert messages(lambda: attention(q, k, v, method="taylor")) == []
    q, k, v = drawn(10)
    assert messages(lambda: torch.func.vmap(lambda *x: attention(*x, method="taylor"))(q, k, v)) == []
    assert messages(lambda: attention(q[:, :, :0], k, v, method="taylor")) == []
