// The live panel: one stream of snapshots (server/page.py), read only while it can be seen.

import { eventBatches, request } from "./api.js";
import { bars, Chart, drawPages } from "./charts.js";
import { el, oncePerFrame } from "./dom.js";

const HISTORY = 120; // snapshots: a minute
const PERIOD_S = 0.5;
const MAX_STEPS = 64;
const MAX_RETRY_MS = 5000;
const LATENCIES = {
  time_to_first_token: "First token", inter_token: "Between tokens", e2e: "Whole answer", queue: "In the queue",
  loop_lag: "Loop lag",
};
const PERCENTILES = ["p50_ms", "p90_ms", "p99_ms"];

const whole = (value) => Math.round(value).toLocaleString("en");
const short = (value) => (value < 10_000 ? String(value) : `${Math.round(value / 1000)}k`);
const percent = (share) => `${Math.round(100 * share)} %`;
const sum = (counts) => Object.values(counts).reduce((total, count) => total + count, 0);
const ms = (value) => (value < 10 ? value.toFixed(2) : value < 100 ? value.toFixed(1) : whole(value));

export class Dashboard {
  #parts = {}; // by data-part in index.html
  #tiles = {};
  #charts;
  #panel;
  #controller = null;
  #rates = []; // of the last snapshots
  #latest = null;
  #finishedPerS = 0;
  #drawSoon = oncePerFrame(() => this.#draw());

  constructor(panel) {
    this.#panel = panel;
    for (const node of panel.querySelectorAll("[data-part]")) this.#parts[node.dataset.part] = node;
    for (const node of panel.querySelectorAll("[data-tile]")) this.#tiles[node.dataset.tile] = node;
    this.#charts = this.#makeCharts();
    document.addEventListener("visibilitychange", () => this.#follow());
    document.addEventListener("theme", () => {
      for (const chart of Object.values(this.#charts)) chart.forgetColours();
      this.#drawSoon();
    });
    new ResizeObserver(() => this.#follow()).observe(panel); // which opening and closing are, too
  }

  /** Connected exactly while somebody can see it. */
  #follow() {
    const wanted = this.#panel.offsetWidth > 0 && !document.hidden;
    this.#drawSoon();
    if (wanted === (this.#controller !== null)) return;
    this.#controller?.abort();
    this.#controller = wanted ? new AbortController() : null;
    if (wanted) this.#watch(this.#controller.signal);
  }

  async #watch(signal) {
    for (let waitMs = 1000; !signal.aborted; waitMs = Math.min(2 * waitMs, MAX_RETRY_MS)) {
      try {
        for await (const events of eventBatches(await request("dashboard/events", { signal }))) {
          waitMs = 500;
          for (const event of events) this.#take(JSON.parse(event));
        }
        this.#lose("The server ended the feed. Trying again …");
      } catch (error) {
        if (signal.aborted) return;
        const isRefused = error.status === 401; // nobody gave the key: opening the panel asks again
        this.#lose(isRefused ? error.message : `${error.message} Trying again …`);
        if (isRefused) return (this.#controller = null);
      }
      await new Promise((resolve) => setTimeout(resolve, waitMs));
    }
  }

  #take(snapshot) {
    const { monotonic, totals, rates, server } = snapshot;
    if (server) {
      this.#rates = [];
      this.#latest = null;
      return this.#say("live", [server.architecture, server.dtype, server.device, server.attention_backend].join(" · "));
    }
    const before = this.#latest ?? snapshot;
    const seconds = Math.max(monotonic - before.monotonic, 1e-3);
    this.#finishedPerS = (sum(totals.finished) - sum(before.totals.finished)) / seconds;
    this.#rates = [...this.#rates, rates].slice(-HISTORY);
    this.#latest = snapshot;
    this.#drawSoon();
  }

  /** Nothing old is shown as if it were the case; the style sheet hides the rest. */
  #lose(why) {
    this.#latest = null;
    this.#say("lost", why);
    for (const tile of Object.values(this.#tiles)) tile.textContent = "no connection";
  }

  #say(state, text) {
    this.#parts.live.dataset.state = state;
    this.#parts.live.textContent = text;
    this.#panel.classList.toggle("lost", state === "lost");
  }

  #makeCharts() {
    const fill = (name) => () => this.#colour(name);
    const shown = (text) => (_, value) => (value == null ? "–" : text(value));
    const line = (name, label, scale) => ({ label, scale, stroke: fill(name), value: shown(whole) });
    const bar = (name, label) =>
      ({ label, scale: "ms", stroke: fill(name), fill: fill(name), width: 0, paths: bars, value: shown(ms) });
    const fromZero = (atLeast) => ({ range: (_, least, most) => [0, Math.max(atLeast, most * 1.08)] });
    const few = (_, values) => values.map((value) => (value === null ? "" : short(value)));
    const axis = (scale, name) => ({ scale, values: few, stroke: fill(name) }); // two scales: each in its line's colour
    return {
      lines: new Chart(this.#parts.lines, {
        x: { label: "s", value: shown((value) => value.toFixed(1)) },
        series: [line("generation", "generated", "out"), line("prompt", "prompt", "in")],
        axes: [{ size: 18 }, axis("out", "generation"), { ...axis("in", "prompt"), side: 1, grid: { show: false } }],
        scales: { x: { time: false, range: [-HISTORY * PERIOD_S, 0] }, out: fromZero(1), in: fromZero(1) },
      }),
      steps: new Chart(this.#parts.steps, {
        x: { label: "step", value: shown(whole) },
        series: [bar("generation", "ms"), bar("prompt", "of it prompt")],
        axes: [{ size: 18, values: few }, { scale: "ms", values: few }],
        scales: { x: { time: false, range: (_, first, last) => [first - 0.7, last + 0.7] }, ms: fromZero(1e-3) },
      }),
    };
  }

  #draw() {
    if (!this.#latest || !this.#controller) return;
    this.#drawTiles(this.#latest);
    this.#drawLines(this.#rates);
    this.#drawPages(this.#latest.pages);
    this.#drawSteps(this.#latest.steps.slice(-MAX_STEPS));
    this.#drawLatencies(this.#latest.latencies);
  }

  #drawTiles({ running, waiting, swapped, rates, totals }) {
    const { prefix_cache_queries: queries, prefix_cache_hits: hits } = totals;
    const texts = {
      running: whole(running),
      waiting: whole(waiting + swapped),
      finished: this.#finishedPerS.toFixed(1),
      generation: whole(rates.generation_tokens_per_s),
      busy: percent(rates.device_busy_share),
      hits: queries ? percent(hits / queries) : "–",
    };
    for (const [name, text] of Object.entries(texts)) this.#tiles[name].textContent = text;
  }

