"""Complete jobs: those of the command line on transformers' models, and ``convert_model`` on any module."""

from dynorm.jobs.checkpoint import load_pretrained
from dynorm.jobs.inputs import make_batches
from dynorm.jobs.pretrained import Pretrained, encode

__all__ = ["Pretrained", "encode", "load_pretrained", "make_batches"]
