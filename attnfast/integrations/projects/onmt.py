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
    StepDropout,
    draw_masks,
    fusion_skip_reason,
    last_states,
    run_decoder,
    state_of,
)
from attnfast.integrations.helpers import attend_to_source, is_plain, project, project_joined
from attnfast.integrations.own_loop import own_loop
from attnfast.integrations.search_model import DecoderParts
from attnfast.nn._fused_rnn import run_rnn
from attnfast.nn._layer import Layer
from attnfast.ops.arguments import length_mask


def lengths_of(self, source, src_len):
    """Return the number of states of each source that the project's mask leaves, ``[B]``."""
    if src_len is None:
        return None
    B, Tk = source.shape[:2]

    def count():
        return length_mask(src_len.view(-1), Tk).sum(1).expand(B)

    return cached_per_source(self, "lengths", count, src_len, B, Tk)


def attended(self, src, source, **seen):
    """Attend by the module's score, and project context and query; return also the weights."""
    if self.attn_type == "mlp":
        key, weight = project(self, "key", self.linear_context, source), self.v.weight
        query = self.linear_query(src)
    else:
        key, weight = source, None
        query = self.linear_in(src) if self.attn_type == "general" else src
    context, weights = attend_to_source(
        self, query, key, source, weight, normalisation=self.attn_func, **seen
    )
    out = project_joined(self, self.linear_out, context, src, source)
    return out if self.attn_type == "mlp" else torch.tanh(out), weights


class OpenNMT:
    """Scores of Luong and Bahdanau; coverage goes into keys and values, tanh(h + w C)."""

    def forward(self, src, enc_out, src_len=None, coverage=None):
        if coverage is not None:  # the project changes its argument
            enc_out += self.linear_cover(coverage.view(-1, 1)).view_as(enc_out)
            enc_out = torch.tanh(enc_out)
        return attended(self, src, enc_out, lengths=lengths_of(self, enc_out, src_len))


def layer_of(self):
    """Return the cells and the layer after the attention."""
    return Layer.of_cells(
        *self.rnn.layers, output=self.attn.linear_out, attends_first=False,
        output_tanh=self.attn.attn_type != "mlp",
    )  # fmt: skip


def stack_of(self, T, enc_out):
    """Return the cells and the layer after the attention, if the operator can run T steps."""
    attention, hidden, cells = self.attn, self.state["hidden"], self.rnn.layers
    layer = layer_of(self)
    dropouts = [x for x in (self.rnn.dropout, self.dropout) if x is not None]
    own = [x for x in (self.rnn, getattr(self, "copy_attn", None)) if x is not None]
    plain = all(is_plain(x, type(x)) for x in own) and all(
        is_plain(x, nn.LSTMCell, nn.GRUCell) for x in cells
    )
    if not plain or not all(is_plain(x, nn.Dropout) and not x.inplace for x in dropouts):
        raise UnsupportedCall("a cell, dropout or copying has hooks or a forward of its own")
    names = "linear_out", "linear_in", "linear_context", "linear_query", "v"
    parts = [getattr(attention, x) for x in names if hasattr(attention, x)]
    if reason := fusion_skip_reason(
        layer, T, enc_out, hidden, attention, *parts, feed=[self.state["input_feed"]],
        drops=any(x.training and x.p > 0 for x in dropouts),
    ):  # fmt: skip
        raise UnsupportedCall(reason)
    return layer


def memory_of(attention, source, **seen):
    """Return the projection of queries, and the memory of a source."""
    if attention.attn_type == "mlp":
        key = project(attention, "key", attention.linear_context, source)
        memory = Memory(key, source, score_vector=attention.v.weight[0], score="tanh", **seen)
        return attention.linear_query, memory
    return getattr(attention, "linear_in", None), Memory(source, source, **seen)


def unrolled(self, layer, words, source, **seen):
    """Return the last states, the attentional vectors and the weights of all words."""
    attention = self.attn
    query, memory = memory_of(attention, source, **seen)
    feed, above = self.state["input_feed"][0], self.num_layers - 1
    between = nn.Dropout(0.0) if self.rnn.dropout is None else self.rnn.dropout
    dropouts = StepDropout.of(between, times=above), StepDropout.of(self.dropout)
    masks = dict(
        zip(("dropout_between", "dropout_output"), draw_masks(words.shape[1], feed, dropouts))
    )
    state = state_of(*self.state["hidden"], feed=feed)
    terms = {"normalisation": attention.attn_func}
    steps = run_decoder(layer, words, state, query, memory, terms=terms, **masks)
    last = [last_states(x) for x in (steps.states, steps.cells) if x is not None]
    return tuple(last), steps.attentional, steps.weights


