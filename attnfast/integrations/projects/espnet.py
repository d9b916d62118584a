"""ESPnet's attention, all thirteen classes, and the recurrent decoder that has them."""

import copy
import random
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F

from attnfast.decoding import Memory
from attnfast.integrations.adapter import Adapter, UnsupportedCall
from attnfast.integrations.cache import TensorSnapshot, cached_per_source
from attnfast.integrations.fused_decoders import (
    LOOP,
    StepDropout,
    apply_mask,
    draw_masks,
    fusion_skip_reason,
    run_decoder,
)
from attnfast.integrations.helpers import (
    attend_to_source,
    keep_in_graph,
    promote_dtype,
    together,
)
from attnfast.integrations.search_model import DecoderParts
from attnfast.nn._fused_rnn import run_layer
from attnfast.nn._layer import Layer, RecurrentState
from attnfast.nn.stateful import CoverageAttention, CumulativeState, LocationAwareAttention
from attnfast.ops.arguments import length_mask

KEYS = ["mlp_enc.weight", "mlp_enc.bias", "mlp_dec.weight"]

SCORED = [*KEYS, "gvec.weight", "gvec.bias"]


def begin(self, states, lengths, z, key=None):
    """Store the attributes that the project stores for a source; return the decoder's state."""
    if self.pre_compute_enc_h is None or getattr(self, "han_mode", False):
        self.enc_h, self.h_length = states, states.size(1)
        self.pre_compute_enc_h = (key or self.mlp_enc)(states)
    return begin_step(self, states, lengths, z)


def begin_step(self, states, lengths, z):
    if self.mask is None:
        self.mask = ~length_mask(torch.as_tensor(lengths), states.size(1), states)
    return states.new_zeros(len(states), self.dunits) if z is None else z.view(-1, self.dunits)


def lengths_of(self):
    """Return the lengths that the project's mask stands for."""
    return cached_per_source(self, "lengths", lambda: (~self.mask).sum(1), self.mask)


def score(self, query, scale, **more):
    """Return context and weights, e = s (g · tanh(W h + b + query + ...) + a)."""
    more = {"value": self.enc_h, "lengths": lengths_of(self), "scale": scale, **more}
    context, weights = attend_to_source(
        self, query, self.pre_compute_enc_h, score_vector=self.gvec.weight, **more
    )
    if context is not None:
        context = keep_in_graph(promote_dtype(context, weights, self.enc_h), self.gvec.bias)
    return context, weights


class Dot:
    """e = s tanh(W h + b) · tanh(V z + c)."""

    def forward(self, enc_hs_pad, enc_hs_len, dec_z, att_prev, scaling=2.0):
        z = begin(self, enc_hs_pad, enc_hs_len, dec_z, lambda h: torch.tanh(self.mlp_enc(h)))
        query, more = torch.tanh(self.mlp_dec(z)), {"lengths": lengths_of(self), "scale": scaling}
        context, weights = attend_to_source(self, query, self.pre_compute_enc_h, self.enc_h, **more)
        return promote_dtype(context, weights, self.enc_h), weights


class Additive:
    """e = s (g · tanh(W h + b + V z) + a)."""

    def forward(self, enc_hs_pad, enc_hs_len, dec_z, att_prev, scaling=2.0):
        return score(self, self.mlp_dec(begin(self, enc_hs_pad, enc_hs_len, dec_z)), scaling)


def call(attention, draw, *args, **more):
    return attention(*args, **more)


def example(attention, draw, call=call):
    """Call any of ESPnet's classes, which cache the first source except in han_mode."""
    for lengths in draw.sources([5, 2, 4], [3, 6]):
        attention.reset()
        lengths = list(lengths)
        width = attention.eprojs if hasattr(attention, "eprojs") else attention.eunits
        shape, past = (len(lengths), max(lengths), width), None
        yield call(attention, draw, draw(*shape), lengths, None, None)
        for scaling in (2.0, 1.5, 2.0):
            inputs = draw(*shape), lengths, draw(len(lengths), attention.dunits), past
            context, past = call(attention, draw, *inputs, scaling=scaling)
            yield context, list(past) if isinstance(past, list) else past  # ESPnet's list grows


