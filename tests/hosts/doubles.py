"""Test doubles: modules with the parameters and formulas of code that is not on PyPI.

Each is written from the formula; its class has the name of the original's.
"""

from __future__ import annotations

import torch
from torch import nn


class Plain(nn.Module):
    """Additive attention as in a tutorial; what the tests of the mechanism itself replace."""

    def __init__(self, dim=6, features=5):
        super().__init__()
        self.query = nn.Linear(dim, features)
        self.key = nn.Linear(dim, features, bias=False)
        self.energy = nn.Linear(features, 1)
        self.last = None

    def forward(self, state, memory, mask=None):
        """state [B, dim], memory [B, Tk, dim], mask [B, Tk] True where a key is seen."""
        features = torch.tanh(self.query(state).unsqueeze(1) + self.key(memory))
        energy = self.energy(features).squeeze(2)
        if mask is not None:
            energy = energy.masked_fill(~mask, -1e9)
        self.last = energy.softmax(1)
        return (self.last.unsqueeze(1) @ memory).squeeze(1), self.last
