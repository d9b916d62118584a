"""Contracts of all models and modules: batches, steps, padding, copies, half types, searches."""

import copy
import io
import itertools
import pickle

import pytest
import torch
from model_registry import MODELS, attend, prepare_with_mask, tensors
from torch import nn

from attnfast import decoding, models


@pytest.fixture
def model(case):
    torch.manual_seed(0)
    return case.make().double().eval()


@pytest.fixture
def inputs(case):
    torch.manual_seed(1)
    inputs = {name: x.detach().clone() for name, x in case.inputs().items()}
    return {k: x.requires_grad_() if x.is_floating_point() else x for k, x in inputs.items()}


def those(which):
    """Parametrise a test over models."""
    names = [name for name, case in MODELS.items() if which(case)]
    return pytest.mark.parametrize("case", [MODELS[x] for x in names], ids=names)


def every(results):
    return [y for x in results for y in x]


def noisy_sum(outputs):
    """Add outputs up with weights of their places, the same in a batch as alone."""
    total = 0
    for x in outputs:
        x = x.masked_fill(x == -torch.inf, 0)
        for axis in range(x.dim()):
            x = x * torch.linspace(1, 2, 40, dtype=x.dtype)[: x.shape[axis]].view(
                -1, *[1] * (x.dim() - 1 - axis)
            )
        total = total + x.sum()
    return total


def gradients(outputs, model, inputs):
    leaves = [*model.parameters(), *(x for x in inputs.values() if x.requires_grad)]
    total = noisy_sum(outputs)
    return torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)


def without_padding(case, inputs, i):
    """Return the i-th of a batch, alone and without padding."""
    alone = {name: x[i : i + 1] for name, x in inputs.items()}
    for name, (first, of, _) in case.padded.items():
        for axis, n in enumerate(alone[of].flatten().tolist(), first):
            alone[name] = alone[name].narrow(axis, 0, n)
    return alone


def spoilt(case, inputs):
    """Return a batch whose padding would spoil any sum."""
    spoilt = dict(inputs)
    for name, (first, of, poison) in case.padded.items():
        padding = torch.zeros(inputs[name].shape, dtype=torch.bool)
        for axis, lengths in enumerate(inputs[of].view(len(padding), -1).unbind(1), first):
            place = torch.arange(padding.shape[axis]) >= lengths[:, None]
            shape = [len(place), *[1] * (padding.dim() - 1)]
            shape[axis] = -1
            padding |= place.view(shape)
        spoilt[name] = inputs[name].masked_fill(padding, poison)
    return spoilt


@those(lambda case: True)
def test_a_sequence_in_a_batch_is_that_alone(case, model, inputs):
    """Results and gradients, whatever padding holds."""
    together = every(case.run(model, spoilt(case, inputs)))
    kept, alone = [], []
    for i in range(len(next(iter(inputs.values())))):
        want = every(case.run(model, without_padding(case, inputs, i)))
        alone += want
        for got, x in zip(together, want):
            kept.append(got[i : i + 1][(slice(1), *(slice(n) for n in x.shape[1:]))])
    torch.testing.assert_close(kept, alone)
    torch.testing.assert_close(gradients(kept, model, inputs), gradients(alone, model, inputs))


@those(lambda case: case.steps)
def test_steps_are_the_whole(case, model, inputs):
    """One row after the other gives results and gradients of all."""
    judge_steps(case, model, inputs, torch.arange(len(next(iter(inputs.values())))))


@those(lambda case: case.steps and not case.alike)
def test_a_search_may_reorder(case, model, inputs):
    judge_steps(case, model, inputs, torch.tensor([1, 0, 0]))


def judge_steps(case, model, inputs, order):
    rows, last = case.run(model, inputs)
    got, want = [], []
    for t, (found, after) in enumerate(case.steps(model, inputs, order)):  # noqa: B007
        got += found
        want += [x[:, t] if t == 0 else x[order, t] for x in rows]
    if after:
        got, want = got + after, want + [x[order] for x in last]
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(gradients(got, model, inputs), gradients(want, model, inputs))


@those(lambda case: True)
def test_every_parameter_learns(case, model, inputs):
    model.train()
    outputs = every(case.run(model, inputs))
    for (name, _), grad in zip(model.named_parameters(), gradients(outputs, model, inputs)):
        assert grad.isfinite().all() and (grad != 0).any(), name


@those(lambda case: not case.alike)
def test_copies_compute_the_same(case, model, inputs):
    want = every(case.run(model, inputs))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = copy.deepcopy(model)
    for p in loaded.parameters():
        nn.init.zeros_(p)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    assert not any(name.startswith("_") for name in model.state_dict())
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model), loaded):
        assert all(map(torch.equal, every(case.run(other, inputs)), want))


@those(lambda case: not case.chooses and not case.alike)
@pytest.mark.parametrize("autocast", [False, True], ids=["cast", "autocast"])
def test_half_types_are_near(case, autocast, model, inputs):
    want = every(case.run(model, inputs))
    dtype = torch.float32 if autocast else torch.bfloat16
    inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got = every(case.run(model.to(dtype), inputs))
    assert case.run is not attend or got[0].dtype == torch.bfloat16
    for x, y in zip(got, want):
        x, y = (z.double().masked_fill(z == -torch.inf, 0) for z in (x, y))
        assert (x - y).abs().max() <= 0.05 * (1 + y.abs().max())


@those(lambda case: getattr(case.make(), "has_history", False) and case.steps and not case.phases)
def test_padding_of_the_target_does_not_count(case, model, inputs):
    """In many rows and in steps: a history goes on from the last row before it."""
    states, counts = inputs["state"], torch.tensor([4, 2, 0])[: len(inputs["state"])]
    there = torch.arange(states.shape[1]) < counts[:, None]
    memory, in_steps = prepare_with_mask(model, inputs), None
    *_, at_once = model(states, memory, target_mask=there)
    for t in range(states.shape[1]):
        *_, in_steps = model(states[:, t], memory, in_steps, target_mask=there[:, t])
    for i, n in enumerate(counts):
        this = torch.tensor([i])
        own = memory.index_select(this)
        *_, alone = model(states[this, :n], own)
        want = model(states[this], own, alone)[0]
        for history in (at_once, in_steps):
            torch.testing.assert_close(model(states, memory, history)[0][this], want)
            torch.testing.assert_close(tensors(history.index_select(this)), tensors(alone))


@those(lambda case: case.sought and not case.alike)
@torch.no_grad()
def test_searches_of_a_batch_are_those_of_each(case, model, inputs):
    """And a beam of one is the greedy search, whether an operator or steps compute it."""
    scorer = models.CTCPrefixScorer() if isinstance(model, models.ListenAttendSpell) else None

    def found(inputs):
        source = [inputs[name] for name in case.sought]
        yield decoding.greedy_search(model, *source, max_length=4).best
        for beam, bonus in ((1, 0.0), (1, 1e-30), (3, 0.0)):  # with a bonus, by a beam's own steps
            more = {"scorer": scorer if beam > 1 else None, "length_bonus": bonus}
            yield decoding.beam_search(model, *source, beam, max_length=4, **more).best

    greedy, by_beam, by_steps, of_three = found(inputs)
    assert greedy == by_beam == by_steps and any(greedy + of_three)
    alone = [list(found(without_padding(case, inputs, i))) for i in range(len(greedy))]
    assert [[*itertools.chain(*x)] for x in zip(*alone)] == [greedy, by_beam, by_steps, of_three]
