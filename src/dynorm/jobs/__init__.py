"""Complete jobs: ``convert_model`` on any module, and in ``convert.py`` and ``fold.py`` those of the command line."""

from dynorm.jobs.checkpoint import load_pretrained
from dynorm.jobs.inputs import make_batches
from dynorm.jobs.pretrained import Pretrained, encode

__all__ = ["Pretrained", "encode", "load_pretrained", "make_batches"]
