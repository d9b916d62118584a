"""Fused attention for recurrent sequence-to-sequence models.

Functions: :func:`additive_attention`, :func:`dot_attention`, :func:`coverage_attention`,
:func:`copy_distribution`. Modules: :mod:`attnfast.nn`.
"""

from attnfast import nn
from attnfast.ops.attention import additive_attention, dot_attention
from attnfast.ops.copying import copy_distribution
from attnfast.ops.coverage import coverage_attention
from attnfast.version import __version__

__all__ = [
    "__version__",
    "additive_attention",
    "copy_distribution",
    "coverage_attention",
    "dot_attention",
    "nn",
]
