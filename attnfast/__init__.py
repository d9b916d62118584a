"""Fused attention for recurrent sequence-to-sequence models.

Functions: :func:`additive_attention`, :func:`dot_attention`, :func:`coverage_attention`,
:func:`copy_distribution`; scores alone: :func:`additive_score`; keys and values for many decoder
steps: :func:`prepare` and :func:`attend`; the keys that a row may see: :class:`Span`; supervision
by given alignments: :func:`alignment_loss`; a bias toward keys near a position:
:func:`gaussian_bias`. Modules: :mod:`attnfast.nn`. Other projects' modules: :func:`replace`.

An argument that does not fit raises ValueError or TypeError, and the message names it.
"""

from importlib import metadata

from attnfast import nn
from attnfast._utils.checks import InputError
from attnfast._utils.dispatch_log import Explanation, explain
from attnfast.decoding import attend, prepare
from attnfast.functional import (
    additive_attention,
    additive_score,
    copy_distribution,
    coverage_attention,
    dot_attention,
)
from attnfast.integrations import register_adapter, replace
from attnfast.losses import alignment_loss
from attnfast.ops import self_check as _self_check  # noqa: F401, hooks into the choice of a backend
from attnfast.ops.backends import load_library as _load_library
from attnfast.outputs import AttentionOutput, CoverageOutput, RecurrentOutput, RowStatistics
from attnfast.spans import Span, gaussian_bias

try:
    __version__ = metadata.version("attnfast")
except metadata.PackageNotFoundError:  # sources that are not installed
    __version__ = "0+unknown"

# Packages of AOTInductor call the operators without the code that selects a backend.
_load_library("_C_cpu")

__all__ = [
    "AttentionOutput",
    "CoverageOutput",
    "Explanation",
    "InputError",
    "RecurrentOutput",
    "RowStatistics",
    "Span",
    "__version__",
    "additive_attention",
    "additive_score",
    "alignment_loss",
    "attend",
    "copy_distribution",
    "coverage_attention",
    "dot_attention",
    "explain",
    "gaussian_bias",
    "nn",
    "prepare",
    "register_adapter",
    "replace",
]
