"""sgrvinod's tutorial on captioning, "Show, Attend and Tell": attention and its decoder."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from attnfast.decoding import Memory
from attnfast.integrations.adapter import Adapter, UnsupportedCall
from attnfast.integrations.fused_decoders import (
    LOOP,
    StepDropout,
    draw_masks,
    fusion_skip_reason,
    run_decoder,
    state_of,
)
from attnfast.integrations.helpers import attend_to_source, keep_in_graph, project, promote_dtype
from attnfast.integrations.search_model import DecoderParts, check_all_visible
from attnfast.nn._layer import Layer, RecurrentState


class Captioning:
    """e = w · relu(U h + b + W q + a) + c."""

    def forward(self, encoder_out, decoder_hidden):
        query, weight = self.decoder_att(decoder_hidden), self.full_att.weight
        key = project(self, "key", self.encoder_att, encoder_out)
        context, alpha = attend_to_source(self, query, key, encoder_out, weight, activation="relu")
        return keep_in_graph(promote_dtype(context, alpha, encoder_out), self.full_att.bias), alpha


def drop_states(dropout, states, words):
    """Apply a dropout to states ``[B, T, H]``, at each step to captions that have words left."""
    (B, T, _), drops, masks = states.shape, StepDropout.of(dropout), []
    if not drops.is_active:
        return states
    for t in range(T):
        running = sum(n > t for n in words)
        [mask] = draw_masks(1, states[:running, 0], [drops])
        masks.append(F.pad(mask, (0, 0, 0, 0, 0, B - running)))
    return states * torch.cat(masks, 1)


def memory_of(attention, source):
    """Return the memory of encoded images."""
    key = project(attention, "key", attention.encoder_att, source)
    return Memory(key, source, score_vector=attention.full_att.weight[0], score="relu")


def encode(states, lengths, decoder):
    """Return the decoder's parts, the memory of encoded images and the first state."""
    check_all_visible(states, lengths)
    if not isinstance(decoder.sigmoid, nn.Sigmoid):
        raise UnsupportedCall("its gate is no nn.Sigmoid")
    attention, layer = decoder.attention, Layer.of_cells(decoder.decode_step)
    parts = DecoderParts(
        layer, attention.decoder_att, decoder.embedding, decoder.fc, decoder,
        attention={"gate": decoder.f_beta},
    )  # fmt: skip
    return parts, memory_of(attention, states), RecurrentState(*decoder.init_hidden_state(states))


class Decoder:
    """c = attend(h), h = LSTM([y; σ(F h + f) ∘ c], h), V h + d, of captions sorted by length."""

    def forward(self, encoder_out, encoded_captions, caption_lengths):
        attention, B = self.attention, len(encoder_out)
        source = encoder_out.view(B, -1, encoder_out.shape[-1])
        lengths, order = caption_lengths.squeeze(1).sort(dim=0, descending=True)
        source, captions, words = source[order], encoded_captions[order], (lengths - 1).tolist()
        T, layer = max(words), Layer.of_cells(self.decode_step)
        start = [x[None] for x in self.init_hidden_state(source)]
        reason = fusion_skip_reason(
            layer, T, source, start, attention, attention, self.decode_step, self.f_beta,
            self.sigmoid, self.dropout, drops=True,
        )  # fmt: skip
        if reason or captions.shape[1] < T:
            raise UnsupportedCall(reason or "a caption is shorter than its length")
        steps = run_decoder(
            layer, self.embedding(captions)[:, :T], state_of(*start), attention.decoder_att,
            memory_of(attention, source), gate=self.f_beta, target_lengths=(lengths - 1).long(),
        )  # fmt: skip
        scores = self.fc(drop_states(self.dropout, steps.states, words))
        padding = lengths[:, None, None] - 1 <= torch.arange(T, device=lengths.device)[:, None]
        scores = keep_in_graph(scores.masked_fill(padding, 0), attention.full_att.bias)
        return scores, captions, words, steps.weights, order


def example(attention, draw):
    """Call it as its decoder does: the batch shrinks from step to step."""
    width, size = attention.encoder_att.in_features, attention.decoder_att.in_features
    for lengths in draw.sources((5, 5, 5), (4, 4)):
        source = draw(len(lengths), max(lengths), width)
        for B in range(len(lengths), 0, -1):
            for _ in range(2):
                yield attention(source[:B], draw(B, size))


def caption(decoder, draw):
    """Call a decoder with captions of several lengths, not sorted."""
    for lengths in draw.sources((4, 4, 4), (3, 3)):
        B, side = len(lengths), max(lengths)
        for T in draw.steps(4, 1, 2):
            images = draw(B, side, 2, decoder.encoder_dim)
            captions = draw.words(decoder.vocab_size, B, T + 1)
            counts = draw.numbers(*(max(2, T + 1 - i % 2) for i in range(B)))
            yield decoder(images, captions, counts.unsqueeze(1))


ADAPTERS = [
    Adapter(
        name="sgrvinod's Attention",
        implementation=Captioning,
        classes=["Attention"],
        parameters=[
            f"{x}_att.{y}" for x in ("encoder", "decoder", "full") for y in ("weight", "bias")
        ],
        example=example,
    ),
    Adapter(
        name="sgrvinod's DecoderWithAttention",
        implementation=Decoder,
        classes=["DecoderWithAttention"],
        parameters=[
            *("attention.*", "embedding.weight", "decode_step.*", "init_h.*", "init_c.*"),
            *("f_beta.*", "fc.*"),
        ],
        attention="attention",
        example=caption,
        known_attributes=["vocab_size"],
        weight_scale=4.0,  # a recurrence makes more of rounding
        search=encode,
        note=LOOP,
        dtype=torch.float32,  # it stores results in float32
    ),
]
