"""Diagnostics of attention, against the same formulas written as loops over single numbers."""

import math

import pytest
import torch

import attnfast
from attnfast import Span
from attnfast.analysis import diagnostics as diag

B, TQ, TK = 3, 7, 9
LENGTHS, TARGETS = torch.tensor([9, 4, 1]), torch.tensor([5, 7, 0])


def given(heads=0, span=False, seed=0, sharp=2.0):
    """Weights of attention, in a span's columns or not; and what a call has beside them."""
    g = torch.Generator().manual_seed(seed)
    lead = (B, heads) if heads else (B,)
    q, k, v = (torch.randn(*lead, T, 4, generator=g, dtype=torch.float64) for T in (TQ, TK, TK))
    window = Span(window=(1, 3)) if span else None
    weights = attnfast.dot_attention(
        sharp * q, k, v, span=window, lengths=LENGTHS, need_weights=True
    )[1]
    keys = window.key_indices(TQ, TK, lengths=LENGTHS) if span else None
    dense = weights if keys is None else diag.to_dense(weights, _of(keys, heads), TK)
    return weights, keys, dense


def _of(keys, heads):
    return keys.unsqueeze(1) if heads else keys


def sentences(dense, heads):
    """Yield, of every sentence and head, its index and its weights as lists without padding."""
    for b in range(B):
        n, m = int(LENGTHS[b]), int(TARGETS[b])
        for h in range(heads or 1):
            x = dense[b, h] if heads else dense[b]
            yield (b, h) if heads else (b,), [row[:n] for row in x[:m].tolist()], n, m


FORMS = [(0, False), (3, False), (0, True), (2, True)]


def entropy(row):
    return -sum(a * math.log(a) for a in row if a > 0)


@pytest.mark.parametrize(("heads", "span"), FORMS)
def test_rows(heads, span):
    weights, keys, dense = given(heads, span)
    found = diag.row_statistics(weights, LENGTHS, TARGETS, key_indices=keys)
    gap = diag.kl_from_uniform(weights, LENGTHS, TARGETS, key_indices=keys)
    rows = 0
    for at, x, n, m in sentences(dense, heads):
        for i, row in enumerate(x):
            mean = sum(j * a for j, a in enumerate(row))
            if max(row) > 0:
                wanted = (
                    entropy(row), max(row), row.index(max(row)), mean,
                    sum((j - mean) ** 2 * a for j, a in enumerate(row)),
                )  # fmt: skip
                assert [float(y[(*at, i)]) for y in found] == pytest.approx(wanted, abs=1e-12)
            seen = sum(i - 1 <= j <= i + 3 for j in range(n)) if span else n
            wanted = math.log(seen) - entropy(row) if seen and max(row) > 0 else 0
            assert float(gap[(*at, i)]) == pytest.approx(wanted, abs=1e-12)
            rows += 1
        for y in (*found, gap):
            assert not y[at][m:].any()
    assert rows > 10


@pytest.mark.parametrize(("heads", "span"), FORMS)
def test_sentences(heads, span):
    weights, keys, dense = given(heads, span)
    call = {"lengths": LENGTHS, "target_lengths": TARGETS, "key_indices": keys}
    coverage, near = diag.key_coverage(weights, **call), diag.diagonality(weights, **call, radius=1)
    fertility = torch.rand(B, TK, dtype=torch.float64) + 0.5
    plain, fertile = diag.over_under_translation(weights, **call), None
    fertile = diag.over_under_translation(weights, **call, fertility=fertility)
    for at, x, n, m in sentences(dense, heads):
        total = [sum(row[j] for row in x) for j in range(n)]
        assert coverage.total[at].tolist() == pytest.approx(total + [0] * (TK - n))
        mass = sum(total)
        even = entropy([c / mass for c in total]) / math.log(n) if n > 1 and mass else float(n == 1)
        assert float(coverage.uniformity[at]) == pytest.approx(even if mass else 0)
        d = [(i + 0.5) * n / max(m, 1) - 0.5 for i in range(m)]
        parts = [
            [sum(a for j, a in enumerate(r) if abs(j - d[i]) <= 1) for i, r in enumerate(x)],
            [sum(a * (j - d[i]) for j, a in enumerate(r)) for i, r in enumerate(x)],
            [sum(a * abs(j - d[i]) for j, a in enumerate(r)) for i, r in enumerate(x)],
        ]
        wanted = [sum(p) / max(m, 1) for p in parts]
        assert [float(y[at]) for y in near] == pytest.approx(wanted)
        for found, phi in ((plain, [m / n] * n), (fertile, fertility[at[0]].tolist())):
            c = [t / p - 1 if p else 0 for t, p in zip(total, phi)]
            wanted = sum(max(0, y) for y in c) / n, sum(max(0, -y) for y in c) / n
            assert [float(y[at]) for y in found] == pytest.approx(wanted)


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0), (2, 2, 3, 0), (0, 2, 0, 0)])
def test_nothing_at_all(shape):
    weights, heads = torch.zeros(shape), len(shape) == 4
    for function in (
        diag.row_statistics, diag.kl_from_uniform, diag.key_coverage, diag.diagonality,
        diag.over_under_translation, diag.failures, *[diag.head_roles] * heads,
    ):  # fmt: skip
        found = function(weights)
        for x in found if isinstance(found, tuple) else (found,):
            assert isinstance(x, dict) or not x.any()
    fertility = torch.ones(shape[0], shape[-1])
    assert not diag.over_under_translation(weights, fertility=fertility).over.any()
    assert diag.extract_alignment(weights) == [set()] * shape[0]


