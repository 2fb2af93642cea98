"""Attention whose cost and error you choose.

>>> import torch, subquad
>>> q, k, v = torch.randn(3, 1, 8, 512, 16).unbind()
>>> subquad.attention(q, k, v, is_causal=True, method=subquad.Taylor(2)).shape
torch.Size([1, 8, 512, 16])
"""

from subquad._attention import attention, normalizer
from subquad._auto import Auto
from subquad._cost import cost, crossover, multihead_cost
from subquad._decoder import Decoder
from subquad._error import error, needed_degree, needed_features
from subquad._features import Exact, FeatureMap, Linear, RandomFeatures, Taylor
from subquad._modules import MultiheadAttention
from subquad._multipole import Multipole
from subquad._plan import Plan, plan
from subquad._replace import Replacements, replace_attention
from subquad._sample import logit_range, measure_error
from subquad._separable import Separable
from subquad._state import State

__version__ = "0.1.0"
__all__ = [
    "Auto",
    "Decoder",
    "Exact",
    "FeatureMap",
    "Linear",
    "MultiheadAttention",
    "RandomFeatures",
    "Plan",
    "Replacements",
    "Separable",
    "Multipole",
    "State",
    "Taylor",
    "attention",
    "cost",
    "crossover",
    "error",
    "logit_range",
    "measure_error",
    "multihead_cost",
    "needed_degree",
    "needed_features",
    "normalizer",
    "plan",
    "replace_attention",
]
