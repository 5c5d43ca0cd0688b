"""The command line. The order of the imports is the order of the commands in ``--help``."""

# isort: off
from dynorm.cli.application import app, main
from dynorm.cli import pretrained as pretrained
from dynorm.cli import paper as paper

__all__ = ["app", "main"]
