// A JSON Schema as a list of fields. Shapes within shapes are folded, and drawn when they are opened.

import { el } from "./dom.js";

const KINDS = { ignored: "Accepted and ignored", refused: "Refused" };
const KIND_WORDS = /^(Accepted and ignored|Refused)[^.]*\. ?/;
const LIMITS = { minimum: "≥", exclusiveMinimum: ">", maximum: "≤", exclusiveMaximum: "<" };
const SIZES = { minItems: "at least", maxItems: "at most", maxProperties: "at most", minLength: "at least", maxLength: "at most" };

export function resolve(schema, spec) {
  if (!schema?.$ref) return schema ?? {};
  return spec.components.schemas[schema.$ref.split("/").pop()];
}

/** Names of all fields, to be searched. */
export function fieldNames(schema, spec, seen = new Set()) {
  if (schema?.$ref) {
    if (seen.has(schema.$ref)) return [];
    seen.add(schema.$ref);
  }
  const whole = resolve(schema, spec);
  const own = Object.entries(whole.properties ?? {});
  const parts = [...(whole.anyOf ?? []), whole.items, whole.additionalProperties].filter((part) => part && typeof part === "object");
  return [
    ...own.flatMap(([name, part]) => [name, ...fieldNames(part, spec, seen)]),
    ...parts.flatMap((part) => fieldNames(part, spec, seen)),
  ];
}

/** What a schema is, in a word or a few: "list of Message or null". */
export function typeName(schema, spec) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if (schema.anyOf) return schema.anyOf.map((arm) => typeName(arm, spec)).join(" or ");
  if (schema.type === "array") {
    const items = schema.items && Object.keys(schema.items).length ? typeName(schema.items, spec) : "anything";
    return schema.items?.anyOf ? `list of (${items})` : `list of ${items}`;
  }
  if (schema.type === "object") {
    const values = schema.additionalProperties;
    return values && typeof values === "object" && Object.keys(values).length ? `object of ${typeName(values, spec)}` : "object";
  }
  return schema.type ?? "anything";
}

/** Every field of a request may be null, which says nothing: the table leaves it out. */
const withoutNull = (schema) => {
  if (!schema.anyOf) return schema;
  const arms = schema.anyOf.filter((arm) => arm.type !== "null");
  return arms.length === 1 ? { ...schema, anyOf: undefined, ...arms[0] } : { ...schema, anyOf: arms };
};

function limits(schema) {
  const said = Object.entries(LIMITS).filter(([word]) => word in schema).map(([word, sign]) => `${sign} ${schema[word]}`);
  const sizes = Object.entries(SIZES).filter(([word]) => word in schema).map(([word, text]) => `${text} ${schema[word].toLocaleString("en")}`);
  return [...said, ...sizes].join(", ");
}

/** The named shapes that a field's type mentions. */
function shapesIn(schema) {
  if (schema.$ref) return [schema.$ref];
  const values = typeof schema.additionalProperties === "object" ? [schema.additionalProperties] : [];
  return [...(schema.anyOf ?? []), ...(schema.items ? [schema.items] : []), ...values].flatMap(shapesIn);
}

function row(name, schema, isRequired, isRequest, spec) {
  const shown = isRequest ? withoutNull(schema) : schema;
  const type = typeName(shown, spec);
  const meta = [
    limits(schema),
    schema.default !== null && schema.default !== undefined && !("const" in schema) ? `default ${JSON.stringify(schema.default)}` : "",
  ].filter(Boolean).join(" · ");
  const text = schema.description?.replace(KIND_WORDS, ""); // the heading above says it for all
  return el("tr", {},
    el("th", { scope: "row" }, el("code", {}, name), isRequired && isRequest ? el("span", { class: "required" }, "required") : null),
    el("td", {},
      el("p", { class: "type" }, type, meta ? el("span", { class: "meta" }, ` · ${meta}`) : null),
      text ? el("p", {}, text) : null,
      ...[...new Set(shapesIn(shown))].map((ref) => folded(ref, isRequest, spec))));
}

function folded(ref, isRequest, spec) {
  const inside = el("div", {});
  const view = el("details", { class: "shape" }, el("summary", {}, ref.split("/").pop()), inside);
  view.addEventListener("toggle", () => {
    if (view.open && !inside.childElementCount) inside.append(fields({ $ref: ref }, isRequest, spec));
  });
  return view;
}

function fields(schema, isRequest, spec) {
  const whole = resolve(schema, spec);
  const required = new Set(whole.required ?? []);
  const rows = (kind) =>
    Object.entries(whole.properties ?? {})
      .filter(([, part]) => (part["x-kind"] ?? "done") === kind)
      .sort(([a], [b]) => required.has(b) - required.has(a)) // stable: the rest keeps its order
      .map(([name, part]) => row(name, part, required.has(name), isRequest, spec));
  const table = (kind) => el("table", { class: "fields" }, el("tbody", {}, ...rows(kind)));
  const others = Object.entries(KINDS).map(([kind, title]) => {
    const list = rows(kind);
    return list.length ? el("details", { class: "shape" }, el("summary", {}, `${title} (${list.length})`), el("table", { class: "fields" }, el("tbody", {}, ...list))) : null;
  });
  return el("div", {}, whole.description ? el("p", { class: "about" }, whole.description) : null,
    whole.properties ? table("done") : el("p", { class: "type" }, typeName(whole, spec)), ...others);
}

/** `open`: the fields at once, else folded under the shape's name. */
export function schemaView(schema, spec, { open = false } = {}) {
  const isRequest = Object.values(resolve(schema, spec).properties ?? {}).some((part) => "x-kind" in part);
  if (!schema.$ref || open) return fields(schema, isRequest, spec);
  return folded(schema.$ref, isRequest, spec);
}
