"""Rehearsal: the same runs, on links and under faults of our choosing."""
