"""What several files show: all statements, proven once."""

import pytest

from dynorm.paper.proof.prove import Report, prove


@pytest.fixture(scope="session")
def report() -> Report:
    return prove()
