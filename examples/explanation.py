"""Test whether attention explains decisions of a classifier of film reviews and a translator.

    python examples/explanation.py FOLDER --out runs/explanation

FOLDER holds pos.txt.gz and neg.txt.gz, the sentence polarity data of Pang and Lee (ACL 2005); every
tenth sentence is held out for the test. Classifiers that pool the states of a GRU by additive
attention, by their mean and by their maximum are trained on it, and translators with Bahdanau's
attention on the demo's grammar, with three seeds each. After Ctrl-C the same command continues. The
tables:

    accuracy     of each pooling
    τ            Kendall's, for each prediction, between attention and two measures of importance
    permuted     change of the output if the weights are shuffled
    adversarial  divergence of weights that hardly change the output; for comparison, of another
                 seed's attention and of models trained to have different attention
    erasure      share of the keys to erase before the decision changes, by ranking
    linked       share of target words for which the largest value is at a source word that they
                 translate

Numbers are means over the seeds, with minimum and maximum in brackets.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from attnfast._utils.checks import InputError, optional
from attnfast._utils.progress import Progress, log
from attnfast._utils.signals import Interrupted
from attnfast.analysis import faithfulness
from attnfast.analysis.faithfulness import jensen_shannon, total_variation
from attnfast.models import POOLINGS, Classifier, Config, Encoder, build
from attnfast.translate import checkpoint
from attnfast.translate.cli import Parser, run
from attnfast.translate.data import (
    Example,
    WordTokenizer,
    batches,
    collate,
    encode_pairs,
    pad,
    read_lines,
)
from attnfast.translate.toy_grammar import aligned_corpus
from attnfast.translate.trainer import Options, Trainer

SEEDS = 1, 2, 3
EPOCHS = {"classifier": 4, "translator": 10}
EPSILONS = 0.01, 0.05
#: Weights of the divergence in the loss of a model trained to give the same decisions as another.
ELSEWHERE = 0.0, 1.0
#: One in EVERY words of a target is evaluated.
EVERY = 4
PAIRS = {
    "attention, gradient × input": ("attention", "gradient × input"),
    "attention, gradient × input with the weights held": ("attention", "held"),
    "attention, leave-one-out": ("attention", "leave-one-out"),
    "gradient × input, leave-one-out": ("gradient × input", "leave-one-out"),
}
RANKINGS = "attention", "gradient", "gradient × attention", "random"
#: Bounds of the classes of a row's largest weight.
LARGEST = 0.0, 0.1, 0.2, 0.5, 1.0


class Predictions(NamedTuple):
    """A batch of predictions; ``linked [B, n]`` marks the translated source words, if known."""

    reader: faithfulness.Reader
    embedded: Tensor
    lengths: Tensor
    linked: Tensor | None


class Found(NamedTuple):
    """Measures of all predictions by name, ``[N]``; their weights and outputs by batch."""

    numbers: dict[str, Tensor]
    weights: list[Tensor]
    outputs: list[Tensor]


# ---- the classifier -----------------------------------------------------------------------------


def read(folder: Path) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Return sentences and classes of the training set and of the test set."""
    parts: tuple[list, list] = [], []
    for label, name in enumerate(("neg", "pos")):
        lines = [x for x in read_lines(folder / f"{name}.txt.gz") if x]
        if len(lines) < 10:
            raise InputError(f"{folder}/{name}.txt.gz: expected ten sentences, got {len(lines)}")
        for i, line in enumerate(lines):
            parts[i % 10 == 9].append((line, label))
    return parts


def collate_reviews(examples: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor]:
    """Return words ``[B, n]``, lengths and classes."""
    words = pad([x.source for x in examples])
    lengths = torch.tensor([len(x.source) for x in examples])
    return words, lengths, torch.tensor([x.target[0] for x in examples])


