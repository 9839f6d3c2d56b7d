"""A run whose server's disk is lost, or was set back, goes on from copies and its regions.

In: region folders and a copy of the server's folder, or either; out: a server's folder of a new
run that continues the old one. Start with lost_server.py.

    lost_server.py     chooses the newest of every fragment and writes the new run's folder
    region_folders.py  what the folders of regions still hold of a run
"""
