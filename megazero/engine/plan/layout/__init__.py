"""Layouts: axes of the mesh, each rank's part of every parameter, ZeRO's policy. Pure: no torch."""
