"""A memory that grows: as one call within a causal span, and in the textbook's cached loop."""

import copy
import math
import pickle

import pytest
import torch
from attention_cases import DEVICE, FLOOR, Case, inputs, runnable
from test_memory import gradients, same
from torch import nn

from attnfast import Span, additive_attention, attend, dot_attention, prepare
from attnfast.decoding import attend_with_history
from attnfast.nn import BahdanauAttention, CoverageAttention, LuongAttention
from attnfast.nn import MultiHeadAttention as Heads

CASES = [
    Case("tanh", 2, 7, 7, 40, 24),
    Case("tanh", 2, 9, 9, 33, 8, H=2, weight_per_head=True),
    Case("tanh", 3, 5, 5, 16, 8, dtype=torch.float64),
    Case("tanh", 2, 6, 6, 32, 8, dtype=torch.bfloat16),
    Case("relu", 2, 6, 6, 17, 8, dtype=torch.float16),
    Case("tanh", 2, 5, 5, 20, 8, scale=8.0),  # beyond the domain of kept exponentials
    Case("dot", 2, 7, 7, 40, 24, layout="sliced"),
    Case("dot", 3, 5, 5, 16, 8, H=3, dtype=torch.float64),
    Case("dot", 2, 6, 6, 16, 8, H=2, dtype=torch.float16),
]


def whole(query, key, value, score_vector, activation="tanh", **options):
    if score_vector is None:
        return dot_attention(query, key, value, scale=1.0, **options)
    return additive_attention(query, key, value, score_vector, activation=activation, **options)


def start(key, value, score_vector, rows=0, **options):
    return prepare(key[..., :rows, :], value[..., :rows, :], score_vector, **options)


def steps(query, key, value, score_vector, rows=0, **options):
    """Attend with a query after each key from ``rows`` on; return contexts and the last memory."""
    memory, contexts = start(key, value, score_vector, rows, **options), []
    for t in range(rows, key.shape[-2]):
        memory = memory.append(key[..., t, :], value[..., t, :])
        contexts.append(attend(query[..., t : t + 1, :], memory).context)
    return torch.cat(contexts, -2), memory


@pytest.mark.parametrize("rows", [0, 2])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_causal_span(case, rows, backend):
    if not runnable(backend, case):
        pytest.skip(f"{backend} does not run this case here")
    if backend == "triton" and case not in CASES[::8]:
        pytest.skip("slow in an interpreter, and the operators are tested")
    args = {k: v for k, v in inputs(case, DEVICE[backend]).items() if k not in ("mask", "lengths")}
    args.pop("bias")
    leaves = [x for x in args.values() if isinstance(x, torch.Tensor)]
    got, _ = steps(**args, rows=rows, backend=backend)
    want = whole(**args, span=Span(causal=True), backend=backend).context[..., rows:, :]
    with torch.no_grad():
        decoded, _ = steps(**args, rows=rows, backend=backend)
    for a, b in zip(
        (got, decoded, *gradients(leaves, got)), (want, want, *gradients(leaves, want))
    ):
        bounds = {} if case.dtype.itemsize > 2 else {"atol": 3e-2, "rtol": 2e-2}
        if case.dtype == torch.float32:  # sums of numbers as large as the largest
            bounds = {"atol": 1e-6 * max(10, float(b.detach().abs().max())), "rtol": 1.3e-6}
        torch.testing.assert_close(a, b, **bounds)


@pytest.fixture(params=["tanh", "dot"])
def parts(request):
    args = inputs(Case(request.param, 3, 6, 6, 32, 5, dtype=torch.float64))
    return [args[x] for x in ("query", "key", "value", "score_vector")]


def test_derivatives_of_the_reference(parts):
    def contexts(*args):
        return steps(*args, *([None] if parts[3] is None else []), backend="reference")[0]

    few = [x[:1, :3, :2].detach().requires_grad_() for x in parts[:3]]
    few += [] if parts[3] is None else [parts[3][:2].detach().requires_grad_()]
    assert torch.autograd.gradgradcheck(contexts, few)