def test_limits():
    """What a row may look like at its ends: one key, and all alike."""
    for n in (1, 2, 5):
        one, even = torch.zeros(1, 1, n), torch.full((1, 1, n), 1 / n)
        one[..., n - 1] = 1
        at_one, at_all = diag.row_statistics(one), diag.row_statistics(even)
        assert (float(at_one.entropy), float(at_one.variance)) == (0, 0)
        assert float(at_one.expected_position) == int(at_one.argmax) == n - 1
        assert float(at_all.entropy) == pytest.approx(math.log(n), abs=1e-6)
        assert float(at_all.variance) == pytest.approx((n * n - 1) / 12, abs=1e-6)
        assert float(diag.kl_from_uniform(even)) == pytest.approx(0, abs=1e-6)
        assert float(diag.kl_from_uniform(one)) == pytest.approx(math.log(n), abs=1e-6)


def test_gradients_reach_the_weights():
    scores = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)

    def of(scores):
        weights = scores.masked_fill(torch.arange(5) > 3, -math.inf).softmax(-1)
        found = diag.row_statistics(weights, torch.tensor([5, 2]))
        return found.entropy, found.max_weight, found.expected_position, found.variance

    assert torch.autograd.gradcheck(of, scores)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_of_half_types_are_float32(dtype):
    weights = given()[0].to(dtype)
    found = diag.row_statistics(weights, LENGTHS, TARGETS)
    exact = diag.row_statistics(weights.double(), LENGTHS, TARGETS)
    assert found.entropy.dtype == torch.float32
    for x, y in zip(found, exact):
        torch.testing.assert_close(x.double(), y.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "size", "share"),
    [("a b c", 1, 0), ("a a a a", 1, 0.75), ("a b a b", 2, 1 / 3), ("a b a b", 1, 0.5), ("", 1, 0)],
)
def test_repetition(words, size, share):
    assert diag.repetition(words.split(), size) == pytest.approx(share)
    assert diag.repetition(list(words.split()), 9) == 0
    assert diag.repetition(torch.tensor([5, 5, 5, 5])) == 0.75


# ---- alignments ---------------------------------------------------------------------------------


def test_links():
    weights = torch.tensor(
        [
            [[0.6, 0.3, 0.1], [0.2, 0.3, 0.5], [0.1, 0.1, 0.8]],
            [[0, 1, 0], [0.4, 0.4, 0.2], [0, 0, 1]],
        ]
    )
    lengths, targets = torch.tensor([3, 2]), torch.tensor([3, 2])
    assert diag.extract_alignment(weights, lengths, targets) == [
        {(0, 0), (2, 1), (2, 2)},
        {(1, 0), (0, 1)},
    ]
    assert diag.extract_alignment(weights, lengths, targets, min_weight=0.6) == [
        {(0, 0), (2, 2)},
        {(1, 0)},
    ]
    assert diag.extract_alignment(weights, lengths, targets, null=-1) == [{(0, 0)}, {(0, 1)}]
    assert diag.extract_alignment(weights, lengths, targets, null=0) == [{(2, 1), (2, 2)}, {(1, 0)}]
    assert diag.extract_alignment(torch.zeros(1, 2, 3)) == [set()]
    heads = torch.stack([weights, weights.roll(1, -1)], 1)
    assert diag.extract_alignment(heads, lengths, targets) == diag.extract_alignment(
        heads.mean(1), lengths, targets
    )
    columns, keys, dense = given(2, True)
    both = (
        x(columns)
        for x in (lambda w: diag.extract_alignment(w, LENGTHS, TARGETS, key_indices=keys),)
    )
    assert next(both) == diag.extract_alignment(dense, LENGTHS, TARGETS)


