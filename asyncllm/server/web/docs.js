// The API's description, made from /openapi.json: one operation at a time, named by the hash.

import { authorization, key, request, setKey } from "./api.js";
import { byId, el, setPanel, wide } from "./dom.js";
import { fieldNames, schemaView } from "./schema_view.js";
import { tryIt } from "./try_it.js";

let spec = null;
let operations = []; // {id, method, path, tag, summary, body, parameters, failures, ok, needsKey, words}

const schemaOf = (answer) => answer.content["application/json"].schema;
const rowOf = (title, text) => el("tr", {}, el("th", { scope: "row" }, ...title), el("td", {}, text));
const tableOf = (name, rows) => el("table", { class: name }, el("tbody", {}, ...rows));

function readOperation(path, method, { operationId: id, tags: [tag], summary, requestBody, responses, parameters = [], security }) {
  const body = requestBody?.content["application/json"] ?? null;
  const { 200: ok, ...failures } = responses;
  const words = [path, summary, ...fieldNames(body?.schema, spec)].join(" ").toLowerCase();
  return { id, method, path, tag, summary, body, parameters, failures, ok, needsKey: Boolean(security), words };
}

const currentId = () => location.hash.slice(1);
const methodTag = (method) => el("span", { class: "method", "data-method": method }, method);

function drawList() {
  const wanted = byId("find").value.trim().toLowerCase();
  const shown = operations.filter((one) => one.words.includes(wanted));
  byId("routes").replaceChildren(...spec.tags.flatMap(({ name }) => {
    const rows = shown.filter((one) => one.tag === name).map(listRow);
    return rows.length ? [el("h2", {}, name), el("ul", {}, ...rows)] : [];
  }));
  byId("num-found").textContent = wanted ? `${shown.length} routes` : "";
  if (!shown.length) byId("routes").append(el("p", { class: "muted" }, "Nothing has that name."));
}

const listRow = ({ id, method, path }) =>
  el("li", {}, el("a", { href: `#${id}`, "aria-current": id === currentId() ? "page" : null },
    methodTag(method), el("span", { class: "path" }, path)));

function draw() {
  const one = operations.find(({ id }) => id === currentId());
  byId("content").replaceChildren(...(one ? operationView(one) : overview()).filter(Boolean));
  document.title = `${one ? `${one.method} ${one.path}` : "API"} – asyncllm`;
  drawList();
  byId("scroller").scrollTop = 0;
}

function overview() {
  const answers = operations.flatMap(({ failures }) => Object.values(failures));
  const errors = new Set(answers.map((answer) => schemaOf(answer).$ref));
  const route = ({ id, method, path, summary }) => rowOf([el("a", { href: `#${id}` }, methodTag(method), path)], summary);
  return [
    el("h2", {}, "What this server answers to"),
    el("p", {}, spec.info.description),
    keyField(),
    el("h3", {}, "Errors"),
    el("p", {}, "A refusal has a status of 400 or more and says which field is to blame. After a stream has begun, the same object is its last event."),
    ...[...errors].map(($ref) => schemaView({ $ref }, spec)),
    el("h3", {}, "Routes"),
    tableOf("routes", operations.map(route)),
    el("p", { class: "muted" }, `asyncllm ${spec.info.version}`),
  ];
}

function operationView(one) {
  const failures = Object.entries(one.failures);
  return [
    el("h2", { class: "operation" }, methodTag(one.method), one.path),
    el("p", {}, one.summary, one.needsKey ? el("span", { class: "muted" }, " · needs the API key") : null),
    el("h3", {}, "Try it"),
    one.needsKey && keyField(),
    tryIt(one, authorization),
    one.body && el("h3", {}, "Request"),
    one.body && schemaView(one.body.schema, spec, { open: true }),
    el("h3", {}, "Answer"),
    ...answerView(Object.entries(one.ok.content ?? {})),
    el("h3", {}, "Errors"),
    tableOf("errors", failures.map(([status, { description }]) => rowOf([status], description))),
    schemaView(schemaOf(failures[0][1]), spec),
  ];
}

function answerView(content) {
  if (!content.length) return [el("p", {}, "200, without a body.")];
  return content.flatMap(([type, { schema }]) => {
    const event = schema.properties?.data;
    const isJson = type === "application/json";
    if (isJson || !event) return [el("p", {}, "200: ", el("code", {}, type)), isJson && schemaView(schema, spec, { open: true })];
    const said = ["With ", el("code", {}, '"stream": true'), " instead ", el("code", {}, type), ", each event's data being"];
    return [el("p", {}, ...said), schemaView(chunkOf(event), spec)];
  });
}

/** The chunk among what an event may hold: an error and the end are said elsewhere. */
function chunkOf(data) {
  const { contentSchema } = (data.anyOf ?? [data]).find((arm) => arm.contentSchema);
  return contentSchema.anyOf?.[0] ?? contentSchema;
}

function keyField() {
  if (!spec.components.securitySchemes) return null;
  const input = el("input", { type: "password", autocomplete: "off", id: "key", value: key() ?? "", placeholder: "kept until this tab closes" });
  input.onchange = () => setKey(input.value, false);
  return el("p", { class: "key-field" }, el("label", { for: "key" }, "API key"), input);
}

const layOut = () => setPanel("list", wide.matches);
const closeDrawer = () => wide.matches || setPanel("list", false);

byId("toggle-list").onclick = () => setPanel("list", document.body.dataset.list !== "open");
byId("scrim").onclick = closeDrawer;
byId("find").oninput = drawList;
wide.onchange = layOut;
addEventListener("keydown", (event) => {
  if (event.key === "Escape") closeDrawer();
  if (event.key !== "/" || event.target.closest("input, textarea")) return;
  event.preventDefault();
  setPanel("list", true);
  byId("find").focus();
});
addEventListener("hashchange", () => {
  if (currentId() === "content") return; // the skip link
  draw();
  closeDrawer();
  byId("content").focus({ preventScroll: true });
});

async function start() {
  layOut();
  spec = await (await request("openapi.json")).json();
  operations = Object.entries(spec.paths).flatMap(([path, item]) =>
    Object.entries(item).map(([method, operation]) => readOperation(path, method.toUpperCase(), operation)));
  draw();
}

start().catch((error) => byId("content").replaceChildren(el("p", { class: "error", role: "alert" }, error.message)));