@pytest.mark.parametrize("trains", [False, True])
def test_old_memories_stay_as_they_were(parts, trains):
    query, key, value, weight = parts
    with torch.set_grad_enabled(trains):
        old = start(key, value, weight, 2)
        first = old.append(key[:, 2], value[:, 2])
        other = first.append(key[:, 5], value[:, 5])
        second = first.append(key[:, 3], value[:, 3])  # the room behind is another's by now
        third = second.append(key[:, 4:], value[:, 4:])
        fourth = second.append(key[:, 5], value[:, 5])  # third has the buffer's next rows
        rows = [[0, 1], [0, 1, 2], [0, 1, 2, 5], [0, 1, 2, 3], range(6), [0, 1, 2, 3, 5]]
        for memory, of in zip((old, first, other, second, third, fourth), rows):
            of = list(of)
            assert torch.equal(memory.key, key[:, of]) and torch.equal(memory.value, value[:, of])
            want = whole(query[:, :1], key[:, of], value[:, of], weight)[0]
            got = attend(query[:, :1], memory)[0]
            torch.testing.assert_close(got, want)
            if trains:
                leaves = [x for x in parts if x is not None]
                same(gradients(leaves, got), gradients(leaves, want))


def test_what_autograd_saved_is_not_touched(parts):
    """A query learns from memories that grow in place, with gradients off, before its backward."""
    query, key, value, weight = (None if x is None else x.detach() for x in parts)
    query.requires_grad_()
    got, _ = steps(query, key, value, weight)
    memory = start(key, value, weight)
    contexts = []
    for t in range(6):
        with torch.no_grad():
            memory = memory.append(key[:, t], value[:, t])
        contexts.append(attend(query[:, t : t + 1], memory)[0])
    same(gradients([query], got), gradients([query], torch.cat(contexts, 1)))


def test_a_memory_changed_in_place(parts):
    _, key, value, weight = parts
    with torch.no_grad():
        memory = start(key, value, weight, 2).append(key[:, 1], value[:, 1])
        memory = memory.append(key[:, 2], value[:, 2])
        more = memory.append(key[:, 3], value[:, 3])
        memory.key.mul_(2)
        for use in (lambda: attend(key[:, :1], more), lambda: more.append(key[:, 4], value[:, 4])):
            with pytest.raises(RuntimeError, match="its key was changed in place"):
                use()


@pytest.mark.parametrize("trains", [False, True])
def test_a_search_reorders(parts, trains):
    """Beams are dropped and repeated after each step; the oracle joins and reorders by PyTorch."""
    query, *_, weight = parts
    orders = torch.tensor([[1, 0, 1], [2, 2, 0], [0, 0, 0], [0, 2, 1], [1, 1, 2], [2, 0, 1]])
    with torch.set_grad_enabled(trains):
        memory, key, value = start(*parts[1:]), parts[1][:, :0], parts[2][:, :0]
        got, want = [], []
        for t, order in enumerate(orders):
            new = [x[:, t] for x in parts[1:3]]
            memory = memory.append(*new)
            key, value = (torch.cat([x, y[:, None]], 1) for x, y in zip((key, value), new))
            got.append(attend(query[:, t : t + 1], memory)[0])
            want.append(whole(query[:, t : t + 1], key, value, weight)[0])
            older, memory = (memory, key, value), memory.index_select(order)
            key, value = key[order], value[order]
            torch.testing.assert_close(memory.key, key)
        memory, key, value = older
        got.append(attend(query[:1, :1], memory.index_select(torch.tensor([2])))[0])
        want.append(whole(query[:1, :1], key[2:], value[2:], weight)[0])
    same(got, want)
    if trains:
        leaves = [x for x in parts if x is not None]
        same(gradients(leaves, *got), gradients(leaves, *want))


