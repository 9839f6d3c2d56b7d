"""A trained model, wherever it lies: taken out of a run, continued, measured, given away.

    find.py       RUN, DIR or FILE → the model, its weights, what its tokens mean
    export.py     a folder as the Hugging Face Hub has it
    card.py       its README: run, data, tokens, losses
    measure.py    the loss on held-out text, or on files
    harness.py    the tasks of lm-eval

Start with find.py.
"""
