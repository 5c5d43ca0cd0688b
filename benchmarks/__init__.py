"""Measurements that take long; their results are committed as JSON."""
