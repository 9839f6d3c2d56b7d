"""A model of the whole protocol in which anything may die at any moment.

Server, agents, trainers, their files and a bad network run on a virtual clock. Training
is symbolic: every inner step is a token of its own, so the model knows exactly which
work each frame, each image and each pile of held work contains. All decisions are taken
by the functions of `diloco_cli.core` that the product uses; the model only adds the
shells around them, the faults, and the checks.

    python -m tests.verify.model.explore --seeds 1000

accounts.py      what the model's server keeps of claims and of the budget
amendments.py    operators of the model: they amend a run over the same bad network, two at …
audit.py         the promises of the protocol, checked while the run goes on and at its end
change_rules.py  what a rule is; and the rules of a run that can change: members, lanes, claims, …
explore.py       tries the protocol on as many unlucky runs as there is patience for
region.py        a region of the model: its folder, its agent, its trainer
rules.py         the protocol with one rule taken away, to see what the rule is for
run_seed.py      one run of the model, from nothing to the end, with all its misfortunes
seeded_run.py    everything that is drawn before a run: its shape, its network, its misfortunes
server.py        the aggregation server of the model: the real ledger and rules, a symbolic …
symbols.py       what stands in for arrays, files and messages
trainer.py       the trainer of the model: the real books, symbolic arrays, one event per step …
virtual_time.py  virtual time, a bad network, and the moments at which a process may die
"""
