"""The command line: it parses, calls and prints. The order of imports is the order of ``--help``."""

# isort: off
from dynorm.cli.application import app, main
from dynorm.cli import pretrained as pretrained
from dynorm.cli import paper as paper

__all__ = ["app", "main"]
