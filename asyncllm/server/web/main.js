// Puts the page together: which conversation is shown, the panels, the keys, the model's name.

import { request } from "./api.js";
import { Chat } from "./chat.js";
import { newConversation } from "./conversation.js";
import { ConversationList } from "./conversation_list.js";
import { Dashboard } from "./dashboard.js";
import { byId, el } from "./dom.js";
import { asText, download, fileButton, quoted } from "./files.js";
import { chooseModel, chosenModel, openSettings } from "./settings.js";
import * as store from "./store.js";

const EXAMPLES = ["What is the capital of France?", "Tell me a story about a fox.", "What is 12 + 30?"];
const CURRENT = "asyncllm.current";
const BOARD = "asyncllm.board"; // whether the dashboard is shown beside the chat
const wide = matchMedia("(min-width: 72rem)"); // as in base.css

const prompt = byId("prompt");
let models = []; // as /v1/models says
let conversations = store.loadConversations();

const chat = new Chat(refresh, () => models.find(({ id }) => id === byId("model").value) ?? {});
const list = new ConversationList({ open, rename, remove, isBusy: (id) => chat.isBusy(id) });
const dashboard = new Dashboard(byId("board"));

// --- conversations ---

function open(id) {
  const found = conversations.find((one) => one.id === id) ?? conversations[0] ?? newConversation();
  if (!conversations.includes(found)) conversations.unshift(found);
  sessionStorage.setItem(CURRENT, found.id);
  chat.show(found);
  closeDrawers();
  refresh();
}

function openNew() {
  const empty = conversations.find((one) => !one.messages.length) ?? newConversation();
  if (!conversations.includes(empty)) conversations.unshift(empty);
  open(empty.id);
  prompt.focus();
}

function remove(id) {
  chat.forget(id);
  store.deleteConversation(id);
  conversations = conversations.filter((one) => one.id !== id);
  if (chat.conversation.id === id) open(conversations[0]?.id);
  else refresh();
}

function rename(id, title) {
  const found = conversations.find((one) => one.id === id);
  found.title = title;
  store.saveConversation(found);
  refresh();
}

function takeImported(name, bytes) {
  const found = store.imported(new TextDecoder().decode(bytes));
  if (!found.every(store.saveConversation)) throw new Error("this browser's storage is full");
  conversations = store.loadConversations();
  open(found[0]?.id);
}

byId("export").addEventListener("click", () => {
  const day = new Date().toISOString().slice(0, 10);
  download(`asyncllm-${day}.json`, store.exported(conversations.filter((one) => one.messages.length)));
});
fileButton("import", "import-file", takeImported);

function openNeighbour(by) {
  const at = conversations.indexOf(chat.conversation) + by;
  if (conversations[at]) open(conversations[at].id);
}

function refresh() {
  list.draw(conversations.filter((one) => one.messages.length), chat.conversation.id);
  document.body.classList.toggle("answering", chat.busy);
  byId("send").setAttribute("aria-label", chat.busy ? "Stop" : "Send");
  byId("welcome").hidden = chat.conversation.messages.length > 0;
}

store.onOtherTab((id) => {
  if (chat.isBusy(id)) return; // this tab writes it
  const fresh = store.loadConversation(id);
  conversations = conversations.filter((one) => one.id !== id);
  if (fresh) conversations.unshift(fresh);
  if (chat.conversation.id === id) open(id);
  else refresh();
});

// --- the message box ---

function submit() {
  if (chat.busy || !prompt.value.trim()) return;
  chat.send(prompt.value);
  prompt.value = "";
  fitPrompt();
}

function fitPrompt() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (chat.busy) chat.stop();
  else submit();
});
prompt.addEventListener("input", fitPrompt);
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
fileButton("attach", "attach-file", (name, bytes) => {
  prompt.value = `${prompt.value && `${prompt.value.trimEnd()}\n\n`}${quoted(name, asText(bytes))}`;
  fitPrompt();
  prompt.focus();
});
byId("examples").append(...EXAMPLES.map((text) =>
  el("li", {}, el("button", { type: "button", onclick: () => chat.busy || chat.send(text) }, text))));

