// Requests to the server that served this page, and the events of its streams. (EventSource can send
// neither a body nor an API key.) A 401 asks for the key once and tries again.

import { byId } from "./dom.js";

const KEY = "asyncllm.key";
let asking = null;

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const key = () => sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY);

export function setKey(value, remember) {
  sessionStorage.removeItem(KEY);
  localStorage.removeItem(KEY);
  if (value) (remember ? localStorage : sessionStorage).setItem(KEY, value);
}

/** fetch, with the key; `body` is sent as JSON. Throws ApiError for what is not a 2xx. */
export async function request(path, { body, signal } = {}) {
  const sent = body && { method: "POST", body: JSON.stringify(body) };
  for (;;) {
    const used = key();
    const headers = { ...authorization(used), ...(body && { "Content-Type": "application/json" }) };
    const response = await answerOf(new URL(path, document.baseURI), { headers, signal, ...sent });
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
  if (!byId("key-dialog")) return false; // the page of the API has a field of its own
  asking ??= askForKey(Boolean(used)).finally(() => (asking = null));
  const isGiven = await asking;
  signal?.throwIfAborted();
  return isGiven;
}

/** Resolves true once a key was given, false when the dialog was closed without. */
function askForKey(wasRefused) {
  const dialog = byId("key-dialog");
  dialog.querySelector("form").reset();
  byId("key-why").textContent = wasRefused ? "The server did not accept this key." : "This server asks for a key.";
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.onclose = () => {
      if (dialog.returnValue) setKey(byId("key").value, byId("key-remember").checked);
      resolve(Boolean(dialog.returnValue));
    };
  });
}

/** The body's text as it comes. Leaving the loop closes the connection. */
export async function* textParts(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (let part; !(part = await reader.read()).done; ) yield part.value;
  } catch (error) {
    throw error.name === "AbortError" ? error : new Error("The connection to the server was lost.");
  } finally {
    reader.cancel().catch(() => {}); // already closed or aborted: nothing is left to release
  }
}

/** Batches of event data, as they arrive. */
export async function* eventBatches(response) {
  let rest = "";
  for await (const part of textParts(response)) {
    const events = (rest + part.replaceAll("\r", "")).split("\n\n");
    rest = events.pop();
    const found = events.map(dataOf).filter(Boolean);
    if (found.length) yield found;
  }
}

function dataOf(event) {
  const lines = event.split("\n").filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).trim()).join("\n");
}

async function readError(response) {
  const text = await response.text();
  try {
    return new ApiError(response.status, JSON.parse(text).error.message);
  } catch {
    return new ApiError(response.status, text.slice(0, 300) || response.statusText);
  }
}
