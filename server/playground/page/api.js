// The public routes of the server, and nothing else.

const base = new URL(".", location.href); // works behind a path prefix too
const KEY = "msdg-api-key";

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export const setKey = (key) => sessionStorage.setItem(KEY, key);

async function call(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(new URL(path, base), { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer. Is it still running?", 0);
  }
  if (!response.ok) throw new ApiError(await reason(response), response.status);
  return response;
}

async function reason(response) {
  const text = await response.text();
  try {
    const { error, message } = JSON.parse(text);
    const said = error?.message ?? message ?? error;
    if (typeof said === "string") return said;
  } catch {
    // not JSON: a proxy's page, say
  }
  const retry = response.headers.get("Retry-After");
  if (response.status === 503) {
    return `The server is busy${retry ? `; try again in ${retry} s` : "; try again in a moment"}.`;
  }
  if (response.status === 413) return "The picture is larger than this server takes.";
  return `The server answered ${response.status} ${response.statusText}`.trim() + ".";
}

/** What the server is and can do; `root` is what its model was loaded from. */
export async function describe() {
  const server = await (await call("v1/pruning")).json();
  const { data } = await (await call("v1/models")).json();
  return { ...server, root: data.find(({ id }) => id === server.model)?.root ?? server.model };
}

export const explanation = async (id, signal) => (await call(`v1/pruning/${id}`, { signal })).json();

export async function picture(id, tile, signal) {
  const query = new URLSearchParams({ index: tile.index, tile: tile.tile });
  const response = await call(`v1/pruning/${id}/picture.png?${query}`, { signal });
  return createImageBitmap(await response.blob());
}

/** Stream a chat; yields {text}, {id} and {usage} as they come. */
export async function* chat(body, signal) {
  const response = await call("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  const lines = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await lines.read();
    if (done) return;
    const parts = (rest + value).split("\n");
    rest = parts.pop();
    for (const line of parts) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const chunk = JSON.parse(line.slice(6));
      if (chunk.error) throw new ApiError(chunk.error.message ?? String(chunk.error), chunk.error.code ?? 500);
      if (chunk.pruning) yield { id: chunk.pruning.id };
      const text = chunk.choices?.[0]?.delta?.content;
      if (text) yield { text };
      if (chunk.usage) yield { usage: chunk.usage };
    }
  }
}