#: Where a release keeps its classes: up to 202511, and since 202609.
PLACES = [
    f"{package}.nets.pytorch_backend.rnn.attentions" for package in ("espnet", "espnet2.legacy")
]


EMPTY = "a source without frames has weights 0, not NaN"


#: Attributes that a copy reads: sizes, and the decorator of its mask.
KNOWN = ["att_dim", "att_dim_k", "att_dim_v", "_fn"]


def adapter(cls, methods, parameters, **more):
    more = {"example": example, "note": EMPTY, **more}
    classes = [f"{place}.{cls}" for place in PLACES]
    return Adapter(
        name=f"ESPnet's {cls}", implementation=methods, classes=classes, parameters=parameters,
        known_attributes=KNOWN, **more,
    )  # fmt: skip


# ---- a memory of the weights: location-aware, recurrent ------------------------------------------

LOCATED = [*SCORED, "loc_conv.weight", "mlp_att.weight"]

RECURRENT = [*SCORED, "loc_conv.weight", "att_lstm.weight_ih", "att_lstm.weight_hh"]


def uniform(self):
    """Return the weights before the first step: the same for every frame."""
    return (~self.mask).to(self.enc_h) / lengths_of(self).clamp(min=1).to(self.enc_h).unsqueeze(1)


def located(self, query, scale, previous, **more):
    """Return context and weights, the score with features U (F ∗ previous)."""
    kernel, projection = self.loc_conv.weight, self.mlp_att.weight
    filters = cached_per_source(
        self, "filters", lambda: kernel.squeeze(2), kernel, source=self.enc_h
    )
    more = {"filters": filters, "projection": projection, "previous": previous, **more}
    return score(self, query, scale, **more)


def window(self, last=None, backward=1, forward=3):
    """Return a mask of the frames around the last attended one, or None without one."""
    if last is None:
        return None
    frames = torch.arange(self.h_length, device=self.enc_h.device).unsqueeze(0)
    return (frames >= last - backward) & (frames < last + forward)


class Location:
    """f = U (F ∗ α), α the weights of the step before."""

    def forward(self, enc_hs_pad, enc_hs_len, dec_z, att_prev, scaling=2.0,
                last_attended_idx=None, backward_window=1, forward_window=3):  # fmt: skip
        query = self.mlp_dec(begin(self, enc_hs_pad, enc_hs_len, dec_z))
        mask = window(self, last_attended_idx, backward_window, forward_window)
        previous = uniform(self) if att_prev is None else att_prev
        return located(self, query, scaling, previous, mask=mask)


class RecurrentLocation:
    """f = the state of an LSTM, which reads the maximum over the frames of max(0, F ∗ α)."""

    def forward(self, enc_hs_pad, enc_hs_len, dec_z, att_prev_states, scaling=2.0):
        query = self.mlp_dec(begin(self, enc_hs_pad, enc_hs_len, dec_z))
        zeros = self.enc_h.new_zeros(len(query), self.att_dim)
        previous, state = att_prev_states or (uniform(self), (zeros, zeros))
        features = F.relu(self.loc_conv(previous[:, None, None]))
        state = self.att_lstm(F.max_pool2d(features, (1, self.h_length)).flatten(1), state)
        context, weights = score(self, query + state[0], scaling)
        return context, (weights, state)


def windowed(attention, draw, call=call):
    """Call it as the others, and one source alone within windows."""
    yield from example(attention, draw, call)
    attention.reset()
    for last in (0, 3, 5):
        z, states = draw(1, attention.dunits), draw(1, 7, attention.mlp_enc.in_features)
        yield call(attention, draw, states, [7], z, None, last_attended_idx=last)


# ---- coverage: the sum of all weights before, plain or convolved ---------------------------------


class Total:
    """The sum of a list of tensors that grows by one at every step."""

    def __init__(self):
        self.seen, self.sum = [], 0

    def __call__(self, terms):
        grown = len(terms) >= len(self.seen)
        if not grown or not all(seen.is_unchanged(x) for seen, x in zip(self.seen, terms)):
            self.seen, self.sum = [], 0
        for x in terms[len(self.seen) :]:
            self.sum = self.sum + x
            self.seen.append(TensorSnapshot(x))
        return self.sum


