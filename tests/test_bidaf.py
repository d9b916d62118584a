"""Bidirectional attention, the reader made of it, and the example: by loops over single texts."""

import importlib
import itertools
from pathlib import Path

import pytest
import tiny
import torch
from test_embeddings import convolve, pass_highway

from attnfast.models import BiDAF, CharacterCNN, best_spans
from attnfast.nn import BidirectionalAttention

B, T, J, D = 3, 6, 4, 5
TEXTS, QUESTIONS = torch.tensor([6, 1, 4]), torch.tensor([2, 4, 1])


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def by_hand(module, text, question):
    """What one text [T, D] and one question [J, D] without padding give."""
    scores = torch.stack([
        torch.stack([
            module.text_proj.weight[0] @ h + module.question_proj.weight[0] @ u
            + (module.weight * h * u).sum()
            for u in question
        ])
        for h in text
    ])  # fmt: skip
    found = scores.softmax(1) @ question
    share = scores.amax(1).softmax(0)
    pooled = (share.unsqueeze(1) * text).sum(0)
    return torch.cat([text, found, text * found, text * pooled], 1), scores.softmax(1), share


def test_both_ways():
    torch.manual_seed(0)
    module = BidirectionalAttention(D).double()
    text, question = double(B, T, D), double(B, J, D)
    g, (to_question, to_text) = module(text, question, TEXTS, QUESTIONS, need_weights=True)
    assert module(text, question, TEXTS, QUESTIONS)[1] is None
    noise, total = torch.randn(B, T, 4 * D).double(), 0
    for i, (n, m) in enumerate(zip(TEXTS, QUESTIONS)):
        want, forth, back = by_hand(module, text[i, :n], question[i, :m])
        torch.testing.assert_close(g[i, :n], want)
        torch.testing.assert_close(to_question[i, :n, :m], forth)
        torch.testing.assert_close(to_text[i, :n], back)
        assert not to_question[i, :, m:].any() and not to_text[i, n:].any()
        total = total + (want * noise[i, :n]).sum()
    there = (torch.arange(T) < TEXTS[:, None]).unsqueeze(-1)
    leaves = [text, question, *module.parameters()]
    got = torch.autograd.grad((g * noise * there).sum(), leaves)
    torch.testing.assert_close(got, torch.autograd.grad(total, leaves))
    whole, _ = module(text, question)
    for i in range(B):
        torch.testing.assert_close(whole[i], by_hand(module, text[i], question[i])[0])


def test_scores_that_are_large():
    """The largest score of a row comes from its weights, which must not lose it."""
    torch.manual_seed(0)
    module = BidirectionalAttention(D)
    text, question = 30 * torch.randn(B, T, D), 30 * torch.randn(B, J, D)
    g, _ = module(text, question)
    for i in range(B):
        torch.testing.assert_close(
            g[i], by_hand(module, text[i], question[i])[0], rtol=1e-4, atol=0.1
        )


