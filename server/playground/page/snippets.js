// The request as code that runs as it is pasted.

const MAX_INLINE = 60_000; // beyond it the code names the file instead of holding it

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

/** Code in `language` for a request; `items` are its pictures as data: URLs, `root` is what was loaded. */
export function snippet(language, request) {
  const base = new URL("v1", new URL(".", location.href)).href;
  return { curl, python, javascript, offline }[language]({ base, ...request });
}

export const LANGUAGES = [
  ["curl", "curl"],
  ["python", "OpenAI, Python"],
  ["javascript", "OpenAI, JavaScript"],
  ["offline", "LLM.chat"],
];

const kind = ({ type }) => (type.startsWith("video/") ? "video_url" : "image_url");
const fits = ({ url }) => url.length <= MAX_INLINE;

/** The messages, with `url` deciding how a picture or video is written. */
function messages(items, question, url) {
  const content = items.map((item) => ({ type: kind(item), [kind(item)]: { url: url(item) } }));
  return [{ role: "user", content: [...content, { type: "text", text: question }] }];
}

/** Code that stands in a value as it is. */
class Code {
  constructor(text) { this.text = text; }
}

/** A value as JSON over several lines, but for `Code` and the words for true, false and null. */
function written(value, words = {}, by = "") {
  if (value instanceof Code) return value.text;
  if (typeof value !== "object" || value === null) return words[value] ?? JSON.stringify(value);
  const isList = Array.isArray(value);
  const entries = Object.entries(value).map(([key, inner]) =>
    `${by}    ${isList ? "" : `${JSON.stringify(key)}: `}${written(inner, words, `${by}    `)}`);
  const [open, close] = isList ? "[]" : "{}";
  return entries.length ? `${open}\n${entries.join(",\n")}\n${by}${close}` : open + close;
}

function curl({ base, model, question, items, fields }) {
  // $(...) reads a file that is too long to stand in the command. The mark is a character of no text.
  const mark = (item) => (fits(item) ? item.url : `data:${item.type};base64,\uE000${item.name}\uE000`);
  const body = JSON.stringify({ model, ...fields, temperature: 0, messages: messages(items, question, mark) }, null, 1);
  const data = body.split("\uE000").map((part, index) =>
    (index % 2 ? `"$(base64 < ${quoted(JSON.parse(`"${part}"`))} | tr -d '\\n')"` : quoted(part))).join("");
  return `printf %s ${data} |
  curl -s ${quoted(`${base}/chat/completions`)} -H 'Content-Type: application/json' \\
    -H "Authorization: Bearer $OPENAI_API_KEY" -d @-`;
}

const PYTHON_WORDS = { true: "True", false: "False", null: "None" };
const PYTHON_IMPORTS = "import base64\nfrom pathlib import Path\n";
const PYTHON_FILE = `

def data_url(path, kind):
    return f"data:{kind};base64," + base64.b64encode(Path(path).read_bytes()).decode()

`;

const inPython = (value, by) => written(value, PYTHON_WORDS, by);

function pythonParts(items, question, by) {
  const url = (item) => (fits(item) ? item.url : new Code(`data_url(${JSON.stringify(item.name)}, "${item.type}")`));
  const text = inPython(messages(items, question, url), by);
  return items.every(fits) ? { imports: "", helper: "", text } : { imports: PYTHON_IMPORTS, helper: PYTHON_FILE, text };
}

function python({ base, model, question, items, fields }) {
  const { imports, helper, text } = pythonParts(items, question, "    ");
  return `${imports}import os

from openai import OpenAI
${helper}
client = OpenAI(base_url=${JSON.stringify(base)}, api_key=os.environ.get("OPENAI_API_KEY") or "none")
answer = client.chat.completions.create(
    model=${JSON.stringify(model)},
    temperature=0,
    messages=${text},
    extra_body=${inPython(fields, "    ")},
)
print(answer.choices[0].message.content)
`;
}

function javascript({ base, model, question, items, fields }) {
  const url = (item) => (fits(item)
    ? item.url
    : new Code(`"data:${item.type};base64," + readFileSync(${JSON.stringify(item.name)}, "base64")`));
  const body = written({ model, ...fields, temperature: 0, messages: messages(items, question, url) });
  return `${items.every(fits) ? "" : 'import { readFileSync } from "node:fs";\n'}import OpenAI from "openai";

const client = new OpenAI({ baseURL: ${JSON.stringify(base)}, apiKey: process.env.OPENAI_API_KEY || "none" });
const answer = await client.chat.completions.create(${body});
console.log(answer.choices[0].message.content);
`;
}

function offline({ root, question, items, fields }) {
  const { imports, helper, text } = pythonParts(items, question, "        ");
  return `${imports}${imports && "\n"}from vllm import LLM, SamplingParams
${helper}
if __name__ == "__main__":
    llm = LLM(${JSON.stringify(root)})
    (output,) = llm.chat(
        ${text},
        SamplingParams(temperature=0, max_tokens=256),
        mm_processor_kwargs=${inPython(fields, "        ")},
    )
    print(output.outputs[0].text)
`;
}
