"""Times attention to the 32 best of many keys, against attention to all of them.

The choice is exact: before it is timed, all contenders must have the same keys.
"""

import pytest
import torch
from compare import DEVICE, compare

from attnfast.nn import LuongAttention, TopKAttention

KEYS = {f"10^{n} keys": 10**n for n in (3, 4, 5, 6)}
FEATURES, BEST = 64, 32


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("keys", KEYS)
def test_the_best_of_many_keys(benchmark, keys, rows):
    torch.manual_seed(0)
    Tk = KEYS[keys]
    key, value = (torch.randn(1, Tk, FEATURES, device=DEVICE) for _ in range(2))
    query = torch.randn(1, rows, FEATURES, device=DEVICE)
    attention = LuongAttention(FEATURES, FEATURES, "dot")
    best = TopKAttention(attention, BEST)
    whole, chosen = attention.prepare(key, values=value), best.prepare(key, values=value)

    def eager_best():
        top = (query @ key.mT).topk(BEST)
        of = value[0][top.indices[0]]  # [rows, BEST, FEATURES]
        return (top.values.softmax(-1)[0].unsqueeze(1) @ of).squeeze(1).unsqueeze(0)

    calls = {
        "attnfast, 32 best": lambda: best(query, chosen)[0],
        "attnfast, all keys": lambda: attention(query, whole)[0],
        "eager, 32 best": eager_best,
        "eager, all keys": lambda: (query @ key.mT).softmax(-1) @ value,
    }
    with torch.no_grad():
        assert best.choose(query, chosen).equal((query @ key.mT).topk(BEST).indices)
        torch.testing.assert_close(best(query, chosen)[0], eager_best())
        compare(benchmark, "top-k", f"{keys}, rows {rows}", (rows, Tk, FEATURES), "forward", calls)
    benchmark.extra_info["size_names"] = "Tq, Tk, A"
