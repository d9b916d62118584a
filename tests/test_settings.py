"""Fields of a dataclass with a help text, bounds and choices."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass

import pytest
import torch

from attnfast._utils.checks import InputError
from attnfast._utils.settings import check_settings, setting, with_settings


@with_settings
@dataclass(frozen=True)
class Settings:
    """Settings of a test.

    With a second paragraph.
    """

    size: int = setting(3, "rows of a table", at_least=1)
    large: int = setting(0, "a number of 63 bits", at_least=0, below=2**63)
    share: float = setting(0.5, "share of the rows", at_least=0, below=1)
    free: float = setting(0.0, "any number")
    clip: float = setting(1.0, "largest norm", above=0, at_most=math.inf)
    sigma: float | None = setting(None, "standard deviation", above=0)
    flag: bool = setting(False, "transpose the table")
    kind: str = setting("dense", "form of the table", ("dense", "sparse"))

    def __post_init__(self):
        check_settings(self)


def test_the_docstring_lists_the_fields():
    assert inspect.getdoc(Settings).splitlines()[:7] == [
        "Settings of a test.",
        "",
        "With a second paragraph.",
        "",
        "Args:",
        "    size: rows of a table.",
        "    large: a number of 63 bits.",
    ]


@pytest.mark.parametrize(
    "values",
    [
        {"size": 1, "large": 2**63 - 1, "share": 0, "free": -1e300, "clip": math.inf},
        {"size": 2**31 - 1, "share": 0.999, "sigma": 1e-9, "flag": True, "kind": "sparse"},
        {"sigma": None},
    ],
)
def test_fitting_values_are_kept(values):
    for name, value in values.items():
        assert getattr(Settings(**values), name) == value


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("size", 0, "an integer of at least 1 and below 2**31, got 0"),
        ("size", 2**31, "an integer of at least 1 and below 2**31, got 2147483648"),
        ("size", 1.0, "an integer of at least 1 and below 2**31, got 1.0"),
        ("size", True, "an integer of at least 1 and below 2**31, got True"),
        ("size", None, "an integer of at least 1 and below 2**31, got None"),
        ("large", 2**63, "an integer of at least 0 and below 2**63, got 9223372036854775808"),
        ("share", 1, "a number of at least 0 and below 1, got 1"),
        ("share", math.nan, "a number of at least 0 and below 1, got nan"),
        ("share", "0.5", "a number of at least 0 and below 1, got '0.5'"),
        ("share", torch.ones(2), "a number of at least 0 and below 1, got a Tensor of "),
        ("clip", torch.ones(2), "a number above 0, got a Tensor of "),
        ("clip", "inf", "a number above 0, got 'inf'"),
        ("size", torch.ones(2), "an integer of at least 1 and below 2**31, got a Tensor of "),
        ("free", math.inf, "a number, got inf"),
        ("clip", 0.0, "a number above 0, got 0.0"),
        ("clip", math.nan, "a number above 0, got nan"),
        ("sigma", 0, "a number above 0, got 0"),
        ("sigma", math.inf, "a number above 0, got inf"),
        ("flag", 2, "True or False, got 2"),
        ("flag", None, "True or False, got None"),
        ("kind", "round", "'dense' or 'sparse', got 'round'"),
    ],
)
def test_others_are_refused_in_one_sentence(name, value, expected):
    with pytest.raises(InputError) as error:
        Settings(**{name: value})
    assert str(error.value).startswith(f"{name} must be {expected}")
