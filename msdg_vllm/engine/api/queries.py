"""Which text of a conversation is the query that relevance is measured against.

The rule: the text of the user message that carries the image, else the last user text. No roles,
no system text, no special tokens, no placeholders.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from msdg_vllm.request import ItemTurn, Turns

_MODALITY_BY_PREFIX = {"image": "image", "input_image": "image", "video": "video"}


@dataclass(slots=True)
class LazyTurns:
    """Turns of a prompt that is read only when a query is taken from it; it names no retention."""

    read: Callable[[], Turns]
    _turns: Turns | None = None

    def item(self, modality: str, index: int) -> ItemTurn:
        return ItemTurn("")

    def query(self, mode: str, modality: str, index: int) -> str:
        if mode == "none":
            return ""
        if self._turns is None:
            self._turns = self.read()
        return self._turns.query(mode, modality, index)


@dataclass(frozen=True, slots=True)
class Joints:
    """What a prompt has between the text parts of one message, with and without an image there.

    The defaults are vLLM's, for chat templates that take a message as one string.
    """

    plain: str = "\n"
    image: str = "\n"


def turns_of_messages(messages: Iterable[Mapping[str, Any]], joints: Joints | None = None) -> Turns:
    """Read the turns of a chat in OpenAI's message format."""
    joints = joints or Joints()
    last = ""
    items: dict[str, list[ItemTurn]] = {}
    for message in messages:
        content = message.get("content")
        parts: list[Any] = [content] if isinstance(content, str) else list(content or ())
        text = _joined(parts, joints)
        is_user = message.get("role") == "user"
        if is_user and text:
            last = text
        for part in parts:
            if (modality := _modality_of(part)) is not None:
                items.setdefault(modality, []).append(
                    ItemTurn(
                        text if is_user else "",
                        part.get("retention"),
                        part.get("max_visual_tokens"),
                        _is_low_detail(part),
                    )
                )
    return Turns(last, items)


def _joined(parts: Iterable[Any], joints: Joints) -> str:
    """The text of a message as the prompt has it: nothing between parts but what is put there."""
    joined, joint = "", joints.plain
    for part in parts:
        if text := _text_of(part):
            joined += (joint if joined else "") + text
            joint = joints.plain
        elif _modality_of(part) is not None:
            joint = joints.image
    return joined.strip()


