"""Faults inflicted on a real run, and what they cost. Start with storm.py.

emulator/  Wide-area links in user space
report.py  what did the faults cost? One document for every method, whoever measured it
run.py     what `diloco chaos` does around the run: folder, schedule, record
storm.py   inflicts a fault schedule on a real run
stormy.py  A local run that a fault schedule passes over
"""
