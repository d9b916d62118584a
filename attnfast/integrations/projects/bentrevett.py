"""bentrevett's tutorials, which people copy: attention that returns weights alone, and models."""

from __future__ import annotations

import random
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from attnfast._utils.dispatch_log import record
from attnfast.decoding import Memory
from attnfast.integrations.adapter import Adapter, UnsupportedCall, arguments
from attnfast.integrations.fused_decoders import (
    LOOP,
    StepDropout,
    draw_masks,
    fusion_skip_reason,
    gru_skip_reason,
    is_plain_table,
    linear_of,
    run_decoder,
)
from attnfast.integrations.helpers import attend_to_source, batch_first, is_plain, project_both
from attnfast.integrations.search_model import DecoderParts, find_words
from attnfast.nn._layer import Layer, RecurrentState


def parts(attention):
    """Return the projection and the weight of the score, whose names depend on the edition."""
    layer = attention.attn if hasattr(attention, "attn") else attention.attn_fc
    v = attention.v if hasattr(attention, "v") else attention.v_fc
    return layer, getattr(v, "weight", v)


class Bentrevett:
    """e = v · tanh(W [q; h] + b)."""

    def forward(self, hidden, encoder_outputs, mask=None):
        layer, weight = parts(self)
        if not is_plain(layer):
            raise UnsupportedCall("its attention layer has hooks or is no plain nn.Linear")
        query, key = project_both(self, layer, hidden, batch_first(self, encoder_outputs))
        return attend_to_source(
            self, query, key, None, weight, mask=None if mask is None else mask != 0
        )[1]


def described(self, hidden, source, mask):
    """Return the parts of a decoder, and the memory of its source."""
    linear, weight = parts(self.attention)
    _, key = project_both(self.attention, linear, hidden, source)
    memory = Memory(
        key, source, mask=None if mask is None else (mask != 0).unsqueeze(1),
        score_vector=weight.view(-1), score="tanh",
    )  # fmt: skip
    query = linear_of(linear.weight[:, : hidden.shape[1]], linear.bias)
    output = self.fc_out if hasattr(self, "fc_out") else self.out
    layer = Layer.of(self.rnn)
    return DecoderParts(layer, query, self.embedding, output, self), memory


class Steps:
    """c = attend(h), h = cell([x; c], h), y = W [h; c; x] + b, for all words x of a target."""

    def forward(self, input, hidden, encoder_outputs, mask=None, predicted=()):
        """Take words [T, B] instead of those of one step, and return predictions [T, B, V].

        At the steps ``predicted`` the word is the prediction of the step before. These words are
        computed first, without gradients, so that one operator then runs all steps.
        """
        source = batch_first(self.attention, encoder_outputs)
        decoder, memory = described(self, hidden, source, mask)
        layer, query, output = decoder.layer, decoder.query_proj, decoder.output
        words, E = input.T, self.embedding.embedding_dim
        (dropped,) = draw_masks(len(input), hidden, [StepDropout.of(self.dropout, E)])

        def steps_of(first, stop, state):
            x = self.embedding(words[:, first:stop])
            x = x if dropped is None else x * dropped[:, first:stop]
            steps = run_decoder(layer, x, state, query, memory)
            return steps, torch.cat([steps.states, steps.contexts, x], 2)

        words, state, first = words.clone(), RecurrentState(hidden), 0
        if predicted and dropped is None:
            forced = words.masked_fill(words < 0, decoder.embedding.num_embeddings)  # refused
            forced[:, predicted] = -1
            steps = len(input) - 1
            try:
                words[:, 1:] = find_words(decoder, memory, state, words[:, 0], steps, forced[:, 1:])
                predicted = []
            except UnsupportedCall as error:  # single steps follow
                record("words of a model", "step by step", str(error))
        with torch.no_grad():
            for t in predicted:
                steps, features = steps_of(first, t, state)
                words[:, t] = output(features[:, -1]).argmax(1)
                state = RecurrentState(steps.states[:, -1], packed=steps.packed or state.packed)
                first = t
        return output(steps_of(0, len(input), RecurrentState(hidden))[1]).transpose(0, 1)


def translated(self, trg, ratio, *sources):
    """Return a model's predictions; which words are forced is drawn as in its own loop."""
    decoder, (T, B) = self.decoder, trg.shape
    rnn, dropout, linear = decoder.rnn, decoder.dropout, parts(decoder.attention)[0]
    plain = is_plain(decoder, type(decoder)) and is_plain_table(decoder.embedding)
    if not plain or not is_plain(dropout, nn.Dropout):
        raise UnsupportedCall("an inner layer has hooks or a forward of its own")
    empty = rnn.weight_ih_l0.new_empty
    source, state = empty(B, 1, linear.in_features - rnn.hidden_size), empty(1, B, rnn.hidden_size)
    reason = fusion_skip_reason(
        Layer.of(rnn),
        T - 1,
        source,
        [state],
        decoder.attention,
        linear,
        drops=dropout.training and dropout.p > 0,
    )  # before the encoder draws random numbers
    if reason:
        raise UnsupportedCall(reason)
    source, hidden = self.encoder(*sources)
    mask = self.create_mask(sources[0]) if hasattr(self, "create_mask") else None
    predicted = [t for t in range(1, T) if not random.random() < ratio]
    steps = Steps.forward(
        decoder, trg[:-1], hidden, source, mask, [t for t in predicted if t < T - 1]
    )
    zeros = torch.zeros(1, B, decoder.output_dim, device=self.device)
    return torch.cat([zeros, steps]).to(zeros.dtype)


