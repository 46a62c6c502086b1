"""Which text of a conversation is the query that relevance is measured against.

The rule: the text of the user message that carries the image, else the last user text. No roles,
no system text, no special tokens, no placeholders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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


def turns_of_messages(messages: Iterable[Mapping[str, Any]]) -> Turns:
    """Read the turns of a chat in OpenAI's message format."""
    last = ""
    items: dict[str, list[ItemTurn]] = {}
    for message in messages:
        content = message.get("content")
        parts: list[Any] = [content] if isinstance(content, str) else list(content or ())
        text = "\n".join(text for part in parts if (text := _text_of(part))).strip()
        is_user = message.get("role") == "user"
        if is_user and text:
            last = text
        for part in parts:
            if (modality := _modality_of(part)) is not None:
                items.setdefault(modality, []).append(
                    ItemTurn(text if is_user else "", part.get("retention"))
                )
    return Turns(last, items)


def _text_of(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    return ""


def _modality_of(part: object) -> str | None:
    if not isinstance(part, Mapping):
        return None
    # vLLM also takes parts without a type, recognised by their key: {"image_url": ...}.
    for name in [part["type"]] if "type" in part else part:
        for prefix, modality in _MODALITY_BY_PREFIX.items():
            if str(name).startswith(prefix):
                return modality
    return None


@dataclass(frozen=True, slots=True)
class TurnMarkers:
    """The texts a chat template puts around what the user wrote; empty where it has none."""

    user_start: str = ""
    user_end: str = ""

    @classmethod
    def of_template(cls, tokenizer: Any, chat_template: str | None) -> TurnMarkers:
        """Learn the markers by rendering the chat template once."""
        if not chat_template:
            return cls()
        first, answer, second = "\u0001first\u0001", "\u0001answer\u0001", "\u0001second\u0001"
        for wrap in (lambda text: text, lambda text: [{"type": "text", "text": text}]):
            chat = [
                {"role": "user", "content": wrap(first)},
                {"role": "assistant", "content": wrap(answer)},
                {"role": "user", "content": wrap(second)},
            ]
            try:
                rendered = tokenizer.apply_chat_template(
                    chat,
                    chat_template=chat_template,
                    tokenize=False,
                    add_generation_prompt=True,
                )
            except Exception:
                # A template may refuse a content format in any way it likes.
                continue
            if rendered.count(first) == rendered.count(answer) == rendered.count(second) == 1:
                head, rest = rendered.split(first)
                middle, rest = rest.split(answer)
                between, tail = rest.split(second)
                return cls(
                    user_start=_common_suffix(head, between).strip(),
                    user_end=_common_prefix(middle, tail).strip(),
                )
        return cls()

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
        last_end = text.rfind(self.user_end) if self.user_end else len(text)
        last = self._turn_around(text, last_end if last_end >= 0 else len(text), tokenizer)
        return Turns(last, items)

    def _turn_around(self, text: str, position: int, tokenizer: Any) -> str:
        start = text.rfind(self.user_start, 0, position) if self.user_start else -1
        start = start + len(self.user_start) if start >= 0 else 0
        end = text.find(self.user_end, position) if self.user_end else -1
        turn = text[start : end if end >= 0 else len(text)]
        for special in tokenizer.all_special_tokens:
            turn = turn.replace(special, "")
        return turn.strip()


def _common_prefix(left: str, right: str) -> str:
    length = sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    )
    return left[:length]


def _common_suffix(left: str, right: str) -> str:
    return _common_prefix(left[::-1], right[::-1])[::-1]
