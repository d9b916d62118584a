"""Test doubles: modules with the parameters and the arithmetic of code that is not on PyPI.

Each is written from the formula, with the original's types, methods and attributes: what it casts,
masks and multiplies, in which order. Its class has the name of the original's.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F


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

    def __init__(self, inputs, outputs, bias=False):
        super().__init__()
        self.linear_layer = nn.Linear(inputs, outputs, bias=bias)

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
        return self.location_dense(self.location_conv(attention_weights_cat).transpose(1, 2))


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
        sums = self.query_layer(query.unsqueeze(1)) + location + processed_memory
        return self.v(torch.tanh(sums)).squeeze(-1)

    def forward(
        self, attention_hidden_state, memory, processed_memory, attention_weights_cat, mask
    ):
        """mask [B, Tk] True at padding, or None; the gradient does not see it."""
        energies = self.get_alignment_energies(
            attention_hidden_state, processed_memory, attention_weights_cat
        )
        if mask is not None:
            energies.data.masked_fill_(mask, self.score_mask_value)
        weights = F.softmax(energies, dim=1)
        return torch.bmm(weights.unsqueeze(1), memory).squeeze(1), weights


class MellotronAttention(Tacotron2Attention):
    """NVIDIA's mellotron: the weights may be given, those of another voice."""

    def forward(
        self, attention_hidden_state, memory, processed_memory, attention_weights_cat, mask,
        attention_weights=None,
    ):  # fmt: skip
        if attention_weights is None:
            return super().forward(
                attention_hidden_state, memory, processed_memory, attention_weights_cat, mask
            )
        context = torch.bmm(attention_weights.unsqueeze(1), memory)
        return context.squeeze(1), attention_weights


for cls in (Tacotron2Attention, MellotronAttention):
    cls.__qualname__ = cls.__name__ = "Attention"


class Prenet(nn.Module):
    """Two rectified layers whose outputs are always dropped."""

    def __init__(self, inputs, features):
        super().__init__()
        self.layers = nn.ModuleList(LinearNorm(n, features) for n in (inputs, features))

    def forward(self, x):
        for layer in self.layers:
            x = F.dropout(F.relu(layer(x)), 0.5, True)
        return x


class Tacotron2Decoder(nn.Module):
    """NVIDIA's Tacotron 2 (model.py): two LSTM cells, the first of which attends last."""

    def __init__(self, mels, memory, states, features, attention, dropout=0.1):
        super().__init__()
        self.n_mel_channels, self.n_frames_per_step = mels, 1
        self.encoder_embedding_dim = memory
        self.attention_rnn_dim, self.decoder_rnn_dim = states
        self.p_attention_dropout = self.p_decoder_dropout = dropout
        self.prenet = Prenet(mels, features)
        self.attention_rnn = nn.LSTMCell(features + memory, states[0])
        self.attention_layer = attention
        self.decoder_rnn = nn.LSTMCell(states[0] + memory, states[1])
        self.linear_projection = LinearNorm(states[1] + memory, mels, bias=True)
        self.gate_layer = LinearNorm(states[1] + memory, 1, bias=True)

    def get_go_frame(self, memory):
        return memory.data.new_zeros(len(memory), self.n_mel_channels * self.n_frames_per_step)

    def initialize_decoder_states(self, memory, mask):
        B, Tk, zeros = *memory.shape[:2], memory.data.new_zeros
        self.attention_hidden = zeros(B, self.attention_rnn_dim)
        self.attention_cell = zeros(B, self.attention_rnn_dim)
        self.decoder_hidden = zeros(B, self.decoder_rnn_dim)
        self.decoder_cell = zeros(B, self.decoder_rnn_dim)
        self.attention_weights, self.attention_weights_cum = zeros(B, Tk), zeros(B, Tk)
        self.attention_context = zeros(B, self.encoder_embedding_dim)
        self.memory, self.mask = memory, mask
        self.processed_memory = self.attention_layer.memory_layer(memory)

    def parse_decoder_inputs(self, decoder_inputs):
        frames = decoder_inputs.transpose(1, 2)
        steps = frames.shape[1] // self.n_frames_per_step
        return frames.reshape(len(frames), steps, -1).transpose(0, 1)

    def parse_decoder_outputs(self, mel_outputs, gate_outputs, alignments):
        mels, gates, weights = (
            torch.stack(x, 1) for x in (mel_outputs, gate_outputs, alignments)
        )  # fmt: skip
        return mels.reshape(len(mels), -1, self.n_mel_channels).transpose(1, 2), gates, weights

    def decode(self, decoder_input):
        self.attention_hidden, self.attention_cell = self.attention_rnn(
            torch.cat([decoder_input, self.attention_context], -1),
            (self.attention_hidden, self.attention_cell),
        )
        self.attention_hidden = F.dropout(
            self.attention_hidden, self.p_attention_dropout, self.training
        )
        self.attention_context, self.attention_weights = self.attention_layer(
            self.attention_hidden, self.memory, self.processed_memory,
            torch.stack([self.attention_weights, self.attention_weights_cum], 1), self.mask,
        )  # fmt: skip
        self.attention_weights_cum += self.attention_weights
        self.decoder_hidden, self.decoder_cell = self.decoder_rnn(
            torch.cat([self.attention_hidden, self.attention_context], -1),
            (self.decoder_hidden, self.decoder_cell),
        )
        self.decoder_hidden = F.dropout(self.decoder_hidden, self.p_decoder_dropout, self.training)
        joined = torch.cat([self.decoder_hidden, self.attention_context], 1)
        return self.linear_projection(joined), self.gate_layer(joined), self.attention_weights

    def forward(self, memory, decoder_inputs, memory_lengths):
        frames = self.parse_decoder_inputs(decoder_inputs)
        frames = self.prenet(torch.cat([self.get_go_frame(memory).unsqueeze(0), frames]))
        padding = torch.arange(int(memory_lengths.max())) >= memory_lengths.unsqueeze(1)
        self.initialize_decoder_states(memory, mask=padding)
        results = [], [], []
        for frame in frames[:-1]:
            mels, gates, weights = self.decode(frame)
            for kept, x in zip(results, (mels.squeeze(1), gates.squeeze(1), weights)):
                kept.append(x)
        return self.parse_decoder_outputs(*results)