def encoded(decoder, table, output, start, *wrappers):
    """Return a decoder's parts, the memory of sources and the first state.

    ``start()`` returns the encoder's states and the mask as the memory has it, and starts the
    decoder's state, which is then as it was before.
    """
    kept, attention = dict(decoder.state), decoder.attn
    states, seen = start()
    hidden, feed = decoder.state["hidden"], decoder.state["input_feed"][0]
    decoder.state.clear()
    decoder.state.update(kept)
    query, memory = memory_of(attention, states, **seen)
    parts = DecoderParts(
        layer_of(decoder), query, table, output, decoder, wrappers=wrappers,
        attention={"terms": {"normalisation": attention.attn_func}},
    )  # fmt: skip
    return parts, memory, state_of(*hidden, feed=feed)


def read(encoder, place, embedded, bridge, lengths=None):
    """Return the states of a project's own recurrent encoder and its last ones, or None.

    ``bridge`` is the name of its method that changes the last states. None is for other encoders,
    and where PyTorch's recurrent layer is as fast.
    """
    cls = type(encoder)
    if f"{cls.__module__}.{cls.__qualname__}" != place or not is_plain(encoder, cls):
        return None
    done = run_rnn(encoder.rnn, embedded, None, lengths)
    if done is None or not encoder.use_bridge:
        return done
    return done[0], getattr(encoder, bridge)(done[1])


def encode_opennmt(source, lengths, decoder, model):
    def start():
        words, encoder = source.unsqueeze(-1), model.encoder
        place, sizes = "onmt.encoders.rnn_encoder.RNNEncoder", lengths.long()
        states = read(encoder, place, encoder.embeddings(words), "_bridge", sizes)
        states, final = states or encoder(words, lengths)[:2]
        decoder.init_state(words, states, final)
        return states, {"lengths": lengths_of(decoder, states, sizes)}

    tables = decoder.embeddings.make_embedding
    if len(tables) != 1 or len(tables[0]) != 1:
        raise UnsupportedCall("its words have features or positions")
    return encoded(decoder, tables[0][0], model.generator, start)


def encode_eole(source, lengths, decoder, model):
    def start():
        seen = length_mask(lengths, source.shape[1]).unsqueeze(1)
        place, embedded = "eole.encoders.rnn_encoder.RNNEncoder", model.src_emb(source)
        states = read(model.encoder, place, embedded, "_apply_bridge")
        states, final = states or model.encoder(embedded, pad_mask=~seen)
        decoder.init_state(src=source, enc_out=states, enc_final_hs=final)
        return states, {"mask": seen}

    words = model.tgt_emb
    if hasattr(words, "pe") or words.normalize:
        raise UnsupportedCall("its words have positions, or are normalised")
    return encoded(decoder, words.embeddings, model.generator, start, words)


class InputFeed:
    """h = cell([x; f], h), c = attend(h), f = tanh(W [c; h]); with mlp scores, f = W [c; h] + b."""

    def _run_forward_pass(self, tgt, enc_out, src_len=None):
        layer = stack_of(self, tgt.shape[1], enc_out)
        lengths = lengths_of(self, enc_out, src_len)
        last, vectors, weights = unrolled(
            self, layer, self.embeddings(tgt), enc_out, lengths=lengths
        )
        weights = {"std": weights.transpose(0, 1).contiguous()}
        if self.copy_attn is not None:
            weights["copy"] = self.copy_attn(vectors, enc_out)[1].transpose(0, 1).contiguous()
        elif self._reuse_copy_attn:
            weights["copy"] = weights["std"]
        return last, vectors, weights


class Eole:
    """OpenNMT's attention with a padding mask, as eole has it."""

    def forward(self, src, enc_out, src_pad_mask=None, coverage=None):
        if coverage is not None and self.linear_cover is not None:
            feature = self.linear_cover(coverage.view(-1, 1)).view_as(enc_out)
            enc_out = torch.tanh(enc_out + feature)
        return attended(self, src, enc_out, mask=None if src_pad_mask is None else ~src_pad_mask)