def test_an_older_memory_is_selected(backend):
    """What the backend keeps of the keys behind it is another's."""
    args = inputs(Case("tanh", 2, 1, 9, 32, 8), DEVICE[backend])
    query, key, value, weight = (args[x] for x in ("query", "key", "value", "score_vector"))
    index = torch.tensor([1, 0], device=key.device)
    with torch.no_grad():
        old = start(key, value, weight, 4, backend=backend).append(key[:, 4], value[:, 4])
        attend(query, old.append(key[:, 8], value[:, 8]))
        for memory in (old._replace(key=old.key * 2), old, start(key, value, weight, 5)):
            got = memory.index_select(index).append(key[:, 5:7], value[:, 5:7])
            keys, values = (
                torch.cat([x[index], y[:, 5:7]], 1)
                for x, y in ((memory.key, key), (memory.value, value))
            )
            want = whole(query, keys, values, weight, backend="reference")[0]
            torch.testing.assert_close(attend(query, got)[0], want)


@pytest.mark.parametrize("trains", [False, True])
def test_nothing_is_appended(parts, trains):
    query, key, value, weight = parts
    with torch.set_grad_enabled(trains):
        memory = start(key, value, weight, 4)
        for _ in range(3):
            memory = memory.append(key[:, :0], value[:, :0])
            torch.testing.assert_close(memory.key, key[:, :4])
        got = attend(query[:, :1], memory)[0]
        want = whole(query[:, :1], key[:, :4], value[:, :4], weight)[0]
    same([got], [want])
    if trains:
        leaves = [x for x in parts if x is not None]
        same(gradients(leaves, got), gradients(leaves, want))


def test_changed_fields_are_taken(parts):
    query, key, value, weight = (None if x is None else x.detach() for x in parts)
    memory = start(key, value, weight, 3).append(key[:, 3], value[:, 3])
    attend(query[:, :1], memory)
    changed = memory._replace(key=memory.key * 2).append(key[:, 4], value[:, 4])
    keys = torch.cat([key[:, :4] * 2, key[:, 4:5]], 1)
    want = whole(query[:, :1], keys, value[:, :5], weight)[0]
    torch.testing.assert_close(attend(query[:, :1], changed)[0], want)
    if weight is not None:
        changed = memory._replace(score="relu").append(key[:, 4], value[:, 4])
        want = whole(query[:, :1], key[:, :5], value[:, :5], weight, "relu")[0]
        torch.testing.assert_close(attend(query[:, :1], changed)[0], want)


@pytest.mark.parametrize("heads", [None, 2])
def test_lengths_and_masks(heads, backend):
    """What is appended comes behind the padding, and all see it; what padding holds is nothing."""
    args = inputs(Case("tanh", 3, 2, 6, 32, 5, H=heads), DEVICE[backend])
    query, key, value, weight = (
        args[x].detach() for x in ("query", "key", "value", "score_vector")
    )
    lengths = torch.tensor([4, 2, 0], device=key.device)
    mask = torch.tensor([True, False, True, True], device=key.device).expand(3, 4)
    seen = (torch.arange(4, device=key.device) < lengths[:, None]) & mask
    hidden = torch.cat([~seen, seen.new_zeros(3, 2)], 1).view(3, *[1] * (key.dim() - 3), 6, 1)
    key, value = (x.masked_fill(hidden, math.nan) for x in (key, value))
    memory = start(key, value, weight, 4, lengths=lengths, mask=mask, backend=backend)
    for t in (4, 5):
        memory = memory.append(key[..., t, :], value[..., t, :])
    assert memory.lengths is None and memory.mask.shape == (*hidden.mT.shape[:-1], 6)
    clean = (x.masked_fill(hidden, 0) for x in (key, value))
    want = whole(query, *clean, weight, mask=~hidden.mT, need_weights=True, backend="reference")
    for row in (slice(0, 2), slice(1, 2)):
        got = attend(query[..., row, :], memory, need_weights=True)
        torch.testing.assert_close(got.context, want.context[..., row, :])
        torch.testing.assert_close(got.weights, want.weights[..., row, :])