class Reviews:
    """The reviews as word ids, and the training of classifiers."""

    def __init__(self, args: argparse.Namespace):
        train, test = read(args.data)
        self.args = args
        self.tokenizer = WordTokenizer.train((text for text, _ in train), 10000)
        self.train, self.test = (
            [Example(self.tokenizer.encode(text), [label]) for text, label in part]
            for part in (train, test)
        )
        self.groups = [
            collate_reviews(sorted(self.test, key=lambda x: len(x.source))[i : i + 64])
            for i in range(0, len(self.test), 64)
        ]

    def learn(
        self, seed: int, pooling: str, base: Classifier | None = None, elsewhere: float = 0.0
    ) -> Classifier:
        """Train a classifier, or load the saved one.

        With a ``base`` it is trained to give the same decisions with different attention: its loss
        is the total variation of the output minus ``elsewhere`` times the divergence of the
        weights.
        """
        name = pooling if base is None else f"like attention, elsewhere {elsewhere:g}"
        path = self.args.out / f"classifier-{name.replace(', ', '-').replace(' ', '-')}-{seed}.pt"
        options = Options(EPOCHS["classifier"], 50, 2e-3, seed=seed)
        like = {"dim": self.args.dim, "epochs": options.epochs, "sentences": len(self.train)}
        torch.manual_seed(seed)
        dim, size = self.args.dim, self.tokenizer.vocab_size
        model = Classifier(Encoder(dim, dim), size, dim, 2, pooling, dropout=0.5)
        if path.exists():
            kept = checkpoint.load(path)
            if kept.get("like") != like:
                raise InputError(f"{path}: expected a model of {like}, got {kept.get('like')}")
            model.load_state_dict(kept["model"])
            return model.eval()
        with torch.no_grad():
            model.embedding.weight.mul_(0.1)
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=1e-4, fused=True)
        steps, step = options.epochs * -(-len(self.train) // options.batch_size), 0
        with Progress(f"classifier, {name}, seed {seed}", steps, "step") as progress:
            for epoch in range(options.epochs):
                for group in batches(self.train, options.batch_size, seed, epoch):
                    optimizer.param_groups[0]["lr"] = options.rate(step, steps)
                    optimizer.zero_grad(set_to_none=True)
                    loss = self._loss(model, group, base, elsewhere)
                    loss.backward()
                    nn.utils.clip_grad_norm_(model.parameters(), options.clip)
                    optimizer.step()
                    step += 1
                    progress(1, f"loss {loss.item():.3f}")
        kept = {"format": checkpoint.FORMAT, "like": like, "model": model.state_dict()}
        checkpoint.write(path, kept)
        return model.eval()

    def _loss(self, model, group, base: Classifier | None, elsewhere: float) -> Tensor:
        words, lengths, labels = collate_reviews(group)
        if base is None:
            return nn.functional.cross_entropy(model(words, lengths), labels)
        logits, weights = model.read(model.embed(words), lengths)()
        with torch.no_grad():
            expected, others = base.read(base.embed(words), lengths)()
        distance = total_variation(logits.softmax(-1), expected.softmax(-1))
        return (distance - elsewhere * jensen_shannon(weights, others)).mean()

    @torch.no_grad()
    def accuracy(self, model: Classifier) -> float:
        right = sum(
            int((model(words, n).argmax(-1) == labels).sum()) for words, n, labels in self.groups
        )
        return 100 * right / len(self.test)

    def predictions(self, model: Classifier) -> Iterator[Predictions]:
        for words, lengths, _ in self.groups:
            yield Predictions(model.read, model.embed(words).detach(), lengths, None)


# ---- the translator -----------------------------------------------------------------------------


class Grammar:
    """Sentences of the demo's grammar, and the training of translators."""

    def __init__(self, args: argparse.Namespace):
        drawn = aligned_corpus(1, args.pairs + 2 * args.test)
        self.args = args
        self.train, self.valid = drawn[: args.pairs], drawn[args.pairs : -args.test]
        self.test = drawn[-args.test :]
        self.tokenizer = WordTokenizer.train(text for x in self.train for text in x.pair)

    def learn(self, seed: int):
        """Train a translator, or continue its training."""
        directory = self.args.out / f"translator-{seed}"
        checkpoint.make_folder(directory)
        options = Options(EPOCHS["translator"], 32, 3e-3, seed=seed)
        dim, last = self.args.dim, directory / "last.pt"
        config = Config(self.tokenizer.vocab_size, embed_dim=dim, hidden_dim=dim)
        torch.manual_seed(seed)
        if resumed := last.exists():
            state = checkpoint.load(last)
            model = checkpoint.restore(state, name=last)[1]
        else:
            model = build(config)
        pairs = [[x.pair for x in part] for part in (self.train, self.valid)]
        examples = [encode_pairs(self.tokenizer, part, 1000)[0] for part in pairs]
        trainer = Trainer(config, model, self.tokenizer, options, *examples, pairs[1], directory)
        if resumed:
            trainer.resume(state, str(last))
        trainer.run()
        return model.eval()

    def predictions(self, model) -> Iterator[Predictions]:
        """Yield batches of words with the same index, so that all have as many previous words."""
        examples, _ = encode_pairs(self.tokenizer, [x.pair for x in self.test], 1000)
        longest = max(len(x.target) for x in examples)
        for i in range(longest):
            some = [
                (x, drawn.links)
                for k, (x, drawn) in enumerate(zip(examples, self.test))
                if i < len(x.target) and (i + k) % EVERY == 0
            ]
            if not some:
                continue
            batch = collate([x for x, _ in some])
            linked = torch.zeros(batch.source.shape, dtype=torch.bool)
            for row, (_, links) in zip(linked, some):
                row[[s for s, t in links if t == i]] = True
            reader = faithfulness.next_word(model, batch.target_in[:, : i + 1])
            yield Predictions(reader, model.embed(batch.source).detach(), batch.lengths, linked)


# ---- the study ----------------------------------------------------------------------------------


def study(name: str, groups: Sequence[Predictions], seed: int) -> Found:
    """Return the measures of all predictions."""
    rows: list[dict[str, Tensor]] = []
    all_weights, outputs = [], []
    with Progress(name, len(groups), "batch") as progress:
        for reader, x, lengths, linked in groups:
            call = reader, x, lengths
            with torch.no_grad():
                logits, weights = reader(x, lengths)()
            ways = {
                "attention": weights,
                "gradient × input": faithfulness.gradient_times_input(*call),
                "held": faithfulness.gradient_times_input(*call, fixed=True),
                "leave-one-out": faithfulness.leave_one_out(*call),
            }
            row = {
                pair: faithfulness.kendall_tau(ways[a], ways[b], lengths)
                for pair, (a, b) in PAIRS.items()
            }
            found = faithfulness.permutation_test(*call, seed=seed)
            row |= {"permuted": found.distance, "largest": found.largest}
            for epsilon in EPSILONS:
                other = faithfulness.adversarial(*call, epsilon=epsilon, seed=seed)
                row[f"ε = {epsilon:g}"] = other.divergence
                row["bound"] = other.bound
            gradient = faithfulness.weight_gradient(*call)
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.rand(weights.shape, generator=generator)
            for ranking, by in zip(RANKINGS, (weights, gradient, gradient * weights, drawn)):
                row[f"erased by {ranking}"] = faithfulness.erasure(*call, by)
            if linked is not None:
                for way, numbers in ways.items():
                    hit = linked.gather(1, numbers.argmax(1, keepdim=True)).squeeze(1).float()
                    row[f"linked by {way}"] = hit.masked_fill(~linked.any(1), torch.nan)
            rows.append(row)
            all_weights.append(weights)
            outputs.append(logits.softmax(-1))
            progress()
    numbers = {key: torch.cat([row[key] for row in rows]) for key in rows[0]}
    return Found(numbers, all_weights, outputs)


def compare_models(a: Found, b: Found) -> tuple[Tensor, Tensor]:
    """Return the divergence of two models' weights and the distance of their outputs."""
    return (
        torch.cat([jensen_shannon(x, y) for x, y in zip(a.weights, b.weights)]),
        torch.cat([total_variation(x, y) for x, y in zip(a.outputs, b.outputs)]),
    )


def predict(groups: Sequence[Predictions]) -> Found:
    """Return the weights and outputs of all predictions, without measures."""
    with torch.no_grad():
        pairs = [reader(x, lengths)() for reader, x, lengths, _ in groups]
    return Found({}, [w for _, w in pairs], [logits.softmax(-1) for logits, _ in pairs])


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Return the mean over seeds, with minimum and maximum."""
    if any(x != x for x in values):
        return "–"
    mean = sum(values) / len(values)
    return f"{mean:{form}} ({min(values):{form}}–{max(values):{form}})"


def median(x: Tensor) -> float:
    return float(x.nanquantile(0.5))


def table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print(f"\n{title}\n\n| {' | '.join(heads)} |\n|---|{'--:|' * (len(heads) - 1)}")
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


def ranks(name: str, models: Sequence[dict[str, Tensor]]) -> Iterator[list[str]]:
    """Yield the rows of τ."""
    for pair in PAIRS:
        values = [x[pair] for x in models]
        quartiles = [spread([float(x.nanquantile(q)) for x in values]) for q in (0.25, 0.75)]
        yield [name, pair, spread([float(x.nanmean()) for x in values]), *quartiles]


def shuffled(name: str, models: Sequence[dict[str, Tensor]]) -> Iterator[list[str]]:
    """Yield the rows of permuted weights; a median is over at least ten predictions."""
    for low, high in pairwise(LARGEST):
        inside = [(low < x["largest"]) & (x["largest"] <= high) for x in models]
        moved = [x["permuted"][some] for x, some in zip(models, inside)]
        shares = spread([100 * float(some.float().mean()) for some in inside], ".0f")
        medians = [median(x) if len(x) >= 10 else math.nan for x in moved]
        yield [name, f"{low:g}–{high:g}", shares, spread(medians, ".3f")]


def different(
    name: str, models: Sequence[dict[str, Tensor]], others: dict[str, list[tuple[Tensor, Tensor]]]
) -> Iterator[list[str]]:
    """Yield the rows of different weights: adversarial ones, the bound, those of other models."""
    for epsilon in EPSILONS:
        found = [x[f"ε = {epsilon:g}"] for x in models]
        shares = [median(x / y["bound"]) for x, y in zip(found, models)]
        columns = spread([median(x) for x in found]), spread(shares), f"at most {epsilon:g}"
        yield [name, "found", *columns]
    yield [name, "all on the smallest", spread([median(x["bound"]) for x in models]), "1", "–"]
    for what, pairs in others.items():
        columns = spread([median(x) for x, _ in pairs]), "–", spread([median(y) for _, y in pairs])
        yield [name, what, *columns]


def erased(name: str, models: Sequence[dict[str, Tensor]]) -> Iterator[list[str]]:
    """Yield the rows of erasure."""
    for ranking in RANKINGS:
        shares = [x[f"erased by {ranking}"] for x in models]
        changed = spread([100 * float((x < 1).float().mean()) for x in shares], ".0f")
        yield [name, ranking, changed, spread([float(x.mean()) for x in shares])]


def report(
    found: dict[str, list[Found]], others: dict[str, dict[str, list[tuple[Tensor, Tensor]]]]
) -> None:
    """Print the tables; ``others`` has, by model, the distances of other models."""
    numbers = {name: [x.numbers for x in models] for name, models in found.items()}

    def rows(function: Callable[..., Iterator[list[str]]]) -> list[list[str]]:
        return [row for call in numbers.items() for row in function(*call)]

    heads = ["model", "between", "mean", "first quartile", "third quartile"]
    table("τ", heads, rows(ranks))
    heads = ["model", "largest weight", "% of predictions", "median TVD"]
    table("permuted", heads, rows(shuffled))
    heads = ["model", "weights", "median JSD", "of the most that can be", "median TVD"]
    table("adversarial", heads, rows(lambda name, x: different(name, x, others[name])))
    heads = ["model", "ranking", "% that change", "mean share erased"]
    table("erasure", heads, rows(erased))
    lines = []
    for way in ("attention", "gradient × input", "leave-one-out"):
        hits = [100 * float(x[f"linked by {way}"].nanmean()) for x in numbers["translator"]]
        lines.append([way, spread(hits, ".1f")])
    table("linked", ["largest of", "% at a word that is translated"], lines)


def compare(args: argparse.Namespace) -> None:
    """Train all models, study those with attention, and print the tables."""
    optional("sacrebleu", "this example")
    checkpoint.make_folder(args.out)
    try:
        _compare(args)
    except Interrupted as stop:
        text = "the same command continues from there"
        raise Interrupted(stop.number, f"{stop}; {text}" if str(stop) else text) from None


def _compare(args: argparse.Namespace) -> None:
    reviews, grammar = Reviews(args), Grammar(args)
    accuracies: dict[str, list[float]] = {pooling: [] for pooling in POOLINGS}
    found: dict[str, list[Found]] = {"classifier": [], "translator": []}
    others: dict[str, dict[str, list[tuple[Tensor, Tensor]]]] = {name: {} for name in found}
    for seed in SEEDS:
        for pooling in POOLINGS:
            model = reviews.learn(seed, pooling)
            accuracies[pooling].append(reviews.accuracy(model))
            if pooling != "attention":
                continue
            groups = list(reviews.predictions(model))
            found["classifier"].append(study(f"classifier, seed {seed}", groups, seed))
            for elsewhere in ELSEWHERE:
                copy = reviews.learn(seed, pooling, model, elsewhere)
                name = "trained to decide alike" + ", and to look elsewhere" * bool(elsewhere)
                accuracies.setdefault(f"attention, {name}", []).append(reviews.accuracy(copy))
                far = compare_models(
                    found["classifier"][-1], predict(list(reviews.predictions(copy)))
                )
                others["classifier"].setdefault(name, []).append(far)
        log(f"translator, seed {seed}")
        groups = list(grammar.predictions(grammar.learn(seed)))
        found["translator"].append(study(f"translator, seed {seed}", groups, seed))
    for name, models in found.items():
        others[name]["of another seed"] = [
            compare_models(*pair) for pair in combinations(models, 2)
        ]
    rows = [[pooling, spread(values, ".1f")] for pooling, values in accuracies.items()]
    table("accuracy", ["pooling", "accuracy"], rows)
    report(found, others)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path, help="folder of pos.txt.gz and neg.txt.gz")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/explanation"), help="folder of checkpoints"
    )
    parser.add_argument("--pairs", type=int, default=3000, help="training pairs of the translators")
    parser.add_argument("--test", type=int, default=300, help="test pairs of the translators")
    parser.add_argument("--dim", type=int, default=64, help="features of words and states")
    parser.set_defaults(function=compare)
    return run(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
