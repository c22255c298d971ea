// The settings dialog: a conversation's system prompt, and the sampling fields of every request.

import { eventBatches, request } from "./api.js";
import { byId } from "./dom.js";
import { loadSettings, saveSettings } from "./store.js";

const UNSET = { max_tokens: "what is left", seed: "random" };
const TOP_LOGPROBS = 5;
const dialog = byId("settings");
const form = dialog.querySelector("form");
const fields = form.elements;
const numbers = [...form.querySelectorAll("[type=number]")]; // empty: left to the server

/** The fields that the settings put into a request. */
export function requestFields() {
  const settings = loadSettings();
  const set = numbers.filter(({ name }) => typeof settings[name] === "number");
  const stop = (settings.stop ?? "").split("\n").filter((line) => line !== "");
  return {
    ...Object.fromEntries(set.map(({ name }) => [name, settings[name]])),
    ...(stop.length && { stop }),
    ...(settings.logprobs && { logprobs: true, top_logprobs: TOP_LOGPROBS }),
    ...parseExtra(settings.extra ?? ""),
  };
}

export const chosenModel = () => loadSettings().model;
export const chooseModel = (model) => saveSettings({ ...loadSettings(), model });

/** Throws SyntaxError or TypeError for what is no JSON object. */
function parseExtra(text) {
  if (!text.trim()) return {};
  const value = JSON.parse(text);
  if (typeof value !== "object" || value === null || Array.isArray(value)) {
    throw new TypeError("it must be a JSON object");
  }
  return value;
}

/** Opens the dialog for `conversation`; `changed()` is called when its system prompt changed. */
export function openSettings(conversation, changed) {
  show(loadSettings());
  fields.system.value = conversation.system;
  form.onsubmit = (event) => {
    event.preventDefault(); // nothing is sent: the policy allows no form to be
    saveSettings({ ...loadSettings(), ...read() });
    if (conversation.system !== fields.system.value) {
      conversation.system = fields.system.value;
      changed();
    }
    dialog.close();
  };
  dialog.showModal();
  showDefaults();
}

function show(settings) {
  for (const input of numbers) input.value = settings[input.name] ?? "";
  fields.stop.value = settings.stop ?? "";
  fields.extra.value = settings.extra ?? "";
  fields.logprobs.checked = settings.logprobs ?? false;
  noteProblem();
}

function read() {
  const values = numbers.map(({ name, valueAsNumber: number }) => [name, Number.isNaN(number) ? null : number]);
  const { stop, extra, logprobs } = fields;
  return { ...Object.fromEntries(values), stop: stop.value, extra: extra.value, logprobs: logprobs.checked };
}

function noteProblem() {
  try {
    parseExtra(fields.extra.value);
    fields.extra.setCustomValidity("");
  } catch (error) {
    fields.extra.setCustomValidity(`Not usable: ${error.message}`);
  }
}

fields.extra.addEventListener("input", noteProblem);
byId("settings-reset").addEventListener("click", () => show({}));
byId("settings-cancel").addEventListener("click", () => dialog.close());

/** The dashboard's feed begins with what the server takes for fields that are not sent. */
async function showDefaults() {
  const defaults = await serverDefaults();
  for (const input of numbers) {
    if (input.name in defaults) input.placeholder = defaults[input.name] ?? UNSET[input.name] ?? "default";
  }
}

async function serverDefaults() {
  const controller = new AbortController();
  try {
    const response = await request("dashboard/events", { signal: controller.signal });
    for await (const [event] of eventBatches(response)) return JSON.parse(event).server.sampling ?? {};
  } catch {
    // without an answer the fields say "default"
  } finally {
    controller.abort();
  }
  return {};
}
