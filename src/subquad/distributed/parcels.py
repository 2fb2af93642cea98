"""Parcels: a state as one tensor of bytes, so that it travels in one message."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subquad._calls.state import State


class Parcel(NamedTuple):
    """The form of a state: which tensors it has, of which shapes and dtypes."""

    form: State

    def packed(self, state: State) -> Tensor:
        """Return the tensors of a state as bytes, one after another."""
        given = state._tensors()
        parts = (given.get(name, like).detach().to(like.dtype) for name, like in self.form._tensors().items())
        return torch.cat([x.contiguous().view(-1).view(torch.uint8) for x in parts])

    def room(self) -> Tensor:
        """Return a tensor of bytes to receive a state in."""
        assert self.form.sums is not None
        total = sum(like.nbytes for like in self.form._tensors().values())
        return torch.empty(total, dtype=torch.uint8, device=self.form.sums.device)

    def opened(self, data: Tensor, length: int) -> State:
        """Return the state that was packed, with this number of keys."""
        named, start = dict[str, Any](), 0
        for name, like in self.form._tensors().items():
            part = data[start : start + like.nbytes]
            named[name] = part.clone().view(like.dtype).view(like.shape)
            start += like.nbytes
        return replace(self.form, length=length, **named)
