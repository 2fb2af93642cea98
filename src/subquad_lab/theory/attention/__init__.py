"""The cost of attention, and the effect of replacing the exponential.

L is the number of tokens, D the head dimension, d the model dimension, h the number of heads, K the degree and M the
number of features.
"""

from subquad_lab.theory.attention import costs, features, kernels, scaled_features

__all__ = ["costs", "features", "kernels", "scaled_features"]