@pytest.mark.parametrize("has_characters", [False, True], ids=["words", "characters"])
@pytest.mark.parametrize("highway_layers", [0, 2])
def test_a_reader(has_characters, highway_layers):
    """One text without padding after the other, by PyTorch's own layers."""
    torch.manual_seed(0)
    cnn = CharacterCNN(7, 3, 4, kernel_size=3) if has_characters else None
    options = {"characters": cnn, "highway_layers": highway_layers}
    model = BiDAF(BidirectionalAttention(2 * D), 8 * D, 12, 3, D, **options).double()
    text, question = torch.randint(1, 12, (B, T)), torch.randint(1, 12, (B, J))
    spelling, more = torch.randint(1, 7, (12, 5)), {}
    spelling[::2, 3:] = 0
    if has_characters:
        more = {"text_characters": spelling[text], "question_characters": spelling[question]}

    def read(words):
        x = model.embedding(words)
        if has_characters:
            features = [convolve(cnn, [c for c in spelling[i].tolist() if c]) for i in words]
            x = torch.cat([x, torch.stack(features)], -1)
        if highway_layers:
            x = torch.stack([pass_highway(model.highway, row) for row in x])
        return model.encoder.layers[0](x.unsqueeze(0))[0][0]

    found = model(text, TEXTS, question, QUESTIONS, need_weights=True, **more)
    assert found.weights[0].shape == (B, T, J)
    assert model(text, TEXTS, question, QUESTIONS, **more).weights is None
    for i, (n, m) in enumerate(zip(TEXTS, QUESTIONS)):
        h, u = read(text[i, :n]), read(question[i, :m])
        g = by_hand(model.attention, h, u)[0]
        states = model.modeling.layers[0](g.unsqueeze(0))[0]
        last = model.ending.layers[0](states)[0][0]
        for got, layer, x in zip(found, (model.start, model.end), (states[0], last)):
            want = layer(torch.cat([g, x], -1)).squeeze(-1).log_softmax(-1)
            torch.testing.assert_close(got[i, :n], want)
            assert (got[i, n:] == -torch.inf).all()
    total = sum(x.gather(1, torch.zeros(B, 1).long()).sum() for x in found[:2])
    total.backward()
    assert all(x.grad.isfinite().all() and x.grad.any() for x in model.parameters())


def test_dropout_of_words():
    """Dropout is on what the BiRNN reads: the output of the highway layers."""
    torch.manual_seed(0)
    model = BiDAF(BidirectionalAttention(2), 8, 12, 40, 1, dropout=0.5, highway_layers=1)
    read = []
    model.encoder.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    words, one = torch.ones(1, 1).long(), torch.ones(1).long()
    model(words, one, words, one)
    model.eval()(words, one, words, one)
    zeros, none = read[0] == 0, read[2] == 0
    assert 5 < zeros.sum() < 35 and not none.any()
    torch.testing.assert_close(read[0], (2 * read[2]).masked_fill(zeros, 0))


@pytest.mark.parametrize("longest", [None, 1, 2, 9])
def test_the_best_span(longest):
    torch.manual_seed(0)
    for _ in range(30):
        start, end = torch.randn(B, T).log_softmax(-1), torch.randn(B, T).log_softmax(-1)
        start[1, 1:] = end[1, 1:] = -torch.inf
        for row, s, e in zip(best_spans(start, end, longest).tolist(), start, end):
            allowed = [
                (i, j)
                for i, j in itertools.combinations_with_replacement(range(T), 2)
                if longest is None or j - i < longest
            ]
            assert tuple(row) == max(allowed, key=lambda x: s[x[0]] + e[x[1]])


# ---- the example --------------------------------------------------------------------------------


@pytest.fixture
def reading(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "examples"))
    return importlib.import_module("reading")


@pytest.mark.parametrize("count", [1, 3])
def test_answers_stand_where_they_are_said_to(reading, tmp_path, count):
    folder = tiny.write_descriptions(tmp_path / "data")
    files = [folder / name for name in ("devset.csv", "testset_w_refs.csv")]
    pairs = [pair for file in files for pair in reading.read(file)]
    train, test = reading.split(pairs)
    assert len(train) > len(test) > 0 and len(train) + len(test) == 8 * len(tiny.NAMES)
    assert not {str(x.values) for x in train} & {str(x.values) for x in test}
    asked = reading.ask(train + test, count)
    assert asked == reading.ask(train + test, count) and len(asked) > 8 * count
    assert {x.attribute for x in asked} == {"name", "food", "area"}
    described = {" ".join(text): place.values for place in train + test for text in place.texts}
    for x in asked:
        first, last = x.span
        value = x.text[first : last + 1]
        bar = x.text.index("|")
        parts = [x.text[:bar], x.text[bar + 1 :]]
        own, its = (described[" ".join(part)] for part in (parts if first < bar else parts[::-1]))
        assert own[x.attribute] == value != its[x.attribute]
        assert any(own[k] != its[k] for k in own.keys() - {x.attribute})
        assert last < bar or first > bar
        bar = x.question.index("|")
        for part in (x.question[:bar], x.question[bar + 1 :]):
            of, mark = (own, "_") if "_" in part else (its, "~")
            assert part.count(mark) == 1
            filled = [y for word in part for y in (of[x.attribute] if word == mark else [word])]
            assert described[" ".join(filled)] == of and filled not in parts  # in another's words
        assert not reading.find(value, x.question)
        assert not reading.find(its[x.attribute], x.question)
    for words in ([True, False], [False, True]):
        assert words in [
            [word in x.question[: x.question.index("|")] for word in "_~"] for x in asked
        ]
    assert len({x.span[0] < x.text.index("|") for x in asked}) == 2


