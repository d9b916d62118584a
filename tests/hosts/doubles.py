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


class LinearNorm(nn.Module):
    """A linear layer within a module, as in NVIDIA's Tacotron 2."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear_layer = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x):
        return self.linear_layer(x)


class ConvNorm(nn.Module):
    def __init__(self, filters, width):
        super().__init__()
        self.conv = nn.Conv1d(2, filters, width, padding=width // 2, bias=False)

    def forward(self, x):
        return self.conv(x)


class LocationLayer(nn.Module):
    def __init__(self, filters, width, features):
        super().__init__()
        self.location_conv = ConvNorm(filters, width)
        self.location_dense = LinearNorm(filters, features)

    def forward(self, attention_weights_cat):
        return self.location_dense(self.location_conv(attention_weights_cat).mT)


class Tacotron2Attention(nn.Module):
    """NVIDIA's Tacotron 2 (model.py): attention that sees its last weights and their sum."""

    def __init__(self, state, memory, features, filters, width):
        super().__init__()
        self.query_layer = LinearNorm(state, features)
        self.memory_layer = LinearNorm(memory, features)
        self.v = LinearNorm(features, 1)
        self.location_layer = LocationLayer(filters, width, features)
        self.score_mask_value = -float("inf")

    def get_alignment_energies(self, query, processed_memory, attention_weights_cat):
        location = self.location_layer(attention_weights_cat)
        sums = self.query_layer(query).unsqueeze(1) + location + processed_memory
        return self.v(torch.tanh(sums)).squeeze(2)

    def forward(
        self, attention_hidden_state, memory, processed_memory, attention_weights_cat, mask
    ):
        """mask [B, Tk] True at padding, or None; the gradient does not see it."""
        energies = self.get_alignment_energies(
            attention_hidden_state, processed_memory, attention_weights_cat
        )
        if mask is not None:
            energies.data.masked_fill_(mask, self.score_mask_value)
        weights = energies.softmax(1)
        return (weights.unsqueeze(1) @ memory).squeeze(1), weights


Tacotron2Attention.__qualname__ = Tacotron2Attention.__name__ = "Attention"


class PointerAttention(nn.Module):
    """atulkum's pointer_summarizer (training_ptr_gen/model.py), whose config is a global."""

    def __init__(self, features, is_coverage=True):
        super().__init__()
        self.is_coverage = is_coverage
        if is_coverage:
            self.W_c = nn.Linear(1, features, bias=False)
        self.decode_proj = nn.Linear(features, features)
        self.v = nn.Linear(features, 1, bias=False)

    def forward(self, s_t_hat, encoder_outputs, encoder_feature, enc_padding_mask, coverage):
        """encoder_feature [B · Tk, features]; enc_padding_mask [B, Tk] 1 at words, 0 at padding."""
        B, Tk, features = encoder_outputs.shape
        sums = encoder_feature.view(B, Tk, features) + self.decode_proj(s_t_hat).unsqueeze(1)
        if self.is_coverage:
            sums = sums + self.W_c(coverage.view(B, Tk, 1))
        products = self.v(torch.tanh(sums)).squeeze(2).softmax(1) * enc_padding_mask
        weights = products / products.sum(1, keepdim=True)
        context = (weights.unsqueeze(1) @ encoder_outputs).view(-1, features)
        return context, weights, coverage.view(-1, Tk) + weights if self.is_coverage else coverage


PointerAttention.__qualname__ = PointerAttention.__name__ = "Attention"
