"""The keys that Multipole remembers, in the order in which they come, hidden ones left out.

    keys     0 ... sinks | segment 0 | segment 1 | ... | raw keys, in their order
             exactly     | sorted into blocks    ...   | exactly: at least `window`, less than `window` and a segment

A segment is finished, sorted and described, when it ends `window` keys before the end. Padding moves no border, because
a hidden key has no place among the others. Finished segments never change, so all states that follow share them. The
raw keys of a state have room for more, into which a step writes; two calls that continue the same state must not share
that room, so the second one makes a copy.

Axes: b batch and key heads, m keys, d width, e value width, s segments.
"""

import ctypes
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad._calls.state import WritePermit
from subquad._engines.finite import cleaned, poison_of
from subquad._engines.multipole.bisection import finished
from subquad._engines.multipole.records import Layout, packed, packed_roots, unpacked_roots
from subquad.methods.multipole import BLOCKS_PER_SEGMENT as FAN
from subquad.methods.multipole import Multipole
from subquad.native.calls import PADDING, SegmentsCall, address, check_result, padded
from subquad.native.loader import kernels

SPARE_KEYS = 256  # room for steps in a memory that is shorter than its window


@dataclass(frozen=True)
class Memory:
    """The keys so far: each head has the first `filled` of them, and `base` finished segments."""

    length: int  # keys seen, hidden ones included
    filled: Tensor  # (b,)
    poison: Tensor  # (b,): 0, or NaN once a key or value was not finite
    base: Tensor  # (b,)
    sink_keys: Tensor  # (b, panels, d, 16), wide and finite
    sink_values: Tensor  # (b, 16 panels, e), e padded to whole vectors
    raw_keys: Tensor  # (b, panels, d, 16)
    raw_values: Tensor  # (b, 16 panels, e)
    roots: Tensor  # (b, roots, header)
    pages: tuple[Tensor, ...] = ()  # (b, s, record) each: finished segments, one page after another
    order: Tensor | None = None  # (b, s, keys): the place in its segment from which each sorted key came; for gradients
    permit: WritePermit | None = None  # who may write into the room of the raw keys

    @property
    def segments(self) -> int:
        """The number of segments of the head that has the most."""
        return sum(page.shape[1] for page in self.pages)

    def record(self, method: Multipole) -> Layout:
        keys = self.raw_keys
        return Layout(keys.shape[2], self.raw_values.shape[2], method.block, keys.element_size())

    def table(self) -> Tensor:
        """Return (s, 2), int64: the address of each segment's record for the first head, and the step between heads."""
        rows = [
            [page.data_ptr() + i * page.stride(1) * page.element_size(), page.stride(0)]
            for page in self.pages
            for i in range(page.shape[1])
        ]
        return torch.tensor(rows, dtype=torch.int64).reshape(-1, 2)


def far_segments(method: Multipole, sees: Tensor) -> Tensor:
    """Return how many segments are finished for a query that sees `sees` keys."""
    return (sees - method.sinks - method.window).clamp(min=0) // method.segment


def panels(rows: Tensor) -> Tensor:
    """Return (b, panels, d, 16) of keys (b, m, d), m a multiple of 16."""
    turned: Tensor = rows.unflatten(1, (-1, PADDING)).mT
    return turned.contiguous()


def rows_of(keys: Tensor) -> Tensor:
    """Return (b, m, d) of panels (b, panels, d, 16)."""
    return keys.mT.flatten(1, 2)


