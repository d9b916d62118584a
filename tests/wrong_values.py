"""Values that do not fit an argument, and the answers of calls to them.

``python wrong_values.py`` tries all of them on every public callable of tests/calls.py and prints
those that raise no good error; ``python wrong_values.py NAME`` only tries callables with NAME in
their names.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from calls import B, Call
from calls_of_models import calls
from torch import Tensor, nn

from attnfast._utils.checks import LONGEST

#: Values that fit no argument, with the type of an annotation that allows them, if any does.
ANYWHERE: dict[str, tuple[str, Callable[[], Any]]] = {
    "None": ("None", lambda: None),
    "word": ("", lambda: "word"),
    "real": ("float", lambda: 3.5),
    "nan": ("", lambda: math.nan),
    "inf": ("", lambda: math.inf),
    "huge": ("", lambda: 10**400),
    "2**40": ("float", lambda: 2**40),
    "negative": ("float", lambda: -1),
    "complex": ("", lambda: 1j),
    "list": ("", lambda: [1.0, 2.0]),
    "empty list": ("", lambda: []),
    "dict": ("", lambda: {}),
    "list of tensors": ("", lambda: [torch.randn(30, 30)] * 9),
    "array": ("", lambda: np.ones((40, 40))),
    "rank": ("", lambda: torch.randn(2, 2, 2, 2, 2)),
    "vector": ("", lambda: torch.randn(7)),
    "scalar": ("", lambda: torch.tensor(0.5)),
    "empty": ("", lambda: torch.empty(0)),
    "meta": ("", lambda: torch.randn(2, 3, 4, device="meta")),
    "module": ("Module", lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))),
    "type": ("", lambda: dict),
    "object": ("", object),
}
OTHER_DTYPES = {"complex64": torch.complex64, "bool": torch.bool, "int16": torch.int16}


def of_tensor(x: Tensor) -> Iterator[tuple[str, Any]]:
    """Yield what is wrong instead of a tensor."""
    dtypes = dict(OTHER_DTYPES)
    if x.is_floating_point():
        dtypes |= {"float64": torch.float64, "float16": torch.float16, "int64": torch.int64}
    else:
        dtypes |= {"float32": torch.float32, "uint8": torch.uint8}
    for name, dtype in dtypes.items():
        if x.dtype != dtype:
            yield name, x.to(dtype)
    yield "on meta", x.to("meta")
    yield "sparse", x.to_sparse()
    if x.dim() == 2:
        yield "csr", x.float().to_sparse_csr()
    yield "nested", torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])
    yield "as an array", x.numpy()
    yield "as a list", x.tolist()
    yield "an axis in front", x.unsqueeze(0)
    yield "an axis behind", x.unsqueeze(-1)
    if x.dim():
        yield "an axis fewer", x.flatten(0, 1) if x.dim() > 1 else x[0]
    for axis in range(x.dim()):
        yield f"longer in axis {axis}", torch.cat([x, x.narrow(axis, 0, 1)], axis)
    if x.dtype == torch.int64 and x.numel():
        for number in (-7, 2**40):
            wrong = x.clone()
            wrong.view(-1)[-1] = number
            yield f"one of {number}", wrong


def of_tuple(parts: Any) -> Iterator[tuple[str, Any]]:
    """Yield what is wrong instead of a tuple of tensors, such as a memory or a state."""
    changes: dict[str, Callable[[Tensor], Any]] = {
        "of another batch": lambda x: torch.cat([x, x], x.shape.index(B)) if B in x.shape else x,
        "of another dtype": lambda x: x.double() if x.dtype == torch.float32 else x,
        "of another device": lambda x: x.to("meta"),
        "of more features": lambda x: torch.cat([x, x], -1) if x.is_floating_point() else x,
        "of more axes": lambda x: x.unsqueeze(0),
        "of nothing": lambda x: None,
    }
    held: list[Tensor] = []
    changed(parts, held.append)
    for name, change in changes.items() if held else ():
        yield name, changed(parts, change)
    yield "as a plain tuple", tuple(parts)
    yield "its first part", parts[0]


def changed(x: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return a tuple with all its tensors changed, those inside of its parts too."""
    if isinstance(x, Tensor):
        return change(x)
    if not isinstance(x, tuple):
        return x
    if not hasattr(x, "_fields"):
        return tuple(changed(part, change) for part in x)
    left = {"steps": None, "packed": None}  # made of the tensors
    parts = {name: left.get(name, changed(part, change)) for name, part in x._asdict().items()}
    return x._replace(**parts)


