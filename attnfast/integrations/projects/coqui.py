"""The attention of Coqui's (and Mozilla's) Tacotrons, and Tacotron 2's decoder."""

import torch
from torch.nn.functional import pad

from attnfast.decoding import Memory
from attnfast.integrations.adapter import Adapter, UnsupportedCall
from attnfast.integrations.fused_decoders import (
    LOOP,
    StepDropout,
    apply_mask,
    draw_masks,
    fusion_skip_reason,
    linear_of,
    run_decoder,
)
from attnfast.integrations.helpers import attend_to_source, is_plain, keep_in_graph
from attnfast.integrations.own_loop import own_loop
from attnfast.nn._fused_rnn import run_layer
from attnfast.nn._layer import Layer, RecurrentState
from attnfast.nn.stateful import CumulativeState, LocationAwareAttention
from attnfast.ops.coverage import NORMALISATIONS


class Original:
    """e = v · tanh(Q q + M h + U (F ∗ [α, C])) + b, U and F for location-sensitive attention.

    Weights are a softmax or normalised sigmoids. Forward attention is the project's own, on our
    weights. Windows at inference are left to its own code.
    """

    def forward(self, query, inputs, processed_inputs, mask):
        if self.norm not in NORMALISATIONS or (self.windowing and not self.training):
            raise UnsupportedCall(
                "its norm is not known, or its weights have windows in evaluation"
            )
        terms, bias = {}, self.v.linear_layer.bias
        if self.norm == "sigmoid":
            terms = {"normalisation": "sigmoid", "bias": bias.view(1, 1, 1)}
        if self.location_attention:
            terms |= {
                "filters": self.location_layer.location_conv1d.weight,
                "projection": self.location_layer.location_dense.linear_layer.weight,
                "previous": self.attention_weights,
                "coverage": self.attention_weights_cum.clone(),  # the project changes it
            }
        context, weights = attend_to_source(
            self, self.query_layer(query), processed_inputs, None if self.forward_attn else inputs,
            self.v.linear_layer.weight, mask=mask, **terms,
        )  # fmt: skip
        if self.location_attention:
            self.update_location_attention(weights)
        if self.forward_attn:
            self.alpha = weights = self.apply_forward_attention(weights)
            context = torch.bmm(weights.unsqueeze(1), inputs).squeeze(1)
        self.attention_weights = weights
        if self.forward_attn and self.trans_agent:
            self.u = torch.sigmoid(self.ta(torch.cat([context, query.squeeze(1)], -1)))
        return keep_in_graph(context, bias)


def loop_skip_reason(decoder):
    """Return why the operator does not support a decoder, or None."""
    attention = decoder.attention
    if not getattr(attention, "location_attention", False) or attention.forward_attn:
        return "its attention is not location-sensitive, or it is forward attention"
    if attention.norm not in NORMALISATIONS:
        return f"the norm {attention.norm!r} of its attention is not known"
    return None


def layers_of(self, T, inputs):
    """Return both layers of a decoder and the dropouts of a step: of h and c, of s, of its end.

    Raise if no operator can run its loop over the frames.
    """
    attention, cells = self.attention, (self.attention_rnn, self.decoder_rnn)
    layers = [Layer.of_cells(x, attends_first=False) for x in cells]
    reason = loop_skip_reason(self)
    if attention.windowing and not attention.training:
        reason = "its weights have windows in evaluation"
    if reason:
        raise UnsupportedCall(reason)
    dropout, *rest = self.stopnet
    if not is_plain(self.stopnet, torch.nn.Sequential) or not is_plain(dropout, torch.nn.Dropout):
        raise UnsupportedCall("its stop network is not a dropout and a layer")
    size, frame = cells[1].hidden_size, self.linear_projection.linear_layer.out_features
    dropouts = [
        StepDropout(self.p_attention_dropout, self.training, times=2),
        StepDropout(self.p_decoder_dropout, self.training, size),
        StepDropout.of(dropout, size + frame),
    ]
    first = inputs.new_zeros(1, len(inputs), cells[0].hidden_size)
    if reason := fusion_skip_reason(
        layers[0], T, inputs, [first], attention, *cells, attention, self.linear_projection, *rest,
        drops=any(x.is_active for x in dropouts), has_history=True,
    ):  # fmt: skip
        raise UnsupportedCall(reason)
    return layers, dropouts


def attended(self, layer, frames, inputs, processed, mask, **masks):
    """Run the layer that attends over all frames.

    The bias of the score, which changes a sigmoid, is a feature whose tanh is 1 at every key.
    """
    attention, past = self.attention, inputs.new_zeros(inputs.shape[:2])
    v, location = attention.v.linear_layer, attention.location_layer
    last = (0, 0, 0, 1)  # a row of zeros
    terms = {
        "location_conv": location.location_conv1d, "channels": "both",
        "location_proj": linear_of(pad(location.location_dense.linear_layer.weight, last)),
        "normalisation": attention.norm,
    }  # fmt: skip
    saturated = 20.0 if frames.dtype == torch.float64 else 10.0
    keys = Memory(
        pad(processed, (0, 1), value=saturated), inputs,
        mask=None if mask is None else mask.unsqueeze(1),
        score_vector=torch.cat([v.weight[0], v.bias]), score="tanh",
    )  # fmt: skip
    h = frames.new_zeros(len(inputs), self.attention_rnn.hidden_size)
    state = RecurrentState(h, h, history=CumulativeState(past, past))
    query = linear_of(pad(attention.query_layer.linear_layer.weight, last))
    return run_decoder(
        layer, frames, state, query, keys, kind=LocationAwareAttention, terms=terms, **masks
    )


