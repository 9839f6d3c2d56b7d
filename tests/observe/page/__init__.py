"""The page of a run and the report: as text, and in a real browser.

browser.py     Chromium without a window, and what is wrong with a page it shows
played_run.py  a server as a process, and regions that talk to it without training
"""
