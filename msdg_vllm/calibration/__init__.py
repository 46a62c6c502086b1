"""Calibration: from a checkpoint and a folder of images to a profile that can be trusted.

    msdg-vllm calibrate MODEL --images DIR --masks COCO.json -o profile.json --report DIR

Every image goes through the vision tower once and leaves a few kilobytes of statistics (`looking`).
From those of all images follow the sinks (`sink_stage`) and the saliency window (`window`). A
second look at some images measures what the profile keeps of them (`checking`). What was found is
said in words (`findings`), written as a profile (`writing`) and as one HTML page (`report`).

Torch, numpy, Pillow and the method itself; only `loading` knows transformers, and nothing vLLM.
"""
