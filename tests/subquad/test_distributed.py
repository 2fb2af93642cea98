"""Attention over several processes: equal to one process, forward and backward, for every method and mask.

Four processes are started once. Groups of them share sequences of uneven slices, some of them empty; every rank
compares its slice with the result of the whole sequence, which it computes by itself.
"""

import gc
import itertools
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import subquad
from ranks import on_ranks
from subquad import (
    BlockSparse,
    Exact,
    Hedgehog,
    Hybrid,
    Linear,
    Multipole,
    RandomFeatures,
    Separable,
    Taylor,
    Window,
)
from subquad import distributed as over_ranks
from subquad.distributed import features, setup
from subquad.distributed.recorded import Exchange

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")


class Learned(nn.Module):
    """A user's map with a parameter, of positive features with a log-scale."""

    positive = True

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 6, dtype=torch.float64))

    def size(self, width: int) -> int:
        return width

    def forward(self, x: Tensor, *, is_query: bool) -> tuple[Tensor, Tensor]:
        y = x * self.weight
        top = y.detach().amax(-1)
        return (y - top[..., None]).exp(), top

    __hash__ = object.__hash__


SUMS: dict[str, Any] = {
    "taylor": Taylor(2), "shifted": Taylor(2, key_shift=(0.1, 0.2, 0.3, 0.4, 0.5, 0.6)), "positive": RandomFeatures(20),
    "trigonometric": RandomFeatures(20, "trigonometric"), "elu": Linear(), "identity": Linear("identity"),
    "separable": Separable(), "learned": Learned(), "hedgehog": Hedgehog(6, 4, key_heads=2).double(),
}  # fmt: skip
KEYS: dict[str, Any] = {
    "exact": Exact(), "window 4": Window(4), "window 9, sinks": Window(9, sinks=2), "long window": Window(40, sinks=3),
    "soft-capped": Window(None, softcap=3.0), "learned sinks": Window(5, sink_logits=torch.arange(4.0).double()),
    "multipole": Multipole(window=16, sinks=2, top=2, block=4),
}  # fmt: skip
SLICES = {2: [30, 20], 3: [20, 0, 30], 4: [0, 3, 35, 12]}
MASKS = ("none", "padding", "segments", "both")
CASES = [
    *((name, size, is_causal, mask, way) for name, size, is_causal, mask, way in itertools.product(
        SUMS, SLICES, (True, False), MASKS, ("in turn", "gathered")) if is_causal or way == "gathered"),
    *((name, size, is_causal, mask, "keys") for name, size, is_causal, mask in itertools.product(
        KEYS, SLICES, (True, False), MASKS)),
]  # fmt: skip


