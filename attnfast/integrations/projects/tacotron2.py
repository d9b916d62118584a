"""Tacotron 2: location-sensitive attention of NVIDIA's and torchaudio's, and their decoders."""

import torch

from attnfast.decoding import Memory
from attnfast.integrations.adapter import Adapter, UnsupportedCall
from attnfast.integrations.fused_decoders import (
    LOOP,
    StepDropout,
    draw_masks,
    fusion_skip_reason,
    run_decoder,
)
from attnfast.integrations.helpers import attend_to_source
from attnfast.nn._fused_rnn import run_layer
from attnfast.nn._layer import Layer, RecurrentState
from attnfast.nn.stateful import CumulativeState, LocationAwareAttention
from attnfast.ops.arguments import length_mask


class LocationSensitive:
    """e = v · tanh(Q q + M h + U (F ∗ [α, C])), α the last weights, C the sum of all."""

    def forward(
        self, attention_hidden_state, memory, processed_memory, attention_weights_cat, mask
    ):
        conv, dense = self.location_layer.location_conv, self.location_layer.location_dense
        previous, coverage = attention_weights_cat.unbind(1)
        return attend_to_source(
            self, self.query_layer(attention_hidden_state), processed_memory, memory,
            inner(self.v).weight, mask=None if mask is None else ~mask,
            filters=inner(conv, "conv").weight, projection=inner(dense).weight,
            previous=previous, coverage=coverage,
        )  # fmt: skip


def inner(layer, name="linear_layer"):
    """Return the layer that NVIDIA's LinearNorm or ConvNorm holds."""
    return getattr(layer, name, layer)


def layers_of(self, memory, T, dropouts):
    """Return both layers of a decoder, or raise if no operator can run its loop over the steps."""
    attention, cells = self.attention_layer, (self.attention_rnn, self.decoder_rnn)
    drops = self.training and max(dropouts) > 0
    layers = [Layer.of_cells(x, attends_first=False) for x in cells]
    parts = [*cells, attention, self.linear_projection, self.gate_layer]
    first = memory.new_zeros(1, len(memory), cells[0].hidden_size)
    if reason := fusion_skip_reason(
        layers[0], T, memory, [first], attention, *parts, drops=drops, has_history=True
    ):
        raise UnsupportedCall(reason)
    return layers


def run_layers(self, layers, dropouts, memory, processed_memory, frames, lengths):
    """Return the steps of the layer that attends, those of the one that reads them, and outputs.

    The second changes nothing that the first reads: it runs on all steps of the first at once.
    Outputs are frames, gates and weights, time first.
    """
    attention, past = self.attention_layer, memory.new_zeros(memory.shape[:2])
    h, s = (memory.new_zeros(len(memory), x.weight_hh.shape[1]) for x in layers)
    terms = {
        "location_conv": inner(attention.location_layer.location_conv, "conv"),
        "location_proj": inner(attention.location_layer.location_dense),
        "channels": "both",
    }
    keys = Memory(
        processed_memory, memory, lengths.long(), score_vector=inner(attention.v).weight[0],
        score="tanh",
    )  # fmt: skip
    state = RecurrentState(h, h, history=CumulativeState(past, past))
    drawn = [StepDropout(p, self.training, x.shape[1]) for p, x in zip(dropouts, (h, s))]
    state_mask, upper_mask = draw_masks(frames.shape[1], h, drawn)
    steps = run_decoder(
        layers[0], frames, state, inner(attention.query_layer), keys,
        kind=LocationAwareAttention, terms=terms, dropout_state=state_mask,
    )  # fmt: skip
    above = torch.cat([steps.states, steps.contexts], -1)
    above = run_layer(layers[1], above, RecurrentState(s, s), dropout_state=upper_mask)
    joined = torch.cat([above.states, steps.contexts], -1).transpose(0, 1)
    gates = self.gate_layer(joined).squeeze(2)
    return steps, above, (self.linear_projection(joined), gates, steps.weights.transpose(0, 1))


class Decoder:
    """h = LSTM([P y; c], h), c = attend(h), s = LSTM([h; c], s), y = W [s; c] + b: torchaudio's."""

    def forward(self, memory, mel_specgram_truth, memory_lengths):
        frames = self._parse_decoder_inputs(mel_specgram_truth)
        dropouts = self.attention_dropout, self.decoder_dropout
        layers = layers_of(self, memory, len(frames), dropouts)
        frames = self.prenet(torch.cat([self._get_initial_frame(memory).unsqueeze(0), frames]))
        key, frames = self.attention_layer.memory_layer(memory), frames[:-1].transpose(0, 1)
        *_, outputs = run_layers(self, layers, dropouts, memory, key, frames, memory_lengths)
        return self._parse_decoder_outputs(*outputs)


