// The page: a picture and a question in, answers with all tokens and with the kept ones out.

import * as api from "./api.js";
import { Column } from "./column.js";
import { choices } from "./dom.js";
import { LAYERS } from "./layers.js";
import * as media from "./media.js";
import * as settings from "./settings.js";
import { LANGUAGES, snippet } from "./snippets.js";

// Outside https there is no crypto.randomUUID.
const newSalt = () => [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16)).join("");
const $ = (id) => document.getElementById(id);
let server = null;
let columns = [];
let layer = "kept";
let language = "curl";
let running = null;
let salt = newSalt(); // pictures of this tab share no cache with what others asked

function problem(text = "") {
  $("problem").textContent = text;
  $("problem").hidden = !text;
}

function askForKey(text = "") {
  $("key-problem").textContent = text;
  $("key-problem").hidden = !text;
  $("key-dialog").showModal();
  return new Promise((resolve) => {
    $("key-dialog").addEventListener("close", () => { api.setKey($("key").value); resolve(); }, { once: true });
  });
}

/** Do what may need a key; ask for it, and again when it was wrong. */
async function withKey(act) {
  for (let wrong = ""; ; wrong = "The server did not take that key.") {
    try {
      return await act();
    } catch (error) {
      if (error.status !== 401) throw error;
      await askForKey(wrong);
    }
  }
}

async function connect() {
  try {
    server = await withKey(api.describe);
  } catch (error) {
    $("server").textContent = "No connection.";
    problem(error.message);
    return;
  }
  $("server").textContent = `${server.model} · ${server.architecture} · msdg-vllm ${server.version}`;
  settings.start(server, showCode);
  await media.showExamples((questions) => { $("question").value = questions[0]; showCode(); $("compare").focus(); });
}

/** What a request says beside model and messages. */
function fields(method) {
  const { retention, cap, queryMode } = settings.current();
  const pruning = {};
  if (method !== server.default_method) pruning.method = method;
  if (queryMode !== server.default_query_mode) pruning.query_mode = queryMode;
  return {
    retention,
    ...(cap ? { max_visual_tokens: cap } : {}),
    ...(Object.keys(pruning).length ? { pruning } : {}),
  };
}

function body(extra) {
  const content = [...media.parts(), { type: "text", text: settings.current().question }];
  return {
    model: server.model, temperature: 0, max_completion_tokens: 256, cache_salt: salt,
    messages: [{ role: "user", content }], ...extra,
  };
}

async function compare(event) {
  event.preventDefault();
  problem();
  if (!server) { await connect(); if (!server) return; }
  await media.ready();
  if (!media.items().length) { problem("Choose a picture first: a file, or one of the examples."); return; }
  const { methods, retention } = settings.current();
  const reference = new Column("All tokens");
  reference.showPictures(media.items());
  columns = [reference, ...methods.map((name) => new Column(methods.length > 1 ? `${name}, keep ${retention}` : `Keep ${retention}`))];
  $("columns").replaceChildren(...columns.map(({ section }) => section));
  $("results").hidden = false;
  running = new AbortController();
  $("compare").disabled = true;
  $("stop").hidden = false;
  const options = { signal: running.signal, layer, reference };
  try {
    for (const [index, column] of columns.entries()) {
      $("busy").textContent = `Asking ${index + 1} of ${columns.length}`;
      const method = methods[index - 1];
      const wishes = index ? fields(method) : { retention: 1 };
      const isExplained = index && server.limits.explain;
      const explained = isExplained ? { ...wishes, pruning: { ...wishes.pruning, explain: true } } : wishes;
      column.show(layer);
      await withKey(() => column.run(body(explained), { ...options, layer }));
    }
  } catch (error) {
    if (error.name !== "AbortError") problem(error.message);
  } finally {
    running = null;
    $("busy").textContent = "";
    $("compare").disabled = false;
    $("stop").hidden = true;
  }
}

function showCode() {
  if (!server) return;
  const { methods, question } = settings.current();
  $("copy-text").textContent = snippet(language, {
    model: server.model, root: server.root, question, items: media.items(), fields: fields(methods[0]),
  });
}

async function copy(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    // Without https the clipboard is closed: the code is selected instead, or the link is shown.
    const target = $("copy-text");
    if (button.id === "link") history.replaceState(null, "", text);
    else getSelection().selectAllChildren(target);
    button.textContent = button.id === "link" ? "It is in the address bar" : "Press Ctrl-C";
  }
  setTimeout(() => { button.textContent = before; }, 2000);
}

media.start(() => { salt = newSalt(); problem(); showCode(); }, problem);
choices($("layers"), "radio", LAYERS, (name) => name === layer, ([name]) => {
  layer = name;
  for (const column of columns) column.show(layer);
});
choices($("copy-tabs"), "radio", LANGUAGES, (name) => name === language, ([name]) => { language = name; showCode(); });
$("ask").addEventListener("submit", compare);
$("stop").addEventListener("click", () => running?.abort());
$("link").addEventListener("click", (event) => copy(settings.link(), event.target));
$("copy-button").addEventListener("click", (event) => copy($("copy-text").textContent, event.target));
connect();
