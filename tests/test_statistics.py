"""Statistics of rows from the fused pass, on every backend, against the reference's weights."""

import pytest
import torch
from attention_cases import (
    DEVICE,
    Case,
    attend,
    cases,
    check,
    eager,
    fuzz,
    inputs,
    losses,
    oracle_of,
    results,
    runnable,
)
from test_attention import name
from test_span import mask_of, place

import attnfast
from attnfast import Span
from attnfast.analysis import diagnostics
from attnfast.decoding import attend as attend_to
from attnfast.decoding import prepare

NAMES = ("context", "entropy", "largest", "mean", "variance")
#: A third of the table: what scores can be is tested with the weights.
TABLE = [x for i, x in enumerate(cases()) if i % 3 == 0 or x.dtype != torch.float32]


def in_lengths(mean, variance, Tk):
    """Return the same numbers, whose gradients are no larger than the entropy's."""
    return (
        x.detach() + (x - x.detach()) / max(Tk, 1) ** power
        for power, x in ((1, mean), (2, variance))
    )


def as_written(weights):
    """Return the statistics of weights as people write them, in the dtype of sums."""
    p = weights.to(torch.float64 if weights.dtype == torch.float64 else torch.float32)
    j = torch.arange(p.shape[-1], dtype=p.dtype)
    mean = (p * j).sum(-1)
    entropy = -(p * p.clamp_min(1e-300 if p.dtype == torch.float64 else 1e-38).log()).sum(-1)
    largest = p.amax(-1) if p.shape[-1] else p.sum(-1)
    variance = (p * (j - mean.unsqueeze(-1)).square()).sum(-1)
    return entropy, largest, *in_lengths(mean, variance, p.shape[-1])


def written(**args):
    context, weights, _ = eager(**args)
    return context, *as_written(weights)


def taken(backend, **options):
    def how(**args):
        result = attend(args, need_statistics=True, backend=backend, **options)
        assert result.weights is None
        entropy, largest, _, mean, variance = result.statistics
        return result.context, entropy, largest, *in_lengths(mean, variance, args["key"].shape[-2])

    return how


def slow(backend):
    """Whether kernels run in an interpreter."""
    return backend == "triton" and DEVICE["triton"].type == "cpu"


def judge(case, backend):
    args = inputs(case, DEVICE[backend])
    got = results(case, args, taken(backend), NAMES)
    check(case, got, oracle_of(case, written, NAMES), losses(case, written, NAMES))


@pytest.mark.parametrize("case", TABLE, ids=name)
def test_table(case, backend):
    if not runnable(backend, case):
        pytest.skip(f"{backend} does not run this case here")
    judge(case, backend)


@pytest.mark.parametrize("seed", range(2))
def test_fuzz(seed, backend):
    for case in fuzz(99 + seed, 12, 4_000 if backend == "triton" else 400_000):
        if runnable(backend, case):
            judge(case, backend)


#: One row, whose keys several blocks of a GPU share.
STEPS = [
    Case("dot", 2, 1, 65, 33, 40, 2, terms=("lengths",)),
    Case("dot", 1, 1, 530, 24, 16, terms=("lengths", "mask")),
    Case("tanh", 2, 1, 150, 70, 30, terms=("lengths", "mask", "bias")),
]


@pytest.mark.parametrize("case", STEPS, ids=name)
def test_a_step(case, backend):
    if not runnable(backend, case):
        pytest.skip(f"{backend} does not run this case here")
    judge(case, backend)


def test_a_row_of_two_million_keys():
    """Its sums are taken in blocks; one after the other they lose ten times as much."""
    key = torch.randn(1, 2**21, 1, generator=torch.Generator().manual_seed(0))
    for query in torch.zeros(1, 1, 1), torch.full((1, 3, 1), 0.5):
        got = attnfast.dot_attention(query, key, key, need_statistics=True, backend="cpu")
        exact = diagnostics.row_statistics((query.double() @ key.double().mT).softmax(-1))
        for of in ("entropy", "expected_position", "variance"):
            right = getattr(exact, of)
            lost = (getattr(got.statistics, of) - right).abs().amax() / right.amax()
            assert lost < 4e-6, of


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # in Triton's interpreter
def test_a_row_of_nan_stands_nowhere(backend):
    """All is NaN of a row that has diverged, but its position, 0 also where key 0 is hidden."""
    args = inputs(Case("dot", 1, 1, 5, 3, 3), DEVICE[backend])
    mask = torch.arange(5, device=DEVICE[backend]).view(1, 1, 5) > 1
    bias = torch.zeros(1, 1, 5, device=mask.device).masked_fill(mask, torch.inf)
    call = {**args, "mask": mask, "bias": bias, "need_statistics": True}
    entropy, largest, position, mean, variance = attend(call, backend=backend).statistics
    assert torch.stack([entropy, largest, mean, variance]).isnan().all()
    assert position.tolist() == [[0]]


