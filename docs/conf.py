"""Sphinx: warnings are errors, and a public name without a page fails the build."""

import logging
import re
from html import escape
from types import ModuleType
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.writers.html5 import HTML5Translator

import dynorm

# transformers loads torchao, where it is installed, which reports each CUDA library that does not
# load.
for library in ("torch", "torchao"):
    logging.getLogger(library).setLevel(logging.ERROR)

project = "dynorm"
release = dynorm.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
# Only what says so is Python.
highlight_language = "none"
html_theme = "furo"
html_title = f"dynorm {release}"
html_show_copyright = False
myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3
autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_use_rtype = False
exclude_patterns = ["_build"]
# The proofs and the explorer, which `make docs` writes first.
html_static_path = ["static"]
html_css_files = ["math.css"]
html_math_renderer = "mathml"
html_extra_path = ["../build/pages"]


def require_all_documented(app: Sphinx, error: Exception | None) -> None:
    """Fail if a public name of the package, or of its public modules, has no entry."""
    if error is not None or app.builder.name != "html":
        return
    documented = set(app.env.domaindata["py"]["objects"])
    public = set()
    for name in dynorm.__all__:
        if not isinstance(getattr(dynorm, name), ModuleType):
            public.add(f"dynorm.{name}")
    for module in (dynorm.functional, dynorm.theory, dynorm.layers, dynorm.report):
        for name in module.__all__:
            if name not in dynorm.__all__:
                public.add(f"{module.__name__}.{name}")
    missing = sorted(public - documented)
    if missing:
        raise ExtensionError(f"public names without documentation: {', '.join(missing)}")


def inline_math(self: HTML5Translator, node: nodes.math) -> None:
    """Write a formula as MathML, which browsers show by themselves: the pages load nothing from elsewhere."""
    self.body.append(convert(node.astext()))
    raise nodes.SkipNode


def block_math(self: HTML5Translator, node: nodes.math_block) -> None:
    """Write a formula on its own line, with its equation number at the right."""
    text = node.astext()
    tag = re.search(r"\\tag\{(.*?)\}", text)
    number = f'<span class="tag">({escape(tag.group(1))})</span>' if tag else ""
    boxed = " boxed" if r"\boxed" in text else ""
    # Several lines come as an environment of aligned rows.
    text = re.sub(r"\\(tag|label)\{.*?\}|\\boxed", "", text)
    if r"\\" in text or "&" in text:
        text = rf"\begin{{aligned}}{text}\end{{aligned}}"
    self.body.append(
        f'<div class="equation{boxed}"><div>{convert(text, display="block")}</div>{number}</div>'
    )
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the check."""
    app.connect("build-finished", require_all_documented)
    app.add_html_math_renderer("mathml", (inline_math, None), (block_math, None))
    return {"parallel_read_safe": True}
