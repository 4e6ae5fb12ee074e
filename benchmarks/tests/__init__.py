"""Tests of the benchmarks' own arithmetic and of the pages that they write: the second ring."""
