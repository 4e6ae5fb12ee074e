"""Pipeline schedules, and the layers of each virtual stage. Pure: no torch."""
