// Conversations and settings in this browser. One localStorage key per conversation, so that two
// tabs do not overwrite each other's; per-token probabilities are not kept, they would fill it.

const PREFIX = "asyncllm.chat.";
const SETTINGS = "asyncllm.settings";

/** {id, title, updated, system, messages: [{role, content, ...}]} */
export function newConversation() {
  const id = crypto.getRandomValues(new Uint32Array(3)).join("-"); // randomUUID wants https
  return { id, title: "", updated: Date.now(), system: "", messages: [] };
}

/** The newest first. What cannot be read (another version's, damaged) is left out. */
export function loadConversations() {
  const keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  const found = keys.map((key) => parse(localStorage.getItem(key))).filter(isConversation);
  return found.sort((a, b) => b.updated - a.updated);
}

export function loadConversation(id) {
  const found = parse(localStorage.getItem(PREFIX + id));
  return isConversation(found) ? found : null;
}

/** False when the browser has no room for it. */
export function saveConversation(conversation) {
  const kept = (name, value) => (name === "tokens" ? undefined : value);
  return put(PREFIX + conversation.id, JSON.stringify(conversation, kept));
}

export const deleteConversation = (id) => localStorage.removeItem(PREFIX + id);

export const loadSettings = () => parse(localStorage.getItem(SETTINGS)) ?? {};
export const saveSettings = (settings) => put(SETTINGS, JSON.stringify(settings));

/** Calls `changed(id)` when another tab wrote or deleted a conversation. */
export function onOtherTab(changed) {
  window.addEventListener("storage", ({ key }) => {
    if (key?.startsWith(PREFIX)) changed(key.slice(PREFIX.length));
  });
}

const isConversation = (value) => typeof value?.id === "string" && Array.isArray(value.messages);

function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null; // not ours, or damaged
  }
}

function put(key, text) {
  try {
    localStorage.setItem(key, text);
    return true;
  } catch (error) {
    if (error.name === "QuotaExceededError") return false;
    throw error;
  }
}
