"""OpenNMT-py and eole: the real modules, and OpenNMT's recurrent decoders whole."""

from __future__ import annotations

import copy

import pytest
import torch
from hosts.common import compare, real

import attnfast

PIPELINE = ("spacy", "pyonmttok", "ahocorasick", "fasttext", "ctranslate2", "sacrebleu", "torchtext",
            "rapidfuzz", "configargparse", "yaml", "waitress", "flask", "tensorboard", "sentencepiece")  # fmt: skip
onmt = real("onmt.modules.global_attention", *PIPELINE)
