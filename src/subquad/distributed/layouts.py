"""Where a model has its sequence: which arguments are split over the ranks, along which dimension.

n tokens on R ranks     rank r holds n // R tokens, and one more if r < n mod R

nn.TransformerEncoder and its layers, MultiheadAttention     by their signature
Hugging Face models                                          `subquad.integrations.transformers` adds their layout
any other model                                              the caller names the arguments
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from subquad.nn.masks import factored
from subquad.nn.multihead import MultiheadAttention

MIN_TOKENS = 2  # of a rank; the causal mask of one token is not different from no mask

Arguments = dict[str, Any]  # of one call of a model, by name


class Cut(NamedTuple):
    """A sequence in slices, one for each rank."""

    rank: int
    ranks: int

    def bounds(self, length: int) -> tuple[int, int]:
        """Return the first token of this rank's slice, and the one after its last."""
        short, longer = divmod(length, self.ranks)
        start = self.rank * short + min(self.rank, longer)
        return start, start + short + (self.rank < longer)

    def of(self, tensor: Tensor, dim: int) -> Tensor:
        """Return this rank's slice of a tensor."""
        start, end = self.bounds(tensor.shape[dim])
        return tensor.narrow(dim, start, end - start).contiguous()


class Layout(ABC):
    """How the calls of one model are split."""

    @abstractmethod
    def dimensions(self, given: Arguments) -> dict[str, int]:
        """Return the dimension of the sequence for each tensor that is to be split.

        Raises:
            ValueError: The call cannot be split.
        """

    def completed(self, given: Arguments) -> Arguments:
        """Return the arguments of the whole call with those that a slice needs in addition, before they are split."""
        return given

    def segment_ids(self, given: Arguments) -> Tensor | None:
        """Return the segments of packed sequences (batch, n), from the arguments of the whole call."""
        return None

    def finished(self, output: Any, given: Arguments, total: Callable[[Tensor], Tensor]) -> Any:
        """Return the output of a call, with a loss in it summed by `total` over the ranks."""
        return output


class Named(Layout):
    """A model whose caller has named the arguments."""

    def __init__(self, split: dict[str, int]) -> None:
        self.split = split

    def dimensions(self, given: Arguments) -> dict[str, int]:
        return self.split


class TorchModule(Layout):
    """`nn.TransformerEncoder`, its layers, or attention itself, in torch's signature."""

    def __init__(self, inputs: tuple[str, ...], mask: str, padding: str, batch_first: bool) -> None:
        self.inputs, self.mask, self.padding, self.batch_first = inputs, mask, padding, batch_first

    def dimensions(self, given: Arguments) -> dict[str, int]:
        first = given.get(self.inputs[0])
        is_batched = isinstance(first, Tensor) and first.dim() == 3
        return dict.fromkeys(self.inputs, int(self.batch_first and is_batched)) | {self.padding: -1}

    def completed(self, given: Arguments) -> Arguments:
        """Replace a causal matrix by `is_causal`, which has the same meaning for a slice."""
        mask = given.get(self.mask)
        if mask is None:
            return given
        if not given.get("is_causal") and not _is_causal(mask):
            raise ValueError(
                f"{self.mask}: expected a causal matrix or None, got another mask, which cannot be split over ranks; "
                f"use {self.padding} to hide keys"
            )
        return given | {self.mask: None, "is_causal": True}


def _is_causal(mask: Tensor) -> bool:
    try:
        keys, is_causal = factored(mask)
    except ValueError:
        return False
    return is_causal and bool(keys.all())


def _layout_of_torch_module(model: nn.Module) -> Layout | None:
    if isinstance(model, MultiheadAttention):
        return TorchModule(("query", "key", "value"), "attn_mask", "key_padding_mask", model.batch_first)
    attention = next((part for part in model.modules() if isinstance(part, MultiheadAttention)), None)
    if attention is None or not isinstance(model, nn.TransformerEncoder | nn.TransformerEncoderLayer):
        return None
    mask = "mask" if isinstance(model, nn.TransformerEncoder) else "src_mask"
    return TorchModule(("src",), mask, "src_key_padding_mask", attention.batch_first)


kinds: list[Callable[[nn.Module], Layout | None]] = [_layout_of_torch_module]  # integrations add theirs


def layout_of(model: nn.Module, split: dict[str, int] | None) -> Layout:
    """Return the layout of a model whose attention is computed by this library.

    Raises:
        ValueError: Its attention is computed otherwise, or its arguments are unknown.
    """
    name = type(model).__name__
    refuse_other_mixers(model)
    found = next((layout for kind in kinds if (layout := kind(model)) is not None), None)
    foreign = [type(part).__name__ for part in model.modules() if is_of_transformers(part)]
    if foreign and found is None:
        raise ValueError(
            f"model: expected a Hugging Face model whose attention was replaced, got {name}; call "
            f"subquad.integrations.transformers.replace_attention(model, method) first, and pass {foreign[0]} itself"
        )
    if found is not None and split is not None:
        raise ValueError(f"split: expected None for {name}, whose arguments are known, got {split}")
    if found is None and not split:
        raise ValueError(
            f"split: expected the arguments of {name} that hold tokens and the dimension of the sequence in each, such "
            f'as split={{"tokens": 1}}, got {split}'
        )
    return found if found is not None else Named(dict(split or {}))


def is_of_transformers(module: nn.Module) -> bool:
    """Return whether a module is a whole model of Hugging Face transformers."""
    kinds = type(module).__mro__
    return any(kind.__name__ == "PreTrainedModel" and kind.__module__.startswith("transformers.") for kind in kinds)


def refuse_other_mixers(model: nn.Module) -> None:
    """Raise ValueError if a part of the model is known to mix tokens otherwise than on one process."""
    for place, part in model.named_modules():
        if isinstance(part, nn.MultiheadAttention):
            raise ValueError(
                f"model: {place or type(model).__name__} is torch.nn.MultiheadAttention, which would see only the "
                'tokens of this rank; call subquad.replace_attention(model, method) first, with method="exact" to keep '
                "it exact"
            )
        if isinstance(part, MultiheadAttention) and (part.add_zero_attn or part.bias_k is not None):
            raise ValueError(
                f"model: {place or type(model).__name__} adds a key to those of the sequence (add_bias_kv or "
                "add_zero_attn), which every rank would do; sequence_parallel supports only keys of tokens"
            )
        if isinstance(part, nn.RNNBase):
            raise ValueError(
                f"model: {place or 'it'} ({type(part).__name__}) passes its state from token to token; "
                "sequence_parallel supports only attention"
            )