SPANS = [
    (Span(window=(2, 3)), None),
    (Span(window=3), "predicted"),
    (Span(causal=True), "end"),
    (Span(stride=4), 3),
    (Span(stride=3, fixed=True, causal=True), None),
    (Span(window=(9, 6), stride=3), -2),
    (Span(window=40), None),  # wider than all keys
]


@pytest.mark.parametrize(("span", "position"), SPANS, ids=str)
@pytest.mark.parametrize("H", [None, 2])
def test_spans(span, position, H, backend):
    """Positions are those of keys, whatever the columns are."""
    if H is None and slow(backend):
        pytest.skip("heads are the harder case")
    case = Case("tanh", 2, 7, 23, 8, 8, H, terms=("lengths", "bias"))
    args = inputs(case, DEVICE[backend])
    argument, p = place(position, case, inputs(case)["lengths"])
    if isinstance(argument, torch.Tensor):
        argument = argument.to(DEVICE[backend])
    mask = mask_of(span, p, case.Tk).expand(2, *case.heads, 7, 23)

    def seen(**args):
        return written(**{**args, "mask": mask})

    got = results(case, args, taken(backend, span=span, position=argument), NAMES)
    check(case, got, oracle_of(case, seen, NAMES), losses(case, seen, NAMES))


def test_a_span_for_each_head(backend):
    case = Case("dot", 2, 6, 20, 8, 8, 3)
    spans = [Span(window=2), Span(stride=3), Span(window=2)]
    masks = [mask_of(x, torch.arange(6.0), 20) for x in spans]
    mask = torch.stack(masks).expand(2, 3, 6, 20)

    def seen(**args):
        return written(**{**args, "mask": mask})

    args = inputs(case, DEVICE[backend])
    got = results(case, args, taken(backend, span=spans), NAMES)
    check(case, got, oracle_of(case, seen, NAMES), losses(case, seen, NAMES))


def attended(scores, backend, features=4, **options):
    """Return the result of attention with the scores ``[B, Tq, Tk]``."""
    B, Tq, Tk = scores.shape
    device = DEVICE[backend]
    query, key = (torch.zeros(B, n, features, device=device) for n in (Tq, Tk))
    options = {"bias": scores.to(device), "backend": backend, **options}
    return attnfast.dot_attention(query, key, key, need_statistics=True, **options)


@pytest.mark.parametrize(("Tq", "features"), [(5, 4), (9, 64)])
def test_the_position_is_the_first_of_the_largest(Tq, features, backend):
    scores = torch.randn(3, Tq, 90, generator=torch.Generator().manual_seed(0))
    want = scores.argmax(-1)
    want[0, 0] = 7
    scores[0, 0, [7, 23, 50, 55, 89]] = 9.0  # of a vector's lane, and of others
    for options in ({}, {"need_weights": True}, {"span": Span(causal=True), "position": 90}):
        rows = attended(scores, backend, features, **options).statistics
        assert rows.argmax.dtype == torch.int64 and not rows.argmax.requires_grad
        assert torch.equal(rows.argmax.cpu(), want)
    rows = attended(scores[:, :1], backend).statistics
    assert torch.equal(rows.argmax.cpu(), want[:, :1])


@pytest.mark.parametrize("Tq", [1, 3])
def test_rows_that_see_nothing(Tq, backend):
    lengths = torch.tensor([0, 70], device=DEVICE[backend])
    for span in (None, Span(window=66), Span(stride=2, fixed=True), Span(stride=2)):
        rows = attended(torch.zeros(2, Tq, 70), backend, lengths=lengths, span=span).statistics
        for x in rows:
            assert (x[0] == 0).all()
        assert rows.entropy[1, 0] > 3


@pytest.mark.parametrize("Tq", [1, 2])
def test_a_sharp_row_far_from_the_first_key_keeps_its_variance(Tq, backend):
    n = 600 if slow(backend) else 4000
    scores = torch.full((1, Tq, n), -60.0)
    scores[..., n - 3 :] = torch.tensor([0.5, 1.0, 0.25])
    _, _, mean, variance = as_written(scores.double().softmax(-1))
    rows = attended(scores, backend).statistics
    torch.testing.assert_close(rows.variance.double().cpu(), variance, rtol=1e-5, atol=0)
    torch.testing.assert_close(rows.expected_position.double().cpu(), mean, rtol=1e-6, atol=0)


LOW = float(torch.finfo(torch.float32).min)


@pytest.mark.filterwarnings("ignore:(overflow|invalid):RuntimeWarning")  # in an interpreter
@pytest.mark.parametrize("Tq", [1, 2])
@pytest.mark.parametrize(
    ("low", "high"),
    [(-100, -100), (-1e4, -1e4), (LOW, 0.0), (-1e38, 1.0), (-3e38, 3e38), (-1e37, -200.0)],
)
def test_low_scores_before_high_ones(low, high, Tq, backend):
    """As left padding that a finite number hides: the first blocks' mass counts for nothing."""
    far = torch.full((1, Tq, 140), float(low))
    far[..., 130:] = high + torch.linspace(0, 1, 10)
    for scores in (far, far.flip(-1)):
        want = as_written(scores.double().softmax(-1))
        entropy, largest, _, mean, variance = attended(scores, backend).statistics
        for got, exact in zip((entropy, largest, mean, variance), want):
            torch.testing.assert_close(got.double().cpu(), exact, rtol=2e-4, atol=1e-5)


