"""yoyodyne's attention, and the models that call it: soft attention, pointer-generators."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from attnfast.decoding import Memory
from attnfast.integrations.adapter import Adapter, UnsupportedCall
from attnfast.integrations.fused_decoders import (
    LOOP,
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
from attnfast.integrations.search_model import DecoderParts, find_words
from attnfast.nn._layer import NAMES, Layer

END = 3  # of yoyodyne's vocabularies


class Yoyodyne:
    """e = V · tanh(M [h; q] + b) + c, q the state of the last layer."""

    def forward(self, encoded, hidden, mask):
        if not is_plain(self.M):
            raise UnsupportedCall("its M is no plain nn.Linear")
        query, key = project_both(self, self.M, hidden[:, -1:], encoded, states_first=True)
        context, weights = attend_to_source(self, query, key, encoded, self.V.weight, mask=~mask)
        return keep_in_graph(context, self.V.bias), weights


def parts_of(model):
    """Return the parts of a model, which embeds words of sources and targets by one table."""
    decoder, classifier, table = model.decoder, model.classifier, model.embeddings
    rnn, M, V = decoder.module, decoder.attention.M, classifier.out_features
    plain = all(is_plain(x, type(x)) for x in (decoder, rnn, decoder.dropout_layer))
    if not plain or not is_plain_table(table):
        raise UnsupportedCall("an inner layer has hooks or a forward of its own")
    layer = Layer.stack(
        "lstm" if hasattr(decoder, "c0") else "gru",
        [[getattr(rnn, f"{x}_l{i}") for x in NAMES] for i in range(rnn.num_layers)],
    )
    query = linear_of(M.weight[:, M.in_features - rnn.hidden_size :], M.bias)
    if table.num_embeddings > V:  # some words are of sources alone
        table = nn.Embedding.from_pretrained(table.weight[:V].detach())
    gate, output, pointer = getattr(model, "generation_probability", None), classifier, None
    if gate is not None:  # it reads the word, too
        weights = [x.weight for x in (gate.W_hs, gate.W_attention, gate.W_emb)]
        pointer = linear_of(torch.cat(weights, 1), gate.bias)
        weight = F.pad(classifier.weight, (0, table.embedding_dim))
        output = linear_of(weight, classifier.bias)
    wrappers = [model.embeddings, classifier, *(() if gate is None else gate.modules())]
    return DecoderParts(
        layer, query, table, output, decoder, wrappers=tuple(wrappers), pointer=pointer
    )


def states_of(model, B):
    """Return the decoder's states before the first symbol."""
    start = model.decoder.initial_state(B)
    return [x for x in (start.hidden, start.cell) if x is not None]


def memory_of(model, source, mask):
    """Return the memory of an encoded source."""
    attention = model.decoder.attention
    state = states_of(model, len(source))[0][-1]
    _, key = project_both(attention, attention.M, state, source, states_first=True)
    vector = attention.V.weight[0]
    return Memory(key, source, mask=~mask.unsqueeze(1), score_vector=vector, score="tanh")


def encode(source, lengths, model):
    """Return a model's parts, the memory of sources and the first state."""
    from yoyodyne.data import PaddedTensor

    if model.has_features_encoder:
        raise UnsupportedCall("it has an encoder of features")
    symbols = PaddedTensor([words[:n] for words, n in zip(source, lengths.tolist())])
    states = model.source_encoder(symbols, model.embeddings, is_source=True)
    if getattr(model, "source_projection", None) is not None:
        states = model.source_projection(states)
    memory = memory_of(model, states, symbols.mask)
    return parts_of(model), memory, state_of(*states_of(model, len(source)))


