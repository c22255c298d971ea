// The live panel: one stream of snapshots (server/page.py), read only while it can be seen.

import { eventBatches, request } from "./api.js";
import { bars, Chart, drawPages } from "./charts.js";
import { el, oncePerFrame } from "./dom.js";

const HISTORY = 120; // snapshots: a minute
const PERIOD_S = 0.5;
const MAX_STEPS = 64;
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
const short = (value) => (value < 10_000 ? String(value) : `${Math.round(value / 1000)}k`);
const sum = (counts) => Object.values(counts).reduce((total, count) => total + count, 0);
const ms = (value) => (value < 10 ? value.toFixed(2) : value < 100 ? value.toFixed(1) : whole(value));

export class Dashboard {
  #parts = {}; // by data-part in index.html
  #tiles = {};
  #charts = {};
  #panel;
  #isVisible = false;
  #controller = null;
  #rates = []; // of the last snapshots
  #latest = null;
  #finishedPerS = 0;
  #drawSoon = oncePerFrame(() => this.#draw());

  constructor(panel) {
    this.#panel = panel;
    for (const node of panel.querySelectorAll("[data-part]")) this.#parts[node.dataset.part] = node;
    for (const node of panel.querySelectorAll("[data-tile]")) this.#tiles[node.dataset.tile] = node;
    this.#makeCharts();
    document.addEventListener("visibilitychange", () => this.#follow());
    document.addEventListener("theme", () => {
      for (const chart of Object.values(this.#charts)) chart.forgetColours();
      this.#drawSoon();
    });
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
        this.#say("lost", "The server ended the feed. Trying again …");
      } catch (error) {
        if (signal.aborted) return;
        const isRefused = error.status === 401; // nobody gave the key: to be asked again, open the panel again
        this.#say("lost", isRefused ? error.message : `${error.message} Trying again …`);
        if (isRefused) return (this.#controller = null);
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS[Math.min(failures, RETRY_MS.length - 1)]));
    }
  }

  #take(snapshot) {
    if (snapshot.server) return this.#begin(snapshot.server);
    const { monotonic, totals, rates } = snapshot;
    const before = this.#latest ?? snapshot;
    const seconds = Math.max(monotonic - before.monotonic, 1e-3);
    this.#finishedPerS = (sum(totals.finished) - sum(before.totals.finished)) / seconds;
    this.#rates.push(rates);
    this.#rates.splice(0, this.#rates.length - HISTORY);
    this.#latest = snapshot;
    this.#drawSoon();
  }