Tacotron2Decoder.__qualname__ = Tacotron2Decoder.__name__ = "Decoder"


config = SimpleNamespace(is_coverage=True, hidden_dim=3)  # pointer_summarizer's, of everything


class PointerAttention(nn.Module):
    """atulkum's pointer_summarizer (training_ptr_gen/model.py)."""

    def __init__(self):
        super().__init__()
        features = 2 * config.hidden_dim
        if config.is_coverage:
            self.W_c = nn.Linear(1, features, bias=False)
        self.decode_proj = nn.Linear(features, features)
        self.v = nn.Linear(features, 1, bias=False)

    def forward(self, s_t_hat, encoder_outputs, encoder_feature, enc_padding_mask, coverage):
        """encoder_feature [B · Tk, features]; enc_padding_mask [B, Tk] 1 at words, 0 at padding."""
        B, Tk, features = encoder_outputs.size()
        decoded = self.decode_proj(s_t_hat).unsqueeze(1).expand(B, Tk, features)
        sums = encoder_feature + decoded.contiguous().view(-1, features)
        if config.is_coverage:
            sums = sums + self.W_c(coverage.view(-1, 1))
        products = F.softmax(self.v(torch.tanh(sums)).view(-1, Tk), dim=1) * enc_padding_mask
        weights = products / products.sum(1, keepdim=True)
        context = torch.bmm(weights.unsqueeze(1), encoder_outputs).view(-1, features)
        if config.is_coverage:
            coverage = coverage.view(-1, Tk) + weights
        return context, weights, coverage


PointerAttention.__qualname__ = PointerAttention.__name__ = "Attention"


class CaptionAttention(nn.Module):
    """sgrvinod's tutorial on captioning (models.py)."""

    def __init__(self, encoder_dim, decoder_dim, attention_dim):
        super().__init__()
        self.encoder_att = nn.Linear(encoder_dim, attention_dim)
        self.decoder_att = nn.Linear(decoder_dim, attention_dim)
        self.full_att = nn.Linear(attention_dim, 1)
        self.relu = nn.ReLU()
        self.softmax = nn.Softmax(dim=1)

    def forward(self, encoder_out, decoder_hidden):
        """encoder_out [B, pixels, encoder_dim], decoder_hidden [B, decoder_dim]."""
        sums = self.encoder_att(encoder_out) + self.decoder_att(decoder_hidden).unsqueeze(1)
        alpha = self.softmax(self.full_att(self.relu(sums)).squeeze(2))
        return (encoder_out * alpha.unsqueeze(2)).sum(dim=1), alpha


CaptionAttention.__qualname__ = CaptionAttention.__name__ = "Attention"


class CaptionDecoder(nn.Module):
    """sgrvinod's decoder: the batch shrinks as captions end; a gate on the context."""

    def __init__(self, attention_dim, embed_dim, decoder_dim, vocab_size, encoder_dim, dropout=0.5):
        super().__init__()
        self.encoder_dim, self.vocab_size = encoder_dim, vocab_size
        self.attention = CaptionAttention(encoder_dim, decoder_dim, attention_dim)
        self.embedding = nn.Embedding(vocab_size, embed_dim)
        self.dropout = nn.Dropout(p=dropout)
        self.decode_step = nn.LSTMCell(embed_dim + encoder_dim, decoder_dim)
        self.init_h = nn.Linear(encoder_dim, decoder_dim)
        self.init_c = nn.Linear(encoder_dim, decoder_dim)
        self.f_beta = nn.Linear(decoder_dim, encoder_dim)
        self.sigmoid = nn.Sigmoid()
        self.fc = nn.Linear(decoder_dim, vocab_size)

    def init_hidden_state(self, encoder_out):
        average = encoder_out.mean(dim=1)
        return self.init_h(average), self.init_c(average)

    def forward(self, encoder_out, encoded_captions, caption_lengths):
        """encoder_out [B, rows, columns, encoder_dim], captions [B, words], lengths [B, 1]."""
        B = encoder_out.size(0)
        encoder_out = encoder_out.view(B, -1, encoder_out.size(-1))
        caption_lengths, sort_ind = caption_lengths.squeeze(1).sort(dim=0, descending=True)
        encoder_out, encoded_captions = encoder_out[sort_ind], encoded_captions[sort_ind]
        embeddings = self.embedding(encoded_captions)
        h, c = self.init_hidden_state(encoder_out)
        decode_lengths = (caption_lengths - 1).tolist()
        predictions = torch.zeros(B, max(decode_lengths), self.vocab_size)
        alphas = torch.zeros(B, max(decode_lengths), encoder_out.size(1))
        for t in range(max(decode_lengths)):
            n = sum(length > t for length in decode_lengths)
            context, alpha = self.attention(encoder_out[:n], h[:n])
            context = self.sigmoid(self.f_beta(h[:n])) * context
            read = torch.cat([embeddings[:n, t, :], context], dim=1)
            h, c = self.decode_step(read, (h[:n], c[:n]))
            predictions[:n, t, :] = self.fc(self.dropout(h))
            alphas[:n, t, :] = alpha
        return predictions, encoded_captions, decode_lengths, alphas, sort_ind


CaptionDecoder.__qualname__ = CaptionDecoder.__name__ = "DecoderWithAttention"


