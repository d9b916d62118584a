"""Searches in one operator: its oracle, and the models that search with it."""

import math
import random
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from attention_cases import DEVICE
from test_recurrent import Case, as_bfloat16, doubled, refusal
from test_recurrent import call as layer_call
from torch import Tensor

import attnfast
from attnfast._utils.checks import InputError
from attnfast.decoding import beam_search, greedy_search, sample, search
from attnfast.decoding._constraints import output_limit
from attnfast.models import BOS, EOS, Config, ListenAttendSpell, PyramidEncoder, build
from attnfast.models.config import COPY_GATES
from attnfast.models.decoders import READOUTS
from attnfast.ops import dispatch, reference, reference_search
from attnfast.ops.backends import HALF, unsupported_reason
from attnfast.ops.operators import CHECKS
from attnfast.ops.packing import upcast_halves
from attnfast.ops.recurrent import WEIGHTS
from attnfast.ops.search import SEARCH, SearchInputs, SearchOutputs, layer_of, reads_input

KINDS = ("attend_first", "attend_last", "input_feeding", "nothing fed")
TERMS = ("projection", "lengths", "mask", "span", "feed", "biases")
STACKED = (*TERMS, "stack", "no input")


def served(backend: str, dtype: torch.dtype = torch.float32) -> None:
    if backend == "reference":
        pytest.skip("what the others are judged by")
    if reason := unsupported_reason(backend, DEVICE[backend], dtype, "search"):
        pytest.skip(f"{backend}: {reason}")


def exact(backend: str) -> None:
    """Skip what a GPU's search leaves out: 8 bits, packing, threads, the order of equal scores."""
    served(backend)
    if backend != "cpu":
        pytest.skip(f"{backend} searches without it")


#: Beams and their options.
BEAMS = {
    "of one": {},
    "of two": {"beam": 2},
    "of three": {"beam": 3, "n_best": 2, "length_penalty": 1.0},
    "of five": {"beam": 5, "n_best": 5, "length_penalty": 0.6, "length_bonus": 0.3},
    "wide": {"beam": 20, "n_best": 7, "length_bonus": 1.0},
}

#: Rules and outputs of a search.
RULES = {
    "weights": {"need_weights": True},
    "shortest": {"min_length": 3},
    "no word twice": {"no_repeat_ngram": 1},
    "no pair twice": {"no_repeat_ngram": 2, "need_weights": True},
    "covering": {"coverage_penalty": 0.7, "length_penalty": 1.0},
    "all": {"need_weights": True, "min_length": 2, "no_repeat_ngram": 3, "coverage_penalty": 0.2},
}

#: Draws of words.
DRAWS = {
    "of all": {},
    "sharp": {"temperature": 0.4},
    "of the first": {"top_k": 4, "temperature": 1.7},
    "of the likely": {"top_p": 0.6},
    "of more than all": {"top_k": 2000},
    "of both": {"top_k": 9, "top_p": 0.8, "temperature": 0.9},
}