class NvidiaDecoder:
    """NVIDIA's decoder has the same layers, and keeps the last step's states."""

    def forward(self, memory, decoder_inputs, memory_lengths):
        frames = self.parse_decoder_inputs(decoder_inputs)
        dropouts = self.p_attention_dropout, self.p_decoder_dropout
        layers = layers_of(self, memory, len(frames), dropouts)
        frames = self.prenet(torch.cat([self.get_go_frame(memory).unsqueeze(0), frames]))
        mask = ~length_mask(memory_lengths, memory.shape[1])
        self.initialize_decoder_states(memory, mask=mask)
        key, frames = self.processed_memory, frames[:-1].transpose(0, 1)
        steps, above, outputs = run_layers(
            self, layers, dropouts, memory, key, frames, memory_lengths
        )
        self.attention_hidden, self.attention_cell = steps.states[:, -1], steps.cells[:, -1]
        self.decoder_hidden, self.decoder_cell = above.states[:, -1], above.cells[:, -1]
        self.attention_weights, self.attention_weights_cum = (
            steps.weights[:, -1], steps.history.coverage
        )  # fmt: skip
        self.attention_context = steps.contexts[:, -1]
        return self.parse_decoder_outputs(*[list(x.unbind(0)) for x in outputs])


def example(attention, draw):
    """Decode two batches, as the decoder does: it projects the memory and keeps the weights."""
    width = inner(attention.memory_layer).in_features
    for lengths in draw.sources((5, 2, 4), (3, 3)):
        B, Tk = len(lengths), max(lengths)
        memory, mask = draw(B, Tk, width), ~draw.seen(lengths, Tk)
        processed = attention.memory_layer(memory)
        history = draw(B, 2, Tk)
        for seen in (mask, mask, torch.zeros_like(mask)):
            query = draw(B, inner(attention.query_layer).in_features)
            context, weights = attention(query, memory, processed, history, seen)
            yield context, weights
            history = torch.stack([weights, history[:, 1] + weights], 1)


def speak(decoder, draw):
    """Call a decoder by teacher forcing."""
    for lengths in draw.sources((5, 2, 4), (3, 3)):
        B, Tk = len(lengths), max(lengths)
        for T in draw.steps(4, 1, 2):
            memory = draw(B, Tk, decoder.encoder_embedding_dim)
            frames = draw(B, inner(decoder.prenet.layers[0]).in_features, T)
            yield decoder(memory, frames, draw.numbers(*lengths))


#: The attributes that NVIDIA's decoder carries from step to step; every target begins with zeros.
STATE = [
    "attention_hidden", "attention_cell", "decoder_hidden", "decoder_cell", "attention_weights",
    "attention_weights_cum", "attention_context", "memory", "mask",
]  # fmt: skip
EMPTY = "a source without frames has weights 0 instead of NaN"
DISTRIBUTIONS = ["torchaudio"]
ADAPTERS = [
    Adapter(
        name=name,
        implementation=LocationSensitive,
        classes=[cls],
        parameters=[
            *(f"{layer}{linear}.weight" for layer in ("query_layer", "memory_layer", "v")),
            f"location_layer.location_conv{conv}.weight",
            f"location_layer.location_dense{linear}.weight",
        ],
        example=example,
        known_attributes=["data", "score_mask_value"],
        note=EMPTY,
    )
    for name, cls, linear, conv in (
        ("Tacotron 2's attention", "Attention", ".linear_layer", ".conv"),
        ("torchaudio's Tacotron 2 attention", "torchaudio.models.tacotron2._Attention", "", ""),
    )
]
ADAPTERS += [
    Adapter(
        name=name,
        implementation=implementation,
        classes=[cls],
        parameters=[
            *("prenet.*", "attention_rnn.*", "attention_layer.*", "decoder_rnn.*"),
            *("linear_projection.*", "gate_layer.*"),
        ],
        known_attributes=["data", "score_mask_value", *STATE],
        attention="attention_layer",
        example=speak,
        weight_scale=4.0,  # a recurrence amplifies rounding errors
        note=f"{EMPTY}; {LOOP}",
    )
    for name, implementation, cls in (
        ("Tacotron 2's decoder", NvidiaDecoder, "Decoder"),
        ("torchaudio's Tacotron 2 decoder", Decoder, "torchaudio.models.tacotron2._Decoder"),
    )
]
