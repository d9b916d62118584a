"""ESPnet's forward attention: plain, with a transition agent, with durations."""

from functools import partial

import torch
import torch.nn.functional as F

from attnfast.integrations.espnet import adapter, begin, example
from attnfast.integrations.espnet_location import LOCATED, located, window, windowed
from attnfast.integrations.serve import keep_in_graph, multiplied


def forwarded(self, odds, query, past, scale, mask=None):
    """Return context and weights ∝ max(w odds, 1e-6), w a softmax, the first α on frame 0."""
    if past is None:
        past = F.pad(self.enc_h.new_ones(len(self.enc_h), 1), (0, self.h_length - 1))
    _, weights = located(self, query, scale, past, mask=mask, value=None)
    weights = odds(past, F.pad(past, (1, 0))[:, :-1]) * weights
    weights = keep_in_graph(F.normalize(weights.clamp(min=1e-6), p=1, dim=1), self.gvec.bias)
    context = torch.bmm(weights.unsqueeze(1), self.enc_h).squeeze(1)
    return multiplied(context, weights, self.enc_h), weights


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
            args = enc_hs_pad, enc_hs_len, trans_token, dec_z, att_prev, scaling
            around = last_attended_idx, backward_window, forward_window
            return super().forward(*args, *around)
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
ADAPTERS = [
    adapter("AttForward", Forward, LOCATED, example=windowed, note=NOTE),
    adapter("AttForwardTA", TransitionAgent, AGENT, example=AGENT_EXAMPLE, note=NOTE),
    adapter("GDCAttLoc", Durations, TOKEN, example=TOKEN_EXAMPLE, note=NOTE),
]
