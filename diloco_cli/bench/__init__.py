"""Benchmarks, baselines and experiments; nothing of the product imports this but three command
modules, lazily.

    baselines/   Synchronous data parallel, rigid and elastic, as real processes
    commands.py  commands that measure
    data.py      how much of the tokenizers library's speed is left, and how much of a step is …
    figure.py    how does a measured figure stand beside its limit and its goal?
    inner.py     how much of a bare loop's speed is left when a worker also synchronises?
    link.py      how much of a link is left for frames?
    published/   Published tables, repeated cell by cell
    quality/     Held-out loss of many ways to synchronise, with real steps on a virtual clock
    recovery.py  how long does a region stand still when its trainer is killed?
    start.py     how long until the command answers?
    support/     What benchmarks share
    sync.py      what does one synchronisation of a whole model cost, and how much memory does …
    wire.py      how close do the codecs come to the memory, and how few bits are enough?
"""
