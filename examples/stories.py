"""Memory networks: questions about short stories, answered in one, two or three hops.

    python examples/stories.py --out runs/stories

A generator makes stories in the style of the bAbI tasks (Weston et al., 2015):

    one fact     where is mary
    two facts    where is the apple: who took it, and where they went
    three facts  where was the apple before the kitchen
    counting     how many things is john carrying
    deduction    what is gertrude afraid of: a sheep, and what sheep are afraid of
    paths        how do you go from the kitchen to the garden, in two steps

For each task, memory networks of 1, 2 and 3 hops and an LSTM that reads the story and the question
are trained separately. The tables have the share of wrong answers and, for memory networks, the
share of the weights on the sentences from which the answer follows. After Ctrl-C the same command
resumes the training, bit for bit. The tables, and a picture of the hops for a story, are written to
--out.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from _experiment import Trial, at_least, by_name, learn_all, make_parser, spread
from torch import Tensor, nn
from torch.nn import functional as F

from attnfast._utils.checks import InputError, optional
from attnfast.analysis.plots import draw_hops
from attnfast.models import PAD, MemoryNetwork
from attnfast.translate.cli import run
from attnfast.translate.data import pad
from attnfast.translate.trainer import Options

PEOPLE = "daniel", "john", "mary", "sandra"
PLACES = "bathroom", "bedroom", "garden", "hallway", "kitchen", "office"
THINGS = "apple", "football", "milk"
NUMBERS = "none", "one", "two", "three"
ANIMALS = {"cat": "cats", "mouse": "mice", "sheep": "sheep", "wolf": "wolves"}
NAMES = "emily", "gertrude", "jessica", "winona"
WAYS = {"north": (0, 1), "south": (0, -1), "east": (1, 0), "west": (-1, 0)}
OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}
LONGEST = 20  # sentences of a story


# ---- stories ------------------------------------------------------------------------------------


class Story(NamedTuple):
    """Sentences, a question, its answer in one word, and the sentences that it follows from."""

    sentences: list[str]
    question: str
    answer: str
    facts: list[int]


class Event(NamedTuple):
    """A person goes to a place, takes a thing or drops it, in the sentence ``at``."""

    kind: str
    who: str
    what: str
    at: int


def happen(draw: random.Random, many: int, things: Sequence[str]) -> list[Event]:
    """Return ``many`` random events: people go to places, and take and drop things there."""
    lies = {x: draw.choice(PLACES) for x in things}
    where, holds, events = dict[str, str](), dict[str, str](), list[Event]()
    while len(events) < many:
        who = draw.choice(PEOPLE)
        may = [("goes", x) for x in draw.sample(PLACES, 2) if x != where.get(who)]
        may += [("takes", x) for x in things if x not in holds and lies[x] == where.get(who)] * 4
        may += [("drops", x) for x in things if holds.get(x) == who and draw.random() < 0.5]
        kind, what = draw.choice(may)
        events.append(Event(kind, who, what, len(events)))
        if kind == "goes":
            where[who] = what
            lies.update({x: what for x in things if holds.get(x) == who})
        elif kind == "takes":
            holds[what] = who
        else:
            del holds[what]
    return events


def describe(events: Sequence[Event]) -> list[str]:
    """Return a sentence for each event."""
    forms = {"goes": "{} went to the {}", "takes": "{} took the {}", "drops": "{} dropped the {}"}
    return [forms[x.kind].format(x.who, x.what) for x in events]


def stays(events: Sequence[Event], thing: str) -> list[tuple[str, list[int]]]:
    """Return the successive places of a thing, each with the facts that imply it."""
    place, found, held = dict[str, Event](), list[tuple[str, list[int]]](), None
    for x in events:
        if x.kind == "goes":
            place[x.who] = x
            if held is not None and held.who == x.who:
                found.append((x.what, [held.at, x.at]))
        elif x.what == thing and x.kind == "takes":
            held = x
            if not found:
                found.append((place[x.who].what, [x.at, place[x.who].at]))
        elif x.what == thing:
            place_of = place[x.who]
            found[-1] = (place_of.what, [x.at, place_of.at])
            held = None
    return found


def one_fact(draw: random.Random) -> Story | None:
    events = happen(draw, draw.randint(2, 10), ())
    last = {x.who: x for x in events}
    one = last[draw.choice(sorted(last))]
    return Story(describe(events), f"where is {one.who}", one.what, [one.at])


def two_facts(draw: random.Random) -> Story | None:
    events = happen(draw, draw.randint(4, 16), THINGS)
    taken = sorted({x.what for x in events if x.kind == "takes"})
    if not taken:
        return None
    thing = draw.choice(taken)
    place, facts = stays(events, thing)[-1]
    return Story(describe(events), f"where is the {thing}", place, facts)


def three_facts(draw: random.Random) -> Story | None:
    events = happen(draw, draw.randint(6, LONGEST), THINGS)
    thing = draw.choice(THINGS)
    been = stays(events, thing)
    if len(been) < 2 or been[-1][0] in [place for place, _ in been[:-1]]:
        return None
    (before, facts), (place, more) = been[-2:]
    question = f"where was the {thing} before the {place}"
    return Story(describe(events), question, before, sorted({*facts, *more}))


def counting(draw: random.Random) -> Story | None:
    events = happen(draw, draw.randint(4, 16), THINGS)
    who, held = draw.choice(PEOPLE), set[str]()
    own = [x for x in events if x.who == who and x.kind != "goes"]
    for x in own:
        held ^= {x.what}
    if not held and draw.random() < 0.8:  # else most answers are none
        return None
    question = f"how many things is {who} carrying"
    return Story(describe(events), question, NUMBERS[len(held)], [x.at for x in own])


def deduction(draw: random.Random) -> Story | None:
    kinds = list(ANIMALS)
    feared = {x: draw.choice([y for y in kinds if y != x]) for x in kinds}
    of = {name: draw.choice(kinds) for name in NAMES}
    facts = {x: f"{ANIMALS[x]} are afraid of {ANIMALS[feared[x]]}" for x in kinds}
    facts |= {name: f"{name} is a {kind}" for name, kind in of.items()}
    order = draw.sample(sorted(facts), len(facts))
    name = draw.choice(NAMES)
    support = sorted(order.index(x) for x in (name, of[name]))
    return Story([facts[x] for x in order], f"what is {name} afraid of", feared[of[name]], support)


def paths(draw: random.Random) -> Story | None:
    rooms = draw.sample(PLACES, len(PLACES))
    at, links = {rooms[0]: (0, 0)}, list[tuple[str, str, str]]()
    for room in rooms[1:]:
        near, way = draw.choice(list(at)), draw.choice(list(WAYS))
        x, y = (a + b for a, b in zip(at[near], WAYS[way]))
        if (x, y) in at.values():
            return None
        at[room] = x, y
        links.append((near, way, room))  # from near, that way, there is room
    draw.shuffle(links)
    steps = {(a, b): (way, i) for i, (a, way, b) in enumerate(links)}
    steps |= {(b, a): (OPPOSITE[way], i) for (a, b), (way, i) in list(steps.items())}
    ways = [(p, q) for p in steps for q in steps if p[1] == q[0] and p[0] != q[1]]
    first, second = draw.choice(ways)
    (go, i), (then, j) = steps[first], steps[second]
    sentences = []
    for near, way, room in links:
        turned = draw.random() < 0.5
        a, b = (near, room) if turned else (room, near)
        sentences.append(f"the {a} is {OPPOSITE[way] if turned else way} of the {b}")
    question = f"how do you go from the {first[0]} to the {second[1]}"
    return Story(sentences, question, f"{go}-{then}", [i, j])


TASKS: dict[str, Callable[[random.Random], Story | None]] = {
    "one fact": one_fact,
    "two facts": two_facts,
    "three facts": three_facts,
    "counting": counting,
    "deduction": deduction,
    "paths": paths,
}


def draw_story(task: str, seed: str) -> Story:
    """Return a story, a function of the arguments alone."""
    draw = random.Random(seed)
    while (story := TASKS[task](draw)) is None:
        pass
    return story


def draw_parts(task: str, train: int, test: int) -> dict[str, list[Story]]:
    """Return training stories and test stories, none of which is a training story."""
    parts = {"train": [draw_story(task, f"{task} train {i}") for i in range(train)], "test": []}
    known = {(*x.sentences, x.question) for x in parts["train"]}
    for i in range(test):
        story, again = draw_story(task, f"{task} test {i}"), 0
        while (*story.sentences, story.question) in known:
            again += 1
            story = draw_story(task, f"{task} test {i} {again}")
        parts["test"].append(story)
    return parts


_SAID = (
    "is went to the took dropped where was before how many things carrying are afraid of what a do "
    "you go from"
)
_NAMED = (PEOPLE, PLACES, THINGS, NUMBERS, ANIMALS, ANIMALS.values(), NAMES, WAYS)
#: The vocabulary; ids begin at 1.
WORDS = tuple(sorted({*_SAID.split(), *chain(*_NAMED), *(f"{a}-{b}" for a in WAYS for b in WAYS)}))


def encode(text: str) -> list[int]:
    return [1 + WORDS.index(x) for x in text.split()]


class Batch(NamedTuple):
    """Stories ``[B, S, L]``, questions ``[B, Q]``, answers ``[B]``, facts ``[B, S]``."""

    stories: Tensor
    questions: Tensor
    answers: Tensor
    facts: Tensor

    def at(self, index: Tensor) -> Batch:
        """Return the stories ``index``, without sentences that are padding in all of them."""
        stories, questions, answers, facts = (x[index] for x in self)
        most = int((stories != PAD).any(-1).sum(-1).max())
        return Batch(stories[:, :most], questions, answers, facts[:, :most])


def gather(stories: Sequence[Story]) -> Batch:
    """Return a batch of stories."""
    most = max(len(x.sentences) for x in stories)
    rows = [[*map(encode, x.sentences), *[[]] * (most - len(x.sentences))] for x in stories]
    facts = torch.zeros(len(stories), most, dtype=torch.bool)
    for row, story in zip(facts, stories):
        row[story.facts] = True
    return Batch(
        pad([sentence for row in rows for sentence in row]).view(len(stories), most, -1),
        pad([encode(x.question) for x in stories]),
        torch.tensor([encode(x.answer)[0] for x in stories]),
        facts,
    )


# ---- models -------------------------------------------------------------------------------------


class Reader(nn.Module):
    """The baseline: an LSTM reads the story, then the question, and its last state answers."""

    def __init__(self, vocab_size: int, dim: int):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim, padding_idx=PAD)
        self.lstm = nn.LSTM(dim, 2 * dim, batch_first=True)
        self.output = nn.Linear(2 * dim, vocab_size)

    def forward(self, stories: Tensor, questions: Tensor) -> tuple[Tensor, None]:
        words = torch.cat([stories.flatten(1), questions], 1)
        order = (words == PAD).int().argsort(dim=1, descending=True, stable=True)  # padding first
        longest = int((words != PAD).sum(1).max())
        words = words.gather(1, order)[:, -longest:]
        return self.output(self.lstm(self.embedding(words))[0][:, -1]), None


class Row(NamedTuple):
    """A model of the table; the LSTM has 0 hops."""

    hops: int
    tying: str = "adjacent"


ROWS = {
    "LSTM": Row(0),
    "1 hop": Row(1),
    "2 hops": Row(2),
    "3 hops": Row(3),
    "3 hops, layer-wise": Row(3, "layer-wise"),
}


class Training(Trial):
    """The training of one model for one task; a step's stories depend on seed and step alone."""

    def __init__(self, task: str, name: str, seed: int, parts: dict[str, Batch], args: Any):
        self.task, self.row, self.parts = task, ROWS[name], parts
        self.linear = args.linear_start
        torch.manual_seed(seed)
        vocab = 1 + len(WORDS)
        self.model: Any = Reader(vocab, args.dim)
        if self.row.hops:
            self.model = MemoryNetwork(vocab, args.dim, *self.row, max_sentences=LONGEST)
        names = "dim", "steps", "batch_size", "linear_start", "learning_rate"
        sizes = {x: getattr(args, x) for x in names}
        sizes |= {"stories": len(parts["train"].answers)}
        tested = parts["test"]
        fingerprint = zlib.crc32(tested.stories.numpy().tobytes())
        super().__init__(
            args.out,
            [task, name],
            {"row": self.row._asdict(), **sizes},
            {"test": len(tested.answers), "stories": fingerprint},
            {"model": self.model},
            args.steps,
            Options(batch_size=args.batch_size, learning_rate=args.learning_rate, seed=seed),
        )

    def loss(self, step: int) -> Tensor:
        draw = torch.Generator().manual_seed(1_000_003 * self.options.seed + step)
        count = len(self.parts["train"].answers)
        index = torch.randint(count, (self.options.batch_size,), generator=draw)
        batch = self.parts["train"].at(index)
        if self.row.hops:
            self.model.attention.linear = step < self.linear * self.steps
        return F.cross_entropy(self.model(*batch[:2])[0], batch.answers)

    @torch.no_grad()
    def judge(self) -> dict[str, Any]:
        """Measure the share of wrong answers, and the weight of the facts at every hop."""
        wrong, weight, chance = 0, list[Tensor](), list[Tensor]()
        everything = torch.arange(len(self.parts["test"].answers))
        for index in everything.split(100):
            batch = self.parts["test"].at(index)
            logits, weights = self.answers(batch)
            wrong += int((logits.argmax(-1) != batch.answers).sum())
            some = batch.facts.any(-1)
            exist = (batch.stories != PAD).any(-1)
            chance.append((batch.facts.sum(-1) / exist.sum(-1))[some])
            if weights is not None:
                weight.append((weights * batch.facts.unsqueeze(1)).sum(-1)[some])
        each = torch.cat(chance)  # of the stories that have facts, if any
        return {
            "wrong": wrong / len(everything),
            "chance": float(each.mean()) if len(each) else None,
            "weight": torch.cat(weight).mean(0).tolist() if weight and len(each) else [],
        }

    def answers(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Return logits ``[B, V]``, and weights ``[B, K, S]`` or, for the LSTM, None."""
        if not self.row.hops:
            return self.model(*batch[:2])
        self.model.attention.linear = False
        return self.model(*batch[:2], need_weights=True)

    @torch.no_grad()
    def pictures(self) -> dict[str, bytes]:
        """Draw the attention weights of every hop for a story."""
        if not self.row.hops:
            return {}
        story = draw_story(self.task, f"{self.task} picture")
        logits, weights = self.answers(gather([story]))
        assert weights is not None
        title = f"{story.question}? {WORDS[int(logits.argmax()) - 1]}"
        rows = [f"{x} •" if i in story.facts else x for i, x in enumerate(story.sentences)]
        return {"": draw_hops(weights[0], rows, title)}


# ---- the table ----------------------------------------------------------------------------------


def table(trained: Sequence[Training]) -> str:
    """Return the tables of all trained models, by task."""
    tasks = {task: by_name(models, 1) for task, models in by_name(trained).items()}
    names = list(by_name(trained, 1))
    lines = [f"| wrong, % | {' | '.join(names)} |", f"|---|{'--:|' * len(names)}"]
    for task, models in tasks.items():
        cells = [
            spread([100 * x.found["wrong"] for x in models[name]], ".1f") if name in models else ""
            for name in names
        ]
        lines.append(f"| {task} | {' | '.join(cells)} |")
    hops = [name for name in names if ROWS[name].hops]
    heads = ["weight of the facts at each hop, %", "evenly", *hops]
    lines += ["", f"| {' | '.join(heads)} |", f"|---|{'--:|' * (len(heads) - 1)}"]
    for task, models in tasks.items():
        chance = next(iter(models.values()))[0].found["chance"]
        cells = ["" if chance is None else f"{100 * chance:.0f}"]
        for name in hops:
            each = [x.found["weight"] for x in models.get(name, ())]
            cells.append(", ".join(f"{100 * sum(x) / len(x):.0f}" for x in zip(*each)))
        lines.append(f"| {task} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def trainings(args: argparse.Namespace) -> Iterator[Training]:
    """Yield the trainings of all models, with the stories of their tasks."""
    for task in args.tasks:
        drawn = draw_parts(task, args.stories, args.test)
        parts = {part: gather(stories) for part, stories in drawn.items()}
        for seed, name in itertools.product(range(1, args.seeds + 1), args.rows):
            yield Training(task, name, seed, parts, args)


def compare(args: argparse.Namespace) -> None:
    """Train all models on all tasks, test them, and write the tables and the pictures."""
    if not 0 <= args.linear_start < 1:
        raise InputError(f"linear_start must be a share below 1, got {args.linear_start}")
    optional("matplotlib", "this example")
    learn_all(args.out, trainings(args), table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("stories", __doc__, compare, ROWS, seeds=1, tasks=TASKS)
    count = at_least(1)
    parser.add_argument("--steps", type=count, default=2000, help="steps of each training")
    parser.add_argument("--batch-size", type=count, default=64, help="stories in a step")
    parser.add_argument(
        "--learning-rate", type=float, default=5e-3, help="the largest learning rate"
    )
    parser.add_argument(
        "--linear-start", type=float, default=0.2, help="share of the steps without a softmax"
    )
    parser.add_argument("--dim", type=count, default=32, help="features of a sentence")
    parser.add_argument(
        "--stories", type=count, default=10000, help="training stories of each task"
    )
    parser.add_argument("--test", type=count, default=1000, help="test stories of each task")
    return run(parser, argv)


if __name__ == "__main__":
    sys.exit(main())
