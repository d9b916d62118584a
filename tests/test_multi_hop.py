"""Several hops over a memory, the k best keys, and memory networks: by loops over stories."""

import importlib
from pathlib import Path

import pytest
import torch

from attnfast.models import MemoryNetwork
from attnfast.nn import (
    AttentionGRU,
    BahdanauAttention,
    LuongAttention,
    MultiHopAttention,
    TopKAttention,
)
from attnfast.ops.reference import score

B, TQ, TK, D = 3, 4, 9, 6
LENGTHS = torch.tensor([9, 1, 4])


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


# ---- several hops -------------------------------------------------------------------------------


def hops_by_hand(module, query, sources, seen):
    """Return what one query [D] has found, and the weights [K, Tk] of the keys that it sees."""
    u, found = query, []
    for k in range(module.hops):
        keys, values = sources[k : k + 2] if module.tying == "adjacent" else sources
        scores = keys[seen] @ u
        weights = scores if module.linear else scores.exp() / scores.exp().sum()
        u = (module.between.weight @ u if module.tying == "layer-wise" else u) + sum(
            w * c for w, c in zip(weights, values[seen])
        )
        found.append(torch.zeros(len(keys), dtype=u.dtype).masked_scatter(seen, weights))
    return u, torch.stack(found)


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("tying", ["adjacent", "layer-wise"])
def test_multi_hop(tying, linear):
    torch.manual_seed(0)
    module = MultiHopAttention(D, 3, tying).double()
    module.linear = linear
    sources = [double(B, TK, D) for _ in range(4 if tying == "adjacent" else 2)]
    query, mask = double(B, TQ, D), torch.rand(B, TK) > 0.2
    mask[:, 0] = True
    memory = module.prepare(sources, LENGTHS, mask)
    result, weights = module(query, memory, need_weights=True)
    seen = mask & (torch.arange(TK) < LENGTHS[:, None])
    want = [
        [hops_by_hand(module, query[i, t], [x[i] for x in sources], seen[i]) for t in range(TQ)]
        for i in range(B)
    ]
    expected = torch.stack([torch.stack([u for u, _ in row]) for row in want])
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(
        weights, torch.stack([torch.stack([w for _, w in row], 1) for row in want])
    )
    leaves, noise = [query, *sources, *module.parameters()], torch.randn(B, TQ, D).double()
    got = torch.autograd.grad((result * noise).sum(), leaves, retain_graph=True)
    torch.testing.assert_close(got, torch.autograd.grad((expected * noise).sum(), leaves))
    steps = [module(query[:, t], module.prepare(sources, LENGTHS, mask), True) for t in range(TQ)]
    torch.testing.assert_close(torch.stack([x for x, _ in steps], 1), result)
    torch.testing.assert_close(torch.stack([w for _, w in steps], 2), weights)
    order = torch.tensor([2, 0, 0])
    torch.testing.assert_close(module(query[order], memory.index_select(order))[0], result[order])


@pytest.mark.parametrize("linear", [False, True])
def test_a_memory_of_hops_that_does_not_fit(linear):
    sources = [torch.randn(B, TK, D) for _ in range(4)]
    adjacent, alike = MultiHopAttention(D, 3), MultiHopAttention(D, 3, "layer-wise")
    adjacent.linear = alike.linear = linear
    query, several, one = torch.randn(B, D), adjacent.prepare(sources), alike.prepare(sources[:2])
    with pytest.raises(ValueError, match=r"memory must be of 3 pairs of keys and values, .* got 1"):
        adjacent(query, one)
    with pytest.raises(ValueError, match=r"memory must be of 1 pairs of keys and values, .* got 3"):
        alike(query, several)
    with pytest.raises(ValueError, match="memory must be of 5 features, got 6"):
        MultiHopAttention(D - 1, 3)(query[:, 1:], several)
    with pytest.raises(ValueError, match=r"query must be of the memory's dtype torch.float32, got"):
        adjacent(query.double(), several)
    with pytest.raises(ValueError, match=r"query must be of the module's dtype torch.float32, got"):
        alike(query.double(), one)
    with pytest.raises(ValueError, match=r"memory must be of the module's dtype torch.float64"):
        alike.double()(query, one)
    sources[1].zero_()
    with pytest.raises(RuntimeError, match=r"memory must be prepared again: its (key|value) was"):
        adjacent(query, several)


