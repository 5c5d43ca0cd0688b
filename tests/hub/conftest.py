"""transformers does not report the models that it loads here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _quiet_transformers() -> Iterator[None]:
    import transformers

    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield
    transformers.logging.set_verbosity(before)
    transformers.logging.enable_progress_bar()
