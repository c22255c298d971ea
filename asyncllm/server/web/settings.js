// The settings dialog: a conversation's system prompt, and the sampling fields of every request.

import { eventBatches, request } from "./api.js";
import { byId } from "./dom.js";
import { loadSettings, saveSettings } from "./store.js";

const UNSET = { max_tokens: "what is left", seed: "random" };
const TOP_LOGPROBS = 5;
const EMPTY = { checkbox: false, number: NaN };
const dialog = byId("settings");
const { elements } = dialog.querySelector("form");
const { system, extra } = elements;
const kept = [...elements].filter(({ name }) => name && name !== "system");
const numbers = kept.filter(({ type }) => type === "number"); // empty: left to the server

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
  const value = JSON.parse(text.trim() || "{}");
  if (Object(value) !== value || Array.isArray(value)) throw new TypeError("it must be a JSON object");
  return value;
}

/** Opens the dialog for `conversation`; `changed()` is called when its system prompt changed. */
export function openSettings(conversation, changed) {
  show(loadSettings());
  system.value = conversation.system;
  dialog.onclose = () => {
    if (!dialog.returnValue) return;
    const values = kept.map((one) => [one.name, one[valueOf(one)]]);
    saveSettings({ ...loadSettings(), ...Object.fromEntries(values) });
    if (conversation.system === system.value) return;
    conversation.system = system.value;
    changed();
  };
  dialog.returnValue = "";
  dialog.showModal();
  showDefaults();
}

const valueOf = ({ type }) => ({ checkbox: "checked", number: "valueAsNumber" })[type] ?? "value";

function show(settings) {
  for (const one of kept) one[valueOf(one)] = settings[one.name] ?? EMPTY[one.type] ?? "";
  noteProblem();
}

function noteProblem() {
  extra.setCustomValidity("");
  try {
    parseExtra(extra.value);
  } catch (error) {
    extra.setCustomValidity(`Not usable: ${error.message}`);
  }
}

extra.addEventListener("input", noteProblem);
byId("settings-reset").addEventListener("click", () => show({}));

/** The dashboard's feed begins with what the server takes for fields that are not sent. */
async function showDefaults() {
  try {
    for await (const [event] of eventBatches(await request("dashboard/events"))) {
      const { sampling = {} } = JSON.parse(event).server;
      for (const input of numbers.filter(({ name }) => name in sampling)) {
        input.placeholder = sampling[input.name] ?? UNSET[input.name] ?? "default";
      }
      return; // which closes the stream
    }
  } catch {
    // without an answer the fields say "default"
  }
}
