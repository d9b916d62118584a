"""Explanations, against loops over single sentences and numbers that are known."""

import math
from itertools import pairwise

import pytest
import torch

from attnfast.analysis import faithfulness as ex
from attnfast.models import BOS, POOLINGS, Classifier, Config, Encoder, build

B, N, E, C = 5, 7, 3, 4
LENGTHS = torch.tensor([7, 4, 2, 1, 6])


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


V, W = numbers(E, seed=1), 2 * numbers(E, C, seed=2)


def toy(embedded, lengths):
    """One layer, whose states know of their neighbours: what is left out moves the rest up."""
    exists = torch.arange(embedded.shape[1]) < lengths.unsqueeze(1)
    x = embedded.masked_fill(~exists.unsqueeze(-1), 0)
    states = torch.tanh(x + 0.5 * torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])

    def decide(weights=None):
        if weights is None:
            weights = (states @ V).masked_fill(~exists, -torch.inf).softmax(-1)
        return (weights.unsqueeze(1) @ states).squeeze(1) @ W, weights

    return decide


@pytest.fixture
def embedded():
    """Inputs whose padding would spoil any sum."""
    x = numbers(B, N, E)
    x[torch.arange(N) >= LENGTHS.unsqueeze(1)] = torch.nan
    return x


def alone(embedded):
    """Yield the sentences without padding, and what of their batch's results is theirs."""
    for b, n in enumerate(LENGTHS.tolist()):
        yield b, embedded[b : b + 1, :n], torch.tensor([n]), n


def output(x, weights=None):
    return toy(x, torch.tensor([x.shape[1]]))(weights)[0].softmax(-1).squeeze(0)


# ---- distances ----------------------------------------------------------------------------------


def tau(a, b):
    """τ-b by its definition."""
    pairs = [(i, j) for i in range(len(a)) for j in range(i)]
    s, t = ([(x[i] > x[j]) - (x[i] < x[j]) for i, j in pairs] for x in (a, b))
    below = math.sqrt(sum(map(abs, s))) * math.sqrt(sum(map(abs, t)))
    return sum(x * y for x, y in zip(s, t)) / below if below else math.nan


def ranked(ties):
    a, b = numbers(40, 12), numbers(40, 12, seed=1)
    b += a * torch.linspace(-3, 3, 40).unsqueeze(1)  # from opposite orders to alike ones
    lengths = torch.arange(40) % 12 + 1
    if ties:
        a, b = (a * 2).round(), b.round()
    hidden = torch.arange(12) >= lengths.unsqueeze(1)
    return a.masked_fill(hidden, torch.nan), b.masked_fill(hidden, -torch.inf), lengths


@pytest.mark.parametrize("ties", [False, True])
def test_tau_by_its_definition(ties):
    a, b, lengths = ranked(ties)
    wanted = [tau(x[:n].tolist(), y[:n].tolist()) for x, y, n in zip(a, b, lengths)]
    assert ex.kendall_tau(a, b, lengths).tolist() == pytest.approx(wanted, nan_ok=True)
    assert 0 < sum(map(math.isnan, wanted)) < 20


@pytest.mark.parametrize("ties", [False, True])
def test_tau_by_scipy(ties):
    stats = pytest.importorskip("scipy.stats")
    a, b, lengths = ranked(ties)
    wanted = [
        stats.kendalltau(x[:n], y[:n]).statistic if n > 1 else math.nan
        for x, y, n in zip(a.numpy(), b.numpy(), lengths.tolist())
    ]
    assert ex.kendall_tau(a, b, lengths).tolist() == pytest.approx(wanted, nan_ok=True)


def test_tau_of_all_keys_and_of_large_numbers():
    a = torch.tensor([[3e38, -3e38, 0.0, 1e-30]])
    assert ex.kendall_tau(a, -a).tolist() == [-1]
    assert ex.kendall_tau(a, a.square()).tolist() == pytest.approx(
        [tau(a[0].tolist(), a[0].square().tolist())]
    )


