"""Attention whose cost and error you choose.

>>> import torch, subquad
>>> q, k, v = torch.randn(3, 1, 8, 512, 16).unbind()
>>> subquad.attention(q, k, v, is_causal=True, method=subquad.Taylor(2)).shape
torch.Size([1, 8, 512, 16])
"""

from subquad._calls.state import State
from subquad._engines.decoder import Decoder
from subquad._engines.decompositions import decompositions
from subquad.attention import attention, normalizer
from subquad.methods.block_sparse import BlockSparse
from subquad.methods.error_estimate import ErrorEstimate
from subquad.methods.exact import Exact
from subquad.methods.feature_map import FeatureMap
from subquad.methods.hedgehog import Hedgehog
from subquad.methods.hybrid import Hybrid
from subquad.methods.linear import Linear
from subquad.methods.multipole import Multipole
from subquad.methods.random_features import RandomFeatures, optimal_scale
from subquad.methods.separable import Separable
from subquad.methods.taylor import Taylor
from subquad.methods.window import Window
from subquad.nn.fit import fit_attention
from subquad.nn.multihead import MultiheadAttention
from subquad.nn.replace import replace_attention
from subquad.nn.report import Replacement, Replacements
from subquad.nn.sdpa import RoutedCalls, Routing, sdpa
from subquad.planning.auto import Auto, Choice
from subquad.planning.cost import cost, multihead_cost
from subquad.planning.cost_result import Cost
from subquad.planning.crossover import crossover
from subquad.planning.error import error, needed_degree, needed_features
from subquad.planning.fit import Fit, fit
from subquad.planning.measured_error import logit_range, measure_error
from subquad.planning.plan import plan
from subquad.planning.plan_result import Candidate, Plan

__version__ = "0.1.0"

__all__ = [
    # compute
    "attention", "normalizer", "decompositions", "Decoder", "Exact", "Taylor", "RandomFeatures", "Linear", "Separable",
    "Hedgehog", "Window", "BlockSparse", "Hybrid", "Multipole", "Auto", "FeatureMap", "State",
    # predict
    "cost", "multihead_cost", "crossover", "error", "needed_degree", "needed_features", "optimal_scale", "logit_range",
    "measure_error", "fit", "plan",
    # modules
    "MultiheadAttention", "replace_attention", "fit_attention", "sdpa",
    # result types
    "Candidate", "Choice", "Cost", "ErrorEstimate", "Fit", "Plan", "Replacement", "Replacements", "RoutedCalls",
    "Routing",
]  # fmt: skip
