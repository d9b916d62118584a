"""OpenOCR's attention, inside its SAR and ASTER decoders."""

from __future__ import annotations

import torch

from attnfast.integrations.adapter import Adapter
from attnfast.integrations.helpers import attend_to_map, attend_to_source, keep_in_graph, project
from attnfast.integrations.projects.mmocr import names, visible_columns


class SAR:
    """e = v · tanh(conv(F) + b + W q + a) + c, for the queries of a whole target."""

    def _2d_attation(self, feat, tokens, data, training):
        states = self.rnndecoder(tokens)[0]
        mask = visible_columns(feat, data[-1]) if self.mask else None
        query, weight = self.conv1x1_1(states), self.conv1x1_2.weight
        context = attend_to_map(self, query, feat, self.conv3x3_1, weight, mask)
        return [states, keep_in_graph(context, self.conv1x1_2.bias)]


class ASTER:
    """e = w · tanh(U h + b + W q + a) + d, then q = gru([y; c], q)."""

    def forward(self, feat, h_state, label_input):
        query = self.hidden_embed(h_state.squeeze(0))
        key, weight = project(self, "key", self.feat_embed, feat), self.attnfeat_embed.weight
        context, _ = attend_to_source(self, query, key, feat, weight)
        context = keep_in_graph(context, self.attnfeat_embed.bias)
        output, h_state = self.gru(torch.cat([label_input, context], 1).unsqueeze(1), h_state)
        return self.fc(output), h_state


def call_attention(decoder, draw):
    """Call the attention for targets that grow, as the decoder does without a target."""
    channels, size = decoder.conv3x3_1.in_channels, decoder.rnndecoder.input_size
    for lengths in draw.sources((6, 4, 2), (3, 3)):
        B, W = len(lengths), max(lengths)
        features = draw(B, channels, 2, W)
        ratios = [(length - 0.5) / W for length in lengths]
        for T in (3, 3, 4):
            yield decoder._2d_attation(features, draw(B, T, size), [ratios], decoder.training)


def call_block(block, draw):
    width, size = block.feat_embed.in_features, block.hidden_embed.in_features
    for lengths in draw.sources((5, 5, 5), (4, 4)):
        B, Tk = len(lengths), max(lengths)
        source, state = draw(B, Tk, width), draw(1, B, size)
        for _ in range(3):
            output, state = block(source, state, draw(B, block.embedding_dim))
            yield output, state


def classes(name):
    return [f"{package}openrec.modeling.decoders.{name}" for package in ("", "openocr.")]


DISTRIBUTIONS = ["openocr-python"]
ADAPTERS = [
    Adapter(
        name="OpenOCR's SARDecoder",
        implementation=SAR,
        classes=classes("sar_decoder.SARDecoder"),
        parameters=[
            *names("conv1x1_1", "conv3x3_1", "conv1x1_2", "prediction"),
            *("embedding.weight", "rnndecoder.*"),
        ],
        optional=["encoder.*"],
        example=call_attention,
        note="an image without visible columns has weights 0 instead of NaN",
    ),
    Adapter(
        name="OpenOCR's Attn_Rnn_Block",
        implementation=ASTER,
        classes=classes("aster_decoder.Attn_Rnn_Block"),
        parameters=[
            *names("feat_embed", "hidden_embed", "attnfeat_embed", "fc"),
            "gru.*",
        ],
        example=call_block,
    ),
]
