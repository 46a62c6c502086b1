// The request as code that runs as it is pasted.

const MAX_INLINE = 60_000; // beyond it the code names the file instead of holding it

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

/** Code in `language` for a request; `items` are its pictures as data: URLs. */
export function snippet(language, { model, question, items, fields }) {
  const base = new URL("v1", new URL(".", location.href)).href;
  return { curl, python, javascript, offline }[language]({ base, model, question, items, fields });
}

export const LANGUAGES = [
  ["curl", "curl"],
  ["python", "OpenAI, Python"],
  ["javascript", "OpenAI, JavaScript"],
  ["offline", "LLM.chat"],
];

const kind = ({ type }) => (type.startsWith("video/") ? "video_url" : "image_url");
const fits = ({ url }) => url.length <= MAX_INLINE;

function messages(items, question, url) {
  const content = items.map((item) => ({ type: kind(item), [kind(item)]: { url: url(item) } }));
  return [{ role: "user", content: [...content, { type: "text", text: question }] }];
}

function curl({ base, model, question, items, fields }) {
  // $(...) reads a file that is too long to stand in the command.
  const mark = (item) => (fits(item) ? item.url : `data:${item.type};base64,@@${item.name}@@`);
  const body = JSON.stringify({ model, ...fields, temperature: 0, messages: messages(items, question, mark) }, null, 1);
  const data = quoted(body).replace(/@@(.*?)@@/g, (_, name) => `'"$(base64 < ${quoted(name)} | tr -d '\\n')"'`);
  return `printf %s ${data} |
  curl -s ${quoted(`${base}/chat/completions`)} -H 'Content-Type: application/json' \\
    -H "Authorization: Bearer $OPENAI_API_KEY" -d @-`;
}

const indented = (text, by) => text.replaceAll("\n", `\n${" ".repeat(by)}`);

const python_json = (value) => JSON.stringify(value, null, 4)
  .replace(/\btrue\b(?=[,\n}\]])/g, "True").replace(/\bfalse\b(?=[,\n}\]])/g, "False").replace(/\bnull\b(?=[,\n}\]])/g, "None");

const PYTHON_IMPORTS = "import base64\nfrom pathlib import Path\n";
const PYTHON_FILE = `

def data_url(path, kind):
    return f"data:{kind};base64," + base64.b64encode(Path(path).read_bytes()).decode()

`;

function inPython(items, question) {
  const url = (item) => (fits(item) ? item.url : `@@${item.name}@@${item.type}@@`);
  const text = python_json(messages(items, question, url))
    .replace(/"@@(.*?)@@(.*?)@@"/g, (_, name, type) => `data_url(${JSON.stringify(name)}, "${type}")`);
  return items.every(fits) ? { imports: "", helper: "", text } : { imports: PYTHON_IMPORTS, helper: PYTHON_FILE, text };
}

function python({ base, model, question, items, fields }) {
  const { imports, helper, text } = inPython(items, question);
  return `${imports}import os

from openai import OpenAI
${helper}
client = OpenAI(base_url=${JSON.stringify(base)}, api_key=os.environ.get("OPENAI_API_KEY") or "none")
answer = client.chat.completions.create(
    model=${JSON.stringify(model)},
    temperature=0,
    messages=${indented(text, 4)},
    extra_body=${indented(python_json(fields), 4)},
)
print(answer.choices[0].message.content)
`;
}

function javascript({ base, model, question, items, fields }) {
  const url = (item) => (fits(item) ? item.url : `@@${item.name}@@${item.type}@@`);
  const body = JSON.stringify({ model, ...fields, temperature: 0, messages: messages(items, question, url) }, null, 2)
    .replace(/"@@(.*?)@@(.*?)@@"/g, (_, name, type) => `"data:${type};base64," + readFileSync(${JSON.stringify(name)}, "base64")`);
  return `${items.every(fits) ? "" : 'import { readFileSync } from "node:fs";\n'}import OpenAI from "openai";

const client = new OpenAI({ baseURL: ${JSON.stringify(base)}, apiKey: process.env.OPENAI_API_KEY || "none" });
const answer = await client.chat.completions.create(${body});
console.log(answer.choices[0].message.content);
`;
}

function offline({ model, question, items, fields }) {
  const { imports, helper, text } = inPython(items, question);
  return `${imports}${imports && "\n"}from vllm import LLM, SamplingParams
${helper}
if __name__ == "__main__":
    llm = LLM(${JSON.stringify(model)})
    (output,) = llm.chat(
        ${indented(text, 8)},
        SamplingParams(temperature=0, max_tokens=256),
        mm_processor_kwargs=${indented(python_json(fields), 8)},
    )
    print(output.outputs[0].text)
`;
}
