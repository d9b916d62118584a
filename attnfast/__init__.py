"""Fused attention for recurrent sequence-to-sequence models.

Functions: :func:`additive_attention`, :func:`dot_attention`. Modules: :mod:`attnfast.nn`.
"""

from attnfast import nn
from attnfast.ops.attention import additive_attention, dot_attention

__version__ = "0.1.0"
__all__ = ["additive_attention", "dot_attention", "nn"]