@pytest.mark.parametrize(
    ("found", "sure", "possible", "score"),
    [
        ({(0, 0), (1, 1)}, {(0, 0), (1, 1)}, None, (1, 1, 1, 0)),
        ({(0, 1)}, {(0, 0)}, None, (0, 0, 0, 1)),
        # 4 found; 2 of 3 sure among them, 3 possible: 1 − (2 + 3) / (4 + 3)
        (
            {(0, 0), (1, 1), (2, 3), (4, 4)},
            {(0, 0), (1, 1), (3, 3)},
            {(2, 3)},
            (3 / 4, 2 / 3, 12 / 17, 2 / 7),
        ),
        (set(), {(0, 0)}, None, (0, 0, 0, 1)),  # all words to NULL
        ({(5, 5)}, set(), {(5, 5)}, (1, 0, 0, 0)),
        (set(), set(), None, (0, 0, 0, 0)),
    ],
)
def test_alignment_error_rate(found, sure, possible, score):
    possible = None if possible is None else [possible]
    assert diag.alignment_score([found], [sure], possible) == pytest.approx(score)


def test_alignments_are_counted_over_all_sentences():
    found = [{(0, 0)}, {(0, 0), (1, 1), (2, 2)}]
    sure = [{(0, 1)}, {(0, 0), (1, 1), (2, 2)}]
    assert diag.alignment_score(found, sure).error_rate == pytest.approx(1 - 6 / 8)


# ---- heads and failures -------------------------------------------------------------------------


def test_heads():
    T = 6
    diagonal, next_one = torch.eye(T), torch.eye(T).roll(1, -1)
    even = torch.full((T, T), 1 / T)
    heads = torch.stack([diagonal, diagonal, next_one, even]).expand(2, -1, -1, -1)
    found = diag.head_roles(heads)
    assert found.distance[0].tolist()[:2] == [0, 0]
    assert float(found.distance[0, 2]) == pytest.approx(1)
    assert torch.equal(found.distance, found.distance.T)
    assert float(found.distance[0, 3]) == pytest.approx(_divergence([1] + [0] * 5, [1 / T] * T))
    assert found.positional[:2].tolist() == [1, 1]
    assert found.offset[:3].tolist() == [0, 0, 1]
    assert found.positional[2] > 0.8  # all rows but the last
    assert found.broad.tolist() == pytest.approx([0, 0, 0, 1])
    assert found.local[:3].tolist() == [1, 1, 1]
    assert float(found.local[3]) == pytest.approx(0.5)  # keys 0 to 2 of 6


def _divergence(p, q):
    mixed = [(a + b) / 2 for a, b in zip(p, q)]
    return (entropy(mixed) - (entropy(p) + entropy(q)) / 2) / math.log(2)


def test_a_span_is_judged_by_its_keys():
    weights, keys, dense = given(2, True)
    ways = (weights, keys), (dense, None)
    both = [diag.head_roles(x, LENGTHS, TARGETS, key_indices=k) for x, k in ways]
    for name in ("distance", "positional", "offset", "local"):
        torch.testing.assert_close(*(getattr(x, name) for x in both))
    both = [diag.failures(x, LENGTHS, TARGETS, key_indices=k) for x, k in ways]
    for name in ("concentrated", "skipped"):
        assert torch.equal(*(getattr(x, name) for x in both))
    assert torch.equal(*(x.sentences["crossing"] for x in both))
    keys = Span(window=1).key_indices(9, 9)
    even = (keys >= 0) / (keys >= 0).sum(-1, keepdim=True)
    assert diag.failures(even.unsqueeze(0), key_indices=keys).diffuse.all()
    assert not diag.failures(diag.to_dense(even.unsqueeze(0), keys, 9)).diffuse.any()
    heads = even.expand(1, 2, 9, 3)
    assert diag.head_roles(heads, key_indices=keys).broad.tolist() == pytest.approx([1, 1])


def test_rows_that_do_not_add_up_to_1_are_judged_by_their_shares():
    """Those of predicted windows, whose weights a Gaussian multiplies."""
    weights, keys, _ = given(2, True)
    part = torch.linspace(0.3, 0.9, TQ, dtype=torch.float64).unsqueeze(-1)
    call = LENGTHS, TARGETS
    for function in (diag.row_statistics, diag.kl_from_uniform, diag.diagonality, diag.head_roles):
        whole, less = (function(x, *call, key_indices=keys) for x in (weights, part * weights))
        if function is diag.row_statistics:
            torch.testing.assert_close(less.max_weight, whole.max_weight * part.squeeze(-1))
            whole, less = whole._replace(max_weight=0), less._replace(max_weight=0)
        torch.testing.assert_close(less, whole)
    drift = [
        diag.failures(x, *call, key_indices=keys).sentences["drifting"]
        for x in (weights, part * weights)
    ]
    assert torch.equal(*drift)


