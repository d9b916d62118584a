"""Neural Turing machines by the paper's formulas, slot by slot in float64, and the example."""

import copy
import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

from attnfast.analysis import plots
from attnfast.nn import NeuralTuringMachine, NTMState

B, T, F, H, N, M = 3, 6, 4, 7, 5, 3


def machine(num_reads=1, num_writes=1, shift=1, num_slots=N, spread=20.0, seed=0):
    torch.manual_seed(seed)
    made = NeuralTuringMachine(F, H, num_slots, M, num_reads, num_writes, shift).double()
    with torch.no_grad():
        made.heads.weight.mul_(spread)
        made.writes.weight.mul_(spread)
    return made


@pytest.fixture
def x():
    torch.manual_seed(1)
    return torch.randn(B, T, F, dtype=torch.float64)


def softplus(x):
    return (1 + x.exp()).log()


def length(x):
    return (x * x).sum().sqrt()


def by_hand(made, x):
    """Outputs and weights of one sequence, and its last memory: loops over heads and slots."""
    h = c = x.new_zeros(H)
    N, S, R = made.num_slots, made.shift, made.num_reads
    heads = R + made.num_writes
    memory = [made.slot for _ in range(N)]
    weights = [[x.new_tensor(float(i == 0)) for i in range(N)] for _ in range(heads)]
    read, outputs, shown = [x.new_zeros(M)] * R, [], []
    cell = made.controller
    for row in x:
        inputs = torch.cat([row, *read])
        gates = inputs @ cell.weight_ih.T + cell.bias_ih + h @ cell.weight_hh.T + cell.bias_hh
        i, f, g, o = gates.chunk(4)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        p = (made.heads.weight @ h + made.heads.bias).view(heads, -1)
        for n in range(heads):
            k, beta, gate, gamma, s = p[n].split([M, 1, 1, 1, 2 * S + 1])
            scores = [softplus(beta) * (k @ m) / (length(k) * length(m)) for m in memory]
            content = torch.cat(scores).softmax(0)
            mixed = [
                gate.sigmoid() * content[j] + (1 - gate.sigmoid()) * weights[n][j] for j in range(N)
            ]
            s = s.softmax(0)
            shifted = [
                sum(s[d + S] * mixed[(j - d) % N] for d in range(-S, S + 1)) for j in range(N)
            ]
            powers = [w ** (1 + softplus(gamma)) for w in shifted]
            weights[n] = [w / sum(powers) for w in powers]
        read = [sum(weights[n][j] * memory[j] for j in range(N)) for n in range(R)]
        e, a = (made.writes.weight @ h + made.writes.bias).view(-1, 2, M).unbind(1)
        for j in range(N):
            m = memory[j]
            for n in range(made.num_writes):
                m = m * (1 - weights[R + n][j] * e[n].sigmoid())
            memory[j] = m + sum(weights[R + n][j] * a[n].tanh() for n in range(made.num_writes))
        outputs.append(torch.cat([h, *read]))
        shown.append(torch.stack([torch.cat(w) for w in weights]))
    return torch.stack(outputs), torch.stack(shown), torch.stack(memory)


@pytest.mark.parametrize(("reads", "writes", "shift"), [(1, 1, 1), (2, 1, 2), (1, 3, 1), (3, 2, 5)])
def test_the_formulas(x, reads, writes, shift):
    """Forward and gradients; a shift may go around all slots."""
    made = machine(reads, writes, shift)
    got = made(x, need_weights=True)
    target = [torch.stack(each) for each in zip(*(by_hand(made, row) for row in x))]
    for a, b in zip((got.output, got.weights, got.state.memory), target):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    assert got.weights.amax(-1).max() > 0.5 and got.weights.shape == (B, T, reads + writes, N)
    assert got.output.shape[-1] == made.output_size == H + reads * M
    torch.manual_seed(2)
    mixing = [torch.randn_like(b) for b in target]
    losses = (
        sum((a * w).sum() for a, w in zip(part, mixing))
        for part in ((got.output, got.weights, got.state.memory), target)
    )
    for a, b in zip(*(torch.autograd.grad(loss, list(made.parameters())) for loss in losses)):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


def test_gradcheck(x):
    made = machine(2, 1)
    torch.autograd.gradcheck(
        lambda x: made(x, need_weights=True)[::2], x[:1, :3].clone().requires_grad_()
    )


def test_weights_are_returned_on_request(x):
    got = machine()(x)
    assert got.weights is None
    torch.testing.assert_close(got.state.weights.sum(-1), x.new_ones(B, 2))


