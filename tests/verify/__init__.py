"""Long verification programs, each with a short test beside it.

data/        the preparation of text under kills
dst/         a deterministic simulation of the server as it is shipped
durability/  a real server that is killed, cut off its power and given bad disks
foretell/    how well do simulation and plan predict what was measured?
fuzz/        bytes that nobody means, by the million: what a peer may send is refused or means …
guides/      the guides for several hosts, followed to the letter in network namespaces
load/        many clients and one server
model/       a model of the whole protocol in which anything may die at any moment
page/        the page of a very long run, and the pictures in the documentation
poison/      regions that lie
quality/     long tables of what the ways to train reach, on a virtual clock
rebuild/     a model of servers that are lost or set back, and of regions that realign
regions/     a region on many devices and hosts: what its step needs, and whether it survives
results/     turns records of `diloco chaos` into the tables and pictures of docs/results
trainers/    training loops of others: killed again and again, timed, and compared with one region
"""
