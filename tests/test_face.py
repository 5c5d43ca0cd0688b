"""The names of the package itself."""

from __future__ import annotations

import re

import pytest

import dynorm


def test_dir_shows_the_public_names_only() -> None:
    assert dir(dynorm) == dynorm.__all__
    for name in dynorm.__all__:
        assert hasattr(dynorm, name)


VERBS = [name for name in dynorm.__all__ if name.endswith("_")]


# The room of that name is there instead.
@pytest.mark.parametrize("verb", sorted({*VERBS} - {"fold_"}))
def test_a_verb_without_its_underscore_is_named(verb: str) -> None:
    with pytest.raises(AttributeError, match=rf"call dynorm\.{verb}"):
        getattr(dynorm, verb.removesuffix("_"))


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("ModelError", "dynorm.errors.ModelError"),
        ("AnnealedDyT", "dynorm.layers.AnnealedDyT"),
        ("FoldReport", "dynorm.report.FoldReport"),
    ],
)
def test_a_name_of_a_module_says_where_it_is(name: str, place: str) -> None:
    with pytest.raises(AttributeError, match=f"it is {re.escape(place)}"):
        getattr(dynorm, name)


def test_an_unknown_name_has_no_advice() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        vars(dynorm)["__getattr__"]("nothing")
