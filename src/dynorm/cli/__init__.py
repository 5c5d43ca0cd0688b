"""The command line: parses, calls, prints. One file a command, listed in the order of ``--help``."""

from dynorm.cli import convert as convert
from dynorm.cli import explore as explore
from dynorm.cli import fold as fold
from dynorm.cli import inspect as inspect
from dynorm.cli import paper as paper
from dynorm.cli import prove as prove
from dynorm.cli._app import app, main

__all__ = ["app", "main"]