def _text_of(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    return ""


def _is_low_detail(part: Mapping[str, Any]) -> bool:
    # Beside the image in the Responses API, inside it in chat completions.
    place = part.get("image_url")
    return "low" in (part.get("detail"), place.get("detail") if isinstance(place, Mapping) else "")


def _modality_of(part: object) -> str | None:
    if not isinstance(part, Mapping):
        return None
    # vLLM also takes parts without a type, recognised by their key: {"image_url": ...}.
    for name in [part["type"]] if "type" in part else part:
        for prefix, modality in _MODALITY_BY_PREFIX.items():
            if str(name).startswith(prefix):
                return modality
    return None


_FIRST, _ANSWER, _SECOND = (f"\u0001{word}\u0001" for word in ("first", "answer", "second"))


@dataclass(frozen=True, slots=True)
class TurnMarkers:
    """The texts a chat template puts around and between what the user wrote.

    Empty where it has none.
    """

    user_start: str = ""
    user_end: str = ""
    joints: Joints = Joints()

    @classmethod
    def of_template(
        cls, tokenizer: Any, chat_template: str | None, placeholders: Collection[int] = ()
    ) -> TurnMarkers:
        """Learn the markers by rendering the chat template.

        Args:
            tokenizer: The tokenizer that renders it.
            chat_template: The template; None has no markers.
            placeholders: Token ids of images and videos.
        """
        if not chat_template:
            return cls()

        def render(*chat: Any, **options: Any) -> str:
            roles = ("user", "assistant", "user")
            try:
                rendered = tokenizer.apply_chat_template(
                    [{"role": r, "content": c} for r, c in zip(roles, chat, strict=False)],
                    chat_template=chat_template,
                    tokenize=False,
                    **options,
                )
            except Exception:
                # A template may refuse a content format in any way it likes.
                return ""
            return str(rendered)

        def between(left: str, right: str, rendered: str) -> str | None:
            if rendered.count(left) != 1 or rendered.count(right) != 1:
                return None
            return rendered.partition(left)[2].partition(right)[0]

        def joint(*parts: Any) -> str | None:
            found = between(_FIRST, _SECOND, render([*parts], add_generation_prompt=True))
            return None if found is None else _without_special(found, tokenizer, placeholders)

        texts = [{"type": "text", "text": text} for text in (_FIRST, _SECOND)]
        plain = joint(*texts)
        image = joint(texts[0], {"type": "image"}, texts[1])
        joints = Joints() if plain is None else Joints(plain, plain if image is None else image)
        for wrap in (lambda text: text, lambda text: [{"type": "text", "text": text}]):
            first, answer, second = (wrap(text) for text in (_FIRST, _ANSWER, _SECOND))
            rendered = render(first, answer, second, add_generation_prompt=True)
            middle = between(_FIRST, _ANSWER, rendered)
            start = between(_ANSWER, _SECOND, rendered)
            if middle is None or start is None:
                continue
            # An answer ends as it does at the end of a chat; what comes then opens the next turn.
            answer_end = render(first, answer).partition(_ANSWER)[2]
            start = start.removeprefix(answer_end)
            for special in (tokenizer.eos_token, tokenizer.bos_token):
                start = start.removeprefix(special or "")
            head, tail = rendered.partition(_FIRST)[0], rendered.partition(_SECOND)[2]
            end = _common_prefix(middle, tail)
            return cls(
                user_start=(_common_suffix(head, start) or start).strip(),
                # What ends an answer too ends a turn by itself, whoever speaks next.
                user_end=(_common_prefix(end, answer_end).strip() or end.strip()),
                joints=joints,
            )
        return cls(joints=joints)

    def turns_of_prompt(
        self,
        token_ids: Sequence[int],
        tokenizer: Any,
        placeholders: Mapping[int, str],
    ) -> Turns:
        """Read the turns of a templated prompt, for callers that send no messages.

        Args:
            token_ids: The prompt, one placeholder token per item.
            tokenizer: Its tokenizer.
            placeholders: Modality of each placeholder token id.
        """
        pieces: list[str] = []
        found: list[tuple[str, int]] = []
        start = length = 0
        for position, token_id in enumerate((*token_ids, None)):
            if token_id is None or token_id in placeholders:
                piece = tokenizer.decode(list(token_ids[start:position]))
                pieces.append(piece)
                length += len(piece)
                start = position + 1
                if token_id is not None:
                    found.append((placeholders[token_id], length))
        text = "".join(pieces)
        items: dict[str, list[ItemTurn]] = {}
        for modality, position in found:
            turn = self._turn_around(text, position, tokenizer)
            items.setdefault(modality, []).append(ItemTurn(turn))
        start = text.rfind(self.user_start) if self.user_start else 0
        last = self._turn_around(text, max(start, 0) + len(self.user_start), tokenizer)
        return Turns(last, items)

    def _turn_around(self, text: str, position: int, tokenizer: Any) -> str:
        start = text.rfind(self.user_start, 0, position) if self.user_start else -1
        start = start + len(self.user_start) if start >= 0 else 0
        end = text.find(self.user_end, position) if self.user_end else -1
        turn = text[start : end if end >= 0 else len(text)]
        for special in tokenizer.all_special_tokens:
            turn = turn.replace(special, "")
        return turn.strip()


def _without_special(text: str, tokenizer: Any, placeholders: Collection[int]) -> str:
    """What is left of a text when the tokens of images, and those around them, are taken out."""
    hidden = {*placeholders, *tokenizer.all_special_ids}
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    kept = [token_id for token_id in token_ids if token_id not in hidden]
    return text if kept == token_ids else str(tokenizer.decode(kept))


def _common_prefix(left: str, right: str) -> str:
    length = sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    )
    return left[:length]


def _common_suffix(left: str, right: str) -> str:
    return _common_prefix(left[::-1], right[::-1])[::-1]
