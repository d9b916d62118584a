"""Searches against all sentences of a tiny vocabulary, and against a search in plain Python."""

import itertools
import math
import random

import pytest
import torch

from attnfast._utils.checks import InputError
from attnfast.decoding import beam_search, greedy_search, sample
from attnfast.decoding._constraints import repeated_ngrams
from attnfast.models import BOS, EOS, Config, build

V, TK = 7, 4  # three words: 4, 5 and 6
TINY = math.log(torch.finfo(torch.float64).tiny)
START, LENGTHS = torch.tensor([[4, 5, 6, 3], [5, 6, 3, 0]]), torch.tensor([4, 3])


class State:
    """The words of each hypothesis so far, and its sentence's source."""

    def __init__(self, sources, histories):
        self.sources, self.histories = sources, histories
        self.lengths = torch.tensor([len(x) for x in sources], dtype=torch.long)

    def index_select(self, index):
        chosen = index.tolist()
        return State([self.sources[i] for i in chosen], [self.histories[i] for i in chosen])


class Table:
    """A model of random logits and weights for every history, equal in every batch."""

    def __init__(self, seed=0, sharpness=1.5):
        self.seed, self.sharpness = seed, sharpness

    def output_limit(self, lengths):
        return lengths + 2

    def encode(self, source, lengths):
        sources = [tuple(row[:n]) for row, n in zip(source.tolist(), lengths.tolist())]
        return State(sources, [()] * len(sources)), State(sources, [()] * len(sources))

    def numbers(self, source, history):
        """Return the logits and the weights after a history that begins with the start."""
        draw = random.Random(str((self.seed, source, history)))
        logits = [draw.gauss(0, self.sharpness) for _ in range(V)]
        weights = [draw.random() ** 3 for _ in source]
        weights = [x / sum(weights) for x in weights] + [0.0] * (TK - len(source))
        return logits, weights

    def decode(self, words, state, memory, need_weights=False):
        histories = [(*h, w) for h, w in zip(state.histories, words[:, 0].tolist())]
        rows = [self.numbers(*row) for row in zip(state.sources, histories)]
        logits = torch.tensor([x for x, _ in rows], dtype=torch.float64).view(-1, 1, V)
        weights = torch.tensor([x for _, x in rows], dtype=torch.float64).view(-1, 1, TK)
        return logits, State(state.sources, histories), weights if need_weights else None


class Scorer:
    """Other random log-probabilities of every history."""

    def __init__(self):
        self.model = Table(seed=99)

    def score(self, words, state, memory):
        state = State(memory.sources, [()] * len(words)) if state is None else state
        logits, state, _ = self.model.decode(words, state, memory)
        return logits[:, -1].log_softmax(-1), state


def log_softmax(x, among):
    total = math.log(sum(math.exp(x[i]) for i in among)) if among else 0.0
    return {i: x[i] - total for i in among}