def test_distances():
    p, q = torch.tensor([0.5, 0.5, 0]), torch.tensor([0.2, 0.3, 0.5])
    assert float(ex.total_variation(p, q)) == pytest.approx(0.5)
    m = [(x + y) / 2 for x, y in zip(p.tolist(), q.tolist())]
    parts = [x * math.log(x / z) for r in (p, q) for x, z in zip(r.tolist(), m) if x]
    assert float(ex.jensen_shannon(p, q)) == pytest.approx(sum(parts) / 2)
    ends = torch.eye(3)
    assert ex.jensen_shannon(ends[0], ends[1]).item() == pytest.approx(math.log(2))
    p.requires_grad_()
    (gradient,) = torch.autograd.grad(ex.jensen_shannon(p, q), p)
    assert gradient.isfinite().all()


# ---- importance ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fixed", [False, True])
def test_gradient_times_input(embedded, fixed):
    """Against differences of ln y."""
    found, step = ex.gradient_times_input(toy, embedded, LENGTHS, fixed=fixed), 1e-6
    for b, x, n, _ in alone(embedded):
        decided = output(x).argmax()
        weights = toy(x, n)()[1] if fixed else None
        for j in range(N):
            if j >= n:
                assert found[b, j] == 0
                continue
            more, less = x.clone(), x.clone()
            more[:, j] *= 1 + step
            less[:, j] *= 1 - step
            slope = (output(more, weights) / output(less, weights)).log()[decided] / (2 * step)
            assert float(found[b, j]) == pytest.approx(abs(float(slope)), abs=1e-8)


def test_leave_one_out(embedded):
    found = ex.leave_one_out(toy, embedded, LENGTHS)
    for b, x, _, n in alone(embedded):
        wanted = [0.0] * N
        for j in range(n if n > 1 else 0):
            left = torch.cat([x[:, :j], x[:, j + 1 :]], 1)
            wanted[j] = float((output(x) - output(left)).abs().sum() / 2)
        assert found[b].tolist() == pytest.approx(wanted)
    assert ex.leave_one_out(toy, embedded[:, :1], LENGTHS.clamp_max(1)).tolist() == [[0.0]] * B


def test_weight_gradient(embedded):
    found, step = ex.weight_gradient(toy, embedded, LENGTHS), 1e-6
    for b, x, length, n in alone(embedded):
        weights, decided = toy(x, length)()[1], output(x).argmax()
        for j in range(n):
            more = weights + step * torch.eye(n)[j]
            slope = (output(x, more) / output(x)).log()[decided] / step
            assert float(found[b, j]) == pytest.approx(float(slope), abs=1e-4)
        assert not found[b, n:].any()


# ---- other weights ------------------------------------------------------------------------------


def listening(reader, heard):
    """Keep the weights that a reading is given."""

    def read(embedded, lengths):
        reading = reader(embedded, lengths)

        def decide(weights=None):
            if weights is not None:
                heard.append(weights)
            return reading(weights)

        return decide

    return read


def test_permuted(embedded):
    heard = []
    found = ex.permutation_test(listening(toy, heard), embedded, LENGTHS, count=21, seed=3)
    _, weights = toy(embedded, LENGTHS)()
    assert len(heard) == 21
    for other in heard:
        torch.testing.assert_close(other.sort(1).values, weights.sort(1).values)
        assert torch.equal(other == 0, weights == 0)
    assert any(not torch.equal(a, b) for a, b in pairwise(heard))
    for b, x, _, n in alone(embedded):
        moved = [float((output(x, w[b : b + 1, :n]) - output(x)).abs().sum() / 2) for w in heard]
        apart = [float(ex.jensen_shannon(weights[b], w[b])) for w in heard]
        assert float(found.distance[b]) == pytest.approx(sorted(moved)[10])
        assert float(found.divergence[b]) == pytest.approx(sorted(apart)[10])
        assert float(found.largest[b]) == pytest.approx(float(weights[b].max()))
    again, other = (ex.permutation_test(toy, embedded, LENGTHS, count=21, seed=s) for s in (3, 4))
    assert torch.equal(again.distance, found.distance)
    assert not torch.equal(other.distance, found.distance)


