"""Pointer networks by a plain loop over single sets in float64, and the example."""

import copy
import importlib.util
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from attnfast.analysis import plots
from attnfast.losses import pointer_loss
from attnfast.nn import PointerNetwork

B, N, F, H, A = 4, 6, 3, 7, 5
LENGTHS = torch.tensor([6, 1, 4, 6])
POINTERS = torch.tensor([[3, 1, 6, 0, 0], [1, 0, 0, 0, 0], [2, 2, 1, 4, 0], [6, 5, 4, 3, 2]])


def model(seed=0, spread=1.0, backend=None):
    torch.manual_seed(seed)
    made = PointerNetwork(F, H, A, backend).double()
    with torch.no_grad():
        made.attention.score_vector.mul_(spread)
        made.attention.key_proj.weight.mul_(spread**0.5)
    return made


@pytest.fixture
def items():
    torch.manual_seed(1)
    return torch.randn(B, N, F, dtype=torch.float64)


def step(lstm, x, state):
    """One step of an LSTM of one input, by its formula."""
    h, c = state
    gates = x @ lstm.weight_ih_l0.T + lstm.bias_ih_l0 + h @ lstm.weight_hh_l0.T + lstm.bias_hh_l0
    i, f, g, o = gates.chunk(4)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def by_hand(model, items, pick):
    """Log-probabilities of one set's pointers, step by step; ``pick`` tells what is pointed at."""
    state, keys = (items.new_zeros(H), items.new_zeros(H)), [model.end]
    for x in items:
        state = step(model.encoder, x, state)
        keys.append(state[0])
    x, rows, attention = model.start, [], model.attention
    while True:
        state = step(model.decoder, x, state)
        query, key = attention.query_proj(state[0]), attention.key_proj(torch.stack(keys))
        rows.append(((query + key).tanh() @ attention.score_vector).log_softmax(-1))
        pointer = pick(rows)
        if pointer is None:
            return torch.stack(rows)
        x = items[pointer - 1] if pointer else model.start


def given(row):
    """Return the pointers of an answer, one after the other."""
    return lambda rows: None if len(rows) == len(row) else int(row[len(rows) - 1])


def given_by_hand(model, items, pointers=POINTERS):
    rows = [by_hand(model, x[:n], given(row)) for x, n, row in zip(items, LENGTHS, pointers)]
    return torch.stack(
        [nn.functional.pad(x, (0, N + 1 - x.shape[1]), value=-math.inf) for x in rows]
    )


def loss_by_hand(log_probs, pointers=POINTERS):
    kept = []
    for row, of in zip(pointers.tolist(), log_probs):
        for t, pointer in enumerate(row):
            kept.append(-of[t, pointer])
            if pointer == 0:
                break
    return sum(kept) / len(kept)


def gradients(loss, model):
    return torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("spread", [1.0, 3000.0])
def test_given_answers(items, spread, backend):
    """Forward and gradients; with large weights most logarithms are taken from the score."""
    network = model(spread=spread, backend=backend)
    got, wanted = network(items, LENGTHS, POINTERS), given_by_hand(network, items)
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
    assert (got[got > -math.inf] < -500).any() == (spread > 1)
    loss, by_loop = pointer_loss(got, POINTERS), loss_by_hand(wanted)
    torch.testing.assert_close(loss, by_loop)
    for x, y in zip(gradients(loss, network), gradients(by_loop, network)):
        torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-10)


def test_weights_that_are_0(items):
    """The logarithm of a weight that is 0 in float32 is exact, and the true pointer's is learnt."""
    network = model(spread=300.0)
    small = copy.deepcopy(network).float()
    got, wanted = small(items.float(), LENGTHS, POINTERS), given_by_hand(network, items)
    chosen = wanted.gather(-1, POINTERS.unsqueeze(-1))
    assert chosen.min() < -120  # of which float32 has no exponential
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-3)
    losses = pointer_loss(got, POINTERS), loss_by_hand(wanted)
    for x, y in zip(gradients(losses[0], small), gradients(losses[1], network)):
        torch.testing.assert_close(x.double(), y, rtol=1e-2, atol=1e-3 * float(y.abs().max()))


def test_probabilities(items):
    got = model()(items, LENGTHS, POINTERS)
    torch.testing.assert_close(got.exp().sum(-1), got.new_ones(B, 5))
    for row, n in zip(got, LENGTHS):
        assert row[:, n + 1 :].eq(-math.inf).all() and row[:, : n + 1].isfinite().all()