def call(
    kind: str,
    case: Case,
    V: int = 50,
    R: int = 7,
    sharp: float = 1.0,
    **options: float,
) -> SearchInputs:
    """Return a call; ``case`` has the layer's part, with T the most words."""
    unfed = kind == "nothing fed"
    case = Case(**{**vars(case), "recurrence": "input_feeding" if unfed else kind})
    layer = layer_call(case)
    g = torch.Generator().manual_seed(case.seed + 1)

    def floats(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=g, dtype=torch.float64) * scale).to(case.dtype)

    names = [x for x in layer._fields if x in SearchInputs._fields]
    args = {
        name: x.detach() if isinstance(x, Tensor) else x
        for name, x in ((name, getattr(layer, name)) for name in names)
    }
    H, E, Dv = case.H, case.E, case.Dv
    if layer.weight_output is None and "joined" in case.terms:
        R = (H, H + Dv, H + Dv + E)[case.seed % 3]
    elif layer.weight_output is None:
        read = H + Dv + (0 if "no input" in case.terms else E)
        args["weight_readout"] = floats(R, read, scale=(H + Dv + E) ** -0.5)
        args["bias_readout"] = floats(R) if "biases" in case.terms else None
    else:
        R = case.F
    if unfed:
        args |= {"weight_ih": args["weight_ih"][:, :E].contiguous(), "feed": None}
    if args["mask"] is not None:
        apart = 1 + case.seed % 2  # columns side by side, or every second one of others
        args["mask"] = args["mask"][:, :1].repeat_interleave(apart, -1)[..., ::apart]
    args["bias_vocab"] = floats(V) if "biases" in case.terms else None
    limits = torch.randint(0, case.T + 1, (case.B,), generator=g)
    words = V
    if "copying" in case.terms:
        words = V + case.seed % 3 * (V // 2)
        source = torch.randint(0, words, (case.B, case.Tk), generator=g)
        source[:, case.Tk // 2 :] = source[:, : case.Tk - case.Tk // 2].clone()  # each word twice
        args |= {
            "weight_pointer": floats(1, H + Dv + E if "gate" in case.terms else R, scale=sharp),
            "source": source,
            "num_oov": words - V,
            "bias_pointer": floats(1) if "biases" in case.terms else None, "unknown": 1,
        }  # fmt: skip
    word_mask = (torch.arange(words) >= 3).unsqueeze(0)
    if "words" in case.terms:  # masks of each sentence
        word_mask = torch.rand(case.B, words, generator=g) < 0.8
        word_mask[:, 3] |= torch.rand(case.B, generator=g) < 0.7
    if "prefix" in case.terms:
        args["prefix"] = torch.randint(4, words + 1, (case.B, 3), generator=g)
        args["prefix"][torch.rand(case.B, 3, generator=g).cumsum(1) > 1] = -1
        args["prefix"][torch.arange(3) + 1 >= limits.cpu()[:, None]] = -1
    if "numbers" in case.terms:
        shape = case.B, int(options.get("beam", 1)), case.T
        args["numbers"] = torch.rand(shape, generator=g, dtype=torch.float64)
    if "gaps" in case.terms:
        args["prefix"][:, 0] = -1
    end = -1 if "endless" in case.terms else 3
    if layer.weight_output is not None and "no tanh" in case.terms:
        args["output_activation"] = "identity"
    return SearchInputs(
        floats(V, E), floats(V, R, scale=2), limits, **args,
        embedding_scale=0.8, begin=2, end=end, most=case.T, word_mask=word_mask,
        **options,
    )  # fmt: skip


def interpreted(backend: str) -> bool:
    """Return whether kernels run in Triton's interpreter, which takes a millisecond a program."""
    return backend == "triton" and not torch.cuda.is_available()


def on_device(backend: str, args: SearchInputs) -> SearchInputs:
    """Return a call on the device that the backend takes."""
    tensors = {name: x for name, x in args._asdict().items() if isinstance(x, Tensor)}
    return args._replace(**{name: x.to(DEVICE[backend]) for name, x in tensors.items()})


def find(backend: str, args: SearchInputs) -> SearchOutputs:
    """Search on the device that the backend takes; return the results on the CPU."""
    return SearchOutputs(*(x.cpu() for x in SEARCH(backend, on_device(backend, args))))


def judge(kind: str, case: Case, backend: str, **sizes: float) -> list[tuple[int, ...]]:
    """Compare a search with the oracle's; return the words of all hypotheses.

    In float32 scores of a beam may be too close to be ordered: only the best is compared.
    """
    args = call(kind, case, **sizes)
    wanted = reference_search.search(doubled(call(kind, case, **sizes)))
    rows = zip(wanted.words.flatten(0, 1).tolist(), wanted.lengths.flatten().tolist())
    if interpreted(backend):
        case = replace(case, B=min(case.B, 4), T=min(case.T, 5))
        args = call(kind, case, **sizes)
        wanted = reference_search.search(doubled(call(kind, case, **sizes)))
    got = find(backend, args)
    if args.beam > 1 and case.dtype == torch.float32:
        got, wanted = ([x.scores[:, 0]] for x in (got, wanted))
    for x, y in zip(got, wanted):
        x = x.to(y.dtype)
        torch.testing.assert_close(x, y, rtol=1e-5, atol=2e-5, msg=f"{kind} {case} {sizes}")
    return [tuple(words[:n]) for words, n in rows]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["gru", "lstm", "tanh"])
def test_says_what_the_oracle_says(mode, kind, backend):
    served(backend)
    rows = []
    for seed, (score, terms) in enumerate(
        [("dot", ()), ("tanh", TERMS), ("dot", STACKED), ("relu", ("projection",))]
    ):
        rows += judge(kind, Case(mode, kind, score, B=5, T=12, terms=terms, seed=seed), backend)
    assert len(set(rows)) > 8
    assert len({len(row) for row in rows}) > 2


@pytest.mark.parametrize("beam", BEAMS)
@pytest.mark.parametrize("kind", KINDS)
def test_beams(kind, beam, backend):
    served(backend)
    if backend == "triton" and kind != KINDS[len(beam) % 3] and beam != "of two":
        pytest.skip("its kernels know no recurrence")
    rows, options = [], BEAMS[beam]
    B, T = (3, 4) if beam == "wide" else (9, 7)
    for mode, V, terms in (("gru", 50, TERMS), ("lstm", 6, ()), ("tanh", 700, STACKED)):
        case = Case(mode, None, "tanh", B=B, T=T, terms=terms, dtype=torch.float64, seed=V)
        rows += judge(kind, case, backend, V=V, **options)
    assert len(set(rows)) > 8
    assert len({len(row) for row in rows}) > 2


@pytest.mark.filterwarnings("ignore:overflow encountered")  # by Triton's interpreter
def test_extreme_arguments(backend):
    """Strided limits, n-grams of more words than memory, logits and scores beyond float32."""
    served(backend)
    case = Case("gru", None, "tanh", B=3, T=5, dtype=torch.float64)
    args = call("attend_first", case, V=20, beam=2, n_best=2)
    limits = torch.tensor([[5, 0], [3, 0], [1, 0]])[:, 0]
    last = torch.zeros(20, dtype=torch.float64)
    last[5] = 1e39
    for more in (
        {"limits": limits}, {"no_repeat_ngram": 2**31 - 1}, {"bias_vocab": last},
        {"length_penalty": -1748.0, "min_length": 3, "limits": torch.full((3,), 4)},
    ):  # fmt: skip
        given = args._replace(**more)
        found, wanted = find(backend, given), reference_search.search(given)
        for x, y in zip(found, wanted):
            torch.testing.assert_close(x, y)


def test_the_end_of_a_finished_sentence_is_read(backend):
    """A draw after the end changes nothing, but its NaN is one of the sentence."""
    served(backend)
    case = Case("gru", None, "tanh", B=2, T=5, terms=("numbers",), dtype=torch.float64)
    args = call("attend_first", case, V=6, beam=3, n_best=3)
    args = args._replace(limits=torch.full((2,), 5))
    args.embedding[3] = math.nan
    found, wanted = find(backend, args), reference_search.search(args)
    assert found.lengths.equal(wanted.lengths) and (found.lengths == -1).any()


@pytest.mark.parametrize("draws", [(), ("numbers",)])
def test_triton_reads_a_vocabulary_in_blocks(draws, monkeypatch):
    served("triton")
    from attnfast.kernels import search as kernels

    monkeypatch.setattr(kernels, "MOST_WORDS", 16)
    case = Case("gru", None, "tanh", B=4, T=5, terms=("words", *draws), dtype=torch.float64)
    rules = {"no_repeat_ngram": 1, "length_bonus": 0 if draws else 0.3}
    rows = judge("attend_first", case, "triton", V=70, beam=3, n_best=3, **rules)
    assert len(set(rows)) > 8 and max(word for row in rows for word in row) > 48


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("beam", [1, 2, 4])
def test_rules(beam, rule, backend):
    """Constraints on words, attention weights and the coverage penalty."""
    served(backend)
    rows, kinds = [], iter(KINDS * 2)
    for V, terms in ((50, ()), (9, ("words",)), (40, ("prefix", "words")), (6, ("mask", "prefix"))):
        for more in (("lengths", "biases"), ("lengths", "span", "stack")):
            kind = next(kinds)
            case = Case(
                "gru", None, "tanh", B=9, T=8, terms=(*terms, *more), dtype=torch.float64, seed=V
            )
            options = {"beam": beam, "n_best": beam, **RULES[rule]}
            rows += judge(kind, case, backend, V=V, **options)
    assert len(set(rows)) > 8
    assert len({len(row) for row in rows}) > 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("beam", "dtype"), [(1, torch.float64), (3, torch.float64), (3, torch.float32)]
)
def test_attention_with_a_history(beam, dtype, kind, backend):
    """A hypothesis has its own coverage and its own weights of the step before."""
    served(backend)
    rows = []
    for seed, (score, terms) in enumerate(
        [
            ("tanh", ("filters", "lengths")),
            ("tanh", ("penalty", "fertility", "projection", "mask")),
            ("dot", ("penalty", "lengths")),
            ("tanh", ("transition", "lengths", "stack")),
            ("tanh", ("filters", "sigmoid", "penalty", "numbers", "lengths")),
            ("tanh", ("filters", "transition", "prefix", "words")),
        ]
    ):
        terms = ("past", "biases", *terms)
        case = Case("gru", None, score, B=9, T=8, terms=terms, dtype=dtype, seed=seed)
        options = {"coverage_penalty": 0.3, "need_weights": True, "no_repeat_ngram": 2}
        rows += judge(kind, case, backend, beam=beam, n_best=beam, **(options if seed % 2 else {}))
    assert len(set(rows)) > 8
    assert len({len(row) for row in rows}) > 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draws", [(), ("numbers",)])