def test_adversarial_keeps_the_output(embedded):
    found = ex.adversarial(toy, embedded, LENGTHS, epsilon=0.05, restarts=2, steps=100)
    reading = toy(embedded, LENGTHS)
    logits, weights = reading()
    torch.testing.assert_close(found.weights.sum(1), torch.ones(B, dtype=torch.float64))
    assert not found.weights[weights == 0].any()
    moved = ex.total_variation(logits.softmax(-1), reading(found.weights)[0].softmax(-1))
    torch.testing.assert_close(found.distance, moved)
    assert (moved <= 0.05).all()
    torch.testing.assert_close(found.divergence, ex.jensen_shannon(weights, found.weights))
    assert (found.divergence <= found.bound + 1e-12).all() and (found.bound < math.log(2)).all()
    assert (found.divergence > 0.01)[LENGTHS > 2].all() and found.divergence[3] == 0


def test_adversarial_finds_what_there_is():
    weights = torch.tensor([[0.6, 0.4]])

    def looks(embedded, lengths):  # the output is the weights
        return lambda other=None: ((x := weights if other is None else other).log(), x)

    def sleeps(embedded, lengths):  # nothing but what is there already
        return lambda other=None: (torch.zeros(1, 3), weights if other is None else other)

    call = torch.zeros(1, 2, 1), torch.tensor([2])
    found = ex.adversarial(looks, *call, epsilon=0.1, restarts=1, steps=100)
    best = ex.jensen_shannon(weights, torch.tensor([[0.7, 0.3]]))
    assert 0.95 * best < found.divergence <= best + 1e-6
    for reader, epsilon in ((sleeps, 0.0), (looks, 1.0)):
        found = ex.adversarial(reader, *call, epsilon=epsilon, restarts=1, steps=1)
        end = ex.jensen_shannon(weights, torch.tensor([[0.0, 1.0]]))
        assert float(found.divergence) == float(found.bound) == pytest.approx(float(end))


def test_erasure(embedded):
    """Against a loop; some decisions change and some do not."""
    ranking, shares = numbers(B, N, seed=9), []
    found = ex.erasure(toy, embedded, LENGTHS, ranking)
    for b, x, length, n in alone(embedded):
        weights, order = toy(x, length)()[1], sorted(range(n), key=lambda j: -ranking[b, j])
        share = 1.0
        for k in range(n - 1, 0, -1):
            kept = weights.clone()
            kept[0, order[:k]] = 0
            if output(x, kept / kept.sum()).argmax() != output(x).argmax():
                share = k / n
        shares.append(share)
    assert found.tolist() == pytest.approx(shares)
    assert 1 in shares and min(shares) < 0.9


# ---- models -------------------------------------------------------------------------------------

WORDS = torch.randint(4, 20, (B, N), generator=torch.Generator().manual_seed(0))


def classifier(pooling="attention"):
    torch.manual_seed(0)
    return Classifier(Encoder(6, 5), 20, 6, 3, pooling, dropout=0.3).eval()


