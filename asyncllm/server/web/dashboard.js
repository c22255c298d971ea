// The live panel: one stream of snapshots (server/page.py), read only while it can be seen.

import { request } from "./api.js";
import { drawLines, drawPages, drawSteps, stepsThatFit } from "./charts.js";
import { el, oncePerFrame } from "./dom.js";
import { eventBatches } from "./sse.js";

const HISTORY = 120; // snapshots: a minute
const RETRY_MS = [1000, 2000, 5000];
const LATENCIES = [
  ["time_to_first_token", "First token"],
  ["inter_token", "Between tokens"],
  ["e2e", "Whole answer"],
  ["queue", "In the queue"],
  ["loop_lag", "Loop lag"],
];
const SHARES = ["p50", "p90", "p99"];

const whole = (value) => Math.round(value).toLocaleString("en");
const sum = (counts) => Object.values(counts).reduce((total, count) => total + count, 0);
const ms = (value) => (value < 10 ? value.toFixed(2) : value < 100 ? value.toFixed(1) : whole(value));

export class Dashboard {
  #parts = {};
  #panel;
  #isVisible = false;
  #controller = null;
  #rates = { generation: [], prompt: [] };
  #steps = [];
  #latest = null;
  #finishedPerS = 0;
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
        if (error.status === 401) return this.#giveUp(error.message);
        this.#say("lost", `${error.message}; trying again …`);
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]));
    }
  }

  /** Nobody gave the key: to be asked again, close the panel and open it. */
  #giveUp(message) {
    this.#controller = null;
    this.#say("lost", message);
  }

  #take(snapshot) {
    if (snapshot.server) return this.#begin(snapshot.server);
    const before = this.#latest;
    this.#latest = snapshot;
    if (before) this.#note(before, snapshot);
    const last = this.#steps.at(-1)?.step_id ?? -1;
    this.#steps.push(...snapshot.steps.filter((step) => step.step_id > last));
    this.#steps.splice(0, this.#steps.length - stepsThatFit(this.#parts.steps));
    this.#drawSoon();
  }

  /** Rates are differences of totals over the time between two snapshots. */
  #note({ monotonic, totals: old }, { monotonic: now, totals }) {
    const seconds = Math.max(now - monotonic, 1e-3);
    const computed = (counts) => counts.prompt_tokens - counts.cached_tokens;
    const rates = {
      generation: (totals.generation_tokens - old.generation_tokens) / seconds,
      prompt: (computed(totals) - computed(old)) / seconds,
    };
    for (const [name, values] of Object.entries(this.#rates)) {
      values.push(rates[name]);
      if (values.length > HISTORY) values.shift();
    }
    this.#finishedPerS = (sum(totals.finished) - sum(old.finished)) / seconds;
  }

  #begin(server) {
    this.#rates = { generation: [], prompt: [] };
    this.#steps = [];
    this.#latest = null;
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
        tile("generation", "tokens/s out"), tile("busy", "device busy"), tile("hits", "prefix hits")),
      title("lines", "Tokens per second"), picture("lines", "lines"),
      el("ul", { class: "legend" }, swatch("generation", "generated"), swatch("prompt", "prompt")),
      title("pages", "KV pages"), picture("pages", "pages"),
      el("ul", { class: "legend" },
        swatch("used", "in use"), swatch("shared", "shared"), swatch("cached", "cached"), swatch("free", "free")),
      title("steps", "Steps"), picture("steps", "steps"),
      title("latency", "Latency"),
      el("table", {},
        el("thead", {}, el("tr", {}, ...["", ...SHARES].map((text) => el("th", { scope: "col" }, text)))),
        (parts.latency = el("tbody"))),
    ];
  }

  #draw() {
    const snapshot = this.#latest;
    if (!snapshot || !this.#isVisible) return;
    this.#drawTiles(snapshot);
    this.#drawLines();
    this.#drawPages(snapshot.pages);
    this.#drawSteps();
    this.#parts.latencyNote.textContent = "ms, last minute";
    this.#parts.latency.replaceChildren(...LATENCIES.map(([name, label]) => {
      const values = SHARES.map((share) => snapshot.latencies[name][`${share}_ms`]);
      const shown = values.map((value) => el("td", {}, value === null ? "–" : ms(value)));
      return el("tr", {}, el("th", { scope: "row" }, label), ...shown);
    }));
  }

  #drawTiles({ running, waiting, swapped, rates, totals }) {
    const set = (name, text) => (this.#parts.tiles[name].textContent = text);
    set("running", whole(running));
    set("waiting", whole(waiting + swapped));
    set("finished", this.#finishedPerS.toFixed(1));
    set("generation", whole(rates.generation_tokens_per_s));
    set("busy", `${Math.round(100 * rates.device_busy_share)} %`);
    const { prefix_cache_queries: queries, prefix_cache_hits: hits } = totals;
    set("hits", queries ? `${Math.round((100 * hits) / queries)} %` : "–");
  }

  #drawLines() {
    const { generation, prompt } = this.#rates;
    const peak = (values) => whole(Math.max(0, ...values));
    this.#label("lines", `peaks ${peak(generation)} and ${peak(prompt)}`);
    drawLines(this.#parts.lines, [
      { values: generation, colour: this.#colour("generation") },
      { values: prompt, colour: this.#colour("prompt") },
    ], HISTORY);
  }

  #drawPages({ num_pages: pages, num_used: used, pages_per_cell: each, cells }) {
    const note = each > 1 ? `, 1 in ${each} shown` : "";
    this.#label("pages", `${whole(used)} of ${whole(pages)} in use${note}`);
    const [shared, own, cached, free] = ["shared", "used", "cached", "free"].map((name) => this.#colour(name));
    drawPages(this.#parts.pages, cells, { s: shared, u: own, c: cached, ".": free });
  }

  #drawSteps() {
    const steps = this.#steps;
    const longest = Math.max(0, ...steps.map(({ duration }) => duration * 1000));
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
