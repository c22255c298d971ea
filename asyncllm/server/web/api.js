// Requests to the server that served this page. A 401 asks for the key once and tries again.

const KEY = "asyncllm.key";
let askForKey = async () => null; // set by the key dialog: resolves to a key, or null
let asking = null;

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const onKeyWanted = (ask) => (askForKey = ask);

export const key = () => sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY);

export function setKey(value, remember) {
  sessionStorage.removeItem(KEY);
  localStorage.removeItem(KEY);
  if (value) (remember ? localStorage : sessionStorage).setItem(KEY, value);
}

/** fetch, with the key; `body` is sent as JSON. Throws ApiError for what is not a 2xx. */
export async function request(path, { body, signal } = {}) {
  for (;;) {
    const used = key();
    const headers = authorization(used);
    if (body !== undefined) headers["Content-Type"] = "application/json";
    const response = await answerOf(new URL(path, document.baseURI), {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
    });
    if (response.ok) return response;
    const error = await readError(response);
    if (response.status !== 401 || !(await newKey(used, signal))) throw error;
  }
}

/** fetch, in plain words where nobody answers: browsers say "Failed to fetch" and the like. */
export async function answerOf(url, options) {
  try {
    return await fetch(url, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server does not answer. Is it still running?");
  }
}

/** Headers carry bytes: a key with other characters travels as UTF-8. */
const encodeKey = (value) => String.fromCharCode(...new TextEncoder().encode(value));

export const authorization = (used = key()) => (used ? { Authorization: `Bearer ${encodeKey(used)}` } : {});

/** True when there is another key to try. One dialog, however many requests were refused. */
async function newKey(used, signal) {
  if (key() !== used) return true; // somebody was quicker
  asking ??= askForKey(Boolean(used)).finally(() => (asking = null));
  const given = await asking;
  signal?.throwIfAborted();
  return given;
}

async function readError(response) {
  const text = await response.text();
  try {
    const message = JSON.parse(text).error.message;
    return new ApiError(response.status, message);
  } catch {
    return new ApiError(response.status, text.slice(0, 300) || response.statusText);
  }
}
