// Server-sent events from a fetch response. (EventSource can send neither a body nor an API key.)

export class EventParser {
  #rest = "";

  /** The data of each event that `text` completes. */
  feed(text) {
    const lines = (this.#rest + text).split("\n\n");
    this.#rest = lines.pop();
    return lines.map(data).filter((payload) => payload !== "");
  }
}

function data(event) {
  const lines = event.split("\n").filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).trim()).join("\n");
}

/** Batches of event data, as they arrive. Ends with the body; leaving the loop closes it. */
export async function* eventBatches(response) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  const parser = new EventParser();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const events = parser.feed(decoder.decode(value, { stream: true }).replaceAll("\r", ""));
      if (events.length) yield events;
    }
  } catch (error) {
    throw error.name === "AbortError" ? error : new Error("The connection to the server was lost.");
  } finally {
    reader.cancel().catch(() => {}); // already closed or aborted: nothing is left to release
  }
}
