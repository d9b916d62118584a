"""texar-pytorch: the real modules; what keeps their keys are they themselves."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
from integrations.common import alone, compare

import attnfast

UNUSED = ("asyml_utilities", "funcsigs", "pkg_resources", "packaging", "regex", "requests",
          "sentencepiece", "tqdm", "yaml")  # fmt: skip
with mock.patch.object(np, "float_", np.float64, create=True):  # of NumPy 1
    texar = alone("texar.torch.core.attention_mechanism", *UNUSED)
KINDS = {
    "Bahdanau": lambda **more: texar.BahdanauAttention(5, 6, 8, **more),
    "normalised": lambda **more: texar.BahdanauAttention(5, 6, 8, normalize=True, **more),
    "Luong": lambda **more: texar.LuongAttention(6, 8, **more),
    "scaled": lambda **more: texar.LuongAttention(6, 8, scale=True, **more),
}


def use(attention, draw):
    for lengths in ((7, 1, 4), (3,)):
        B, Tk = len(lengths), max(lengths)
        source = draw(B, Tk, 8)
        for ends in (draw.numbers(*lengths), None):
            attention.clear_cache()
            for _ in range(3):
                yield texar.compute_attention(attention, draw(B, 6), None, source, None, ends)
    attention.clear_cache()


@pytest.mark.parametrize("kind", KINDS)
def test_attention(kind):
    torch.manual_seed(0)
    compare(KINDS[kind](), use)


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_refuses(kind):
    attention = KINDS[kind]()
    attnfast.replace(attention, strict=True)
    query, source = torch.randn(2, 6), torch.randn(2, 4, 8)
    with pytest.raises(ValueError, match="must be greater than zero"):
        attention(query, None, source, torch.tensor([4, 0]))
    attention.clear_cache()
    if "Luong" in type(attention).__name__:
        with pytest.raises(ValueError, match="Incompatible or unknown inner dimensions"):
            attention(query[:, :5], None, source)


@pytest.mark.parametrize("kind", KINDS)
def test_another_probability_is_left_alone(kind):
    assert "skipped: results differ" in str(
        attnfast.replace(KINDS[kind](probability_fn=torch.sigmoid))
    )
