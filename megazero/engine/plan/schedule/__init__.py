"""Pipeline schedules. Pure: no torch."""