def poison_of_keys(k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
    """Return (b, m): NaN where a key or value is visible and not finite, else 0."""
    poison = poison_of(k, v)
    return poison if keep is None else torch.where(keep, poison, 0.0)


def appended(
    method: Multipole, before: Memory | None, k: Tensor, v: Tensor, keep: Tensor | None,
    poison: Tensor | None, use_kernels: bool,
) -> Memory:  # fmt: skip
    """Return the memory with new keys.

    Its raw keys still hold the segments that these keys finished, for the queries before them; `settled` drops them.

    Args:
        method: The method.
        before: The memory before these keys.
        k: New keys (b, m, d).
        v: Their values (b, m, e).
        keep: (b, m), True = may be seen.
        poison: (b, m), as `poison_of_keys` returns it; None if all keys and values are finite.
        use_kernels: Whether the native kernels serve; autograd then records nothing.
    """
    k, v = (k, v) if poison is None else (cleaned(k), cleaned(v))
    before = _empty(method, k, v) if before is None else before
    new = k.shape[1] if keep is None else keep.sum(1)
    memory = replace(
        _placed(method, before, k, v, keep), length=before.length + k.shape[1], filled=before.filled + new,
        poison=before.poison if poison is None else before.poison + poison.sum(1), permit=None,
    )  # fmt: skip
    last = far_segments(method, memory.filled)
    if int((last - before.base).amax() if len(last) else 0) > 0:
        memory = (_finished_natively if use_kernels else _finished)(method, memory, last)
    return memory


def _empty(method: Multipole, k: Tensor, v: Tensor) -> Memory:
    b, _, d = k.shape
    e, none = v.shape[-1], torch.zeros(b, dtype=torch.int64, device=k.device)
    sinks = padded(method.sinks) // PADDING
    return Memory(
        0, none, k.new_zeros(b), none, k.new_zeros(b, sinks, d, PADDING), v.new_zeros(b, sinks * PADDING, e),
        k.new_zeros(b, 0, d, PADDING), v.new_zeros(b, 0, e), k.new_zeros(b, 0, FAN * (d + e + 1)),
    )  # fmt: skip


def _placed(method: Multipole, before: Memory, k: Tensor, v: Tensor, keep: Tensor | None) -> Memory:
    """Return the memory with new keys among its sinks and raw keys, in tensors of its own."""
    m, sinks = k.shape[1], method.sinks
    if before.length == 0 and keep is None:
        room = before.sink_values.shape[1]
        first, rest = min(sinks, m), max(0, m - sinks)
        own = [F.pad(x[:, :first], (0, 0, 0, room - first)) for x in (k, v)]
        raw = [F.pad(x[:, first:], (0, 0, 0, padded(rest) - rest)) for x in (k, v)]
        return replace(before, sink_keys=panels(own[0]), sink_values=own[1], raw_keys=panels(raw[0]), raw_values=raw[1])
    # Sinks and raw keys side by side: where each new key goes depends on how many visible keys its head had before.
    room = before.sink_values.shape[1]
    size = padded(before.raw_values.shape[1] + m)
    old = before.filled[:, None]
    place = old + (torch.arange(m, device=k.device) if keep is None else keep.cumsum(1) - 1)
    place = torch.where(place < sinks, place, place - sinks - before.base[:, None] * method.segment + room)
    head, token = (torch.ones_like(place, dtype=torch.bool) if keep is None else keep).nonzero(as_tuple=True)
    both = []
    for old_sinks, old_raw, x in (
        (rows_of(before.sink_keys), rows_of(before.raw_keys), k), (before.sink_values, before.raw_values, v)
    ):  # fmt: skip
        rows = torch.cat([old_sinks, F.pad(old_raw, (0, 0, 0, size - old_raw.shape[1]))], 1)
        both.append(rows.index_put((head, place[head, token]), x[head, token]))
    keys, values = both
    return replace(
        before, sink_keys=panels(keys[:, :room]), sink_values=values[:, :room].contiguous(),
        raw_keys=panels(keys[:, room:]), raw_values=values[:, room:].contiguous(),
    )  # fmt: skip


def _new_segments(memory: Memory, last: Tensor) -> tuple[Tensor, Tensor]:
    """Return head and number, (p,) each, of the segments that are finished now."""
    places = torch.arange(int(last.max()), device=last.device)
    head, number = ((memory.base[:, None] <= places) & (places < last[:, None])).nonzero(as_tuple=True)
    return head, number


def _with_room(memory: Memory, record: Layout, last: Tensor, is_written: bool) -> tuple[list[Tensor], Tensor]:
    """Return pages and roots with room for all segments; copies of those into which new segments are written."""
    lowest, count, pages, begin = int(memory.base.min()), int(last.max()), [], 0
    for page in memory.pages:
        begin += page.shape[1]
        pages.append(page.clone() if is_written and begin > lowest else page)
    keys = memory.raw_keys
    if count > begin:
        # The kernel writes all of a record; heads that are shorter than others have no record yet.
        make = keys.new_empty if is_written and int(last.min()) == count else keys.new_zeros
        pages.append(make(len(keys), count - begin, record.size))
    missing = max(0, -(-count // FAN) - memory.roots.shape[1])
    return pages, F.pad(memory.roots, (0, 0, 0, missing))  # a copy


def _finished(method: Multipole, memory: Memory, last: Tensor) -> Memory:
    """Finish segments with torch's operations, differentiable."""
    record, (head, number) = memory.record(method), _new_segments(memory, last)
    token = ((number - memory.base[head]) * method.segment)[:, None] + torch.arange(method.segment, device=head.device)
    blocks, own = finished(
        rows_of(memory.raw_keys)[head[:, None], token], memory.raw_values[head[:, None], token], method.block
    )
    pages, roots = _with_room(memory, record, last, is_written=False)
    records, begin = packed(blocks)[:, 0], 0
    for i, page in enumerate(pages):
        inside = (begin <= number) & (number < begin + page.shape[1])
        if bool(inside.any()):
            pages[i] = page.index_put((head[inside], number[inside] - begin), records[inside])
        begin += page.shape[1]
    found = unpacked_roots(roots, roots.shape[1] * FAN, record.d, record.e)
    whole = (old.index_put((head, number), new[:, 0]) for old, new in zip(found, own, strict=True))
    return replace(memory, pages=tuple(pages), roots=packed_roots(type(found)(*whole)))


def _finished_natively(method: Multipole, memory: Memory, last: Tensor, with_order: bool = False) -> Memory:
    """Finish segments in the kernel."""
    pages, roots = _with_room(memory, memory.record(method), last, is_written=True)
    done = replace(memory, pages=tuple(pages), roots=roots)
    if with_order:
        order = torch.zeros(len(last), done.segments, method.segment, dtype=torch.int32)
        done = replace(done, order=order)
    table, base, last = done.table(), memory.base.contiguous(), last.contiguous()
    keys, values = memory.raw_keys, memory.raw_values
    call = SegmentsCall(
        wide=keys.dtype == torch.float64, threads=torch.get_num_threads(), batch=len(keys), width=keys.shape[2],
        values=values.shape[2], block=method.block, raw_panels=keys.shape[1], root_count=roots.shape[1],
        segments=done.segments, raw_keys=keys.data_ptr(), raw_values=values.data_ptr(), base=base.data_ptr(),
        first=base.data_ptr(), last=last.data_ptr(), table=table.data_ptr(), roots=roots.data_ptr(),
        order=address(done.order),
    )  # fmt: skip
    check_result(kernels().segments(ctypes.byref(call)))
    return done


def whole(method: Multipole, k: Tensor, v: Tensor) -> Memory:
    """Return the memory of finite keys (b, m, d) and values (b, m, e) of a whole sequence, made by the kernels."""
    empty = _empty(method, k, v)
    memory = replace(_placed(method, empty, k, v, None), length=k.shape[1], filled=empty.filled + k.shape[1])
    last = far_segments(method, memory.filled)
    return _finished_natively(method, memory, last, with_order=True) if int(last.max()) > 0 else memory


def with_next_segment(method: Multipole, memory: Memory) -> Memory | None:
    """Return the memory with one more finished segment in every head, so that a step has room; None if heads differ.

    The kernels finish it. As `appended` and `settled` would, in a few operations: a step should not take long.
    """
    done, size = memory.filled - method.sinks + 1 - method.window, method.segment
    if bool((done != (memory.base + 1) * size).any()) or bool((memory.base != memory.base[0]).any()):
        return None
    longer = _finished_natively(method, memory, memory.base + 1)
    keys, values = (F.pad(x[:, count:], (0, 0) * (x.dim() - 2) + (0, count)) for x, count in (
        (memory.raw_keys, method.block), (memory.raw_values, size)))  # fmt: skip
    permit = WritePermit(memory.length)
    return replace(longer, base=memory.base + 1, raw_keys=keys, raw_values=values, permit=permit)


def settled(method: Multipole, memory: Memory) -> Memory:
    """Return the memory without raw keys of finished segments, and with room for a step."""
    base = far_segments(method, memory.filled)
    size = padded(min(method.window + method.segment, memory.length + SPARE_KEYS))
    shift = (base - memory.base) * method.segment
    token = shift[:, None] + torch.arange(size, device=shift.device)
    there = memory.raw_values.shape[1]
    token, inside = token.clamp(max=max(0, there - 1)), (token < there)[..., None]

    def cut(rows: Tensor) -> Tensor:
        if there == 0:
            return rows.new_zeros(len(rows), size, rows.shape[2])
        return torch.where(inside, rows.gather(1, token[..., None].expand(-1, -1, rows.shape[2])), 0.0)

    keys, values = panels(cut(rows_of(memory.raw_keys))), cut(memory.raw_values)
    return replace(memory, base=base, raw_keys=keys, raw_values=values, permit=WritePermit(memory.length))