def test_steps_over_a_memory(backend):
    """Step by step the numbers and gradients are those of all rows at once."""
    case = Case("tanh", 2, 4, 9, 8, 8, terms=("lengths",))
    args = inputs(case, DEVICE[backend])
    leaves = [args[x] for x in ("query", "key", "score_vector")]

    def loss(statistics):
        return sum((k + 1) * x.square().sum() for k, x in enumerate(statistics) if k != 2)

    whole = attend(args, need_statistics=True, backend=backend).statistics
    wanted = torch.autograd.grad(loss(whole), leaves)
    memory = prepare(
        args["key"], args["value"], args["score_vector"], lengths=args["lengths"], backend=backend
    )
    steps = [
        attend_to(args["query"][:, t : t + 1], memory, need_statistics=True).statistics
        for t in range(4)
    ]
    joined = [torch.cat(x, 1) for x in zip(*steps)]
    for a, b in zip(joined, whole):
        torch.testing.assert_close(a, b)
    for a, b in zip(torch.autograd.grad(loss(joined), leaves), wanted):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("span", [None, Span(window=2), Span(stride=2)], ids=str)
def test_gradcheck(span, backend):
    case = Case("tanh", 2, 3, 6, 4, 3, dtype=torch.float64, terms=("lengths", "bias"))
    if slow(backend):
        pytest.skip("hundreds of calls; the table checks Triton's gradients against the oracle")
    if not runnable(backend, case):
        pytest.skip(f"{backend} does not run this case here")
    args = inputs(case, DEVICE[backend])
    names = ("query", "key", "score_vector", "bias")

    def rows(*leaves):
        got = {**args, **dict(zip(names, leaves))}
        asked = {"need_weights": True, "need_statistics": True}
        result = attend(got, span=span, backend=backend, **asked)
        entropy, largest, _, mean, variance = result.statistics
        return *result, entropy, largest, mean, variance

    assert torch.autograd.gradcheck(rows, [args[x] for x in names])


def test_the_same_as_from_weights(backend):
    args = inputs(Case("dot", 2, 5, 11, 8, 8, 2, terms=("lengths",)), DEVICE[backend])
    result = attend(args, need_weights=True, need_statistics=True, backend=backend)
    wanted = diagnostics.row_statistics(result.weights, args["lengths"])
    for a, b in zip(result.statistics, wanted):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    leaves, both = [args[x] for x in ("query", "key")], []
    for rows in (result.statistics, wanted):  # gradients of weights and statistics at once
        loss = result.weights.square().sum() + rows.entropy.sum() + rows.expected_position.sum()
        both.append(torch.autograd.grad(loss, leaves, retain_graph=True))
    for a, b in zip(*both):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_half_types_are_summed_in_float32(backend):
    for dtype in (torch.float16, torch.bfloat16):
        case = Case("dot", 1, 2, 30, 8, 8, dtype=dtype)
        if runnable(backend, case):
            args = inputs(case, DEVICE[backend])
            rows = attend(args, need_statistics=True, backend=backend).statistics
            assert rows.expected_position.dtype == torch.float32


@pytest.mark.parametrize("cls", [attnfast.nn.BahdanauAttention, attnfast.nn.LuongAttention])
def test_modules(cls):
    torch.manual_seed(0)
    module = cls(6, 6, attn_dim=8)
    memory = module.prepare(torch.randn(2, 5, 6), torch.tensor([5, 3]))
    states = torch.randn(2, 3, 6)
    whole = module(states, memory, need_statistics=True)
    step = module(states[:, 1], memory, need_weights=True, need_statistics=True)
    assert module(states, memory).statistics is None
    for a, b in zip(step.statistics, whole.statistics):
        torch.testing.assert_close(a, b[:, 1])
    heads = attnfast.nn.MultiHeadAttention(6, 6, 8, 2)
    result = heads(states[:, 0], heads.prepare(torch.randn(2, 5, 6)), need_statistics=True)
    assert result.statistics.entropy.shape == (2, 2)


def test_a_compiled_graph():
    case = Case("tanh", 2, 3, 9, 8, 8, terms=("lengths",))
    args = inputs(case)
    leaves = [v for v in args.values() if isinstance(v, torch.Tensor) and v.requires_grad][:2]

    def loss(args):
        rows = attend(args, need_statistics=True, span=Span(stride=2)).statistics
        return rows.entropy.sum() + rows.variance.square().sum() + rows.max_weight.sum()

    compiled = torch.compile(loss, fullgraph=True)
    for a, b in zip(
        torch.autograd.grad(compiled(args), leaves), torch.autograd.grad(loss(args), leaves)
    ):
        torch.testing.assert_close(a, b)