def total(self, weights):
    """Return the sum of all weights before, of a source and its mask."""
    return cached_per_source(self, "total", Total, self.mask, source=self.enc_h)(weights)


class Coverage:
    """f = u C + c, C the sum of all weights before."""

    def forward(self, enc_hs_pad, enc_hs_len, dec_z, att_prev_list, scaling=2.0):
        query = self.mlp_dec(begin(self, enc_hs_pad, enc_hs_len, dec_z)) + self.wvec.bias
        att_prev_list = [uniform(self)] if att_prev_list is None else att_prev_list
        weight = self.wvec.weight
        feature = cached_per_source(
            self, "feature", lambda: weight.view(-1), weight, source=self.enc_h
        )
        history = {"coverage": total(self, att_prev_list), "coverage_weight": feature}
        context, weights = score(self, query, scaling, **history)
        att_prev_list += [weights]  # the project's own list
        return context, att_prev_list


class CoverageLocation:
    """f = U (F ∗ C)."""

    def forward(self, enc_hs_pad, enc_hs_len, dec_z, att_prev_list, scaling=2.0):
        query = self.mlp_dec(begin(self, enc_hs_pad, enc_hs_len, dec_z))
        att_prev_list = [uniform(self)] if att_prev_list is None else att_prev_list
        context, weights = located(self, query, scaling, total(self, att_prev_list))
        att_prev_list += [weights]
        return context, att_prev_list


WEIGHTED = [*SCORED, "wvec.weight", "wvec.bias"]


# ---- forward attention: plain, with a transition agent, with durations ---------------------------


def forwarded(self, odds, query, past, scale, mask=None):
    """Return context and weights ∝ max(w odds, 1e-6), w a softmax, the first α on frame 0."""
    if past is None:
        past = F.pad(self.enc_h.new_ones(len(self.enc_h), 1), (0, self.h_length - 1))
    _, weights = located(self, query, scale, past, mask=mask, value=None)
    weights = odds(past, F.pad(past, (1, 0))[:, :-1]) * weights
    weights = keep_in_graph(F.normalize(weights.clamp(min=1e-6), p=1, dim=1), self.gvec.bias)
    context = torch.bmm(weights.unsqueeze(1), self.enc_h).squeeze(1)
    return promote_dtype(context, weights, self.enc_h), weights


class Forward:
    """odds_j = α_j + α_j−1."""

    def forward(self, enc_hs_pad, enc_hs_len, dec_z, att_prev, scaling=1.0,
                last_attended_idx=None, backward_window=1, forward_window=3):  # fmt: skip
        query = self.mlp_dec(begin(self, enc_hs_pad, enc_hs_len, dec_z))
        mask = window(self, last_attended_idx, backward_window, forward_window)
        return forwarded(self, torch.add, query, att_prev, scaling, mask)


class TransitionAgent:
    """odds_j = u α_j + (1 − u) α_j−1, u made at the step before."""

    def forward(self, enc_hs_pad, enc_hs_len, dec_z, att_prev, out_prev, scaling=1.0,
                last_attended_idx=None, backward_window=1, forward_window=3):  # fmt: skip
        z, u = begin(self, enc_hs_pad, enc_hs_len, dec_z), self.trans_agent_prob
        mask = window(self, last_attended_idx, backward_window, forward_window)
        context, weights = forwarded(
            self, lambda stay, go: u * stay + (1 - u) * go, self.mlp_dec(z), att_prev, scaling, mask
        )
        self.trans_agent_prob = torch.sigmoid(self.mlp_ta(torch.cat([context, out_prev, z], 1)))
        return context, weights


