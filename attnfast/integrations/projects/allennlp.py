"""AllenNLP's additive attention, which returns weights alone."""

from __future__ import annotations

from attnfast.integrations.adapter import Adapter
from attnfast.integrations.cache import cached_per_source
from attnfast.integrations.helpers import attend_to_source


class AllenNLP:
    """e = v · tanh(q W + h U)."""

    def forward(self, vector, matrix, matrix_mask=None):
        key = cached_per_source(
            self, "key", lambda: matrix @ self._u_matrix, matrix, self._u_matrix
        )
        mask = None if matrix_mask is None else matrix_mask != 0
        return attend_to_source(
            self, vector @ self._w_matrix, key, None, self._v_vector, mask=mask
        )[1]


def example(attention, draw):
    size, width = len(attention._w_matrix), len(attention._u_matrix)
    for lengths in draw.sources((5, 2, 0), (3, 1)):
        source, seen = draw(len(lengths), max(lengths), width), draw.seen(lengths, max(lengths))
        for mask in (seen, seen, seen, None):
            yield attention(draw(len(lengths), size), source, mask)


ADAPTERS = [
    Adapter(
        name="AllenNLP's AdditiveAttention",
        implementation=AllenNLP,
        classes=["allennlp.modules.attention.additive_attention.AdditiveAttention"],
        parameters=["_w_matrix", "_u_matrix", "_v_vector"],
        example=example,
        skip_reason=lambda attention: (
            None if attention._normalize else "it returns scores without a softmax"
        ),
        weight_scale=1,
        note="scores far below 0 get weights that sum to 1, where AllenNLP's 1e-13 makes them less",
    ),
]
