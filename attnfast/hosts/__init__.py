"""Other projects' attention, served by attnfast: one file for each project."""

import importlib

from attnfast.hosts.host import HOSTS, Draw, Host, register_host
from attnfast.hosts.recall import (
    attend,
    batch_first,
    multiplied,
    project,
    project_both,
    project_joined,
    recall,
    touch,
)
from attnfast.hosts.replace import Report, replace

__all__ = [
    "HOSTS",
    "Draw",
    "Host",
    "Report",
    "attend",
    "batch_first",
    "multiplied",
    "project",
    "project_both",
    "project_joined",
    "recall",
    "register_host",
    "replace",
    "touch",
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
