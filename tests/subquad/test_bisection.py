"""Segments: sorted into blocks of similar keys, described and stored, by the kernels and by torch."""

import ctypes

import pytest
import torch

from calls import normal
from subquad import Multipole, native
from subquad._engines.multipole import memory as memories
from subquad._engines.multipole.bisection import finished, like_order, main_direction
from subquad._engines.multipole.memory import far_segments
from subquad._engines.multipole.records import packed, packed_roots, unpacked, unpacked_roots
from subquad.native import calls


def memory_of(method: Multipole, k: torch.Tensor, v: torch.Tensor, use_kernels: bool) -> memories.Memory:
    return memories.appended(method, None, k, v, None, k.new_zeros(k.shape[:2]), use_kernels)


def test_the_main_direction_holds_most_of_the_spread() -> None:
    offsets = normal(20, 256, 64, dtype=torch.float64) * torch.logspace(0, -3, 64, dtype=torch.float64)
    offsets = offsets - offsets.mean(1, keepdim=True)
    found = main_direction(offsets)
    most = torch.linalg.svdvals(offsets)[:, 0].square()
    share = (offsets @ found).square().sum((1, 2)) / most
    assert share.min() > 0.5 and share.median() > 0.85
    assert not main_direction(torch.zeros(1, 8, 3)).any()


@pytest.mark.parametrize("block", [2, 5, 16])
def test_blocks_hold_like_keys(block) -> None:
    """Clusters that are mixed in time are found again; and every key is in one block, in the order of time."""
    centers = 10 * normal(16, 8)
    which = torch.arange(16 * block) % 16
    k = centers[which] + 0.01 * normal(16 * block, 8, seed=1)
    order = like_order(k[None], block)[0]
    assert torch.equal(order.sort().values, torch.arange(16 * block))
    for part in order.split(block):
        assert torch.equal(part, part.sort().values)
    own = k[order].reshape(16, block, 8)
    assert own.var(1).mean() < 0.05 * k.var(0).mean()  # Not all clusters: a cut in the middle may divide one.


def test_equal_keys_stay_in_order() -> None:
    assert torch.equal(like_order(torch.ones(1, 64, 3), 4)[0], torch.arange(64))


@pytest.mark.skipif(not native.available(), reason="the native kernels are not available")
@pytest.mark.parametrize(("block", "d", "e"), [(2, 3, 16), (16, 64, 64), (7, 18, 32)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_kernels_and_torch_store_the_same(block, d, e, dtype) -> None:
    method = Multipole(window=3, sinks=2, block=block)
    k, v = normal(3, 5 * method.segment + 9, d, dtype=dtype), normal(3, 5 * method.segment + 9, e, seed=1, dtype=dtype)
    found, expected = (memory_of(method, k, v, use_kernels) for use_kernels in (True, False))
    record = found.record(method)
    assert found.segments == 5 and found.pages[0].shape[-1] == record.size
    for a, b in zip(unpacked(found.pages[0], record), unpacked(expected.pages[0], record), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.roots, expected.roots, rtol=1e-5, atol=1e-5)


def test_what_is_packed_is_unpacked() -> None:
    k, v = normal(4, 112, 5), normal(4, 112, 16, seed=1)
    blocks, roots = finished(k, v, 7)
    record = memories.Layout(5, 16, 7, 4)
    for a, b in zip(unpacked(packed(blocks), record), blocks, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(unpacked_roots(packed_roots(roots), 1, 5, 16), roots, strict=True):
        assert torch.equal(a, b)
    assert packed(blocks).shape == (4, 1, record.size)
    torch.testing.assert_close(blocks.means.mean(1), v.mean(1))
    torch.testing.assert_close(blocks.centers.mean(1), k.mean(1))
    torch.testing.assert_close(blocks.radius**2, (blocks.keys - blocks.centers[:, :, None]).square().mean((2, 3)))
    off = blocks.look * blocks.scale[..., None, None] + blocks.centers[:, :, None] - blocks.keys
    assert (off.abs() <= 0.5001 * blocks.scale[..., None, None]).all() and blocks.look.abs().max() == 127


def test_a_segment_is_far_once_it_ends_before_the_window() -> None:
    method = Multipole(window=10, sinks=3, block=2)
    sees = torch.tensor([0, 3, 12, 44, 45, 76, 77])
    assert far_segments(method, sees).tolist() == [0, 0, 0, 0, 1, 1, 2]


def test_structures_have_the_sizes_that_the_library_says() -> None:
    for kind in (calls.MultipoleCall, calls.MultipoleGradient, calls.SegmentsCall):
        assert str(ctypes.sizeof(kind)) in calls.INTERFACE
