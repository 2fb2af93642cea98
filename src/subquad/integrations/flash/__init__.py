"""The functions of the flash_attn package (2.x), on any device that torch supports, with any method of subquad.

    from subquad.integrations.flash import flash_attn_func    # instead of: from flash_attn import flash_attn_func

rule.py checks the arguments that the functions share, attend.py aligns queries to keys and chooses how to compute,
rows.py computes what no method of subquad can express. batch.py, varlen.py and kvcache.py have one function each.
"""

from subquad.integrations.flash.batch import flash_attn_func
from subquad.integrations.flash.kvcache import flash_attn_with_kvcache
from subquad.integrations.flash.varlen import flash_attn_varlen_func

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
