// Draws the curves of report.html with uPlot. DATA is `curves.chart_data`, with `live` and `written`.
// The state of the page (axis, zoom, smoothing, hidden lines) is in the URL's hash, so it survives a reload, and links.
"use strict";
const SMOOTH = [0, 0.003, 0.01, 0.03, 0.1]; // shares of the longest run
const UNITS = { nats: (y) => y, perplexity: Math.exp, bits: (y, bytes) => y / Math.LN2 / bytes };
const X = { iteration: "iteration", tokens: "tokens", hours: "hours of training steps" };
const COLORS = 8;
const $ = (id) => document.getElementById(id);

// -- state

const params = new URLSearchParams(location.hash.slice(1));
const pick = (name, known, otherwise) => (known.includes(params.get(name)) ? params.get(name) : otherwise);
const numbers = (text) => (text || "").split(":").map(Number);
const state = {
  x: pick("x", Object.keys(X), "iteration"),
  unit: pick("unit", Object.keys(UNITS), "nats"),
  smooth: +pick("smooth", Object.keys(SMOOTH), "2"),
  zoom: params.has("zoom") ? numbers(params.get("zoom")) : null,
  flipped: new Set(params.getAll("flip")), // charts whose y is logarithmic and was not at first, or the reverse
  ranges: new Map(params.getAll("y").map((text) => [text.split("=")[0], numbers(text.split("=")[1])])),
  off: new Set(params.getAll("off")), // labels of hidden lines, and "run:NAME"
  open: new Set(params.getAll("open")), // texts of opened <details>
};

function keep() {
  const found = new URLSearchParams({ x: state.x, unit: state.unit, smooth: state.smooth });
  if (state.zoom) found.set("zoom", state.zoom.join(":"));
  for (const title of state.flipped) found.append("flip", title);
  for (const [title, range] of state.ranges) found.append("y", `${title}=${range.join(":")}`);
  for (const label of state.off) found.append("off", label);
  for (const text of state.open) found.append("open", text);
  history.replaceState(null, "", "#" + found);
}

let due = 0;
function changed() {
  keep();
  cancelAnimationFrame(due);
  due = requestAnimationFrame(draw); // later, because it removes the chart whose event this may be
}

const flip = (set, value) => void (set.delete(value) || set.add(value));

// -- numbers

function short(value) {
  const [scale, letter] = [[1e12, " T"], [1e9, " G"], [1e6, " M"], [1e3, " k"]].find(([s]) => Math.abs(value) >= s) || [1, ""];
  const shown = value / scale;
  return (value && Math.abs(value) < 1e-3 ? value.toExponential() : +shown.toPrecision(6)) + letter;
}

function precise(value) {
  if (value == null) return null;
  const size = Math.abs(value);
  return size >= 1e4 ? short(+value.toPrecision(5)) : size && size < 1e-3 ? value.toExponential(3) : value.toPrecision(5);
}

function ticks(low, high) {
  const rough = (high - low) / 6, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= rough);
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + 1e-9 * step; n++) found.push(+(n * step).toPrecision(12));
  return found;
}

function logTicks(low, high) {
  if (high / low < 30) return ticks(low, high).filter((y) => y > 0);
  const found = [], decades = Math.log10(high / low), every = Math.ceil(decades / 8);
  for (let n = Math.floor(Math.log10(low)); 10 ** n <= high; n += every)
    for (const factor of decades < 3 ? [1, 2, 5] : [1]) found.push(+(factor * 10 ** n).toPrecision(6));
  return found.filter((y) => y >= low && y <= high);
}

function mean(values, window) {
  // of the last `window` known values
  let sum = 0;
  const recent = [];
  return values.map((value) => {
    if (value == null) return null;
    sum += value;
    recent.push(value);
    if (recent.length > window) sum -= recent[recent.length - 1 - window];
    return sum / Math.min(recent.length, window);
  });
}

// -- charts

const longest = Math.max(1, ...DATA.grids.flat().map((grid) => grid.iteration.at(-1)));
const several = DATA.runs.length > 1;
const plots = new Map(); // by title
let running = []; // also charts that are being removed

