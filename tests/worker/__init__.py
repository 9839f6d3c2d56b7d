"""A region's agent and its trainer.

fake_server.py  a server in this process: answers an agent from memory, as the real one would …
agent/          the agent, against a server in memory
engines/        the framework under a trainer
hosts/          a region of several hosts: who may take part, and that all compute as one
trainer/        the trainer, its agent and server played by the test
"""
