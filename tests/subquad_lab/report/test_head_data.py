"""The heads that the page explores: how they are stored, and that they are what they are called."""

import pytest
import torch

import subquad
from subquad_lab.report import head_data
from subquad_lab.report.head_data import BINARY, LARGEST, MOST_FEATURES, STORY, errors, heads, stored, unstored


@pytest.fixture(scope="module")
def found():
    return heads()


def weights(head):
    """Return the exact weights (n, n)."""
    n, width = head.query.shape
    logits = head.query.double() @ head.key.double().mT / width**0.5
    return logits.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)


def test_numbers_are_stored_to_half_a_step():
    tensors = torch.randn(3, 5, 8).unbind()
    content = b"".join(map(stored, tensors))
    (back,) = unstored(content, 5, 8, 1)
    for x, y in zip(tensors, back, strict=True):
        step = x.abs().amax(-1, keepdim=True) / 127
        assert ((x - y).abs() <= 0.5001 * step).all()


def test_a_cut_file_is_refused():
    with pytest.raises(ValueError, match=r"heads\.bin: expected 180 bytes, got 179"):
        next(unstored(bytes(179), 5, 8, 1))


def test_the_shipped_heads_belong_to_the_shipped_text(found):
    about, own = found
    assert "".join(about["tokens"]) == STORY.read_text().strip()
    assert [head.kind for head in own] == ["local", "sink", "induction", "diffuse"]
    assert BINARY.stat().st_size <= LARGEST
    assert len(about["sha256"]) == 64


def test_heads_are_what_they_are_called(found):
    _, (local, sink, induction, diffuse) = found
    rows = slice(64, None)
    assert float(weights(local).triu(-15)[rows].sum(-1).mean()) == pytest.approx(local.measure, abs=0.02)
    assert float(weights(sink)[rows, 0].mean()) == pytest.approx(sink.measure, abs=0.02)
    entropy = -torch.special.xlogy(weights(diffuse), weights(diffuse)).sum(-1)
    assert float(entropy[rows].mean()) == pytest.approx(diffuse.measure, abs=0.02)
    tokens = found[0]["tokens"]
    row = head_data.farthest_look(induction)
    target = int(weights(induction)[row].argmax())
    assert tokens[target - 1] == tokens[row]  # It follows an earlier occurrence of the query's own token.
    assert row - target > head_data.FAR


def test_errors_are_relative_to_exact_attention(found):
    _, (_, _, induction, _) = found
    q, k, v = (x[None, None] for x in induction[-3:])
    near = subquad.attention(q, k, v, is_causal=True, method=subquad.Window(64, sinks=4))
    exact = weights(induction) @ induction.value.double()
    own = errors(induction)
    assert own["exact"] == 0
    assert own["window"] == pytest.approx(float((near[0, 0] - exact).norm() / exact.norm()), abs=1e-4)


def test_fewer_features_use_the_first_projections():
    whole = subquad.RandomFeatures(MOST_FEATURES).draw(64)
    for count in (16, 64, 80, 240):
        assert torch.equal(subquad.RandomFeatures(count).draw(64), whole[:count])
