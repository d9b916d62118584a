"""yoyodyne's attention, of its soft-attention and pointer-generator decoders."""

from __future__ import annotations

from attnfast.integrations.adapter import Adapter, UnsupportedCall
from attnfast.integrations.helpers import attend, is_plain, keep_in_graph, project_both


class Yoyodyne:
    """e = V · tanh(M [h; q] + b) + c, q the state of the last layer."""

    def forward(self, encoded, hidden, mask):
        if not is_plain(self.M):
            raise UnsupportedCall("its M is no plain nn.Linear")
        query, key = project_both(self, self.M, hidden[:, -1:], encoded, states_first=True)
        context, weights = attend(self, query, key, encoded, self.V.weight, mask=~mask)
        return keep_in_graph(context, self.V.bias), weights


def example(attention, draw):
    size = attention.M.out_features
    for lengths in draw.sources((5, 2, 4), (4, 1)):
        B, Tk = len(lengths), max(lengths)
        source = draw(B, Tk, attention.M.in_features - size)
        mask = ~draw.seen(lengths, Tk)
        for layers in (1, 2, 2):
            yield attention(source, draw(B, layers, size), mask)


DISTRIBUTIONS = ["yoyodyne"]
ADAPTERS = [
    Adapter(
        name="yoyodyne's Attention",
        implementation=Yoyodyne,
        classes=["yoyodyne.models.modules.attention.Attention"],
        parameters=[f"{x}.{y}" for x in "MV" for y in ("weight", "bias")],
        example=example,
        note="a source without words has weights 0 instead of NaN",
    ),
]
