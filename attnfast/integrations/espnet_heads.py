"""ESPnet's attention with heads, each of which has layers of its own."""

from functools import partial

import torch
import torch.nn.functional as F

from attnfast.integrations.espnet import adapter, begin_step, lengths_of
from attnfast.integrations.espnet_location import uniform
from attnfast.integrations.serve import attend, keep_in_graph, together


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
    context, weights = attend(self, query, key, value, weight, lengths=lengths_of(self), **more)
    return self.mlp_o(keep_in_graph(context.flatten(1), *(g.bias for g in scores))), list(
        weights.unbind(1)
    )


def located(self, states, lengths, z, previous, scale):
    """The same, with features of the weights of the step before from filters of any width."""

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


class Location:
    """e = s (g · tanh(K h + Q z + b + U (F ∗ α)) + a)."""

    def forward(self, enc_hs_pad, enc_hs_len, dec_z, att_prev, scaling=2.0, **kwargs):
        return located(self, enc_hs_pad, enc_hs_len, dec_z, att_prev, scaling)


class Resolutions:
    """The same with s = 1 / √d and filters of a width of their own in every head."""

    def forward(self, enc_hs_pad, enc_hs_len, dec_z, att_prev, **kwargs):
        return located(self, enc_hs_pad, enc_hs_len, dec_z, att_prev, self.scaling)


DOT = [f"{name}.weight" for name in ("mlp_q.*", "mlp_k.*", "mlp_v.*", "mlp_o")] + ["mlp_q.*.bias"]
ADD = [*DOT, "gvec.*.weight", "gvec.*.bias"]
LOC = [*ADD, "loc_conv.*.weight", "mlp_att.*.weight"]
ADAPTERS = [
    adapter("AttMultiHeadDot", Heads, DOT),
    adapter("AttMultiHeadAdd", Heads, ADD),
    adapter("AttMultiHeadLoc", Location, LOC, dtype=torch.float32, larger=4),
    adapter("AttMultiHeadMultiResLoc", Resolutions, LOC, dtype=torch.float32, larger=4),
]