def test_an_empty_memory_with_lengths_grows():
    memory = prepare(torch.randn(3, 0, 4), torch.randn(3, 0, 5), lengths=torch.zeros(3).long())
    value = torch.randn(3, 5)
    context = attend(torch.randn(3, 1, 4), memory.append(torch.randn(3, 4), value)).context
    torch.testing.assert_close(context, value.unsqueeze(1))


def test_one_mask_for_all_sequences_is_selected():
    mask, key = torch.tensor([[[True, False]]]), torch.randn(3, 2, 4)
    memory = prepare(key, key, mask=mask).index_select(torch.tensor([2, 0]))
    context = attend(torch.randn(2, 1, 4), memory).context
    torch.testing.assert_close(context, key[[2, 0], :1])


@pytest.mark.parametrize("trains", [False, True])
def test_copies_are_amortised(parts, trains):
    """The rows move some log₂ T times; what a backend keeps of a key is made once between them."""
    with torch.set_grad_enabled(trains):
        memory, places = start(*parts[1:]), set()
        for _ in range(200):
            memory = memory.append(parts[1][:, 0], parts[2][:, 0])
            places.add((memory.key.data_ptr(), memory.value.data_ptr()))
    assert len(places) <= 8


@pytest.mark.cpu_library
def test_keys_are_prepared_once(monkeypatch):
    args = inputs(Case("tanh", 2, 1, 8, 32, 8))
    query, key, value, weight = (
        args[x].detach() for x in ("query", "key", "value", "score_vector")
    )
    memory = start(key, value, weight, 3, backend="cpu").append(key[:, 3], value[:, 3])
    rows, original = [], torch.ops.attnfast_cpu.key_exponentials
    monkeypatch.setattr(
        torch.ops.attnfast_cpu,
        "key_exponentials",
        lambda key, *a: rows.append(key.shape[1]) or original(key, *a),
    )
    for t in (4, 5, 6):
        attend(query, memory)
        older, memory = memory, memory.append(key[:, t], value[:, t])
    memory = memory.index_select(torch.tensor([1, 1]))
    attend(query, memory)
    attend(query, older)
    assert rows == [4, 5, 1, 7]  # where they have moved all of them
    rows.clear()
    kept = memory.shared_keys.key_exponentials()[:, 0]
    assert not rows
    torch.testing.assert_close(kept, torch.exp(2 * key[[1, 1], :7]), atol=0, rtol=2e-6)
    far = memory.append(key[:, 7] + 20, value[:, 7])
    attend(query, far)
    assert (
        far.shared_keys.key_exponentials() is None
        and older.shared_keys.key_exponentials() is not None
    )
    assert far.append(key[:, 0], value[:, 0]).shared_keys.key_exponentials() is None


def test_modes(parts):
    """A memory grows in inference mode, out of it and back, by tensors of either kind."""
    query, key, value, weight = (None if x is None else x.detach() for x in parts)
    want = whole(query[:, -1:], key, value, weight)[0]
    with torch.inference_mode():
        memory = start(key * 1.0, value * 1.0, weight, 2).append(key[:, 2] * 1.0, value[:, 2] * 1.0)
        attend(query[:, -1:], memory)
        kept = [key[:, 3] * 1.0, value[:, 3] * 1.0]
    memory = memory.append(key[:, :0], value[:, :0]).append(*kept)
    attend(query[:, -1:], memory)
    with torch.inference_mode():
        memory = memory.index_select(torch.tensor([0, 1, 2])).append(key[:, 4], value[:, 4])
        attend(query[:, -1:], memory)
    with torch.no_grad():
        memory = memory.append(key[:, 5], value[:, 5])
    query = query[:, -1:].requires_grad_()
    got = attend(query, memory)[0]
    torch.testing.assert_close(got, want)
    gradients([query], got)


