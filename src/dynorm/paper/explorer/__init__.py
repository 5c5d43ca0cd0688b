"""The page to play with: one HTML file that draws LayerNorm, its point-wise rivals and the annealing between them."""

from dynorm.paper.explorer.page import build_page as build_page
from dynorm.paper.explorer.page import save_page as save_page

__all__ = ["build_page", "save_page"]
