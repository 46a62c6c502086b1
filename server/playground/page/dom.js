// Elements in one call: element("button", {type: "button"}, "Text").

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** A group of radio buttons or checkboxes; `pick` gets the values that are on. */
export function choices(parent, type, options, isOn, pick) {
  const name = parent.id;
  parent.classList.add("choice");
  parent.replaceChildren(...options.map(([value, text]) => {
    const input = element("input", { type, name, value });
    input.checked = isOn(value);
    input.addEventListener("change", () => pick(checked(parent)));
    return element("label", {}, input, ` ${text}`);
  }));
}

export const checked = (parent) => [...parent.querySelectorAll("input:checked")].map((input) => input.value);
