"""docs/deploy.md shows the committed results."""

from benchmarks.deploy import PAGE, renewed


def test_the_page_is_that_of_the_committed_results() -> None:
    assert renewed() == PAGE.read_text("utf-8")
