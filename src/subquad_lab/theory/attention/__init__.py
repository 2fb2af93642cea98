"""What attention costs, and what becomes of it when the exponential is replaced.

L tokens, D width of a head, d width of the model, h heads, K degree, M features.
"""

from subquad_lab.theory.attention import costs, features, kernels

__all__ = ["costs", "features", "kernels"]
