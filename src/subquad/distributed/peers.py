"""The ranks of a group: what they must agree on, and how numbers travel between them.

A call on several ranks can only work if all of them make the same call. So each rank first describes its call, and all
compare the descriptions before any data travels: a rank with another method, dtype or shape, or whose own arguments
are invalid, is reported by an error on every rank, and none waits for the others.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

DESCRIPTION_BYTES = 8192  # room for the description of a call
MAX_FACT_CHARACTERS = 300
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # in the default description of an object; each process has its own


class ExchangeError(RuntimeError):
    """An exchange between ranks failed: a rank has ended, or did not take part within the timeout of the group."""


class Peers(NamedTuple):
    """The ranks that share a sequence, each with a contiguous slice of it."""

    group: dist.ProcessGroup
    rank: int
    size: int
    lengths: tuple[int, ...] = ()  # keys of each rank
    threads: int = 1  # the most that a rank uses

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> "Peers":
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError(
                "group: torch.distributed is not initialized; start the program by torchrun and call "
                "torch.distributed.init_process_group() first"
            )
        found = dist.group.WORLD if group is None else group
        if not isinstance(found, dist.ProcessGroup) or dist.get_rank(found) < 0:
            raise ValueError(f"group: expected a process group that this rank belongs to, got {found}")
        return cls(found, dist.get_rank(found), dist.get_world_size(found))

    @property
    def starts(self) -> tuple[int, ...]:
        """The position of each rank's first key, and the total length at the end."""
        return tuple(accumulate(self.lengths, initial=0))

    @property
    def start(self) -> int:
        return self.starts[self.rank]

    # --- Exchanges ------------------------------------------------------------------------------------------------

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which have one shape and dtype."""
        return self.begin_gather(tensor).wait()

    def begin_gather(self, tensor: Tensor) -> "Gathering":
        """Start to exchange a tensor; the result is there after `wait`."""
        found = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
        with explained():
            work = dist.all_gather(found, tensor.contiguous(), group=self.group, async_op=True)
        return Gathering(found, work)

    def send(self, tensor: Tensor, to: int) -> "Transfer":
        """Start to send a tensor to a rank of the group."""
        tensor = tensor.contiguous()
        with explained():
            return Transfer(tensor, dist.isend(tensor, group=self.group, group_dst=to))

    def receive(self, like: Tensor, source: int) -> "Transfer":
        """Start to receive a tensor of this shape and dtype from a rank of the group."""
        tensor = torch.empty_like(like, memory_format=torch.contiguous_format)
        with explained():
            return Transfer(tensor, dist.irecv(tensor, group=self.group, group_src=source))

    def pass_on(self, tensor: Tensor) -> tuple["Transfer", "Transfer"]:
        """Start to send a tensor to the next rank around a ring, and to receive that of the rank before."""
        before, after = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        if self.rank % 2 == 0:
            return self.send(tensor, after), self.receive(tensor, before)
        # With nccl, messages between two ranks wait for each other in order: if both sent first, they would hang.
        arriving = self.receive(tensor, before)
        return self.send(tensor, after), arriving

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Return the tensor of one rank; the others give one of its shape."""
        tensor = tensor.contiguous()
        with explained():
            dist.broadcast(tensor, group=self.group, group_src=source)
        return tensor

    def exchanged(self, tensor: Tensor) -> Tensor:
        """Return the tensors that the ranks have for this one, from a tensor (ranks, ...) with one for each rank."""
        found = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        with explained():
            dist.all_to_all_single(found, tensor.contiguous(), group=self.group)
        return found

    def summed(self, tensor: Tensor) -> Tensor:
        """Return the sum of the tensors of all ranks, in the order of the ranks: the same bits in every run."""
        return torch.stack(self.gather(tensor)).sum(0)


class Gathering(NamedTuple):
    """Tensors of all ranks, on their way."""

    tensors: list[Tensor]
    work: Any

    def wait(self) -> list[Tensor]:
        with explained():
            self.work.wait()
        return self.tensors


class Transfer(NamedTuple):
    """A tensor on its way; it stays alive until it has arrived."""

    tensor: Tensor
    work: Any

    def wait(self) -> Tensor:
        with explained():
            self.work.wait()
        return self.tensor


@contextmanager
def explained() -> Iterator[None]:
    """Turn a failure of the backend into an `ExchangeError` that says what to look for."""
    try:
        yield
    except ExchangeError:
        raise
    except RuntimeError as error:
        raise ExchangeError(
            f"subquad.distributed: the exchange with other ranks failed: {str(error).splitlines()[0]}. A rank has "
            "ended, has raised an error, or did not make this call within the timeout of the group; see the output of "
            "the other ranks."
        ) from error


# --- Agreement --------------------------------------------------------------------------------------------------------


def agree(peers: Peers, description: dict[str, Any], length: int, problem: Exception | None = None) -> Peers:
    """Compare the calls of all ranks, and return the peers with the lengths of their slices.

    Args:
        peers: The ranks.
        description: What must be equal on all ranks, by name.
        length: The number of keys of this rank, which may differ.
        problem: What is wrong with this rank's own arguments, if anything.

    Raises:
        ValueError: On every rank, if a rank has a problem, or the descriptions differ.
    """
    facts = {name: _short(value) for name, value in description.items()}
    if len(json.dumps(facts)) > DESCRIPTION_BYTES // 2:
        facts = {"arguments": _hash(json.dumps(facts))}
    text = json.dumps([length, torch.get_num_threads(), None if problem is None else _short(problem), facts]).encode()
    own = torch.zeros(DESCRIPTION_BYTES, dtype=torch.uint8)
    own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    reports = [json.loads(bytes(x.tolist()).rstrip(b"\0")) for x in peers.gather(own.to(_device_of(peers.group)))]
    if problem is not None:
        raise problem
    for rank, (_, _, message, _) in enumerate(reports):
        if message is not None:
            raise ValueError(f"rank {rank} of the group: {message}")
    for rank, (_, _, _, theirs) in enumerate(reports):
        for name in reports[0][3] | theirs:  # Other names: the ranks make calls of different kinds.
            first, other = reports[0][3].get(name, "nothing"), theirs.get(name, "nothing")
            if first != other:
                raise ValueError(
                    f"{name}: expected the same on all ranks, got {first} on rank 0 and {other} on rank {rank}"
                )
    return peers._replace(lengths=tuple(length for length, *_ in reports), threads=max(x for _, x, *_ in reports))


def _short(value: Any) -> str:
    """Return a description that fits its room: what is too long is cut, and compared by its hash."""
    text = ADDRESS.sub("", str(value))
    return text if len(text) <= MAX_FACT_CHARACTERS else f"{text[:MAX_FACT_CHARACTERS]}... ({_hash(text)})"


def _hash(text: str) -> str:
    return sha256(text.encode(errors="replace")).hexdigest()[:16]


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """Return a device that the group's backend can exchange tensors of."""
    is_nccl = dist.get_backend(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")