class EoleInputFeed:
    """OpenNMT's decoder, whose words are embedded by its caller."""

    def _run_forward_pass(self, emb, enc_out, src_pad_mask=None):
        layer, mask = stack_of(self, emb.shape[1], enc_out), None
        if src_pad_mask is not None:
            mask = ~src_pad_mask
            if mask.shape != (len(enc_out), 1, enc_out.shape[1]):
                raise UnsupportedCall("its mask is not [B, 1, Tk]")
        last, vectors, weights = unrolled(self, layer, emb, enc_out, mask=mask)
        return last, vectors, {"std": weights}


def example(attention, draw, seen):
    for lengths in draw.sources((5, 2, 4)):
        B, Tk = len(lengths), max(lengths)
        source, keys = draw(B, Tk, attention.dim), seen(draw, lengths, Tk)
        yield attention(draw(B, 4, attention.dim), source, keys)
        for _ in range(3):
            yield attention(draw(B, attention.dim), source, keys)
        if getattr(attention, "linear_cover", None) is not None:
            yield attention(draw(B, attention.dim), source * 1, keys, draw(B, Tk))


def start(decoder, draw, B):
    """Begin with drawn states."""
    cells = 2 if "LSTM" in type(decoder.rnn).__name__ else 1
    size, layers = decoder.hidden_size, decoder.num_layers
    decoder.state["coverage"] = None
    decoder.state["hidden"] = tuple(draw(layers, B, size) for _ in range(cells))
    decoder.state["input_feed"] = draw(1, B, size)


def translate(decoder, draw):
    words = [x.num_embeddings for x in decoder.embeddings.modules() if type(x) is nn.Embedding]
    for lengths in draw.sources((5, 2, 4)):
        B, Tk = len(lengths), max(lengths)
        source = draw(B, Tk, decoder.hidden_size)
        for src_len in (draw.numbers(*lengths), None):
            start(decoder, draw, B)
            for T in draw.steps(4, 1, 2):
                yield decoder(draw.words(min(words), B, T, len(words)), source, src_len)


def translate_embedded(decoder, draw):
    size = decoder.hidden_size
    for lengths in draw.sources((5, 2, 4)):
        B, Tk = len(lengths), max(lengths)
        source, padding = draw(B, Tk, size), ~draw.seen(lengths, Tk).unsqueeze(1)
        for mask in (padding, None):
            start(decoder, draw, B)
            for T in draw.steps(4, 1, 2):
                words = draw(B, T, decoder._input_size - size)
                yield decoder(words, source, src_pad_mask=mask), decoder.state["input_feed"]


def attention_skip_reason(decoder):
    """Return why a decoder's loop is left as it is, or None."""
    return "it does not attend" if decoder.attn is None else None


def decoder_skip_reason(decoder):
    """Return why the operator cannot run a decoder, or None."""
    known = (
        (decoder._coverage, "it has coverage"),
        (decoder.context_gate is not None, "it has a context gate"),
    )
    return attention_skip_reason(decoder) or next((why for is_so, why in known if is_so), None)


COMMON: dict[str, Any] = {
    "parameters": ["linear_out.weight"],
    "optional": [
        "linear_in.weight", "linear_context.weight", "linear_query.weight", "linear_query.bias",
        "v.weight", "linear_out.bias", "linear_cover.weight",
    ],
    "skip_reason": lambda m: (
        None if m.attn_func in ("softmax", "sparsemax") else f"its weights are a {m.attn_func}"
    ),
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
]
for owner, place, implementation, how, encode in (
    ("OpenNMT-py", "onmt.decoders.decoder", InputFeed, translate, encode_opennmt),
    ("eole", "eole.decoders.rnn_decoder", EoleInputFeed, translate_embedded, encode_eole),
):
    whole = Adapter(
        name=f"{owner}'s InputFeedRNNDecoder",
        implementation=implementation,
        classes=[f"{place}.InputFeedRNNDecoder"],
        parameters=["rnn.layers.*"],
        optional=["embeddings.*", "attn.*", "copy_attn.*", "context_gate.*"],
        attention="attn",
        example=how,
        weight_scale=4.0,  # a recurrence amplifies rounding errors
        skip_reason=decoder_skip_reason,
        search=encode,
        note=f"{COMMON['note']}; {LOOP}",
    )
    ADAPTERS += [own_loop(whole, "_run_forward_pass", attention_skip_reason), whole]