  #drawLines(rates) {
    const generation = rates.map((one) => one.generation_tokens_per_s);
    const prompt = rates.map((one) => one.prefill_tokens_per_s);
    this.#label("lines", `peaks ${whole(Math.max(...generation))} and ${whole(Math.max(...prompt))}`);
    this.#charts.lines.draw([rates.map((_, i) => (i + 1 - rates.length) * PERIOD_S), generation, prompt]);
  }

  #drawPages({ num_pages: pages, num_used: used, pages_per_cell: each, cells }) {
    this.#label("pages", `${whole(used)} of ${whole(pages)} in use${each > 1 ? `, 1 in ${each} shown` : ""}`);
    const [shared, own, cached, free] = ["shared", "used", "cached", "free"].map((name) => this.#colour(name));
    drawPages(this.#parts.pages, cells, { s: shared, u: own, c: cached, ".": free });
  }

  #drawSteps(steps) {
    const durations = steps.map(({ duration }) => duration * 1000);
    const prompts = steps.map(({ tokens, prefill_tokens: prompt }, i) => (durations[i] * prompt) / Math.max(1, tokens));
    this.#label("steps", steps.length ? `last ${steps.length}, longest ${ms(Math.max(...durations))} ms` : "none yet");
    this.#charts.steps.draw([steps.map(({ step_id: id }) => id), durations, prompts]);
  }

  #drawLatencies(latencies) {
    this.#parts.latency.replaceChildren(...Object.entries(LATENCIES).map(([name, label]) => {
      const values = PERCENTILES.map((one) => latencies[name][one]);
      const cells = values.map((value) => el("td", {}, value === null ? "–" : ms(value)));
      return el("tr", {}, el("th", { scope: "row" }, label), ...cells);
    }));
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
