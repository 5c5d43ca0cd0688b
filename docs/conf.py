"""Sphinx: warnings are errors, and a public name without a page fails the build."""

from typing import Any

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

import dynorm

project = "dynorm"
release = dynorm.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = f"dynorm {release}"
myst_enable_extensions = ["dollarmath", "deflist"]
autodoc_typehints = "description"
autodoc_member_order = "bysource"
napoleon_use_rtype = False
exclude_patterns = ["_build"]
# The proofs and the explorer, which `make docs` writes first.
html_extra_path = ["../build/pages"]


def require_all_documented(app: Sphinx, error: Exception | None) -> None:
    """Fail where a name of the package's face, of functional or of theory has no entry."""
    if error is not None or app.builder.name != "html":
        return
    documented = set(app.env.domaindata["py"]["objects"])
    public = {f"dynorm.{name}" for name in dynorm.__all__ if not hasattr(getattr(dynorm, name), "__path__")}
    for module in (dynorm.functional, dynorm.theory):
        public |= {f"{module.__name__}.{name}" for name in module.__all__}
    missing = sorted(name for name in public - documented if name not in {"dynorm.functional", "dynorm.theory"})
    if missing:
        raise ExtensionError(f"public names without documentation: {', '.join(missing)}")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the check."""
    app.connect("build-finished", require_all_documented)
    return {"parallel_read_safe": True}
