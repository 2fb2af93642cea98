"""Tiny transformers models with random parameters, and inputs for them; nothing is downloaded.

Their parameters are larger than those of a new model, so that attention is far from a plain average.
"""

from typing import Any

import torch
import transformers
from torch import Tensor, nn

transformers.logging.set_verbosity_error()  # It warns about image processors, which are not used here.

WORDS, LENGTH = 40, 9
WINDOW, LONG = 8, 30  # of the models with sliding windows, and the length of their inputs
SPECIAL = dict(vocab_size=WORDS, pad_token_id=0, bos_token_id=1, eos_token_id=2)
HALVES = dict(
    d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
    encoder_ffn_dim=16, decoder_ffn_dim=16, dropout=0.0, decoder_start_token_id=3, **SPECIAL,
)  # fmt: skip
SLIDING = dict(
    num_hidden_layers=3, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size=32,
    max_position_embeddings=128, sliding_window=WINDOW, **SPECIAL,
)  # fmt: skip
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]  # of layers, where a model has both
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
    "mistral": (transformers.MistralForCausalLM, transformers.MistralConfig, SLIDING),
    "phi3": (transformers.Phi3ForCausalLM, transformers.Phi3Config, SLIDING),
    "qwen2": (transformers.Qwen2ForCausalLM, transformers.Qwen2Config, dict(
        use_sliding_window=True, layer_types=KINDS, **SLIDING)),
    "gemma2": (transformers.Gemma2ForCausalLM, transformers.Gemma2Config, dict(
        layer_types=KINDS, attn_logit_softcapping=2.0, query_pre_attn_scalar=8, **SLIDING)),
    "gemma3": (transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig, dict(
        layer_types=KINDS, query_pre_attn_scalar=8, **SLIDING)),
    "gpt_oss": (transformers.GptOssForCausalLM, transformers.GptOssConfig, dict(
        layer_types=KINDS, num_local_experts=2, num_experts_per_tok=1, **SLIDING)),
    "exaone4": (transformers.Exaone4ForCausalLM, transformers.Exaone4Config, dict(layer_types=KINDS, **SLIDING)),
    "vit": (transformers.ViTForImageClassification, transformers.ViTConfig, dict(
        num_hidden_layers=2, hidden_size=16, num_attention_heads=2, intermediate_size=16, image_size=12, patch_size=4,
        num_labels=3)),
    "modernbert": (transformers.ModernBertForMaskedLM, transformers.ModernBertConfig, dict(
        num_hidden_layers=3, hidden_size=32, num_attention_heads=4, intermediate_size=32, local_attention=WINDOW,
        layer_types=KINDS, max_position_embeddings=128, cls_token_id=1, sep_token_id=2, **SPECIAL)),
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
            if isinstance(getattr(part, "sinks", None), nn.Parameter):
                part.sinks.normal_(mean=1.0)
    return model


def padding(side: str | None, length: int = LENGTH) -> Tensor:
    """Return (3, length), 1 = a token: rows of different lengths, padded on one side.

    On the right fewer than WINDOW tokens are hidden: eager attention averages all values where a query sees no key.
    """
    shown = torch.ones(3, length, dtype=torch.long)
    for row, hidden in enumerate((0, 2, 5) if length == LENGTH or side == "right" else (0, 7, 16)):
        if side == "left":
            shown[row, :hidden] = 0
        elif side == "right":
            shown[row, length - hidden :] = 0
    return shown


def long_inputs(side: str | None = None, seed: int = 1) -> dict[str, Tensor]:
    """Return the inputs of a model with sliding windows, several windows long; without a mask if `side` is None."""
    ids = torch.randint(3, WORDS, (3, LONG), generator=torch.Generator().manual_seed(seed))
    return dict(input_ids=ids) | ({} if side is None else dict(attention_mask=padding(side, LONG)))


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


def real(side: str | None, length: int = LENGTH) -> Tensor:
    """Return (3, length), True = a token."""
    return padding(side, length).bool()