class AttentionUnit(nn.Module):
    """ASTER's, of its recognition head (attention_recognition_head.py)."""

    def __init__(self, sDim, xDim, attDim):
        super().__init__()
        self.sDim, self.xDim, self.attDim = sDim, xDim, attDim
        self.sEmbed = nn.Linear(sDim, attDim)
        self.xEmbed = nn.Linear(xDim, attDim)
        self.wEmbed = nn.Linear(attDim, 1)

    def forward(self, x, sPrev):
        """x [B, Tk, xDim], sPrev [1, B, sDim]; weights [B, Tk]."""
        B, Tk, _ = x.size()
        key = self.xEmbed(x.view(-1, self.xDim)).view(B, Tk, -1)
        query = self.sEmbed(sPrev.squeeze(0)).unsqueeze(1).expand(B, Tk, self.attDim)
        features = torch.tanh(query + key).view(-1, self.attDim)
        return F.softmax(self.wEmbed(features).view(B, Tk), dim=1)


class AttentionCell(nn.Module):
    """clovaai's deep-text-recognition-benchmark (modules/prediction.py)."""

    def __init__(self, input_size, hidden_size, num_embeddings):
        super().__init__()
        self.i2h = nn.Linear(input_size, hidden_size, bias=False)
        self.h2h = nn.Linear(hidden_size, hidden_size)
        self.score = nn.Linear(hidden_size, 1, bias=False)
        self.rnn = nn.LSTMCell(input_size + num_embeddings, hidden_size)
        self.hidden_size = hidden_size

    def forward(self, prev_hidden, batch_H, char_onehots):
        """prev_hidden (h, c) [B, H], batch_H [B, Tk, K], char_onehots [B, words]."""
        query = self.h2h(prev_hidden[0]).unsqueeze(1)
        alpha = F.softmax(self.score(torch.tanh(self.i2h(batch_H) + query)), dim=1)
        context = torch.bmm(alpha.permute(0, 2, 1), batch_H).squeeze(1)
        return self.rnn(torch.cat([context, char_onehots], 1), prev_hidden), alpha


class RecognitionHead(nn.Module):
    """clovaai's head around this cell, whose class is called Attention."""

    __qualname__ = "Attention"

    def __init__(self, input_size, hidden_size, num_classes):
        super().__init__()
        self.attention_cell = AttentionCell(input_size, hidden_size, num_classes)
        self.hidden_size, self.num_classes = hidden_size, num_classes
        self.generator = nn.Linear(hidden_size, num_classes)

    def _char_to_onehot(self, input_char, onehot_dim=38):
        zeros = torch.zeros(len(input_char), onehot_dim, dtype=torch.float32)
        return zeros.scatter_(1, input_char.unsqueeze(1), 1)

    def forward(self, batch_H, text, is_train=True, batch_max_length=25):
        """batch_H [B, Tk, K], text [B, batch_max_length + 1 or more]; states are float32."""
        B, steps = len(batch_H), batch_max_length + 1
        hidden = tuple(torch.zeros(2, B, self.hidden_size, dtype=torch.float32))
        hiddens = torch.zeros(B, steps, self.hidden_size, dtype=torch.float32)
        probs = torch.zeros(B, steps, self.num_classes, dtype=torch.float32)
        char = torch.zeros(B, dtype=torch.long)
        for i in range(steps):
            if is_train:
                char = text[:, i]
            onehots = self._char_to_onehot(char, onehot_dim=self.num_classes)
            hidden, _ = self.attention_cell(hidden, batch_H, onehots)
            if is_train:
                hiddens[:, i, :] = hidden[0]
            else:
                probs[:, i, :] = self.generator(hidden[0])
                char = probs[:, i, :].max(1)[1]
        return self.generator(hiddens) if is_train else probs


class GNMTAttention(nn.Module):
    """NVIDIA GNMT's BahdanauAttention."""

    __qualname__ = "BahdanauAttention"

    def __init__(self, query_size, key_size, num_units, normalize=False, batch_first=False):
        super().__init__()
        self.normalize, self.batch_first, self.num_units = normalize, batch_first, num_units
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

    def calc_score(self, att_query, att_keys):
        """att_query [B, Tq, A], att_keys [B, Tk, A]; scores [B, Tq, Tk]."""
        features, v = att_query.unsqueeze(2) + att_keys.unsqueeze(1), self.linear_att
        if self.normalize:
            features = features + self.normalize_bias
            v = v / v.norm() * self.normalize_scalar
        return torch.tanh(features).matmul(v)

    def forward(self, query, keys):
        """query [Tq, B, Q] or [B, Q], keys [Tk, B, K], or batch first."""
        single = query.dim() == 2
        if not self.batch_first:
            keys = keys.transpose(0, 1)
            query = query if single else query.transpose(0, 1)
        query = query.unsqueeze(1) if single else query
        scores = self.calc_score(self.linear_q(query), self.linear_k(keys))
        if self.mask is not None:
            scores.masked_fill_(self.mask.unsqueeze(1).expand(scores.shape), -65504.0)
        weights = F.softmax(scores, dim=-1)
        results = torch.bmm(weights, keys), weights
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
        scores = (source_hids * self.input_proj(input).unsqueeze(0)).sum(dim=2)
        if encoder_padding_mask is not None:  # float32 whatever the module is
            masked = scores.float().masked_fill_(encoder_padding_mask, float("-inf"))
            scores = masked.type_as(scores)
        weights = F.softmax(scores, dim=0)
        context = (weights.unsqueeze(2) * source_hids).sum(dim=0)
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
        weights = F.softmax(scores.squeeze(2).unsqueeze(1), dim=-1)
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
        score = {"dot": self.dot_score, "general": self.general_score, "concat": self.concat_score}
        return F.softmax(score[self.method](hidden, encoder_outputs).t(), dim=1).unsqueeze(1)

    def dot_score(self, hidden, encoder_output):
        return torch.sum(hidden * encoder_output, dim=2)

    def general_score(self, hidden, encoder_output):
        return torch.sum(hidden * self.attn(encoder_output), dim=2)

    def concat_score(self, hidden, encoder_output):
        both = torch.cat((hidden.expand(len(encoder_output), -1, -1), encoder_output), 2)
        return torch.sum(self.v * self.attn(both).tanh(), dim=2)


