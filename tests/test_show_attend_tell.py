"""Captioning: grids of images, gates, drawn keys and their losses, by loops and enumeration."""

import importlib.util
import io
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

from attnfast.decoding import beam_search, greedy_search
from attnfast.losses import Reinforce, doubly_stochastic_loss
from attnfast.models import GridEncoder, MeanContext, ShowAttendTell
from attnfast.models._checks import BOS, EOS
from attnfast.nn import (
    AttentionLSTM,
    BahdanauAttention,
    CoverageAttention,
    GatedAttention,
    HardAttention,
    HardAttentionState,
    LuongAttention,
    TopKAttention,
)

B, T, V, H, E = 3, 5, 11, 6, 4
KINDS = ["additive", "general", "gated", "hard", "mean", "few", "coverage", "both", "one of few"]
SIZES = torch.tensor([[9, 12], [7, 5], [4, 10]])


def encoder():
    """A grid's encoder whose norms are not those that it begins with."""
    grid = GridEncoder(2, (4, 5), (1, 2), place_scale=3.0).double()
    for norm in grid.norms:
        for x in (norm.weight.data, norm.running_mean, norm.running_var):
            x.uniform_(0.5, 1.5)
        norm.bias.data.normal_()
    return grid


def images():
    return torch.randn(B, 2, 9, 12, dtype=torch.float64)


def model(kind, **options):
    torch.manual_seed(0)
    grid = encoder()
    F_ = grid.output_dim
    attention = {
        "additive": lambda: BahdanauAttention(H, F_, 8),
        "general": lambda: LuongAttention(H, F_, "general"),
        "gated": lambda: GatedAttention(BahdanauAttention(H, F_, 8), H),
        "hard": lambda: HardAttention(BahdanauAttention(H, F_, 8), **options),
        "both": lambda: GatedAttention(HardAttention(BahdanauAttention(H, F_, 8)), H),
        "one of few": lambda: HardAttention(TopKAttention(LuongAttention(H, F_), 3)),
        "mean": lambda: MeanContext(),
        "few": lambda: TopKAttention(LuongAttention(H, F_), 3),
        "coverage": lambda: GatedAttention(CoverageAttention(H, F_, 8), H),
    }[kind]()
    return ShowAttendTell(grid, attention, V, H, E, max_length=7).double().eval()


def words():
    return torch.tensor([[BOS, 5, 6, 7, 8], [BOS, 9, 0, 0, 0], [BOS, 5, 5, 0, 0]])


def weights_by_hand(attention, state, cells):
    """The additive or general score of one state [Q] and the cells [n, F] that exist."""
    if isinstance(attention, LuongAttention):
        return (cells @ attention.key_proj.weight.T @ state).softmax(-1)
    q, k = attention.query_proj(state), attention.key_proj(cells)
    return ((q + k).tanh() @ attention.score_vector).softmax(-1)


