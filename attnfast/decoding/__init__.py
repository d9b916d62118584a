"""Decoding: attention of a decoder's steps over one memory, and searches for the best words."""

from attnfast.decoding._hypotheses import Scorer, SearchOutput
from attnfast.decoding.memory import Memory, attend, attend_with_history, check_memory, prepare
from attnfast.decoding.search import (
    beam_search,
    greedy_search,
    sample,
    sharing_packed_parameters,
)

__all__ = [
    "Memory",
    "Scorer",
    "SearchOutput",
    "attend",
    "attend_with_history",
    "beam_search",
    "check_memory",
    "greedy_search",
    "prepare",
    "sample",
    "sharing_packed_parameters",
]
