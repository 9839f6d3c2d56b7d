"""Turns records of `diloco chaos` into the tables and pictures of docs/results."""