def bentrevett(edition="", masked=True, K=6, Q=4):
    """Return bentrevett's Attention; it is of 2018, of 2024 or in between, with a mask or not."""

    def features(layer, hidden, encoder_outputs):
        """hidden [B, Q], encoder_outputs [Tk, B, K]."""
        hidden = hidden.unsqueeze(1).repeat(1, encoder_outputs.shape[0], 1)
        return torch.tanh(layer(torch.cat((hidden, encoder_outputs.permute(1, 0, 2)), dim=2)))

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn, self.v = nn.Linear(K + Q, Q), nn.Parameter(torch.rand(Q))

        def scores(self, hidden, encoder_outputs):
            energy = features(self.attn, hidden, encoder_outputs).permute(0, 2, 1)
            v = self.v.repeat(len(energy), 1).unsqueeze(1)
            return torch.bmm(v, energy).squeeze(1)

    class Second(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn, self.v = nn.Linear(K + Q, Q), nn.Linear(Q, 1, bias=False)

        def scores(self, hidden, encoder_outputs):
            return self.v(features(self.attn, hidden, encoder_outputs)).squeeze(2)

    class Third(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn_fc, self.v_fc = nn.Linear(K + Q, Q), nn.Linear(Q, 1, bias=False)

        def scores(self, hidden, encoder_outputs):
            return self.v_fc(features(self.attn_fc, hidden, encoder_outputs)).squeeze(2)

    base = {"2018": First, "": Second, "2024": Third}[edition]

    class Attention(base):
        __qualname__ = "Attention"

        if masked:

            def forward(self, hidden, encoder_outputs, mask):
                """mask [B, Tk], 0 for padding."""
                scores = self.scores(hidden, encoder_outputs).masked_fill(mask == 0, -1e10)
                return F.softmax(scores, dim=1)

        else:

            def forward(self, hidden, encoder_outputs):
                return F.softmax(self.scores(hidden, encoder_outputs), dim=1)

    return Attention()


class PackedEncoder(nn.Module):
    """bentrevett's encoder; without src_len its sources are not packed."""

    def __init__(self, words, E, H, D, dropout):
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(words, E), nn.GRU(E, H, bidirectional=True)
        self.fc, self.dropout = nn.Linear(2 * H, D), nn.Dropout(dropout)

    def forward(self, src, src_len=None):
        embedded = self.dropout(self.embedding(src))
        if src_len is not None:
            embedded = nn.utils.rnn.pack_padded_sequence(embedded, src_len.to("cpu"))
        outputs, hidden = self.rnn(embedded)
        if src_len is not None:
            outputs, _ = nn.utils.rnn.pad_packed_sequence(outputs)
        return outputs, torch.tanh(self.fc(torch.cat((hidden[-2], hidden[-1]), dim=1)))


class TranslationStep(nn.Module):
    """bentrevett's Decoder, one word at a time; with the mask it returns the weights, too."""

    __qualname__ = "Decoder"

    def __init__(self, words, E, K, D, dropout, attention):
        super().__init__()
        self.output_dim, self.attention = words, attention
        self.embedding, self.rnn = nn.Embedding(words, E), nn.GRU(K + E, D)
        self.fc_out, self.dropout = nn.Linear(K + D + E, words), nn.Dropout(dropout)

    def move(self, input, hidden, encoder_outputs, *mask):
        """input [B], hidden [B, D], encoder_outputs [Tk, B, K], mask [B, Tk]."""
        embedded = self.dropout(self.embedding(input.unsqueeze(0)))
        weights = self.attention(hidden, encoder_outputs, *mask).unsqueeze(1)
        context = torch.bmm(weights, encoder_outputs.permute(1, 0, 2)).permute(1, 0, 2)
        output, hidden = self.rnn(torch.cat((embedded, context), 2), hidden.unsqueeze(0))
        both = torch.cat((output.squeeze(0), context.squeeze(0), embedded.squeeze(0)), 1)
        return both, hidden.squeeze(0), *([weights.squeeze(1)] if mask else [])

    def forward(self, input, hidden, encoder_outputs, *mask):
        both, *rest = self.move(input, hidden, encoder_outputs, *mask)
        return self.fc_out(both), *rest


class FirstTranslationStep(TranslationStep):
    """The Decoder of 2018, whose last layer has another name."""

    __qualname__ = "Decoder"

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.out = self._modules.pop("fc_out")

    def forward(self, input, hidden, encoder_outputs, *mask):
        both, *rest = self.move(input, hidden, encoder_outputs, *mask)
        return self.out(both), *rest


class TranslationModel(nn.Module):
    """bentrevett's Seq2Seq without a mask: trg [T, B]; now and then it feeds its own words."""

    __qualname__ = "Seq2Seq"

    def __init__(self, encoder, decoder, device="cpu"):
        super().__init__()
        self.encoder, self.decoder, self.device = encoder, decoder, device

    def forward(self, src, trg, teacher_forcing_ratio=0.5):
        outputs = torch.zeros(*trg.shape, self.decoder.output_dim).to(self.device)
        encoder_outputs, hidden = self.encoder(src)
        input = trg[0, :]
        for t in range(1, len(trg)):
            output, hidden = self.decoder(input, hidden, encoder_outputs)
            outputs[t] = output
            teacher_force = random.random() < teacher_forcing_ratio
            input = trg[t] if teacher_force else output.argmax(1)
        return outputs


class PackedModel(nn.Module):
    """bentrevett's Seq2Seq of packed sources, whose mask is 0 at padding."""

    __qualname__ = "Seq2Seq"

    def __init__(self, encoder, decoder, src_pad_idx=1, device="cpu"):
        super().__init__()
        self.encoder, self.decoder, self.device = encoder, decoder, device
        self.src_pad_idx = src_pad_idx

    def create_mask(self, src):
        return (src != self.src_pad_idx).permute(1, 0)

    def forward(self, src, src_len, trg, teacher_forcing_ratio=0.5):
        outputs = torch.zeros(*trg.shape, self.decoder.output_dim).to(self.device)
        encoder_outputs, hidden = self.encoder(src, src_len)
        input, mask = trg[0, :], self.create_mask(src)
        for t in range(1, len(trg)):
            output, hidden, _ = self.decoder(input, hidden, encoder_outputs, mask)
            outputs[t] = output
            teacher_force = random.random() < teacher_forcing_ratio
            input = trg[t] if teacher_force else output.argmax(1)
        return outputs


def bentrevett_model(edition="", masked=True, words=11, E=5, H=4, D=4, dropout=0.5):
    """Return bentrevett's model with the attention of an edition, for words in both languages."""
    attention = bentrevett(edition, masked, 2 * H, D)
    encoder = PackedEncoder(words, E, H, D, dropout)
    step = FirstTranslationStep if edition == "2018" else TranslationStep
    decoder = step(words, E, 2 * H, D, dropout, attention)
    return (PackedModel if masked else TranslationModel)(encoder, decoder)


class AdditiveAttention(nn.Module):
    """AllenNLP's."""

    __module__ = "allennlp.modules.attention.additive_attention"

    def __init__(self, vector_dim, matrix_dim, normalize=True):
        super().__init__()
        self._normalize = normalize
        self._w_matrix = nn.Parameter(torch.empty(vector_dim, vector_dim))
        self._u_matrix = nn.Parameter(torch.empty(matrix_dim, vector_dim))
        self._v_vector = nn.Parameter(torch.empty(vector_dim, 1))
        for p in self.parameters():
            nn.init.xavier_uniform_(p)

    def forward(self, vector, matrix, matrix_mask=None):
        """vector [B, Q], matrix [B, Tk, K], matrix_mask [B, Tk], False or 0 for padding."""
        scores = self._forward_internal(vector, matrix)
        if not self._normalize or matrix_mask is None:
            return F.softmax(scores, dim=-1) if self._normalize else scores
        weights = F.softmax(scores * matrix_mask, dim=-1) * matrix_mask
        tiny = 1e-4 if weights.dtype == torch.half else 1e-13
        return weights / (weights.sum(dim=-1, keepdim=True) + tiny)

    def _forward_internal(self, vector, matrix):
        features = vector.matmul(self._w_matrix).unsqueeze(1) + matrix.matmul(self._u_matrix)
        return torch.tanh(features).matmul(self._v_vector).squeeze(2)


class RegionAttention(nn.Module):
    """ruotianluo's ImageCaptioning.pytorch and self-critical.pytorch (AttModel.py)."""

    __qualname__ = "Attention"

    def __init__(self, opt):
        super().__init__()
        self.rnn_size, self.att_hid_size = opt.rnn_size, opt.att_hid_size
        self.h2att = nn.Linear(self.rnn_size, self.att_hid_size)
        self.alpha_net = nn.Linear(self.att_hid_size, 1)

    def forward(self, h, att_feats, p_att_feats, att_masks=None):
        """att_feats [B, …, E] with projections [B, …, A], att_masks [B, Tk], 0 at padding."""
        Tk = att_feats.numel() // att_feats.size(0) // att_feats.size(-1)
        sums = p_att_feats.view(-1, Tk, self.att_hid_size) + self.h2att(h).unsqueeze(1)
        scores = self.alpha_net(torch.tanh(sums).view(-1, self.att_hid_size)).view(-1, Tk)
        weights = F.softmax(scores, dim=1)
        if att_masks is not None:
            weights = weights * att_masks.view(-1, Tk).to(weights)
            weights = weights / weights.sum(1, keepdim=True)
        values = att_feats.view(-1, Tk, att_feats.size(-1))
        return torch.bmm(weights.unsqueeze(1), values).squeeze(1)


class AnnotatedAttention(nn.Module):
    """bastings's "The Annotated Encoder-Decoder": a decoder projects the keys."""

    __qualname__ = "BahdanauAttention"

    def __init__(self, hidden_size, key_size, query_size):
        super().__init__()
        self.key_layer = nn.Linear(key_size, hidden_size, bias=False)
        self.query_layer = nn.Linear(query_size, hidden_size, bias=False)
        self.energy_layer = nn.Linear(hidden_size, 1, bias=False)
        self.alphas = None

    def forward(self, query=None, proj_key=None, value=None, mask=None):
        """query [B, 1, Q], proj_key [B, Tk, A], mask [B, 1, Tk], 0 at padding."""
        assert mask is not None, "mask is required"
        features = torch.tanh(self.query_layer(query) + proj_key)
        scores = self.energy_layer(features).squeeze(2).unsqueeze(1)
        scores.data.masked_fill_(mask == 0, -float("inf"))
        self.alphas = F.softmax(scores, dim=-1)
        return torch.bmm(self.alphas, value), self.alphas


class DotAttention(nn.Module):
    """IBM's pytorch-seq2seq: a dot product, and an output layer."""

    __qualname__ = "Attention"

    def __init__(self, dim):
        super().__init__()
        self.linear_out = nn.Linear(dim * 2, dim)
        self.mask = None

    def set_mask(self, mask):
        """Hide keys where the mask [B, Tq, Tk] is True."""
        self.mask = mask

    def forward(self, output, context):
        """output [B, Tq, D], context [B, Tk, D]."""
        scores = torch.bmm(output, context.transpose(1, 2))
        if self.mask is not None:
            scores.data.masked_fill_(self.mask, -float("inf"))
        weights = F.softmax(scores, dim=2)
        both = torch.cat((torch.bmm(weights, context), output), dim=2)
        return F.tanh(self.linear_out(both)), weights


class AttentionMechanism(nn.Module):
    """neural_sp's, with one head."""

    __module__ = "neural_sp.models.modules.attention"

    def __init__(self, kdim, qdim, adim, atype, sharpening_factor=1, sigmoid_smoothing=False,
                 conv_out_channels=3, conv_kernel_size=5, dropout=0.0):  # fmt: skip
        super().__init__()
        self.atype, self.adim, self.n_heads = atype, adim, 1
        self.sharpening_factor, self.sigmoid_smoothing = sharpening_factor, sigmoid_smoothing
        self.reset()
        self.dropout = nn.Dropout(dropout)
        if atype in ("add", "location", "dot"):
            self.w_key = nn.Linear(kdim, adim, bias=atype != "dot")
            self.w_query = nn.Linear(qdim, adim, bias=False)
        if atype == "location":
            self.w_conv = nn.Linear(conv_out_channels, adim, bias=False)
            width, edge = (1, conv_kernel_size), (0, conv_kernel_size // 2)
            self.conv = nn.Conv2d(1, conv_out_channels, width, padding=edge, bias=False)
        if atype == "luong_general":
            self.w_key = nn.Linear(kdim, qdim, bias=False)
        if atype == "luong_concat":
            self.w = nn.Linear(kdim + qdim, adim, bias=False)
        if atype in ("add", "location", "luong_concat"):
            self.v = nn.Linear(adim, 1, bias=False)

    def reset(self):
        self.key = self.mask = None

    def forward(self, key, value, query, mask=None, aw_prev=None, cache=False, mode="",
                trigger_points=None, streaming=False):  # fmt: skip
        """query [B, Tq, Q], mask [B, 1, Tk] 0 at padding, weights [B, 1, Tq, Tk]."""
        B, Tk = key.shape[:2]
        previous = key.new_zeros(B, 1, Tk) if aw_prev is None else aw_prev.squeeze(1)
        if self.key is None or not cache:
            self.key, self.mask = self.w_key(key) if hasattr(self, "w_key") else key, mask
            assert mask is None or mask.size() == (B, 1, Tk)
        if self.key.size(0) != query.size(0):
            self.key = self.key[0:1].repeat([query.size(0), 1, 1])
        scores = self.scores(query, previous)
        if self.mask is not None:
            scores = scores.masked_fill(self.mask == 0, torch.finfo(scores.dtype).min)
        if self.sigmoid_smoothing:
            weights = torch.sigmoid(scores) / torch.sigmoid(scores).sum(-1).unsqueeze(-1)
        else:
            weights = torch.softmax(scores * self.sharpening_factor, dim=-1)
        weights = self.dropout(weights)
        return torch.bmm(weights, value), weights.unsqueeze(1), {}

    def scores(self, query, previous):
        if self.atype == "luong_concat":
            both = torch.cat([self.key, query.repeat([1, self.key.size(1), 1])], dim=-1)
            return self.v(torch.tanh(self.w(both))).transpose(2, 1)
        if not hasattr(self, "v"):
            query = self.w_query(query) if hasattr(self, "w_query") else query
            return torch.bmm(query, self.key.transpose(2, 1))
        sums = self.key.unsqueeze(1) + self.w_query(query).unsqueeze(2)
        if self.atype == "location":
            found = self.conv(previous.unsqueeze(1)).squeeze(2).transpose(2, 1)
            sums = sums + self.w_conv(found.contiguous().unsqueeze(1))
        return self.v(torch.tanh(sums)).squeeze(3)


class KospeechLinear(nn.Module):
    """A linear layer within a module, as in kospeech."""

    def __init__(self, in_features, out_features, bias=True):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features, bias)

    def forward(self, x):
        return self.linear(x)


class KospeechAdditive(nn.Module):
    """kospeech's AdditiveAttention, which adds the query to the context."""

    __module__, __qualname__ = "kospeech.models.attention", "AdditiveAttention"

    def __init__(self, dim):
        super().__init__()
        self.query_proj = KospeechLinear(dim, dim, bias=False)
        self.key_proj = KospeechLinear(dim, dim, bias=False)
        self.score_proj = KospeechLinear(dim, 1)
        self.bias = nn.Parameter(torch.rand(dim) - 0.5)

    def forward(self, query, key, value):
        """query [B, 1, D], key and value [B, Tk, D]; weights [B, Tk]."""
        sums = self.key_proj(key) + self.query_proj(query) + self.bias
        weights = F.softmax(self.score_proj(torch.tanh(sums)).squeeze(-1), dim=-1)
        context = torch.bmm(weights.unsqueeze(1), value)
        context += query
        return context, weights


class KospeechLocation(nn.Module):
    """kospeech's LocationAwareAttention: the filters have as many channels as the score."""

    __module__, __qualname__ = "kospeech.models.attention", "LocationAwareAttention"

    def __init__(self, dim, attn_dim, smoothing=False):
        super().__init__()
        self.location_conv = nn.Conv1d(1, attn_dim, kernel_size=3, padding=1)
        self.query_proj = KospeechLinear(dim, attn_dim, bias=False)
        self.value_proj = KospeechLinear(dim, attn_dim, bias=False)
        self.bias = nn.Parameter(torch.rand(attn_dim) - 0.5)
        self.fc = KospeechLinear(attn_dim, 1)
        self.smoothing = smoothing

    def forward(self, query, value, last_alignment_energy):
        """query [B, 1, D], value [B, Tk, D], the last weights [B, Tk] or None."""
        if last_alignment_energy is None:
            last_alignment_energy = value.new_zeros(value.shape[:2])
        found = self.location_conv(last_alignment_energy.unsqueeze(1)).transpose(1, 2)
        sums = self.query_proj(query) + self.value_proj(value) + found + self.bias
        scores = self.fc(torch.tanh(sums)).squeeze(-1)
        if self.smoothing:
            weights = torch.sigmoid(scores)
            weights = weights / weights.sum(dim=-1).unsqueeze(-1)
        else:
            weights = F.softmax(scores, dim=-1)
        return torch.bmm(weights.unsqueeze(1), value), weights


class TextbookAttention(nn.Module):
    """v_a · tanh(W_a s + U_a h), of a state [B, Q]; the mask [B, Tk] is True at padding."""

    __qualname__ = "BahdanauAttention"

    def __init__(self, D=6, E=8):
        super().__init__()
        self.W_a = nn.Linear(D, D, bias=False)
        self.U_a = nn.Linear(E, D, bias=False)
        self.v_a = nn.Linear(D, 1, bias=False)

    def forward(self, decoder_hidden, encoder_outputs, src_mask=None):
        query = self.W_a(decoder_hidden).unsqueeze(1)
        scores = self.v_a(torch.tanh(query + self.U_a(encoder_outputs))).squeeze(-1)
        if src_mask is not None:
            scores = scores.masked_fill(src_mask, -1e9)
        weights = F.softmax(scores, dim=-1)
        return torch.bmm(weights.unsqueeze(1), encoder_outputs).squeeze(1), weights


class TensorFlowPort(nn.Module):
    """V · tanh(W1 q + W2 h) + c, as TensorFlow's tutorial has it; weights [B, Tk, 1]."""

    __qualname__ = "BahdanauAttention"

    def __init__(self, D=6):
        super().__init__()
        self.W1, self.W2, self.V = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 1)

    def forward(self, query, values):
        score = self.V(torch.tanh(self.W1(query.unsqueeze(1)) + self.W2(values)))
        weights = F.softmax(score, dim=1)
        return torch.sum(weights * values, dim=1), weights


class LastLayerAttention(nn.Module):
    """v · tanh(W_h h + W_s s), of the source and of states [L, B, Q]; the mask is 0 at padding."""

    __qualname__ = "Attention"

    def __init__(self, E=8, D=6, A=5):
        super().__init__()
        self.W_h, self.W_s, self.v = nn.Linear(E, A), nn.Linear(D, A), nn.Linear(A, 1, bias=False)

    def forward(self, encoder_outputs, hidden, mask):
        features = torch.tanh(self.W_h(encoder_outputs) + self.W_s(hidden[-1]).unsqueeze(1))
        weights = torch.softmax(self.v(features).squeeze(-1).masked_fill(mask == 0, -1e10), dim=1)
        return weights, torch.bmm(weights.unsqueeze(1), encoder_outputs)


class TimeFirstAttention(nn.Module):
    """v · tanh(W q + U h), of queries [1, B, Q] and a source [Tk, B, K]; weights [B, 1, Tk]."""

    __qualname__ = "AdditiveAttention"

    def __init__(self, D=6, E=8):
        super().__init__()
        self.hidden_size = D
        self.W, self.U, self.v = nn.Linear(D, D), nn.Linear(E, D), nn.Parameter(torch.rand(D))

    def forward(self, hidden, encoder_outputs):
        query = self.W(hidden.view(-1, 1, self.hidden_size))
        features = torch.tanh(query + self.U(encoder_outputs.transpose(0, 1)))
        return torch.sum(self.v * features, dim=2).softmax(1).unsqueeze(1)


class ConcatAttention(nn.Module):
    """v · tanh(W [q; h] + b), batch first; weights alone. The mask [B, Tk] is 0 at padding."""

    __qualname__ = "Attention"

    def __init__(self, D=6, E=8):
        super().__init__()
        self.attn, self.v = nn.Linear(D + E, D), nn.Linear(D, 1, bias=False)

    def forward(self, hidden, encoder_outputs, mask):
        hidden = hidden.unsqueeze(1).repeat(1, encoder_outputs.shape[1], 1)
        energy = torch.tanh(self.attn(self.join(hidden, encoder_outputs)))
        return F.softmax(self.v(energy).squeeze(2).masked_fill(mask == 0, -1e10), dim=1)

    def join(self, hidden, encoder_outputs):
        return torch.cat((hidden, encoder_outputs), dim=2)


class SourceFirstAttention(ConcatAttention):
    """v · tanh(W [h; q] + b)."""

    __qualname__ = "Attention"

    def join(self, hidden, encoder_outputs):
        return torch.cat((encoder_outputs, hidden), dim=2)


class LuongAttention(nn.Module):
    """q · W_a h, W_a q · h or v_a · tanh(W_a [q; h]), of a query [B, D]."""

    def __init__(self, method="general", D=6):
        super().__init__()
        self.method = method
        self.W_a = nn.Linear(D * (1 + (method == "concat")), D, bias=False)
        if method == "concat":
            self.v_a = nn.Linear(D, 1)

    def score(self, hidden, source):
        if self.method == "general":
            return torch.bmm(self.W_a(source), hidden.unsqueeze(2)).squeeze(2)
        if self.method == "of the state":
            return torch.sum(self.W_a(hidden).unsqueeze(1) * source, dim=2)
        both = torch.cat([hidden.unsqueeze(1).expand(-1, source.size(1), -1), source], dim=2)
        return self.v_a(torch.tanh(self.W_a(both))).squeeze(2)

    def forward(self, decoder_hidden, encoder_outputs):
        weights = F.softmax(self.score(decoder_hidden, encoder_outputs), dim=-1)
        return torch.bmm(weights.unsqueeze(1), encoder_outputs).squeeze(1), weights


MAX_LENGTH, SOS_token = 6, 0


class AttnDecoderRNN(nn.Module):
    """PyTorch's translation tutorial's; a target, if there is one, has MAX_LENGTH words or more."""

    def __init__(self, hidden_size, output_size, dropout_p=0.1):
        super().__init__()
        self.embedding = nn.Embedding(output_size, hidden_size)
        self.attention = BahdanauAttention(hidden_size)
        self.gru = nn.GRU(2 * hidden_size, hidden_size, batch_first=True)
        self.out = nn.Linear(hidden_size, output_size)
        self.dropout = nn.Dropout(dropout_p)

    def forward(self, encoder_outputs, encoder_hidden, target_tensor=None):
        """encoder_outputs [B, Tk, D], encoder_hidden [1, B, D], target_tensor [B, T]."""
        word = torch.full(
            (len(encoder_outputs), 1), SOS_token, dtype=torch.long, device=encoder_outputs.device
        )
        hidden, outputs, attentions = encoder_hidden, [], []
        for i in range(MAX_LENGTH):
            output, hidden, weights = self.forward_step(word, hidden, encoder_outputs)
            outputs.append(output)
            attentions.append(weights)
            if target_tensor is not None:
                word = target_tensor[:, i].unsqueeze(1)
            else:
                word = output.topk(1)[1].squeeze(-1).detach()
        return F.log_softmax(torch.cat(outputs, 1), -1), hidden, torch.cat(attentions, 1)

    def forward_step(self, input, hidden, encoder_outputs):
        embedded = self.dropout(self.embedding(input))
        context, weights = self.attention(hidden.permute(1, 0, 2), encoder_outputs)
        output, hidden = self.gru(torch.cat([embedded, context], 2), hidden)
        return self.out(output), hidden, weights


class Seq2SeqAttentionDecoder(nn.Module):
    """The decoder of d2l's chapter on Bahdanau attention, which is not in the book's package."""

    def __init__(self, attention, vocab_size, embed_size, num_hiddens, num_layers=1, dropout=0):
        super().__init__()
        self.attention = attention
        self.embedding = nn.Embedding(vocab_size, embed_size)
        self.rnn = nn.GRU(embed_size + num_hiddens, num_hiddens, num_layers, dropout=dropout)
        self.dense = nn.Linear(num_hiddens, vocab_size)

    def init_state(self, enc_outputs, enc_valid_lens):
        """enc_outputs are states [Tk, B, D] and the last ones [L, B, D]."""
        outputs, hidden_state = enc_outputs
        return outputs.permute(1, 0, 2), hidden_state, enc_valid_lens

    def forward(self, X, state):
        """X [B, T]; a context stands before a word's features."""
        enc_outputs, hidden_state, enc_valid_lens = state
        outputs, self._attention_weights = [], []
        for x in self.embedding(X).permute(1, 0, 2):
            query = hidden_state[-1].unsqueeze(1)
            context = self.attention(query, enc_outputs, enc_outputs, enc_valid_lens)
            both = torch.cat([context, x.unsqueeze(1)], -1)
            out, hidden_state = self.rnn(both.permute(1, 0, 2), hidden_state)
            outputs.append(out)
            self._attention_weights.append(self.attention.attention_weights)
        outputs = self.dense(torch.cat(outputs))
        return outputs.permute(1, 0, 2), [enc_outputs, hidden_state, enc_valid_lens]

    @property
    def attention_weights(self):
        return self._attention_weights


class LSA(nn.Module):
    """WaveRNN's location-sensitive attention, or with ``cloning`` Real-Time-Voice-Cloning's."""

    def __init__(self, attn_dim, kernel_size=31, filters=32, cloning=False):
        super().__init__()
        options = {"kernel_size": kernel_size, "padding": kernel_size // 2, "bias": cloning}
        self.conv = nn.Conv1d(1 if cloning else 2, filters, **options)
        self.L = nn.Linear(filters, attn_dim, bias=not cloning)
        self.W, self.v = nn.Linear(attn_dim, attn_dim), nn.Linear(attn_dim, 1, bias=False)
        self.cumulative = self.attention = None
        self.cloning = cloning

    def init_attention(self, encoder_seq_proj):
        device, shape = next(self.parameters()).device, encoder_seq_proj.shape[:2]
        self.cumulative = torch.zeros(shape, device=device)
        self.attention = torch.zeros(shape, device=device)

    def located(self, encoder_seq_proj, query, channels):
        features = self.L(self.conv(torch.stack(channels, 1)).transpose(1, 2))
        scores = self.v(torch.tanh(self.W(query).unsqueeze(1) + encoder_seq_proj + features))
        return scores.squeeze(-1)


class WaveRNNLSA(LSA):
    __module__, __qualname__ = "models.tacotron", "LSA"

    def forward(self, encoder_seq_proj, query, t):
        if t == 0:
            self.init_attention(encoder_seq_proj)
        u = self.located(encoder_seq_proj, query, [self.cumulative, self.attention])
        self.attention = torch.sigmoid(u) / torch.sigmoid(u).sum(dim=1, keepdim=True)
        self.cumulative += self.attention
        return self.attention.unsqueeze(1)


class VoiceCloningLSA(LSA):
    __module__, __qualname__ = "synthesizer.models.tacotron", "LSA"

    def __init__(self, *sizes):
        super().__init__(*sizes, cloning=True)

    def forward(self, encoder_seq_proj, query, t, chars):
        if t == 0:
            self.init_attention(encoder_seq_proj)
        u = self.located(encoder_seq_proj, query, [self.cumulative])
        self.attention = torch.softmax(u * (chars != 0).float(), dim=1)
        self.cumulative = self.cumulative + self.attention
        return self.attention.unsqueeze(1)
