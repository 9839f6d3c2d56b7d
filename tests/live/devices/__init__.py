"""Regions of many devices and of several hosts, in real runs."""
