"""Calls of the raw operators in which one argument may not fit.

What fits is written down here in other words than the operators', as a pattern for each argument.
Operators must take what fits and refuse the rest before they compute, as ``CHECKS`` must; but what
a backend has prepared is for that backend alone to judge.
``python invalid_calls.py BACKEND COUNT SEED FILE`` judges until COUNT were refused, the last in
FILE.
"""

from __future__ import annotations

import random
import sys
from typing import NamedTuple

import torch

from attnfast.ops.arguments import SCORES
from attnfast.ops.backends import FLOATS, load_library
from attnfast.ops.operators import ARGUMENTS, CHECKS

#: Marks, dtype and sizes. The dtype is that of the first argument (q), of its sums (s), or its own.
#: ? may be None; ~ may be 1 in place of a size that has no =; own may have H in front.
KEYS = {
    "query": "q B H Tq A",
    "key": "q B H Tk A",
    "value": "q B H Tk Dv",
    "score_vector": "? own q A",
}
LENGTHS = {"lengths": "? int B"}
TERMS = {"bias": "? ~ q|s B H Tq W", "mask": "? ~ bool B H Tq W", **LENGTHS}
SPAN = {
    "key_bounds": "? ~ int64 B H =Tq =2", "columns": "",
    "key_exponentials": "? float32 B H1 Tk A32",
}  # fmt: skip
HISTORY = {
    "filters": "? own s K C Taps", "projection": "? own s A K", "penalty": "? ~ s H1",
    "inverse_fertility": "? s B H Tk", "transition_prob": "? s B H Tq", "coverage": "? s B H Tk",
    "previous": "? s B H Tk",
}  # fmt: skip
#: Absent, or empty, unless an argument is given.
NEEDS = {
    "log_weights": "transition_prob", "grad_log_weights": "transition_prob",
    "sigmoid_sum": "normalisation",
}  # fmt: skip
GRADS = {"grad_context": "q B H Tq Dv", "grad_weights": "? s B H Tq W", "weights": "s B H Tq W"}
COPYING = {"logits": "q B Tq V", "weights": "q B Tq Tk", "source": "int B Tk", "gate": "q B Tq"}
CALLS = {
    "attention": {**KEYS, **TERMS, **SPAN},
    "attention_backward": {
        **KEYS, **LENGTHS, **SPAN, **GRADS,
        "grad_log_sum_exp": "? s B H Tq", "grad_score": "? s B H Tq W",
    },
    "coverage_attention": {**KEYS, **TERMS, **HISTORY},
    "coverage_attention_backward": {
        **KEYS, **LENGTHS, **HISTORY, **GRADS,
        "grad_coverage": "? s B H Tk", "grad_loss": "? s B H", "log_weights": "s B H Tq Tk",
        "grad_log_weights": "? s B H Tq Tk", "sigmoid_sum": "s B H Tq",
    },
    "copy_distribution": COPYING,
    "copy_distribution_backward": {
        **COPYING, "grad_distribution": "q B Tq V+X", "log_sum_exp": "float64 B Tq",
    },
}  # fmt: skip
CALLS["coverage_attention_backward_into"] = {
    **CALLS["coverage_attention_backward"], "sum_key": "s B H Tk A", "sum_score_vector": "s B H A",
    "sum_filters": "s B H K C Taps", "sum_projection": "s B H A K",
}  # fmt: skip
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.bool, torch.int8)


class Pattern(NamedTuple):
    """What an argument may be."""

    marks: str
    dtype: str
    sizes: list[str]

    @classmethod
    def of(cls, text: str) -> Pattern:
        words = text.split()
        marks = [x for x in words if x in ("?", "~", "own")]
        dtype, *sizes = words[len(marks) :] or [""]
        return cls(" ".join(marks), dtype, sizes)

    def dtypes(self, first: torch.dtype) -> tuple[torch.dtype, ...]:
        """Return the dtypes that it may have beside a first argument's."""
        if self.dtype == "int":
            return torch.int64, torch.int32
        sums = torch.float64 if first == torch.float64 else torch.float32
        if self.dtype in ("q", "s", "q|s"):
            return tuple({"q": first, "s": sums}[x] for x in self.dtype.split("|"))
        return (getattr(torch, self.dtype),)


PATTERNS = {name: {p: Pattern.of(x) for p, x in call.items()} for name, call in CALLS.items()}


def parameters(name: str) -> list[str]:
    """Return an operator's parameters in order."""
    return list(ARGUMENTS[name]._fields)


