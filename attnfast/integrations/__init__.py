"""Adapters that run other projects' attention with attnfast, one file per project."""

from attnfast.integrations.adapter import Adapter, ProbeInputs, UnsupportedCall
from attnfast.integrations.cache import cached_per_source
from attnfast.integrations.helpers import (
    attend_to_source,
    batch_first,
    keep_in_graph,
    project,
    project_both,
    project_joined,
    promote_dtype,
)
from attnfast.integrations.registry import ADAPTERS, register_adapter
from attnfast.integrations.replace import Report, replace
from attnfast.integrations.search_model import SearchModel, make_search_model

__all__ = [
    "ADAPTERS",
    "Adapter",
    "ProbeInputs",
    "Report",
    "SearchModel",
    "UnsupportedCall",
    "attend_to_source",
    "batch_first",
    "cached_per_source",
    "keep_in_graph",
    "make_search_model",
    "project",
    "project_both",
    "project_joined",
    "promote_dtype",
    "register_adapter",
    "replace",
]
