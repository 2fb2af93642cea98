"""What a layer may request and a method does not support."""

NO_METHOD = {  # not supported by any method here
    "softcap": "logit soft-capping",
    "s_aux": "attention sinks",
    "indices": "a selection of keys for each query",
    "block_indices": "a selection of blocks of keys for each query",
    "cache": "a paged cache",
    "output_attentions": "the attention weights, which are never formed",
}
EXACT_ONLY = {  # needs a weight for each pair of query and key
    "position_bias": "a bias added to each logit",
    "sliding_window": "a window of keys that moves with the query",
    "dropout": "dropout on the weights in training; model.eval() disables it",
}


def unsupported(argument: str, meaning: str) -> ValueError:
    """Return the error for an argument that the method of a layer does not support."""
    alternative = 'method="exact", or replace_attention(..., layers=[...]) without this layer'
    alternative = 'attn_implementation="eager"' if argument in NO_METHOD else alternative
    return ValueError(f"{argument} ({meaning}) is not supported by this method. Use {alternative}.")
