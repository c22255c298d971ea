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
    const style = (name) => () => getComputedStyle(place)[name];
    const look = {
      stroke: style("color"), font: "10px system-ui, sans-serif", size: 34, gap: 3,
      grid: { stroke: style("borderTopColor"), width: 1 }, ticks: { show: false },
    };
    this.#place = place;
    this.#options = {
      height: HEIGHT_PX,
      series: [x, ...series.map((one) => ({ width: 1.5, points: { show: false }, ...one }))],
      axes: axes.map((one) => ({ ...look, ...one })),
      scales,
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
}

export const bars = uPlot.paths.bars({ size: [0.8, 8], align: 0 });

/** A square per letter of `cells`; `colours` by letter. */
export function drawPages(canvas, cells, colours) {
  const width = canvas.clientWidth;
  const fitting = Math.floor(Math.sqrt((width * KV_HEIGHT_PX) / Math.max(1, cells.length)));
  const size = Math.min(CELL_PX.max, Math.max(CELL_PX.min, fitting));
  const columns = Math.max(1, Math.floor(width / size));
  const height = Math.ceil(cells.length / columns) * size;
  canvas.style.height = `${height}px`;
  [canvas.width, canvas.height] = [width * devicePixelRatio, height * devicePixelRatio]; // clears it
  const context = canvas.getContext("2d");
  context.scale(devicePixelRatio, devicePixelRatio);
  const side = size - (size > 6 ? 2 : 1);
  for (let i = 0; i < cells.length; i++) {
    context.fillStyle = colours[cells[i]];
    context.fillRect((i % columns) * size, Math.floor(i / columns) * size, side, side);
  }
}
