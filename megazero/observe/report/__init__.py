"""report.html of a run's log folder. Imports no torch, so that scripts/report.py starts fast. Begin with `page`."""
