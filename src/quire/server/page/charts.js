// Two small drawings on canvas: the map of KV blocks, and a line of recent values.

const MAP_HEIGHT_PX = 168;
const CELL_MIN_PX = 4;
const CELL_MAX_PX = 14;
const LINE_HEIGHT_PX = 36;

/** A canvas sharp on any screen, in CSS pixels, with the colours of the style sheet. */
class Drawing {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
  }

  get width() {
    return this.canvas.parentElement.clientWidth;
  }

  colour(name) {
    return getComputedStyle(this.canvas).getPropertyValue(name);
  }

  clear(width, height) {
    const scale = devicePixelRatio;
    const [pixelWidth, pixelHeight] = [Math.round(width * scale), Math.round(height * scale)];
    if (this.canvas.width !== pixelWidth || this.canvas.height !== pixelHeight) {
      this.canvas.width = pixelWidth;
      this.canvas.height = pixelHeight;
      this.canvas.style.width = `${width}px`;
      this.canvas.style.height = `${height}px`;
    }
    this.context.setTransform(scale, 0, 0, scale, 0, 0);
    this.context.clearRect(0, 0, width, height);
  }
}

/** One square per cell, row by row: 0 free, 1 cached, 2 in use, 3 shared. */
export class BlockMap extends Drawing {
  draw(cells) {
    if (!this.width) return;
    const fitting = Math.floor(Math.sqrt((this.width * MAP_HEIGHT_PX) / Math.max(cells.length, 1)));
    const pitch = Math.min(Math.max(fitting, CELL_MIN_PX), CELL_MAX_PX);
    const columns = Math.max(Math.floor(this.width / pitch), 1);
    this.clear(this.width, Math.ceil(cells.length / columns) * pitch);
    const colours = ["--free", "--cached", "--used", "--shared"].map((name) => this.colour(name));
    const side = pitch - (pitch > 6 ? 2 : 1);
    cells.forEach((state, i) => {
      this.context.fillStyle = colours[state] ?? colours[0];
      this.context.fillRect((i % columns) * pitch, Math.floor(i / columns) * pitch, side, side);
    });
  }
}

/** A line of the last values, newest at the right; the largest value is at the top. */
export class Sparkline extends Drawing {
  #values = [];

  constructor(canvas, numValues) {
    super(canvas);
    this.numValues = numValues;
  }

  push(value) {
    this.#values.push(value);
    if (this.#values.length > this.numValues) this.#values.shift();
    if (this.width) this.#draw(this.width, LINE_HEIGHT_PX);
  }

  #draw(width, height) {
    this.clear(width, height);
    const { context } = this;
    const top = Math.max(...this.#values, 1);
    const x = (i) => width - ((this.#values.length - 1 - i) / (this.numValues - 1)) * width;
    const y = (value) => height - 1.5 - (value / top) * (height - 4);
    context.fillStyle = this.colour("--line");
    context.fillRect(0, height - 1, width, 1);
    context.beginPath();
    this.#values.forEach((value, i) => context.lineTo(x(i), y(value)));
    context.strokeStyle = this.colour("--accent");
    context.lineWidth = 1.5;
    context.lineJoin = "round";
    context.stroke();
    context.lineTo(width, height);
    context.lineTo(x(0), height);
    context.fillStyle = this.colour("--wash");
    context.fill();
  }
}
