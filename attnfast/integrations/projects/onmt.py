"""OpenNMT-py and its successor eole."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from attnfast.decoding import Memory
from attnfast.integrations.adapter import Adapter, UnsupportedCall
from attnfast.integrations.cache import cached_per_source
from attnfast.integrations.fused_decoders import (
    LOOP,
    fusion_skip_reason,
    last_states,
    masks_of,
    run_decoder,
    state_of,
)
from attnfast.integrations.helpers import attend, is_plain, project, project_joined
from attnfast.nn._fused_rnn import NAMES, Layer
from attnfast.ops.arguments import length_mask


def lengths_of(self, source, src_len):
    """Return how many states of each source the project's mask leaves, whatever the lengths are."""
    if src_len is None:
        return None
    B, Tk = source.shape[:2]

    def count():
        return length_mask(src_len.view(-1), Tk).sum(1).expand(B)

    return cached_per_source(self, "lengths", count, src_len, B, Tk)


def attended(self, src, source, **seen):
    """Attend by the module's score, and project what comes out beside the query."""
    if self.attn_type == "mlp":
        key, weight = project(self, "key", self.linear_context, source), self.v.weight
        query = self.linear_query(src)
    else:
        key, weight = source, None
        query = self.linear_in(src) if self.attn_type == "general" else src
    context, weights = attend(self, query, key, source, weight, **seen)
    out = project_joined(self, self.linear_out, context, src, source)
    return out if self.attn_type == "mlp" else torch.tanh(out), weights


class OpenNMT:
    """Scores of Luong and Bahdanau; coverage goes into keys and values, tanh(h + w C)."""

    def forward(self, src, enc_out, src_len=None, coverage=None):
        if coverage is not None:  # the project changes its argument
            enc_out += self.linear_cover(coverage.view(-1, 1)).view_as(enc_out)
            enc_out = torch.tanh(enc_out)
        return attended(self, src, enc_out, lengths=lengths_of(self, enc_out, src_len))


class InputFeed:
    """h = cell([x; f], h), c = attend(h), f = tanh(W [c; h])."""

    def _run_forward_pass(self, tgt, enc_out, src_len=None):
        attention, hidden = self.attn, self.state["hidden"]
        cells, query = self.rnn.layers, getattr(attention, "linear_in", None)
        layer = Layer.stack(
            "lstm" if len(hidden) == 2 else "gru", [[getattr(x, n) for n in NAMES] for x in cells],
            output=attention.linear_out, attends_first=False,
        )  # fmt: skip
        feed, T, above = self.state["input_feed"], tgt.shape[1], len(cells) - 1
        parts = [attention.linear_out] + [query] * (query is not None)
        dropouts = (self.rnn.dropout, above), (self.dropout, 1)
        drops = any(x.training and x.p > 0 for x, _ in dropouts)
        plain = is_plain(self.rnn, type(self.rnn)) and all(
            is_plain(x, nn.LSTMCell, nn.GRUCell) for x in cells
        )
        if not plain or not all(is_plain(x, nn.Dropout) for x, _ in dropouts):
            raise UnsupportedCall("a cell or dropout has hooks or a forward of its own")
        if reason := fusion_skip_reason(
            layer, T, enc_out, hidden, attention, *parts, feed=[feed], drops=drops
        ):
            raise UnsupportedCall(reason)
        memory = Memory(enc_out, enc_out, lengths_of(self, enc_out, src_len))
        words, state = self.embeddings(tgt), state_of(*hidden, feed=feed[0])
        of_layers, of_output = masks_of(T, feed[0], dropouts)
        of_output = None if of_output is None else of_output[0]
        masks = {"dropout_between": of_layers, "dropout_output": of_output}
        steps = run_decoder(layer, words, state, query, memory, **masks)
        last = [last_states(x) for x in (steps.states, steps.cells) if x is not None]
        return tuple(last), steps.attentional, {"std": steps.weights.transpose(0, 1).contiguous()}


