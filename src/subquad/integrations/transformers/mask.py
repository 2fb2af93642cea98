"""The mask of a call, as a rule: linear methods and windows never form its matrix.

Axes: b batch, n queries of this call, m keys of this call.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import masking_utils as rules

from subquad._engines import engine_of
from subquad.distributed.model import running
from subquad.integrations.transformers.layers import methods
from subquad.integrations.transformers.unsupported import Unsupported

# All rules that a function of transformers makes have the same code.
AND = rules.and_masks().__code__
WINDOW = rules.sliding_window_overlay(1).__code__  # of query i and key j: j > i - w
WINDOW_OF_BOTH_SIDES = rules.sliding_window_bidirectional_overlay(1).__code__  # |i - j| <= w
PACKED = rules.packed_sequence_mask_function(torch.zeros(1, 1)).__code__


class Rule(NamedTuple):
    """A rule of transformers that this package understands."""

    is_causal: bool
    window: int | None = None  # the size that `Window` takes
    segment_ids: Tensor | None = None  # of packed sequences, (b, n)


class Mask:
    """The keys that a query may see: the rule that transformers made, and the padding.

    Args:
        **arguments: The arguments of a transformers mask function. `attention_mask` is the padding, (b, m), or a
            `Mask` that is complete: `generate` creates those of static caches before the model runs.
    """

    ndim = 4  # Models take masks of two dimensions for padding.

    def __init__(self, **arguments: Any) -> None:
        given = arguments.get("attention_mask")
        self.arguments: dict[str, Any] = given.arguments if isinstance(given, Mask) else arguments
        self.key_length: int = self.arguments["kv_length"]
        parallel = running()
        self.length = self.key_length if parallel is None else parallel.tokens  # of all ranks
        self.segment_ids = None if parallel is None else parallel.segment_ids  # numbered through all ranks
        self._known: dict[str, Any] = {}  # functools.cached_property has a lock, which torch.compile cannot trace

    @property
    def matrix(self) -> Tensor | None:
        """(b, 1, n, m), True = attend, computed on first use; None if `is_causal` of the layer is enough."""
        if "matrix" not in self._known:
            self._known["matrix"] = rules.sdpa_mask(**self.arguments)
        found: Tensor | None = self._known["matrix"]
        return found

    @property
    def rule(self) -> Rule | None:
        """The rule, if it is a combination of causality, a sliding window and packed sequences; otherwise None."""
        if "rule" not in self._known:
            self._known["rule"] = self._read_rule()
        found: Rule | None = self._known["rule"]
        return found

    def _read_rule(self) -> Rule | None:
        windows: dict[Any, int] = {}
        is_causal, segments = False, None
        for part in _parts(self.arguments["mask_function"]):
            code = getattr(part, "__code__", None)
            if part is rules.causal_mask_function:
                is_causal = True
            elif code in (WINDOW, WINDOW_OF_BOTH_SIDES) and not windows:
                windows[code] = _nonlocal(part, "sliding_window")
            elif code is PACKED and segments is None:
                segments = _nonlocal(part, "packed_sequence_mask")
            elif part is not rules.bidirectional_mask_function:
                return None
        if WINDOW in windows:  # It does not limit the keys after a query.
            return Rule(True, windows[WINDOW], segments) if is_causal else None
        return Rule(is_causal, windows[WINDOW_OF_BOTH_SIDES] + 1 if windows else None, segments)

    @property
    def padding(self) -> Tensor | None:
        """(b, m), True = attend."""
        given, first = self.arguments.get("attention_mask"), self.arguments.get("kv_offset", 0)
        if given is None:
            return None
        missing = first + self.key_length - given.shape[-1]
        return F.pad(given, (0, max(0, missing)))[:, first : first + self.key_length]

    def contiguous(self) -> Tensor | None:
        """Return the matrix; `generate` calls this for static caches, whose masks it creates before the model runs.

        Raises:
            ValueError: The method that was selected by name needs more than a matrix.
        """
        method = methods[self.arguments["config"]._attn_implementation]
        if engine_of(method) != "exact":
            raise ValueError(
                f"past_key_values: static caches are not supported by {type(method).__name__} when it is selected by "
                'name; call replace_attention, or remove cache_implementation="static"'
            )
        return self.matrix

    @property
    def is_static(self) -> bool:
        """Whether there are keys after the last query, as in a cache that is allocated at its maximum length."""
        queries = self.arguments.get("q_offset", 0) + self.arguments["q_length"]
        return bool(self.key_length + self.arguments.get("kv_offset", 0) != queries)


def _parts(rule: Any) -> list[Any]:
    """Return the rules that a rule combines, all of which must hold."""
    if getattr(rule, "__code__", None) is not AND:
        return [rule]
    return [part for inner in _nonlocal(rule, "mask_functions") for part in _parts(inner)]


def _nonlocal(function: Any, name: str) -> Any:
    """Return a variable of an enclosing function, which torch.compile cannot trace."""
    if torch.compiler.is_compiling():
        raise ValueError(
            "attention_mask: torch.compile(fullgraph=True) cannot trace sliding windows and packed sequences. A model "
            "without windows looks for the latter if it has neither a mask nor a cache: pass attention_mask="
            "torch.ones_like(input_ids). For a model with windows, use fullgraph=False."
        )
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents


@dataclass(frozen=True)
class Seen:
    """A mask in the form that approximate methods and `Window` support."""

    is_causal: bool
    keys: Tensor | None = None  # (b, 1 or heads, 1, m)
    segment_ids: Tensor | None = None  # (b, n)
    window: int | None = None  # the size that `Window` takes


def read(mask: Mask | Tensor | None, is_causal: bool, m: int, window: int | None = None) -> Seen:
    """Split the mask of the last m keys into what approximate methods and `Window` support.

    Args:
        mask: The mask, which decides.
        is_causal: Whether the layer is causal, which the mask does not always show.
        m: The number of keys.
        window: The size of the window that the layer names, which a matrix may or may not have.

    Raises:
        ValueError: The mask is not causal, packed, padded, a sliding window, or a combination of these.
    """
    if mask is None:  # A window that hides a key would need a mask.
        return Seen(is_causal, window=window if window is not None and m <= window else None)
    if isinstance(mask, Tensor) and mask.dim() == 4:
        return _read_matrix(mask, is_causal, m, window)
    if not isinstance(mask, Mask):
        raise Unsupported("attention_mask", f"a {type(mask).__name__} for another kind of attention")
    if mask.rule is None:
        raise Unsupported("attention_mask", "a rule for each pair of query and key, such as chunks or blocks")
    if mask.rule.is_causal and mask.is_static:
        raise Unsupported("past_key_values", "a static cache, which contains keys that do not exist yet")
    segment_ids = mask.rule.segment_ids if mask.segment_ids is None else mask.segment_ids
    return Seen(mask.rule.is_causal, visible_keys(mask, m), segment_ids, mask.rule.window)


def visible_keys(mask: Mask | Tensor | None, m: int) -> Tensor | None:
    """Return which of the last m keys a query may see at all, (b, 1 or heads, 1, m); None if that is all of them."""
    if mask is None:
        return None
    if isinstance(mask, Tensor):
        shown = shown_pairs(mask)
        return shown[..., shown.shape[-1] - m :].any(-2, keepdim=True)
    keys = None if mask.padding is None else mask.padding[:, mask.key_length - m :]
    hides_none = keys is None or (not torch.compiler.is_compiling() and bool(keys.all()))  # It depends on data.
    return None if hides_none or keys is None else keys[:, None, None]


def shown_pairs(mask: Tensor) -> Tensor:
    """Return a matrix as booleans, True = attend; raise ValueError if it adds numbers to the logits."""
    if mask.dtype == torch.bool:
        return mask
    shown = mask == 0
    if not bool((shown | (mask <= torch.finfo(mask.dtype).min / 2)).all()):
        raise Unsupported("attention_mask", "numbers added to the logits")
    return shown


def _read_matrix(mask: Tensor, is_causal: bool, m: int, window: int | None) -> Seen:
    """Split a matrix (b, 1 or heads, n, ...) that is causal, hides keys, has the window, or a combination of these.

    Raises:
        ValueError: It is a matrix of another kind.
    """
    shown = shown_pairs(mask)
    shown = shown[..., shown.shape[-1] - m :]
    keys, n = shown.any(-2, keepdim=True), shown.shape[-2]
    pairs = keys.expand_as(shown)
    before = pairs.tril(m - n)
    if window is not None:
        if bool((shown == before.triu(m - n - window + 1)).all()):
            # The mask of one query does not show causality; the layer knows.
            return Seen(is_causal or n > 1, keys, window=window)
        if n == m and bool((shown == pairs.tril(window - 1).triu(1 - window)).all()):
            return Seen(False, keys, window=window)
    if bool((shown == keys).all()):
        return Seen(is_causal and n == 1, keys)
    if bool((shown == before).all()):
        return Seen(True, keys)
    raise Unsupported("attention_mask", "a choice for each pair of query and key")
