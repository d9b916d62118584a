"""Other projects' attention, served by attnfast: one file for each project."""

import importlib

from attnfast.hosts.host import HOSTS, Draw, Host, register_host
from attnfast.hosts.recall import attend, project, recall, touch
from attnfast.hosts.replace import Report, replace

__all__ = [
    "HOSTS",
    "Draw",
    "Host",
    "Report",
    "attend",
    "project",
    "recall",
    "register_host",
    "replace",
    "touch",
]

#: The files of adapters, each of which registers its hosts.
ADAPTERS = (
    "coqui",
    "espnet",
    "espnet_coverage",
    "espnet_forward",
    "espnet_heads",
    "espnet_location",
    "onmt",
    "pointer_summarizer",
    "speechbrain",
    "tacotron2",
)
for name in ADAPTERS:
    importlib.import_module(f"attnfast.hosts.{name}")