function lines(chart) {
  // -> tables for uPlot.join, and the series of its columns
  const tables = [], series = [], bands = [];
  const unit = chart.loss ? UNITS[state.unit] : UNITS.nats;
  const named = new Set(chart.series.map((one) => one.label)).size > 1;
  chart.series.forEach((one, number) => {
    if (state.off.has("run:" + DATA.runs[one.run]) || (chart.loss && state.unit === "bits" && !DATA.bytes[one.run])) return;
    const order = several ? one.run : number;
    const style = {
      stroke: css(`--c${order % COLORS}`),
      label: several ? DATA.runs[one.run] + (named && one.label ? ": " + one.label : "") : one.label || chart.title.split(/[,;]/)[0],
      dash: order >= COLORS || (several && !one.points && named && number && chart.series[number - 1].run === one.run) ? [6, 3] : [],
    };
    style.show = !state.off.has(style.label);
    const grid = DATA.grids[one.run][one.grid], x = grid[state.x];
    const shown = (values) => values.map((y) => (y == null ? null : unit(y, DATA.bytes[one.run])));
    const table = [x];
    const add = (values, more) => series.push({ spanGaps: true, ...style, ...more }) && table.push(shown(values));
    const window = Math.round((SMOOTH[state.smooth] * longest * x.length) / Math.max(1, grid.iteration.at(-1)));
    const smooth = !one.points && !chart.exact && window > 1;
    const helper = { class: "helper", points: { show: false }, width: 1, stroke: style.stroke + "50" };
    if (one.low && style.show) {
      add(one.low, helper); // as lines too: a spike of a point has less than a pixel of the band
      add(one.high, helper);
      bands.push({ series: [series.length, series.length - 1], fill: style.stroke + "38" });
    } else if (smooth && style.show) add(one.y, helper);
    add(smooth ? mean(one.y, window) : one.y, {
      width: 1.75,
      line: true,
      points: one.points ? { show: true, size: 5, fill: style.stroke } : x.length > 60 ? { show: false } : {},
      value: (u, y, at, index) => precise(index == null ? u.data[at].findLast((value) => value != null) : y) ?? "none",
    });
    tables.push(table);
  });
  return { tables, series, bands };
}

function nearest(u, at, index) {
  // -> the known value next to the cursor, because lines have different grids
  const values = u.data[at];
  for (let step = 0; step < values.length; step++) {
    if (values[index - step] != null) return index - step;
    if (values[index + step] != null) return index + step;
  }
  return index;
}

function yRange(chart, log) {
  return (u, low, high) => {
    if (state.ranges.has(chart.title)) return state.ranges.get(chart.title);
    if (low == null) return log ? [1, 10] : [0, 1];
    if (log) {
      const margin = (high / low) ** 0.04 * (high === low ? 1.2 : 1);
      return [low / margin, high * margin];
    }
    if (chart.zero) return [Math.min(0, low), high * 1.05 || 1];
    const margin = (high - low) * 0.04 || Math.abs(high) * 0.05 || 1;
    return [low - margin, high + margin];
  };
}

function drawMarks(u) {
  const { ctx, bbox } = u;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = css("--soft");
  ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
  ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
  ctx.textBaseline = "top";
  ctx.textAlign = "left";
  for (const mark of DATA.marks) {
    const x = u.valToPos(mark.at[state.x], "x", true);
    if (several) ctx.strokeStyle = css(`--c${mark.run % COLORS}`);
    if (x < bbox.left || x > bbox.left + bbox.width || state.off.has("run:" + DATA.runs[mark.run])) continue;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    if (!several && DATA.marks.length <= 8) ctx.fillText(mark.text.split(" after ")[0], x + 4 * devicePixelRatio, bbox.top);
  }
  ctx.restore();
}

function selected(u, chart) {
  const { left, top, width, height } = u.select;
  if (width < 4 && height < 4) return;
  if (width < u.over.clientWidth) state.zoom = [u.posToVal(left, "x"), u.posToVal(left + width, "x")];
  if (height < u.over.clientHeight) state.ranges.set(chart.title, [u.posToVal(top + height, "y"), u.posToVal(top, "y")]);
  changed();
}

