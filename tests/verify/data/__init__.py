"""The preparation of text under kills.

killed_prepare.py  kills `diloco data prepare` at random moments and compares bytes
"""
