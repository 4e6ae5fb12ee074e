"""A rank's work, planned as integers and plain values: no torch, so that all of it is tested without ranks.

Begin with `layout.topology`, then `schedule.schedules` and `program.program`.
"""
