"""Questions: asked about a scene, with the one answer that its contents allow."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from benchmarks.quality.scenes import COLORS, HELD_OUT_PAIRS, SHAPES, Item, Scene

T = TypeVar("T")

KINDS = ("presence", "attribute", "counting", "position", "reading", "choice")
FINE_KINDS = (*KINDS, "both")
LETTERS = "ABCD"
# Closer than this, "left of" would be a matter of opinion.
_CLEARLY_APART = 0.1


@dataclass(frozen=True, slots=True)
class Question:
    kind: str
    text: str
    answer: str


def ask(scene: Scene, kind: str, rng: np.random.Generator) -> Question | None:
    """Return one question of `kind`, or None where the scene has no unambiguous one."""
    asked = _ASKERS[kind](scene, rng)
    if asked is None:
        return None
    text, answer = asked
    return Question(kind, text, answer)


def ask_one_of_each(scene: Scene, seed: int = 0, kinds: Sequence[str] = KINDS) -> list[Question]:
    """Return up to one question of every kind; the same arguments give the same questions."""
    rng = np.random.default_rng([scene.seed, 2, seed])
    asked = (ask(scene, kind, rng) for kind in kinds)
    return [question for question in asked if question is not None]


def _pick(rng: np.random.Generator, options: Sequence[T]) -> T:
    return options[int(rng.integers(len(options)))]


def _with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _color_word(rng: np.random.Generator) -> str:
    return "color" if rng.random() < 0.7 else "colour"


def _may_be_asked(scene: Scene, color: str, shape: str) -> bool:
    """Whether a pair may be named: one kept from training only if the scene itself shows it."""
    shown = any((item.color, item.name) == (color, shape) for item in scene.items)
    return shown or (color, shape) not in HELD_OUT_PAIRS


def _presence(scene: Scene, rng: np.random.Generator) -> tuple[str, str] | None:
    form, wanted = rng.random(), rng.random() < 0.5
    if form < 0.15:
        shown = {item.color for item in scene.signs}
        nouns = [f"{color} sign" for color in COLORS if (color in shown) == wanted]
    elif form < 0.35:
        names = {item.name for item in scene.items}
        nouns = [name for name in (*SHAPES, "sign") if (name in names) == wanted]
    else:
        pairs = {(item.color, item.name) for item in scene.shapes}
        if wanted:
            nouns = [f"{color} {shape}" for color, shape in sorted(pairs)]
        else:
            # Half of the absent pairs join a colour and a shape that are both there, apart.
            colors = {color for color, _ in pairs}
            shapes = {shape for _, shape in pairs}
            near = [(c, s) for c in sorted(colors) for s in sorted(shapes)]
            near += [] if rng.random() < 0.5 else [(c, s) for c in COLORS for s in SHAPES]
            nouns = [f"{c} {s}" for c, s in near if (c, s) not in pairs]
            nouns = [noun for noun in nouns if _may_be_asked(scene, *noun.split())]
    if not nouns:
        return None
    noun = _with_article(_pick(rng, nouns))
    text = _pick(
        rng,
        (
            f"Is there {noun}?",
            f"Is there {noun} in the picture?",
            f"Is there {noun} in the image?",
            f"Can you see {noun}?",
        ),
    )
    return text, "yes" if wanted else "no"


def _attribute(scene: Scene, rng: np.random.Generator) -> tuple[str, str] | None:
    options: list[tuple[Item, bool]] = []
    names = Counter(item.name for item in scene.items)
    colors = Counter(item.color for item in scene.shapes)
    options += [(item, True) for item in scene.items if names[item.name] == 1]
    options += [(item, False) for item in scene.shapes if colors[item.color] == 1]
    if not options:
        return None
    item, about_color = _pick(rng, options)
    if about_color:
        word = _color_word(rng)
        text = _pick(
            rng,
            (f"What {word} is the {item.name}?", f"What is the {word} of the {item.name}?"),
        )
        return text, item.color
    text = _pick(
        rng,
        (f"What shape is {item.color}?", f"Which shape is {item.color}?"),
    )
    return text, item.name


def _counting(scene: Scene, rng: np.random.Generator) -> tuple[str, str] | None:
    form = rng.random()
    if form < 0.15:
        noun, number = "shapes", len(scene.shapes)
    elif form < 0.3:
        noun, number = "signs", len(scene.signs)
    else:
        by_color = form < 0.65
        counts = Counter(item.color if by_color else item.name for item in scene.shapes)
        everything = COLORS if by_color else SHAPES
        sizes = sorted({counts[word] for word in everything})
        # Sizes are drawn before what has that size: otherwise nearly every answer would be 1.
        weights = np.array([0.5 if size == 0 else 1.0 for size in sizes])
        number = sizes[int(rng.choice(len(sizes), p=weights / weights.sum()))]
        word = _pick(rng, [word for word in everything if counts[word] == number])
        noun = f"{word} shapes" if by_color else f"{word}{'es' if word == 'cross' else 's'}"
    text = _pick(
        rng,
        (
            f"How many {noun} are there?",
            f"How many {noun} are in the picture?",
            f"How many {noun} can you see?",
        ),
    )
    return text, str(number)


def _phrase(scene: Scene, item: Item, rng: np.random.Generator) -> str | None:
    """Words that mean `item` and nothing else in the scene."""
    alike = [other for other in scene.items if other.name == item.name]
    if len(alike) == 1 and rng.random() < 0.4:
        return item.name
    if sum(other.color == item.color for other in alike) == 1:
        return f"{item.color} {item.name}"
    return None


def _position(scene: Scene, rng: np.random.Generator) -> tuple[str, str] | None:
    for _ in range(8):
        first, second = (scene.items[int(i)] for i in rng.permutation(len(scene.items))[:2])
        names = _phrase(scene, first, rng), _phrase(scene, second, rng)
        across = rng.random() < 0.5
        offset = first.x - second.x if across else first.y - second.y
        if None in names or abs(offset) < _CLEARLY_APART:
            continue
        words = ("left", "right") if across else ("above", "below")
        answer = words[int(offset > 0)]
        one, other = names
        if rng.random() < 0.5:
            relation = "left or right of" if across else "above or below"
            return f"Is the {one} {relation} the {other}?", answer
        word = _pick(rng, words)
        relation = f"to the {word} of" if across else word
        return f"Is the {one} {relation} the {other}?", "yes" if word == answer else "no"
    return None


def _reading(scene: Scene, rng: np.random.Generator) -> tuple[str, str] | None:
    if not scene.signs:
        return None
    sign = _pick(rng, scene.signs)
    name = "sign" if len(scene.signs) == 1 and rng.random() < 0.6 else f"{sign.color} sign"
    text = _pick(
        rng,
        (
            f"What does the {name} say?",
            f"What is written on the {name}?",
            f"Read the {name}.",
        ),
    )
    return text, sign.code


def _choice(scene: Scene, rng: np.random.Generator) -> tuple[str, str] | None:
    """A question with four options, one of them right; the answer is its letter."""
    form = rng.random()
    if form < 0.3:
        pairs = {(item.color, item.name) for item in scene.shapes}
        right = " ".join(_pick(rng, sorted(pairs)))
        absent = [
            f"{color} {shape}"
            for color in COLORS
            for shape in SHAPES
            if (color, shape) not in pairs and _may_be_asked(scene, color, shape)
        ]
        text, wrong = "Which of these is in the picture?", absent
    elif form < 0.8:
        asked = _attribute(scene, rng)
        if asked is None:
            return None
        text, right = asked
        wrong = [word for word in (COLORS if right in COLORS else SHAPES) if word != right]
    else:
        asked = _counting(scene, rng)
        if asked is None:
            return None
        text, right = asked
        wrong = [str(number) for number in range(6) if str(number) != right]
    options = [wrong[int(i)] for i in rng.permutation(len(wrong))[: len(LETTERS) - 1]]
    place = int(rng.integers(len(LETTERS)))
    options.insert(place, right)
    lines = [text] + [f"{letter}. {word}" for letter, word in zip(LETTERS, options, strict=True)]
    lines += ["Answer with the letter."]
    return "\n".join(lines), LETTERS[place]


def _both(scene: Scene, rng: np.random.Generator) -> tuple[str, str] | None:
    """Whether two things are there; if not, one of them is, in either place."""
    there = sorted({(item.color, item.name) for item in scene.items})
    absent = sorted(
        {
            (c, s)
            for c in {color for color, _ in there}
            for s in {name for _, name in there}
            if (c, s) not in there and _may_be_asked(scene, c, s)
        }
    )
    wanted = rng.random() < 0.5
    if len(there) < 2 or not absent:
        return None
    order = rng.permutation(len(there))
    named = [there[int(order[0])], there[int(order[1])] if wanted else _pick(rng, absent)]
    if rng.random() < 0.5:
        named.reverse()
    one, other = (_with_article(" ".join(words)) for words in named)
    return f"Is there {one} and {other}?", "yes" if wanted else "no"


_ASKERS: dict[str, Callable[[Scene, np.random.Generator], tuple[str, str] | None]] = {
    "presence": _presence,
    "attribute": _attribute,
    "counting": _counting,
    "position": _position,
    "reading": _reading,
    "choice": _choice,
    "both": _both,
}
