"""Gathering tokens: the tensors of all ranks along the sequence, with gradients that return to their owners."""

import torch
from torch import Tensor
from torch.nn import functional as F

from subquad.distributed.peers import Peers
from subquad.distributed.recorded import Exchange


def gathered(tensor: Tensor, peers: Peers) -> Tensor:
    """Return (b, all tokens, ...) of the tensors (b, m, ...) of all ranks, whose lengths may differ."""
    return Gathered(peers).run(tensor)[0]


class Gathered(Exchange):
    """Numbers go to all ranks; the gradients of a rank's numbers are summed in the order of the ranks."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers

    def forward(self, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        (tensor,) = tensors
        assert tensor is not None
        sent = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
        slices = self.peers.gather(padded(sent, max(self.peers.lengths)))
        whole = torch.cat([x[:, :length] for x, length in zip(slices, self.peers.lengths, strict=True)], 1)
        return (whole.to(tensor.dtype),)

    def backward(self, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        if grad is None:
            return (None,)
        peers, longest = self.peers, max(self.peers.lengths)
        slices = [padded(x, longest) for x in grad.split(peers.lengths, 1)]
        return (peers.exchanged(torch.stack(slices)).sum(0)[:, : peers.lengths[peers.rank]],)


def padded(tensor: Tensor, length: int) -> Tensor:
    """Return (b, length, ...) with zeros behind the tokens."""
    return F.pad(tensor, (*(0, 0) * (tensor.dim() - 2), 0, length - tensor.shape[1])).contiguous()
