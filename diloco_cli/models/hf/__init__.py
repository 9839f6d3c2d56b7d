"""Models in the files of the Hugging Face Hub, both ways, without its libraries.

    families.py    tables: config.json ⇄ a model's options, tensors' names ⇄ ours
    read.py        a folder with config.json and safetensors, each tensor read when asked for
    write.py       the same folder from a model and its weights
    bytes.py       the tokenizer.json of a model that reads bytes
    imported.py    `kind: hf`: architecture and first weights from such a folder

Start with families.py.
"""