def test_other_rows_are_scored(draws, kind, backend):
    """States, contexts and words without a readout, and attentional vectors without a tanh."""
    served(backend)
    rows = []
    for seed in range(3):
        for beam, more in ((1, ("lengths", "no tanh")), (4, ("biases", "stack", "no tanh"))):
            terms = ("joined", *more, *draws)
            case = Case("gru", None, "tanh", B=9, T=8, terms=terms, dtype=torch.float64, seed=seed)
            rows += judge(kind, case, backend, beam=beam, n_best=beam)
    assert len(set(rows)) > 8
    assert len({len(row) for row in rows}) > 2


@pytest.mark.parametrize("draws", [(), ("numbers",)])
@pytest.mark.parametrize("beam", [1, 3])
def test_no_word_ends(beam, draws, backend):
    """Sentences are as long as their limits allow; words of any step may be given."""
    served(backend)
    rows = []
    for seed, terms in enumerate([(), ("prefix", "gaps", "words"), ("prefix", "gaps", "lengths")]):
        terms = ("endless", *terms, *draws)
        case = Case("gru", None, "tanh", B=9, T=6, terms=terms, dtype=torch.float64, seed=seed)
        options = {"beam": beam, "n_best": beam, "min_length": 2, "need_weights": True}
        rows += judge(KINDS[seed], case, backend, V=9, **options)
    assert len(set(rows)) > 8
    assert any(3 in row[:-1] for row in rows)


@pytest.mark.parametrize("draws", [(), ("numbers",)])
def test_words_that_no_key_has_cannot_be_copied(draws, backend):
    """Padding has no weight; only the end and copied words may come."""
    served(backend)
    case = Case("gru", None, "tanh", B=6, T=5, terms=("copying", "lengths", *draws), seed=1)
    args = call("attend_first", replace(case, dtype=torch.float64), V=20, beam=6, n_best=6)
    mask = (torch.arange(30) == 3) | (torch.arange(30) >= 20)
    source = torch.arange(20, 27).expand(6, -1).contiguous()  # of seven keys, a word each
    two = torch.full((6,), 2)  # keys, and words: three sentences are possible
    args = args._replace(word_mask=mask[None], source=source, lengths=two, limits=two)
    found, wanted = find(backend, args), reference_search.search(args)
    torch.testing.assert_close(found.words, wanted.words)
    torch.testing.assert_close(found.word_scores, wanted.word_scores)
    assert found.words.max() == 21


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["greedy", "beam", "draws"])
def test_copying(how, kind, backend):
    served(backend)
    rows, V = [], {"greedy": 50, "beam": 40, "draws": 65}[how]
    for seed, terms in enumerate(
        [
            ("gate",),
            ("lengths", "biases"),
            ("words", "mask"),
            ("gate", "prefix", "words", "biases"),
            ("span",),
        ]
    ):
        terms = ("copying", *terms, *(("numbers",) if how == "draws" else ()))
        options = {"beam": 1 if how == "greedy" else 4}
        options |= {"n_best": options["beam"], "no_repeat_ngram": seed % 3}
        options |= DRAWS["of both"] if how == "draws" and seed % 2 else {}
        case = Case("gru", None, "tanh", B=9, T=8, terms=terms, dtype=torch.float64, seed=seed)
        for sharp in (1.0, 30.0):  # gates that are nearly 0 and 1
            rows += judge(kind, case, backend, V=V, sharp=sharp, **options)
    assert len(set(rows)) > 20
    assert sum(word >= V for row in rows for word in row) > 10


@pytest.mark.parametrize("seed", [0, 1])  # the columns of the mask side by side, or not
def test_masked_keys_need_no_coverage(seed, backend):
    served(backend)
    case = Case("gru", None, "tanh", B=9, T=6, terms=("mask",), dtype=torch.float64, seed=seed)
    rows = judge("attend_first", case, backend, V=6, beam=4, n_best=4, coverage_penalty=0.5)
    assert len(set(rows)) > 5


