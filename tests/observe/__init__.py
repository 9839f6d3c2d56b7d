"""The run log, the status document, and how people see them.

documents.py  status documents for tests: whole ones, of which a test says only what matters to it
page/         the page of a run and the report
"""
