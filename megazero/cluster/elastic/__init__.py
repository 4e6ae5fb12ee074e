"""Elastic runs: the agent of a node, the store that agents share, and its protection from strangers."""
