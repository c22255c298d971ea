// Puts the page together: which conversation is shown, the panels, the keys, the model's name.

import { request } from "./api.js";
import { Chat } from "./chat.js";
import { drawGauge } from "./context_gauge.js";
import { newConversation } from "./conversation.js";
import { ConversationList } from "./conversation_list.js";
import { Dashboard } from "./dashboard.js";
import { byId, el, enterSends, onSubmit, setPanel, wide } from "./dom.js";
import { asText, download, fileButton, quoted } from "./files.js";
import { chooseModel, chosenModel, openSettings } from "./settings.js";
import * as store from "./store.js";

const CURRENT = "asyncllm.current";
const BOARD = "asyncllm.board"; // whether the dashboard is shown beside the chat

const prompt = byId("prompt");
let models = []; // as /v1/models says
let conversations = store.loadConversations();

const model = () => models.find(({ id }) => id === byId("model").value) ?? {};
const chat = new Chat(refresh, model);
const list = new ConversationList({ open, rename, remove, isBusy: (id) => chat.isBusy(id) });
new Dashboard(byId("board"));

const on = (id, event, act) => byId(id).addEventListener(event, act);

// --- conversations ---

const withId = (id) => conversations.find((one) => one.id === id);

function open(id) {
  const found = withId(id) ?? conversations[0] ?? newConversation();
  if (!conversations.includes(found)) conversations.unshift(found);
  sessionStorage.setItem(CURRENT, found.id);
  chat.show(found);
  closeDrawers();
  refresh();
}

function openNew() {
  if (conversations.every((one) => one.messages.length)) conversations.unshift(newConversation());
  open(conversations.find((one) => !one.messages.length).id);
  prompt.focus();
}

function remove(id) {
  chat.forget(id);
  store.deleteConversation(id);
  replace(id);
}

/** Shows conversation `id` as it is stored, or no more. */
function replace(id, fresh) {
  conversations = conversations.filter((one) => one.id !== id);
  if (fresh) conversations.unshift(fresh);
  if (chat.conversation.id === id) open(id);
  else refresh();
}

function rename(id, title) {
  store.saveConversation(Object.assign(withId(id), { title }));
  refresh();
}

fileButton("import", (name, bytes) => {
  const found = store.imported(new TextDecoder().decode(bytes));
  if (!found.every(store.saveConversation)) throw new Error("this browser's storage is full");
  conversations = store.loadConversations();
  open(found[0]?.id);
});

on("export", "click", () => {
  const day = new Date().toISOString().slice(0, 10);
  download(`asyncllm-${day}.json`, store.exported(conversations.filter((one) => one.messages.length)));
});

function openNeighbour(by) {
  const next = conversations[conversations.indexOf(chat.conversation) + by];
  if (next) open(next.id);
}

function refresh() {
  list.draw(conversations.filter((one) => one.messages.length), chat.conversation.id);
  document.body.classList.toggle("answering", chat.isBusy());
  byId("send").setAttribute("aria-label", chat.isBusy() ? "Stop" : "Send");
  byId("welcome").hidden = chat.conversation.messages.length > 0;
}

store.onOtherTab((id) => chat.isBusy(id) || replace(id, store.loadConversation(id))); // this tab writes a busy one

// --- the message box ---

function submit() {
  if (chat.isBusy() || !prompt.value.trim()) return;
  chat.send(prompt.value);
  setPrompt("");
}

function setPrompt(text) {
  prompt.value = text;
  fitPrompt();
}

function fitPrompt() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}

// While an answer is written the button stops it; Enter does nothing.
onSubmit(byId("composer"), ({ submitter }) => (chat.isBusy() && submitter ? chat.stop() : submit()));
enterSends(prompt);
prompt.addEventListener("input", fitPrompt);
fileButton("attach", (name, bytes) => {
  setPrompt(`${prompt.value && `${prompt.value.trimEnd()}\n\n`}${quoted(name, asText(bytes))}`);
  prompt.focus();
});
on("examples", "click", ({ target }) => target.matches("button") && chat.send(target.textContent));

// --- panels: beside the chat where there is room, else drawers over it ---

function toggle(name) {
  const isOpen = document.body.dataset[name] !== "open";
  closeDrawers();
  setPanel(name, isOpen);
  if (!wide.matches && isOpen) byId(name).querySelector("button, [tabindex]")?.focus();
  if (wide.matches && name === "board") localStorage.setItem(BOARD, isOpen ? "open" : "closed");
}

function closeDrawers() {
  if (!wide.matches) layOut();
}

function layOut() {
  setPanel("list", wide.matches);
  setPanel("board", wide.matches && localStorage.getItem(BOARD) !== "closed");
}

wide.addEventListener("change", layOut);
on("toggle-list", "click", () => toggle("list"));
on("toggle-board", "click", () => toggle("board"));
on("scrim", "click", closeDrawers);
on("new-chat", "click", openNew);
on("open-settings", "click", () => openSettings(chat.conversation, () => store.saveConversation(chat.conversation)));

const NEIGHBOURS = { ArrowUp: -1, ArrowDown: 1 };

addEventListener("keydown", (event) => {
  const { key, code, altKey, ctrlKey, metaKey, target } = event;
  const isCommand = ctrlKey || metaKey;
  if (event.isComposing || document.querySelector("dialog[open]")) return;
  // A button names its key; of several, the last message's is meant.
  const named = document.querySelectorAll(`[aria-keyshortcuts="Alt+${code.replace("Key", "")}"]`);
  if (altKey && !isCommand && named.length) [...named].at(-1).click();
  else if (altKey && !isCommand && NEIGHBOURS[key]) openNeighbour(NEIGHBOURS[key]);
  else if (key === "Escape") onEscape();
  else if (key === "/" && !isCommand && !target.matches("input, textarea, select")) prompt.focus();
  else {
    // What is typed when nothing has the focus is meant for the message box, after a dialog too.
    if (key.length === 1 && !isCommand && !altKey && document.activeElement === document.body) prompt.focus();
    return;
  }
  event.preventDefault();
});

for (const dialog of document.querySelectorAll("dialog")) {
  dialog.querySelector(".cancel").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => prompt.focus());
}

function onEscape() {
  const isDrawerOpen = !wide.matches && document.body.matches("[data-list=open], [data-board=open]");
  if (isDrawerOpen) closeDrawers();
  else chat.stop();
  prompt.focus();
}

async function showModels() {
  try {
    ({ data: models } = await (await request("v1/models")).json());
    byId("model").append(...models.map(({ id }) => el("option", { selected: id === chosenModel() }, id)));
    byId("model").disabled = models.length < 2;
    describeModel();
  } catch (error) {
    byId("welcome-model").textContent = "No model to talk to";
    byId("welcome-about").textContent = `The server did not say which model it serves: ${error.message}`;
  }
}

function describeModel() {
  const { id, max_model_len: context } = model();
  byId("welcome-model").textContent = `This is ${id}`;
  byId("welcome-about").textContent =
    `${context.toLocaleString("en")} tokens of context. What you write stays in this browser and on this server. Try:`;
  byId("examples").hidden = false;
  drawGauge(chat.conversation, context);
}

on("model", "change", () => {
  chooseModel(byId("model").value);
  describeModel();
});

layOut();
open(sessionStorage.getItem(CURRENT));
showModels();