def test_copies_and_pickles(parts):
    query, key, value, weight = (None if x is None else x.detach() for x in parts)
    memory = start(key, value, weight, 3).append(key[:, 3], value[:, 3])
    for again in (pickle.loads(pickle.dumps(memory)), copy.copy(memory), copy.deepcopy(memory)):
        assert again.key.untyped_storage().nbytes() == key[:, :4].numel() * key.itemsize
        got = attend(query[:, :1], again.append(key[:, 4], value[:, 4]))[0]
        torch.testing.assert_close(got, whole(query[:, :1], key[:, :5], value[:, :5], weight)[0])
    assert torch.equal(memory.append(key[:, 5], value[:, 5]).key, key[:, [0, 1, 2, 3, 5]])


def test_autocast_takes_the_memory_s_type(parts):
    _, key, value, weight = (None if x is None else x.detach().float() for x in parts)
    memory = start(key, value, weight, 3)
    with torch.autocast("cpu", torch.bfloat16):
        memory = memory.append(key[:, 3].bfloat16(), value[:, 3].bfloat16())
    assert memory.key.dtype == memory.value.dtype == torch.float32


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_in_graphs_and_mapped(parts):
    query, key, value, weight = parts
    torch._dynamo.reset()

    def step(query, key, value, memory):
        memory = memory.append(key, value)
        return attend(query, memory)[0], memory.key

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    memory = start(key, value, weight, 2).append(key[:, 2], value[:, 2])
    for t in (3, 4):
        of = [query[:, :1], key[:, t], value[:, t]]
        got, want = compiled(*of, memory), step(*of, memory)
        same(got, want)
        leaves = [x for x in parts if x is not None]
        same(gradients(leaves, got[0]), gradients(leaves, want[0]))

    def loop(query, key, value):
        return steps(query, key, value, None if weight is None else weight.detach())[0]

    with torch.no_grad():
        of = [x.detach() for x in (query, key, value)]
        mapped = torch.func.vmap(loop)(*(torch.stack([x, 2 * x]) for x in of))
        torch.testing.assert_close(mapped, torch.stack([loop(*of), loop(*(2 * x for x in of))]))


def test_fertility_is_of_the_keys_that_were_prepared():
    module = CoverageAttention(4, 4, 4, fertility=2.0)
    with pytest.raises(ValueError, match=r"memory must be without fertility to append keys"):
        module.append(module.prepare(torch.zeros(2, 3, 4)), torch.zeros(2, 4))


def test_a_history_grows(backend):
    """A penalty on what was covered, with a memory that grows and its coverage padded along."""
    args = inputs(Case("tanh", 2, 1, 5, 8, 4), DEVICE[backend])
    query, key, value, weight = (args[x] for x in ("query", "key", "value", "score_vector"))
    memory = start(key, value, weight, 4, backend=backend).append(key[:, 4], value[:, 4])
    covered = torch.rand(2, 5, device=key.device)
    got, want = (
        attend_with_history(query, x, penalty=1.0, coverage=covered)
        for x in (memory, prepare(key, value, weight, backend=backend))
    )
    torch.testing.assert_close(got.context, want.context)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    "attention",
    [
        BahdanauAttention(6, 5, 8),
        LuongAttention(6, 5),
        LuongAttention(6, 5, "concat"),
        Heads(6, 5, 8, 2, value_dim=5),
        Heads(6, 5, 8, 2, "additive"),
    ],
    ids=["bahdanau", "general", "concat", "heads", "additive heads"],
)
def test_modules_append_states(attention, apart):
    states, state = torch.randn(2, 7, 5), torch.randn(2, 7, 6)
    values = torch.randn(2, 7, 5) if apart else None

    def rows(x, of):
        return None if x is None else x[:, of]

    def decode():
        memory, out = attention.prepare(states[:, :2], values=rows(values, slice(2))), []
        for t in (2, 3, 4):
            memory = attention.append(memory, states[:, t], rows(values, t))
            out.append(attention(state[:, t], memory)[0])
        memory = attention.append(memory, states[:, 5:], rows(values, slice(5, 7)))
        return [*out, attention(state[:, 6], memory)[0]]

    def anew():
        out = []
        for t in (3, 4, 5, 7):
            memory = attention.prepare(states[:, :t], values=rows(values, slice(t)))
            out.append(attention(state[:, t - 1], memory)[0])
        return out

    same(decode(), anew())
    of = list(attention.parameters())
    same(gradients(of, *decode()), gradients(of, *anew()))


