"""Run other projects' own tests, plain and with attnfast's replacements, and compare the verdicts.

    make judges JUDGES=<folder of checkouts> [JUDGES_PYTHON=<a Python that has what they import>]

Each folder is a checkout of a project that :data:`JUDGES` names; projects that are not there are
left out. As a pytest plugin, this file replaces every module that attnfast knows at its first call,
and ends a run with 1 if there was none.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from weakref import WeakSet
from xml.etree import ElementTree

#: A project's folder, what of its tests runs, and variables that they need.
JUDGES: dict[str, tuple[str, dict[str, str]]] = {
    "joeynmt": (
        "test/unit/test_search.py test/unit/test_attention.py test/unit/test_decoder.py",
        {},
    ),
    "keras": (
        "keras/src/layers/attention/attention_test.py "
        "keras/src/layers/attention/additive_attention_test.py",
        {"KERAS_BACKEND": "torch"},
    ),
    "OpenNMT-py": ("onmt/tests/test_models.py onmt/tests/test_attention.py", {}),
    "eole": ("eole/tests/test_models.py", {}),
    "coqui-ai-TTS": (
        "tests/tts_tests/test_tacotron2_model.py tests/tts_tests/test_tacotron_model.py "
        "tests/tts_tests/test_tacotron_layers.py",
        {},
    ),
    "speechbrain": (  # its unit tests call no attention that is served; its examples do
        "--doctest-modules speechbrain/nnet/attention.py speechbrain/nnet/RNN.py "
        "speechbrain/decoders/seq2seq.py tests/integration/ASR_seq2seq tests/integration/G2P",
        {},
    ),
}
WRITES = "ATTNFAST_JUDGE"  # the file that a run with replacements writes


# ---- the plugin ---------------------------------------------------------------------------------


class Replacements:
    """Replaces modules at their first call, and counts them by adapter."""

    def __init__(self):
        self.seen: WeakSet = WeakSet()
        self.served, self.skipped = Counter[str](), Counter[str]()
        self.busy = False  # modules that a comparison makes are skipped

    def wrap(self, cls: type) -> None:
        """Replace modules of a class, or of one that extends it, when they are called."""
        own = cls.__call__

        def call(module, *args, **kwargs):
            if not self.busy and module not in self.seen:
                self.seen.add(module)
                self.replace(module)
            return own(module, *args, **kwargs)

        cls.__call__ = call  # type: ignore[method-assign, assignment]

    def replace(self, module) -> None:
        import attnfast
        from attnfast.integrations.registry import adapters_of

        if not adapters_of(module):
            return
        self.busy = True
        try:
            for found in attnfast.replace(module).found:
                if found.adapter is not None:
                    self.seen.add(found.module)
                    name, reason = found.adapter.name, found.skip_reason
                    if not reason:
                        self.served[name] += 1
                    else:  # without its numbers and the configuration
                        short = re.sub(r" by (nan|[\d.e+-]+)", "", reason).partition(",")[0]
                        self.skipped[f"{name} skipped: {short}"] += 1
        finally:
            self.busy = False


def pytest_collection_finish(session) -> None:
    """Begin once all tests are imported, and with them the classes that they call."""
    if WRITES not in os.environ:
        return
    from torch import nn

    session.config.attnfast = made = Replacements()
    made.wrap(nn.Module)
    if "keras" in sys.modules:  # whose layers are built before this call
        made.wrap(sys.modules["keras"].Operation)


def pytest_sessionfinish(session) -> None:
    """Write the counts; end with 1 if nothing was replaced."""
    made = getattr(session.config, "attnfast", None)
    if made is not None:
        counts = {"served": made.served, "skipped": made.skipped}
        Path(os.environ[WRITES]).write_text(json.dumps(counts))
        if not made.served:
            session.exitstatus = 1


# ---- the script ---------------------------------------------------------------------------------


def verdicts(folder: Path, tests: str, variables: dict[str, str], out: Path) -> dict[str, str]:
    """Run a project's tests; return the outcome of each."""
    paths = [str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(paths)}
    python = os.environ.get("JUDGES_PYTHON", sys.executable)
    command = [python, "-m", "pytest", "-q", "-p", "judges", "-p", "no:cacheprovider"]
    report = out / "report.xml"
    done = subprocess.run(
        [*command, f"--junitxml={report}", *tests.split()],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if not report.exists():
        raise RuntimeError(f"{folder.name}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        outcome = {x.tag for x in case} & {"failure", "error", "skipped"}
        found[f"{case.get('classname')}::{case.get('name')}"] = "".join(outcome) or "passed"
    return found


def main(checkouts: Path) -> int:
    """Print a row for each project; return 1 if a verdict differs or nothing was replaced."""
    status = 0
    print(
        "| project | commit | passed, of | with attnfast | modules served |\n|---|---|--:|--:|---|"
    )
    for name, (tests, variables) in JUDGES.items():
        folder = checkouts / name
        if not folder.is_dir():
            continue
        with tempfile.TemporaryDirectory() as scratch:
            plain = verdicts(folder, tests, variables, Path(scratch))
            counts = Path(scratch) / "counts.json"
            served = verdicts(folder, tests, variables | {WRITES: str(counts)}, Path(scratch))
            made = json.loads(counts.read_text())
        commit = subprocess.run(
            ["git", "rev-parse", "--short=8", "HEAD"], cwd=folder, capture_output=True, text=True
        ).stdout.strip()
        passed = [sum(x == "passed" for x in of.values()) for of in (plain, served)]
        of_adapters = ", ".join(f"{n} × {x}" for x, n in made["served"].items()) or "none"
        of_adapters += "".join(f"; {n} × {x}" for x, n in made["skipped"].items())
        print(f"| {name} | {commit} | {passed[0]}, {len(plain)} | {passed[1]} | {of_adapters} |")
        for test in sorted(plain.keys() | served.keys()):
            if plain.get(test) != served.get(test):
                print(f"    {test}: {plain.get(test)}, with attnfast {served.get(test)}")
                status = 1
        status = status if made["served"] else 1
    return status


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
