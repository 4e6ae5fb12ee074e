"""Mixture of experts: the router, and experts of this rank."""
