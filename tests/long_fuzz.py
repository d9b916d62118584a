"""The long fuzz: ``python long_fuzz.py COUNT [SHARE]`` judges random calls, both ways, by the rule.

Attention, statistics, spans, histories, copying, decoder steps, searches and all public callables
take turns, from seeds that the tests do not use; SHARE of the sizes are 0, 0.04 unless given. glibc
fills the memory that it gives out with large numbers. Calls that break the rule are printed and
counted; a crash is told by the last line of its process.
"""

from __future__ import annotations

import collections
import faulthandler
import multiprocessing
import os
import random
import sys
import warnings

import attention_cases
import calls
import calls_of_models
import test_attention
import test_copying
import test_coverage
import test_memory
import test_recurrent
import test_search
import test_span
import test_statistics
import test_zero_sizes
import torch

BACKEND = "cpu"
FIRST = 10_000  # seed


def steps(seed: int):
    """Decoder steps over a prepared memory; an activation's kinks are luck in half types."""
    for case in attention_cases.fuzz(seed, 16, 100_000):
        if case.Tq and (case.score not in attention_cases.PLAIN or case.dtype == torch.float32):
            yield case, lambda case=case: test_memory.judge(case, BACKEND)


def attention(seed: int):
    for case in attention_cases.fuzz(seed, 32, 400_000):
        yield case, lambda case=case: test_attention.judge(case, BACKEND)


def statistics(seed: int):
    for case in attention_cases.fuzz(seed, 32, 200_000):
        yield case, lambda case=case: test_statistics.judge(case, BACKEND)


def spans(seed: int):
    draw = random.Random(seed)
    for case in attention_cases.fuzz(seed, 32, 200_000):
        span, position = test_span.draw_span(draw)
        yield (
            (case, span, position),
            lambda case=case, span=span, position=position: test_span.judge(
                case, span, position, BACKEND
            ),
        )


def histories(seed: int):
    for case in test_coverage.fuzz(seed, 24):
        yield case, lambda case=case: test_coverage.check(case, BACKEND)


def copying(seed: int):
    for case in test_copying.fuzz(seed, 24):
        yield case, lambda case=case: test_copying.check(case, BACKEND)


def layers(seed: int):
    for case in test_recurrent.fuzz(seed, 24, BACKEND):
        yield case, lambda case=case: test_recurrent.judge(case, BACKEND)


def searches(seed: int):
    for number in range(24 * seed, 24 * seed + 24):
        yield number, lambda number=number: test_search.judge_model(number)


def public(seed: int):
    """Every public callable with random numbers of sequences, rows and keys."""
    draw = random.Random(seed)
    for size in ("B", "TQ", "TK"):
        most = 2 if size == "B" else 6
        chosen = 0 if draw.random() < attention_cases.ZEROS else draw.randint(1, most)
        for module in (calls, calls_of_models):
            if hasattr(module, size):
                setattr(module, size, chosen)
    warnings.simplefilter("ignore")
    torch.manual_seed(seed)
    sizes = calls.B, calls.TQ, calls.TK
    for table_of in test_zero_sizes.PARTS.values():
        try:
            found = table_of()
        except ValueError as error:  # a module that cannot be made of so few keys
            if " must be " not in str(error):
                raise
            continue
        if calls.TK < 2:
            found.pop("kendall_tau", None)  # NaN of fewer than two numbers
        for name, call in found.items():
            yield (name, sizes), lambda call=call: test_zero_sizes.judge_call(call)


KINDS = (attention, statistics, spans, histories, copying, steps, layers, searches, public)


def judge(seed: int) -> tuple[collections.Counter, list[str]]:
    """Judge the calls of a seed; return how many there were, and what broke the rule."""
    faulthandler.enable()
    torch.set_num_threads(1 + seed % 2)
    attention_cases.ZEROS = float(os.environ.get("ZEROS", attention_cases.ZEROS))
    kind, counted, broken = KINDS[seed % len(KINDS)], collections.Counter(), []
    for case, check in kind(seed):
        counted[kind.__name__] += 1
        try:
            check()
        except Exception as error:
            counted[f"{kind.__name__}, broken"] += 1
            broken.append(f"{kind.__name__}, seed {seed}: {' '.join(str(error).split())} {case}")
    return counted, broken


def main(count: str, share: str = "0.04") -> None:
    os.environ |= {"ZEROS": share, "GLIBC_TUNABLES": test_zero_sizes.POISON}  # of processes begun
    total: collections.Counter = collections.Counter()
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for counted, broken in pool.imap_unordered(judge, range(FIRST, FIRST + 100_000)):
            total += counted
            for line in broken:
                print(line, flush=True)
            if sum(n for name, n in total.items() if "broken" not in name) >= int(count):
                break
        pool.terminate()
    print(", ".join(f"{name} {n}" for name, n in sorted(total.items())))


if __name__ == "__main__":
    main(*sys.argv[1:])
