// Three small pictures on canvases. Colours come from the swatches of their legends, so the style
// sheet alone decides them. Sizes are CSS pixels.

const BAR_PX = 4;
const CELL_PX = { min: 4, max: 14 };
const KV_HEIGHT_PX = 150;

/** A context in CSS pixels, cleared; the canvas gets as many pixels as the screen has. */
function prepare(canvas, height) {
  const width = canvas.clientWidth;
  const scale = devicePixelRatio;
  if (height) canvas.style.height = `${height}px`;
  const tall = height ?? canvas.clientHeight;
  const [wanted, wantedTall] = [Math.round(width * scale), Math.round(tall * scale)];
  if (canvas.width !== wanted || canvas.height !== wantedTall) [canvas.width, canvas.height] = [wanted, wantedTall];
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, tall);
  return { context, width, height: tall };
}

/** A lane per series, {values, colour}, each up to its own peak; the newest at the right. */
export function drawLines(canvas, series, length) {
  const { context, width, height } = prepare(canvas);
  const lane = height / series.length;
  series.forEach(({ values, colour }, number) => {
    if (!values.length) return;
    const floor = (number + 1) * lane;
    const top = Math.max(1, ...values);
    const x = (i) => width - ((values.length - 1 - i) * width) / (length - 1);
    context.beginPath();
    values.forEach((value, i) => context.lineTo(x(i), floor - 1 - (value / top) * (lane - 5)));
    context.strokeStyle = context.fillStyle = colour;
    context.lineWidth = 1.5;
    context.lineJoin = "round";
    context.stroke();
    context.lineTo(width, floor);
    context.lineTo(x(0), floor);
    context.globalAlpha = 0.16;
    context.fill();
    context.globalAlpha = 1;
  });
}

/** How many of the newest steps fit. */
export const stepsThatFit = (canvas) => Math.floor(canvas.clientWidth / BAR_PX);

/** A bar per step, as tall as it took long, split by its prompt and generated tokens. */
export function drawSteps(canvas, steps, colours) {
  const { context, width, height } = prepare(canvas);
  const top = Math.max(1e-6, ...steps.map(({ duration }) => duration));
  steps.forEach(({ duration, tokens, prefill_tokens: prompt }, i) => {
    const x = width - (steps.length - i) * BAR_PX;
    const tall = Math.max(1, (duration / top) * height);
    context.fillStyle = colours.generated;
    context.fillRect(x, height - tall, BAR_PX - 1, tall);
    context.fillStyle = colours.prompt;
    context.fillRect(x, height - tall, BAR_PX - 1, (tall * prompt) / Math.max(1, tokens));
  });
}

/** A square per letter of `cells`; `colours` by letter. */
export function drawPages(canvas, cells, colours) {
  const size = cellSize(canvas.clientWidth, cells.length);
  const columns = Math.max(1, Math.floor(canvas.clientWidth / size));
  const { context } = prepare(canvas, Math.ceil(cells.length / columns) * size);
  const side = size - (size > 6 ? 2 : 1);
  for (let i = 0; i < cells.length; i++) {
    context.fillStyle = colours[cells[i]];
    context.fillRect((i % columns) * size, Math.floor(i / columns) * size, side, side);
  }
}

function cellSize(width, cells) {
  const fitting = Math.floor(Math.sqrt((width * KV_HEIGHT_PX) / Math.max(1, cells)));
  return Math.min(CELL_PX.max, Math.max(CELL_PX.min, fitting));
}
