"""ESPnet's attention without a convolution: dot, additive, coverage, and both with heads."""

from __future__ import annotations

import torch

from attnfast.hosts.host import register_host
from attnfast.hosts.recall import attend, recall, touch

MODULE = "espnet.nets.pytorch_backend.rnn.attentions"
EMPTY = "a source without frames has weights 0 instead of NaN"


def begin(self, states, lengths, z, key=None):
    """Keep what the host keeps of a source; return the decoder's state and which keys are seen."""
    if self.pre_compute_enc_h is None or self.han_mode:
        self.enc_h, self.h_length = states, states.size(1)
        self.pre_compute_enc_h = self.mlp_enc(states) if key is None else key(states)
    return state_of(self, states, lengths, z)


def state_of(self, states, lengths, z):
    if self.mask is None:
        ends = torch.as_tensor(lengths, device=states.device).unsqueeze(1)
        self.mask = torch.arange(states.size(1), device=states.device) >= ends
    return states.new_zeros(len(states), self.dunits) if z is None else z.view(-1, self.dunits)


def lengths_of(self):
    """Return the lengths that the host's mask stands for."""
    return recall(self, "lengths", lambda: (~self.mask).sum(1), self.mask)


def uniform(self):
    """Return the weights before the first step: the same for every frame."""
    return (~self.mask).to(self.enc_h) / lengths_of(self).to(self.enc_h).unsqueeze(1)


class Dot:
    """e = s tanh(W h + b) · tanh(V z + c)."""

    def forward(self, enc_hs_pad, enc_hs_len, dec_z, att_prev, scaling=2.0):
        z = begin(self, enc_hs_pad, enc_hs_len, dec_z, lambda h: torch.tanh(self.mlp_enc(h)))
        query = torch.tanh(self.mlp_dec(z))
        key = self.pre_compute_enc_h
        return attend(self, query, key, self.enc_h, lengths=lengths_of(self), scale=scaling)


class Additive:
    """e = s (g · tanh(W h + b + V z) + a)."""

    def forward(self, enc_hs_pad, enc_hs_len, dec_z, att_prev, scaling=2.0):
        query = self.mlp_dec(begin(self, enc_hs_pad, enc_hs_len, dec_z))
        context, weights = attend(
            self, query, self.pre_compute_enc_h, self.enc_h, self.gvec.weight,
            lengths=lengths_of(self), scale=scaling,
        )  # fmt: skip
        return touch(context, self.gvec.bias), weights


class Coverage:
    """e = s (g · tanh(W h + b + V z + u C + c) + a), C the sum of all weights before."""

    def forward(self, enc_hs_pad, enc_hs_len, dec_z, att_prev_list, scaling=2.0):
        query = self.mlp_dec(begin(self, enc_hs_pad, enc_hs_len, dec_z)) + self.wvec.bias
        att_prev_list = [uniform(self)] if att_prev_list is None else att_prev_list
        context, weights = attend(
            self, query, self.pre_compute_enc_h, self.enc_h, self.gvec.weight,
            lengths=lengths_of(self), scale=scaling, coverage=sum(att_prev_list),
            coverage_weight=self.wvec.weight.view(-1),
        )  # fmt: skip
        att_prev_list += [weights]  # the host's own list
        return touch(context, self.gvec.bias), att_prev_list


def example(attention, draw, state=None, **more):
    """Call every kind of ESPnet's attention: two sources, several steps each."""
    for lengths in ([5, 2, 4], [3, 6]):
        attention.reset()
        source = draw(len(lengths), max(lengths), attention.eprojs)
        yield list(attention(source, lengths, None, None, **more))
        past = None
        for _ in range(3):
            context, past = attention(source, lengths, draw(len(lengths), attention.dunits), past)
            yield context, list(past) if isinstance(past, (list, tuple)) else past


def register(methods, cls, parameters, **more):
    register_host(
        methods, name=f"ESPnet's {cls}", classes=[f"{MODULE}.{cls}"], parameters=parameters,
        **{"example": example, "note": EMPTY, **more},
    )  # fmt: skip


PROJECTED = ["mlp_enc.weight", "mlp_enc.bias", "mlp_dec.weight"]
SCORED = [*PROJECTED, "gvec.weight", "gvec.bias"]
register(Dot, "AttDot", [*PROJECTED, "mlp_dec.bias"])
register(Additive, "AttAdd", SCORED)
register(Coverage, "AttCov", [*SCORED, "wvec.weight", "wvec.bias"], dtype=torch.float32)