class Block(nn.Module):
    """The book's decoder block, its cache a concatenation; normalised after each sum."""

    def __init__(self, dim, heads):
        super().__init__()
        self.attention = Heads(dim, dim, dim, heads)
        self.norm, self.norm_after = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.ffn = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))

    def split(self, x):
        return x.unflatten(-1, (self.attention.num_heads, -1)).transpose(1, 2)

    def after(self, x, attended):
        y = self.norm(x + attended)
        return self.norm_after(y + self.ffn(y))

    def textbook(self, x, cache):
        """One step ``[B, 1, dim]``; or a whole target, with a mask in place of the cache."""
        cache = x if cache is None else torch.cat((cache, x), 1)
        own = self.attention
        query, key, value = (
            self.split(proj(y))
            for proj, y in ((own.query_proj, x), (own.key_proj, cache), (own.value_proj, cache))
        )
        score = query @ key.mT / key.shape[-1] ** 0.5
        if x.shape[1] > 1:
            score = score.masked_fill(~torch.ones(score.shape[-2:], dtype=torch.bool).tril(), -1e6)
        context = (score.softmax(-1) @ value).transpose(1, 2).flatten(2)
        return self.after(x, own.out_proj(context)), cache

    def growing(self, x, memory):
        own = self.attention
        memory = own.prepare(x) if memory is None else own.append(memory, x)
        return self.after(x, own(x, memory).context), memory


class Decoder(nn.Module):
    def __init__(self, words, dim, heads, layers):
        super().__init__()
        self.embedding, self.dense = nn.Embedding(words, dim), nn.Linear(dim, words)
        self.position = nn.Parameter(torch.randn(50, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))

    def forward(self, way, words, state, t=0):
        x, after = self.embedding(words) + self.position[t : t + words.shape[1]], []
        for block, kept in zip(self.blocks, state):
            x, kept = getattr(block, way)(x, kept)
            after.append(kept)
        return self.dense(x), after


def test_the_textbook_s_cached_loop():
    """Dive into Deep Learning's decoder, greedy, its beams repeated and dropped at each step."""
    torch.manual_seed(0)
    decoder = Decoder(11, 16, 4, 2).double()
    orders = torch.randint(0, 3, (12, 3))
    found = []
    for way in ("textbook", "growing"):
        words, state, logits = torch.tensor([[1], [2], [3]]), [None, None], []
        for t, order in enumerate(orders):
            out, state = decoder(way, words, state, t)
            logits.append(out)
            words = out.argmax(-1)[order]
            if way == "textbook":
                state = [x.index_select(0, order) for x in state]
            else:
                state = [x.index_select(order) for x in state]
        logits = torch.cat(logits, 1)
        found.append([logits, *gradients(list(decoder.parameters()), logits)])
    same(*found)
    target = torch.randint(0, 11, (3, 9))
    want, _ = decoder("textbook", target, [None, None])  # all at once, by a mask
    state, logits = [None, None], []
    with torch.inference_mode():
        for t, words in enumerate(target.split(1, 1)):
            out, state = decoder("growing", words, state, t)
            logits.append(out)
    torch.testing.assert_close(torch.cat(logits, 1), want, atol=FLOOR[torch.float64], rtol=1e-9)