class Rules:
    """The options of a search for one sentence, written out."""

    def __init__(self, model, source, number=0, **options):
        self.model, self.source, self.number, self.options = model, source, number, options
        self.prefix = options.get("prefix", [[], []])[number]
        longest = options.get("max_length", len(source) + 1)
        self.longest = max(longest, len(self.prefix), options.get("min_length", 0))

    def next(self, words):
        """Return the scores of the words that may follow ``words``, by word."""
        get, n = self.options.get, len(words)
        logits, _ = self.model.numbers(self.source, (BOS, *words))
        mask = get("word_mask")
        mask = [True] * V if mask is None else mask.expand(2, V)[self.number].tolist()
        among = [w for w in range(V) if w not in get("forbidden", (0, 1, 2)) and mask[w]]
        scores = log_softmax(logits, among)
        if get("scorer"):
            share, other = get("scorer_weight", 0.3), Scorer().model.numbers
            judged = log_softmax(other(self.source, (BOS, *words))[0], range(V))
            scores = {w: (1 - share) * x + share * judged[w] for w, x in scores.items()}
        if n < len(self.prefix):
            return {w: x for w, x in scores.items() if w == self.prefix[n]}
        ngrams, size = set(), get("no_repeat_ngram", 0)
        if size:
            ngrams = {tuple(words[i : i + size]) for i in range(n - size + 1)}

        def may_come(w):
            if n >= self.longest:
                return w == EOS
            if w == EOS:
                return n >= get("min_length", 0)
            return not size or (*words[n - size + 1 :], w)[-size:] not in ngrams or n + 1 < size

        return {w: x for w, x in scores.items() if may_come(w)}

    def final(self, words, scores):
        """Return the score of a finished translation, its end included."""
        get, n = self.options.get, len(words)
        score = (sum(scores) + get("length_bonus", 0.0) * (n - 1)) / self.normaliser(n)
        if get("coverage_penalty"):
            steps = [self.weights(words[:t]) for t in range(n)]
            covered = [min(sum(x), 1.0) for x in zip(*steps)][: len(self.source)]
            score += get("coverage_penalty") * sum(max(math.log(x), TINY) for x in covered)
        return score

    def normaliser(self, n):
        return ((5 + n) / 6) ** self.options.get("length_penalty", 1.0)

    def weights(self, words):
        return self.model.numbers(self.source, (BOS, *words))[1]

    def every(self, words=(), scores=()):
        """Yield all translations that may come: score, words, their scores."""
        for w, x in self.next(words).items():
            if w == EOS:
                yield self.final((*words, w), (*scores, x)), (*words, w), (*scores, x)
            elif len(words) < self.longest:
                yield from self.every((*words, w), (*scores, x))

    def beam(self, K):
        """Return the finished hypotheses of a beam search, the best first."""
        alive, finished = [((), ())], []
        bonus = self.options.get("length_bonus", 0.0)
        for n in itertools.count(1):
            candidates = [
                (sum(s) + x + bonus * (n - 1) + bonus * (w != EOS), (*words, w), (*s, x))
                for words, s in alive
                for w, x in sorted(self.next(words).items())
            ]
            best = sorted(candidates, key=lambda c: -c[0])[: 2 * K]
            finished += [(self.final(*c[1:]), *c[1:]) for c in best[:K] if c[1][-1] == EOS]
            ahead = [c for c in best if c[1][-1] != EOS][:K]
            bound = ahead[0][0] / self.normaliser(n) if ahead else -math.inf
            enough = len(finished) >= K and max(finished)[0] >= bound
            if n > self.longest or enough or not ahead:
                if not finished:
                    return [(-math.inf, *alive[0])]
                return sorted(finished, key=lambda c: -c[0])
            alive = [c[1:] for c in ahead]


def sources():
    return [tuple(row[:n]) for row, n in zip(START.tolist(), LENGTHS.tolist())]


def check_found(found, number, wanted, rules):
    """Compare the hypotheses of one sentence with ``wanted``: scores, words, words' scores."""
    n = len(wanted)
    assert (found.lengths[number] > 0).sum() == n
    for rank, (score, words, scores) in enumerate(wanted):
        length = len(words)
        assert found.lengths[number, rank] == length
        assert found.sequences[number, rank, :length].tolist() == list(words)
        assert not found.sequences[number, rank, length:].any()
        assert found.scores[number, rank].item() == pytest.approx(score, abs=1e-9)
        assert found.word_scores[number, rank, :length].tolist() == pytest.approx(list(scores))
        assert not found.word_scores[number, rank, length:].any()
        assert bool(found.finished[number, rank]) == (words[-1:] == (EOS,))
        if found.weights is not None:
            weights = [rules.weights(words[:t]) for t in range(length)]
            got = found.weights[number, rank]
            torch.testing.assert_close(got[:length], torch.tensor(weights).to(got).view(-1, TK))
            assert not got[length:].any()