def test_what_is_tested_is_not_learnt(reading):
    lists = [f"name [ {i} ] , food [ Thai ]" for i in range(60)]
    pairs = [(x, f"{text} {i}") for i, x in enumerate(lists) for text in ("one", "other", "one")]
    pairs += [(x, "all the same") for x in lists] + [(x, "word " * 40) for x in lists]
    train, test = reading.split(pairs)
    assert train and test
    assert all(len(x.texts) == 3 and ["all", "the", "same"] in x.texts for x in train)
    assert all(len(x.texts) == 2 and ["all", "the", "same"] not in x.texts for x in test)
    assert test[0].values["food"] == ["thai"]


def test_words_are_spelled(reading, tmp_path):
    """Characters are numbered in the order of the alphabet; unknown ones share a number."""
    questions = reading.Questions(tiny.write_descriptions(tmp_path / "data"), 9)
    alphabet = {x for one in questions.train for word in (*one.text, *one.question) for x in word}
    assert questions.alphabet == {x: i for i, x in enumerate(sorted(alphabet), 2)}
    a, e, n = (questions.alphabet[x] for x in "aen")
    assert questions.spell([["an", "Ä", "a"], ["eÄn"]]).tolist() == [
        [[a, n, 0], [1, 0, 0], [a, 0, 0]],
        [[e, 1, n], [0, 0, 0], [0, 0, 0]],
    ]
    batch = questions.gather(questions.train[:3])
    for side in ("text", "question"):
        texts = [getattr(x, side) for x in questions.train[:3]]
        assert getattr(batch, f"{side}_characters").equal(questions.spell(texts))


def test_a_word_of_prices_and_ratings_is_not_asked_for(reading):
    places = [
        reading.Place({"pricerange": [price], "name": [name]}, [[name, price, x] for x in "ab"])
        for name, price in (("x", "low"), ("y", "cheap"))
    ]
    asked = reading.ask(places, 40)
    answers = {" ".join(x.text[x.span[0] : x.span[1] + 1]) for x in asked}
    assert answers == {"cheap", "x", "y"}


def test_both_values_stand_in_the_text(reading):
    one = reading.Place({"food": ["thai"], "name": ["x"]}, [["x", "thai", y] for y in "ab"])
    other = reading.Place(
        {"food": ["greek"], "name": ["y"]}, [["y"], ["y", "greek"], ["greek", "y"]]
    )
    asked = reading.ask([one, other], 40)
    assert {x.attribute for x in asked} == {"food", "name"}
    assert all({"thai", "greek"} < {*x.text} for x in asked if x.attribute == "food")


def test_ways_that_are_left_out(reading):
    torch.manual_seed(0)
    text, question = torch.randn(B, T, D), torch.randn(B, J, D)
    for i, m in enumerate(QUESTIONS):
        question[i, m:] = 0
    g = {}
    for name, row in reading.ROWS.items():
        torch.manual_seed(1)
        g[name], _ = reading.OneWay(D, row)(text, question, TEXTS, QUESTIONS)
    mean = torch.stack([x[:m].mean(0) for x, m in zip(question, QUESTIONS)]).unsqueeze(1)
    both = g["both ways"]
    torch.testing.assert_close(g["no question to text"], both[..., : 3 * D])
    parts = text, mean.expand_as(text), text * mean, both[..., 3 * D :]
    torch.testing.assert_close(g["no text to question"], torch.cat(parts, -1))
    torch.testing.assert_close(g["neither"], torch.cat(parts[:3], -1))
