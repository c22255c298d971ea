// The live panel: one stream of snapshots (server/dashboard.py), read only while it can be seen.

import { request } from "./api.js";
import { drawLines, drawPages, drawSteps, stepsThatFit } from "./charts.js";
import { el, oncePerFrame } from "./dom.js";
import { eventBatches } from "./sse.js";

const HISTORY = 120; // snapshots: a minute
const RETRY_MS = [1000, 2000, 5000];
const LATENCIES = [["ttft", "First token"], ["itl", "Between tokens"], ["e2e", "Whole answer"]];

const whole = (value) => Math.round(value).toLocaleString("en");
const ms = (value) => (value < 10 ? value.toFixed(2) : value < 100 ? value.toFixed(1) : whole(value));

export class Dashboard {
  #parts = {};
  #panel;
  #isVisible = false;
  #controller = null;
  #rates = { generation: [], prompt: [] };
  #steps = [];
  #latest = null;
  #drawSoon = oncePerFrame(() => this.#draw());

  constructor(panel) {
    this.#panel = panel;
    panel.append(...this.#build());
    document.addEventListener("visibilitychange", () => this.#follow());
    document.addEventListener("theme", this.#drawSoon);
    new ResizeObserver(this.#drawSoon).observe(panel);
  }

  setVisible(isVisible) {
    this.#isVisible = isVisible;
    this.#follow();
  }

  /** Connected exactly while somebody can see it. */
  #follow() {
    const wanted = this.#isVisible && !document.hidden;
    if (wanted === (this.#controller !== null)) return;
    if (wanted) {
      this.#controller = new AbortController();
      this.#watch(this.#controller.signal);
    } else {
      this.#controller.abort();
      this.#controller = null;
    }
  }

  async #watch(signal) {
    for (let failures = 0; !signal.aborted; failures++) {
      try {
        const response = await request("dashboard/events", { signal });
        for await (const events of eventBatches(response)) {
          failures = 0;
          for (const event of events) this.#take(JSON.parse(event));
        }
        this.#say("lost", "The server ended the feed; trying again …");
      } catch (error) {
        if (signal.aborted) return;
        this.#say("lost", `${error.message}; trying again …`);
        if (error.status === 401) return; // the key was not given: the chat will ask again
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]));
    }
  }

  #take(snapshot) {
    if (snapshot.server) return this.#begin(snapshot.server);
    this.#latest = snapshot;
    for (const [name, values] of Object.entries(this.#rates)) {
      values.push(snapshot[`${name}_tokens`] / snapshot.seconds);
      if (values.length > HISTORY) values.shift();
    }
    for (const [took, prompt, generated] of snapshot.steps) this.#steps.push({ ms: took, prompt, generated });
    this.#steps.splice(0, this.#steps.length - stepsThatFit(this.#parts.steps));
    this.#drawSoon();
  }

  #begin(server) {
    this.#rates = { generation: [], prompt: [] };
    this.#steps = [];
    this.#say("live", [server.architecture, server.dtype, server.device, server.attention_backend].join(" · "));
  }

  #say(state, text) {
    this.#parts.live.dataset.state = state;
    this.#parts.live.textContent = text;
  }

  // --- what it looks like ---

  #build() {
    const parts = this.#parts;
    parts.live = el("p", { class: "live" }, "Connecting …");
    parts.tiles = {};
    const tile = (name, label) => {
      parts.tiles[name] = el("dd", {}, "–");
      return el("div", {}, el("dt", {}, label), parts.tiles[name]);
    };
    const picture = (name, kind) => (parts[name] = el("canvas", { class: kind, role: "img" }));
    const title = (name, text) => el("h2", {}, text, (parts[`${name}Note`] = el("span")));
    const swatch = (name, text) => el("li", {}, (parts[`swatch-${name}`] = el("i", { class: `swatch-${name}` })), text);
    return [
      parts.live,
      el("dl", { class: "tiles" },
        tile("running", "running"), tile("waiting", "waiting"), tile("finished", "finished/s"),
        tile("generation", "tokens/s out"), tile("prompt", "tokens/s in"), tile("hits", "prefix hits")),
      title("lines", "Tokens per second"), picture("lines", "area"),
      el("ul", { class: "legend" }, swatch("generation", "generated"), swatch("prompt", "prompt")),
      title("pages", "KV pages"), picture("pages", "pages"),
      el("ul", { class: "legend" }, swatch("used", "in use"), swatch("cached", "cached, reusable"), swatch("free", "free")),
      title("steps", "Steps"), picture("steps", "steps"),
      title("latency", "Latency, ms"),
      el("table", {},
        el("thead", {}, el("tr", {}, ...["", "p50", "p90", "p99"].map((text) => el("th", { scope: "col" }, text)))),
        (parts.latency = el("tbody"))),
    ];
  }

  #draw() {
    const snapshot = this.#latest;
    if (!snapshot || !this.#isVisible) return;
    this.#drawTiles(snapshot);
    this.#drawLines();
    this.#drawPages(snapshot.kv);
    this.#drawSteps();
    this.#parts.latency.replaceChildren(...LATENCIES.map(([name, label]) => {
      const values = snapshot.latency_ms[name] ?? [null, null, null];
      const shown = values.map((value) => el("td", {}, value === null ? "–" : ms(value)));
      return el("tr", {}, el("th", { scope: "row" }, label), ...shown);
    }));
  }

  #drawTiles({ running, waiting, swapped, finished, seconds, prefix_cache: [hits, queries], ...rest }) {
    const set = (name, text) => (this.#parts.tiles[name].textContent = text);
    set("running", whole(running));
    set("waiting", whole(waiting + swapped));
    set("finished", (finished / seconds).toFixed(1));
    set("generation", whole(rest.generation_tokens / seconds));
    set("prompt", whole(rest.prompt_tokens / seconds));
    set("hits", queries ? `${Math.round((100 * hits) / queries)} %` : "–");
  }

  #drawLines() {
    const { generation, prompt } = this.#rates;
    const top = Math.max(...generation, ...prompt);
    this.#label("lines", `last minute, peak ${whole(top)}`);
    drawLines(this.#parts.lines, [
      { values: prompt, colour: this.#colour("prompt") },
      { values: generation, colour: this.#colour("generation") },
    ], HISTORY);
  }

  #drawPages({ pages, used, cached, cells }) {
    this.#label("pages", `${whole(used)} of ${whole(pages)} in use, ${whole(cached)} cached`);
    const bytes = Uint8Array.from(atob(cells), (char) => char.charCodeAt(0));
    const half = bytes.length / 2;
    drawPages(this.#parts.pages, { used: bytes.subarray(0, half), cached: bytes.subarray(half) }, {
      used: this.#colour("used"), cached: this.#colour("cached"), free: this.#colour("free"),
    });
  }

  #drawSteps() {
    const steps = this.#steps;
    const longest = Math.max(0, ...steps.map((step) => step.ms));
    this.#label("steps", steps.length ? `last ${steps.length}, longest ${ms(longest)} ms` : "none yet");
    drawSteps(this.#parts.steps, steps, { prompt: this.#colour("prompt"), generated: this.#colour("generation") });
  }

  /** The note beside a title; it is the picture's text too. */
  #label(name, text) {
    this.#parts[`${name}Note`].textContent = text;
    this.#parts[name].setAttribute("aria-label", text);
  }

  #colour(name) {
    return getComputedStyle(this.#parts[`swatch-${name}`]).backgroundColor;
  }
}
