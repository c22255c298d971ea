// The dashboard's pictures: uPlot's axes, lines and hover, and a grid of pages on a canvas of our
// own. Colours come from the style sheet when they are drawn, so that they follow the theme.

import uPlot from "./uplot.js";

const HEIGHT_PX = 132;
const CELL_PX = { min: 4, max: 14 };
const KV_HEIGHT_PX = 150;

/** A uPlot that is made when there is room for it and is as wide as its place. */
export class Chart {
  #place;
  #options;
  #plot = null;

  /** `x` and `series` are uPlot's series, `axes` its axes but for what they look like. */
  constructor(place, { x, series, axes, scales }) {
    this.#place = place;
    this.#options = {
      height: HEIGHT_PX,
      series: [x, ...series.map((one) => ({ width: 1.5, points: { show: false }, ...one }))],
      axes: axes.map((one) => ({ ...this.#axisLook(), ...one })),
      scales: { x: { time: false }, ...scales },
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 6 } },
      padding: [8, 4, 0, 0],
    };
  }

  /** `data`: [x values, values of a series, ...] */
  draw(data) {
    const width = this.#place.clientWidth;
    if (!width) return;
    this.#plot ??= new uPlot({ ...this.#options, width }, data, this.#place);
    if (this.#plot.width !== width) this.#plot.setSize({ width, height: HEIGHT_PX });
    this.#plot.setData(data);
  }

  /** The next drawing takes its colours anew. */
  forgetColours() {
    this.#plot?.destroy();
    this.#plot = null;
  }

  #axisLook() {
    const style = (name) => () => getComputedStyle(this.#place)[name];
    return {
      stroke: style("color"),
      font: "10px system-ui, sans-serif",
      size: 34,
      gap: 3,
      grid: { stroke: style("borderTopColor"), width: 1 },
      ticks: { show: false },
    };
  }
}

export const bars = uPlot.paths.bars({ size: [0.8, 8], align: 0 });

/** A square per letter of `cells`; `colours` by letter. */
export function drawPages(canvas, cells, colours) {
  const size = cellSize(canvas.clientWidth, cells.length);
  const columns = Math.max(1, Math.floor(canvas.clientWidth / size));
  const context = prepare(canvas, Math.ceil(cells.length / columns) * size);
  const side = size - (size > 6 ? 2 : 1);
  for (let i = 0; i < cells.length; i++) {
    context.fillStyle = colours[cells[i]];
    context.fillRect((i % columns) * size, Math.floor(i / columns) * size, side, side);
  }
}

/** A context in CSS pixels, cleared; the canvas gets as many pixels as the screen has. */
function prepare(canvas, height) {
  const scale = devicePixelRatio;
  canvas.style.height = `${height}px`;
  const [wide, tall] = [canvas.clientWidth, height].map((size) => Math.round(size * scale));
  if (canvas.width !== wide || canvas.height !== tall) [canvas.width, canvas.height] = [wide, tall];
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, canvas.clientWidth, height);
  return context;
}

function cellSize(width, cells) {
  const fitting = Math.floor(Math.sqrt((width * KV_HEIGHT_PX) / Math.max(1, cells)));
  return Math.min(CELL_PX.max, Math.max(CELL_PX.min, fitting));
}
