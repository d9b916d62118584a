"""ESPnet's attention with coverage, the sum of all weights before, plain or convolved."""

import torch

from attnfast.integrations.cache import Seen, cached_per_source
from attnfast.integrations.espnet import SCORED, adapter, begin, score
from attnfast.integrations.espnet_location import LOCATED, located, uniform


class Total:
    """The sum of a list of tensors that grows by one at every step."""

    def __init__(self):
        self.seen, self.sum = [], 0

    def __call__(self, terms):
        grown = len(terms) >= len(self.seen)
        if not grown or not all(seen.again(x) for seen, x in zip(self.seen, terms)):
            self.seen, self.sum = [], 0
        for x in terms[len(self.seen) :]:
            self.sum = self.sum + x
            self.seen.append(Seen(x))
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
ADAPTERS = [
    adapter("AttCov", Coverage, WEIGHTED, dtype=torch.float32),
    adapter("AttCovLoc", CoverageLocation, LOCATED, dtype=torch.float32),
]