def test_each_way_to_fail_is_told_from_the_others():
    T = 12
    i = torch.arange(T)
    healthy = torch.nn.functional.one_hot(i, T).float()
    cases = {
        "": healthy,
        "diffuse": torch.full((T, T), 1 / T),
        "stuck": healthy[torch.tensor([0, 1, 2, 3, 4, 4, 4, 4, 8, 9, 10, 11])],
        "concentrated": 0.6 * healthy[5] + 0.4 * healthy,
        "drifting": healthy[(i - (i > 6) * (i - 6)).clamp_max(T - 1)],
        "skipped": healthy[(i // 4) * 4 + i % 2],
        "saturated": healthy,
        "striped": (0.45 * (healthy[2] + healthy[8]) + 0.1 / T).expand(T, T),
        "block": healthy.view(3, 4, T).mean(1).repeat_interleave(4, 0),
        "crossing": healthy.flip(0),
    }
    weights = torch.stack([*cases.values()])
    found = diag.failures(weights)
    assert found.saturated.tolist() == (weights.amax(-1) >= 0.9).tolist()
    assert found.block[[*cases].index("block")].all() and not found.block[0].any()
    for b, name in enumerate(cases):
        told = {x for x, flags in found.sentences.items() if flags[b]}
        told -= {"saturated"} - {name}  # as every sharp row is
        allowed = {
            "drifting": {"drifting", "stuck", "concentrated"}, "concentrated": {"stuck"},
            "striped": {"stuck", "skipped", "drifting"}, "block": {"stuck"},
            "crossing": {"drifting"},
        }  # fmt: skip
        assert told >= {name} - {""}, (name, told)
        assert told <= {name} | allowed.get(name, set()), (name, told)
    assert found.diffuse[1].all() and not found.diffuse[0].any()
    assert found.stuck[2].tolist() == [4 <= x < 8 for x in range(T)]
    assert found.concentrated[3].nonzero().tolist() == [[5]]
    assert found.skipped[5].tolist() == [x % 4 > 1 for x in range(T)]


def test_a_third_of_four_rows_is_two():
    """The last two rows look 0 and 3 keys away from the diagonal, the first two at it."""
    weights = torch.eye(4)[[0, 1, 2, 0]].unsqueeze(0)
    for drift, wanted in ((1.5 / 4, True), (1.6 / 4, False)):
        found = diag.failures(weights, thresholds=diag.Thresholds(drift=drift))
        assert found.sentences["drifting"].tolist() == [wanted]


def test_thresholds_of_pairs_of_rows():
    """Rows 0.1 apart are a block; of six pairs of rows, two cross."""
    row, step = torch.tensor([0.4, 0.3, 0.2, 0.1]), torch.tensor([0.1, -0.1, 0.0, 0.0]) / 2
    weights = torch.stack([row, row + step, row, row + step]).unsqueeze(0)
    for alike, wanted in ((0.06, True), (0.04, False)):
        found = diag.failures(weights, thresholds=diag.Thresholds(diffuse=1.0, alike=alike))
        assert (found.block.all() and found.sentences["striped"].all()) == wanted
    weights = torch.eye(4)[[0, 2, 3, 1]].unsqueeze(0)
    for crossing, wanted in ((0.33, True), (0.34, False)):
        found = diag.failures(weights, thresholds=diag.Thresholds(crossing=crossing))
        assert found.sentences["crossing"].tolist() == [wanted]


def test_padding_fails_nothing():
    weights = torch.full((2, 6, 8), math.nan)
    weights[0, :4, :4] = 0.8 * torch.eye(4) + 0.05
    found = diag.failures(weights, torch.tensor([4, 0]), torch.tensor([4, 0]))
    for flags in (*found[:6], *found.sentences.values()):
        assert not flags.any()


def test_thresholds():
    weights = torch.tensor([0.7, 0.1, 0.1, 0.1]).expand(1, 4, 4)
    loose = diag.Thresholds(0.6, concentrated=0.8, stuck=2, drift=0.9, skipped=0.5, sentence=0.7)
    for thresholds, wanted in (
        (None, {"stuck", "concentrated", "drifting", "striped"}),
        (diag.Thresholds(stuck=5, concentrated=0.8, drift=0.9), {"striped"}),
        (loose, {"diffuse", "skipped"}),
        (
            diag.Thresholds(stuck=4, concentrated=0.7, drift=0.9, saturated=0.7),
            {"stuck", "concentrated", "striped", "saturated"},
        ),
    ):
        found = diag.failures(weights, thresholds=thresholds).sentences
        assert {name for name, flags in found.items() if flags} == wanted


# ---- errors -------------------------------------------------------------------------------------
