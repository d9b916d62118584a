"""Other projects' attention, served by attnfast: one file for each project."""

import importlib

from attnfast.hosts.cache import cached_per_source
from attnfast.hosts.host import HOSTS, Draw, Host, register_host
from attnfast.hosts.replace import Report, replace
from attnfast.hosts.serve import (
    attend,
    batch_first,
    keep_in_graph,
    multiplied,
    project,
    project_both,
    project_joined,
)

__all__ = [
    "HOSTS",
    "Draw",
    "Host",
    "Report",
    "attend",
    "batch_first",
    "cached_per_source",
    "keep_in_graph",
    "multiplied",
    "project",
    "project_both",
    "project_joined",
    "register_host",
    "replace",
]

#: The files of adapters, each of which registers its hosts.
ADAPTERS = (
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
for name in ADAPTERS:
    importlib.import_module(f"attnfast.hosts.{name}")