def test_a_grid_is_that_of_each_image_alone():
    grid, x = encoder().eval(), images()
    states, inside = grid(x, SIZES)
    assert grid.stride == 2 and grid.field == 5 and states.shape == (B, 5, 6, 7)
    for i, (height, width) in enumerate(SIZES.tolist()):
        want = x[i : i + 1, :, :height, :width]
        for layer, norm in zip(grid.layers, grid.norms):
            want = F.conv2d(want, layer.weight, None, layer.stride, 1)
            given = norm.running_mean, norm.running_var, norm.weight, norm.bias
            want = F.batch_norm(want, *given, eps=norm.eps).relu()
        rows, columns = want.shape[2:]
        assert [rows, columns] == [-(-height // 2), -(-width // 2)]
        got = states[i, :rows, :columns]
        torch.testing.assert_close(got[..., :5], want[0].permute(1, 2, 0))
        for r in range(rows):
            for c in range(columns):
                place = [3 * ((2 * r + 1) / rows - 1), 3 * ((2 * c + 1) / columns - 1)]
                assert got[r, c, 5:].tolist() == pytest.approx(place)
        assert inside[i, :rows, :columns].all() and inside[i].sum() == rows * columns
        assert not states[i][~inside[i]].any()


def test_a_cell_knows_of_its_field():
    grid = GridEncoder(1, (4, 4, 4), (1, 2, 2)).double().eval()
    with torch.no_grad():
        for p in grid.parameters():
            p.abs_()  # no rectifier hides a pixel
    x = torch.rand(1, 1, 40, 40, dtype=torch.float64, requires_grad=True)
    states, _ = grid(x, torch.tensor([[40, 40]]))
    assert (grid.stride, grid.field) == (4, 9)
    seen = torch.autograd.grad(states[0, 5, 4].sum(), x)[0][0, 0].nonzero()
    for place, middle in zip(seen.T, (20, 16)):  # the pixel at the stride times the cell's place
        assert middle - 4 <= place.min() < middle < place.max() <= middle + 4


def test_norms_are_of_the_cells_that_exist():
    torch.manual_seed(0)
    grid = GridEncoder(2, (4,), (2,)).double()
    x = torch.randn(B, 2, 9, 12, dtype=torch.float64)
    states, inside = grid(x, SIZES)
    alone = [x[i : i + 1, :, :h, :w] for i, (h, w) in enumerate(SIZES.tolist())]
    cells = [grid.layers[0](one)[0].flatten(1).T for one in alone]
    all_cells = torch.cat(cells)
    mean, var = all_cells.mean(0), all_cells.var(0, correction=0)
    want = ((all_cells - mean) / (var + grid.norms[0].eps).sqrt()).relu()
    torch.testing.assert_close(states[inside][:, :4], want)
    torch.testing.assert_close(grid.norms[0].running_mean, 0.1 * mean)
    longer = F.pad(x, (0, 4, 0, 3), value=torch.nan)
    torch.testing.assert_close(grid(longer, SIZES)[0][:, :5, :6], states)


@pytest.mark.parametrize("kind", ["additive", "hard", "mean"])
def test_captions_of_an_image_look_once(kind):
    told, x = model(kind), images()
    given = words()[[0, 1, 2, 1, 0, 2]]  # two captions of each
    got = told(x, SIZES, given, need_weights=True)
    each = torch.arange(B).repeat_interleave(2)
    want = told(x[each], SIZES[each], given, need_weights=True)
    for name in ("logits", "mask") if kind == "mean" else ("logits", "mask", "weights"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name))


@pytest.mark.parametrize("kind", [x for x in KINDS if x != "mean"])
def test_weights_are_of_cells_and_words_that_exist(kind):
    got = model(kind)(images(), SIZES, words(), need_weights=True)
    hidden = ~got.mask.flatten(1).unsqueeze(1).expand_as(got.weights)
    assert not got.weights[hidden].any()
    torch.testing.assert_close(got.weights.sum(-1), (words() != 0).double())


@pytest.mark.parametrize("kind", ["additive", "general", "gated", "hard", "mean"])
def test_a_caption_by_hand(kind):
    told, x = model(kind), images()
    got = told(x, SIZES, words()).logits
    grid, inside = told.encoder(x, SIZES)
    decoder, attention = told.decoder, told.decoder.attention
    for i in range(B):
        cells = grid[i][inside[i]]
        mean = cells.mean(0)
        h, c = told.first_hidden(mean).tanh(), told.first_cell(mean).tanh()
        for t in range(int((words()[i] != 0).sum())):
            if kind == "mean":
                context = mean
            else:
                alpha = weights_by_hand(getattr(attention, "attention", attention), h, cells)
                context = cells[alpha.argmax()] if kind == "hard" else alpha @ cells
            if kind == "gated":
                context = torch.sigmoid(attention.gate.weight @ h + attention.gate.bias) * context
            word = told.embedding(words()[i, t])
            gates = decoder.weight_ih_l0 @ torch.cat([word, context]) + decoder.bias_ih_l0
            gates = gates + decoder.weight_hh_l0 @ h + decoder.bias_hh_l0
            a, f, g, o = gates.chunk(4)
            c = f.sigmoid() * c + a.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            want = told.output(word + told.readout(torch.cat([h, context])))
            torch.testing.assert_close(got[i, t], want)


@pytest.mark.parametrize("kind", KINDS)
def test_a_search_says_what_the_teacher_would(kind):
    told, x = model(kind), images()
    found = greedy_search(told, x, SIZES).best
    options = {"length_penalty": 0.0, "length_bonus": 1e-30}  # a beam's own steps
    assert beam_search(told, x, SIZES, beam=1, **options).best == found
    for beam in (1, 2):
        short = beam_search(told, x, SIZES, beam, max_length=1).best
        assert all(len(y) <= 1 for y in short)
    longest = max(map(len, found))
    said = torch.tensor([[BOS, *y, *[0] * (longest - len(y))] for y in found])
    logits = told(x, SIZES, said).logits
    logits[..., :EOS] = -torch.inf  # padding, unknown words and the start are never said
    for got, y in zip(logits.argmax(-1), found):
        assert got[: len(y)].tolist() == y and len(y) < told.max_length


@pytest.mark.parametrize("history", [False, True])
def test_a_gate_scales_the_context(history):
    torch.manual_seed(0)
    inner = (CoverageAttention if history else BahdanauAttention)(H, 7, 8)
    gated = GatedAttention(inner, H)
    state, source = torch.randn(B, 4, H, requires_grad=True), torch.randn(B, 9, 7)
    memory = gated.prepare(source, torch.tensor([9, 4, 1]))
    context, weights, *_ = gated(state, memory, need_weights=True)
    plain, same, *_ = inner(state, memory, need_weights=True)
    want = gated.gate(state).sigmoid() * plain
    torch.testing.assert_close(context, want)
    assert torch.equal(weights, same) and gated.has_history == history
    step = gated(state[:, 0], memory)[0]
    torch.testing.assert_close(step, want[:, 0])
    got, want = (torch.autograd.grad(y.square().sum(), state)[0] for y in (context, want))
    torch.testing.assert_close(got, want)


def test_what_is_drawn_and_its_chances():
    torch.manual_seed(0)
    hard = HardAttention(BahdanauAttention(H, 7, 8), average=0.25)
    state, source = torch.randn(1, 1, H).expand(4000, 2, H), torch.randn(1, 5, 7)
    memory = hard.prepare(source.expand(4000, 5, 7), torch.full((4000,), 4))
    context, weights, drawn = hard(state, memory, need_weights=True)
    alpha = weights[0, 0, :4]
    averaged = drawn.averaged
    assert averaged.float().mean().item() == pytest.approx(0.25, abs=0.03)
    torch.testing.assert_close(context[averaged], (weights @ source)[averaged])
    which = (context[~averaged].unsqueeze(-2) == source[0]).all(-1)  # [n, 2, 5]
    assert (which.sum(-1) == 1).all() and not which[..., 4].any()
    torch.testing.assert_close(which[..., :4].float().mean((0, 1)), alpha, atol=0.03, rtol=0)
    want = (which[..., :4] * alpha.log()).sum((1, 2))
    torch.testing.assert_close(drawn.log_prob[~averaged], want)
    entropy = -2 * (alpha * alpha.log()).sum()
    torch.testing.assert_close(drawn.entropy[~averaged], entropy.expand(len(want)))
    assert not drawn.log_prob[averaged].any() and not drawn.entropy[averaged].any()
    again = drawn.index_select(torch.tensor([3, 3]))
    assert all(torch.equal(x, y[[3, 3]]) for x, y in zip(again, drawn))


def test_padding_and_rows_without_keys_add_nothing():
    torch.manual_seed(0)
    hard = HardAttention(BahdanauAttention(H, 7, 8), average=0.0)
    state, source = torch.randn(B, 4, H, requires_grad=True), torch.randn(B, 5, 7)
    memory = hard.prepare(source, torch.tensor([5, 3, 0]))
    counts = torch.tensor([[True] * 4, [True, True, False, False], [True] * 4])
    context, _, drawn = hard(state, memory, target_mask=counts)
    short = hard(state[:, :2], memory, target_mask=counts[:, :2])[2]
    assert not context[2].any() and drawn.log_prob[2] == 0 == drawn.entropy[2]
    torch.testing.assert_close(drawn.entropy[1], short.entropy[1])
    (drawn.log_prob + drawn.entropy).sum().backward()
    assert state.grad.isfinite().all() and not state.grad[2].any() and not state.grad[1, 2:].any()


@pytest.mark.parametrize("training", [False, True])
def test_hard_attention_shows_nan(training):
    torch.manual_seed(0)
    hard = HardAttention(BahdanauAttention(H, 7, 8), average=0.0).train(training)
    state, source = torch.randn(B, 4, H), torch.randn(B, 5, 7)
    memory = hard.prepare(source, torch.tensor([5, 5, 0]))
    memory = memory._replace(
        key=memory.key.index_fill(0, torch.tensor(1), torch.nan), shared_keys=None
    )
    context, _, drawn = hard(state, memory)
    assert context[1].isnan().all() and context[0].isfinite().all() and not context[2].any()
    assert drawn.log_prob.isnan().tolist() == [False, True, False]


def test_a_search_shows_nan_of_hard_attention():
    told = model("hard")
    with torch.no_grad():
        told.decoder.attention.attention.score_vector.fill_(torch.nan)
    with pytest.raises(ValueError, match="the model's scores must be finite numbers, got NaN"):
        greedy_search(told, images(), SIZES)


@pytest.mark.parametrize("training", [False, True])
def test_hard_attention_to_no_keys(training):
    hard = HardAttention(BahdanauAttention(H, 7, 8)).train(training)
    memory = hard.prepare(torch.randn(B, 0, 7))
    context, weights, drawn = hard(torch.randn(B, 4, H), memory, need_weights=True)
    assert context.shape == (B, 4, 7) and weights.shape == (B, 4, 0)
    assert not context.any() and not drawn.log_prob.any() and not drawn.entropy.any()


def test_evaluation_draws_nothing():
    hard = HardAttention(BahdanauAttention(H, 7, 8)).eval()
    memory, before = hard.prepare(torch.randn(B, 5, 7)), torch.get_rng_state()
    assert not hard(torch.ones(B, 4, H), memory)[2].averaged.any()
    hard.train().average = 0.0
    assert not hard.start(memory).averaged.any()
    assert torch.equal(torch.get_rng_state(), before)


def test_the_mean_of_values():
    states, values = torch.randn(B, 5, 7), torch.randn(B, 5, 7)
    for attention in (MeanContext(), GatedAttention(MeanContext(), H)):
        memory = attention.prepare(states, torch.tensor([5, 3, 1]), values=values)
        torch.testing.assert_close(memory.value[1, 0], values[1, :3].mean(0))


def test_reinforce_is_the_gradient_of_the_expected_likelihood():
    """All draws of two steps, each by its probability: no other way to say what the mean is."""
    torch.manual_seed(0)
    layer = AttentionLSTM(E, H, 7, HardAttention(BahdanauAttention(H, 7, 8), 0.0)).double()
    x, source = torch.randn(1, 2, E).double(), torch.randn(1, 3, 7).double()
    target = torch.randn(H).double()
    parameters = [*layer.parameters()]

    def draw(*keys: int):
        drawn = [torch.tensor([[key]]) for key in keys]
        with mock.patch("torch.multinomial", side_effect=drawn):
            result = layer(x, layer.prepare(source))
        return -(result.output - target).square().sum((1, 2)), result.state.history

    loss = Reinforce().double()
    loss.baseline.fill_(0.7)
    loss.eval()
    expected, got = 0.0, [torch.zeros_like(p) for p in parameters]
    for keys in ((i, j) for i in range(3) for j in range(3)):
        likelihood, drawn = draw(*keys)
        expected = expected - (drawn.log_prob.exp() * likelihood).sum()
        chance = float(drawn.log_prob.detach().exp())
        one = loss(likelihood, drawn.log_prob, drawn.entropy)
        grads = torch.autograd.grad(one, parameters, retain_graph=True)
        got = [a + chance * g for a, g in zip(got, grads)]
    for a, b in zip(got, torch.autograd.grad(expected, parameters)):
        torch.testing.assert_close(a, b)


def test_the_baseline_moves_in_training_alone():
    loss, zeros = Reinforce(weight=2.0, entropy_weight=0.5), torch.zeros(2)
    first, second = torch.tensor([-4.0, -2.0]), torch.tensor([-1.0, -1.0])
    log_prob, entropy = torch.tensor([-0.5, -1.5]), torch.tensor([0.25, 0.75])
    got = loss(first, log_prob, entropy)  # the first batch begins it: less its own mean, -3
    gain = torch.tensor([-1.0, 1.0])
    torch.testing.assert_close(got, -(first + 2 * gain * log_prob + 0.5 * entropy).mean())
    assert loss.baseline.item() == pytest.approx(-3)
    assert loss(second, log_prob, zeros).item() == pytest.approx(1 - 2 * 2 * -1)
    assert loss.baseline.item() == pytest.approx(0.9 * -3 + 0.1 * -1)
    loss.eval()(first, log_prob, zeros)
    assert loss.baseline.item() == pytest.approx(-2.8)
    assert loss.state_dict()["baseline"] == loss.baseline


def test_doubly_stochastic():
    weights = torch.rand(2, 3, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    got = doubly_stochastic_loss(weights, mask)
    for i in range(2):
        want = sum((1 - weights[i, :, j].sum()) ** 2 for j in range(4) if mask[i, j])
        torch.testing.assert_close(got[i], want)
    torch.testing.assert_close(doubly_stochastic_loss(weights)[0], got[0])
    assert doubly_stochastic_loss(weights.half()).dtype == torch.float32
    torch.autograd.gradcheck(lambda x: doubly_stochastic_loss(x, mask), weights)


def test_norms_want_two_cells_in_training():
    told, sizes = model("additive").train(), SIZES[:1] * 0 + 2
    said = "sizes must be of two cells of 2 × 2 pixels at least in training, got 1"
    with pytest.raises(ValueError, match=said):
        told(images()[:1, :, :2, :2], sizes, words()[:1])


@pytest.mark.parametrize(
    "call",
    [
        lambda m, x: m(x, SIZES, words()[:2]),
        lambda m, x: m(x, SIZES, words() + 3),
        lambda m, x: m(x, SIZES, words(), "yes"),
        lambda m, x: m(x[:1, :, :2, :2], SIZES[:1] * 0 + 2, words()[:1]),
    ],
)
def test_what_is_refused_moves_no_norm(call):
    told = model("additive").train()
    before = {name: x.clone() for name, x in told.state_dict().items()}
    with pytest.raises(ValueError, match=r"must be .*, got"):
        call(told, images())
    assert all(torch.equal(x, before[name]) for name, x in told.state_dict().items())


def test_the_mean_of_half_types_does_not_overflow():
    states = torch.full((1, 500, 2), 300.0, dtype=torch.float16)
    memory = MeanContext().prepare(states)
    assert memory.value.dtype == torch.float16 and memory.value.tolist() == [[[300.0, 300.0]]]


def test_a_batch_that_is_infinite_leaves_the_baseline():
    loss, zeros = Reinforce(), torch.zeros(2)
    loss(torch.tensor([-torch.inf, -1.0]), zeros, zeros)
    loss(torch.tensor([-4.0, -2.0]), zeros, zeros)
    for bad in (-torch.inf, torch.nan):
        loss(torch.tensor([bad, -1.0]), zeros, zeros)
    assert loss.baseline.item() == pytest.approx(-3)


def test_drawn_is_what_a_search_keeps():
    history = HardAttentionState(
        torch.arange(3.0), torch.arange(3.0), torch.tensor([True, False, True])
    )
    assert history.index_select(torch.tensor([1])).averaged.tolist() == [False]


# ---- scenes -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scenes():
    path = Path(__file__).parent.parent / "examples" / "scenes.py"
    spec = importlib.util.spec_from_file_location("scenes", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def drawn_scenes(module, count):
    """Scenes of digits that are full squares, so that boxes are theirs."""
    glyphs = [[torch.ones(8, 8)] for _ in range(10)]
    return [module.draw_scene(glyphs, count, f"{count} {i}") for i in range(20)]


@pytest.mark.parametrize("count", [1, 2, 4, 5])
def test_a_scene_has_what_its_captions_say(scenes, count):
    for scene in drawn_scenes(scenes, count):
        again = drawn_scenes(scenes, count)[0]
        assert again.digits == drawn_scenes(scenes, count)[0].digits
        assert scene.image.min() > -1 and len(scene.digits) == count
        for digit in scene.digits:
            top, left, bottom, right = digit.box
            ink = scene.image[0, top:bottom, left:right].mean()
            assert ink > 0.6 and bottom <= scene.image.shape[1] and right <= scene.image.shape[2]
        texts = scenes.captions(scene)
        assert len(texts) == 16 and {w for x in texts for w in x.split()} <= {*scenes.WORDS}
        for text in texts:
            judged = scenes.judge(scene, text)
            assert judged.exact and judged.digits == judged.num_digits == count
            assert judged.relations == judged.num_relations == count - 1
            named = scenes.parse(text).digits
            for word, place in zip(named, judged.matches):
                assert scene.digits[place].value == word.value
                assert text.split()[word.place] == scenes.NUMBERS[word.value]


def placed(scenes, *digits):
    boxes = {"left": (10, 2, 18, 10), "right": (10, 30, 18, 38), "below": (28, 2, 36, 10)}
    found = tuple(scenes.Placed(value, small, boxes[place]) for value, small, place in digits)
    return scenes.Scene(torch.zeros(1, 40, 40), found)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("a seven left of a small two", (True, 2, 2, 1, 1)),
        ("there is a small two to the right of a seven", (True, 2, 2, 1, 1)),
        ("a seven right of a small two", (False, 2, 2, 0, 1)),
        ("a seven left of a two", (False, 2, 2, 1, 1)),
        ("a seven left of a small three", (False, 1, 2, 1, 1)),
        ("on the left a seven left of a small two", (True, 2, 2, 1, 1)),
        ("on the left there is a small two right of a seven", (False, 2, 2, 1, 1)),
        ("at the top a small two right of a seven", (True, 2, 2, 1, 1)),
        ("a seven", (False, 1, 2, 0, 0)),
        ("a seven left of a small two , left of a two", (False, 2, 3, 1, 2)),
        ("a seven left of", (False, 0, 2, 0, 0)),
        ("an seven left of a small two", (False, 0, 2, 0, 0)),
        ("", (False, 0, 2, 0, 0)),
    ],
)
def test_a_caption_is_judged(scenes, text, want):
    scene = placed(scenes, (7, False, "left"), (2, True, "right"))
    assert scenes.judge(scene, text)[:5] == want


def test_captions_name_digits_in_order(scenes):
    scene = placed(scenes, (7, False, "left"), (2, True, "right"), (8, False, "below"))
    across, down = (
        scenes.caption(scene, order, "there is", 1, ", which is") for order in scenes.ORDERS
    )
    assert across == (
        "on the left there is a seven over an eight , which is to the left of a small two"
    ) and down.startswith("at the top there is a seven to the left of a small two , which is ")


def test_where_attention_looks(scenes):
    row = torch.zeros(12).index_fill(0, torch.tensor(6), 1)  # row 1, column 2 of 3 × 4
    assert scenes.points_at(row, 4, 4, (4, 8, 5, 9))
    assert not scenes.points_at(row, 4, 4, (5, 8, 12, 12))
    weights = torch.zeros(6, 6)
    weights[1:3, 1:3] = 1
    weights[5, 5] = 0.4
    assert scenes.overlap(weights, (1, 1, 3, 3)) == 1
    assert scenes.overlap(weights, (1, 2, 3, 4)) == pytest.approx(2 / 6)


def test_what_no_canvas_has_room_for(scenes):
    glyphs = [[torch.ones(8, 8)] for _ in range(10)]
    with pytest.raises(ValueError, match="count must be no more digits than a canvas has room"):
        scenes.draw_scene(glyphs, 30, "x")
    with pytest.raises(ValueError, match="glyphs must be pictures of each of ten digits, got"):
        scenes.draw_scene(glyphs[:9], 2, "x")


# ---- the example --------------------------------------------------------------------------------


@pytest.fixture
def captioning(monkeypatch):
    for package in ("sklearn", "matplotlib", "sacrebleu"):
        pytest.importorskip(package)
    module = importlib.import_module("captioning")
    monkeypatch.setattr(module, "FEATURES", (4, 4))
    monkeypatch.setattr(module, "STRIDES", (4, 2))
    return module


def test_scenes_of_parts_share_no_digit(captioning):
    digits = captioning.Digits()
    sizes = {part: sum(map(len, x)) for part, x in digits.glyphs.items()}
    assert sizes == {"train": 1437, "test": 360}
    drawn = digits.examples("test", 3, 4)
    assert digits.examples("test", 3, 4) is drawn
    batch = captioning.gather(drawn, [x.captions[3:5] for x in drawn])
    for i, (example, (height, width)) in enumerate(zip(drawn, batch.sizes)):
        assert torch.equal(batch.images[i, :, :height, :width], example.scene.image)
        assert not batch.images[i, :, height:].any() and not batch.images[i, :, :, width:].any()
        texts = [captioning.decode(x) for x in example.captions]
        assert texts == captioning.captions(example.scene)
        for j, ids in enumerate(example.captions[3:5]):
            before, after = (x[2 * i + j] for x in batch[2:])
            assert before[before != 0].tolist() == [BOS, *ids]
            assert after[after != 0].tolist() == [*ids, EOS]


def test_shuffled_weights_stay_in_the_image(captioning):
    torch.manual_seed(0)
    inner = BahdanauAttention(H, 7, 8)
    attention = captioning.Shuffled(inner)
    mask = torch.tensor([[True, False, True, True, False], [True] * 5])
    memory = attention.prepare(torch.randn(2, 5, 7), mask=mask)
    state = torch.randn(2, H)
    want = inner(state, memory, need_weights=True)[1]
    draws = [attention(state, memory, need_weights=True) for _ in range(20)]
    for context, got in draws:
        assert not got[~mask].any()
        torch.testing.assert_close(got.sort(-1).values, want.sort(-1).values)
        torch.testing.assert_close(context, (got.unsqueeze(1) @ memory.value).squeeze(1))
    assert len({tuple(got[0].tolist()) for _, got in draws}) == 6  # all orders of three


def test_a_picture_of_what_is_looked_at(captioning):
    image, maps = torch.rand(12, 16), torch.rand(9, 12, 16)
    drawn = captioning.draw_looking(image, maps, list("abcdefghi"))
    pixels = importlib.import_module("matplotlib.image").imread(io.BytesIO(drawn))
    assert len({tuple(x) for x in pixels.reshape(-1, pixels.shape[-1])}) > 100
