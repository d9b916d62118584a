"""ESPnet's attention: what all its classes share; dot and additive."""

import torch

from attnfast.integrations.adapter import Adapter
from attnfast.integrations.cache import cached_per_source
from attnfast.integrations.serve import attend, keep_in_graph, multiplied

KEYS = ["mlp_enc.weight", "mlp_enc.bias", "mlp_dec.weight"]
SCORED = [*KEYS, "gvec.weight", "gvec.bias"]


def begin(self, states, lengths, z, key=None):
    """Keep what the project keeps of a source; return the decoder's state."""
    if self.pre_compute_enc_h is None or getattr(self, "han_mode", False):
        self.enc_h, self.h_length = states, states.size(1)
        self.pre_compute_enc_h = (key or self.mlp_enc)(states)
    return begin_step(self, states, lengths, z)


def begin_step(self, states, lengths, z):
    if self.mask is None:
        ends = torch.as_tensor(lengths, device=states.device).unsqueeze(1)
        self.mask = torch.arange(states.size(1), device=states.device) >= ends
    return states.new_zeros(len(states), self.dunits) if z is None else z.view(-1, self.dunits)


def lengths_of(self):
    """Return the lengths that the project's mask stands for."""
    return cached_per_source(self, "lengths", lambda: (~self.mask).sum(1), self.mask)


def score(self, query, scale, **more):
    """Return context and weights, e = s (g · tanh(W h + b + query + ...) + a)."""
    more = {"value": self.enc_h, "lengths": lengths_of(self), "scale": scale, **more}
    context, weights = attend(self, query, self.pre_compute_enc_h, weight=self.gvec.weight, **more)
    if context is not None:
        context = keep_in_graph(multiplied(context, weights, self.enc_h), self.gvec.bias)
    return context, weights


class Dot:
    """e = s tanh(W h + b) · tanh(V z + c)."""

    def forward(self, enc_hs_pad, enc_hs_len, dec_z, att_prev, scaling=2.0):
        z = begin(self, enc_hs_pad, enc_hs_len, dec_z, lambda h: torch.tanh(self.mlp_enc(h)))
        query, more = torch.tanh(self.mlp_dec(z)), {"lengths": lengths_of(self), "scale": scaling}
        context, weights = attend(self, query, self.pre_compute_enc_h, self.enc_h, **more)
        return multiplied(context, weights, self.enc_h), weights


class Additive:
    """e = s (g · tanh(W h + b + V z) + a)."""

    def forward(self, enc_hs_pad, enc_hs_len, dec_z, att_prev, scaling=2.0):
        return score(self, self.mlp_dec(begin(self, enc_hs_pad, enc_hs_len, dec_z)), scaling)


def call(attention, draw, *args, **more):
    return attention(*args, **more)


def example(attention, draw, call=call):
    """Call any of ESPnet's attention; of the sources it sees the first, or in han_mode all."""
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


def adapter(cls, methods, parameters, **more):
    more = {"example": example, "note": "a source without frames has weights 0, not NaN", **more}
    classes = [f"espnet.nets.pytorch_backend.rnn.attentions.{cls}"]
    name = f"ESPnet's {cls}"
    return Adapter(name=name, methods=methods, classes=classes, parameters=parameters, **more)


ADAPTERS = [
    adapter("AttDot", Dot, [*KEYS, "mlp_dec.bias"]),
    adapter("AttAdd", Additive, SCORED),
]
