// A request to this server, by hand: the body to edit, the same as a curl line, and what comes back.

import { answerOf } from "./api.js";
import { copyButton, el } from "./dom.js";

const MAX_SHOWN_CHARS = 200_000;

/** `authorization()`: the headers that carry the key. */
export function tryIt(operation, authorization) {
  const id = operation.id;
  const values = operation.parameters.map((one) => [one, el("input", { id: `${id}-${one.name}`, placeholder: one.schema.default, autocomplete: "off", spellcheck: "false" })]);
  const example = operation.body ? JSON.stringify(operation.body.example ?? {}, null, 2) : "";
  const body = operation.body ? el("textarea", { id: `${id}-body`, rows: Math.min(16, example.split("\n").length + 1), spellcheck: "false" }) : null;
  if (body) body.value = example;
  const curl = el("pre", { tabindex: "0" });
  const line = () => (curl.textContent = curlLine(operation, url(), body?.value, Boolean(authorization().Authorization)));
  const url = () => {
    const path = values.reduce((text, [{ name }, input]) => text.replace(`{${name}}`, encodeURI(input.value)), operation.path);
    const whole = new URL(path.slice(1), document.baseURI);
    for (const [one, input] of values) if (one.in === "query" && input.value) whole.searchParams.set(one.name, input.value);
    return whole;
  };
  const status = el("p", { class: "status", role: "status" });
  const output = el("pre", { class: "output", tabindex: "0", "aria-label": "What came back", hidden: true });
  const button = el("button", { type: "submit", class: "primary" }, "Send");
  const form = el("form", { class: "try" },
    ...values.flatMap(([one, input]) => [el("label", { for: input.id }, one.name), input]),
    body && el("label", { for: body.id }, "Body"), body,
    el("details", { class: "shape" }, el("summary", {}, "As a curl line"), curl, copyButton(() => curl.textContent)),
    el("div", { class: "buttons" }, button), status, output);
  form.addEventListener("input", line);
  form.addEventListener("submit", (event) => {
    event.preventDefault(); // nothing is sent by the form: the policy allows no form to be
    if (running) running.abort();
    else send();
  });
  let running = null;

  async function send() {
    running = new AbortController();
    button.textContent = "Stop";
    output.hidden = false;
    output.textContent = "";
    status.textContent = "Sending …";
    const began = performance.now();
    try {
      const response = await answerOf(url(), {
        method: operation.method,
        headers: { ...authorization(), ...(body ? { "Content-Type": "application/json" } : {}) },
        body: body?.value,
        signal: running.signal,
      });
      status.dataset.ok = String(response.ok);
      status.textContent = `${response.status} ${response.statusText}, …`;
      await show(response, output);
      status.textContent = `${response.status} ${response.statusText}, ${Math.round(performance.now() - began)} ms`;
    } catch (error) {
      status.dataset.ok = "false";
      status.textContent = error.name === "AbortError" ? "Stopped." : error.message;
    } finally {
      running = null;
      button.textContent = "Send";
    }
  }

  line();
  return form;
}

/** The body as it comes; JSON is indented at its end. */
async function show(response, output) {
  const decoder = new TextDecoder();
  let text = "";
  for (let reader = response.body.getReader(); ; ) {
    const { done, value } = await reader.read();
    if (done) break;
    text += decoder.decode(value, { stream: true });
    if (text.length > MAX_SHOWN_CHARS) {
      output.textContent = `${text.slice(0, MAX_SHOWN_CHARS)}\n… more than is shown here`;
      return reader.cancel();
    }
    output.textContent = text;
  }
  if (response.headers.get("Content-Type")?.startsWith("application/json")) {
    output.textContent = JSON.stringify(JSON.parse(text), null, 2);
  } else if (!text) output.textContent = "(no body)";
}

function curlLine(operation, url, body, hasKey) {
  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const parts = [`curl ${operation.method === "GET" ? "" : `-X ${operation.method} `}${quoted(decodeURI(url.href))}`];
  if (hasKey || operation.needsKey) parts.push(`-H "Authorization: Bearer $ASYNCLLM_API_KEY"`);
  if (operation.body) {
    parts.push("-H 'Content-Type: application/json'", `-d ${quoted(compact(body))}`);
  }
  return parts.join(" \\\n  ");
}

function compact(text) {
  try {
    return JSON.stringify(JSON.parse(text));
  } catch {
    return text; // not JSON yet: as it is
  }
}
