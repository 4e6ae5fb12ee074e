"""Layouts: axes of the mesh, the part of every parameter that a rank has, ZeRO's policy. Pure: no torch."""
