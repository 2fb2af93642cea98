"""BlockSparse: exact attention under the mask that its layout stands for."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from subquad import BlockSparse, attention, native
from subquad._calls.call import Call
from subquad._engines import run

by_form = pytest.mark.parametrize("form", ["dense", "fused"])


def draw(n: int, m: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(n + m)
    shapes = (2, 4, n, 8), (2, 2, m, 8), (2, 2, m, 5)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def dense_mask(layout: Tensor, n: int, m: int, query_block: int, key_block: int) -> Tensor:
    """(heads, n, m), by the definition."""
    return torch.stack([
        torch.stack([torch.stack([own[i // query_block, j // key_block] for j in range(m)]) for i in range(n)])
        for own in layout
    ])  # fmt: skip


@by_form
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize(
    ("n", "m", "blocks", "sizes"),
    [(64, 64, (8, 8), (8, 8)), (50, 50, (7, 5), (8, 10)), (65, 35, (3, 9), (22, 4)), (40, 90, (40, 2), (1, 45)),
     (140, 140, (1, 3), (140, 47))],
)  # fmt: skip
def test_it_is_attention_under_a_dense_mask(form, is_causal, heads, n, m, blocks, sizes) -> None:
    generator = torch.Generator().manual_seed(heads)
    layout = torch.rand(heads, *blocks, generator=generator) > 0.5
    keep = torch.rand(2, m, generator=generator) > 0.2
    inputs = draw(n, m)
    options = dict(is_causal=is_causal, enable_gqa=True, key_padding_mask=keep)
    result = run(BlockSparse(layout), Call.of(*inputs, **options), form)
    assert result.form == ("fused" if form == "fused" and native.available() else "dense")
    mask = dense_mask(layout, n, m, *sizes).expand(4, -1, -1) & keep[:, None, None]
    mask = mask & torch.ones(n, m, dtype=torch.bool).tril() if is_causal else mask
    wanted = F.scaled_dot_product_attention(*inputs, mask, enable_gqa=True)
    wanted = torch.where(mask.any(-1)[..., None], wanted, 0.0)
    cotangent = torch.randn(wanted.shape, generator=generator, dtype=torch.float64)
    for a, b in zip(
        (result.output, *torch.autograd.grad(result.output, inputs, cotangent)),
        (wanted, *torch.autograd.grad(wanted, inputs, cotangent)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@by_form
def test_heads_of_a_batch_have_the_same_layouts(form) -> None:
    """Without a mask of keys, which would already tell the sequences of a batch apart."""
    layout = torch.rand(4, 5, 5, generator=torch.Generator().manual_seed(3)) > 0.4
    inputs = draw(50, 50)
    found = run(BlockSparse(layout), Call.of(*inputs, enable_gqa=True), form).output
    mask = dense_mask(layout, 50, 50, 10, 10)
    wanted = torch.where(mask.any(-1)[..., None], F.scaled_dot_product_attention(*inputs, mask, enable_gqa=True), 0.0)
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


@by_form
def test_unseen_blocks_change_no_bit(form, one_thread) -> None:
    layout = torch.eye(8, dtype=torch.bool)[None]
    layout[:, :, 0] = True
    q, k, v = (x.detach() for x in draw(128, 128, torch.float32))
    before = run(BlockSparse(layout), Call.of(q, k, v, enable_gqa=True), form).output
    k[:, :, 32:48], v[:, :, 32:48] = float("nan"), float("inf")  # block 2
    after = run(BlockSparse(layout), Call.of(q, k, v, enable_gqa=True), form).output
    assert bool(after[:, :, 32:48].isnan().all())
    others = [i for i in range(128) if not 32 <= i < 48]
    assert torch.equal(after[:, :, others], before[:, :, others])


def test_a_layout_that_changes_before_the_backward_pass_is_noticed() -> None:
    layout, inputs = torch.eye(4, dtype=torch.bool)[None], draw(40, 40)
    output = attention(*inputs, enable_gqa=True, method=BlockSparse(layout))
    layout.fill_(True)
    if native.available():
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def test_queries_of_other_blocks_may_overflow() -> None:
    """A panel of 16 queries may belong to two blocks, of which one does not see the key."""
    q, k, v = (x.detach() for x in draw(40, 40, torch.float32))
    q[:, :, 10], k[:, :, :9] = 1e30, 1e10
    inputs = [x.requires_grad_() for x in (q, k, v)]
    output = attention(*inputs, enable_gqa=True, method=BlockSparse(torch.eye(4, dtype=torch.bool)[None]))
    grad = torch.autograd.grad(output[:, :, :9].sum(), v)[0]
    assert bool(grad[:, :, :9].isfinite().all())


REFUSED = {
    "layout: expected a boolean tensor": lambda: BlockSparse(torch.ones(1, 2, 2)),
    "layout: expected 1 head or the 4 query heads of the call, got 3": lambda: attention(
        *draw(8, 8), enable_gqa=True, method=BlockSparse(torch.ones(3, 2, 2, dtype=torch.bool))
    ),
    "layout: 9 query blocks of 8 tokens would have 1 tokens each, .* expected 8 query blocks": lambda: attention(
        *draw(8, 8), enable_gqa=True, method=BlockSparse(torch.ones(1, 9, 2, dtype=torch.bool))
    ),
    "state: BlockSparse describes a whole sequence": lambda: attention(
        *draw(8, 8), enable_gqa=True, method=BlockSparse(torch.ones(1, 2, 2, dtype=torch.bool)), return_state=True
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_is_refused_by_name(message) -> None:
    with pytest.raises(ValueError, match=message):
        REFUSED[message]()


def test_label_and_density() -> None:
    method = BlockSparse(torch.eye(4, dtype=torch.bool)[None])
    assert method.label == str(method) == "BlockSparse(4 x 4 blocks, 1 head)"
    assert method.density == 0.25