class Eole:
    """OpenNMT's attention with a padding mask, as eole has it."""

    def forward(self, src, enc_out, src_pad_mask=None, coverage=None):
        if coverage is not None and self.linear_cover is not None:
            feature = self.linear_cover(coverage.view(-1, 1)).view_as(enc_out)
            enc_out = torch.tanh(enc_out + feature)
        return attended(self, src, enc_out, mask=None if src_pad_mask is None else ~src_pad_mask)


def example(attention, draw, seen):
    for lengths in draw.sources((5, 2, 4)):
        B, Tk = len(lengths), max(lengths)
        source, keys = draw(B, Tk, attention.dim), seen(draw, lengths, Tk)
        yield attention(draw(B, 4, attention.dim), source, keys)
        for _ in range(3):
            yield attention(draw(B, attention.dim), source, keys)
        if getattr(attention, "linear_cover", None) is not None:
            yield attention(draw(B, attention.dim), source * 1, keys, draw(B, Tk))


def translate(decoder, draw):
    words = [x.num_embeddings for x in decoder.embeddings.modules() if type(x) is nn.Embedding]
    cells, size = (2 if "LSTM" in type(decoder.rnn).__name__ else 1), decoder.hidden_size
    layers = decoder.num_layers
    for lengths in draw.sources((5, 2, 4)):
        B, Tk = len(lengths), max(lengths)
        source = draw(B, Tk, size)
        for src_len in (draw.numbers(*lengths), None):
            decoder.state["coverage"] = None
            decoder.state["hidden"] = tuple(draw(layers, B, size) for _ in range(cells))
            decoder.state["input_feed"] = draw(1, B, size)
            for T in draw.steps(4, 1, 2):
                yield decoder(draw.words(min(words), B, T, len(words)), source, src_len)


def why_not_input_fed(decoder):
    """Say what of a decoder the operator does not know, or None."""
    known = (
        (decoder.attn is None, "it does not attend"),
        (getattr(decoder.attn, "attn_type", "") == "mlp", "its attentional vectors have no tanh"),
        (decoder._coverage, "it has coverage"),
        (decoder.copy_attn is not None or decoder._reuse_copy_attn, "it copies"),
        (decoder.context_gate is not None, "it has a context gate"),
    )
    return next((why for is_so, why in known if is_so), None)


COMMON: dict[str, Any] = {
    "parameters": ["linear_out.weight"],
    "optional": [
        "linear_in.weight", "linear_context.weight", "linear_query.weight", "linear_query.bias",
        "v.weight", "linear_out.bias", "linear_cover.weight",
    ],
    "skip_reason": lambda m: "its weights are a sparsemax" if m.attn_func != "softmax" else None,
    "known_attributes": ["attn_func", "dim", "sparsemax"],
    "note": "a source without words has weights 0 instead of NaN",
}  # fmt: skip

DISTRIBUTIONS = ["OpenNMT-py", "eole"]
ADAPTERS = [
    Adapter(
        name="OpenNMT-py's GlobalAttention",
        implementation=OpenNMT,
        classes=["onmt.modules.global_attention.GlobalAttention"],
        example=partial(example, seen=lambda draw, lengths, Tk: draw.numbers(*lengths)),
        **COMMON,
    ),
    Adapter(
        name="eole's GlobalAttention",
        implementation=Eole,
        classes=["eole.modules.global_attention.GlobalAttention"],
        example=partial(example, seen=lambda draw, *seen: ~draw.seen(*seen).unsqueeze(1)),
        **COMMON,
    ),
    Adapter(
        name="OpenNMT-py's InputFeedRNNDecoder",
        implementation=InputFeed,
        classes=["onmt.decoders.decoder.InputFeedRNNDecoder"],
        parameters=["rnn.layers.*"],
        optional=["embeddings.*", "attn.*", "copy_attn.*", "context_gate.*"],
        attention="attn",
        example=translate,
        weight_scale=4.0,  # a recurrence makes more of rounding
        skip_reason=why_not_input_fed,
        note=f"{COMMON['note']}; {LOOP}",
    ),
]
