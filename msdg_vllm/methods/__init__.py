"""Methods that select visual tokens before the language model reads them, behind one call.

A method is one file here and one row of `METHODS`:

    class MyMethod(Method):
        def needs(self, encoder):            # what the encoder must hand over, by layer
            return Needs(class_attention=(encoder.last_layer,))

        def select(self, image, budget):     # one image, or one tile of it
            scores = image.per_token(image.signals.class_attention[image.encoder.last_layer])
            return Selection(top_tokens(scores, budget), scores=scores)

The engine captures what the methods of a batch need and nothing else, has each image analysed
(what no question changes) and selected from, and gathers the tokens that are kept. Torch and
`msdg_vllm.core` only: no vLLM here.
"""

from functools import cache
from importlib import import_module

from msdg_vllm.methods.image import (
    PADDING,
    Image,
    Mappable,
    Question,
    Selection,
    Signals,
    top_tokens,
)
from msdg_vllm.methods.method import Method
from msdg_vllm.methods.needs import Encoder, Needs, unmet_need

__all__ = [
    "METHODS",
    "ON_DEMAND",
    "PADDING",
    "Encoder",
    "Image",
    "Mappable",
    "Method",
    "Needs",
    "Question",
    "Selection",
    "Signals",
    "method_named",
    "top_tokens",
    "unmet_need",
]

METHODS = {
    "msdg": "msdg_vllm.methods.msdg:Msdg",
    "random": "msdg_vllm.methods.random:RandomTokens",
    "cls_attention": "msdg_vllm.methods.cls_attention:ClsAttention",
    "visionzip": "msdg_vllm.methods.visionzip:VisionZip",
    "divprune": "msdg_vllm.methods.divprune:DivPrune",
    "prunesid": "msdg_vllm.methods.prunesid:PruneSID",
    "hiprune": "msdg_vllm.methods.hiprune:HiPrune",
    "cdpruner": "msdg_vllm.methods.cdpruner:CDPruner",
    "evocut": "msdg_vllm.methods.evocut:EvoCut",
    "representation_shift": "msdg_vllm.methods.representation_shift:RepresentationShift",
    "dart0": "msdg_vllm.methods.dart0:Dart0",
    "cen_divprune": "msdg_vllm.methods.cen_divprune:CenDivPrune",
    "cen_cdpruner": "msdg_vllm.methods.cen_cdpruner:CenCDPruner",
    "pool": "msdg_vllm.methods.pool:Pool",
    "resize": "msdg_vllm.methods.resize:Resize",
    "resize+msdg": "msdg_vllm.methods.resize:ResizeMsdg",
}
"""Every method by the name that requests use, as "module:Class"; the first is the default."""

ON_DEMAND = ("prunesid", "evocut")
"""Methods that an operator must name before requests may: they hold many times the memory of the
others, or wait for the device."""


@cache
def method_named(name: str) -> Method:
    """Return the one instance of a method of the table."""
    module, _, class_name = METHODS[name].partition(":")
    method = getattr(import_module(module), class_name)()
    assert isinstance(method, Method)
    return method
