// What the person chose, in the form, in the link and in the request.

import { checked, choices, element } from "./dom.js";

const SMALLEST = 0.02;
const MARKS = [0.056, 0.111, 0.222, 0.333, 0.5, 1];

const form = document.getElementById("ask");
const slider = document.getElementById("retention");
const methods = document.getElementById("methods");
const queryMode = document.getElementById("query-mode");
const cap = document.getElementById("cap");
const question = document.getElementById("question");

// Equal steps of the slider are equal factors: most of the choice is at the low end.
const place = (retention) => Math.round(100 * (1 - Math.log(retention) / Math.log(SMALLEST)));

function retention() {
  const value = Math.exp(Math.log(SMALLEST) * (1 - slider.value / 100));
  const mark = MARKS.find((near) => place(near) === Number(slider.value));
  return mark ?? Number(value.toFixed(3));
}

export function start(server, onChange) {
  const asked = new URLSearchParams(location.hash.slice(1));
  const known = (name, values, otherwise) => (values.includes(asked.get(name)) ? asked.get(name) : otherwise);
  document.getElementById("retention-marks").replaceChildren(
    ...MARKS.map((mark) => element("option", { value: place(mark) })));
  const wanted = Number(asked.get("retention"));
  slider.value = place(wanted > 0 && wanted <= 1 ? Math.max(wanted, SMALLEST) : 0.111);
  queryMode.replaceChildren(...server.query_modes.map((mode) => element("option", { value: mode }, {
    "image-turn": "the question about the picture",
    "last-turn": "the last question",
    none: "nothing in particular",
  }[mode] ?? mode)));
  [...queryMode.options].forEach((option, index) => { option.value = server.query_modes[index]; });
  queryMode.value = known("query_mode", server.query_modes, server.default_query_mode);
  const picked = (asked.get("methods") ?? server.default_method).split(",");
  choices(methods, "checkbox", server.methods.map((name) => [name, name]),
    (name) => picked.includes(name), changed);
  document.getElementById("cap-label").hidden = !("max_visual_tokens" in server.limits);
  if (/^[1-9]\d*$/.test(asked.get("cap") ?? "")) cap.value = asked.get("cap");
  if (asked.get("question")) question.value = asked.get("question");
  form.addEventListener("input", changed);
  changed();

  function changed() {
    const { retention: kept, methods: names } = current();
    const percent = (100 * kept).toFixed(kept < 0.1 ? 1 : 0);
    document.getElementById("retention-text").textContent = kept === 1 ? "1 (everything)" : `${kept} (${percent} % of the tokens)`;
    slider.setAttribute("aria-valuetext", `${percent} percent of the tokens`);
    document.getElementById("method-text").textContent = names.join(", ");
    onChange();
  }
}

export function current() {
  const names = checked(methods);
  return {
    retention: retention(),
    cap: cap.value ? Number(cap.value) : null,
    queryMode: queryMode.value,
    methods: names.length ? names : [methods.querySelector("input")?.value].filter(Boolean),
    question: question.value.trim(),
  };
}

export function link() {
  const { retention: kept, cap: most, queryMode: mode, methods: names, question: text } = current();
  const settings = { retention: kept, methods: names.join(","), query_mode: mode };
  if (most) settings.cap = most;
  if (text) settings.question = text;
  const url = new URL(location.href);
  url.hash = new URLSearchParams(settings);
  return url.href;
}