def answered(network, items, distinct):
    """Return the greedy answer to one set, its end among it."""
    answer = []

    def pick(rows):
        best = rows[-1].clone()
        if distinct:
            best[[i for i in answer if i]] = -math.inf
        answer.append(int(best.argmax()))
        return None if answer[-1] == 0 or len(answer) == len(items) else answer[-1]

    by_hand(network, items, pick)
    return answer


@pytest.mark.parametrize("distinct", [False, True])
def test_answers_are_the_most_probable_pointers(items, distinct):
    found = set()
    for seed in range(12):
        network = model(seed, spread=20.0)
        got = network.decode(items, LENGTHS, distinct)
        for x, n, row in zip(items, LENGTHS.tolist(), got):
            answer = answered(network, x[:n], distinct)
            assert row.tolist() == (answer + [0] * N)[: len(row)]
            alone = network.decode(x[None, :n], torch.tensor([n]), distinct)[0]
            assert row.tolist() == (alone.tolist() + [0] * N)[: len(row)]
            found.add((0 in answer, len(set(answer)) == len(answer), len(answer) == n))
    assert {ends for ends, _, _ in found} == {True, False}
    assert {once for _, once, _ in found} == ({True} if distinct else {True, False})


def test_answers_are_those_of_forward(items):
    for seed in range(5):
        network = model(seed, spread=20.0)
        got = network.decode(items, LENGTHS)
        log_probs = network(items, LENGTHS, got)
        before = nn.functional.pad(got, (1, -1), value=1) > 0
        step = torch.arange(got.shape[1]) < LENGTHS.unsqueeze(-1)
        counts = before & step
        assert log_probs.argmax(-1)[counts].equal(got[counts]) and got[~counts].eq(0).all()


def test_half_types(items):
    network = model().to(torch.bfloat16)
    got = network(items.bfloat16(), LENGTHS, POINTERS)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, given_by_hand(model(), items).float(), rtol=0.1, atol=0.1)


def test_what_the_loss_counts():
    torch.manual_seed(0)
    log_probs = torch.randn(B, 5, N + 1, dtype=torch.float64).log_softmax(-1)
    log_probs[1, 3:] = -math.inf
    assert float(pointer_loss(log_probs, POINTERS)) == pytest.approx(float(loss_by_hand(log_probs)))


def test_picture():
    pytest.importorskip("matplotlib")
    points, weights = torch.rand(5, 2), torch.rand(3, 6)
    assert plots.draw_pointing(points, [0, 1, 2], [0, 1], weights).startswith(b"\x89PNG")
    assert plots.draw_pointing(points, [0, 1, 2], [], weights).startswith(b"\x89PNG")


# ---- the example --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def example():
    path = Path(__file__).parent.parent / "examples" / "pointers.py"
    spec = importlib.util.spec_from_file_location("pointers", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("n", [3, 5, 12])
def test_hulls(example, n):
    spatial = pytest.importorskip("scipy.spatial")
    torch.manual_seed(n)
    points = torch.rand(30, n, 2)
    for x, row in zip(points, example.hull(points)):
        corners = spatial.ConvexHull(x.double().numpy()).vertices.tolist()  # counter-clockwise
        first = corners.index(min(corners))
        got = example.chosen(row)
        assert got == corners[first:] + corners[:first]
        assert example.is_simple(x[got]) and example.area(x[got]) > 0
        assert example.judge_hull(x, got, got)["area covered, %"] == 1
        assert example.judge_hull(x, got, got[1:] + got[:1])["right, %"]


def test_polygons(example):
    square = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    assert example.area(square) == 1 and example.area(square.flip(0)) == -1
    judge = lambda got: example.judge_hull(square, [0, 1, 2, 3], got)  # noqa: E731
    assert judge([0, 1, 2]) == {"right, %": False, "not valid, %": False, "area covered, %": 0.5}
    assert judge([3, 2, 1, 0])["right, %"]
    hollow = torch.cat([square, torch.tensor([[0.5, 0.75]])])  # whose edges' lines cross
    got = example.judge_hull(hollow, [0, 1, 2, 3], [0, 1, 2, 4, 3])
    assert got == {"right, %": False, "not valid, %": False, "area covered, %": 0.875}
    for crossed in ([0, 2, 1, 3], [0, 1], [], [2, 0, 1, 3]):
        assert judge(crossed) == {"right, %": False, "not valid, %": True}
    assert example.judge_list(square, [0, 1, 2], [0, 1]) == {
        "right, %": False, "right places, %": pytest.approx(2 / 3)
    }  # fmt: skip