@contextmanager
def ways(way: str) -> Iterator[None]:
    """Let causal calls run in turn, or gather; with several groups of heads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "GATHERED_OVERHEAD", 100.0 if way == "in turn" else 0.0)
        patch.setattr(setup, "MIN_GROUP_TOKENS", 60)
        yield


def inputs_of(case: tuple[Any, ...]) -> dict[str, Tensor]:
    """Return the inputs of the whole sequence, of what precedes it, and the weights of its loss."""
    generator = torch.Generator().manual_seed(CASES.index(case))
    length = sum(SLICES[case[1]])

    def normal(*shape: int) -> Tensor:
        return 0.7 * torch.randn(*shape, generator=generator, dtype=torch.float64)

    keep = torch.rand(2, length, generator=generator) > 0.3
    keep[:, : 7 * (CASES.index(case) % 2)] = False
    return dict(
        q=normal(2, 4, length, 6), k=normal(2, 2, length, 6), v=normal(2, 2, length, 5), loss=normal(2, 4, length, 5),
        q0=normal(2, 4, 9, 6), k0=normal(2, 2, 9, 6), v0=normal(2, 2, 9, 5), keep=keep,
        ids=torch.randint(0, 4, (2, length), generator=generator).sort(1).values,
    )  # fmt: skip


def options_of(case: tuple[Any, ...], x: dict[str, Tensor], part: slice) -> dict[str, Any]:
    name, _, is_causal, mask, _ = case
    options = dict(is_causal=is_causal, method=(SUMS | KEYS)[name], enable_gqa=True)
    if mask in ("padding", "both"):
        options["key_padding_mask"] = x["keep"][:, part]
    if mask in ("segments", "both"):
        options["segment_ids"] = x["ids"][:, part]
    return options


def state_before(case: tuple[Any, ...], x: dict[str, Tensor]) -> tuple[Any, list[Tensor]]:
    """Return a state of earlier keys, for methods with sums, and the inputs that it depends on."""
    if case[0] not in SUMS:
        return None, []
    leaves = [x[name].clone().requires_grad_() for name in ("k0", "v0")]
    options = dict(segment_ids=x["ids"][:, :1].expand(2, 9)) if case[3] in ("segments", "both") else {}
    options |= dict(is_causal=case[2], method=SUMS[case[0]], enable_gqa=True)
    return subquad.attention(x["q0"], *leaves, return_state=True, **options)[1], leaves


def error_of(case: tuple[Any, ...], group: dist.ProcessGroup) -> float:
    """Return the largest difference between this rank's results and those of one process."""
    x, rank = inputs_of(case), dist.get_rank(group)
    lengths = SLICES[case[1]]
    own = slice(sum(lengths[:rank]), sum(lengths[: rank + 1]))
    has_state = case[0] in SUMS
    found = {}
    for place, part in (("alone", slice(None)), ("ranks", own)):
        tokens = [x[name][:, :, part].clone().requires_grad_() for name in "qkv"]
        state, leaves = state_before(case, x)
        attend = subquad.attention if place == "alone" else partial(over_ranks.attention, group=group)
        result = attend(*tokens, **options_of(case, x, part), state=state, return_state=has_state)
        output, after = result if has_state else (result, None)
        loss = (output * x["loss"][:, :, part]).sum()
        if after is not None:  # Every rank holds a copy.
            loss = loss + after.sums.square().sum() / (1 if place == "alone" else case[1])
        learned = list(SUMS[case[0]].parameters()) if case[0] in ("learned", "hedgehog") else []
        grads = list(torch.autograd.grad(loss, [*tokens, *leaves, *learned], materialize_grads=True))
        for grad in grads[3:] if place == "ranks" else []:  # Each rank has a part of it.
            dist.all_reduce(grad, group=group)
        found[place] = ([output.detach(), *grads[:3]], grads[3:], after)
    pairs = [(a, b[:, :, own]) for a, b in zip(found["ranks"][0], found["alone"][0], strict=True)]
    pairs += list(zip(found["ranks"][1], found["alone"][1], strict=True))
    one, many = found["alone"][2], found["ranks"][2]
    if one is not None:
        pairs.append((many.sums.detach(), one.sums.detach()))
        is_same = many.length == one.length and (one.segment is None or torch.equal(many.segment, one.segment))
        is_same = is_same and (one.is_whole is None or torch.equal(many.is_whole, one.is_whole))
        pairs.append((torch.zeros(1) if is_same else torch.ones(1), torch.zeros(1)))
    return max(float((a - b).abs().max()) if a.numel() else 0.0 for a, b in pairs)


def all_errors(rank: int) -> dict[str, float]:
    groups = {size: dist.new_group(list(range(size))) for size in SLICES}
    found = {}
    for case in CASES:
        if rank < case[1]:
            with ways(case[4]):
                found[str(case)] = error_of(case, groups[case[1]])
    return found


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    by_rank = on_ranks(all_errors, 4)
    return {case: max(found[case] for found in by_rank if case in found) for case in by_rank[0]}


@pytest.mark.parametrize("name", [*SUMS, *KEYS])
def test_ranks_compute_what_one_process_computes(errors, name) -> None:
    mine = {case: error for case, error in errors.items() if case.startswith(f"('{name}',")}
    assert len(mine) == len([case for case in CASES if case[0] == name]) >= 24
    assert {case: error for case, error in mine.items() if not error < 1e-9} == {}


# --- One rank, bits, volume -------------------------------------------------------------------------------------------


