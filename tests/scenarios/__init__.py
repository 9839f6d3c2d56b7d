"""Stories in plain words, played on a virtual clock with the functions of the core.

harness.py  where the stories are played: a server, some regions, and a clock that only we turn
"""
