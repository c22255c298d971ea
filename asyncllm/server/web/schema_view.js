// A JSON Schema as a list of fields. Shapes within shapes are folded, and drawn when they are opened.

import { el } from "./dom.js";

const KINDS = { ignored: "Accepted and ignored", refused: "Refused" };
const KIND_WORDS = /^(Accepted and ignored|Refused)[^.]*\. ?/;
const LIMITS = {
  minimum: "≥", exclusiveMinimum: ">", maximum: "≤", exclusiveMaximum: "<",
  minItems: "at least", maxItems: "at most", maxProperties: "at most", minLength: "at least", maxLength: "at most",
};
const number = new Intl.NumberFormat("en", { maximumFractionDigits: 9 });

const nameOf = (ref) => ref.split("/").pop();
const isObject = (value) => typeof value === "object" && value !== null;
const isShape = (schema) => isObject(schema) && Object.keys(schema).length > 0;

export function resolve(schema, spec) {
  return schema?.$ref ? spec.components.schemas[nameOf(schema.$ref)] : (schema ?? {});
}

/** Names of all fields, to be searched. */
export function fieldNames(schema, spec, seen = new Set()) {
  if (!isObject(schema) || seen.has(schema.$ref)) return [];
  if (schema.$ref) seen.add(schema.$ref);
  const whole = resolve(schema, spec);
  const inside = Object.values(whole).flatMap((part) => fieldNames(part, spec, seen));
  return [...Object.keys(whole.properties ?? {}), ...inside];
}

/** What a schema is, in a word or a few: "list of Message or null". */
export function typeName(schema) {
  const { $ref, anyOf, items, additionalProperties: values, type = "anything" } = schema;
  if ($ref) return nameOf($ref);
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if (anyOf) return anyOf.map(typeName).join(" or ");
  if (type === "array" && items?.anyOf) return `list of (${typeName(items)})`;
  if (type === "array") return `list of ${isShape(items) ? typeName(items) : "anything"}`;
  return type === "object" && isShape(values) ? `object of ${typeName(values)}` : type;
}

/** Every field of a request may be null, which says nothing: the table leaves it out. */
function withoutNull(schema) {
  if (!schema.anyOf) return schema;
  const arms = schema.anyOf.filter((arm) => arm.type !== "null");
  return arms.length === 1 ? { ...schema, anyOf: undefined, ...arms[0] } : { ...schema, anyOf: arms };
}

/** The named shapes that a field's type mentions. */
function shapesIn(schema) {
  if (schema.$ref) return [schema.$ref];
  return [...(schema.anyOf ?? []), schema.items, schema.additionalProperties].filter(isObject).flatMap(shapesIn);
}

function metaOf(schema) {
  const known = Object.entries(LIMITS).filter(([word]) => word in schema);
  const limits = known.map(([word, sign]) => `${sign} ${number.format(schema[word])}`).join(", ");
  const hasDefault = (schema.default ?? null) !== null && !("const" in schema);
  return [limits, hasDefault ? `default ${JSON.stringify(schema.default)}` : ""].filter(Boolean).join(" · ");
}

function row(name, schema, isRequired, isRequest, spec) {
  const shown = isRequest ? withoutNull(schema) : schema;
  const meta = metaOf(schema);
  const text = schema.description?.replace(KIND_WORDS, ""); // the heading above says it for all
  return el("tr", {},
    el("th", { scope: "row" }, el("code", {}, name), isRequired && isRequest ? el("span", { class: "required" }, "required") : null),
    el("td", {},
      el("p", { class: "type" }, typeName(shown), meta ? el("span", { class: "meta" }, ` · ${meta}`) : null),
      text ? el("p", {}, text) : null,
      ...[...new Set(shapesIn(shown))].map((ref) => folded(ref, isRequest, spec))));
}

function folded(ref, isRequest, spec) {
  const view = el("details", { class: "shape" }, el("summary", {}, nameOf(ref)));
  view.addEventListener("toggle", () => view.append(fields({ $ref: ref }, isRequest, spec)), { once: true });
  return view;
}

function fields(schema, isRequest, spec) {
  const { properties = {}, required = [], description, ...rest } = resolve(schema, spec);
  const table = (kind) => {
    const parts = Object.entries(properties).filter(([, part]) => (part["x-kind"] ?? "done") === kind);
    parts.sort(([a], [b]) => required.includes(b) - required.includes(a)); // stable: the rest keeps its order
    const rows = parts.map(([name, part]) => row(name, part, required.includes(name), isRequest, spec));
    return rows.length ? el("table", { class: "fields" }, el("tbody", {}, ...rows)) : null;
  };
  const others = Object.entries(KINDS).map(([kind, title]) => {
    const list = table(kind);
    return list && el("details", { class: "shape" }, el("summary", {}, `${title} (${list.rows.length})`), list);
  });
  const isBare = !Object.keys(properties).length;
  return el("div", {}, description ? el("p", { class: "about" }, description) : null,
    isBare ? el("p", { class: "type" }, typeName(rest)) : table("done"), ...others);
}

/** `open`: the fields at once, else folded under the shape's name. */
export function schemaView(schema, spec, { open = false } = {}) {
  const isRequest = Object.values(resolve(schema, spec).properties ?? {}).some((part) => "x-kind" in part);
  return schema.$ref && !open ? folded(schema.$ref, isRequest, spec) : fields(schema, isRequest, spec);
}