class Durations:
    """odds_j = d_j α_j + (1 − d_j−1) α_j−1; with a window ESPnet's own code runs."""

    def forward(self, enc_hs_pad, enc_hs_len, trans_token, dec_z, att_prev, scaling=1.0,
                last_attended_idx=None, backward_window=1, forward_window=3):  # fmt: skip
        if last_attended_idx is not None:
            raise UnsupportedCall("durations have no window in attnfast")
        query, d = self.mlp_dec(begin(self, enc_hs_pad, enc_hs_len, dec_z)), trans_token.squeeze(-1)
        moves = 1 - F.pad(d, (1, 0))[:, :-1]
        return forwarded(self, lambda stay, go: d * stay + moves * go, query, att_prev, scaling)


def with_output(attention, draw, states, lengths, z, past, **more):
    odim = attention.mlp_ta.in_features - attention.eunits - attention.dunits
    return attention(states, lengths, z, past, draw(len(states), odim), **more)


def with_durations(attention, draw, states, lengths, z, past, **more):
    return attention(states, lengths, draw(*states.shape[:2], 1).sigmoid(), z, past, **more)


NOTE = "a source without frames has uniform weights, not NaN"

AGENT = [*LOCATED, "mlp_ta.weight", "mlp_ta.bias"]

AGENT_EXAMPLE = partial(windowed, call=with_output)

TOKEN = [*LOCATED, "pt_zero_linear.weight", "pt_zero_linear.bias"]

TOKEN_EXAMPLE = partial(example, call=with_durations)


# ---- heads, each of which has layers of its own --------------------------------------------------


def attended(self, states, lengths, z, **more):
    """Return the projected contexts of all heads and a list of their weights."""
    scores, stack = getattr(self, "gvec", ()), partial(torch.stack, dim=1)
    act = (lambda x: x) if scores else torch.tanh
    if self.pre_compute_k is None or self.pre_compute_v is None or self.han_mode:
        self.enc_h, self.h_length = states, states.size(1)
        key = stack([act(layer(states)) for layer in self.mlp_k])
        value = stack([layer(states) for layer in self.mlp_v])
        self.pre_compute_k, self.pre_compute_v = list(key.unbind(1)), list(value.unbind(1))
        together(self, "keys", self.pre_compute_k, states, lambda _: key)  # the one they are from
        together(self, "values", self.pre_compute_v, states, lambda _: value)
    z = begin_step(self, states, lengths, z)
    query = stack([act(layer(z)) for layer in self.mlp_q])
    key = together(self, "keys", self.pre_compute_k, self.enc_h, stack)
    value = together(self, "values", self.pre_compute_v, self.enc_h, stack)
    rows = [g.weight for g in scores] or None
    weight = rows and together(self, "weight", rows, self.enc_h, torch.cat)
    context, weights = attend_to_source(
        self, query, key, value, weight, lengths=lengths_of(self), **more
    )
    return self.mlp_o(keep_in_graph(context.flatten(1), *(g.bias for g in scores))), list(
        weights.unbind(1)
    )