@pytest.mark.parametrize("pooling", POOLINGS)
def test_classifier(pooling):
    model = classifier(pooling)
    for b, n in enumerate(LENGTHS.tolist()):
        words, length = WORDS[b : b + 1, :n], torch.tensor([n])
        states = model.encoder(model.embedding(words), length).squeeze(0)
        if pooling == "max":
            pooled = states.max(0).values
        elif pooling == "mean":
            pooled = states.mean(0)
        else:
            score = model.attention
            keys = score.key_proj(states) + score.query_proj(model.query)
            pooled = (torch.tanh(keys) @ score.score_vector).softmax(0) @ states
        wanted = model.output(pooled)
        torch.testing.assert_close(model(WORDS, LENGTHS)[b], wanted, atol=1e-5, rtol=1e-5)
    if pooling == "max":
        with pytest.raises(ValueError, match=r"pooling must be attention or mean.*got 'max'"):
            model.read(model.embed(WORDS), LENGTHS)
        return
    reading = model.read(model.embed(WORDS), LENGTHS)
    logits, weights = reading()
    torch.testing.assert_close(logits, model(WORDS, LENGTHS))
    torch.testing.assert_close(reading(weights)[0], logits, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(reading(weights.flip(1))[0], logits, atol=1e-3)
    with pytest.raises(ValueError, match=r"weights must be torch.float32 \[5, 7\], got"):
        reading(weights[:, 1:])


def translator(attention="bahdanau", **options):
    torch.manual_seed(0)
    return build(Config(20, attention, embed_dim=6, hidden_dim=5, **options)).eval()


@pytest.mark.parametrize("place", [0, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attention": "general"},
        {"attention": "concat", "recurrence": "input_feeding", "cell": "lstm"},
        {"gated": True},
        {"gated": True, "attention_top_k": 3},
    ],
)
def test_next_word(options, place):
    model = translator(**options)
    target = torch.cat([torch.full((B, 1), BOS), WORDS[:, :5]], 1)
    whole = model(WORDS, LENGTHS, target, need_weights=True)
    reader = ex.next_word(model, target[:, : place + 1])
    attention, reading = model.decoder.attention, reader(model.embed(WORDS), LENGTHS)
    logits, weights = reading()
    torch.testing.assert_close(logits, whole[0][:, place], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(weights, whole.weights[:, place], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(reading(weights)[0], logits, atol=1e-5, rtol=1e-5)
    even = (torch.arange(N) < LENGTHS.unsqueeze(1)) / LENGTHS.unsqueeze(1)
    moved, used = reading(even)
    assert used is even or torch.equal(used, even)
    first = LENGTHS > 1
    assert ((moved - logits).abs().amax(1) > 1e-4)[first].all()
    assert model.decoder.attention is attention
    alone = ex.next_word(model, target[1:2, : place + 1])
    found = [
        function(reader, model.embed(WORDS), LENGTHS)[1, :4]
        for function in (ex.gradient_times_input, ex.leave_one_out, ex.weight_gradient)
    ]
    call = alone, model.embed(WORDS[1:2, :4]), LENGTHS[1:2]
    for numbers, function in zip(
        found, (ex.gradient_times_input, ex.leave_one_out, ex.weight_gradient)
    ):
        torch.testing.assert_close(numbers, function(*call)[0], atol=1e-5, rtol=1e-3)
        assert (numbers != 0).all()


@pytest.mark.parametrize("of", ["classifier", "translator"])
def test_models_as_they_are(of):
    """In float32, and their parameters get no gradient."""
    model = classifier() if of == "classifier" else translator()
    reader = model.read if of == "classifier" else ex.next_word(model, WORDS[:, :2])
    call = reader, model.embed(WORDS), LENGTHS
    importance = ex.gradient_times_input(*call)
    tau = ex.kendall_tau(importance, ex.leave_one_out(*call), LENGTHS)
    assert torch.equal(tau.isnan(), LENGTHS == 1)
    moved = ex.permutation_test(*call, count=5).distance
    assert (moved[LENGTHS > 2] > 1e-6).all() and moved[LENGTHS == 1] < 1e-6
    found = ex.adversarial(*call, steps=5, restarts=1)
    assert (found.distance <= 0.05).all() and found.weights.dtype == torch.float32
    assert (ex.erasure(*call, importance) <= 1).all()
    assert all(x.grad is None for x in model.parameters())


# ---- errors -------------------------------------------------------------------------------------

X = torch.zeros(2, 3, 4)
L = torch.tensor([3, 2])


def wrong(embedded, lengths):
    return lambda weights=None: (torch.zeros(2, 3), torch.zeros(2, 4))


def none(embedded, lengths):
    return lambda weights=None: torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ex.leave_one_out(wrong, X, L), r"reader must .*weights \[2, 3\]"),
        (lambda: ex.leave_one_out(none, X, L), r"reader must .*got a Tensor"),
        (lambda: ex.next_word(translator().train(), WORDS), "model must be in evaluation mode"),
        (lambda: ex.next_word(translator("none"), WORDS), "model must .*got FixedContext"),
        (lambda: ex.next_word(translator("coverage"), WORDS), "model must .*got CoverageAttention"),
        (lambda: ex.next_word(translator("local"), WORDS), "model must .*got LocalAttention"),
        (lambda: ex.next_word(translator("multihop"), WORDS), "model must .*got MultiHopAttention"),
        (
            lambda: ex.next_word(translator(pointer_generator=True), WORDS),
            "got BahdanauAttention, copying",
        ),
        (
            lambda: ex.leave_one_out(ex.next_word(translator(), WORDS), torch.zeros(2, 3, 6), L),
            "embedded must be of as many sentences as words, 5, got 2",
        ),
    ],
)
def test_bad_input_is_one_sentence(call, words):
    with pytest.raises((ValueError, TypeError), match=words) as error:
        call()
    assert "\n" not in str(error.value)
