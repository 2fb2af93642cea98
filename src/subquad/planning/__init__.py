"""Planning: what a call costs, how large its error is, and which method to use.

`subquad` exports the functions that most people need. The names here are for programs that build their own tables:

>>> from subquad.planning import Shape
>>> Shape.of(query_length=4096, head_dim=64, heads=8, is_causal=True).pairs
67125248
"""

from subquad.planning.calibration_file import cache_folder, predicted_seconds
from subquad.planning.measured_error import SAMPLE_MARGIN
from subquad.planning.plan import DEFAULT_MAX_ERROR
from subquad.planning.shape import Shape

__all__ = ["DEFAULT_MAX_ERROR", "SAMPLE_MARGIN", "Shape", "cache_folder", "predicted_seconds"]
