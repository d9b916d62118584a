"""Where a fault is planted."""

from pathlib import Path

import pytest
from mutation_points import functions, plant
from mutations import FAULTS

ROOT = Path(__file__).parent.parent

PYTHON = """
LIMIT = 1  # of a step


class Layer:
    @property
    def size(self):
        return (self.rows  # a comment
                + 1)

    def run(self):
        def size(self):
            return self.rows + 1
        return "self.rows + 1"
"""
CXX = """
#define CASES(X) \\
  X(rows + 1)   \\
  X(1)
namespace attnfast {
template <class T>
struct Layer : Base<T> {
  int64_t size() const { return rows /* a comment */
                                + 1; }
};
inline __attribute__((always_inline)) int64_t run(const Layer& x, std::function<void()> f = [] {}) {
  if (x.size()) {
    for (;;) f([&](int i) { return "rows + 1"; });
  }
  return rows + 1;
}
}  // namespace attnfast
"""


def test_functions_are_found_by_name():
    names = {name for name, *_ in functions(PYTHON, "a.py")}
    assert names == {"Layer", "Layer.size", "Layer.run", "Layer.run.size"}
    assert {name for name, *_ in functions(CXX, "a.h")} == {"CASES", "Layer", "size", "run"}


@pytest.mark.parametrize(
    ("file", "function", "pattern", "planted"),
    [
        ("a.py", "Layer.size", "self.rows + 1", "return (0)\n"),
        ("a.py", "Layer.run.size", "self.rows + 1", "return 0\n"),
        ("a.py", "", "LIMIT = 1", "\n0  # of a step"),
        ("a.h", "CASES", "rows + 1", "  X(0)   \\\n"),
        ("a.h", "size", "rows + 1", "{ return 0; }"),
        ("a.h", "run", "rows + 1", "  return 0;\n"),
    ],
)
def test_a_fault_is_planted_in_its_function(file, function, pattern, planted):
    source = PYTHON if file == "a.py" else CXX
    got = plant(source, file, function, pattern, "0")
    assert got.count(planted) == 1
    assert len(got) < len(source)


@pytest.mark.parametrize(
    ("function", "pattern", "message"),
    [
        ("Layer.sizes", "rows", "has no Layer.sizes"),
        ("Layer.size", "self.row", "0 times"),
        ("Layer", "self.rows + 1", "2 times"),
    ],
)
def test_a_place_that_is_not_there_once_is_refused(function, pattern, message):
    with pytest.raises(ValueError, match=message):
        plant(PYTHON, "a.py", function, pattern, "0")


def test_every_fault_can_be_planted():
    for (file, _), faults_of in FAULTS.items():
        source = (ROOT / file).read_text()
        for function, faults in faults_of.items():
            for pattern, fault in faults:
                assert plant(source, file, function, pattern, fault) != source
