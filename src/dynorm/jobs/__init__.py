"""Work on transformers' models: the jobs of the command line."""

from dynorm.jobs.checkpoint import Pretrained, encode, load_pretrained, make_batches

__all__ = ["Pretrained", "encode", "load_pretrained", "make_batches"]