def encode(source, lengths, model):
    """Return the decoder's parts, the memory of sources and the first state."""
    decoder, packed = model.decoder, "src_len" in arguments(model)
    order = lengths.argsort(descending=True, stable=True)  # as for packed sources
    back = order.argsort()
    words = source[order].T[: int(lengths.max()) if packed else None]
    states, hidden = model.encoder(words, *([lengths[order].cpu()] if packed else []))
    mask = model.create_mask(words)[back] if hasattr(model, "create_mask") else None
    states = batch_first(decoder.attention, states)[back]
    parts, memory = described(decoder, hidden[back], states, mask)
    return parts, memory, RecurrentState(hidden[back])


class Model:
    """The model whose attention needs no mask."""

    def forward(self, src, trg, teacher_forcing_ratio=0.5):
        return translated(self, trg, teacher_forcing_ratio, src)


class MaskedModel:
    """The model with packed sources and a mask."""

    def forward(self, src, src_len, trg, teacher_forcing_ratio=0.5):
        return translated(self, trg, teacher_forcing_ratio, src, src_len)


def example(attention, draw):
    layer, _ = parts(attention)
    size = layer.out_features
    for lengths in draw.sources((5, 2, 4), (4, 1)):
        source = draw(max(lengths), len(lengths), layer.in_features - size)
        seen = [draw.seen(lengths, max(lengths))] if "mask" in arguments(attention) else []
        for _ in range(3):
            yield attention(draw(len(lengths), size), source, *seen)


@contextmanager
def seeded():
    """Draw which words are forced from a seed, and leave the caller's random numbers alone."""
    state = random.getstate()
    random.seed(0)
    try:
        yield
    finally:
        random.setstate(state)


def translate(model, draw, packed):
    sizes = [x.embedding.num_embeddings for x in (model.encoder, model.decoder)]
    pad = getattr(model, "src_pad_idx", 0)
    for lengths in draw.sources((5, 4, 2), (4, 1)):
        lengths = sorted(lengths, reverse=True)  # as for packed sources
        B, Tk = len(lengths), max(lengths)
        src = draw.words(sizes[0], B, Tk).masked_fill(~draw.seen(lengths, Tk), pad).T
        src[0] = (pad + 1) % sizes[0]
        source = [src, draw.numbers(*lengths).cpu()][: 1 + packed]
        for ratio in (1.0, 0.6):
            for T in draw.steps(5, 2):
                with seeded():
                    yield model(*source, draw.words(sizes[1], B, T).T, ratio)


def loop_skip_reason(model):
    """Return why the operator cannot run a model, or None."""
    from attnfast.integrations.inspection import unsupported_attributes  # it imports the adapters

    decoder = model.decoder
    if decoder.rnn.num_layers > 1:
        return f"its decoder has {decoder.rnn.num_layers} layers"
    return gru_skip_reason(decoder.rnn) or unsupported_attributes(decoder, DECODER)


DECODER = Adapter(  # inspected with the model, not replaced
    name="bentrevett's Decoder",
    implementation=Steps,
    classes=["Decoder"],
    parameters=[],
    known_attributes=["output_dim"],
    example=partial(translate, packed=False),
)
ADAPTERS = [
    *(
        Adapter(
            name=f"bentrevett's Attention{edition}",
            implementation=Bentrevett,
            classes=["Attention"],
            parameters=[f"{layer}.weight", f"{layer}.bias", v],
            example=example,
            note="a source without words has weights 0 instead of equal ones",
        )
        for edition, layer, v in (
            ("", "attn", "v.weight"),
            (" of 2018", "attn", "v"),
            (" of 2024", "attn_fc", "v_fc.weight"),
        )
    ),
    *(
        Adapter(
            name=f"bentrevett's Seq2Seq{edition}",
            implementation=implementation,
            classes=["Seq2Seq"],
            parameters=[
                *("encoder.*", "decoder.attention.*", "decoder.embedding.weight"),
                "decoder.rnn.*",
            ],
            optional=["decoder.fc_out.*", "decoder.out.*"],
            known_attributes=["random", "device", "create_mask", "src_pad_idx"],
            attention="decoder.attention",
            example=partial(translate, packed=packed),
            weight_scale=2.0,  # a recurrence amplifies rounding errors
            skip_reason=loop_skip_reason,
            search=encode,
            note=f"a row without keys has weights 0 instead of equal ones; {LOOP}",
        )
        for edition, implementation, packed in (
            ("", Model, False),
            (" with packed sources", MaskedModel, True),
        )
    ),
]
