// A request to this server, by hand: the body to edit, the same as a curl line, and what comes back.

import { answerOf, textParts } from "./api.js";
import { copyButton, el, indented, onSubmit } from "./dom.js";

const MAX_SHOWN_CHARS = 200_000;

/** `authorization()`: the headers that carry the key. */
export function tryIt(operation, authorization) {
  const { id, parameters } = operation;
  const plain = { autocomplete: "off", spellcheck: "false" };
  const inputs = parameters.map(({ name, schema }) => el("input", { id: `${id}-${name}`, placeholder: schema.default, ...plain }));
  const text = JSON.stringify(operation.body?.example ?? {}, null, 2);
  const body = operation.body && el("textarea", { id: `${id}-body`, rows: Math.min(16, text.split("\n").length + 1), ...plain }, text);
  const curl = el("pre", { tabindex: "0" });
  const status = el("p", { class: "status", role: "status" });
  const output = el("pre", { class: "output", tabindex: "0", "aria-label": "What came back", hidden: true });
  const button = el("button", { type: "submit", class: "primary" }, "Send");
  const form = el("form", { class: "try" },
    ...parameters.flatMap(({ name }, i) => [el("label", { for: inputs[i].id }, name), inputs[i]]),
    body && el("label", { for: body.id }, "Body"), body,
    el("details", { class: "shape" }, el("summary", {}, "As a curl line"), curl, copyButton(() => curl.textContent)),
    el("div", { class: "buttons" }, button), status, output);
  const url = () => urlOf(operation, inputs.map(({ value }) => value));
  const say = (words, ok) => Object.assign(status, { textContent: words }).dataset.ok = ok;
  let running = null;

  async function send() {
    running = new AbortController();
    button.textContent = "Stop";
    output.hidden = false;
    output.textContent = "";
    say("Sending …", "");
    const began = performance.now();
    try {
      const response = await answerOf(url(), {
        method: operation.method,
        headers: { ...authorization(), ...(body && { "Content-Type": "application/json" }) },
        body: body?.value,
        signal: running.signal,
      });
      const answer = `${response.status} ${response.statusText}`;
      say(`${answer}, …`, response.ok);
      await show(response, output);
      say(`${answer}, ${Math.round(performance.now() - began)} ms`, response.ok);
    } catch (error) {
      say(error.name === "AbortError" ? "Stopped." : error.message, false);
    } finally {
      running = null;
      button.textContent = "Send";
    }
  }

  const line = () => (curl.textContent = curlLine(operation, url(), body?.value, authorization()));
  form.addEventListener("input", line);
  onSubmit(form, () => (running ? running.abort() : send()));
  line();
  return form;
}

function urlOf({ path, parameters }, values) {
  const whole = parameters.reduce((text, { name }, i) => text.replace(`{${name}}`, encodeURI(values[i])), path);
  const url = new URL(whole.slice(1), document.baseURI);
  parameters.forEach((one, i) => one.in === "query" && values[i] && url.searchParams.set(one.name, values[i]));
  return url;
}

/** The body as it comes; JSON is indented at its end. */
async function show(response, output) {
  let text = "";
  for await (const part of textParts(response)) {
    text += part;
    output.textContent = text.slice(0, MAX_SHOWN_CHARS);
    if (text.length > MAX_SHOWN_CHARS) return output.append("\n… more than is shown here");
  }
  if (response.headers.get("Content-Type")?.startsWith("application/json")) output.textContent = indented(text, 2);
  else if (!text) output.textContent = "(no body)";
}

function curlLine({ method, needsKey, body }, url, text, { Authorization: hasKey }) {
  const quoted = (words) => `'${words.replaceAll("'", "'\\''")}'`;
  const parts = [`curl ${method === "GET" ? "" : `-X ${method} `}${quoted(decodeURI(url.href))}`];
  if (hasKey || needsKey) parts.push(`-H "Authorization: Bearer $ASYNCLLM_API_KEY"`);
  if (body) parts.push("-H 'Content-Type: application/json'", `-d ${quoted(indented(text))}`);
  return parts.join(" \\\n  ");
}
