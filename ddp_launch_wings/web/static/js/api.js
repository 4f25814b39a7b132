// Calls of the service. The cookie of the session is out of reach of this code; the browser sends it.

let session = null;

export const current = () => session;

export function enter(found) {
  session = found;
}

export class Problem extends Error {
  constructor(status, words) {
    super(words);
    this.status = status;
  }
}

async function call(path, options) {
  let answer;
  try {
    answer = await fetch(path, { credentials: "same-origin", ...options });
  } catch {
    throw new Problem(0, "The service does not answer.");
  }
  const found = answer.headers.get("content-type")?.startsWith("application/json") ? await answer.json() : {};
  if (!answer.ok) throw new Problem(answer.status, found.problem || `The service answers with status ${answer.status}.`);
  return found;
}

export function get(path, query = {}, options = {}) {
  const words = new URLSearchParams(query).toString();
  return call(`api/${path}${words ? "?" : ""}${words}`, options);
}

// Raises a `Problem` if a stream cannot be opened.
export async function probe(path) {
  const stop = new AbortController();
  try {
    const answer = await fetch(`api/${path}`, { credentials: "same-origin", signal: stop.signal });
    if (!answer.ok) throw new Problem(answer.status, (await answer.json()).problem);
  } finally {
    stop.abort();
  }
}

export function post(path, body, options = {}) {
  const headers = { "content-type": "application/json", "x-ddp-csrf": session?.csrf || "" };
  return call(`api/${path}`, { method: "POST", headers, body: JSON.stringify(body), ...options });
}
