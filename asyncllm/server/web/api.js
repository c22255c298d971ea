// Requests to the server that served this page, and the events of its streams. (EventSource can send
// neither a body nor an API key.) A 401 asks for the key once and tries again.

import { byId, parse } from "./dom.js";

const KEY = "asyncllm.key";
let asking = null;

export const key = () => sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY);

export function setKey(value, remember) {
  sessionStorage.removeItem(KEY);
  localStorage.removeItem(KEY);
  if (value) (remember ? localStorage : sessionStorage).setItem(KEY, value);
}

/** fetch, with the key; `body` is sent as JSON. Throws an Error with `status` for what is not a 2xx. */
export async function request(path, { body, signal } = {}) {
  const sent = body && { method: "POST", body: JSON.stringify(body) };
  for (;;) {
    const used = key();
    const headers = { ...authorization(used), ...(body && { "Content-Type": "application/json" }) };
    const response = await answerOf(new URL(path, document.baseURI), { headers, signal, ...sent });
    if (response.ok) return response;
    const error = readError(response, await response.text());
    if (response.status !== 401 || !(await newKey(used, signal))) throw error;
  }
}

/** fetch, in plain words where nobody answers: browsers say "Failed to fetch" and the like. */
export async function answerOf(url, options) {
  try {
    return await fetch(url, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer. Is it still running?");
  }
}

/** Headers carry bytes: a key with other characters travels as UTF-8. */
export function authorization(used = key()) {
  const bytes = new TextEncoder().encode(used ?? "");
  return bytes.length ? { Authorization: `Bearer ${String.fromCharCode(...bytes)}` } : {};
}

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
    const lines = events.flatMap((event) => event.split("\n")).filter((line) => line.startsWith("data:"));
    if (lines.length) yield lines.map((line) => line.slice(5).trim()); // this server's data have no line breaks
  }
}

function readError({ status, statusText }, text) {
  const { error } = parse(text) ?? {};
  return Object.assign(new Error(error?.message ?? (text.slice(0, 300) || statusText)), { status });
}
