"""The functions' colours in pictures and pages: one place for the library, the studies and the benchmarks."""

# Of a curve on white; Okabe and Ito's palette, which the colour-blind can tell apart.
COLOURS = {"dyisru": "#0072B2", "dyt": "#D55E00", "derf": "#009E73", "linear": "#CC79A7"}
# The same on black.
NIGHT = {"dyisru": "#3F9FE0", "dyt": "#FF8B3D", "derf": "#2CC597", "linear": "#E68FC4"}


def css_colors() -> str:
    """Return the functions' colours as variables of a style sheet, by the reader's choice of light or dark."""
    day = " ".join(f"--{name}: {colour};" for name, colour in COLOURS.items())
    night = " ".join(f"--{name}: {colour};" for name, colour in NIGHT.items())
    return f":root {{ {day} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {night} }} }}\n"
