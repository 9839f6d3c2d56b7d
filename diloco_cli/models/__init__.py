"""What is trained: named models, their tensors, their first weights.

decoder.py       what is trained: named models, their tensors and their first weights
decoder_flax.py  the decoder in Flax: tokens in, nats out
"""
