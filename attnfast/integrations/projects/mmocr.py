"""mmocr's attention, inside its SAR and ASTER decoders."""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from attnfast.integrations.adapter import Adapter, UnsupportedCall
from attnfast.integrations.helpers import attend_to_map, attend_to_source, keep_in_graph, project
from attnfast.ops.arguments import length_mask


def visible_columns(features, valid_ratios):
    """Return a mask ``[B, H · W]``, True in the columns that a share of the width contains."""
    B, _, H, W = features.shape
    if len(valid_ratios) != B:
        raise UnsupportedCall("there is not one valid ratio for each image")
    widths = [min(W, math.ceil(W * ratio)) for ratio in valid_ratios]
    ends = torch.tensor(widths, device=features.device)
    return length_mask(ends, W).unsqueeze(1).expand(B, H, W).flatten(1)


def predict(self, states, query, feat, holistic_feat, valid_ratios):
    """Return the predictions of decoder states, whose query attends to the image."""
    mask = None if valid_ratios is None else visible_columns(feat, valid_ratios)
    context = attend_to_map(self, query, feat, self.conv3x3_1, self.conv1x1_2.weight, mask)
    context = keep_in_graph(context, self.conv1x1_2.bias)
    if self.pred_concat:
        holistic_feat = holistic_feat.expand(*states.shape[:-1], -1)
        context = torch.cat((states, context, holistic_feat), -1)
    return self.prediction(context)


class ParallelSAR:
    """e = v · tanh(conv(F) + b + W q + a) + c, for the queries of a whole target."""

    def _2d_attention(self, decoder_input, feat, holistic_feat, valid_ratios=None):
        states = self.rnn_decoder(decoder_input)[0]
        query = self.conv1x1_1(states)
        return self.pred_dropout(predict(self, states, query, feat, holistic_feat, valid_ratios))


class SequentialSAR:
    """e = v · tanh(conv(F) + b + W q + a) + c, of one query; hidden states become cell states."""

    def _2d_attention(self, y_prev, feat, holistic_feat, hx1, cx1, hx2, cx2, valid_ratios=None):
        if self.dec_gru:
            hx1 = self.rnn_decoder_layer1(y_prev, hx1)
            hx2 = self.rnn_decoder_layer2(hx1, hx2)
        else:
            hx1, _ = self.rnn_decoder_layer1(y_prev, (hx1, cx1))
            hx2, _ = self.rnn_decoder_layer2(hx1, (hx2, cx2))
        query = F.linear(hx2, self.conv1x1_1.weight.flatten(1), self.conv1x1_1.bias)
        return predict(self, hx2, query, feat, holistic_feat, valid_ratios), hx1, hx1, hx2, hx2


class ASTER:
    """e = w · tanh(U h + b + W q + a) + d, then q = gru([y; c], q)."""

    def _attention(self, feat, prev_hidden, prev_char):
        query = self.proj_hidden(prev_hidden).squeeze(0)
        key = project(self, "key", self.proj_feat, feat)
        context, _ = attend_to_source(self, query, key, feat, self.proj_sum.weight)
        context = keep_in_graph(context, self.proj_sum.bias)
        both = torch.cat([self.embedding(prev_char.long()), context], 1)
        output, state = self.gru(both.unsqueeze(1), prev_hidden)
        return self.fc(output.squeeze(1)), state


def images(decoder, draw):
    """Yield feature maps and the shares of their widths that show an image."""
    for lengths in draw.sources((6, 4, 2), (3, 3)):
        W = max(lengths)
        ratios = [(length - 0.5) / W for length in lengths] if decoder.mask else None
        yield draw(len(lengths), decoder.conv3x3_1.in_channels, 2, W), ratios


def call_parallel(decoder, draw):
    """Call the attention for targets that grow, as the decoder does without a target."""
    size = decoder.rnn_decoder.input_size
    for features, ratios in images(decoder, draw):
        B = len(features)
        holistic = draw(B, 1, size)
        for T in (3, 3, 4):
            yield decoder._2d_attention(draw(B, T, size), features, holistic, valid_ratios=ratios)


def call_sequential(decoder, draw):
    size = decoder.rnn_decoder_layer1.input_size
    for features, ratios in images(decoder, draw):
        B = len(features)
        holistic, states = draw(B, size), [draw(B, size) for _ in range(4)]
        for _ in range(3):
            output, *states = decoder._2d_attention(
                draw(B, size), features, holistic, *states, valid_ratios=ratios
            )
            yield output, states


def call_aster(decoder, draw):
    words = decoder.embedding.num_embeddings
    for lengths in draw.sources((5, 5, 5), (4, 4)):
        B, Tk = len(lengths), max(lengths)
        source = draw(B, Tk, decoder.proj_feat.in_features)
        state = draw(1, B, decoder.proj_hidden.in_features)
        for word in draw.words(words, B, 3).unbind(1):
            output, state = decoder._attention(source, state, word)
            yield output, state


def names(*layers):
    return [f"{layer}.{name}" for layer in layers for name in ("weight", "bias")]


DISTRIBUTIONS = ["mmocr"]
ADAPTERS = [
    *(
        Adapter(
            name=f"mmocr's {name}",
            implementation=implementation,
            classes=[f"mmocr.models.textrecog.decoders.sar_decoder.{name}"],
            parameters=[
                *names("conv1x1_1", "conv3x3_1", "conv1x1_2", "prediction"),
                *("embedding.weight", "rnn_decoder*"),
            ],
            example=example,
            note="an image without visible columns has weights 0 instead of NaN",
        )
        for name, implementation, example in (
            ("ParallelSARDecoder", ParallelSAR, call_parallel),
            ("SequentialSARDecoder", SequentialSAR, call_sequential),
        )
    ),
    Adapter(
        name="mmocr's ASTERDecoder",
        implementation=ASTER,
        classes=["mmocr.models.textrecog.decoders.aster_decoder.ASTERDecoder"],
        parameters=[
            *names("proj_feat", "proj_hidden", "proj_sum", "fc"),
            *("embedding.weight", "gru.*"),
        ],
        example=call_aster,
    ),
]
