"""Arrays to bytes and back; frames that no encoder writes.

forged_frames.py        frames that nobody's encoder writes, with everything else about them right
golden_frames.py        writes the frame-v1-*.frame that are not there yet: for a new kind, …
independent_decoder.py  a decoder as a stranger would write it from …
numpy_encoders.py       the encoders of the page in plain numpy: block by block, nothing clever
codecs/                 every codec
kernels/                compiled loops against plain numpy
"""