def test_other_slots(x):
    """The number of slots is no size of a parameter; a state keeps its own."""
    made, larger = machine(), machine(num_slots=9)
    assert all(a.shape == b.shape for a, b in zip(made.parameters(), larger.parameters()))
    made.num_slots = 9
    torch.testing.assert_close(made(x).output, larger(x).output)
    state = made(x).state
    made.num_slots = 3  # as many as a slot has features
    assert made(x, state).state.memory.shape[1] == 9


def test_only_vectors_shorter_than_a_thousandth_are_lengthened():
    made = machine()
    torch.manual_seed(1)
    keys = torch.randn(1, 2, M + 6, dtype=torch.float64)
    slots = torch.nn.functional.normalize(torch.randn(1, N, M, dtype=torch.float64), dim=-1)
    before = torch.rand(1, 2, N, dtype=torch.float64).softmax(-1)
    whole = made.address(keys, slots, before)
    torch.testing.assert_close(made.address(keys, 0.0011 * slots, before), whole)
    halved = keys.clone()  # a cosine with half of a vector, by half of a strength
    halved[..., M] = (0.5 * torch.nn.functional.softplus(keys[..., M])).expm1().log()
    torch.testing.assert_close(
        made.address(keys, 0.0005 * slots, before), made.address(halved, slots, before)
    )


def test_sharp_and_empty(x):
    """Powers that float32 has no numbers for, and slots that hold nothing, give no NaN."""
    made = machine(spread=1.0).float()
    with torch.no_grad():
        p = made.heads.bias.view(2, -1)
        p[:, M + 2] = 400.0  # γ
        p[0, M + 1] = -200.0  # the gate: no content, and weights of 0
        made.slot.zero_()
    got = made(x.float(), need_weights=True)
    assert got.weights.isfinite().all()
    torch.testing.assert_close(got.weights.sum(-1), torch.ones(B, T, 2))
    gained = torch.autograd.grad(got.output.sum(), list(made.parameters()))
    assert all(g.isfinite().all() and g.abs().max() < 1e6 for g in gained)