@pytest.mark.parametrize("draws", [(), ("numbers",)])
def test_a_prefix_of_no_word_of_the_vocabulary_cannot_go_on(draws, backend):
    served(backend)
    case = Case("gru", None, "tanh", B=3, T=6, terms=draws, dtype=torch.float64)
    args = call("attend_first", case, V=64, beam=2, n_best=2)  # whole panels
    prefix = torch.tensor([[5, 64], [2**40, -1], [6, 7]])
    args = args._replace(limits=torch.full((3,), 6), prefix=prefix)
    found, wanted = find(backend, args), reference_search.search(args)
    assert found.lengths[:2, 0].tolist() == [1, 0] and (found.scores[:2] == -math.inf).all()
    for x, y in zip(found, wanted):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("how", DRAWS)
@pytest.mark.parametrize("beam", [1, 3])
def test_draws(beam, how, backend):
    served(backend)
    rows, kinds = [], iter(KINDS)
    for V, terms in ((50, ()), (9, ("words",)), (40, ("prefix", "words")), (700, STACKED)):
        case = Case(
            "lstm", None, "tanh", B=9, T=8, terms=("numbers", *terms), dtype=torch.float64, seed=V
        )
        rules = {"min_length": 2, "no_repeat_ngram": 2, "need_weights": True} if terms else {}
        options = {"beam": beam, "n_best": beam, **rules, **DRAWS[how]}
        rows += judge(next(kinds), case, backend, V=V, **options)
    assert len(set(rows)) > 8
    assert len({len(row) for row in rows}) > 2


@pytest.mark.parametrize("seed", range(3))
def test_fuzz(seed, backend):
    served(backend)
    draw = random.Random(seed)
    for _ in range(2 if interpreted(backend) else 16):
        size = lambda *most: draw.randint(1, draw.choice(most))  # noqa: E731
        terms = tuple(
            x for x in (*STACKED, "words", "prefix", "copying", "gate") if draw.random() < 0.5
        )
        case = Case(
            draw.choice(("gru", "lstm", "tanh")), None,
            draw.choice(("dot", "tanh", "relu", "leaky_relu")),
            B=size(3, 40), T=size(4, 12), E=size(9, 70), H=size(9, 70), Tk=size(5, 70),
            A=size(9, 70), Dv=size(9, 70), F=size(9, 70),
            terms=terms, seed=draw.randint(0, 2**31),
            dtype=draw.choice((torch.float32, torch.float64)),
        )  # fmt: skip
        options = draw.choice([*BEAMS.values()])
        if draw.random() < 0.5:
            options = options | draw.choice([*RULES.values()])
        if case.dtype == torch.float64 and draw.random() < 0.3:
            case = replace(case, terms=(*case.terms, "numbers"))
            beam = options.get("beam", 1)
            options = options | {"n_best": beam} | draw.choice([*DRAWS.values()])
        judge(draw.choice(KINDS), case, backend, V=4 + size(9, 700), R=size(9, 70), **options)


def scores_after(args: SearchInputs, words: Tensor) -> Tensor:
    """Return the oracle's log-probabilities ``[B, T, V]`` of each word after ``words [B, T]``."""
    exact = doubled(args)
    read = torch.cat([torch.full((len(words), 1), args.begin), words[:, :-1]], 1)
    inputs = exact.embedding[read] * exact.embedding_scale
    made = reference.recurrent(layer_of(exact, inputs), args.int8)
    states = made.states if made.states.dim() == 3 else made.states[-1]
    rows, product = made.attentional, partial(reference.product, int8=args.int8)
    if exact.weight_readout is not None:
        joined = [states, made.contexts, inputs][: 2 + reads_input(exact)]
        rows = product(joined, exact.weight_readout, exact.bias_readout).tanh()
    logits = product([rows], exact.weight_vocab, exact.bias_vocab)
    return logits.index_fill(-1, torch.arange(args.end), -math.inf).log_softmax(-1)


def losses(args: SearchInputs, backend: str) -> tuple[Tensor, Tensor]:
    """Return what each word found lacks to the best, and the error of its score."""
    found, T = find(backend, args), args.most
    words = found.words[:, 0].masked_fill(torch.arange(T) >= found.lengths, args.end)
    scores = scores_after(args, words)
    own = scores.gather(-1, words.unsqueeze(-1)).squeeze(-1)
    exists = torch.arange(T) < found.lengths
    chosen = exists & (torch.arange(T) < args.limits[:, None] - 1)
    return (scores.amax(-1) - own)[chosen], (own - found.word_scores[:, 0])[exists].abs()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_bfloat16(kind, backend):
    """Every word is the best of those that may follow the words before it, but for rounding."""
    served(backend)
    for mode, sizes in (("gru", (7, 5, 10)), ("lstm", (40, 33, 70))):
        B, E, H = sizes
        case = Case(mode, None, "tanh", B, 12, E, H, terms=TERMS, seed=B)
        args = as_bfloat16(call(kind, case, V=300), WEIGHTS)
        lost, errors = losses(args, backend)
        assert len(lost) > 20
        assert lost.max() < 0.05 and errors.max() < 0.05


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["gru", "lstm", "tanh"])
def test_int8(mode, kind, backend):
    """Sums of integers are exact; a number near the middle of two may be rounded to the other."""
    exact(backend)
    all_lost, all_errors = [], []
    for seed, (terms, sizes) in enumerate(
        [((), (3, 5, 10)), (STACKED, (40, 33, 70)), (TERMS, (7, 64, 130))]
    ):
        B, E, H = sizes
        case = Case(mode, None, "tanh", B, 6, E, H, A=H - 1, Dv=E + 3, F=H, terms=terms, seed=seed)
        args = call(kind, case, V=301, R=E + 2, int8=True)
        args.weight_vocab[7] = 0.0
        lost, errors = losses(args, backend)
        all_lost.append(lost), all_errors.append(errors)
    lost, errors = torch.cat(all_lost), torch.cat(all_errors)
    assert len(lost) > 20 and lost.max() < 0.05
    assert errors.quantile(0.9) < 1e-5 and errors.max() < 0.5


@pytest.mark.parametrize("sizes", [{"B": 0}, {"T": 0}, {"Tk": 0}, {"B": 1, "H": 600, "E": 300}])
def test_sizes(sizes, backend):
    served(backend)
    judge("attend_first", Case("gru", None, "tanh", **sizes), backend, V=2000)


