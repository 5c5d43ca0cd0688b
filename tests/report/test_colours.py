"""Every function has a colour for the day and one for the night."""

from __future__ import annotations

from dynorm.family import FAMILY
from dynorm.report.colours import COLOURS, NIGHT, css_colors


def test_every_function_has_its_colours() -> None:
    assert set(COLOURS) == set(NIGHT) == set(FAMILY)
    style = css_colors()
    day, night = style.split("@media (prefers-color-scheme: dark)")
    for name in FAMILY:
        assert f"--{name}: {COLOURS[name]};" in day
        assert f"--{name}: {NIGHT[name]};" in night