// --- panels: beside the chat where there is room, else drawers over it ---

function setPanel(name, isOpen) {
  document.body.dataset[name] = isOpen ? "open" : "closed";
  byId(`toggle-${name}`).setAttribute("aria-expanded", String(isOpen));
  if (name === "board") dashboard.setVisible(isOpen);
}

function toggle(name) {
  const isOpen = document.body.dataset[name] !== "open";
  if (!wide.matches) closeDrawers();
  setPanel(name, isOpen);
  if (name === "board" && wide.matches) localStorage.setItem(BOARD, isOpen ? "open" : "closed");
  if (isOpen && !wide.matches) byId(name).querySelector("button, [tabindex]")?.focus();
}

function closeDrawers() {
  if (wide.matches) return;
  setPanel("list", false);
  setPanel("board", false);
}

function layOut() {
  setPanel("list", wide.matches);
  setPanel("board", wide.matches && localStorage.getItem(BOARD) !== "closed");
}

wide.addEventListener("change", layOut);
byId("toggle-list").addEventListener("click", () => toggle("list"));
byId("toggle-board").addEventListener("click", () => toggle("board"));
byId("scrim").addEventListener("click", closeDrawers);
byId("new-chat").addEventListener("click", openNew);
byId("open-settings").addEventListener("click", settings);

function settings() {
  openSettings(chat.conversation, () => store.saveConversation(chat.conversation));
}

// --- keys ---

const ALT_KEYS = {
  KeyN: openNew,
  KeyR: () => chat.regenerate(),
  KeyC: () => chat.continueAnswer(),
  KeyE: () => chat.editLast(),
  KeyS: settings,
  KeyD: () => toggle("board"),
  ArrowUp: () => openNeighbour(-1),
  ArrowDown: () => openNeighbour(1),
};

addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]") || event.isComposing) return;
  const action = event.altKey && !event.ctrlKey && !event.metaKey ? ALT_KEYS[event.code] : null;
  const types = event.target.matches("input, textarea, select");
  if (action) action();
  else if (event.key === "Escape") onEscape();
  else if (event.key === "/" && !types && !event.ctrlKey && !event.metaKey) prompt.focus();
  else return;
  event.preventDefault();
});

// What is typed when nothing has the focus is meant for the message box, after a dialog too.
addEventListener("keydown", ({ key, ctrlKey, metaKey, altKey }) => {
  const isText = key.length === 1 && !ctrlKey && !metaKey && !altKey;
  if (isText && document.activeElement === document.body) prompt.focus();
});
for (const dialog of document.querySelectorAll("dialog")) dialog.addEventListener("close", () => prompt.focus());

function onEscape() {
  const isDrawerOpen = !wide.matches && document.body.matches("[data-list=open], [data-board=open]");
  if (isDrawerOpen) closeDrawers();
  else chat.stop();
  prompt.focus();
}

// --- the model ---

async function showModels() {
  const about = byId("welcome-about");
  try {
    const { data } = await (await request("v1/models")).json();
    byId("model").replaceChildren(...data.map(({ id }) => el("option", { selected: id === chosenModel() }, id)));
    byId("model").disabled = data.length < 2;
    models = data;
    describeModel();
    chat.drawGauge();
  } catch (error) {
    byId("welcome-model").textContent = "No model to talk to";
    about.textContent = `The server did not say which model it serves: ${error.message}`;
  }
}

function describeModel() {
  const current = models.find(({ id }) => id === byId("model").value) ?? models[0];
  byId("welcome-model").textContent = `This is ${current.id}`;
  byId("examples").hidden = false;
  const context = current.max_model_len.toLocaleString("en");
  byId("welcome-about").textContent =
    `${context} tokens of context. What you write stays in this browser and on this server. Try:`;
}

byId("model").addEventListener("change", () => {
  chooseModel(byId("model").value);
  describeModel();
  chat.drawGauge();
});

layOut();
open(sessionStorage.getItem(CURRENT));
showModels();