def test_half_types(x):
    made = machine(2, 2, spread=1.0)
    target = made(x).output
    half = copy.deepcopy(made).bfloat16()(x.bfloat16())
    assert half.output.dtype == half.state.memory.dtype == torch.bfloat16
    torch.testing.assert_close(half.output.double(), target, rtol=0.1, atol=0.1)
    made.float()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = made(x.float(), made(x.bfloat16()).state, need_weights=True)
        with pytest.raises(ValueError, match="x must be of the module's dtype torch"):
            made(x)
    assert {part.dtype for part in mixed.state} == {torch.float32}
    with torch.autocast("cpu", torch.bfloat16):
        for one in (made, copy.deepcopy(made).bfloat16()):
            got = one(x.half(), one(x.bfloat16()).state)
            assert {part.dtype for part in got.state} == {one.slot.dtype}
    with torch.autocast("cpu", torch.bfloat16):
        mixed = made(x.float(), need_weights=True)
    torch.testing.assert_close(mixed.output.double(), target, rtol=0.1, atol=0.1)
    mixed.output.sum().backward()
    assert all(p.grad.isfinite().all() for p in made.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_head_that_stays_loses_nothing_in_half_types(dtype):
    made = machine(num_slots=200, spread=1.0).to(dtype)
    with torch.no_grad():
        made.heads.weight.zero_()
        p = made.heads.bias.view(2, -1).zero_()
        p[:, M + 1 : M + 3], p[:, -2] = -30, 30  # neither content nor sharpening, no shift
    weights = made(torch.randn(B, 50, F).to(dtype), need_weights=True).weights
    assert (weights[..., 0].float() > 0.999).all()


def test_a_start_is_nobodys_memory():
    made = machine()
    slot = made.slot.detach().clone()
    state = made.start(B)
    with torch.no_grad():
        state.memory.zero_()
        state.hidden.fill_(1)
    assert made.slot.equal(slot) and not state.cell.any()


def test_second_derivatives_of_empty_slots_and_keys(x):
    made = machine(spread=0.0)
    with torch.no_grad():
        made.slot.zero_()
        made.heads.bias.zero_()
    first = torch.autograd.grad(made(x).output.sum(), made.slot, create_graph=True)[0]
    second = torch.autograd.grad(first.square().sum(), list(made.parameters()), allow_unused=True)
    assert all(g is None or g.isfinite().all() for g in second)


@torch.no_grad()
def test_export(x, tmp_path):
    made = machine()
    batch = {0: torch.export.Dim("batch", min=2, max=64)}
    shapes = {"x": batch, "state": NTMState(*[batch] * 5)}
    exported = torch.export.export(made, (x, made.start(B)), dynamic_shapes=shapes, strict=False)
    torch.export.save(exported, tmp_path / "made.pt2")  # tuples have their names
    more = torch.cat([x, x])
    got, target = exported.module()(more, made.start(2 * B)), made(more)
    torch.testing.assert_close((got.output, *got.state), (target.output, *target.state))


def test_picture():
    pytest.importorskip("matplotlib")
    x, output, weights = torch.rand(6, 3), torch.rand(6, 2), torch.rand(6, 2, 5)
    drawn = plots.draw_addressing(x, output, weights[:, :1], weights)
    assert drawn.startswith(b"\x89PNG")


# ---- the example --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def example():
    path = Path(__file__).parent.parent / "examples" / "turing.py"
    spec = importlib.util.spec_from_file_location("turing", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tasks(example):
    Size = example.Size
    x, target = example.TASKS["copy"].batch(2, Size(3), "seed")
    assert x.shape == (2, 7, 9) and target.equal(x[:, :3, :8])
    assert x[:, :, 8].tolist() == [[0, 0, 0, 1, 0, 0, 0]] * 2 and not x[:, 4:].any()
    x, target = example.TASKS["reverse"].batch(2, Size(3), "seed")
    assert x.shape == (2, 7, 9) and x[:, :, 8].tolist() == [[0, 0, 0, 1, 0, 0, 0]] * 2
    assert target.equal(torch.stack([x[:, 2], x[:, 1], x[:, 0]], 1)[..., :8])
    assert not x[:, 4:].any() and not target.equal(x[:, :3, :8])
    x, target = example.TASKS["repeat"].batch(2, Size(3, 2), "seed")
    assert x.shape == (2, 3 + 1 + 7, 10) and target.shape == (2, 7, 9)
    assert target[:, :3].equal(x[:, :3, :9]) and target[:, 3:6].equal(x[:, :3, :9])
    assert target[:, 6].tolist() == [[0] * 8 + [1]] * 2 and not x[:, 4:].any()
    assert x[0, 3].tolist() == pytest.approx([0] * 8 + [1, 0.2])
    x, target = example.TASKS["recall"].batch(40, Size(4), "seed")
    assert x.shape == (40, 4 * 4 + 8, 8) and target.shape == (40, 3, 6)
    places = set()
    for row, answer in zip(x.view(40, 6, 4, 8), target):
        items, [question] = row[:4, 1:, :6], row[4:5, 1:, :6]
        at = [i for i in range(3) if items[i].equal(question)]
        assert any(items[i + 1].equal(answer) for i in at)
        places.update(at)
        assert row[:4, 0, 6].all() and row[4:, 0, 7].all()
        assert row[..., 6:].sum() == 6 and not row[5, 1:].any() and not row[:, 0, :6].any()
    assert places == {0, 1, 2}
    assert 0.45 < x[:, :16, :6].sum() / (40 * 4 * 18) < 0.55
    assert not x.equal(example.TASKS["recall"].batch(40, Size(4), "other")[0])


@pytest.mark.parametrize(("size", "sorted_"), [(1, 1), (4, 4), (5, 4), (9, 8), (10, 8), (20, 16)])
def test_sorting(example, size, sorted_):
    """The target is the vectors of the input by their priorities, the highest first."""
    x, target = example.TASKS["sort"].batch(50, example.Size(size), "seed")
    assert x.shape == (50, size + 1 + sorted_, 10) and target.shape == (50, sorted_, 8)
    assert not x[:, size + 1 :].any() and not x[:, :size, 8].any() and not x[:, size, :8].any()
    assert (x[:, size, 8] == 1).all() and not x[:, size, 9].any()
    for row, answer in zip(x, target):
        pairs = sorted(((step[9].item(), step[:8].tolist()) for step in row[:size]), reverse=True)
        assert answer.tolist() == [bits for _, bits in pairs[:sorted_]]
    priorities = x[:, :size, 9]
    assert -1 <= priorities.min() < -0.8 and 0.8 < priorities.max() <= 1
    assert set(x[:, :size, :8].unique().tolist()) == {0, 1}


@pytest.mark.parametrize("heads", [1, 4])
def test_models_of_a_size(example, heads):
    both = [example.RecurrentModel(name, 9, 8, 20, heads) for name in example.ROWS]
    assert (both[0].layer.num_reads, both[0].layer.num_writes) == (heads, heads)
    counts = [example.count_parameters(x) for x in both]
    assert isinstance(both[1].layer, nn.LSTM) and 1 <= counts[1] / counts[0] < 1.1
