"""SpeechBrain's attention: by content, aware of its location, of keys and values."""

import torch

from attnfast.integrations.adapter import Adapter
from attnfast.integrations.cache import cached_per_source
from attnfast.integrations.helpers import attend


def mask_of(states, lengths):
    """Return the project's mask, of the type of the lengths, 1 up to these."""
    frames = torch.arange(states.size(1), device=lengths.device, dtype=lengths.dtype)
    return (frames < lengths.unsqueeze(1)).to(lengths.dtype).to(states.device)


def attended(self, *terms, **more):
    lengths = cached_per_source(
        self, "lengths", lambda: (self.mask != 0).flatten(1).sum(1), self.mask
    )
    return attend(self, *terms, lengths=lengths, **more)


class Additive:
    """e = s g · tanh(W h + b + V q + c), and U (F ∗ α) + d in it, α the last weights."""

    def forward(self, enc_states, enc_len, dec_states):
        query, more, located = self.mlp_dec(dec_states), {}, hasattr(self, "conv_loc")
        if self.precomputed_enc_h is None:
            self.precomputed_enc_h = self.mlp_enc(enc_states)
            self.mask = mask_of(enc_states, enc_len)
            if located:
                self.prev_attn = self.mask * (1 / enc_len.float()).unsqueeze(1)
        if located:
            query = query + self.mlp_loc.bias
            more = {"filters": self.conv_loc.weight, "projection": self.mlp_loc.weight}
            more["previous"] = self.prev_attn
        terms = query, self.precomputed_enc_h, enc_states, self.mlp_attn.weight
        context, weights = attended(self, *terms, scale=self.scaling, **more)
        if located:
            self.prev_attn = weights.detach()
        return self.mlp_out(context), weights


class KeyValue:
    """e = (V q + c) · (W h + b) / √A; values are projected too."""

    def forward(self, enc_states, enc_len, dec_states):
        if self.keys is None:
            self.keys, self.values = self.key_linear(enc_states), self.value_linear(enc_states)
            self.mask = mask_of(enc_states, enc_len).unsqueeze(2)
        query, scale = self.query_linear(dec_states), 1 / float(self.scaling)
        context, weights = attended(self, query, self.keys, self.values, scale=scale)
        return context, weights.unsqueeze(1)


def example(attention, draw):
    """Call it as its decoder does: two batches, several steps, beams that change their order."""
    source, state = (layer.in_features for layer in list(attention.children())[:2])
    for lengths in draw.sources((5, 2, 4), (3, 3)):
        attention.reset()
        states = draw(len(lengths), max(lengths), source)
        for _ in range(3):
            ends = draw.numbers(*lengths).to(draw.dtype)
            yield attention(states, ends, draw(len(lengths), state))
            if getattr(attention, "prev_attn", None) is not None:
                attention.prev_attn = attention.prev_attn.flip(0)


def names(*layers):
    return [f"{layer}.{name}" for layer in layers for name in ("weight", "bias")]


CONTENT = [*names("mlp_enc", "mlp_dec", "mlp_out"), "mlp_attn.weight"]
DISTRIBUTIONS = ["speechbrain"]
ADAPTERS = [
    Adapter(
        name=f"SpeechBrain's {cls}",
        implementation=methods,
        classes=[f"speechbrain.nnet.attention.{cls}"],
        parameters=parameters,
        known_attributes=["detach"],  # of the last weights
        example=example,
        note="an empty source has weights 0, not NaN",
    )
    for cls, methods, parameters in (
        ("ContentBasedAttention", Additive, CONTENT),
        ("LocationAwareAttention", Additive, [*CONTENT, "conv_loc.weight", *names("mlp_loc")]),
        ("KeyValueAttention", KeyValue, names("key_linear", "query_linear", "value_linear")),
    )
]