  #begin(server) {
    this.#rates = [];
    this.#latest = null;
    this.#say("live", [server.architecture, server.dtype, server.device, server.attention_backend].join(" · "));
  }

  /** Without a connection nothing old is shown as if it were the case; the style sheet hides the rest. */
  #say(state, text) {
    this.#parts.live.dataset.state = state;
    this.#parts.live.textContent = text;
    this.#panel.classList.toggle("lost", state === "lost");
    if (state !== "lost") return;
    this.#latest = null;
    for (const tile of Object.values(this.#tiles)) tile.textContent = "no connection";
  }

  // --- what it looks like ---

  #makeCharts() {
    const fill = (name) => () => this.#colour(name);
    const shown = (text) => (_, value) => (value == null ? "–" : text(value));
    const line = (name, label, scale) => ({ label, scale, stroke: fill(name), value: shown(whole) });
    const bar = (name, label, value) => ({ label, scale: "ms", stroke: fill(name), fill: fill(name), width: 0, paths: bars, value });
    const fromZero = (_, least, most) => [0, Math.max(1, most * 1.08)];
    const few = (_, values) => values.map((value) => (value === null ? "" : short(value)));
    this.#charts = {
      lines: new Chart(this.#parts.lines, {
        x: { label: "s", value: shown((value) => value.toFixed(1)) },
        series: [line("generation", "generated", "out"), line("prompt", "prompt", "in")],
        axes: [{ size: 18 }, { scale: "out", values: few }, { scale: "in", side: 1, values: few, grid: { show: false } }],
        scales: { x: { time: false, range: [-HISTORY * PERIOD_S, 0] }, out: { range: fromZero }, in: { range: fromZero } },
      }),
      steps: new Chart(this.#parts.steps, {
        x: { label: "step", value: shown(whole) },
        series: [bar("generation", "ms", shown(ms)), bar("prompt", "of it prompt", shown(ms))],
        axes: [{ size: 18, values: few }, { scale: "ms", values: few }],
        scales: { x: { time: false, range: (_, first, last) => [first - 0.7, last + 0.7] }, ms: { range: (_, least, most) => [0, Math.max(1e-3, most * 1.08)] } },
      }),
    };
  }

  #draw() {
    const snapshot = this.#latest;
    if (!snapshot || !this.#isVisible) return;
    this.#drawTiles(snapshot);
    this.#drawLines();
    this.#drawPages(snapshot.pages);
    this.#drawSteps();
    this.#parts.latency.replaceChildren(...LATENCIES.map(([name, label]) => {
      const values = SHARES.map((share) => snapshot.latencies[name][`${share}_ms`]);
      const shown = values.map((value) => el("td", {}, value === null ? "–" : ms(value)));
      return el("tr", {}, el("th", { scope: "row" }, label), ...shown);
    }));
  }

  #drawTiles({ running, waiting, swapped, rates, totals }) {
    const set = (name, text) => (this.#tiles[name].textContent = text);
    set("running", whole(running));
    set("waiting", whole(waiting + swapped));
    set("finished", this.#finishedPerS.toFixed(1));
    set("generation", whole(rates.generation_tokens_per_s));
    set("busy", `${Math.round(100 * rates.device_busy_share)} %`);
    const { prefix_cache_queries: queries, prefix_cache_hits: hits } = totals;
    set("hits", queries ? `${Math.round((100 * hits) / queries)} %` : "–");
  }

  #drawLines() {
    const rates = [({ generation_tokens_per_s: out }) => out, ({ prefill_tokens_per_s: prompt }) => prompt];
    const [generation, prompt] = rates.map((rate) => this.#rates.map(rate));
    const peak = (values) => whole(Math.max(0, ...values));
    this.#label("lines", `peaks ${peak(generation)} and ${peak(prompt)}`);
    const ago = generation.map((_, i) => (i + 1 - generation.length) * PERIOD_S);
    this.#charts.lines.draw([ago, generation, prompt]);
  }

  #drawPages({ num_pages: pages, num_used: used, pages_per_cell: each, cells }) {
    const note = each > 1 ? `, 1 in ${each} shown` : "";
    this.#label("pages", `${whole(used)} of ${whole(pages)} in use${note}`);
    const [shared, own, cached, free] = ["shared", "used", "cached", "free"].map((name) => this.#colour(name));
    drawPages(this.#parts.pages, cells, { s: shared, u: own, c: cached, ".": free });
  }

  #drawSteps() {
    const steps = this.#latest.steps.slice(-MAX_STEPS);
    const durations = steps.map(({ duration }) => duration * 1000);
    this.#label("steps", steps.length ? `last ${steps.length}, longest ${ms(Math.max(...durations))} ms` : "none yet");
    this.#charts.steps.draw([
      steps.map(({ step_id: id }) => id),
      durations,
      steps.map(({ duration, tokens, prefill_tokens: prompt }) => (duration * 1000 * prompt) / Math.max(1, tokens)),
    ]);
  }

  /** The note beside a title; it is the picture's text too. */
  #label(name, text) {
    this.#parts[`${name}Note`].textContent = text;
    this.#parts[name].setAttribute("aria-label", text);
  }

  #colour(name) {
    return getComputedStyle(this.#panel.querySelector(`.swatch-${name}`)).backgroundColor;
  }
}
