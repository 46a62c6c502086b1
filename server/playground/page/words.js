// What differs between two answers, word by word.

/** Show `text` in `target`: words that `reference` lacks are marked, and those it alone has. */
export function showDifference(target, reference, text) {
  const before = reference.match(/\s*\S+/g) ?? [];
  const after = text.match(/\s*\S+/g) ?? [];
  const same = (i, j) => before[i].trim() === after[j].trim();
  // Longest common subsequence, from the end.
  const length = Array.from({ length: before.length + 1 }, () => new Uint16Array(after.length + 1));
  for (let i = before.length - 1; i >= 0; i--) {
    for (let j = after.length - 1; j >= 0; j--) {
      length[i][j] = same(i, j) ? length[i + 1][j + 1] + 1 : Math.max(length[i + 1][j], length[i][j + 1]);
    }
  }
  const pieces = [];
  const put = (name, word) => {
    const last = pieces.at(-1);
    const text = last && !/^\s/.test(word) ? ` ${word}` : word; // the first word of the other answer
    if (last?.name === name) last.text += text;
    else pieces.push({ name, text });
  };
  let i = 0;
  let j = 0;
  while (i < before.length || j < after.length) {
    if (i < before.length && j < after.length && same(i, j)) { put("span", after[j]); i++; j++; }
    else if (j < after.length && (i === before.length || length[i][j + 1] >= length[i + 1][j])) put("ins", after[j++]);
    else put("del", before[i++]);
  }
  target.replaceChildren(...pieces.map(({ name, text: words }) => {
    const piece = document.createElement(name);
    piece.textContent = words;
    if (name !== "span") piece.title = name === "ins" ? "only here" : "only with all tokens";
    return piece;
  }));
}
