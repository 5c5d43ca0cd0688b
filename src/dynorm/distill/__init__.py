"""Work on transformers' models: the jobs of the command line."""

from dynorm.distill.pretrained import Pretrained, encode, load_pretrained, make_batches

__all__ = ["Pretrained", "encode", "load_pretrained", "make_batches"]