def small(length: int = 24, dtype: torch.dtype = torch.float32, heads: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    return [0.5 * torch.randn(1, heads, length, 8, generator=generator, dtype=dtype) for _ in range(3)]


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """Count what this rank gives to torch.distributed, at the calls themselves."""
    total = [0]
    sent = dict(all_gather=1, isend=0, all_to_all_single=1, broadcast=0)  # the place of the tensor among the arguments
    before = {name: getattr(dist, name) for name in sent}

    def counting(name: str, *args: Any, **options: Any) -> Any:
        total[0] += args[sent[name]].nbytes
        return before[name](*args, **options)

    for name in before:
        setattr(dist, name, partial(counting, name))
    try:
        yield total
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


def volume_of(method: Any, length: int, is_causal: bool, way: str) -> int:
    tokens = [x.requires_grad_() for x in small(length)]
    with ways(way), counted_bytes() as total:
        over_ranks.attention(*tokens, is_causal=is_causal, method=method).sum().backward()
    return total[0]


def other_facts(rank: int) -> dict[str, Any]:
    alone = dist.new_group([0])
    found: dict[str, Any] = {}
    if rank == 0:
        for name, method in (SUMS | KEYS).items():
            if name in ("taylor", "positive", "elu", "separable", "exact", "window 4", "multipole"):
                tokens = small(150)
                expected = subquad.attention(*tokens, is_causal=True, method=method)
                found[f"bits {name}"] = torch.equal(
                    over_ranks.attention(*tokens, is_causal=True, method=method, group=alone), expected
                )
    for name, is_causal, way in (("taylor", True, "in turn"), ("taylor", True, "gathered"), ("elu", False, "gathered"),
                                 ("window 4", True, "gathered"), ("exact", True, "gathered")):  # fmt: skip
        volumes = [volume_of((SUMS | KEYS)[name], length, is_causal, way) for length in (64, 256)]
        found[f"volume {name} {is_causal} {way}"] = volumes
    tokens = small(40 + rank)
    twice = [over_ranks.attention(*tokens, is_causal=True, method="random:32") for _ in range(2)]
    found["repeated"] = torch.equal(*twice)
    found["autocast"] = True
    for method in ("taylor", "exact", "window:5", "multipole"):
        expected = over_ranks.attention(*tokens, is_causal=True, method=method)
        with torch.autocast("cpu", torch.bfloat16):  # The inputs are wide, so only the result is rounded.
            half = over_ranks.attention(*tokens, is_causal=True, method=method)
        found["autocast"] &= half.dtype == torch.bfloat16 and torch.equal(half, expected.bfloat16())
    nothing = [x[:0] for x in tokens]
    found["empty"] = [over_ranks.attention(*nothing, method=method).shape for method in ("taylor", "exact", "window:5")]
    found["head masks"] = error_of_head_masks(rank)
    found["plain map"] = over_ranks.attention(*tokens, method=PlainMap()).shape
    q, k, v = (x.requires_grad_() for x in small())
    no_keys = k[:, :, :0], v[:, :, :0]
    over_ranks.attention(q[:, :, : 3 * rank], *no_keys, method="multipole").sum().backward()  # must not hang
    found["no keys"] = [bool(x.grad.any()) for x in (q, k, v)]
    found["kept"] = exchanges_that_stay(q, k, v)
    found["refusals"] = refusals(rank)
    return found


class PlainMap:
    """A user's map whose description is Python's own, with an address that differs between processes."""

    positive = True

    def size(self, width: int) -> int:
        return width

    def __call__(self, x: Tensor, *, is_query: bool) -> Tensor:
        return x.relu()


def error_of_head_masks(rank: int) -> float:
    """Return the difference to one process where every query head hides other keys of packed sequences."""
    q, k, v = small(48, torch.float64, heads=4)
    mask = torch.rand(4, 1, 48, generator=torch.Generator().manual_seed(0)) > 0.3
    ids = torch.arange(48)[None] // 20
    own, worst = slice(30 * rank, 30 + 18 * rank), 0.0
    vectors = torch.linspace(-0.5, 0.5, 2 * q.shape[-1]).view(2, -1)
    for method in (Taylor(2), Taylor(2, key_shift=vectors, query_shift=-vectors)):
        options = dict(is_causal=True, method=method, enable_gqa=True)
        one = subquad.attention(q, k[:, :2], v[:, :2], mask, segment_ids=ids, **options)
        part = (x[:, :, own] for x in (q, k[:, :2], v[:, :2]))
        many = over_ranks.attention(*part, mask[..., own], segment_ids=ids[:, own], **options)
        worst = max(worst, float((many - one[:, :, own]).abs().max()))
    return worst


def exchanges_that_stay(q: Tensor, k: Tensor, v: Tensor) -> list[str]:
    """Return what is still in memory after calls whose results were dropped without a backward pass."""
    seen = []

    def watched(self: Exchange, *tensors: Tensor | None) -> Any:
        seen.append((type(self).__name__, weakref.ref(self)))
        return run(self, *tensors)

    gc.collect()
    gc.disable()  # A cycle would stay until it runs.
    with pytest.MonkeyPatch.context() as patch:
        run = Exchange.run
        patch.setattr(Exchange, "run", watched)
        for is_causal, way in ((True, "in turn"), (True, "gathered"), (False, "gathered")):
            with ways(way):
                over_ranks.attention(q, k, v, is_causal=is_causal, method="taylor", return_state=True)
        for method in ("exact", "window:5", "multipole"):
            over_ranks.attention(q, k, v, is_causal=True, method=method)
    kept = [name for name, exchange in seen if exchange() is not None]
    gc.enable()
    return kept if len(seen) >= 6 else ["nothing was watched"]


def refusals(rank: int) -> dict[str, str]:
    """Return the messages of calls that cannot work, by name; none of them may hang."""
    q, k, v = small()
    last = rank == dist.get_world_size() - 1
    grouped = dict(key=k[:, :1], value=v[:, :1], enable_gqa=True)
    calls: dict[str, Any] = {
        "method": dict(method=Taylor(3) if last else Taylor(2)),
        "dtype": dict(query=q.double(), key=k.double(), value=v.double()) if last else {},
        "shape": dict(query=q[..., :4], key=k[..., :4]) if last else {},
        "heads": dict(zip(("query", "key", "value"), small(heads=3), strict=True)) if last else {},
        "causal": dict(is_causal=last),
        "invalid": dict(key=k[..., :5]) if last else {},
        "gradient": dict(query=q.clone().requires_grad_()) if last else {},
        "padding": dict(key_padding_mask=torch.ones(1, 24)) if last else {},
        "auto": dict(method="auto"), "auto value": dict(method=subquad.Auto(0.05)),
        "blocks": dict(method=BlockSparse(torch.ones(1, 3, 3, dtype=torch.bool))),
        "hybrid": dict(method=Hybrid(Window(3), Taylor(2))),
        "dropout": dict(dropout_p=0.5, method="exact"),
        "pairs": dict(attn_mask=torch.rand(24, 24) > 0.5, method="exact"),
        "cross": dict(query=q[:, :, :5], is_causal=True),
        "state": dict(method="window:4", return_state=True),
        "window": dict(query=q[:, :, :5], method="window:3") if last else dict(method="window:3"),
        "list": dict(segment_ids=[0] * 24 if last else torch.zeros(1, 24, dtype=torch.long)),
        "head mask": grouped | (dict(attn_mask=torch.ones(2, 1, 24).tril(5) > 0) if last else {}),
        "head mask, state": grouped | dict(return_state=True)
        | (dict(attn_mask=torch.ones(2, 1, 24).tril(5) > 0) if last else {}),
        "other gradient": dict(method="window:3") | (dict(key=k.clone().requires_grad_()) if last else
                                                      dict(query=q.clone().requires_grad_())),
        "autocast": {},
    }  # fmt: skip
    messages = {}
    for name, changes in calls.items():
        arguments = dict(query=q, key=k, value=v, method="taylor") | changes
        try:
            with torch.autocast("cpu", torch.bfloat16, enabled=last and name == "autocast"):
                over_ranks.attention(**arguments)
            messages[name] = "no error"
        except (ValueError, TypeError) as error:
            messages[name] = str(error)
    return messages


@pytest.fixture(scope="module")
def facts() -> list[dict[str, Any]]:
    return on_ranks(other_facts, 2)


def test_one_rank_has_the_bits_of_plain_attention(facts) -> None:
    bits = {name: is_equal for name, is_equal in facts[0].items() if name.startswith("bits")}
    assert len(bits) == 7 and all(bits.values())


def test_sums_and_windows_send_the_same_at_any_length_and_the_ring_does_not(facts) -> None:
    for found in facts:
        volumes = {name: volume for name, volume in found.items() if name.startswith("volume")}
        assert len(volumes) == 5
        for name, (short, long) in volumes.items():
            if "exact" in name:
                assert long > 3 * short
            else:
                assert long == short > 0


def test_calls_repeat_to_the_bit_and_know_autocast(facts) -> None:
    assert all(found["repeated"] and found["autocast"] for found in facts)


def test_a_batch_of_nothing_has_its_shape(facts) -> None:
    for rank, found in enumerate(facts):
        assert found["empty"] == [(0, 2, 40 + rank, 8)] * 3


def test_masks_of_query_heads_are_those_of_one_process(facts) -> None:
    assert all(found["head masks"] < 1e-12 for found in facts)


def test_a_map_without_a_description_of_its_own_is_the_same_on_all_ranks(facts) -> None:
    assert [found["plain map"] for found in facts] == [(1, 2, 40 + rank, 8) for rank in range(2)]


def test_gradients_of_no_keys_are_exchanged_by_all_ranks(facts) -> None:
    assert all(found["no keys"] == [False] * 3 for found in facts)


def test_results_that_are_dropped_free_their_memory_at_once(facts) -> None:
    assert [found["kept"] for found in facts] == [[], []]


EXPECTED = {
    "method": "method: expected the same on all ranks, got Taylor(degree=2",
    "dtype": "query: expected the same on all ranks, got torch.float32",
    "shape": "query: expected the same on all ranks", "heads": "query: expected the same on all ranks",
    "causal": "is_causal: expected the same on all ranks, got False on rank 0 and True on rank 1",
    "invalid": "key: expected width 8", "gradient": "requires_grad: expected the same on all ranks",
    "padding": "key_padding_mask: expected a boolean tensor", "auto": "method: Auto needs the whole sequence",
    "auto value": "method: Auto needs the whole sequence",
    "blocks": "method: BlockSparse needs the whole sequence", "dropout": "dropout_p: expected 0",
    "hybrid": "is not supported on several ranks",
    "pairs": "attn_mask: expected a mask of this rank's keys", "cross": "is_causal: expected as many queries as keys",
    "state": "state: on several ranks only feature methods have a state",
    "window": "key: a window compares positions; expected as many keys as queries on each rank, got 24 and 5",
    "list": "segment_ids: expected a tensor, got list",
    "head mask": "attn_mask: expected the same on all ranks, got one for each key head on rank 0",
    "head mask, state": "attn_mask: with a state, expected the same mask",
    "other gradient": "requires_grad: expected the same on all ranks, got query on rank 0 and key on rank 1",
    "autocast": "autocast: expected the same on all ranks, got None on rank 0 and torch.bfloat16 on rank 1",
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_a_call_that_cannot_work_is_refused_on_every_rank(facts, name) -> None:
    for rank, found in enumerate(facts):
        message = found["refusals"][name]
        assert EXPECTED[name] in message, (rank, message)
    if name in ("invalid", "padding", "window", "list", "head mask, state"):
        # The other rank is told whose arguments they are.
        assert facts[0]["refusals"][name].startswith("rank 1 of the group: ")


def test_without_a_group_the_message_says_how_to_get_one() -> None:
    with pytest.raises(ValueError, match=r"group: torch\.distributed is not initialized; start the program"):
        over_ranks.attention(*small(), method="taylor")


# --- A rank that ends -------------------------------------------------------------------------------------------------


def one_rank_ends(rank: int) -> str:
    """Rank 1 ends before its second call; the others must learn of it."""
    tokens = [x.requires_grad_() for x in small(2000)]
    over_ranks.attention(*tokens, is_causal=True, method="taylor").sum().backward()
    if rank == 1:
        os._exit(3)
    try:
        over_ranks.attention(*tokens, is_causal=True, method="taylor").sum().backward()
    except over_ranks.ExchangeError as error:
        print(f"rank {rank}: {error}", flush=True)
        os._exit(4)
    return "no error"


def test_a_rank_that_ends_is_noticed_by_all_others(tmp_path) -> None:
    context = mp.get_context("spawn")
    store = f"file://{tmp_path}/store"
    ranks = [context.Process(target=ended, args=(rank, 3, store)) for rank in range(3)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [4, 3, 4]


def ended(rank: int, count: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count, timeout=timedelta(seconds=20))
    one_rank_ends(rank)
