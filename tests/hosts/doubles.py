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


class CaptionAttention(nn.Module):
    """sgrvinod's tutorial on captioning (models.py)."""

    def __init__(self, encoder_dim, decoder_dim, attention_dim, activation=torch.relu):
        super().__init__()
        self.encoder_att = nn.Linear(encoder_dim, attention_dim)
        self.decoder_att = nn.Linear(decoder_dim, attention_dim)
        self.full_att = nn.Linear(attention_dim, 1)
        self.activation = activation

    def forward(self, encoder_out, decoder_hidden):
        """encoder_out [B, pixels, encoder_dim], decoder_hidden [B, decoder_dim]."""
        sums = self.encoder_att(encoder_out) + self.decoder_att(decoder_hidden).unsqueeze(1)
        alpha = self.full_att(self.activation(sums)).squeeze(2).softmax(1)
        return (encoder_out * alpha.unsqueeze(2)).sum(1), alpha


CaptionAttention.__qualname__ = CaptionAttention.__name__ = "Attention"


class GNMTAttention(nn.Module):
    """NVIDIA GNMT's BahdanauAttention."""

    __qualname__ = "BahdanauAttention"

    def __init__(self, query_size, key_size, num_units, normalize=False, batch_first=False):
        super().__init__()
        self.normalize, self.batch_first = normalize, batch_first
        self.linear_q = nn.Linear(query_size, num_units, bias=False)
        self.linear_k = nn.Linear(key_size, num_units, bias=False)
        self.linear_att = nn.Parameter(torch.randn(num_units))
        more = (torch.randn(1), torch.randn(num_units)) if normalize else (None, None)
        for name, x in zip(("normalize_scalar", "normalize_bias"), more, strict=True):
            self.register_parameter(name, None if x is None else nn.Parameter(x))
        self.mask = None

    def set_mask(self, context_len, context):
        """Hide keys at context_len [B] and beyond."""
        Tk = context.size(1 if self.batch_first else 0)
        self.mask = torch.arange(Tk, device=context.device) >= context_len.unsqueeze(1)

    def forward(self, query, keys):
        """query [Tq, B, Q] or [B, Q], keys [Tk, B, K], or batch first."""
        single = query.dim() == 2
        if not self.batch_first:
            keys = keys.transpose(0, 1)
            query = query if single else query.transpose(0, 1)
        query = query.unsqueeze(1) if single else query
        features, v = self.linear_q(query).unsqueeze(2) + self.linear_k(keys).unsqueeze(1), None
        if self.normalize:
            features = features + self.normalize_bias
            v = self.linear_att / self.linear_att.norm() * self.normalize_scalar
        scores = torch.tanh(features) @ (self.linear_att if v is None else v)
        if self.mask is not None:
            scores = scores.masked_fill(self.mask.unsqueeze(1), -65504.0)
        weights = scores.softmax(-1)
        results = weights @ keys, weights
        if single:
            return tuple(x.squeeze(1) for x in results)
        return results if self.batch_first else tuple(x.transpose(0, 1) for x in results)


class AttentionLayer(nn.Module):
    """fairseq's, of its recurrent decoder."""

    __module__ = "fairseq.models.lstm"

    def __init__(self, input_embed_dim, source_embed_dim, output_embed_dim, bias=False):
        super().__init__()
        self.input_proj = nn.Linear(input_embed_dim, source_embed_dim, bias)
        self.output_proj = nn.Linear(input_embed_dim + source_embed_dim, output_embed_dim, bias)

    def forward(self, input, source_hids, encoder_padding_mask):
        """input [B, Q], source_hids [Tk, B, K], encoder_padding_mask [Tk, B], True for padding."""
        scores = (source_hids * self.input_proj(input)).sum(2)
        if encoder_padding_mask is not None:
            scores = scores.masked_fill(encoder_padding_mask, float("-inf"))
        weights = scores.softmax(0)
        context = (weights.unsqueeze(2) * source_hids).sum(0)
        return torch.tanh(self.output_proj(torch.cat((context, input), 1))), weights


