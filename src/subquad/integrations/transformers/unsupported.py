"""What a layer may request and a method does not support."""

NO_METHOD = {  # not supported by any method here
    "indices": "a selection of keys for each query",
    "block_indices": "a selection of blocks of keys for each query",
    "cache": "a paged cache",
    "output_attentions": "the attention weights, which are never formed",
}
EXACT_ONLY = {  # needs a weight for each pair of query and key
    "position_bias": "a bias added to each logit",
}


class Unsupported(ValueError):
    """An argument that the method of a layer does not support.

    Args:
        argument: The name of the argument.
        meaning: What it asks for.
    """

    def __init__(self, argument: str, meaning: str) -> None:
        super().__init__(f"{argument} ({meaning}) is not supported by this method.")
        self.argument = argument

    def advice(self, is_exact: bool) -> str:
        """Return what to do instead in a layer for which exact attention was chosen, or another method."""
        if is_exact or self.argument in NO_METHOD:
            return ' Use attn_implementation="eager".'
        return ' Use method="exact", or replace_attention(..., layers=[...]) without this layer.'
