"""Benchmarks behind `helicore bench`: each is a function that returns a Report."""