def known(name: str, sizes: dict[str, int], columns: int) -> int | None:
    """Return the size of this name if it follows from others."""
    if name == "W":
        return columns or sizes["Tk"]
    if name == "A32":
        return -(-sizes["A"] // 32) * 32
    if name == "V+X":
        return sizes["V"] + sizes["X"]
    return sizes.get({"H1": "H"}.get(name, name.lstrip("=")))


class Call:
    """A random call that fits, but for one argument that may have been changed."""

    def __init__(self, draw: random.Random):
        self.draw, self.name = draw, draw.choice(list(CALLS))
        self.patterns = PATTERNS[self.name]
        self.dtype, heads = draw.choice(FLOATS), draw.random() < 0.5
        size = lambda *most: draw.choice((0, 1, 1, 2, 3, *most))  # noqa: E731
        self.sizes = {
            "B": size(), "H": size() if heads else 1, "Tq": size(9), "Tk": size(5, 70, 130),
            "A": size(7, 33), "Dv": size(40), "K": size(), "C": draw.choice((1, 2)),
            "Taps": draw.choice((1, 3)), "V": size(11), "X": size(), "2": 2,
        }  # fmt: skip
        self.heads = heads and "logits" not in self.patterns
        self.columns = 0
        missing = {p for p, x in self.patterns.items() if "?" in x.marks and draw.random() < 0.5}
        if "into" in self.name or draw.random() < 0.5:  # filters want the others
            missing -= {"filters", "projection", "score_vector"}
            self.sizes["K"] += "into" in self.name and not self.sizes["K"]
        else:
            missing |= {"filters", "projection"}
        self.score = "dot" if "score_vector" in missing else draw.choice(("tanh", *SCORES[1:]))
        if self.score != "tanh" or self.dtype == torch.float64:
            missing.add("key_exponentials")
        if "key_bounds" not in missing and draw.random() < 0.5:
            self.columns = draw.randint(0, self.sizes["Tk"])
        own = {p: self.heads and draw.random() < 0.5 for p in ("score_vector", "filters")}
        own["projection"] = own["filters"]
        others = {
            "columns": self.columns, "scale": 1.0, "log": False, "num_oov": self.sizes["X"],
            "score": self.score, "normalisation": self.normalisation(missing),
        }  # fmt: skip
        given = {
            "transition_prob": "transition_prob" not in missing,
            "normalisation": others["normalisation"] == "sigmoid",
        }
        self.args = {}
        for p in parameters(self.name):
            if p not in self.patterns or p == "columns":
                self.args[p] = others.get(p, True)
            elif p in NEEDS and p not in missing and not given[NEEDS[p]]:
                self.args[p] = torch.empty(0, dtype=self.patterns[p].dtypes(self.dtype)[0])
            else:
                self.args[p] = None if p in missing else self.make(p, own.get(p, False))
        self.changed = draw.choice([p for p in self.args if p in self.patterns])
        self.how = draw.choice(("nothing", "rank", "size", "size", "dtype", "missing", "zero"))
        self.args[self.changed] = self.change(self.args[self.changed])

    def normalisation(self, missing: set[str]) -> str:
        """Return a normalisation, now and then one that does not fit."""
        if self.draw.random() < 0.05:
            return self.draw.choice(("sigmoid", "sparsemax", "exp"))
        if "coverage" not in self.name:
            return self.draw.choice(("softmax", "softmax", "sparsemax", "entmax15"))
        return (
            self.draw.choice(("softmax", "sigmoid")) if "transition_prob" in missing else "softmax"
        )

    def make(self, p: str, own: bool) -> torch.Tensor:
        """Return an argument that fits."""
        marks, _, names = pattern = self.patterns[p]
        shape = [self.sizes["H"]] if own else []
        for name in names:
            if name == "H" and not self.heads:
                continue
            n = known(name, self.sizes, self.columns)
            one = "~" in marks and name[0] != "=" and self.draw.random() < 0.3
            shape.append(1 if one else n)
        return self.filled(p, shape, self.draw.choice(pattern.dtypes(self.dtype)))

    def filled(self, p: str, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        """Return numbers that suit an argument, some with their rows not side by side."""
        if p in ("lengths", "source"):
            last = self.sizes["Tk"] if p == "lengths" else self.sizes["V"] + self.sizes["X"] - 1
            return torch.full(shape, max(last, 0), dtype=dtype)
        x = (torch.randn(shape) * 2).to(dtype)
        if len(shape) > 1 and "sum" not in p and self.draw.random() < 0.3:
            x = x.transpose(-1, -2).contiguous().transpose(-1, -2)
        return x

    def change(self, x):
        """Return what stands for an argument."""
        draw, how = self.draw, self.how
        if self.changed == "columns":
            return draw.choice((-1, 0, 1, self.sizes["Tk"], self.sizes["Tk"] + 1, 2**40))
        if how == "missing":  # the dispatcher refuses others
            return None if "?" in self.patterns[self.changed].marks else x
        if x is None or how == "nothing":
            return x
        if how == "dtype":
            return x.to(draw.choice(DTYPES))
        if how == "rank":
            if x.dim() == 0 or draw.random() < 0.5:
                return x.unsqueeze(draw.randint(0, x.dim()))
            return x.flatten(0, 1) if x.dim() > 1 else x.sum()
        shape = list(x.shape)
        if shape:
            axis = draw.randrange(len(shape))
            shape[axis] = 0 if how == "zero" else draw.choice((1, shape[axis] + 1, 5, 131))
        return self.filled(self.changed, shape, x.dtype)

    def fits(self) -> bool:
        """Whether all arguments fit, by the patterns and what these cannot say."""
        args = self.args
        first = args["logits" if "logits" in args else "query"]
        if first.dtype not in FLOATS or first.dim() not in ((3,) if "logits" in args else (3, 4)):
            return False
        heads, columns, span = first.dim() == 4, args.get("columns", 0), args.get("key_bounds")
        sizes = {"H": 1, "2": 2, "X": args.get("num_oov", 0)}
        defining = ("logits", "query", "key", "value", "weights")
        for p in sorted(self.patterns, key=lambda p: defining.index(p) if p in defining else 9):
            x, (marks, _, names) = args[p], self.patterns[p]
            unused = p in NEEDS and self.lacks(p)
            if x is None or p == "columns" or unused:
                continue
            names = [n for n in names if n != "H" or heads]
            if "own" in marks and heads and x.dim() == len(names) + 1:
                names = ["H", *names]
            if x.dtype not in self.patterns[p].dtypes(first.dtype) or x.dim() != len(names):
                return False
            for name, n in zip(names, x.shape):
                if p == "query" and name == "H":
                    sizes["H"] = n
                wanted = known(name, sizes, columns)
                if wanted is None:
                    sizes[name] = n
                elif n != wanted and not ("~" in marks and name[0] != "=" and n == 1):
                    return False
        if not 0 <= columns <= (0 if span is None else sizes["Tk"]):
            return False
        if "score" in args and (args["score_vector"] is None) != (args["score"] == "dot"):
            return False
        exact = args.get("score") != "tanh" or first.dtype == torch.float64
        if args.get("key_exponentials") is not None and exact:
            return False
        for p, last in (
            ("lengths", sizes.get("Tk", 0)),
            ("source", sizes.get("V", 0) + sizes["X"] - 1),
        ):
            if args.get(p) is not None and (args[p] > last).any():
                return False
        if (chosen := args.get("normalisation", "softmax")) != "softmax":
            sparse = "coverage" not in self.name and chosen in ("sparsemax", "entmax15")
            sigmoid = "coverage" in self.name and chosen == "sigmoid"
            if not sparse and not (sigmoid and args["transition_prob"] is None):
                return False
        unused = [args[p] for p in NEEDS if p in args and self.lacks(p)]
        if any(
            x is not None and (x.shape != (0,) or x.dtype != args["weights"].dtype) for x in unused
        ):
            return False
        if args.get("transition_prob") is not None and args["previous"] is None:
            return False
        filters, projection = args.get("filters"), args.get("projection")
        if (filters is None) != (projection is None):
            return False
        if filters is None:
            return "into" not in self.name
        if (
            sizes["C"] not in (1, 2)
            or sizes["Taps"] % 2 == 0
            or filters.dim() != projection.dim() + 1
        ):
            return False
        return args["score_vector"] is not None if sizes["K"] else "into" not in self.name

    def lacks(self, p: str) -> bool:
        """Return whether the argument that p needs is absent."""
        needed = self.args[NEEDS[p]]
        return needed is None or (isinstance(needed, str) and needed != "sigmoid")

    def __str__(self) -> str:
        told = {
            p: f"{str(x.dtype)[6:]}{list(x.shape)}" if isinstance(x, torch.Tensor) else x
            for p, x in self.args.items()
        }
        return f"{self.name}: {self.how} of {self.changed} in {told}"


def refusal(function, args) -> str | None:
    """Return what a function says against its arguments, or None."""
    try:
        function(*args)
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def judge(call: Call, backend: str, only_invalid: bool = False) -> bool:
    """Assert that check and operator take the call if it fits, and else refuse it; say which."""
    fits = call.fits()
    args = [call.args[p] for p in parameters(call.name)]
    sparse = call.args.get("normalisation") in ("sparsemax", "entmax15")
    if backend != "cpu" and (sparse or call.changed == "key_exponentials"):
        return True
    if call.changed != "key_exponentials":
        said = refusal(CHECKS[call.name], args)
        assert (said is None) == fits, f"fits: {fits}, its check: {said}; {call}"
    if not (fits and only_invalid):
        said = refusal(getattr(getattr(torch.ops, f"attnfast_{backend}"), call.name), args)
        assert (said is None) == fits, f"fits: {fits}, the operator: {said}; {call}"
    return fits


def main(backend: str, count: str, seed: str, file: str) -> None:
    load_library(f"_C_{backend}")
    torch.manual_seed(int(seed))
    draw, fitted = random.Random(int(seed)), [0, 0]
    with open(file, "w") as last:
        while fitted[False] < int(count):
            call = Call(draw)
            last.seek(0)
            last.truncate()
            last.write(str(call))
            last.flush()
            fitted[judge(call, backend)] += 1
    print("refused and taken:", *fitted)


if __name__ == "__main__":
    main(*sys.argv[1:])
