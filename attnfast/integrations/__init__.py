"""Other projects' attention, served by attnfast: one file for each project."""

import importlib

from attnfast.integrations.adapter import ADAPTERS, Adapter, Draw, register_adapter
from attnfast.integrations.cache import cached_per_source
from attnfast.integrations.replace import Report, replace
from attnfast.integrations.serve import (
    attend,
    batch_first,
    keep_in_graph,
    multiplied,
    project,
    project_both,
    project_joined,
)

__all__ = [
    "ADAPTERS",
    "Adapter",
    "Draw",
    "Report",
    "attend",
    "batch_first",
    "cached_per_source",
    "keep_in_graph",
    "multiplied",
    "project",
    "project_both",
    "project_joined",
    "register_adapter",
    "replace",
]

#: The files of adapters, each of which registers its own.
PROJECTS = (
    "allennlp",
    "bentrevett",
    "coqui",
    "d2l",
    "espnet",
    "espnet_coverage",
    "espnet_forward",
    "espnet_heads",
    "espnet_location",
    "fairseq",
    "gnmt",
    "joeynmt",
    "keras",
    "onmt",
    "pointer_summarizer",
    "sgrvinod",
    "speechbrain",
    "tacotron2",
    "tutorials",
)
for name in PROJECTS:
    importlib.import_module(f"attnfast.integrations.{name}")
