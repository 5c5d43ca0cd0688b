"""The speed of the family compared with the norms: outputs are checked first, then timed in interleaved rounds."""
