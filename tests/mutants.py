"""Plant the faults of tests/mutations.py, one at a time, and count those that the tests catch.

    python tests/mutants.py [word in a fault's file ...]

Faults are planted in build/mutants, a copy of the tree, never in the tree itself. For each, only
the tests that concern it run, up to the first that fails; one that hangs counts as caught. What has
been caught is not tried again until the fault or its file changes: `rm -r build/mutants` starts
over. Survivors end the run with 1, as does a fault whose pattern is not once in its function or
that uses an undefined name.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from mutation_points import plant
from mutations import FAULTS

ROOT = Path(__file__).resolve().parent.parent
COPY = ROOT / "build" / "mutants"
KNOWN = COPY / "known.json"
LIMIT = 600  # seconds for tests without a fault; with one, a minute and five times what they took
LIBRARY = COPY / "attnfast" / "_C_cpu.so"


def is_compiled(file: str) -> bool:
    """Whether the library is made of a file; what is CUDA's alone its tests compile."""
    return file.startswith("csrc/") and not file.startswith("csrc/cuda")


def refresh() -> None:
    """Bring the copy up to date; what has not changed keeps its time, and so its objects."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in [*listed.splitlines(), *(f"attnfast/{x.name}" for x in ROOT.glob("attnfast/*.so"))]:
        here, there = ROOT / name, COPY / name
        if here.exists() and not (there.exists() and there.read_bytes() == here.read_bytes()):
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(here, there)
    kernels = COPY / "attnfast" / "kernels"  # where an install would put them
    if not kernels.exists():
        kernels.symlink_to("../kernels")


def run(*command: str, limit: float = LIMIT, **environment: str) -> bool:
    """Run a command in the copy; say whether it succeeded in time."""
    paths = {"PYTHONPATH": os.pathsep.join([str(COPY), str(COPY / "tests")])}
    try:
        done = subprocess.run(
            command, cwd=COPY, env={**os.environ, **paths, **environment}, timeout=limit,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def passes(tests: str, limit: float = LIMIT) -> bool:
    """Whether tests pass in the copy, some at least having run."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header"]
    return run(sys.executable, "-m", "pytest", *options, *shlex.split(tests), limit=limit)


@functools.cache
def sound(tests: str) -> float | None:
    """Return the seconds that tests take without a fault, or None where they fail."""
    start = time.monotonic()
    return time.monotonic() - start if passes(tests) else None


def build() -> bool:
    """Compile the CPU library of the copy anew, where a source has changed."""
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    return run(*command, limit=3600, ATTNFAST_BUILD_CUDA="0")


def outcome(file: str, faulty: str, tests: str) -> str:
    """Run tests on a faulty version of a file, and restore it; return what became of the fault."""
    seconds = sound(tests)
    if seconds is None:
        return "unfit: its tests fail without it"
    path = COPY / file
    text = path.read_text()
    compiled = is_compiled(file)
    library = LIBRARY.read_bytes() if compiled else b""
    try:
        path.write_text(faulty)
        if compiled and not build():
            return "unfit: it does not compile"
        return "survived" if passes(tests, 60 + 5 * seconds) else "caught"
    finally:
        path.write_text(text)
        if compiled:
            LIBRARY.write_bytes(library)


def every_fault() -> Iterator[tuple[str, str, str, str, str]]:
    """Yield each fault: its file, tests, function, pattern and replacement."""
    for (file, tests), by_function in FAULTS.items():
        for function, faults in by_function.items():
            for old, new in faults:
                yield file, tests, function, old, new


def check_names(file: str, source: str) -> None:
    """Raise if a planted fault uses an undefined name: every test would catch that."""
    if file.endswith(".py"):
        command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "-"]
        done = subprocess.run(command, input=source, text=True, capture_output=True, check=False)
        if done.returncode:
            raise ValueError(f"an undefined name: {done.stdout.strip() or done.stderr.strip()}")


def main(words: list[str]) -> int:
    """Try the faults whose file has one of the words in its name, or all; return the status."""
    COPY.mkdir(parents=True, exist_ok=True)
    refresh()
    known = json.loads(KNOWN.read_text()) if KNOWN.exists() else {}
    ready = False  # whether the library is the copy's own
    score = {"caught": 0, "survived": 0, "unfit": 0}
    for file, tests, function, old, new in every_fault():
        if words and not any(word in file for word in words):
            continue
        text = (COPY / file).read_text()
        key = hashlib.sha256("\0".join((file, tests, old, new, text)).encode()).hexdigest()
        start, result = time.monotonic(), known.get(key, "")
        try:
            faulty = plant(text, file, function, old, new)
            check_names(file, faulty)
        except ValueError as error:
            result = f"unfit: {error}"
        else:
            if result != "caught":
                if is_compiled(file) and not ready:
                    ready = build()
                known[key] = result = outcome(file, faulty, tests)
                KNOWN.write_text(json.dumps(known))
        score[result.partition(":")[0]] += 1
        seconds = time.monotonic() - start
        print(f"{result:9} {seconds:4.0f} s  {file}, {function}: {old!r} -> {new!r}", flush=True)
    print(", ".join(f"{n} {name}" for name, n in score.items()))
    return 0 if score["survived"] == score["unfit"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
