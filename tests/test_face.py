"""The names of the package itself."""

from __future__ import annotations

import pytest

import dynorm


def test_dir_shows_the_public_names_only() -> None:
    assert dir(dynorm) == dynorm.__all__
    for name in dynorm.__all__:
        assert hasattr(dynorm, name)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match=r"'dynorm' has no attribute 'calibrate'$"):
        vars(dynorm)["__getattr__"]("calibrate")
