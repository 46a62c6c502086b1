// The pictures and videos of a question: chosen, dropped, pasted, or taken from the examples.

import { element } from "./dom.js";

const list = document.getElementById("chosen");
const drop = document.getElementById("drop");
let chosen = [];
let reading = Promise.resolve();
let changed = () => {};
let complain = () => {};

/** {name, type, url}: `url` is a data: URL. */
export const items = () => chosen;

/** Wait for what was chosen and is still being read. */
export const ready = () => reading;

export const parts = () =>
  chosen.map(({ type, url }) =>
    type.startsWith("video/")
      ? { type: "video_url", video_url: { url } }
      : { type: "image_url", image_url: { url } });

export function start(onChange, onProblem) {
  changed = onChange;
  complain = onProblem;
  document.getElementById("file").addEventListener("change", (event) => {
    add([...event.target.files]);
    event.target.value = "";
  });
  for (const name of ["dragenter", "dragover"]) {
    document.addEventListener(name, (event) => { event.preventDefault(); drop.classList.add("over"); });
  }
  for (const name of ["dragleave", "drop"]) {
    document.addEventListener(name, () => drop.classList.remove("over"));
  }
  document.addEventListener("drop", (event) => { event.preventDefault(); add([...event.dataTransfer.files]); });
  document.addEventListener("paste", (event) => { if (event.clipboardData.files.length) add([...event.clipboardData.files]); });
}

export async function showExamples(use) {
  const response = await fetch(new URL("playground/examples.json", new URL(".", location.href)));
  for (const { file, questions } of await response.json()) {
    const source = new URL(`playground/examples/${file}`, new URL(".", location.href));
    const button = element("button", { type: "button", title: questions[0] },
      element("img", { src: source, alt: `Example ${file}`, loading: "lazy" }));
    button.addEventListener("click", () => {
      use(questions);
      reading = take(source, file).catch(() => complain("The example cannot be loaded. Is the server still running?"));
    });
    document.getElementById("examples").append(button);
  }
}

async function take(source, name) {
  const blob = await (await fetch(source)).blob();
  chosen = [];
  await read([new File([blob], name, { type: blob.type })]);
}

function add(files) {
  reading = reading.then(() => read(files));
}

async function read(files) {
  const isMedia = ({ type }) => /^(image|video)\//.test(type);
  for (const file of files.filter(isMedia)) {
    chosen.push({ name: file.name || "pasted", type: file.type, url: await asDataUrl(file) });
  }
  show();
  changed();
  const other = files.find((file) => !isMedia(file));
  if (other) complain(`${other.name || "This file"} is neither a picture nor a video.`);
}

function asDataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function show() {
  list.replaceChildren(...chosen.map((item, index) => {
    const remove = element("button", { type: "button", "aria-label": `Remove ${item.name}` }, "Remove");
    remove.addEventListener("click", () => { chosen.splice(index, 1); show(); changed(); });
    const preview = item.type.startsWith("video/") ? [] : [element("img", { src: item.url, alt: "" })];
    return element("li", {}, ...preview, element("span", {}, item.name), remove);
  }));
}
