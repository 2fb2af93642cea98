"""Hugging Face models split over ranks: their arguments, positions, labels and loss.

    position_ids    0, 1, 2, ... through all ranks, where the model would count from 0
    shift_labels    the label of a slice's last token is the first one of the next slice
    loss            sum of the slice's losses / number of labels of all ranks, then summed over the ranks

Axes: b batch, n tokens of all ranks.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss, ForTokenClassification
from transformers.masking_utils import find_packed_sequence_indices
from transformers.utils import ModelOutput

from subquad.distributed.layouts import Arguments, Layout
from subquad.integrations.transformers.layers import layers_of, method_of

HEADS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForTokenClassification")  # those that treat each token alone
SPLIT = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids", "labels", "shift_labels")
IGNORED = -100  # the label of a token without a loss
COUNTING = {"cumsum", "create_position_ids_from_input_ids"}  # positions that skip hidden tokens
# Arguments that must be missing or false, and why.
REFUSED = {
    "past_key_values": "a cache continues a sequence; call the model with whole sequences",
    "use_cache": "a cache continues a sequence; pass use_cache=False, and generate outside of sequence_parallel",
    "logits_to_keep": "the last tokens are those of the last rank; select them from its logits",
    "output_router_logits": "the balance of experts is a mean over the tokens of one process",
}


def layout_of(model: nn.Module) -> Layout | None:
    """Return the layout of a Hugging Face model; None for other models.

    Raises:
        ValueError: It cannot be split.
    """
    return SplitModel(model) if isinstance(model, PreTrainedModel) else None


class SplitModel(Layout):
    """The arguments of one model."""

    def __init__(self, model: Any) -> None:
        self.model, self.name = model, type(model).__name__
        forward = inspect.unwrap(type(model).forward)
        parameters = inspect.signature(forward).parameters.values()
        self.accepted = {parameter.name for parameter in parameters}
        self.takes_more = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        self.has_loss_function = "loss_function" in forward.__code__.co_names
        self._check()

    def _check(self) -> None:
        model, layers = self.model, layers_of(self.model)
        others = [name for name, layer in layers.items() if method_of(layer) is None]
        if others or not layers:
            what = f"{others[0]} computes its attention by itself" if others else "it has no attention that is replaced"
            raise ValueError(
                f"model: {self.name}: {what}, so it would see only the tokens of this rank; call "
                'subquad.integrations.transformers.replace_attention(model, method) first, with method="exact" to keep '
                "it exact"
            )
        parts = list(model.modules())
        problems = {
            "it has an encoder and a decoder": model.config.is_encoder_decoder,
            f"its head may read single tokens, unlike those of {', '.join(HEADS)}": (
                model.base_model is not model and not self.name.endswith(HEADS)
            ),
            "its pooler reads the first token; create it with add_pooling_layer=False": (
                getattr(model, "pooler", None) is not None
            ),
            "it takes no position_ids": "position_ids" not in self.accepted,
            "its rotary embedding depends on the length": any(
                word in str(getattr(part, "rope_type", "")) for part in parts for word in ("dynamic", "longrope")
            ),
            REFUSED["output_router_logits"]: getattr(model.config, "output_router_logits", False),
        }
        for problem, is_there in problems.items():
            if is_there:
                raise ValueError(f"model: {self.name} cannot be split over ranks: {problem}")

    def dimensions(self, given: Arguments) -> dict[str, int]:
        lengths = {name: given[name].shape[1] for name in SPLIT if given.get(name) is not None}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"{self.name}: expected one length of all arguments, got {lengths}")
        return dict.fromkeys(SPLIT, 1)

    def completed(self, given: Arguments) -> Arguments:
        self._check_arguments(given)
        tokens = given["inputs_embeds"] if given.get("input_ids") is None else given["input_ids"]
        n = tokens.shape[1]
        added: Arguments = {}
        if given.get("position_ids") is None:
            if any(map(_skips_hidden_tokens, self.model.modules())):
                raise ValueError(
                    f"position_ids: {self.name} counts the tokens that are not padding, which a rank cannot; pass them"
                )
            added["position_ids"] = torch.arange(n, device=tokens.device)[None]
        if "use_cache" in self.accepted or self.takes_more:
            added["use_cache"] = False
        return given | added | self._labels(given)

    def _check_arguments(self, given: Arguments) -> None:
        for name, reason in REFUSED.items():
            value = given.get(name)
            if isinstance(value, Tensor) or value:
                raise ValueError(f"{name}: not supported by sequence_parallel: {reason}")
        if given.get("input_ids") is None and given.get("inputs_embeds") is None:
            raise ValueError(f"{self.name}: expected input_ids or inputs_embeds, got neither")
        for name, value in given.items():
            if isinstance(value, Tensor) and name not in (*SPLIT, "num_items_in_batch"):
                raise ValueError(f"{name}: not supported by sequence_parallel, which splits {', '.join(SPLIT)}")
            dims = 3 if name == "inputs_embeds" else 2
            if name in SPLIT and value is not None and (not isinstance(value, Tensor) or value.dim() != dims):
                found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                shape = "(batch, n, width)" if dims == 3 else "(batch, n)"
                raise ValueError(f"{name}: expected a tensor of shape {shape}, got {found}")

    def _labels(self, given: Arguments) -> Arguments:
        """Return what the loss of a slice needs: its labels, shifted if need be, and the number of all labels."""
        labels = given.get("labels")
        if labels is None:
            return {}
        function = self.model.loss_function if self.has_loss_function and self.takes_more else None
        if function not in (ForCausalLMLoss, ForMaskedLMLoss, ForTokenClassification):
            raise ValueError(
                f"labels: {self.name} computes its loss as a mean over the tokens of a slice; call it without labels "
                "and compute the loss of this rank's logits by `shard` and `total` of sequence_parallel"
            )
        added = {}
        if function is ForCausalLMLoss:
            if given.get("shift_labels") is None:
                added["shift_labels"] = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]
            labels = (given | added)["shift_labels"]
        if given.get("num_items_in_batch") is None:
            added["num_items_in_batch"] = (labels != IGNORED).sum()
        return added

    def segment_ids(self, given: Arguments) -> Tensor | None:
        """Return the sequences that were packed: positions begin again and there is no mask, as in transformers."""
        if given.get("attention_mask") is not None:
            return None
        found: Tensor | None = find_packed_sequence_indices(given["position_ids"])
        tokens = given["inputs_embeds"] if given.get("input_ids") is None else given["input_ids"]
        return None if found is None else found.expand(len(tokens), -1)

    def finished(self, output: Any, given: Arguments, total: Callable[[Tensor], Tensor]) -> Any:
        if given.get("labels") is None:
            return output
        if isinstance(output, ModelOutput):
            output.loss = total(output.loss)
            return output
        return (total(output[0]), *output[1:])


def _skips_hidden_tokens(part: nn.Module) -> bool:
    """Return whether a module makes positions from a mask or from the padding token."""
    code = getattr(inspect.unwrap(type(part).forward), "__code__", None)
    names = set() if code is None else set(code.co_names)
    return bool(names & COUNTING) or any(hasattr(part, name) for name in COUNTING)
