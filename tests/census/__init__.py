"""A census of every model type that transformers' AutoModel knows: is it found, masked, pruned and reloaded exactly?"""
