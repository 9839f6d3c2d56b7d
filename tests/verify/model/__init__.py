"""A model of the whole protocol in which anything may die at any moment.

Server, agents, trainers, their files and a bad network run on a virtual clock. Training
is symbolic: every inner step is a token of its own, so the model knows exactly which
work each frame, each image and each pile of held work contains. All decisions are taken
by the functions of `diloco_cli.core` that the product uses; the model only adds the
shells around them, the faults, and the checks.

    python -m tests.verify.model.explore --seeds 1000
"""
