"""How fast the family is beside what it replaces: outputs are checked first, then timed in interleaved rounds."""
