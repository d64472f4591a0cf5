// Requests to the server of this page. Paths are relative, so the page works below any prefix.

const TOKEN = "idemgate-token"; // kept in this tab only
let etag = "";
let snapshot = null;

export class Problem extends Error {
  constructor(status, kind, message) {
    super(message);
    this.status = status;
    this.kind = kind;
  }
}

export const setToken = (token) => sessionStorage.setItem(TOKEN, token);

async function send(path, options = {}) {
  const token = sessionStorage.getItem(TOKEN);
  const headers = { ...options.headers, ...(token && { authorization: `Bearer ${token}` }) };
  let answer;
  try {
    answer = await fetch(`api/${path}`, { ...options, headers });
  } catch {
    throw new Problem(0, "Unreachable", "the server of this page does not answer");
  }
  if (answer.ok || answer.status === 304) return answer;
  const { error } = await answer.json().catch(() => ({}));
  throw new Problem(answer.status, error?.kind ?? "Error", error?.message ?? `the server answered ${answer.status}`);
}

export const readVerbs = async () => (await send("verbs")).json();

// The newest snapshot. It is the same object as before if only its time has changed.
export async function readSnapshot() {
  const answer = await send("snapshot", { cache: "no-store", headers: etag ? { "if-none-match": etag } : {} });
  if (answer.status !== 304) {
    etag = answer.headers.get("etag");
    snapshot = await answer.json();
    snapshot.received = performance.now();
  }
  return snapshot;
}

const pathOf = (verb) => `verb/${verb.noun}/${verb.name}`;

export async function ask(verb, given) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(given)) {
    for (const one of Array.isArray(value) ? value : [value]) query.append(name, one);
  }
  const answer = await send(`${pathOf(verb)}?${query}`);
  return answer.headers.get("content-type").startsWith("application/x-ndjson") ? answer.blob() : answer.json();
}

async function post(path, body) {
  const headers = { "content-type": "application/json", "x-idemgate": "1" };
  return (await send(path, { method: "POST", headers, body: JSON.stringify(body) })).json();
}

export const act = (verb, body) => post(pathOf(verb), body);

// The command of a verb with these arguments, as one types it. Payloads are no part of a URL, which others may log.
export const readCommand = ({ noun, name }, given) => post(`command/${noun}/${name}`, { arguments: given });
