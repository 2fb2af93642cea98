"""Language models of transformers, from files on this machine: loaded, and their attention watched at work.

Nothing is fetched, no code that comes with a model is run, and no pickle is read.

Axes: h query heads, n tokens, d width.
"""

import os
from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from subquad_lab import UsageError

NAME = "subquad-watch"  # of the attention that is registered with transformers
FEWEST, MOST = 64, 4096  # tokens: that errors can be measured on, and that are read unless more are asked for


class Layer(NamedTuple):
    """What one layer's attention got, positions turned in already, and made."""

    query: Tensor  # (1, h, n, d)
    key: Tensor  # as many heads as the query, or a number that divides it
    value: Tensor
    output: Tensor  # (1, h, n, d), the model's own
    scale: float | None
    is_causal: bool


def load(path: str) -> tuple[Any, Any]:
    """A decoder or an encoder without its head, in float32, and its tokenizer: from a folder, or from a .gguf file."""
    file = Path(path)
    if not file.exists():
        raise UsageError(f"--model: there is no folder {path!r}")
    if file.is_file() and file.suffix != ".gguf":
        raise UsageError(f"--model: expected a folder that transformers saved, or a .gguf file, got {path!r}")
    folder = file.parent if file.is_file() else file
    named: dict[str, Any] = {"gguf_file": file.name} if file.is_file() else {}
    os.environ["HF_HUB_OFFLINE"] = "1"  # It is read when transformers is imported.
    try:
        from transformers import AutoConfig, AutoModel, AutoTokenizer
        from transformers.models.auto import modeling_auto
        from transformers.utils import logging
    except ModuleNotFoundError as error:
        raise UsageError(f"--model: {error.name} is missing; pip install 'subquad[pretrained]' brings it") from error
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    named = {**named, "local_files_only": True, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(folder, **named)
        known = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
        if config.model_type not in known or config.is_encoder_decoder:
            raise UsageError(
                f"--model: expected a language model, a decoder or an encoder alone, got {config.model_type!r}"
            )
        tokenizer = AutoTokenizer.from_pretrained(folder, **named)
        with redirect_stderr(StringIO()):  # The bar of a .gguf file cannot be turned off.
            model, found = AutoModel.from_pretrained(
                folder, **named, use_safetensors=True, attn_implementation="sdpa", dtype=torch.float32,
                output_loading_info=True,
            )  # fmt: skip
    except UsageError:
        raise
    except ImportError as error:  # of gguf, which transformers asks for by itself
        raise UsageError(f"--model: {path} needs a package: {_first(error)}") from error
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UsageError(f"--model: {path} cannot be loaded: {_first(error)}") from error
    # A pooler on top is no part of the layers, and encoders are often saved without it. Other weights that are missing
    # would be random numbers, and so would the plan be.
    if missing := sorted(name for name in found["missing_keys"] if "pooler" not in name):
        raise UsageError(f"--model: {path} lacks {len(missing)} of the model's weights, such as {missing[0]}")
    return model.eval(), tokenizer


def _first(error: Exception) -> str:
    """The first line of a message that can have many."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def read(path: str, model: Any, tokenizer: Any, count: int | None) -> Tensor:
    """(1, n): the first `count` tokens of a text; without a count, all that the model can read of it, up to MOST."""
    reach = min(getattr(model.config, "max_position_embeddings", MOST), tokenizer.model_max_length)
    if count is not None and not FEWEST <= count <= reach:
        raise UsageError(f"--tokens: expected a number from {FEWEST} to {reach:,}, all that it reads, got {count:,}")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"--text: {path} cannot be read: {reason}") from error
    most = min(reach, MOST) if count is None else count
    # Far more letters than so many tokens have: the rest of a long text need not be cut into tokens.
    tokens: Tensor = tokenizer(text[: 32 * most], truncation=True, max_length=most, return_tensors="pt").input_ids
    least = FEWEST if count is None else count
    if tokens.shape[1] < least:
        raise UsageError(f"--text: expected at least {least:,} tokens, got {tokens.shape[1]:,} in {path}")
    return tokens


@torch.no_grad()
def watch(model: Any, tokens: Tensor, see: Callable[[Layer], None]) -> None:
    """Run the model, and let `see` have each layer at its turn; only one is in memory."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before = model.config._attn_implementation
    own = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        scaling: float | None = None, **more: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        output, _ = own(module, query, key, value, attention_mask, scaling=scaling, **more)
        is_causal = more.get("is_causal")
        is_causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)  # as sdpa has it
        see(Layer(query, key, value, output.transpose(1, 2), scaling, is_causal))
        return output, None

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation(NAME)
    try:
        model(tokens)
    finally:
        model.set_attn_implementation(before)
