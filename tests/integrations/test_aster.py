"""ASTER's attention, a double: it returns weights alone."""

from __future__ import annotations

import torch
from integrations.common import compare, preparations
from integrations.reference_projects import AttentionUnit

import attnfast


def use(attention, draw):
    for B, Tk in ((3, 7), (2, 3), (1, 5)):
        source = draw(B, Tk, 6)
        for _ in range(3):
            yield attention(source, draw(1, B, 5))


def test_attention():
    torch.manual_seed(0)
    compare(AttentionUnit(5, 6, 8), use)


def test_a_source_is_prepared_once():
    assert preparations(AttentionUnit(5, 6, 8), use) == 3


def test_an_attribute_that_scales_the_score_is_left_alone():
    class Scaled(AttentionUnit):
        __qualname__ = "AttentionUnit"
        temperature = 1.0

        def forward(self, x, sPrev):
            return super().forward(x, sPrev * self.temperature)

    assert "skipped: its own code reads temperature" in str(attnfast.replace(Scaled(5, 6, 8)))