OPTIONS = {
    "plain": {},
    "no length penalty": {"length_penalty": 0.0},
    "a large length penalty": {"length_penalty": 3.0},
    "coverage": {"coverage_penalty": 0.7},
    "coverage and a bonus": {"coverage_penalty": 2.0, "length_bonus": 0.5},
    "a bonus": {"length_bonus": 1.0},
    "at least two words": {"min_length": 2},
    "one word at most": {"max_length": 1},
    "two words": {"min_length": 2, "max_length": 2},
    "prefixes": {"prefix": [[5], [6, 4]]},
    "prefixes of one sentence": {"prefix": [[], [4, 4]], "no_repeat_ngram": 1},
    "each word once": {"no_repeat_ngram": 1},
    "each pair once": {"no_repeat_ngram": 2, "length_bonus": 2.0},
    "a mask": {"word_mask": torch.tensor([1, 1, 1, 1, 1, 0, 1]).bool()},
    "masks": {"word_mask": torch.tensor([[1, 1, 1, 1, 0, 1, 1], [0, 0, 0, 1, 1, 1, 0]]).bool()},
    "other words": {"forbidden": [0, 2, 5]},
    "a scorer": {"scorer": Scorer()},
    "a scorer alone": {"scorer": Scorer(), "scorer_weight": 1.0, "min_length": 1},
    "everything": {
        "scorer": Scorer(), "scorer_weight": 0.5, "length_bonus": 0.3, "length_penalty": 0.6,
        "coverage_penalty": 0.4, "min_length": 1, "max_length": 4, "no_repeat_ngram": 2,
        "prefix": [[6], []], "forbidden": [0, 1, 2, 5],
    },
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_wide_beam_finds_all_sentences(options):
    """In the order of their scores; the beam holds every hypothesis."""
    options = {"max_length": 3, **options}
    model, beam = Table(), 400
    found = beam_search(model, START, LENGTHS, beam, n_best=beam, need_weights=True, **options)
    for number, source in enumerate(sources()):
        rules = Rules(model, source, number, **options)
        wanted = sorted(rules.every(), key=lambda x: -x[0])
        assert len(wanted) > 1
        check_found(found, number, wanted, rules)


@pytest.mark.parametrize("beam", [1, 2, 3, 6])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_beams(options, beam):
    """Words, scores, their order and weights, as by a search written out."""
    for seed in range(6):
        model, n_best = Table(seed), 1 + seed % beam
        found = beam_search(
            model, START, LENGTHS, beam, n_best=n_best, need_weights=seed % 2 > 0, **options
        )
        for number, source in enumerate(sources()):
            rules = Rules(model, source, number, **options)
            check_found(found, number, rules.beam(beam)[:n_best], rules)


@pytest.mark.parametrize("options", [{"attention_top_k": 2}, {"attention": "multihop"}])
def test_padding_needs_no_coverage(options):
    """Whatever kind of memory has the keys."""
    torch.manual_seed(0)
    model = build(Config(9, embed_dim=4, hidden_dim=4, **options)).eval()
    source, lengths = torch.tensor([[5, 6, 7, 8, 3], [4, 3, 0, 0, 0]]), torch.tensor([5, 2])
    search = {"beam": 2, "max_length": 3, "coverage_penalty": 0.5}
    both = beam_search(model, source, lengths, **search)
    alone = beam_search(model, source[1:, :2], lengths[1:], **search)
    assert both.best[1] == alone.best[0]
    torch.testing.assert_close(both.scores[1:], alone.scores)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_best_word_of_every_step(options):
    own = ("length_penalty", "coverage_penalty", "length_bonus")
    options = {name: x for name, x in options.items() if name not in own}
    for seed in range(6):
        model = Table(seed)
        found = greedy_search(model, START, LENGTHS, need_weights=True, **options)
        for number, source in enumerate(sources()):
            rules, words, scores = Rules(model, source, number, **options), (), ()
            while words[-1:] != (EOS,) and (after := rules.next(words)):
                best = max(after, key=after.get)
                words, scores = (*words, best), (*scores, after[best])
            score = sum(scores) if words[-1:] == (EOS,) else -math.inf
            check_found(found, number, [(score, words, scores)], rules)


def probabilities(rules, temperature=1.0, top_k=0, top_p=1.0):
    """Return the probability of every sentence that may be drawn, by its words."""
    found = {}

    def walk(words, probability):
        after = rules.next(words)
        total = sum(math.exp(x / temperature) for x in after.values())
        ranked = sorted(after, key=lambda w: -after[w])
        shares = {w: math.exp(after[w] / temperature) / total for w in ranked}
        if top_k:
            shares = dict(list(shares.items())[:top_k])
            shares = {w: x / sum(shares.values()) for w, x in shares.items()}
        kept, mass = {}, 0.0
        for w, x in shares.items():
            if mass < top_p:
                kept[w] = x
            mass += x
        for w, x in kept.items():
            p = probability * x / sum(kept.values())
            if w == EOS:
                found[(*words, w)] = p
            else:
                walk((*words, w), p)

    walk((), 1.0)
    return found


@pytest.mark.parametrize(
    "how",
    [{}, {"temperature": 0.5}, {"temperature": 2.0, "top_k": 2}, {"top_p": 0.6},
     {"top_k": 3, "top_p": 0.8, "temperature": 1.5}],
)  # fmt: skip
@pytest.mark.parametrize("options", [{}, OPTIONS["everything"]], ids=["", "everything"])
def test_frequencies_of_drawn_sentences(options, how):
    """By a chi-square test of all sentences at once, at 5 standard deviations."""
    own = ("length_penalty", "coverage_penalty", "length_bonus")
    options = {"max_length": 2, **{k: x for k, x in options.items() if k not in own}}
    model, count = Table(), 2000
    generator = torch.Generator().manual_seed(0)
    drawn = sample(model, START, LENGTHS, count, generator=generator, **how, **options)
    for number, source in enumerate(sources()):
        wanted = probabilities(Rules(model, source, number, **options), **how)
        assert sum(wanted.values()) == pytest.approx(1.0)
        got = dict.fromkeys(wanted, 0)
        for row, n in zip(drawn.sequences[number].tolist(), drawn.lengths[number].tolist()):
            got[tuple(row[:n])] += 1
        chi = sum((got[x] - count * p) ** 2 / (count * p) for x, p in wanted.items())
        freedom = len(wanted) - 1
        assert chi < freedom + 5 * math.sqrt(2 * freedom) + 5, (chi, freedom)


def test_drawn_sentences_and_their_scores():
    """A generator's state determines them; scores are sums without temperature."""
    model, options = Table(), {"temperature": 0.7, "top_k": 3, "need_weights": True}
    first, again = (
        sample(model, START, LENGTHS, 5, generator=torch.Generator().manual_seed(3), **options)
        for _ in range(2)
    )
    assert torch.equal(first.sequences, again.sequences)
    other = sample(model, START, LENGTHS, 5, generator=torch.Generator().manual_seed(4), **options)
    assert first.hypotheses() != other.hypotheses()
    assert len({len(words) for several in first.hypotheses() for words in several}) > 1
    for number, source in enumerate(sources()):
        rules, wanted = Rules(model, source, number), []
        for row, n in zip(first.sequences[number].tolist(), first.lengths[number].tolist()):
            words = tuple(row[:n])
            scores = [rules.next(words[:t])[words[t]] for t in range(n)]
            wanted.append((sum(scores), words, scores))
        check_found(first, number, wanted, rules)


def test_a_generator_of_each_sentence_makes_its_words_independent_of_the_batch():
    model, lines = Table(), len(LENGTHS)

    def draw(chosen):
        generators = [torch.Generator().manual_seed(i) for i in chosen]
        return sample(model, START[chosen], LENGTHS[chosen], 3, generator=generators).hypotheses()

    together = draw(list(range(lines)))
    assert [draw([i])[0] for i in range(lines)] == together
    assert draw(list(range(lines))[::-1]) == together[::-1]
    assert len({str(x) for several in together for x in several}) > 1
    nothing = torch.zeros(0, START.shape[1], dtype=torch.long), torch.zeros(0, dtype=torch.long)
    assert sample(model, *nothing, generator=[]).hypotheses() == []


SEARCHES = {
    "greedy": greedy_search,
    "beam": lambda *x, **y: beam_search(*x, beam=3, n_best=2, **y),
}


@pytest.mark.parametrize("kind", ["bahdanau", "general", "coverage"])
@pytest.mark.parametrize("name", SEARCHES)
def test_a_sentence_alone_and_in_a_batch(name, kind):
    torch.manual_seed(0)
    model = build(Config(40, kind, embed_dim=8, hidden_dim=8), "reference").double().eval()
    with torch.no_grad():
        model.embedding.weight.mul_(5)
    lengths = torch.tensor([6, 2, 4, 1])
    source = torch.randint(4, 40, (4, 6))
    source[torch.arange(6) >= lengths.unsqueeze(1)] = 0
    options = {"no_repeat_ngram": 2, "min_length": 2}
    find = SEARCHES[name]
    found = find(model, source, lengths, need_weights=True, **options)
    for i, n in enumerate(lengths.tolist()):
        alone = find(model, source[i : i + 1, :n], lengths[i : i + 1], need_weights=True, **options)
        T = alone.sequences.shape[2]
        assert found.sequences[i, :, :T].tolist() == alone.sequences[0].tolist()
        torch.testing.assert_close(found.scores[i], alone.scores[0])
        torch.testing.assert_close(found.word_scores[i, :, :T], alone.word_scores[0])
        torch.testing.assert_close(found.weights[i, :, :T, :n], alone.weights[0])


def test_weights_are_those_of_the_sentence_read_at_once():
    torch.manual_seed(0)
    model = build(Config(40, embed_dim=8, hidden_dim=8), "reference").double().eval()
    source, lengths = torch.randint(4, 40, (3, 5)), torch.tensor([5, 2, 4])
    found = beam_search(model, source, lengths, 3, n_best=3, need_weights=True)
    for rank in range(3):
        words = torch.cat([torch.full((3, 1), BOS), found.sequences[:, rank, :-1]], 1)
        exists = torch.arange(words.shape[1]) < found.lengths[:, rank, None]
        weights = model(source, lengths, words, need_weights=True).weights
        torch.testing.assert_close(found.weights[:, rank], weights * exists.unsqueeze(-1))


@pytest.mark.parametrize("find", [greedy_search, beam_search, sample])
def test_empty_batches_and_shortest_limits(find):
    model = Table()
    none = find(model, START[:0], LENGTHS[:0])
    assert none.sequences.shape == (0, 1, 0) and none.best == []
    found = find(model, START, LENGTHS, max_length=1, min_length=1, prefix=[[4], [5]])
    assert found.best == [[4], [5]] and found.lengths.tolist() == [[2], [2]]
    masked = torch.zeros(V, dtype=torch.bool)
    stuck = find(model, START, LENGTHS, word_mask=masked)
    assert stuck.best == [[], []] and not stuck.finished.any()
    assert stuck.scores.isneginf().all()


def test_repeated_words_are_those_so_far():
    """Words after the first ``length`` do not count."""
    words = torch.tensor([[4, 5, 4, 0, 0], [4, 4, 4, 0, 0]])
    for length in (3, torch.tensor([3])):
        found = repeated_ngrams(words, 2, 7, length)
        assert found.nonzero().tolist() == [[0, 5], [1, 4]]
    assert not repeated_ngrams(words, 6, 7, 3).any()


def test_fewer_sentences_than_asked_for():
    found = beam_search(Table(), START, LENGTHS, 9, n_best=9, max_length=1)
    assert (found.lengths > 0).sum(1).tolist() == [4, 4]
    assert [len(x) for x in found.hypotheses()] == [4, 4]
    assert found.scores[:, 4:].isneginf().all()


class Damaged(Table):
    def numbers(self, source, history):
        logits, weights = super().numbers(source, history)
        return (logits if len(history) < 2 else [math.nan] * V), weights


@pytest.mark.parametrize("find", [greedy_search, beam_search, sample])
def test_scores_that_are_no_numbers(find):
    with pytest.raises(InputError, match="the model's scores must be finite numbers, got NaN"):
        find(Damaged(), START, LENGTHS, min_length=3)


@pytest.mark.parametrize("attention", ["bahdanau", "predictive"])  # in one operator, and not
@pytest.mark.parametrize("find", [greedy_search, beam_search, sample])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"word_mask": torch.ones(11, dtype=torch.bool)},
            r"word_mask must be \[V\] or \[B, V\] with V = 12, the number of words, got V = 11",
        ),
        ({"start": 12}, "start must be a word below 12, got 12"),
        ({"end": 99}, "end must be a word below 12, got 99"),
        ({"prefix": [[2**63]] * 2}, "prefix must be a list of word ids for each sentence"),
        ({"prefix": [[], [12]]}, "prefix must be of words below 12, got 12"),
        ({"word_mask": torch.ones(2, 0, dtype=torch.bool)}, "with V = 12, .* got V = 0"),
        ({"forbidden": b"\5"}, "forbidden must be a list of word ids"),
    ],
)
def test_words_of_another_vocabulary(find, options, message, attention):
    model = build(Config(12, embed_dim=4, hidden_dim=4, attention=attention)).eval()
    with pytest.raises((InputError, TypeError), match=message):
        find(model, START, LENGTHS, **options)


def test_a_mask_may_leave_out_the_words_that_only_sources_have():
    model = build(Config(12, embed_dim=4, hidden_dim=4, pointer_generator=True)).eval()
    source = START + 10 * (START == 6)  # X is 5
    assert greedy_search(model, source, LENGTHS, prefix=[[16], []]).sequences[0, 0, 0] == 16
    with pytest.raises(InputError, match="prefix must be of words below 17, got 17"):
        greedy_search(model, source, LENGTHS, prefix=[[17], []])
    for words, is_right in ((12, True), (17, True), (16, False), (11, False)):
        mask = torch.ones(words, dtype=torch.bool)
        if is_right:
            greedy_search(model, source, LENGTHS, word_mask=mask)
            continue
        with pytest.raises(InputError, match="with V = 12 or 17, the number of words"):
            greedy_search(model, source, LENGTHS, word_mask=mask)