def of_number(x: float) -> Iterator[tuple[str, Any]]:
    """Yield what is wrong instead of a number."""
    yield "as a tensor", torch.tensor(x)
    yield "as text", str(x)
    yield "-inf", -math.inf
    yield "truth", True
    if isinstance(x, int):
        yield "zero", 0
        yield "as a real", float(x)
        yield "2**31", 2**31


def of_flag(x: bool) -> Iterator[tuple[str, Any]]:
    """Yield what is wrong instead of a flag."""
    yield "two", 2
    yield "as text", str(x)
    yield "as a tensor", torch.tensor(x)


def wrong_values(value: Any, annotation: str) -> Iterator[tuple[str, Any]]:
    """Yield names and values that do not fit an argument."""
    of_kind: Iterator[tuple[str, Any]] = iter(())
    if isinstance(value, Tensor):
        of_kind = of_tensor(value)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        of_kind = of_tuple(value)
    elif isinstance(value, bool):
        of_kind = of_flag(value)
    elif isinstance(value, (int, float)):
        of_kind = of_number(value)
    for name, (type_, make) in ANYWHERE.items():
        if not type_ or not re.search(rf"\b{type_}\b", annotation):
            yield name, make()
    yield from of_kind


DIAGNOSTICS = (
    "(row_statistics|kl_from_uniform|key_coverage|diagonality|monotonicity"
    "|over_under_translation|extract_alignment"
    "|head_roles|failures)"
)
#: Values that fit, by the reason: patterns of calls, arguments and values.
FITS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "a count may be 0": (
        ("copy_distribution|PointerGenerator.forward", "num_oov", "zero"),
        ("Span.*|gaussian_bias.*|RelativePositions.forward", "Tq|Tk", "zero"),
        (".*Attention|SpecAugment", "(num_)?filters|window|ahead|.*masks|.*width", "zero"),
        (".*", "offset|first|seed|radius|null|longest_target|highway_layers", "zero"),
        (".*_search|sample", "min_length|no_repeat_ngram|top_k|start", "zero"),
        (".*_search|sample", "forbidden", "empty list"),
    ),
    "rows may stand before the first key and after the last": (
        (".*_attention, span|attend|Span.key_indices|gaussian.*", "position", "2.*40|negative"),
    ),
    "-1 is the last key": (("extract_alignment.*", "null", "negative"),),
    "positions are integers or floating-point, and so are widths": (
        ("dot_attention, span", "position|sigma", "int64"),
        ("gaussian_bias, tensors", "position", "int64"),
    ),
    "a number may be a tensor of one number": (
        ("(coverage_att|attend_with_h).*", "penalty|transition_prob", "scalar|as a tensor"),
        ("gaussian_bias.*", "sigma|height", "scalar|as a tensor"),
        ("ForwardAttention.forward", "transition_prob", "scalar"),
    ),
    "a state may be its hidden tensor alone": (
        ("RecurrentDecoder.forward", "hx", "its first part"),
    ),
    "None means the rows' own numbers": (("gaussian_bias.*", "position", "None"),),
    "axes in front are those of batch and heads": (
        ("gaussian_bias, tensors", "sigma|height|position", "an axis in front"),
        (f"{DIAGNOSTICS}, keys|alignment_loss, keys", "key_indices", "an axis in front"),
        ("position_encoding", "words", "an axis .*"),
    ),
    "floating-point of any dtype, which is converted to the accumulation dtype": (
        (".*Attention.forward|CTCPrefixScorer.score", "history|state|encoded", "of another dtype"),
        (
            "coverage_attention.*|attend_with_history.*|ForwardAttention.forward",
            "coverage.*|filters|projection|fertility|transition_prob|.*previous",
            "float64|float16",
        ),
        ("dot_attention, span|gaussian_bias, tensors", "position|sigma|height", "float64|float16"),
        (f"{DIAGNOSTICS}(, keys)?", "weights|fertility", "float64|float16"),
        ("hybrid_loss|scheduled_sampling", "output|logits", "float64|float16|of another dtype"),
        (".*_loss.*|Reinforce.forward|total_.*|jensen_.*|kendall_tau", ".*", "float64|float16"),
        ("best_spans|erasure", "start|end|ranking", "float64|float16"),
    ),
    "modules without parameters": (
        ("(Fixed|Mean|No)Context.forward", "memory", "of another dtype|of more features"),
        ("SinusoidalPositions.forward|SpecAugment.forward", "x|features", "float64|float16"),
        ("FeatureNormalizer.forward|LogMel.forward", "features|samples", "float64|float16"),
        ("(Fixed|Mean|No)Context.*", "states|state|values", "float64|float16"),
    ),
    "pictures take any": (
        ("draw_.*", "weights|features|points|x|output|read|written|image|maps", "float64|float16"),
        ("draw_alignment.*", "weights", "an axis in front"),
        ("draw_listening", "features", "longer in axis [01]"),
        ("draw_(listening|addressing)", "weights|x|output|read|written", "longer in axis [12]"),
        ("draw_(hops|pointing)", "weights", "longer in axis 0"),
        ("draw_.*", "source|question|note|axis", "word"),
        ("draw_pointing", "target|predicted", "empty list"),
    ),
    "any module may stand there": (("Encoder|Seq2Seq", "self_attention|pointer", "module"),),
    "any hashable is a word": (
        ("repetition", "words", ".*list.*"),
        ("word_errors", "reference|hypothesis", "empty list|word"),
    ),
    "only shapes count": (
        (".*Attention.start", "memory", "of another .*|of more .*"),
    ),
    "only their number counts": (("ShowAttendTell.output_limit", "sizes", "longer.*0|one of .*"),),
    "only padding is apart from other words": (("position_encoding", "words", "one of .*"),),
    "no other argument has this size: batches": (
        ("(Span.key_indices|gaussian_bias|.*output_limit)", "lengths", "longer in axis 0"),
        (".*Positions.forward|.*Decoder.initial|.*embed|next_word|position_encoding"
         "|CharacterCNN.forward|HighwayNetwork.forward",
         "x|hidden|words|characters", "longer in axis 0"),
    ),
    "no other argument has this size: rows, keys or words": (
        ("(additive|dot)_attention, span|attend|attend, step", "query", "longer in axis 1"),
        ("additive_score", "query|key", "longer in axis 1"),
        ("(Bahdanau|Luong|MultiHead|LocalPredictive|Gated|TopK|MultiHop|Bidirectional)Attention.*",
         "state|query|text|question", "longer in axis 1"),
        ("TransformerEncoderLayer.forward|PointerNetwork.*", "states|items|pointers",
         "longer in axis 1"),
        (".*Positions.forward|.*(RNN|GRU|LSTM|Decoder).forward|Neural.*forward",
         "x|input", "longer in axis 1"),
        ("(alignment_loss, numbers|doubly_stochastic_loss)", "weights|alignment",
         "longer in axis 1"),
        ("CharacterCNN.forward|HighwayNetwork.forward", "characters|x", "longer in axis 1"),
        ("Seq2Seq.*|.*_search|sample|Classifier.*|BiDAF.forward.*|ListenAttendSpell.*"
         "|ShowAttendTell.*",
         "source|words|target_in|embedded|text|question|frames", "longer in axis 1"),
        (".*Encoder.forward|FeatureNormalizer.forward|SpecAugment.forward|LogMel.forward",
         "embedded|frames|features|samples", "longer in axis 1"),
        ("MemoryNetwork.forward|next_word|position_encoding", "stories|questions|words",
         "longer in axis [12]"),
        ("gradient_.*|leave_.*|weight_.*|permut.*|adversarial", "embedded", "longer in axis 1"),
        ("(row|kl|key|diag|mono|extract|failures)[a-z_]*", "weights", "longer in axis [12]"),
        ("over_under_translation|head_roles, keys", "weights", "longer in axis 1"),
        ("head_roles", "weights", "longer in axis [123]"),
        ("(Fixed|Mean|No)Context.forward|(Fixed|No)Context.prepare", "states?", "longer in axis 1"),
    ),
    "no other argument has this size: characters of a word": (
        ("BiDAF.forward|CharacterCNN.forward", ".*characters", "longer in axis 2"),
    ),
    "no other argument has this size: features, or words of a vocabulary": (
        ("[a-z].*attention.*|(?!MultiHead).*prepare", "value|values", "longer in axis 2"),
        ("coverage_attention|attend_with_history", "filters", "longer in axis 1"),
        ("copy_distribution|PointerGenerator.forward|pointer_loss", "logits|log_probs",
         "longer in axis 2"),
        ("alignment_loss", "weights", "longer in axis 2"),
        ("sequence_loss|scheduled_sampling", "logits", "longer in axis 2"),
        ("hybrid_loss", "output", "of more features"),
        ("SinusoidalPositions.forward|SpecAugment.forward|(Fixed|Mean|No)Context.*",
         "x|features|states|state", "longer in axis 2"),
        ("(Grid|ShowAttend).*", "images", "longer in axis [23]"),
    ),
}  # fmt: skip


