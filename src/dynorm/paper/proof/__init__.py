"""The theorems of the papers, proven for every number of channels and checked with numbers."""

from dynorm.errors import require_library

# The statements are sympy expressions, so nothing here can be imported without these.
for library in ("mpmath", "sympy"):
    require_library(library, "the proofs", "paper")
