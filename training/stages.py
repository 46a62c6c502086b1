"""The stages of training: what each teaches, for how many steps and how fast.

Colour and shape are not bound to each other when everything is trained at once from scratch, so
training goes in stages, each of which starts where the one before has ended:

1. `words`: the language model alone, on a few tokens that are sums of word embeddings.
2. `grid`: the same with a token per patch, items spread over several of them.
3. `align`: tower and projector alone, until the token of a patch is the sum of its words; the
   tower's early layers see the patches that show something and a few others.
4. `spell`: the same with all layers, the class token included.
5. `glimpses`: everything together on such patches.
6. `pictures`: the same on whole pictures.
7. `gaps`: the language model alone again, nearly always with tokens dropped.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    steps: int
    batch: int
    num_questions: int
    language_rate: float = 0.0
    vision_rate: float = 0.0
    cooldown: float = 0.0  # the part of the stage in which rates fall to nothing


STAGES = (
    Stage("words", 1600, 32, 8, language_rate=1.5e-3),
    Stage("grid", 300, 24, 8, language_rate=1e-3),
    Stage("align", 1500, 32, 0, vision_rate=2e-3),
    Stage("spell", 1500, 32, 0, vision_rate=2e-3),
    Stage("glimpses", 300, 32, 6, language_rate=5e-4, vision_rate=1.5e-3),
    Stage("pictures", 900, 24, 6, language_rate=5e-4, vision_rate=1e-3, cooldown=0.7),
    Stage("gaps", 450, 32, 8, language_rate=5e-4, cooldown=0.8),
)
