"""yoyodyne's attention, and the models that call it: soft attention, pointer-generators."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from attnfast.decoding import Memory
from attnfast.integrations.adapter import Adapter, UnsupportedCall
from attnfast.integrations.fused_decoders import (
    StepDropout,
    apply_mask,
    draw_masks,
    fusion_skip_reason,
    is_plain_table,
    linear_of,
    run_decoder,
    state_of,
)
from attnfast.integrations.helpers import attend_to_source, is_plain, keep_in_graph, project_both
from attnfast.nn._layer import NAMES, Layer


class Yoyodyne:
    """e = V · tanh(M [h; q] + b) + c, q the state of the last layer."""

    def forward(self, encoded, hidden, mask):
        if not is_plain(self.M):
            raise UnsupportedCall("its M is no plain nn.Linear")
        query, key = project_both(self, self.M, hidden[:, -1:], encoded, states_first=True)
        context, weights = attend_to_source(self, query, key, encoded, self.V.weight, mask=~mask)
        return keep_in_graph(context, self.V.bias), weights


def forced(model, source, mask, target, drops_states=True):
    """Return the embedded symbols of a target, and the steps of the decoder over them."""
    decoder, rnn, dropout = model.decoder, model.decoder.module, model.decoder.dropout_layer
    attention, cells = decoder.attention, nn.Dropout(rnn.dropout).train(rnn.training)
    if target is None or target.dim() != 2:
        raise UnsupportedCall("its own code runs without a target")
    plain = all(is_plain(x, type(x)) for x in (decoder, rnn, dropout))
    if not plain or not is_plain_table(model.embeddings):
        raise UnsupportedCall("an inner layer has hooks or a forward of its own")
    T, start = target.shape[1], decoder.initial_state(len(source))
    states = [x for x in (start.hidden, start.cell) if x is not None]
    layer = Layer.stack(
        "gru" if start.cell is None else "lstm",
        [[getattr(rnn, f"{x}_l{i}") for x in NAMES] for i in range(rnn.num_layers)],
    )
    reason = fusion_skip_reason(
        layer, T, source, states, attention, attention.M, attention.V,
        drops=any(x.training and x.p > 0 for x in (cells, dropout)),
    )  # fmt: skip
    if reason:
        raise UnsupportedCall(reason)
    symbols = torch.cat([model.start_symbol(len(source)), target[:, :-1]], 1)
    embedded, H = model.embeddings(symbols), rnn.hidden_size
    state_dropout = StepDropout(dropout.p if drops_states else 0.0, dropout.training, H)
    word_mask, layer_masks, state_mask = draw_masks(
        T, embedded[:, 0],
        [StepDropout.of(dropout), StepDropout.of(cells, H, rnn.num_layers - 1), state_dropout],
    )  # fmt: skip
    embedded = apply_mask(embedded, word_mask)
    _, key = project_both(attention, attention.M, states[0][-1], source, states_first=True)
    memory = Memory(
        key, source, mask=~mask.unsqueeze(1), score_vector=attention.V.weight[0], score="tanh"
    )
    query_proj = linear_of(attention.M.weight[:, source.shape[2] :], attention.M.bias)
    steps = run_decoder(
        layer, embedded, state_of(*states), query_proj, memory, dropout_between=layer_masks
    )
    output = keep_in_graph(steps.output, attention.V.bias)
    return embedded, apply_mask(output, state_mask), steps


class SoftAttention:
    """c = attend(h), h = cell([x; c], h), for all symbols of a target."""

    def greedy_decode_train_validate(self, context, mask, target=None):
        states = forced(self, context, mask, target)[1]
        return self.classifier(states).transpose(1, 2).contiguous()


class PointerGenerator:
    """log(p softmax(W [h; c]) + (1 - p) copies), p = σ(w · [c; h; x]), of the same steps."""

    def greedy_decode_train_validate(
        self, source, source_encoded, source_mask, *, target=None, features_encoded=None,
        features_mask=None,
    ):  # fmt: skip
        embedded, states, steps = forced(self, source_encoded, source_mask, target, False)
        generated = self.classifier(torch.cat([states, steps.contexts], 2)).softmax(2)
        copied = torch.zeros_like(generated, dtype=steps.weights.dtype)
        copied = copied.scatter_add(2, source.unsqueeze(1).expand_as(steps.weights), steps.weights)
        p = self.generation_probability(steps.contexts, states, embedded)
        return torch.log(generated * p + copied * (1 - p)).transpose(1, 2).contiguous()


def example(attention, draw):
    size = attention.M.out_features
    for lengths in draw.sources((5, 2, 4), (4, 1)):
        B, Tk = len(lengths), max(lengths)
        source = draw(B, Tk, attention.M.in_features - size)
        mask = ~draw.seen(lengths, Tk)
        for layers in (1, 2, 2):
            yield attention(source, draw(B, layers, size), mask)


def decode(model, draw, copies):
    words = min(model.embeddings.num_embeddings, model.target_vocab_size)
    width = model.decoder_input_size
    for lengths in draw.sources((5, 2, 4), (4, 1)):
        B, Tk = len(lengths), max(lengths)
        symbols, mask = draw.words(words, B, Tk), ~draw.seen(lengths, Tk)
        inputs = ([symbols] if copies else []) + [draw(B, Tk, width), mask]
        for T in draw.steps(4, 1, 2):
            target = draw.words(words, B, T)
            yield model.greedy_decode_train_validate(*inputs, target=target)


def loop_skip_reason(model):
    """Return why the operator cannot run a model, or None."""
    parts = model.decoder, model.decoder.module
    if not all(type(x).__module__.startswith("yoyodyne.") for x in parts):
        return "its decoder is not yoyodyne's own"
    if hasattr(model, "features_attention"):
        return "it attends to features, too"
    return None


DISTRIBUTIONS = ["yoyodyne"]
ADAPTERS = [
    Adapter(
        name="yoyodyne's Attention",
        implementation=Yoyodyne,
        classes=["yoyodyne.models.modules.attention.Attention"],
        parameters=[f"{x}.{y}" for x in "MV" for y in ("weight", "bias")],
        example=example,
        note="a source without words has weights 0 instead of NaN",
    ),
    *(
        Adapter(
            name=f"yoyodyne's {kind}RNNModel",
            implementation=implementation,
            classes=[f"yoyodyne.models.{place}.{kind}{cell}Model" for cell in ("GRU", "LSTM")],
            parameters=[
                *("embeddings.weight", "classifier.*", "source_encoder.*"),
                *("decoder.h0", "decoder.module.*", "decoder.attention.*"),
            ],
            optional=[
                *("decoder.c0", "features_encoder.*", "source_projection.*"),
                *("features_projection.*", "generation_probability.*", "features_attention.*"),
            ],
            attention="decoder.attention",
            example=partial(decode, copies=copies),
            weight_scale=4.0,  # a recurrence amplifies rounding errors
            skip_reason=loop_skip_reason,
            note="a source without words has weights 0 instead of NaN; its own code runs single "
            "steps, and without teacher forcing",
        )
        for kind, place, implementation, copies in (
            ("SoftAttention", "rnn", SoftAttention, False),
            ("PointerGenerator", "pointer_generator.rnn", PointerGenerator, True),
        )
    ),
]