class Decoder:
    """h = LSTM([P y; c], h), c = attend(h), s = LSTM([h; c], s), y = W [s; c] + b.

    Dropout also reaches the cell state of the first layer. The second changes nothing that the
    first reads: it runs on all steps of the first at once, and so do the outputs.
    """

    def forward(self, inputs, memories, mask):
        frames = self._reshape_memory(memories)
        layers, dropouts = layers_of(self, len(frames), inputs)
        start = self.get_go_frame(inputs).unsqueeze(0)
        frames = self.prenet(self._update_memory(torch.cat([start, frames])))[:-1].transpose(0, 1)
        self._init_states(inputs, mask=mask)
        self.attention.init_states(inputs)
        h = frames.new_zeros(len(inputs), self.attention_rnn.hidden_size)
        first_masks, upper_mask, stop_mask = draw_masks(frames.shape[1], h, dropouts)
        state_mask, cell_mask = (None, None) if first_masks is None else first_masks
        steps = attended(
            self, layers[0], frames, inputs, self.processed_inputs, mask,
            dropout_state=state_mask, dropout_cell=cell_mask,
        )  # fmt: skip
        s = frames.new_zeros(len(inputs), self.decoder_rnn.hidden_size)
        joined = torch.cat([steps.states, steps.contexts], -1)
        upper = run_layer(layers[1], joined, RecurrentState(s, s), dropout_state=upper_mask)
        made = self.linear_projection(torch.cat([upper.states, steps.contexts], -1))
        ends = torch.cat([upper.states, made], -1)
        ends = ends.detach() if self.separate_stopnet else ends
        ends = self.stopnet[1](apply_mask(ends, stop_mask))
        self.query, self.attention_rnn_cell_state = steps.states[:, -1], steps.cells[:, -1]
        self.decoder_hidden, self.decoder_cell = upper.states[:, -1], upper.cells[:, -1]
        self.context = steps.contexts[:, -1]
        self.attention.attention_weights = steps.weights[:, -1]
        self.attention.attention_weights_cum = steps.history.coverage
        shown = made[..., : self.r * self.frame_channels], ends.squeeze(2), steps.weights
        outputs, stop_tokens, weights = self._parse_outputs(*[x.unbind(1) for x in shown])
        return outputs, weights, stop_tokens


def speak(decoder, draw):
    """Call a decoder by teacher forcing."""
    decoder.train(decoder.training or bool(decoder.attention.windowing))
    for lengths in draw.sources((5, 2, 4), (3, 3)):
        B, Tk = len(lengths), max(lengths)
        for T in draw.steps(4, 1, 2):
            inputs = draw(B, Tk, decoder.encoder_embedding_dim)
            frames = draw(B, T * decoder.r, decoder.frame_channels)
            yield decoder(inputs, frames, draw.seen(lengths, Tk))


def example(attention, draw):
    """Decode two batches and, as at inference, one sentence without a mask."""
    attention.train(attention.training or bool(attention.windowing))  # windows have no gradient
    for lengths in draw.sources((5, 2, 4), (3, 3), (6,)):
        B, Tk = len(lengths), max(lengths)
        inputs = draw(B, Tk, attention.inputs_layer.linear_layer.in_features)
        mask = draw.seen(lengths, Tk) if B > 1 else None
        attention.init_states(inputs)
        processed = attention.preprocess_inputs(inputs)
        for _ in range(3):
            query = draw(B, attention.query_layer.linear_layer.in_features)
            yield attention(query, inputs, processed, mask), attention.attention_weights


EMPTY = "a source without frames has weights 0 instead of NaN"
DISTRIBUTIONS = ["coqui-tts"]
DECODER = Adapter(
    name="Coqui's Tacotron 2 decoder",
    implementation=Decoder,
    classes=["TTS.tts.layers.tacotron.tacotron2.Decoder"],
    parameters=[
        *("prenet.*", "attention_rnn.*", "attention.*", "decoder_rnn.*"),
        *("linear_projection.*", "stopnet.*"),
    ],
    attention="attention",
    example=speak,
    weight_scale=4.0,  # a recurrence amplifies rounding errors
    skip_reason=loop_skip_reason,
    note=f"{EMPTY}; {LOOP}",
    dtype=torch.float32,
)
ADAPTERS = [
    Adapter(
        name="Coqui's OriginalAttention",
        implementation=Original,
        classes=["TTS.tts.layers.tacotron.attentions.OriginalAttention"],
        parameters=[
            *(f"{name}.linear_layer.weight" for name in ("query_layer", "inputs_layer", "v")),
            "v.linear_layer.bias",
        ],
        optional=[
            "location_layer.location_conv1d.weight",
            "location_layer.location_dense.linear_layer.weight",
            *("ta.weight", "ta.bias"),
        ],
        example=example,
        # of masks, and of the windows that its own code makes
        known_attributes=["data", "_mask_value", "win_idx", "win_back", "win_front"],
        note=EMPTY,
        dtype=torch.float32,
    ),
    own_loop(DECODER, "forward"),
    DECODER,
]