def run_target(model, source, mask, target, symbols=None):
    """Return the embedded symbols of a target, and the steps of the decoder over them.

    Without a target a search finds the model's own symbols first. ``symbols`` are those of the
    source of a pointer-generator, which has no dropout on its states.
    """
    decoder, rnn, dropout = model.decoder, model.decoder.module, model.decoder.dropout_layer
    attention, cells = decoder.attention, nn.Dropout(rnn.dropout).train(rnn.training)
    parts, states = parts_of(model), states_of(model, len(source))
    start = model.start_symbol(len(source))
    drops = any(x.training and x.p > 0 for x in (cells, dropout))
    if target is not None and target.dim() != 2:
        raise UnsupportedCall("its target is not [B, T]")
    T = model.max_target_length if target is None else target.shape[1]
    if target is None and drops:
        raise UnsupportedCall("there is no target, and dropout is on")
    reason = fusion_skip_reason(
        parts.layer, T, source, states, attention, attention.M, attention.V, drops=drops
    )
    if reason:
        raise UnsupportedCall(reason)
    memory, state = memory_of(model, source, mask), state_of(*states)
    if target is None:
        target = find_words(parts, memory, state, start[:, 0], T, end=END, source_words=symbols)
        T = target.shape[1]
    if T < 2:
        raise UnsupportedCall(LOOP)
    embedded, H = model.embeddings(torch.cat([start, target[:, :-1]], 1)), rnn.hidden_size
    state_dropout = StepDropout(0.0 if symbols is not None else dropout.p, dropout.training, H)
    word_mask, layer_masks, state_mask = draw_masks(
        T, embedded[:, 0],
        [StepDropout.of(dropout), StepDropout.of(cells, H, rnn.num_layers - 1), state_dropout],
    )  # fmt: skip
    embedded = apply_mask(embedded, word_mask)
    steps = run_decoder(
        parts.layer, embedded, state, parts.query_proj, memory, dropout_between=layer_masks
    )
    output = keep_in_graph(steps.output, attention.V.bias)
    return embedded, apply_mask(output, state_mask), steps


class SoftAttention:
    """c = attend(h), h = cell([x; c], h), for all symbols of a target or a prediction."""

    def greedy_decode_train_validate(self, context, mask, target=None):
        states = run_target(self, context, mask, target)[1]
        return self.classifier(states).transpose(1, 2).contiguous()

    def greedy_decode_predict_test(self, context, mask):
        return SoftAttention.greedy_decode_train_validate(self, context, mask)


class PointerGenerator:
    """log(p softmax(W [h; c]) + (1 - p) copies), p = σ(w · [c; h; x]), of the same steps."""

    def greedy_decode_train_validate(
        self, source, source_encoded, source_mask, *, target=None, features_encoded=None,
        features_mask=None,
    ):  # fmt: skip
        embedded, states, steps = run_target(self, source_encoded, source_mask, target, source)
        generated = self.classifier(torch.cat([states, steps.contexts], 2)).softmax(2)
        copied = torch.zeros_like(generated, dtype=steps.weights.dtype)
        copied = copied.scatter_add(2, source.unsqueeze(1).expand_as(steps.weights), steps.weights)
        p = self.generation_probability(steps.contexts, states, embedded)
        return torch.log(generated * p + copied * (1 - p)).transpose(1, 2).contiguous()

    def greedy_decode_predict_test(
        self, source, source_encoded, source_mask, *, features_encoded=None, features_mask=None
    ):
        return PointerGenerator.greedy_decode_train_validate(
            self, source, source_encoded, source_mask
        )


def example(attention, draw):
    size = attention.M.out_features
    for lengths in draw.sources((5, 2, 4), (4, 1)):
        B, Tk = len(lengths), max(lengths)
        source = draw(B, Tk, attention.M.in_features - size)
        mask = ~draw.seen(lengths, Tk)
        for layers in (1, 2, 2):
            yield attention(source, draw(B, layers, size), mask)


@contextmanager
def limit_target_length(model):
    """Limit the lengths of a model's own targets."""
    most, model.max_target_length = model.max_target_length, 4
    try:
        yield
    finally:
        model.max_target_length = most


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
        with limit_target_length(model):
            yield model.greedy_decode_train_validate(*inputs)
            yield model.greedy_decode_predict_test(*inputs)


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
            search=encode,
            note=f"a source without words has weights 0 instead of NaN; {LOOP}",
        )
        for kind, place, implementation, copies in (
            ("SoftAttention", "rnn", SoftAttention, False),
            ("PointerGenerator", "pointer_generator.rnn", PointerGenerator, True),
        )
    ),
]
