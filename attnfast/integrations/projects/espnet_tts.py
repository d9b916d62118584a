"""ESPnet's Tacotron 2: the decoder of speech synthesis."""

import torch
from torch.nn import functional as F

from attnfast.decoding import Memory
from attnfast.integrations.adapter import Adapter, UnsupportedCall
from attnfast.integrations.fused_decoders import (
    LOOP,
    StepDropout,
    apply_mask,
    draw_masks,
    fusion_skip_reason,
    run_decoder,
)
from attnfast.integrations.helpers import keep_in_graph
from attnfast.integrations.own_loop import own_loop
from attnfast.integrations.projects.espnet import (
    EMPTY,
    KNOWN,
    begin,
    history_of,
    lengths_of,
)
from attnfast.nn._fused_rnn import run_layer
from attnfast.nn._layer import Layer, RecurrentState
from attnfast.nn.stateful import CumulativeState


def draw_decoder_masks(self, steps, like):
    """Return the prenet's layers with their dropout masks, and the zoneout masks of each cell.

    The prenet drops features in evaluation too.
    """
    prenet = list(self.prenet.prenet) if self.prenet else []
    drawn = draw_masks(
        steps, like,
        [
            *(StepDropout(self.prenet.dropout_rate, True, x[0].out_features) for x in prenet),
            *(StepDropout(
                  getattr(x, "zoneout_rate", 0), x.training, times=2, zoneout=hasattr(x, "cell")
              ) for x in self.lstm),
        ],
    )  # fmt: skip
    names, cell_masks = ("dropout_state", "dropout_cell"), drawn[len(prenet) :]
    zoneouts = [dict(zip(names, () if masks is None else masks)) for masks in cell_masks]
    return list(zip(prenet, drawn)), zoneouts


def run_first_layer(self, layer, frames, zoneout):
    """Return states, contexts and weights of the layer that attends, at every frame.

    The first frame reads uniform weights; they are not part of the sum that later frames read.
    """
    attention = self.att
    zeros = frames.new_zeros(len(frames), self.lstm[0].hidden_size)
    vector = keep_in_graph(attention.gvec.weight[0], attention.gvec.bias)
    keys = Memory(
        attention.pre_compute_enc_h, attention.enc_h, lengths_of(attention), score_vector=vector,
        score="tanh",
    )  # fmt: skip
    history, options = history_of(attention)
    options["terms"]["channels"] = "coverage" if self.cumulate_att_w else "previous"
    state, steps = RecurrentState(zeros, zeros, history=history), []
    for part in (slice(0, 1), slice(1, None)):
        masks = {name: x[:, part] for name, x in zoneout.items()}
        steps.append(
            run_decoder(
                layer, frames[:, part], state, attention.mlp_dec, keys, 2.0,
                zoneout=bool(masks), **masks, **options,
            )
        )  # fmt: skip
        last = [x[:, -1] for x in (steps[-1].states, steps[-1].cells, steps[-1].weights)]
        state = RecurrentState(*last[:2], history=CumulativeState(last[2], last[2]))
    return [torch.cat(x, 1) for x in zip(*((x.states, x.contexts, x.weights) for x in steps))]


class Decoder:
    """c = attend(z¹), z¹ = LSTM([c; P y], z¹); layers above it; W [zᴸ; c], or W zᴸ."""

    def forward(self, hs, hlens, ys):
        r, attention, prenet, cells = self.reduction_factor, self.att, self.prenet, self.lstm
        frames = F.pad(ys[:, r - 1 :: r], (0, 0, 1, -1))  # each step reads the frame before
        T, zeros = frames.shape[1], hs.new_zeros(len(hs), cells[0].hidden_size)
        layers = [Layer.of_cells(getattr(x, "cell", x)) for x in cells]
        parts = [cells, attention, self.feat_out, self.prob_out, *([prenet] if prenet else ())]
        zoned = any(hasattr(x, "zoneout_rate") for x in cells)
        if reason := fusion_skip_reason(
            layers[0], T, hs, [zeros[None]], attention, *parts, drops=zoned, has_history=True
        ):
            raise UnsupportedCall(reason)
        attention.reset()
        begin(attention, hs, list(map(int, hlens)), None)
        prenet_layers, zoneouts = draw_decoder_masks(self, T, zeros)
        for layer, mask in prenet_layers:
            frames = apply_mask(layer(frames), mask)
        # its cells read [context; frame], the operator's [frame; context]
        first = layers[0]._replace(weight_ih=layers[0].weight_ih.roll(-hs.shape[2], 1))
        states, contexts, weights = run_first_layer(self, first, frames, zoneouts[0])
        for layer, masks in zip(layers[1:], zoneouts[1:]):  # they do not affect the queries
            above = RecurrentState(zeros, zeros)
            states = run_layer(layer, states, above, zoneout=bool(masks), **masks).states
        states = torch.cat([states, contexts], -1) if self.use_concate else states
        before = self.feat_out(states).unflatten(2, (self.odim, -1)).transpose(1, 2)
        before = before.flatten(2).contiguous()
        after = before if self.postnet is None else before + self.postnet(before)
        before, after = (x.transpose(1, 2) for x in (before, after))
        if self.output_activation_fn is not None:
            before, after = self.output_activation_fn(before), self.output_activation_fn(after)
        return after, before, self.prob_out(states).flatten(1), weights


def speak(decoder, draw):
    """Call it by teacher forcing, with targets of whole multiples of the reduction factor."""
    for lengths in draw.sources((5, 2, 4), (3, 3)):
        B, Tk = len(lengths), max(lengths)
        for T in draw.steps(4, 1, 2):
            hs = draw(B, Tk, decoder.idim)
            ys = draw(B, T * decoder.reduction_factor, decoder.odim)
            yield decoder(hs, draw.numbers(*lengths), ys)


def decoder_skip_reason(decoder):
    """Return why no operator runs a decoder's loop, or None."""
    kind = type(decoder.att).__name__
    return None if kind == "AttLoc" else f"no operator runs whole targets of {kind}"


DISTRIBUTIONS = ["espnet"]
#: Where a release keeps the decoder: up to 202511, and since 202609.
PLACES = [
    f"{package}.nets.pytorch_backend.tacotron2.decoder" for package in ("espnet", "espnet2.legacy")
]
DECODER = Adapter(
    name="ESPnet's tacotron2.Decoder",
    implementation=Decoder,
    classes=[f"{place}.Decoder" for place in PLACES],
    parameters=["lstm.*", "att.*", "feat_out.weight", "prob_out.*"],
    optional=["prenet.prenet.*.0.*", "postnet.*"],
    known_attributes=[*KNOWN, "use_att_extra_inputs"],
    attention="att",
    example=speak,
    weight_scale=4.0,  # a recurrence amplifies rounding errors
    skip_reason=decoder_skip_reason,
    note=f"{EMPTY}; {LOOP}",
)
ADAPTERS = [
    own_loop(DECODER, "forward"),
    DECODER,
]
