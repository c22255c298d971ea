// The API's description, made from /openapi.json: one operation at a time, named by the hash.

import { authorization, key, request, setKey } from "./api.js";
import { byId, el, setPanel, wide } from "./dom.js";
import { fieldNames, schemaView } from "./schema_view.js";
import { tryIt } from "./try_it.js";

let spec = null;
let operations = []; // {id, method, path, tag, summary, body, parameters, failures, ok, needsKey, words}

// --- reading the document ---

const readOperations = () => Object.entries(spec.paths).flatMap(([path, item]) =>
  Object.entries(item).map(([method, operation]) => readOperation(path, method.toUpperCase(), operation)));

function readOperation(path, method, { operationId: id, tags: [tag], summary, requestBody, responses, parameters = [], security }) {
  const body = requestBody?.content["application/json"] ?? null;
  const { 200: ok, ...failures } = responses;
  const words = [path, summary, ...fieldNames(body?.schema, spec)].join(" ").toLowerCase();
  return { id, method, path, tag, summary, body, parameters, failures, ok, needsKey: Boolean(security), words };
}

// --- the list ---

function drawList() {
  const wanted = byId("find").value.trim().toLowerCase();
  const shown = operations.filter((one) => one.words.includes(wanted));
  byId("routes").replaceChildren(...spec.tags.flatMap(({ name }) => {
    const rows = shown.filter((one) => one.tag === name);
    return rows.length ? [el("h2", {}, name), el("ul", {}, ...rows.map(listRow))] : [];
  }));
  byId("num-found").textContent = wanted ? `${shown.length} routes` : "";
  if (!shown.length) byId("routes").append(el("p", { class: "muted" }, "Nothing has that name."));
}

const listRow = (one) =>
  el("li", {}, el("a", { href: `#${one.id}`, "aria-current": one.id === currentId() ? "page" : null },
    methodTag(one.method), el("span", { class: "path" }, one.path)));

const methodTag = (method) => el("span", { class: "method", "data-method": method }, method);

// --- one operation ---

const currentId = () => location.hash.slice(1);

function draw() {
  const one = operations.find(({ id }) => id === currentId());
  byId("content").replaceChildren(...(one ? operationView(one) : overview()).filter(Boolean));
  document.title = `${one ? `${one.method} ${one.path}` : "API"} – asyncllm`;
  drawList();
  byId("scroller").scrollTop = 0;
}

function overview() {
  return [
    el("h2", {}, "What this server answers to"),
    el("p", {}, spec.info.description),
    keyField(),
    el("h3", {}, "Errors"),
    el("p", {}, "A refusal has a status of 400 or more and says which field is to blame. After a stream has begun, the same object is its last event."),
    ...errorShapes(),
    el("h3", {}, "Routes"),
    el("table", { class: "routes" }, el("tbody", {}, ...operations.map((one) =>
      el("tr", {}, el("th", { scope: "row" }, el("a", { href: `#${one.id}` }, methodTag(one.method), one.path)), el("td", {}, one.summary))))),
    el("p", { class: "muted" }, `asyncllm ${spec.info.version}`),
  ];
}

function errorShapes() {
  const answers = operations.flatMap(({ failures }) => Object.values(failures));
  const names = new Set(answers.map(({ content }) => content["application/json"].schema.$ref));
  return [...names].map(($ref) => schemaView({ $ref }, spec));
}

function operationView(one) {
  return [
    el("h2", { class: "operation" }, methodTag(one.method), one.path),
    el("p", {}, one.summary, one.needsKey ? el("span", { class: "muted" }, " · needs the API key") : null),
    el("h3", {}, "Try it"),
    one.needsKey ? keyField() : null,
    tryIt(one, authorization),
    one.body && el("h3", {}, "Request"),
    one.body && schemaView(one.body.schema, spec, { open: true }),
    el("h3", {}, "Answer"),
    ...answerView(one.ok),
    el("h3", {}, "Errors"),
    ...errorTable(Object.entries(one.failures)),
  ];
}

function answerView(ok) {
  const content = Object.entries(ok.content ?? {});
  if (!content.length) return [el("p", {}, "200, without a body.")];
  return content.flatMap(([type, { schema }]) => {
    if (type === "application/json") return [el("p", {}, "200: ", el("code", {}, type)), schemaView(schema, spec, { open: true })];
    const event = schema.properties?.data;
    if (!event) return [el("p", {}, "200: ", el("code", {}, type))];
    const said = ["With ", el("code", {}, '"stream": true'), " instead ", el("code", {}, type), ", each event's data being"];
    return [el("p", {}, ...said), schemaView(chunkOf(event), spec)];
  });
}

/** The chunk among what an event may hold: an error and the end are said elsewhere. */
function chunkOf(data) {
  const json = (data.anyOf ?? [data]).find((arm) => arm.contentSchema);
  return json.contentSchema.anyOf?.[0] ?? json.contentSchema;
}

function errorTable(failures) {
  const rows = failures.map(([status, { description }]) =>
    el("tr", {}, el("th", { scope: "row" }, status), el("td", {}, description)));
  const [, any] = failures[0];
  return [el("table", { class: "errors" }, el("tbody", {}, ...rows)), schemaView(any.content["application/json"].schema, spec)];
}

// --- the key ---

function keyField() {
  if (!spec.components.securitySchemes) return null;
  const input = el("input", { type: "password", autocomplete: "off", id: "key", value: key() ?? "", placeholder: "kept until this tab closes" });
  input.addEventListener("change", () => setKey(input.value, false));
  return el("p", { class: "key-field" }, el("label", { for: "key" }, "API key"), input);
}

// --- the frame ---

const setList = (isOpen) => setPanel("list", isOpen);

byId("toggle-list").addEventListener("click", () => setList(document.body.dataset.list !== "open"));
byId("scrim").addEventListener("click", () => setList(false));
byId("find").addEventListener("input", drawList);
wide.addEventListener("change", () => setList(wide.matches));
addEventListener("keydown", (event) => {
  if (event.key === "/" && !event.target.closest("input, textarea")) {
    event.preventDefault();
    setList(true);
    byId("find").focus();
  } else if (event.key === "Escape" && !wide.matches) setList(false);
});
addEventListener("hashchange", () => {
  if (currentId() === "content") return; // the skip link
  draw();
  if (!wide.matches) setList(false);
  byId("content").focus({ preventScroll: true });
});

async function start() {
  setList(wide.matches);
  spec = await (await request("openapi.json")).json();
  operations = readOperations();
  draw();
}

start().catch((error) => byId("content").replaceChildren(el("p", { class: "error", role: "alert" }, String(error.message))));
