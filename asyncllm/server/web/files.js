// Files out of and into the page: all conversations, and text that goes with a message.

import { byId, el } from "./dom.js";

const MAX_TEXT_BYTES = 1 << 20;

/** Saves `text` as a file of the reader's. */
export function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** `button` asks for a file; `take(name, bytes)` gets it, and what it throws is shown. */
export function fileButton(button, take) {
  const input = byId(`${button}-file`);
  const notice = byId("notice");
  byId(button).onclick = () => input.click();
  input.onchange = async () => {
    const [file] = input.files;
    notice.hidden = true;
    try {
      take(file.name, await file.arrayBuffer());
    } catch (error) {
      notice.textContent = `${file.name} was not taken: ${error.message}.`;
      notice.hidden = false;
    }
    input.value = ""; // the same file may be chosen again
  };
}

/** Throws for what is no text, or too much. */
export function asText(bytes) {
  if (bytes.byteLength > MAX_TEXT_BYTES) throw new RangeError("it is longer than 1 MiB");
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    if (!text.includes("\0")) return text;
  } catch {
    // said below
  }
  throw new TypeError("it is not a text file in UTF-8");
}

/** A file within a message: its name, and its text between fences longer than any inside. */
export function quoted(name, text) {
  const longest = Math.max(2, ...[...text.matchAll(/`{3,}/g)].map(([run]) => run.length));
  const fence = "`".repeat(longest + 1);
  return `${name}:\n${fence}\n${text.trimEnd()}\n${fence}\n`;
}
