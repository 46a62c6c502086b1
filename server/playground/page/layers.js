// The picture that the encoder saw, with what was decided about each of its patches on top.

export const LAYERS = [
  ["kept", "Kept patches"],
  ["groups", "Groups"],
  ["scores", "Scores"],
  ["sinks", "Sinks"],
  ["none", "Picture only"],
];

const CELL = 16;

/** Ranks of scores, 1 for the highest. */
function ranks(scores) {
  const order = [...scores.keys()].sort((a, b) => scores[b] - scores[a]);
  const rank = new Array(scores.length);
  order.forEach((token, place) => { rank[token] = place + 1; });
  return rank;
}

export class Tile {
  /** @param {object} tile a tile of an explanation @param {ImageBitmap} picture @param {string} name */
  constructor(tile, picture, name) {
    this.tile = tile;
    this.picture = picture;
    this.kept = new Set(tile.kept);
    this.sinks = new Set(tile.sinks ?? []);
    this.rank = tile.scores ? ranks(tile.scores) : null;
    this.layer = "kept";
    this.cursor = -1;
    const [rows, columns] = tile.grid;
    this.canvas = document.createElement("canvas");
    this.canvas.width = columns * CELL;
    this.canvas.height = rows * CELL;
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label",
      `${name}: ${tile.kept.length} of ${tile.num_tokens} patches kept. Arrow keys go from patch to patch.`);
    this.caption = document.createElement("figcaption");
    this.caption.setAttribute("aria-live", "polite");
    this.figure = document.createElement("figure");
    this.figure.className = "tile";
    this.figure.append(this.canvas, this.caption);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => this.moveTo(-1));
    this.canvas.addEventListener("keydown", (event) => this.step(event));
    this.draw();
  }

  show(layer) {
    this.layer = layer;
    this.draw();
  }

  point(event) {
    const [rows, columns] = this.tile.grid;
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor(((event.clientX - box.left) / box.width) * columns);
    const row = Math.floor(((event.clientY - box.top) / box.height) * rows);
    if (row >= 0 && row < rows && column >= 0 && column < columns) this.moveTo(row * columns + column);
  }

  step(event) {
    const columns = this.tile.grid[1];
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
    if (!by) return;
    event.preventDefault();
    const next = this.cursor < 0 ? 0 : this.cursor + by;
    if (next >= 0 && next < this.tile.num_tokens) this.moveTo(next);
  }

  moveTo(token) {
    if (token === this.cursor) return;
    this.cursor = token;
    this.caption.textContent = token < 0 ? "" : this.words(token);
    this.draw();
  }

  words(token) {
    const { grid, all_groups: groups, scores } = this.tile;
    const place = `row ${Math.floor(token / grid[1]) + 1}, column ${(token % grid[1]) + 1}`;
    const said = [place, this.kept.has(token) ? "kept" : "discarded"];
    if (this.sinks.has(token)) said.push("sink");
    if (groups && groups[token] >= 0) said.push(`group ${groups[token]}`);
    if (scores) said.push(`score ${scores[token].toPrecision(3)}`, `rank ${this.rank[token]}`);
    return said.join(" · ");
  }

  draw() {
    const context = this.canvas.getContext("2d");
    const { width, height } = this.canvas;
    context.globalAlpha = 1;
    if (this.picture) context.drawImage(this.picture, 0, 0, width, height);
    else { context.fillStyle = "steelblue"; context.fillRect(0, 0, width, height); }
    const paint = this.painter();
    for (let token = 0; token < this.tile.num_tokens; token++) {
      const [colour, alpha] = paint(token);
      if (alpha) this.fill(context, token, colour, alpha);
    }
    if (this.cursor >= 0) {
      const [x, y] = this.at(this.cursor);
      context.globalAlpha = 1;
      context.lineWidth = 3;
      context.strokeStyle = "white";
      context.strokeRect(x + 1, y + 1, CELL - 2, CELL - 2);
      context.lineWidth = 1.5;
      context.strokeStyle = "black";
      context.strokeRect(x + 1, y + 1, CELL - 2, CELL - 2);
    }
  }

  painter() {
    const { all_groups: groups, scores, num_tokens: count } = this.tile;
    const fade = ["rgb(225 228 233)", 0.82];
    if (this.layer === "kept") return (token) => (this.kept.has(token) ? ["", 0] : fade);
    if (this.layer === "groups" && groups) {
      return (token) => groups[token] < 0
        ? ["black", 0.55]
        : [`hsl(${(groups[token] * 137.5) % 360} 75% 50%)`, this.kept.has(token) ? 0.75 : 0.35];
    }
    if (this.layer === "scores" && scores) {
      return (token) => [`hsl(${50 + 200 * ((this.rank[token] - 1) / Math.max(count - 1, 1))} 85% 50%)`, 0.6];
    }
    if (this.layer === "sinks") return (token) => (this.sinks.has(token) ? ["red", 0.75] : ["", 0]);
    return () => ["", 0];
  }

  at(token) {
    const columns = this.tile.grid[1];
    return [(token % columns) * CELL, Math.floor(token / columns) * CELL];
  }

  fill(context, token, colour, alpha) {
    context.globalAlpha = alpha;
    context.fillStyle = colour;
    context.fillRect(...this.at(token), CELL, CELL);
  }
}