def test_of_equal_scores_the_first_word_is_said(backend):
    exact(backend)
    args = call("attend_first", Case("gru", None, B=1, T=3), V=1000)
    args = args._replace(bias_vocab=torch.zeros(1000), limits=torch.tensor([3]))
    args.bias_vocab[[47, 48, 63, 300, 999]] = (
        1e9  # of one lane and of several; beside which other scores vanish
    )
    assert find(backend, args).words.tolist() == [[[47, 47, 3]]]
    args.bias_vocab[:3] = 1e12  # masked: never said
    assert find(backend, args).words.tolist() == [[[47, 47, 3]]]
    args.bias_vocab[3] = 1e10
    assert find(backend, args).words[0, 0, 0] == 3


@pytest.mark.parametrize("bias", [0.0, 1.0, -1.0])
def test_of_equal_hypotheses_the_first_are_kept(bias, backend):
    """With all words alike, the end as likely as they are, or less, or more."""
    exact(backend)
    case = Case("gru", None, B=2, T=4, dtype=torch.float64)
    args = call("attend_first", case, V=40, beam=3, n_best=3, length_bonus=bias / 2)
    args = args._replace(weight_vocab=torch.zeros_like(args.weight_vocab))
    args = args._replace(bias_vocab=torch.full((40,), bias, dtype=torch.float64))
    args = args._replace(limits=torch.tensor([4, 3]))
    args.bias_vocab[3] = 0.0
    for got, wanted in zip(find(backend, args), reference_search.search(args)):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("how", [{"top_k": 3}, {"top_p": 0.3}, {}])
def test_of_equal_words_the_first_are_drawn_from(how, backend):
    served(backend)
    case = Case("gru", None, B=2, T=5, terms=("numbers",), dtype=torch.float64)
    args = call("attend_first", case, V=40, beam=20, n_best=20, **how)
    args = args._replace(weight_vocab=torch.zeros_like(args.weight_vocab), bias_vocab=None)
    args = args._replace(limits=args.limits.new_tensor([5, 4]))
    got, wanted = find(backend, args), reference_search.search(args)
    torch.testing.assert_close(got.words, wanted.words)
    torch.testing.assert_close(got.word_scores, wanted.word_scores)
    most = {"top_k": 3, "top_p": 12}.get("".join(how), 37)
    assert got.words[got.words > 0].max() < 3 + most


def test_draws_at_extremes(backend):
    served(backend)
    args = call("attend_first", Case("gru", None, B=4, T=5, terms=("numbers",)), V=64)
    best = find(backend, args._replace(numbers=None))
    for how in ({"temperature": 1e-45}, {"top_k": 1}, {"top_p": 1e-9}):
        found = find(backend, args._replace(**how))
        assert found.words.equal(best.words)
    wide = find(backend, args._replace(temperature=1e308))
    assert wide.scores.isfinite()[args.limits > 0].all()
    last = args.hidden.new_zeros(64)
    last[63] = 1e3  # of whole panels
    limits = torch.full_like(args.limits, 3)
    found = find(backend, args._replace(bias_vocab=last, top_k=1, limits=limits))
    assert found.words[..., :2].eq(63).all()


@pytest.mark.parametrize("beam", [1, 4])
def test_a_sentence_without_scores_ends_alone(beam, backend):
    served(backend)
    case = Case("gru", None, B=4, T=6)
    args = call("attend_first", case, V=300, beam=beam, need_weights=True)
    args = args._replace(limits=torch.full_like(args.limits, 6))
    wanted = find(backend, args)
    none = find(backend, args._replace(bias_vocab=args.hidden.new_full((300,), -math.inf)))
    assert (none.lengths == 0).all() and none.scores.isneginf().all()
    args.hidden[2] = math.nan
    found = find(backend, args)
    assert found.lengths[2] == -1 and not found.words[2].any()
    for x, y in zip(found, wanted):
        assert x[[0, 1, 3]].equal(y[[0, 1, 3]])
    for word in (20, 299):
        for number in (math.nan, math.inf):
            bias = args.hidden.new_zeros(300)
            bias[word] = number
            assert (find(backend, args._replace(bias_vocab=bias)).lengths == -1).all()


def test_weights_after_an_end_are_0_beside_nan(backend):
    served(backend)
    case = Case("gru", None, "tanh", B=4, T=10, terms=("lengths",), dtype=torch.float64, seed=1)
    args = call("attend_first", case, V=6, need_weights=True)
    args.embedding[5] = math.nan
    found, wanted = find(backend, args), reference_search.search(args)
    assert (found.lengths < 0).any() and (found.lengths > 0).any()
    torch.testing.assert_close(found.weights, wanted.weights)


@pytest.mark.parametrize("int8", [False, True])
def test_scores_of_words_that_may_not_come_do_not_count(int8, backend):
    (exact if int8 else served)(backend)
    args = call("attend_first", Case("gru", None, B=4, T=6), V=300, beam=3, int8=int8)
    wanted = find(backend, args)
    for number in (math.nan, math.inf, 1e30):
        weight = args.weight_vocab.clone()
        weight[:3] = number
        for x, y in zip(find(backend, args._replace(weight_vocab=weight)), wanted):
            assert x.equal(y)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_words_for_any_number_of_threads(kind, backend):
    exact(backend)
    case = Case("lstm", None, "tanh", 40, 8, 60, 130, 50, 70, 60, 65)
    threads = torch.get_num_threads()
    args = call(kind, case, V=3000, beam=3 if kind == KINDS[0] else 1)
    first = find(backend, args).words
    try:
        for count in (1, 2, 3, *[threads] * 10):
            torch.set_num_threads(count)
            assert find(backend, args).words.equal(first)
    finally:
        torch.set_num_threads(threads)


