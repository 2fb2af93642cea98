"""View: which keys a block of rows may see, apart from padding.

Axes: b batch and key heads, g query heads per key head, n rows, m keys.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class View(NamedTuple):
    """The keys that a block of rows may see: those not after it and of its segment, or those marked by `seen`."""

    is_causal: bool
    first: int = 0  # position of the first row among the keys: row i sees keys 0 .. first + i
    row_segments: Tensor | None = None  # (b, n)
    key_segments: Tensor | None = None  # (b, m)
    seen: Tensor | None = None  # (b, n, m), True = may be seen

    @property
    def is_regular(self) -> bool:
        """Whether each row sees all keys, or all up to its own position."""
        return self.row_segments is None and self.seen is None

    def mask(self, n: int, m: int, device: torch.device) -> Tensor:
        """Return (1 or b, n, m), True = may be seen."""
        if self.seen is not None:
            return self.seen
        seen = torch.ones(1, n, m, dtype=torch.bool, device=device)
        seen = seen.tril(self.first) if self.is_causal else seen
        if self.row_segments is None or self.key_segments is None:
            return seen
        return seen & (self.row_segments[:, :, None] == self.key_segments[:, None, :])

    def hide(self, weights: Tensor) -> Tensor:
        """Return the weights (b, g, n, m) with zeros where a key may not be seen, whatever they were."""
        if self.is_regular:
            return weights.tril(self.first) if self.is_causal else weights  # much faster than a mask
        return torch.where(self.mask(weights.shape[-2], weights.shape[-1], weights.device)[:, None], weights, 0.0)

    def total(self, keys: Tensor, n: int) -> Tensor:
        """Return (b, n): the sum of keys (b, m) that each row sees; NaN if it sees a NaN."""
        if not self.is_regular:
            return torch.where(self.mask(n, keys.shape[-1], keys.device), keys[:, None], 0.0).sum(-1)
        if not self.is_causal:
            return keys.sum(-1, keepdim=True).expand(-1, n)
        return self._by_row(keys.cumsum(-1), n)  # A running sum stays NaN after the first NaN.

    def highest(self, keys: Tensor, n: int) -> Tensor:
        """Return (b, n): the largest of keys (b, m) that each row sees."""
        if not self.is_regular:
            return torch.where(self.mask(n, keys.shape[-1], keys.device), keys[:, None], float("-inf")).amax(-1)
        if not self.is_causal:
            return keys.amax(-1, keepdim=True).expand(-1, n)
        return self._by_row(keys.cummax(-1).values, n)

    def _by_row(self, until: Tensor, n: int) -> Tensor:
        """Return, for each row, the entry of a running quantity (b, m) at the last key that the row sees."""
        m = until.shape[-1]
        if self.first == 0 and n == m:
            return until
        return until[:, torch.arange(self.first, self.first + n, device=until.device).clamp(max=m - 1)]
