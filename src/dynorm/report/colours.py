"""The functions' colours in the pictures and pages of the library, studies and benchmarks."""

# The colours on white: Okabe and Ito's palette, which the colour-blind can distinguish.
COLOURS = {"dyisru": "#0072B2", "dyt": "#D55E00", "derf": "#009E73", "linear": "#CC79A7"}
# The colours on black.
NIGHT = {"dyisru": "#3F9FE0", "dyt": "#FF8B3D", "derf": "#2CC597", "linear": "#E68FC4"}


def css_colors() -> str:
    """Return the functions' colours as variables of a style sheet, for light and dark pages."""
    day = " ".join(f"--{name}: {colour};" for name, colour in COLOURS.items())
    night = " ".join(f"--{name}: {colour};" for name, colour in NIGHT.items())
    return f":root {{ {day} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {night} }} }}\n"