# ---- the k best keys ----------------------------------------------------------------------------


ATTENTIONS = {
    "additive": lambda: BahdanauAttention(D, D, 5),
    "dot": lambda: LuongAttention(D, D, "dot"),
    "scaled dot": lambda: LuongAttention(D, D, "scaled_dot"),
    "general": lambda: LuongAttention(D, D, "general"),
    "concat": lambda: LuongAttention(D, D, "concat"),
}


@pytest.mark.parametrize("k", [1, 3, 9, 20])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_the_k_best_keys(name, k):
    """The softmax of the attention's own weights, cut to the k largest and put to a sum of 1."""
    torch.manual_seed(0)
    plain = ATTENTIONS[name]().double()
    module = TopKAttention(plain, k)
    states, values, query = double(B, TK, D), double(B, TK, 5), double(B, TQ, D)
    mask = torch.rand(B, TK) > 0.2
    for lengths, seen in ((None, None), (LENGTHS, None), (None, mask), (LENGTHS, mask)):
        memory = module.prepare(states, lengths, seen, values)
        context, weights = module(query, memory, need_weights=True)
        assert module(query, memory)[1] is None
        whole = plain(query, plain.prepare(states, lengths, seen, values), True)[1]
        best = whole.topk(min(k, TK)).indices
        kept = torch.zeros_like(whole).scatter(-1, best, 1) * whole
        expected = kept / kept.sum(-1, keepdim=True).clamp_min(1e-300)
        torch.testing.assert_close(weights, expected)
        torch.testing.assert_close(context, expected @ values)
        leaves = [query, states, values, *plain.parameters()]
        noise = torch.randn(B, TQ, 5).double()
        got = torch.autograd.grad((context * noise).sum(), leaves)
        want = torch.autograd.grad((expected @ values * noise).sum(), leaves)
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_the_best_of_weights_that_are_0(activation):
    """Keys whose weights are too small for float32 are told apart, and from hidden ones."""
    plain = BahdanauAttention(1, 1, 1, activation=activation)
    with torch.no_grad():
        plain.score_vector.fill_(300.0)
        plain.query_proj.weight.fill_(0)
        plain.key_proj.weight.fill_(1)
    module, query = TopKAttention(plain, 2), torch.zeros(1, 1)
    keys = torch.tensor([[[3.0], [0.1], [0.2], [0.3], [1e30]]])
    hidden = torch.tensor([[True, False, False, True, False]])
    for options in ({"lengths": torch.tensor([4])}, {"mask": hidden}):
        assert module.choose(query, module.prepare(keys, **options)).tolist() == [[0, 3]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["additive", "dot"])
def test_the_best_of_half_types(name, dtype):
    torch.manual_seed(0)
    plain = ATTENTIONS[name]().to(dtype)
    module = TopKAttention(plain, 8)
    query, keys = torch.randn(1, 20, D).to(dtype), torch.randn(1, 500, D).to(dtype)
    memory, rows = module.prepare(keys), plain.query_proj(query).double()
    vector = None if name == "dot" else plain.score_vector.double()
    e = score(rows, memory.memory.key.double(), vector, memory.memory.score)
    assert module.choose(query, memory).equal(e.topk(8).indices)


