// The settings dialog: a conversation's system prompt, and the sampling fields of every request.

import { request } from "./api.js";
import { byId, el } from "./dom.js";
import { eventBatches } from "./sse.js";
import { loadSettings, saveSettings } from "./store.js";

// name, label, and what the input takes; an empty input leaves the field to the server
const NUMBERS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: "any" }],
  ["top_p", "Top p", { min: 0, max: 1, step: "any" }],
  ["top_k", "Top k", { min: 0, step: 1 }],
  ["min_p", "Min p", { min: 0, max: 1, step: "any" }],
  ["max_tokens", "Max tokens", { min: 1, step: 1 }],
  ["seed", "Seed", { step: 1 }],
  ["presence_penalty", "Presence penalty", { min: -2, max: 2, step: "any" }],
  ["frequency_penalty", "Frequency penalty", { min: -2, max: 2, step: "any" }],
  ["repetition_penalty", "Repetition penalty", { min: 0.01, max: 2, step: "any" }],
];
const UNSET = { max_tokens: "what is left", seed: "random" };
const TOP_LOGPROBS = 5;

/** The fields that the settings put into a request. */
export function requestFields() {
  const settings = loadSettings();
  const fields = {};
  for (const [name] of NUMBERS) if (typeof settings[name] === "number") fields[name] = settings[name];
  const stop = (settings.stop ?? "").split("\n").filter((line) => line !== "");
  if (stop.length) fields.stop = stop;
  if (settings.logprobs) Object.assign(fields, { logprobs: true, top_logprobs: TOP_LOGPROBS });
  return { ...fields, ...parseExtra(settings.extra ?? "") };
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
  const dialog = byId("settings");
  const form = settingsForm(conversation, dialog);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const values = read(form);
    saveSettings({ ...loadSettings(), ...values });
    if (conversation.system !== form.elements.system.value) {
      conversation.system = form.elements.system.value;
      changed();
    }
    dialog.close();
  });
  dialog.replaceChildren(form);
  dialog.showModal();
  showDefaults(form);
}

/** The dashboard's feed begins with what the server takes for fields that are not sent. */
async function showDefaults(form) {
  const defaults = await serverDefaults();
  for (const [name] of NUMBERS) {
    if (name in defaults) form.elements[name].placeholder = defaults[name] ?? UNSET[name] ?? "default";
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

function settingsForm(conversation, dialog) {
  const settings = loadSettings();
  const area = (name, value, rows) => {
    const node = el("textarea", { name, id: `set-${name}`, rows, spellcheck: "false" });
    node.value = value;
    return node;
  };
  const extra = area("extra", settings.extra ?? "", 2);
  extra.placeholder = '{"chat_template_kwargs": {"enable_thinking": true}}';
  extra.addEventListener("input", () => extra.setCustomValidity(problem(extra.value)));
  const logprobs = el("input", { type: "checkbox", name: "logprobs", checked: settings.logprobs });
  return el("form", { method: "dialog" },
    el("h2", { id: "settings-title" }, "Settings"),
    el("label", { for: "set-system" }, "System prompt of this conversation"),
    area("system", conversation.system, 3),
    el("fieldset", {}, el("legend", {}, "Sampling (empty: the server's default)"),
      el("div", { class: "numbers" }, ...NUMBERS.map(([name, label, limits]) =>
        el("label", {}, label, el("input", {
          type: "number", name, inputmode: "decimal", placeholder: "default",
          value: settings[name], ...limits,
        }))))),
    el("label", { for: "set-stop" }, "Stop at these texts, one per line"),
    area("stop", settings.stop ?? "", 1),
    el("label", { class: "check" }, logprobs, "Token probabilities (shown on hover under “Tokens”)"),
    el("label", { for: "set-extra" }, "Further request fields, JSON"),
    extra,
    el("div", { class: "buttons" },
      el("button", { type: "button", class: "quiet", onclick: () => clear(dialog) }, "Reset"),
      el("span", { class: "grow" }),
      el("button", { type: "button", class: "quiet", onclick: () => dialog.close() }, "Cancel"),
      el("button", { type: "submit", class: "primary" }, "Save")));
}

function problem(text) {
  try {
    parseExtra(text);
    return "";
  } catch (error) {
    return `Not usable: ${error.message}`;
  }
}

function clear(dialog) {
  for (const input of dialog.querySelectorAll("fieldset input, [name=stop], [name=extra]")) {
    input.value = "";
    input.setCustomValidity("");
  }
  dialog.querySelector("[name=logprobs]").checked = false;
}

function read(form) {
  const values = { stop: form.elements.stop.value, extra: form.elements.extra.value };
  values.logprobs = form.elements.logprobs.checked;
  for (const [name] of NUMBERS) {
    const number = form.elements[name].valueAsNumber;
    values[name] = Number.isNaN(number) ? null : number;
  }
  return values;
}
