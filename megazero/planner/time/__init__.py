"""Seconds of a step: devices, networks, operations, programs played together."""
