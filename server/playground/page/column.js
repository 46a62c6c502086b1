// One way of answering: the answer as it streams, what was kept of the pictures, and what it took.

import * as api from "./api.js";
import { element } from "./dom.js";
import { Tile } from "./layers.js";
import { showDifference } from "./words.js";

const seconds = (time) => (time === null ? "–" : `${(time / 1000).toFixed(2)} s`);

export class Column {
  constructor(title) {
    this.title = title;
    this.text = "";
    this.tiles = [];
    this.answer = element("p", { class: "answer", "aria-live": "polite" });
    this.pictures = element("div");
    this.numbers = element("table");
    this.section = element("section", { class: "column", "aria-label": title },
      element("h2", {}, title), this.answer, this.pictures, this.numbers);
  }

  /** Send the request and show what comes; `reference` is the column with all tokens. */
  async run(body, { signal, layer, reference }) {
    const start = performance.now();
    let first = null;
    let usage = null;
    let id = null;
    this.answer.classList.add("waiting");
    try {
      for await (const event of api.chat(body, signal)) {
        if (event.id) id = event.id;
        if (event.usage) usage = event.usage;
        if (event.text) {
          first ??= performance.now() - start;
          this.answer.textContent = this.text += event.text;
        }
      }
    } catch (error) {
      this.fail(error);
      throw error;
    } finally {
      this.answer.classList.remove("waiting");
    }
    this.showNumbers(usage, first, performance.now() - start);
    if (!this.text) this.answer.textContent = "(an empty answer)";
    if (reference && reference !== this) showDifference(this.answer, reference.text, this.text);
    if (id) await this.explain(id, layer, signal);
  }

  /** Show pictures as they were sent, where nothing was taken away. */
  showPictures(items) {
    const pictures = items.filter(({ type }) => type.startsWith("image/"));
    this.pictures.classList.toggle("strip", pictures.length > 1);
    this.pictures.replaceChildren(...pictures.map(({ url, name }) =>
      element("figure", { class: "tile" }, element("img", { src: url, alt: name }), element("figcaption"))));
  }

  fail(error) {
    this.answer.classList.add("failed");
    this.answer.textContent = error.name === "AbortError" ? "Stopped." : error.message;
  }

  showNumbers(usage, first, total) {
    const details = usage?.prompt_tokens_details ?? {};
    const rows = [
      ["Visual tokens", details.visual_tokens === undefined ? "–" : `${details.visual_tokens} of ${details.visual_tokens_total}`],
      ["Prompt tokens", usage?.prompt_tokens ?? "–"],
      ["Time to first token", seconds(first)],
      ["Total time", seconds(total)],
    ];
    if (details.cached_tokens) rows.push(["Of the prompt from the cache", details.cached_tokens]);
    this.numbers.replaceChildren(...rows.map(([name, value]) => row(name, value)));
  }

  async explain(id, layer, signal) {
    const { images } = await api.explanation(id, signal);
    for (const tile of images) {
      const name = `Picture ${tile.index + 1}${images.some(({ tile: t }) => t) ? `, tile ${tile.tile + 1}` : ""}`;
      const picture = await api.picture(id, tile, signal).catch(() => null);
      for (const frame of frames(tile)) {
        const shown = new Tile(frame, picture && (await cut(picture, frame)), frame.frame === undefined ? name : `${name}, frame ${frame.frame + 1}`);
        shown.show(layer);
        this.tiles.push(shown);
      }
    }
    const isStrip = this.tiles.length > 1;
    this.pictures.classList.toggle("strip", isStrip);
    this.pictures.replaceChildren(...this.tiles.map(({ figure }) => figure));
    const encoded = images.map((image) => image.encoded).filter((ran) => ran !== undefined);
    if (encoded.length) this.numbers.append(row("Vision encoder ran", encoded.some(Boolean) ? "yes" : "no, the picture was remembered"));
  }

  show(layer) {
    for (const tile of this.tiles) tile.show(layer);
  }
}

const row = (name, value) =>
  element("tr", {}, element("th", { scope: "row" }, name), element("td", {}, String(value)));

/** A video is one grid with its frames below each other: part it into a filmstrip. */
function frames(tile) {
  const count = tile.frames ?? 1;
  if (count === 1) return [tile];
  const [rows, columns] = tile.grid;
  const size = (rows / count) * columns;
  const within = (tokens, first) => tokens?.filter((t) => t >= first && t < first + size).map((t) => t - first);
  return Array.from({ length: count }, (_, frame) => ({
    ...tile,
    frame,
    first: frame / count,
    share: 1 / count,
    grid: [rows / count, columns],
    num_tokens: size,
    kept: within(tile.kept, frame * size),
    sinks: within(tile.sinks, frame * size),
    all_groups: tile.all_groups?.slice(frame * size, (frame + 1) * size),
    scores: tile.scores?.slice(frame * size, (frame + 1) * size),
  }));
}

const cut = (picture, { first = 0, share = 1 }) => share === 1
  ? picture
  : createImageBitmap(picture, 0, Math.round(first * picture.height), picture.width, Math.round(share * picture.height));