class BahdanauAttention(nn.Module):
    """PyTorch's translation tutorial's."""

    def __init__(self, hidden_size):
        super().__init__()
        self.Wa = nn.Linear(hidden_size, hidden_size)
        self.Ua = nn.Linear(hidden_size, hidden_size)
        self.Va = nn.Linear(hidden_size, 1)

    def forward(self, query, keys):
        """query [B, 1, D], keys [B, Tk, D]."""
        scores = self.Va(torch.tanh(self.Wa(query) + self.Ua(keys)))
        weights = scores.squeeze(2).unsqueeze(1).softmax(-1)
        return torch.bmm(weights, keys), weights


class Attn(nn.Module):
    """PyTorch's chatbot tutorial's."""

    def __init__(self, method, hidden_size):
        super().__init__()
        self.method, self.hidden_size = method, hidden_size
        if method == "general":
            self.attn = nn.Linear(hidden_size, hidden_size)
        if method == "concat":
            self.attn = nn.Linear(2 * hidden_size, hidden_size)
            self.v = nn.Parameter(torch.randn(hidden_size))

    def forward(self, hidden, encoder_outputs):
        """hidden [1, B, D], encoder_outputs [Tk, B, D]; weights [B, 1, Tk]."""
        if self.method == "concat":
            both = torch.cat((hidden.expand(len(encoder_outputs), -1, -1), encoder_outputs), 2)
            scores = (self.v * torch.tanh(self.attn(both))).sum(2)
        else:
            key = self.attn(encoder_outputs) if self.method == "general" else encoder_outputs
            scores = (hidden * key).sum(2)
        return scores.t().softmax(1).unsqueeze(1)


def bentrevett(edition="", masked=True, K=6, Q=4):
    """Return bentrevett's Attention; it is of 2018, of 2024 or in between, with a mask or not."""

    class Attention(nn.Module):
        __qualname__ = "Attention"

        def __init__(self):
            super().__init__()
            layer, v = nn.Linear(K + Q, Q), nn.Linear(Q, 1, bias=False)
            self._names = ("attn_fc", "v_fc") if edition == "2024" else ("attn", "v")
            v = nn.Parameter(torch.rand(Q)) if edition == "2018" else v
            for name, part in zip(self._names, (layer, v), strict=True):
                setattr(self, name, part)

        def weights(self, hidden, encoder_outputs, mask=None):
            """hidden [B, Q], encoder_outputs [Tk, B, K], mask [B, Tk], 0 for padding."""
            layer, v = (getattr(self, name) for name in self._names)
            states = encoder_outputs.transpose(0, 1)
            both = torch.cat((hidden.unsqueeze(1).expand(-1, states.shape[1], -1), states), 2)
            features = torch.tanh(layer(both))
            scores = features @ v if edition == "2018" else v(features).squeeze(2)
            return (scores if mask is None else scores.masked_fill(mask == 0, -1e10)).softmax(1)

        if masked:

            def forward(self, hidden, encoder_outputs, mask):
                return self.weights(hidden, encoder_outputs, mask)

        else:

            def forward(self, hidden, encoder_outputs):
                return self.weights(hidden, encoder_outputs)

    return Attention()


class AdditiveAttention(nn.Module):
    """AllenNLP's."""

    __module__ = "allennlp.modules.attention.additive_attention"

    def __init__(self, vector_dim, matrix_dim, normalize=True):
        super().__init__()
        self._normalize = normalize
        self._w_matrix = nn.Parameter(torch.randn(vector_dim, vector_dim))
        self._u_matrix = nn.Parameter(torch.randn(matrix_dim, vector_dim))
        self._v_vector = nn.Parameter(torch.randn(vector_dim, 1))

    def forward(self, vector, matrix, matrix_mask=None):
        """vector [B, Q], matrix [B, Tk, K], matrix_mask [B, Tk], False or 0 for padding."""
        features = (vector @ self._w_matrix).unsqueeze(1) + matrix @ self._u_matrix
        scores = (torch.tanh(features) @ self._v_vector).squeeze(2)
        if not self._normalize or matrix_mask is None:
            return scores.softmax(-1) if self._normalize else scores
        seen = matrix_mask.to(scores)
        weights = (scores * seen).softmax(-1) * seen
        return weights / (weights.sum(-1, keepdim=True) + 1e-13)