def test_opcheck(backend):
    served(backend)
    args = call("input_feeding", Case("lstm", None, "tanh", terms=STACKED), beam=2, n_best=2)
    args = args._replace(limits=torch.full((3,), 5), bias_vocab=torch.zeros(50))
    args.bias_vocab[3] = -1e9  # all go on to their limits: every column counts
    torch.library.opcheck(SEARCH.forwards[backend], tuple(on_device(backend, args)))


def test_invalid_calls(backend):
    """What the operator's check refuses the compiled operator refuses, and nothing else."""
    served(backend)
    draw, counts = random.Random(0), [0, 0]
    calls = 400 if backend == "cpu" else 60
    for seed in range(calls):
        kind = draw.choice(KINDS)
        terms = tuple(x for x in STACKED if draw.random() < 0.6)
        args = call(kind, Case(draw.choice(("gru", "lstm")), None, "tanh", terms=terms, seed=seed))
        if seed % 4 == 0:
            args = as_bfloat16(args, WEIGHTS)
        field = draw.choice([n for n, x in args._asdict().items() if isinstance(x, Tensor)])
        x = getattr(args, field)
        how = draw.choice(("nothing", "rank", "size", "dtype", "none", "word"))
        if how == "rank":
            x = x.unsqueeze(draw.randint(0, x.dim())) if draw.random() < 0.5 else x.flatten()
        if how == "size":
            axis, grown = draw.randrange(x.dim()), list(x.shape)
            grown[axis] = draw.choice((0, 1, grown[axis] + 1, 30))
            x = torch.zeros(grown, dtype=x.dtype)
        if how == "dtype":
            x = x.to(draw.choice((torch.float64, torch.int64, torch.bfloat16, torch.bool)))
        if how == "none":
            x = None
        if how == "word":
            fields = ("begin", "end", "most", "beam", "n_best")
            field, x = draw.choice(fields), draw.choice((-1, 50, 49, 0, 65))
            x = x if field != "most" or x < 0 else (5 if x else 2**40)
        args = args._replace(**{field: x})
        overload = SEARCH.forwards[backend]
        spoken = [refusal(CHECKS["search"], args), refusal(overload, on_device(backend, args))]
        assert (spoken[0] is None) == (spoken[1] is None), f"{kind}: {how} of {field}: {spoken}"
        counts[spoken[0] is None] += 1
    assert min(counts) > calls / 8


def test_8_bits_are_for_cpus():
    served("triton")
    with pytest.raises(ValueError, match="int8 must be False: products in 8 bits are for CPUs"):
        SEARCH("triton", call(KINDS[0], Case("gru", None), int8=True))


def test_options_of_products_are_checked(backend):
    exact(backend)
    short = call(KINDS[0], Case("gru", None))._replace(packed=torch.zeros(64, dtype=torch.uint8))
    assert "packed" in str(refusal(SEARCH.forwards[backend], short))
    for args, word in (
        (short._replace(packed=torch.zeros(64)), "packed"),
        (call(KINDS[0], Case("gru", None, dtype=torch.float64), int8=True), "int8"),
        (call(KINDS[0], Case("gru", None), V=5, R=2**16 + 1, int8=True), "int8"),
    ):
        for function in (CHECKS["search"], SEARCH.forwards[backend]):
            assert word in str(refusal(function, args))


# ---- models -------------------------------------------------------------------------------------

MODELS = [
    ("bahdanau", "attend_first"), ("dot", "independent"), ("general", "input_feeding"),
    ("concat", "input_feeding"), ("scaled_dot", "attend_last"), ("local", "independent"),
    ("local", "input_feeding"), ("coverage", "attend_first"), ("location", "independent"),
    ("forward", "attend_last"),
]  # fmt: skip


def model_and_sources(attention: str, recurrence="attend_first", backend=None, **config):
    torch.manual_seed(0)
    sizes = {"embed_dim": 12, "hidden_dim": 10, "window": 2}
    if recurrence in ("input_feeding", "independent"):
        config = {"readout": "attentional", **config}
    made = build(Config(60, attention, recurrence, **sizes, **config), backend).double().eval()
    with torch.no_grad():
        for x in made.parameters():
            x.mul_(2)  # so that words depend on the source
    lengths = torch.randint(1, 9, (20,))
    return made, torch.randint(EOS, 60, (20, 8)), lengths


def spied(monkeypatch) -> list[SearchInputs]:
    """Return the list of calls of the operator that are made."""
    calls, run = [], dispatch.run

    def spy(operator, call, backend):
        if operator is SEARCH:
            calls.append(call)
        return run(operator, call, backend)

    monkeypatch.setattr(dispatch, "run", spy)
    return calls


@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize(("attention", "recurrence"), MODELS)
@pytest.mark.parametrize("beam", BEAMS)
def test_models_search_in_one_call(attention, recurrence, cell, beam, monkeypatch):
    served("cpu")
    layers = 2 if beam == "of five" else 1
    parts = model_and_sources(attention, recurrence, cell=cell, decoder_layers=layers)
    calls, find = spied(monkeypatch), partial(beam_search, **{"beam": 1, **BEAMS[beam]})
    found = find(*parts)
    assert len(calls) == 1
    with torch.no_grad():
        parts[0].bias[EOS] = -math.inf  # no sentence can end
    endless = find(*parts)
    assert len(calls) == 2 and not endless.finished.any()
    monkeypatch.setattr(search, "_run_operator", lambda *_, **__: None)
    torch.testing.assert_close(endless, find(*parts))
    with torch.no_grad():
        parts[0].bias[EOS] = 0
    torch.testing.assert_close(found, find(*parts))
    words = {tuple(words) for several in found.hypotheses() for words in several}
    assert len(words) > 8 and len({len(x) for x in words}) > 2