@pytest.mark.parametrize("name", ["additive", "dot"])
@pytest.mark.parametrize("sizes", [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
def test_the_best_of_nothing(name, sizes):
    B, Tq, Tk, Dv = sizes
    module = TopKAttention(ATTENTIONS[name](), 2)
    memory = module.prepare(torch.randn(B, Tk, D), values=torch.randn(B, Tk, Dv))
    context, weights = module(torch.randn(B, Tq, D), memory, need_weights=True)
    assert context.shape == (B, Tq, Dv) and weights.shape == (B, Tq, Tk)
    assert module(torch.randn(B, D), memory)[0].shape == (B, Dv)


def test_a_recurrent_layer_runs_it():
    torch.manual_seed(0)
    attention = ATTENTIONS["general"]()
    layer = AttentionGRU(4, D, D, TopKAttention(attention, TK))
    x, states = torch.randn(B, TQ, 4), torch.randn(B, TK, D)
    output, _ = layer(x, layer.prepare(states, LENGTHS))
    layer.attention = attention
    torch.testing.assert_close(output, layer(x, layer.prepare(states, LENGTHS))[0])


# ---- memory networks ----------------------------------------------------------------------------


@pytest.mark.parametrize("tying", ["adjacent", "layer-wise"])
def test_a_memory_network(tying):
    """One story, one sentence, one word after the other."""
    torch.manual_seed(0)
    model = MemoryNetwork(12, D, 2, tying, max_sentences=5).double()
    with torch.no_grad():
        model.embeddings[-1].weight[0] = 3  # as the output layer, if tied, may make it
    three, one, gap = [[3, 4, 5], [6, 7, 0], [3, 3, 9]], [8, 1, 0], [0, 0, 0]
    stories = torch.tensor([three, [one, gap, gap], [one, gap, one]])
    questions = torch.tensor([[2, 9, 10, 11], [4, 5, 0, 0], [4, 5, 0, 0]])
    answer = model(stories, questions, need_weights=True)
    assert model(stories, questions).weights is None

    def summed(embedding, words):
        words = [x for x in words if x]
        J = len(words)
        order = torch.tensor(
            [[(1 - j / J) - k / D * (1 - 2 * j / J) for k in range(1, D + 1)]
             for j in range(1, J + 1)], dtype=torch.float64
        )  # fmt: skip
        rows = (row * embedding.weight[x] for row, x in zip(order, words))
        return sum(rows, torch.zeros(D, dtype=torch.float64))

    logits = []
    for i, (story, question) in enumerate(zip(stories.tolist(), questions.tolist())):
        while not any(story[-1]):
            story.pop()
        sources = [
            torch.stack([summed(e, x) + at[len(story) - 1 - n] for n, x in enumerate(story)])
            for e, at in zip(model.embeddings, model.places)
        ]
        seen = torch.ones(len(story), dtype=torch.bool)
        found, weights = hops_by_hand(
            model.attention, summed(model.question, question), sources, seen
        )
        logits.append(model.output.weight @ found)
        torch.testing.assert_close(
            answer.weights[i, :, : len(story)], weights, atol=1e-6, rtol=1e-6
        )
    torch.testing.assert_close(answer.logits, torch.stack(logits), atol=1e-6, rtol=1e-6)
    assert (model.output.weight is model.embeddings[-1].weight) == (tying == "adjacent")
    answer.logits.sum().backward()
    for name, x in model.named_parameters():
        assert x.grad.abs().sum() > 0, name
        if "embeddings" in name and tying == "layer-wise":
            assert not x.grad[0].any()


# ---- the example --------------------------------------------------------------------------------


@pytest.fixture
def stories(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "examples"))
    return importlib.import_module("stories")


def moves(sentences):
    """Return what a reader of stories about people and things knows at their end."""
    at, carried, been = {}, {}, {}
    for sentence in sentences:
        who, verb, *_, what = sentence.split()
        if verb == "went":
            at[who] = what
            for thing in (x for x, holder in carried.items() if holder == who):
                been.setdefault(thing, []).append(what)
        elif verb == "took":
            carried[what] = who
            if not been.get(what):
                been[what] = [at[who]]
            assert been[what][-1] == at[who], "nobody takes what is elsewhere"
        else:
            assert carried.pop(what) == who
    return at, carried, been


def answered(story):
    """Answer a question by reading."""
    words, sentences = story.question.split(), story.sentences
    if words[:2] == ["what", "is"]:
        facts = dict(x.split(" are afraid of ") for x in sentences if "afraid" in x)
        kinds = dict(x.split(" is a ") for x in sentences if " is a " in x)
        plural = {"cat": "cats", "mouse": "mice", "sheep": "sheep", "wolf": "wolves"}
        feared = facts[plural[kinds[words[2]]]]
        return next(x for x, y in plural.items() if y == feared)
    if words[0] == "how" and words[1] == "do":
        step = {"north": 1j, "south": -1j, "east": 1, "west": -1}
        links = {}
        for x in sentences:
            _, a, _, way, *_, b = x.split()
            links[b, a], links[a, b] = way, {v: k for k, v in step.items()}[-step[way]]
        first, last = words[6], words[-1]
        [middle] = [b for a, b in links if a == first and (b, last) in links]
        return f"{links[first, middle]}-{links[middle, last]}"
    at, carried, been = moves(sentences)
    if words[0] == "how":
        return ["none", "one", "two", "three"][[*carried.values()].count(words[4])]
    if words[1] == "was":
        place = [x for i, x in enumerate(been[words[3]]) if not i or x != been[words[3]][i - 1]]
        assert place[-1] == words[-1]
        return place[-2]
    return been[words[3]][-1] if words[2] == "the" else at[words[2]]


def test_answers_follow_from_stories(stories):
    for task in stories.TASKS:
        drawn = [stories.draw_story(task, f"{task} {i}") for i in range(200)]
        assert drawn[0] == stories.draw_story(task, f"{task} 0") != drawn[1]
        for story in drawn:
            assert story.answer == answered(story), story
            assert 2 <= len(story.sentences) <= stories.LONGEST
            assert story.facts == sorted({*story.facts}) or len(story.facts) == 2
            if task == "two facts":  # a thing that lies where it was put down
                thing = story.question.split()[3]
                told = [i for i, x in enumerate(story.sentences) if x.endswith(f" {thing}")]
                assert "dropped" not in story.sentences[told[-1]] or told[-1] in story.facts
        if task in ("one fact", "deduction", "paths"):
            facts = [[story.sentences[i] for i in story.facts] for story in drawn]
            assert all(answered(s._replace(sentences=f)) == s.answer for s, f in zip(drawn, facts))


def test_no_story_to_test_on_is_one_to_learn_from(stories):
    parts = stories.draw_parts("one fact", 3000, 300)
    assert list(map(len, parts.values())) == [3000, 300]
    assert parts == stories.draw_parts("one fact", 3000, 300)
    train, test = ({(*x.sentences, x.question) for x in parts[name]} for name in ("train", "test"))
    assert not train & test
    drawn = [stories.draw_story("one fact", f"one fact test {i}") for i in range(300)]
    again = [i for i, x in enumerate(drawn) if x != parts["test"][i]]
    assert again == [i for i, x in enumerate(drawn) if (*x.sentences, x.question) in train] != []


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_the_choice_tells_close_scores_apart(activation):
    """Small keys, and keys that differ little, are ordered as eager code orders them."""
    torch.manual_seed(0)
    attention = BahdanauAttention(8, 8, 256, activation=activation).requires_grad_(False)
    module = TopKAttention(attention, 5)
    for size, spread in ((1.0, 1.0), (1e-4, 1.0), (1e-7, 1.0), (1.0, 1e-5), (1.0, 1e-6)):
        query, source = size * torch.randn(50, 8), torch.randn(50, 1, 8)
        source = size * (source + spread * torch.randn(50, 200, 8))
        features = attention.query_proj(query).unsqueeze(1) + attention.key_proj(source)
        scores = (torch.tanh if activation == "tanh" else torch.relu)(
            features
        ) @ attention.score_vector
        chosen = scores.gather(1, module.choose(query, module.prepare(source)))
        assert chosen.equal(scores.topk(5).values), (size, spread)


def test_hidden_keys_come_last_where_others_are_close():
    """One source has five keys of one score; another shows two, and hides larger ones."""
    attention = BahdanauAttention(1, 1, 1)
    with torch.no_grad():
        for x in (attention.score_vector, attention.query_proj.weight, attention.key_proj.weight):
            x.fill_(1)
    module = TopKAttention(attention, 3)
    keys = torch.tensor([[[0.5]] * 5, [[0.1], [0.9], [0.2], [0.8], [0.7]]])
    mask = torch.tensor([[True] * 5, [True, False, True, False, False]]).unsqueeze(1)
    index = module.choose(torch.zeros(2, 1), module.prepare(keys, mask=mask.squeeze(1)))
    assert index[1, :2].tolist() == [2, 0]
