"""Tiny transformers models with random parameters, and inputs for them; nothing is downloaded.

Their parameters are larger than those of a new model, so that attention is far from a plain average.
"""

from typing import Any

import torch
import transformers
from torch import Tensor, nn

transformers.logging.set_verbosity_error()  # It warns about image processors, which are not used here.

WORDS, LENGTH = 40, 9
SPECIAL = dict(vocab_size=WORDS, pad_token_id=0, bos_token_id=1, eos_token_id=2)
HALVES = dict(
    d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
    encoder_ffn_dim=16, decoder_ffn_dim=16, dropout=0.0, decoder_start_token_id=3, **SPECIAL,
)  # fmt: skip
MODELS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "gpt2": (transformers.GPT2LMHeadModel, transformers.GPT2Config, dict(
        n_layer=2, n_embd=16, n_head=2, n_positions=64, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, **SPECIAL)),
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, dict(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=32,
        **SPECIAL)),
    "bert": (transformers.BertForMaskedLM, transformers.BertConfig, dict(
        num_hidden_layers=2, hidden_size=16, num_attention_heads=2, intermediate_size=16, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, **SPECIAL)),
    "t5": (transformers.T5ForConditionalGeneration, transformers.T5Config, dict(
        num_layers=2, d_model=16, num_heads=2, d_kv=8, d_ff=16, dropout_rate=0.0, decoder_start_token_id=3, **SPECIAL)),
    "bart": (transformers.BartForConditionalGeneration, transformers.BartConfig, dict(
        max_position_embeddings=64, forced_eos_token_id=None, **HALVES)),
    "whisper": (transformers.WhisperForConditionalGeneration, transformers.WhisperConfig, dict(
        num_mel_bins=4, max_source_positions=10, max_target_positions=64, begin_suppress_tokens=None,
        suppress_tokens=None, **HALVES)),
}  # fmt: skip


def tiny(name: str, seed: int = 0, **changes: Any) -> Any:
    kind, config, sizes = MODELS[name]
    torch.manual_seed(seed)
    model = kind(config(**(sizes | changes))).eval()
    with torch.no_grad():
        for part in model.modules():
            for parameter in part.parameters(recurse=False):
                if parameter.dim() > 1:
                    # Embeddings have unit variance; other matrices roughly preserve the norm of their input.
                    width = 1 if isinstance(part, nn.Embedding) else parameter.shape[-1]
                    parameter.normal_(std=1.2 / width**0.5)
    return model


def padding(side: str | None) -> Tensor:
    """Return (3, LENGTH), 1 = a token: rows of different lengths, padded on one side."""
    shown = torch.ones(3, LENGTH, dtype=torch.long)
    for row, hidden in enumerate((0, 2, 5)):
        if side == "left":
            shown[row, :hidden] = 0
        elif side == "right":
            shown[row, LENGTH - hidden :] = 0
    return shown


def inputs(name: str, side: str | None = None, seed: int = 1) -> dict[str, Tensor]:
    """Return the inputs of a model, one row of tokens per row of the padding; without a mask if `side` is None."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, WORDS, (3, LENGTH), generator=generator)
    mask = {} if side is None else dict(attention_mask=padding(side))
    if name in ("gpt2", "llama", "bert"):
        return dict(input_ids=ids, **mask)
    decoder = dict(decoder_input_ids=ids) | {f"decoder_{key}": value for key, value in mask.items()}
    if name == "whisper":
        return dict(input_features=torch.randn(3, 4, 20, generator=generator), **decoder)
    return dict(input_ids=ids.flip(-1), **mask, **decoder)


def prompt(name: str, side: str | None = None) -> dict[str, Tensor]:
    """Return the inputs of `generate`; for encoder-decoder models, those of the encoder."""
    return {key: value for key, value in inputs(name, side).items() if not key.startswith("decoder_")}


def real(side: str | None) -> Tensor:
    """Return (3, LENGTH), True = a token."""
    return padding(side).bool()
