"""Sequences longer than one process: attention over the ranks of a torch.distributed group."""

from subquad.distributed.attention import attention
from subquad.distributed.model import SequenceParallel, sequence_parallel
from subquad.distributed.peers import ExchangeError

__all__ = ["ExchangeError", "SequenceParallel", "attention", "sequence_parallel"]
