"""Regions that lie.

claims_over_days.py  days of claims in seconds: what counts of honest work, and what of lies?
lying_frames.py      headers that say anything, by the hundred thousand: does anybody else notice?
lying_region.py      one region of several lies: what does it cost the held-out loss?
"""