function options(chart, log, found, place) {
  const ink = css("--soft"), rule = { stroke: css("--line"), width: 1 };
  const axis = { stroke: ink, grid: rule, ticks: rule, font: "12px system-ui, sans-serif" };
  const moves = (type) => type === "mousemove" || type === "mouseleave";
  return {
    width: place.clientWidth,
    height: 270,
    scales: {
      x: { time: false, range: (u, low, high) => state.zoom || (low === high ? [low - 0.5, high + 0.5] : [low, high]) },
      y: { distr: log ? 3 : 1, range: yRange(chart, log) },
    },
    series: [{ label: X[state.x], value: (u, x) => (x == null ? "last" : short(+x.toPrecision(8)).replace("G", "B")) }, ...found.series],
    bands: found.bands,
    axes: [
      { ...axis, values: (u, at) => at.map((x) => short(x).replace("G", "B")), size: 34 },
      { ...axis, values: (u, at) => at.map(short), size: 64, ...(log ? { splits: (u, i, low, high) => logTicks(low, high), filter: (u, at) => at } : {}) },
    ],
    cursor: {
      y: false,
      drag: { x: true, y: true, uni: 30, setScale: false },
      sync: { key: "page", filters: { pub: moves, sub: moves } },
      dataIdx: (u, at, index) => (at ? nearest(u, at, index) : index),
      bind: { dblclick: () => () => void reset() },
    },
    hooks: {
      draw: [drawMarks],
      setSelect: [(u) => selected(u, chart)],
      setSeries: [(u, at, opts) => opts.show != null && toggled(u)],
    },
  };
}

function toggled(u) {
  if (!running.includes(u)) return;
  for (const one of u.series.filter((each) => each.line)) one.show ? state.off.delete(one.label) : state.off.add(one.label);
  changed();
}

function reset() {
  state.zoom = null;
  state.ranges.clear();
  changed();
}

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function draw() {
  const old = running;
  running = [];
  old.forEach((u) => u.destroy());
  plots.clear();
  DATA.charts.forEach((chart, number) => {
    const place = $(`chart${number}`), log = chart.log !== state.flipped.has(chart.title);
    const found = lines(chart);
    place.previousElementSibling.querySelector("button").setAttribute("aria-pressed", log);
    place.classList.toggle("empty", !found.tables.length);
    if (!found.tables.length) return;
    const data = uPlot.join(found.tables);
    if (log) for (const values of data.slice(1)) values.forEach((y, at) => y != null && y <= 0 && (values[at] = null));
    const plot = new uPlot(options(chart, log, found, place), data, place);
    running.push(plot);
    plots.set(chart.title, plot);
  });
  for (const name of ["x", "unit"])
    for (const button of document.querySelectorAll(`button[data-${name}]`)) button.setAttribute("aria-pressed", button.dataset[name] === state[name]);
  for (const button of document.querySelectorAll("button[data-run]"))
    button.setAttribute("aria-pressed", !state.off.has("run:" + button.dataset.run));
  const window = Math.round(SMOOTH[state.smooth] * longest);
  $("smooth").value = state.smooth;
  $("window").textContent = window > 1 ? `mean of ${window.toLocaleString("en")} iterations` : "none";
  $("reset").disabled = !state.zoom && !state.ranges.size;
}

// -- controls

if (DATA.charts.length) {
  for (const button of document.querySelectorAll("button[data-x]"))
    button.onclick = () => ((state.x = button.dataset.x), reset());
  for (const button of document.querySelectorAll("button[data-unit]"))
    button.onclick = () => ((state.unit = button.dataset.unit), state.ranges.clear(), changed());
  for (const button of document.querySelectorAll("button[data-log]"))
    button.onclick = () => (flip(state.flipped, button.dataset.log), state.ranges.delete(button.dataset.log), changed());
  for (const button of document.querySelectorAll("button[data-run]"))
    button.onclick = () => (flip(state.off, "run:" + button.dataset.run), changed());
  $("smooth").oninput = () => ((state.smooth = +$("smooth").value), changed());
  $("reset").onclick = reset;
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  addEventListener("resize", changed);
  draw();
}
for (const details of document.querySelectorAll("details")) {
  const text = details.firstElementChild.textContent;
  details.open = state.open.has(text);
  details.ontoggle = () => (state.open[details.open ? "add" : "delete"](text), keep());
}

// -- a run that trains

if (DATA.live) {
  const opened = Date.now();
  setInterval(() => {
    const age = Math.round(Date.now() / 1000 - DATA.written);
    const ago = age < 120 ? `${age} s` : age < 7200 ? `${Math.round(age / 60)} minutes` : `${Math.round(age / 3600)} hours`;
    $("age").textContent = `${ago} ago` + (age > 20 * DATA.live && !DATA.ended ? ": the run may have been killed" : "");
    const busy = document.hidden || document.querySelector(".uplot:hover, :active") || !$("refresh").checked;
    if (!busy && Date.now() - opened > 1000 * DATA.live) location.reload();
  }, 1000);
}
