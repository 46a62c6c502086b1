"""Mini-Gemini: a CLIP tower gives the tokens, a ConvNeXt tower the details they are filled with.

vLLM has no such model; this package holds all of it, for the published MGM-7B and MGM-13B and
their HD variants (Vicuna language models).
"""
