"""What a layer may ask for, and a method cannot give."""

# Of no method here, and of exact attention alone, which has a weight for each pair.
UNKNOWN = {
    "softcap": "a cap on the logits",
    "s_aux": "attention sinks",
    "indices": "a choice of keys for each query",
    "block_indices": "a choice of blocks of keys for each query",
    "cache": "a paged cache",
    "output_attentions": "the weights of attention, which are never formed",
}
PAIRWISE = {
    "position_bias": "a bias added to each logit",
    "sliding_window": "a window of keys that moves with the query",
    "dropout": "drawn for each weight in training (model.eval() ends it)",
}


def refusal(argument: str, meaning: str) -> ValueError:
    way_out = 'method="exact", or use(..., layers=[...]) without this layer'
    way_out = 'attn_implementation="eager"' if argument in UNKNOWN else way_out
    return ValueError(f"{argument} is {meaning}, which this method cannot give. Use {way_out}.")
