"""Compare the speed of the family with that of the norms, in interleaved rounds after a check of the outputs."""
