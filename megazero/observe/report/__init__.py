"""Curves and pages made of a run's log folder, for people: several runs beside each other, and report.html.

Imports `plan`, `config` and what is below, no torch; so a report takes no time to start. Begin with `page`.
"""
