"""Answers: what was said, kept line by line, so that a run that was stopped goes on."""

import hashlib
import json
from pathlib import Path
from threading import Lock
from typing import Any


def key_of(facts: dict[str, Any]) -> str:
    """Return a name for everything that an answer depends on."""
    text = json.dumps(facts, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class Answers:
    """An append-only file of JSON lines, each with a `key`; safe to add to from many threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = Lock()
        self._by_key: dict[str, dict[str, Any]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = 0
        if path.exists():
            for line in path.read_bytes().splitlines(keepends=True):
                # A run that was killed may have left half a line at the end.
                if not line.endswith(b"\n"):
                    break
                record = json.loads(line)
                self._by_key[record["key"]] = record
                whole += len(line)
            with path.open("r+b") as file:
                file.truncate(whole)

    def __len__(self) -> int:
        return len(self._by_key)

    def get(self, key: str) -> dict[str, Any] | None:
        return self._by_key.get(key)

    def add(self, key: str, record: dict[str, Any]) -> None:
        """Keep a record; it is on disk when this returns."""
        record = {"key": key, **record}
        line = json.dumps(record, ensure_ascii=False) + "\n"
        with self._lock, self.path.open("a", encoding="utf-8") as file:
            file.write(line)
            self._by_key[key] = record
