"""Load transformers language models from local files, and record the inputs and outputs of their attention layers.

Nothing is downloaded, no remote code is executed, and no pickle is read.

Axes: h query heads, n tokens, d width.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from subquad_lab import UsageError
from subquad_lab.models.model_files import check_size, checked_weights
from subquad_lab.system.memory import room
from subquad_lab.system.regular_file import read_regular

NAME = "subquad-watch"  # of the attention function registered with transformers
MIN_TOKENS = 64  # for a meaningful error
DEFAULT_MAX_TOKENS = 4096
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")


class Layer(NamedTuple):
    """The inputs (RoPE already applied) and the output of one attention layer."""

    query: Tensor  # (1, h, n, d)
    key: Tensor  # h heads, or a divisor of h
    value: Tensor
    output: Tensor  # (1, h, n, d), as computed by the model
    scale: float | None
    is_causal: bool


def load(path: str, with_head: bool = False) -> tuple[Any, Any]:
    """Load a model in float32, and its tokenizer, from a folder or a .gguf file.

    Args:
        path: The folder or file.
        with_head: Whether to load a decoder that predicts tokens, instead of a decoder or encoder without its head.
    """
    file = Path(path)
    if not file.exists():
        raise UsageError(f"--model: no such folder: {path}")
    if file.is_file() and file.suffix != ".gguf":
        raise UsageError(f"--model: expected a folder saved by transformers or a .gguf file, got {path}")
    folder = file.parent if file.is_file() else file
    named: dict[str, Any] = {"gguf_file": file.name} if file.is_file() else {}
    os.environ["HF_HUB_OFFLINE"] = "1"  # transformers reads it on import.
    try:
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
        from transformers.models.auto import modeling_auto
        from transformers.utils import logging
    except ModuleNotFoundError as error:
        raise UsageError(
            f"--model: {error.name} is not installed; install it with: pip install 'subquad[pretrained]'"
        ) from error
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    named = {**named, "local_files_only": True, "trust_remote_code": False}
    with _foreign(path), warnings.catch_warnings(action="ignore"):
        weights = checked_weights(file)
        config = AutoConfig.from_pretrained(folder, **named)
        kind, known = AutoModelForCausalLM, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if not with_head:
            kind, known = AutoModel, known | modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
        if config.model_type not in known or config.is_encoder_decoder:
            what = "decoder-only" if with_head else "decoder-only or encoder-only"
            raise UsageError(f"--model: expected a {what} language model, got {config.model_type!r}")
        check_size(config, kind.from_config, weights)
        tokenizer = _tokenizer(AutoTokenizer, folder, named)
        with redirect_stderr(StringIO()):  # The progress bar of .gguf files cannot be disabled.
            model, found = kind.from_pretrained(
                folder, **named, use_safetensors=True, attn_implementation="sdpa", dtype=torch.float32,
                output_loading_info=True,
            )  # fmt: skip
    # The pooler is not used here, and encoders are often saved without it. Other missing weights would be initialized
    # at random, and the plan would be meaningless.
    if missing := sorted(name for name in found["missing_keys"] if "pooler" not in name):
        raise UsageError(f"--model: {path} lacks {len(missing)} of the model's weights, such as {missing[0]}")
    return model.eval(), tokenizer


def _tokenizer(kind: Any, folder: Path, named: dict[str, Any]) -> Any:
    """The model's own. Where its files are missing, some kinds would be made without any words."""
    if "gguf_file" not in named and not any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
        raise UsageError(f"--model: {folder} has no tokenizer: none of {', '.join(TOKENIZER_FILES)} is there; write it "
                         "with tokenizer.save_pretrained(FOLDER)")  # fmt: skip
    try:
        return kind.from_pretrained(folder, **named)
    except Exception as error:  # Here all lines of a message matter.
        raise UsageError(
            f"--model: the tokenizer in {folder} cannot be loaded: {str(error) or type(error).__name__}"
        ) from error


@contextmanager
def _foreign(path: str) -> Iterator[None]:
    """Turn whatever the libraries raise for a malformed model into an error that names it."""
    try:
        yield
    except UsageError as error:
        raise UsageError(error if str(error).startswith("--model: ") else f"--model: {error}") from error
    except ImportError as error:  # such as gguf, which transformers imports on demand
        raise UsageError(f"--model: {path} needs another package: {_first(error)}") from error
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # They can raise anything, and a panic of a Rust library is not an Exception.
        raise UsageError(f"--model: {path} cannot be loaded: {_first(error)}") from error


def _first(error: BaseException) -> str:
    """Return the first line of an error message, or what an OSError says about which file."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{Path(error.filename).name}: {error.strerror}"
    lines = str(error).strip().splitlines()
    if lines and "ignore_mismatched_sizes" in lines[0]:  # It refers to a report that is not shown.
        return "its weights do not have the shapes that its config describes"
    is_sentence = lines and isinstance(error, ValueError | RuntimeError | OSError)
    return lines[0] if is_sentence else ": ".join([type(error).__name__, *lines[:1]])


def read(path: str) -> str:
    """Return the text in a file. This does not need the model, so a wrong file is found before the model is loaded."""
    try:
        return read_regular(path, room()).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"--text: cannot read {path}: {reason}") from error


def tokenized(text: str, model: Any, tokenizer: Any, count: int | None) -> Tensor:
    """Return the first `count` tokens of a text, (1, n); by default all, up to the model's maximum or 4096."""
    reach = min(getattr(model.config, "max_position_embeddings", DEFAULT_MAX_TOKENS), tokenizer.model_max_length)
    if count is not None and not MIN_TOKENS <= count <= reach:
        raise UsageError(
            f"--tokens: expected a number from {MIN_TOKENS} to {reach:,} (the model's maximum), got {count:,}"
        )
    most = min(reach, DEFAULT_MAX_TOKENS) if count is None else count
    # 32 characters per token are more than enough; the rest of a long text need not be tokenized.
    tokens: Tensor = tokenizer(text[: 32 * most], truncation=True, max_length=most, return_tensors="pt").input_ids
    least = MIN_TOKENS if count is None else count
    if tokens.shape[1] < least:
        raise UsageError(f"--text: expected at least {least:,} tokens, got {tokens.shape[1]:,}")
    return tokens


@torch.no_grad()
def watch(model: Any, tokens: Tensor, see: Callable[[Layer], None]) -> None:
    """Run the model and call `see` with each attention layer in turn; only one is in memory at a time."""
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
        is_causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)  # as in sdpa
        see(Layer(query, key, value, output.transpose(1, 2), scaling, is_causal))
        return output, None

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation(NAME)
    try:
        model(tokens)
    finally:
        model.set_attn_implementation(before)