def judge_model(seed: int) -> None:
    """Compare a random model's search in one call with the loop over steps, in float64."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    attention, recurrence = draw.choice(MODELS)
    sizes = {name: draw.choice((1, 4, 9, 16, 33, 40)) for name in ("embed_dim", "hidden_dim")}
    V, cell = draw.choice((5, 9, 60, 130, 700)), draw.choice(("rnn", "gru", "lstm"))
    sizes["readout"] = draw.choice(READOUTS)
    sizes |= {"window": draw.randint(1, 3), "decoder_layers": draw.choice((1, 1, 2, 3))}
    sizes["pointer_generator"] = copies = draw.random() < 0.3
    sizes["copy_gate"] = draw.choice(COPY_GATES) if copies else "state"
    made = build(Config(V, attention, recurrence, cell=cell, **sizes))
    made.double().eval()
    with torch.no_grad():
        for x in made.parameters():
            x.mul_(draw.choice((1, 2, 4)))
    B, Tk, beam = draw.randint(1, 6), draw.randint(1, 9), draw.choice((1, 2, 3, 5, 8, 40))
    source = torch.randint(4, V + 3 * copies, (B, Tk))
    lengths = torch.randint(1, Tk + 1, (B,))
    options: dict = {"max_length": draw.choice((None, 3, 7)), "min_length": draw.choice((0, 0, 2))}
    if draw.random() < 0.3:
        options["no_repeat_ngram"] = draw.randint(1, 3)
    if draw.random() < 0.3:
        options["word_mask"] = torch.rand(*draw.choice(((V,), (B, V)))) < 0.8
    if draw.random() < 0.3:
        options["forbidden"] = [0] + draw.sample([1, 2, *range(4, V)], draw.randint(0, 3))
    excluded = {EOS, *options.get("forbidden", (0, 1, 2))}
    words = [x for x in range(int(source.max()) + 1) if x not in excluded]
    if words and draw.random() < 0.3:
        options["prefix"] = [draw.choices(words, k=draw.randint(0, 3)) for _ in range(B)]
    options["need_weights"] = draw.random() < 0.3
    samples = draw.random() < 0.3
    if samples:
        generator = torch.Generator()
        options |= {
            "samples": beam, "temperature": draw.choice((0.3, 1.0, 2.0)), "generator": generator,
            "top_k": draw.choice((0, 0, 3, 900)), "top_p": draw.choice((1.0, 1.0, 0.5)),
        }  # fmt: skip
    else:
        options |= {
            "beam": beam, "n_best": draw.randint(1, beam),
            "length_penalty": draw.choice((0.0, 0.6, 1.0, -0.5)),
            "length_bonus": draw.choice((0.0, 0.5, -0.3)),
            "coverage_penalty": draw.choice((0.0, 0.0, 0.4)),
        }  # fmt: skip
    found = []
    for run in (search._run_operator, lambda *_, **__: None):
        if samples:
            generator.manual_seed(seed)
        with mock.patch.object(search, "_run_operator", run):
            found.append((sample if samples else beam_search)(made, source, lengths, **options))
    torch.testing.assert_close(*(x.scores for x in found), msg=f"scores of seed {seed}")
    for i, one in enumerate(zip(*(x.hypotheses() for x in found))):
        scores = found[0].scores[i]
        tied = not samples and (scores.diff().abs() < 1e-9 * scores[:-1].abs()).any()
        assert tied or one[0] == one[1], f"sentence {i} of seed {seed}"
        if options["need_weights"] and not tied:
            weights = [x.weights[i] for x in found]
            torch.testing.assert_close(*weights, msg=f"weights of sentence {i} of seed {seed}")


@pytest.mark.parametrize("first", [0, 100])
def test_fuzz_of_models(first):
    served("cpu")
    for seed in range(first, first + 25):
        judge_model(seed)


def test_other_models_search_step_by_step(monkeypatch):
    served("cpu")
    calls = spied(monkeypatch)
    for attention in ("none", "strided"):
        greedy_search(*model_and_sources(attention))
    made, *sources = model_and_sources("bahdanau", pointer_generator=True)
    made.pointer.backend = "reference"
    greedy_search(made, *sources)
    made.pointer.backend, made.pointer.forward = None, made.pointer.forward
    greedy_search(made, *sources)
    greedy_search(*model_and_sources("bahdanau", backend="reference"))
    made, *sources = model_and_sources("bahdanau")
    greedy_search(made.train(), *sources)
    greedy_search(made.eval(), *sources, forbidden=(1, 2))
    made.embedding.max_norm = 1.0
    greedy_search(made, *sources)
    made.embedding.max_norm = None
    made.dropout.train()
    greedy_search(made, *sources)
    made.eval().embed = lambda words: type(made).embed(made, words)
    greedy_search(made, *sources)
    del made.embed
    seen = []
    made.eval().embedding.register_forward_hook(lambda *_: seen.append(1))
    greedy_search(made, *sources)
    assert not calls
    assert len(seen) > 2


def test_packed_parameters_are_shared_in_a_block_until_they_change(monkeypatch):
    served("cpu")
    made, *sources = model_and_sources("bahdanau")
    made.float()
    calls = spied(monkeypatch)
    first = beam_search(made, *sources)
    assert calls[-1].packed is None
    with search.sharing_packed_parameters(made), search.sharing_packed_parameters(made):
        beam_search(made, *sources)
        for options, same in (
            ({}, True),
            ({"int8": True}, False),
            ({"int8": True}, True),
            ({}, False),
        ):
            again = beam_search(made, *sources, **options)
            assert (calls[-1].packed is calls[-2].packed) is same
            if not options:
                torch.testing.assert_close(again, first)
        with torch.no_grad():
            made.embedding.weight.mul_(-1)
        changed = beam_search(made, *sources)
        assert calls[-1].packed is not calls[-2].packed
        assert not changed.scores.equal(first.scores)
        kept = made.decoder.readout.weight.data.clone()
        for x in (kept + 1, kept):  # another tensor, then one of the old values
            made.decoder.readout.weight.data = x
            found = beam_search(made, *sources)
        torch.testing.assert_close(changed, found)
    made.embedding.weight.data.mul_(-1)  # which no version shows
    torch.testing.assert_close(beam_search(made, *sources), first)


def test_a_fused_optimizer_changes_the_next_search():
    """It changes parameters, but not their versions."""
    made, *sources = model_and_sources("bahdanau")
    optimizer = torch.optim.AdamW(made.float().parameters(), lr=0.5, fused=True)
    for _ in range(2):
        found = beam_search(made, *sources)
        with mock.patch.object(search, "_run_operator", return_value=None):
            torch.testing.assert_close(found.scores, beam_search(made, *sources).scores)
        for x in made.parameters():
            x.grad = torch.randn_like(x)
        optimizer.step()


def test_int8_needs_the_operator():
    made, *sources = model_and_sources("bahdanau")
    with pytest.raises(InputError, match="int8 needs a search in one operator, but the model is"):
        beam_search(made, *sources, int8=True)
    scorer = mock.Mock()
    with pytest.raises(InputError, match="but a scorer judges hypotheses"):
        beam_search(made.float(), *sources, int8=True, scorer=scorer)
    made, *sources = model_and_sources("bahdanau", pointer_generator=True)
    sources[0][0, 0] = 61  # a word that only sources have, as the start then
    with pytest.raises(InputError, match="but the start, 60, is not in the vocabulary of 60 words"):
        greedy_search(made.float(), *sources, int8=True, start=60)


@pytest.mark.parametrize("kind", ["bahdanau", "dot", "location"])
def test_a_speech_model_searches_in_one_call(kind, monkeypatch):
    served("cpu")
    torch.manual_seed(1)
    attention = {
        "bahdanau": lambda: attnfast.nn.BahdanauAttention(6, 8, 4),
        "dot": lambda: attnfast.nn.LuongAttention(6, 8, "general"),
        "location": lambda: attnfast.nn.LocationAwareAttention(6, 8, 4, num_filters=3, width=5),
    }[kind]()
    made = ListenAttendSpell(PyramidEncoder(5, 4, layers=1), attention, 20, 6, 3).double().eval()
    with torch.no_grad():
        for x in made.parameters():
            x.mul_(3)
    sources = torch.randn(7, 20, 5, dtype=torch.float64), torch.randint(2, 21, (7,))
    calls = spied(monkeypatch)
    one = beam_search(made, *sources, 4, n_best=3, need_weights=True)
    drawn = sample(made, *sources, 2, generator=torch.Generator().manual_seed(1))
    assert len(calls) == 2
    monkeypatch.setattr(search, "_run_operator", lambda *_, **__: None)
    torch.testing.assert_close(one, beam_search(made, *sources, 4, n_best=3, need_weights=True))
    generator = torch.Generator().manual_seed(1)
    torch.testing.assert_close(drawn, sample(made, *sources, 2, generator=generator))
    assert len({len(words) for several in drawn.hypotheses() for words in several}) > 2


def test_half_types_are_searched_in_float32(monkeypatch):
    served("cpu")
    made, *sources = model_and_sources("bahdanau")
    calls = spied(monkeypatch)
    found = greedy_search(made.bfloat16(), *sources).best
    assert [x.embedding.dtype for x in calls] == [torch.float32]
    wanted = greedy_search(made.double(), *sources).best  # the same parameters
    assert sum(a[:3] == b[:3] for a, b in zip(found, wanted)) > len(found) / 2


@pytest.mark.parametrize("autocasts", [False, True])
def test_weights_stay_bfloat16_where_a_backend_takes_them(autocasts):
    args = layer_call(Case("gru", "input_feeding", "tanh", terms=TERMS))
    if not autocasts:
        args = as_bfloat16(args, args._fields)
    for backend, dtype in (("cpu", torch.bfloat16), ("triton", torch.float32)):
        wide = upcast_halves(args, backend, autocasts)
        found = {n: x.dtype for n, x in wide._asdict().items() if isinstance(x, Tensor)}
        weights = {x for n, x in found.items() if n in WEIGHTS}
        others = {x for n, x in found.items() if n not in WEIGHTS and x.is_floating_point}
        assert weights == {dtype} and others == {torch.float32}


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("attention", ["general", "coverage"])
def test_a_beam_of_one_is_greedy_in_half_types_too(attention, dtype):
    """Where many scores of single steps are equal, of which a beam takes any."""
    made, *sources = model_and_sources(attention)
    assert beam_search(made.to(dtype), *sources, 1).best == greedy_search(made, *sources).best


def test_no_sentences_to_copy_from():
    made, source, lengths = model_and_sources("bahdanau", pointer_generator=True)
    assert beam_search(made, source[:0], lengths[:0]).sequences.shape == (0, 1, 0)


def test_options_are_left_as_they_are():
    made, source, lengths = model_and_sources("bahdanau")
    mask = torch.ones(60, dtype=torch.bool)
    greedy_search(made, source, lengths, word_mask=mask)
    assert mask.all()


def test_a_prefix_may_be_longer_than_the_usual_limit():
    made, source, lengths = model_and_sources("bahdanau")
    prefix = [[4] * 60, *[[5]] * 19]
    found = greedy_search(made, source, lengths, prefix=prefix)
    assert found.best[0] == prefix[0] and found.finished.all()


def test_a_damaged_model_is_refused():
    made, *sources = model_and_sources("bahdanau")
    with torch.no_grad():
        made.decoder.readout.weight[0, 0] = math.nan
    with pytest.raises(InputError, match="NaN"):
        greedy_search(made, *sources)


def test_a_part_that_does_not_fit_is_named():
    made, *sources = model_and_sources("bahdanau")
    made.decoder.readout = torch.nn.Linear(12, 11).double()
    with pytest.raises((ValueError, RuntimeError), match=r"readout|shapes"):
        greedy_search(made, *sources)


def test_begins_and_ends_as_models_do(monkeypatch):
    served("cpu")
    calls = spied(monkeypatch)
    made, source, lengths = model_and_sources("general", "input_feeding")
    greedy_search(made, source, lengths)
    assert (calls[0].begin, calls[0].end) == (BOS, EOS)
    assert calls[0].limits.tolist() == output_limit(lengths).tolist()
    assert greedy_search(made, source[:0], lengths[:0]).best == []
    found = greedy_search(made, source.int(), lengths.int()).best
    assert found == greedy_search(made, source, lengths).best
    assert len(calls) == 4
