"""The theorems of the papers, proven for every number of channels, and checked with numbers."""