def heads_located(self, states, lengths, z, previous, scale):
    """Attend with several heads and location features from filters of any width."""

    def padded(filters):
        width = max(x.size(-1) for x in filters)
        return torch.stack([F.pad(x.squeeze(2), [(width - x.size(-1)) // 2] * 2) for x in filters])

    z = begin_step(self, states, lengths, z)
    previous = [uniform(self)] * self.aheads if previous is None else list(previous)
    return attended(
        self, states, lengths, z, scale=scale, previous=torch.stack(previous, 1),
        filters=together(self, "filters", [x.weight for x in self.loc_conv], states, padded),
        projection=together(self, "projection", [x.weight for x in self.mlp_att], states),
    )  # fmt: skip


class Heads:
    """e = tanh(K h) · tanh(Q z + b) / √d, or (g · tanh(K h + Q z + b) + a) / √d."""

    def forward(self, enc_hs_pad, enc_hs_len, dec_z, att_prev, **kwargs):
        return attended(self, enc_hs_pad, enc_hs_len, dec_z, scale=self.scaling)


class HeadsLocation:
    """e = s (g · tanh(K h + Q z + b + U (F ∗ α)) + a)."""

    def forward(self, enc_hs_pad, enc_hs_len, dec_z, att_prev, scaling=2.0, **kwargs):
        return heads_located(self, enc_hs_pad, enc_hs_len, dec_z, att_prev, scaling)


class Resolutions:
    """Location-aware heads with s = 1 / √d, where every head has its own filter width."""

    def forward(self, enc_hs_pad, enc_hs_len, dec_z, att_prev, **kwargs):
        return heads_located(self, enc_hs_pad, enc_hs_len, dec_z, att_prev, self.scaling)


DOT = [f"{name}.weight" for name in ("mlp_q.*", "mlp_k.*", "mlp_v.*", "mlp_o")] + ["mlp_q.*.bias"]
ADD = [*DOT, "gvec.*.weight", "gvec.*.bias"]
LOC = [*ADD, "loc_conv.*.weight", "mlp_att.*.weight"]


# ---- the decoder of speech recognition -----------------------------------------------------------


def history_of(attention):
    """Return the history of a kind of attention before the first step, and its terms."""
    kind = type(attention).__name__
    if kind == "AttAdd":
        return None, {}
    first = uniform(attention)
    if kind == "AttCov":
        terms = {"coverage_weight": attention.wvec.weight.view(-1), "penalty": None}
        return CumulativeState(first, first), {"kind": CoverageAttention, "terms": terms}
    terms = {
        "location_conv": SimpleNamespace(weight=attention.loc_conv.weight.squeeze(2)),
        "location_proj": attention.mlp_att,
        "channels": "previous" if kind == "AttLoc" else "coverage",
    }
    return CumulativeState(first, first), {"kind": LocationAwareAttention, "terms": terms}


def prepare_source(decoder, attention, states, lengths):
    """Return a source's memory, the first state and make_attention's arguments."""
    attention.reset()
    begin(attention, states, list(map(int, lengths)), None)
    history, options = history_of(attention)
    key, zeros = attention.pre_compute_enc_h, states.new_zeros(len(states), decoder.dunits)
    key = key + attention.wvec.bias if hasattr(attention, "wvec") else key
    vector = attention.gvec.weight[0]
    memory = Memory(key, states, lengths_of(attention), score_vector=vector, score="tanh")
    state = RecurrentState(zeros, zeros if decoder.dtype == "lstm" else None, history=history)
    return memory, state, {"scale": 2.0, **options}


def encode(states, lengths, decoder):
    """Return the decoder's parts, the memory of encoder states and the first state."""
    if decoder.dlayers > 1:
        raise UnsupportedCall("its query is the state of the first of several layers")
    attention = copy.copy(decoder.att_list[0])  # whose attributes stay as they are
    memory, state, options = prepare_source(decoder, attention, states, lengths)
    layer, query = Layer.of_cells(decoder.decoder[0]), attention.mlp_dec
    parts = DecoderParts(layer, query, decoder.embed, decoder.output, decoder, attention=options)
    return parts, memory, state


class Decoder:
    """c = attend(h¹), h¹ = cell([y; c], h¹); layers above it; W hᴸ + b, or W [hᴸ; c] + b."""

    def forward(self, hs_pad, hlens, ys_in_pad, ys_in_lens, strm_idx=0):
        attention, (B, T) = self.att_list[0], ys_in_pad.shape
        layers = [Layer.of_cells(x) for x in self.decoder]
        parts, dropouts = [self.decoder, self.dropout_dec, attention], list(self.dropout_dec)
        zeros, plain = hs_pad.new_zeros(B, self.dunits), type(attention).__name__ == "AttAdd"
        if self.sampling_probability > 0:
            raise UnsupportedCall("it samples words of its input")
        drops = any(x.training and x.p > 0 for x in dropouts)
        if reason := fusion_skip_reason(
            layers[0],
            T,
            hs_pad,
            [zeros[None]],
            attention,
            *parts,
            drops=drops,
            has_history=not plain,
        ):
            raise UnsupportedCall(reason)
        memory, first, options = prepare_source(self, attention, hs_pad, hlens)
        embedded = self.dropout_emb(self.embed(ys_in_pad))
        for _ in range(T - 1):
            random.random()  # the random numbers of its own loop
        query_mask, *state_masks = draw_masks(
            T, zeros, [StepDropout.of(x) for x in (dropouts[0], *dropouts)]
        )
        start = first._replace(history=None)
        steps = run_decoder(
            layers[0], embedded, first, attention.mlp_dec, memory, dropout_query=query_mask,
            **options,
        )  # fmt: skip
        states = apply_mask(steps.states, state_masks[0])
        for layer, mask in zip(layers[1:], state_masks[1:]):  # they change no query
            states = apply_mask(run_layer(layer, states, start).states, mask)
        if self.context_residual:
            states = torch.cat([states, steps.contexts], -1)
        out = self.output(keep_in_graph(states, attention.gvec.bias))
        seen = length_mask(torch.as_tensor(ys_in_lens), T, out)
        return out.masked_fill_(~seen.unsqueeze(2), 0), ys_in_lens


def decode(decoder, draw):
    """Call it as recipes do, by teacher forcing."""
    for lengths in draw.sources((5, 2, 4), (3, 6)):
        B, Tk = len(lengths), max(lengths)
        source = draw(B, Tk, decoder.att_list[0].mlp_enc.in_features)
        for T in draw.steps(4, 1, 2):
            words = draw.words(decoder.embed.num_embeddings, B, T)
            ends = draw.numbers(*(T - i % T for i in range(B)))
            yield decoder(source, draw.numbers(*lengths), words, ends)


def decoder_skip_reason(decoder, kinds):
    """Return why the operator cannot run a decoder, or None."""
    if decoder.num_encs > 1 or len(decoder.att_list) > 1:
        return "it has several encoders or attention modules"
    if decoder.sampling_probability > 0:
        return "it samples words of its input"
    kind = type(decoder.att_list[0]).__name__
    return None if kind in kinds else f"no operator runs whole targets of {kind}"


DISTRIBUTIONS = ["espnet"]
ADAPTERS = [
    adapter("AttDot", Dot, [*KEYS, "mlp_dec.bias"]),
    adapter("AttAdd", Additive, SCORED),
    adapter("AttLoc", Location, LOCATED, example=windowed),
    adapter("AttLocRec", RecurrentLocation, RECURRENT, dtype=torch.float32),
    adapter(
        "AttLoc2D",
        Location,
        LOCATED,
        skip_reason=lambda attention: "its filters see more rows of weights than the last",
    ),
    adapter("AttCov", Coverage, WEIGHTED, dtype=torch.float32),
    adapter("AttCovLoc", CoverageLocation, LOCATED, dtype=torch.float32),
    adapter("AttForward", Forward, LOCATED, example=windowed, note=NOTE),
    adapter("AttForwardTA", TransitionAgent, AGENT, example=AGENT_EXAMPLE, note=NOTE),
    adapter("GDCAttLoc", Durations, TOKEN, example=TOKEN_EXAMPLE, note=NOTE),
    adapter("AttMultiHeadDot", Heads, DOT),
    adapter("AttMultiHeadAdd", Heads, ADD),
    adapter("AttMultiHeadLoc", HeadsLocation, LOC, dtype=torch.float32, weight_scale=4),
    adapter("AttMultiHeadMultiResLoc", Resolutions, LOC, dtype=torch.float32, weight_scale=4),
    *(
        Adapter(
            name=f"ESPnet's RNNDecoder{of_kind}",
            implementation=Decoder,
            classes=["espnet2.asr.decoder.rnn_decoder.RNNDecoder"],
            parameters=["embed.weight", "decoder.*", "output.*", "att_list.*"],
            known_attributes=[*KNOWN, "dlayers", "dtype", "num_encs", "random", "detach"],
            attention="att_list.0",
            example=decode,
            weight_scale=4.0,  # a recurrence amplifies rounding errors
            skip_reason=partial(decoder_skip_reason, kinds=kinds),
            search=encode,
            note=f"{EMPTY}; {LOOP}",
            dtype=dtype,
        )
        for of_kind, kinds, dtype in (
            ("", ("AttAdd", "AttLoc"), torch.float64),
            (" with coverage", ("AttCov", "AttCovLoc"), torch.float32),
        )
    ),
]
