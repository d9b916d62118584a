"""ESPnet's attention with a memory of its weights: location-aware, recurrent."""

import torch
import torch.nn.functional as F

from attnfast.integrations.cache import cached_per_source
from attnfast.integrations.espnet import SCORED, adapter, begin, call, example, lengths_of, score

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
    """f = the state of an LSTM on what F finds most of in α, F ∗ α."""

    def forward(self, enc_hs_pad, enc_hs_len, dec_z, att_prev_states, scaling=2.0):
        query = self.mlp_dec(begin(self, enc_hs_pad, enc_hs_len, dec_z))
        zeros = self.enc_h.new_zeros(len(query), self.att_dim)
        previous, state = att_prev_states or (uniform(self), (zeros, zeros))
        found = F.relu(self.loc_conv(previous[:, None, None]))
        state = self.att_lstm(F.max_pool2d(found, (1, self.h_length)).flatten(1), state)
        context, weights = score(self, query + state[0], scaling)
        return context, (weights, state)


def windowed(attention, draw, call=call):
    """Call it as the others, and one source alone within windows."""
    yield from example(attention, draw, call)
    attention.reset()
    for last in (0, 3, 5):
        z, states = draw(1, attention.dunits), draw(1, 7, attention.mlp_enc.in_features)
        yield call(attention, draw, states, [7], z, None, last_attended_idx=last)


ADAPTERS = [
    adapter("AttLoc", Location, LOCATED, example=windowed),
    adapter("AttLocRec", RecurrentLocation, RECURRENT, dtype=torch.float32),
    adapter(
        "AttLoc2D",
        Location,
        LOCATED,
        why_not=lambda attention: "its filters see more rows of weights than the last",
    ),
]