class Trial(NamedTuple):
    """A wrong value instead of an argument, and the answer: empty if it is a good one."""

    call: str
    argument: str
    wrong: str
    answer: str

    def __str__(self) -> str:
        return f"{self.call}({self.argument}={self.wrong}): {self.answer}"


def annotation_of(call: Call, argument: str) -> str:
    """Return an argument's annotation, with None if that is its default."""
    like = call.signature or call.function
    if isinstance(like, nn.Module):
        like = like.forward
    parameter = inspect.signature(like).parameters.get(argument)
    if parameter is None:
        return ""
    return f"{parameter.annotation}{' | None' * (parameter.default is None)}"


def tries(name: str, call: Call) -> Iterator[tuple[str, str, Any]]:
    """Yield every argument with the name of a wrong value and that value."""
    for argument, value in call.arguments.items():
        for wrong, x in wrong_values(value, annotation_of(call, argument)):
            if not fits(name, argument, wrong):
                yield argument, wrong, x


def attempt(name: str, call: Call, argument: str, wrong: str, x: Any) -> Trial:
    """Call with a wrong value instead of an argument."""
    trial = Trial(name, argument, wrong, "")
    try:
        call.function(**call.arguments | {argument: x})
    except (ValueError, TypeError) as error:
        text = str(error)
        names = f"(?<![\\w.]){re.escape(argument)}\\b"
        good = re.search(names, text) and re.search(r" must .*, got ", text)
        if good and len(text) <= LONGEST and "\n" not in text:
            return trial
        return trial._replace(answer=f"{type(error).__name__}: {text}")
    except Exception as error:
        return trial._replace(answer=f"{type(error).__name__}: {error}")
    return trial._replace(answer="accepted")


def fits(*tried: str) -> bool:
    """Return whether :data:`FITS` allows a value of an argument of a call."""
    return any(
        all(re.fullmatch(pattern, text) for pattern, text in zip(row, tried))
        for rows in FITS.values()
        for row in rows
    )


def main(part: str = "") -> None:
    warnings.simplefilter("ignore")
    count, bad = 0, 0
    for name, call in calls().items():
        if part not in name:
            continue
        for one in tries(name, call):
            count += 1
            trial = attempt(name, call, *one)
            if trial.answer:
                bad += 1
                print(" ".join(str(trial).split())[:200])
    print(f"{bad} of {count} badly answered")


if __name__ == "__main__":
    main(*sys.argv[1:])
