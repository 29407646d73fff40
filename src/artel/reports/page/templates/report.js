// The plots of a report: drawn by Plotly from the data that stands in the page, and in a live report from the server.
"use strict";

const page = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;
const view = { axis: "step", smoothing: 0, logX: false, logY: false, marks: true, range: null };
let plots = page.plots;

function color(name) {
  return getComputedStyle(root).getPropertyValue(`--${name}`).trim();
}

function isDark() {
  const theme = root.dataset.theme;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function runColor(run) {
  const colors = isDark() ? page.colors.dark : page.colors.light;
  return colors[run % colors.length];
}

// The mean of what came before, newest first: weights fall by `weight` from one point to the next, and sum to one.
function smoothed(values, weight) {
  let sum = 0, total = 0;
  return values.map((value) => {
    sum = sum * weight + value;
    total = total * weight + 1;
    return sum / total;
  });
}

// Time in the unit in which the longest run reads well.
function timeUnit() {
  const last = Math.max(0, ...plots.charts.flatMap((chart) => chart.traces.map((trace) => trace.seconds.at(-1) || 0)));
  if (last >= 7200) return { name: "hours", seconds: 3600 };
  return last >= 240 ? { name: "minutes", seconds: 60 } : { name: "seconds", seconds: 1 };
}

function across(points) {
  if (view.axis === "seconds") {
    const unit = timeUnit().seconds;
    return points.seconds.map((value) => (value === null ? null : value / unit));
  }
  return points[view.axis];
}

function axisTitle() {
  return view.axis === "seconds" ? page.words[timeUnit().name] : page.words[view.axis];
}

function lines(chart) {
  const traces = [];
  for (const trace of chart.traces) {
    const shared = {
      type: "scatter", x: across(trace), hoverlabel: { namelength: -1 },
      line: { color: runColor(trace.run), width: 1.8, dash: trace.validation ? "dot" : "solid" },
      hovertemplate: `%{y:.5~g}<extra>${trace.label}</extra>`,
    };
    const mode = trace.validation || trace.value.length < 3 ? "lines+markers" : "lines";
    if (view.smoothing > 0 && !trace.validation && trace.value.length > 2) {
      traces.push({ ...shared, y: trace.value, mode, name: trace.label, showlegend: false, hoverinfo: "skip",
        hovertemplate: null, opacity: 0.25, line: { ...shared.line, width: 1 } });
      traces.push({ ...shared, y: smoothed(trace.value, view.smoothing), mode, name: trace.label });
    } else {
      traces.push({ ...shared, y: trace.value, mode, name: trace.label, marker: { size: 6, symbol: "circle" } });
    }
  }
  return traces;
}

const SYMBOLS = { checkpoint: "diamond", best: "star", restart: "triangle-right", bad: "x" };

function marks(chart) {
  if (!view.marks) return [];
  const first = new Map(chart.marks.map((mark, index) => [mark.kind, index]).reverse());
  return chart.marks.map((mark, index) => ({
    type: "scatter", mode: "markers", x: across(mark), y: mark.value, name: mark.label, text: mark.text,
    legendgroup: mark.kind, showlegend: first.get(mark.kind) === index,
    hovertemplate: "%{text}<extra></extra>",
    marker: {
      symbol: SYMBOLS[mark.kind], size: { best: 13, restart: 13, bad: 10 }[mark.kind] || 9, line: { width: 1, color: color("card") },
      color: { bad: color("bad"), restart: color("warn"), best: color("good") }[mark.kind] || color("soft"),
    },
  }));
}

function lineLayout(chart, element) {
  const axis = { gridcolor: color("line"), zerolinecolor: color("line"), linecolor: color("line"), automargin: true };
  const narrow = element.clientWidth < 460;
  return {
    ...baseLayout(),
    xaxis: { ...axis, title: { text: axisTitle(), standoff: 6 }, type: view.logX ? "log" : "linear",
      ...(view.range ? { range: view.range, autorange: false } : { autorange: true }) },
    yaxis: { ...axis, type: view.logY ? "log" : "linear", tickformat: chart.percent ? ".3~%" : "", nticks: 6 },
    hovermode: "x unified",
    legend: { orientation: "h", x: 0, y: narrow ? -0.3 : -0.18, yanchor: "top", font: { size: 11 } },
    showlegend: chart.traces.length + chart.marks.length > 1,
    margin: { l: 44, r: 8, t: 8, b: 36 },
  };
}

function baseLayout() {
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", separators: page.separators,
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: color("soft") },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: color("soft"), activecolor: color("accent") },
    hoverlabel: { bgcolor: color("card"), bordercolor: color("line"), font: { color: color("ink"), size: 12 } },
  };
}

const CONFIG = {
  responsive: true, displaylogo: false, doubleClick: "reset", displayModeBar: matchMedia("(hover: hover)").matches,
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
};

function drawChart(chart) {
  const element = document.getElementById(`plot-${chart.id}`);
  if (!element) return;
  const isNew = !element.classList.contains("js-plotly-plot");
  Plotly.react(element, [...lines(chart), ...marks(chart)], lineLayout(chart, element), CONFIG);
  if (isNew) {
    element.on("plotly_relayout", (change) => follow(element, change));
    element.addEventListener("keydown", (event) => byKey(element, event));
  }
}

const BARS = { light: ["#0b6e99", "#c2693d", "#7a8f3a", "#8b5fa8", "#b8860b", "#5d7a8c", "#b5446e", "#3d8b7d", "#999999", "#6b5d4d"],
  dark: ["#58b4dc", "#e0935f", "#a8bf5c", "#b78fd6", "#dcb04a", "#8fb0c4", "#e07fa5", "#6cc0b0", "#b0b0b0", "#a8957f"] };

function drawBars(bars) {
  const element = document.getElementById(`plot-${bars.id}`);
  if (!element) return;
  const colors = BARS[isDark() ? "dark" : "light"];
  element.style.height = `${Math.max(9, 4.5 + 2.1 * bars.categories.length)}rem`;
  const data = bars.series.map((series, index) => ({
    type: "bar", orientation: "h", y: bars.categories, x: series.values, name: series.name,
    marker: { color: colors[index % colors.length] },
    text: bars.series.length === 1 ? bars.texts : undefined, textposition: "auto", cliponaxis: false,
    hovertemplate: `%{y}: %{x:,.5~g} ${bars.unit}<extra>${bars.series.length > 1 ? series.name : ""}</extra>`,
  }));
  const axis = { gridcolor: color("line"), zerolinecolor: color("line"), automargin: true, fixedrange: true };
  Plotly.react(element, data, {
    ...baseLayout(), barmode: "stack",
    xaxis: { ...axis, title: { text: bars.unit, standoff: 4 }, nticks: 6 },
    yaxis: { ...axis, autorange: "reversed", gridcolor: "rgba(0,0,0,0)" },
    showlegend: bars.series.length > 1, legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 11 } },
    margin: { l: 8, r: 12, t: 8, b: 36 },
  }, { ...CONFIG, displayModeBar: false });
}

function draw() {
  plots.charts.forEach(drawChart);
  plots.bars.forEach(drawBars);
}

// A zoom of one plot is that of all: they share their axis.
let following = false;
function follow(source, change) {
  if (following) return;
  const begin = change["xaxis.range[0]"], range = change["xaxis.range"];
  if (begin !== undefined) view.range = [begin, change["xaxis.range[1]"]];
  else if (range) view.range = range;
  else if (change["xaxis.autorange"]) view.range = null;
  else return;
  following = true;
  const others = plots.charts.map((chart) => document.getElementById(`plot-${chart.id}`)).filter((plot) => plot && plot !== source);
  const update = view.range ? { "xaxis.range": [...view.range], "xaxis.autorange": false } : { "xaxis.autorange": true };
  Promise.all(others.map((plot) => Plotly.relayout(plot, update))).finally(() => { following = false; });
}

function byKey(element, event) {
  const [low, high] = element.layout.xaxis.range, width = high - low;
  const ranges = {
    ArrowLeft: [low - width / 5, high - width / 5], ArrowRight: [low + width / 5, high + width / 5],
    "+": [low + width / 5, high - width / 5], "=": [low + width / 5, high - width / 5],
    "-": [low - width / 4, high + width / 4],
  };
  if (event.key === "0" || event.key === "Escape") Plotly.relayout(element, { "xaxis.autorange": true, "yaxis.autorange": true });
  else if (ranges[event.key]) Plotly.relayout(element, { "xaxis.range": ranges[event.key] });
  else return;
  event.preventDefault();
}

// Controls
function remember(name, value) {
  try { localStorage.setItem(name, value); } catch { /* a file in a browser that keeps nothing */ }
}

function remembered(name) {
  try { return localStorage.getItem(name); } catch { return null; }
}

function setUp() {
  for (const input of document.querySelectorAll("input[name=axis]")) {
    input.addEventListener("change", () => { view.axis = input.value; view.range = null; draw(); });
  }
  const smoothing = document.getElementById("smoothing"), shown = document.getElementById("smoothing-value");
  smoothing.addEventListener("input", () => {
    view.smoothing = Number(smoothing.value);
    shown.textContent = smoothing.value === "0" ? page.words.off : Number(smoothing.value).toLocaleString(root.lang);
    plots.charts.forEach(drawChart);
  });
  const checks = { "log-x": "logX", "log-y": "logY", marks: "marks" };
  for (const [id, name] of Object.entries(checks)) {
    const input = document.getElementById(id);
    input.addEventListener("change", () => {
      view[name] = input.checked;
      if (name === "logX") view.range = null;
      plots.charts.forEach(drawChart);
    });
  }
  document.getElementById("reset").addEventListener("click", () => { view.range = null; draw(); });
  for (const input of document.querySelectorAll("input[name=theme]")) {
    input.addEventListener("change", () => { setTheme(input.value); remember("artel-theme", input.value); draw(); });
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("beforeprint", () => { const kept = root.dataset.theme; setTheme("light"); draw(); setTheme(kept || "auto"); });
  addEventListener("afterprint", draw);
  document.addEventListener("click", copy);
}

function setTheme(theme) {
  if (theme === "auto") delete root.dataset.theme;
  else root.dataset.theme = theme;
  const input = document.querySelector(`input[name=theme][value=${theme}]`);
  if (input) input.checked = true;
}

function copy(event) {
  const button = event.target.closest("button[data-copy]");
  if (!button) return;
  const text = document.getElementById(button.dataset.copy).textContent;
  navigator.clipboard?.writeText(text).then(() => { button.textContent = page.words.copied; });
}

// A live report: the server sends the parts of the page and the figures of the plots when they changed. The newest is
// shown; drawing takes a third of the time at most, so that a slow machine does not fall behind and the page answers.
let newest = null, drawing = 0;
function listen() {
  const source = new EventSource("events");
  source.addEventListener("report", (event) => {
    if (newest === null) setTimeout(renew, 2 * drawing);
    newest = event.data;
  });
  source.onerror = () => connection(page.words.lost);
}

function renew() {
  const started = performance.now(), report = JSON.parse(newest);
  newest = null;
  if (report.problem) return connection(report.problem);
  for (const [name, html] of Object.entries(report.parts)) renewPart(name, html);
  for (const input of document.querySelectorAll("input[name=axis]")) input.disabled = !report.axes.includes(input.value);
  plots = report.plots;
  draw();
  connection("");
  drawing = performance.now() - started;
}

const rendered = {};
function renewPart(name, html) {
  const part = document.querySelector(`[data-part="${name}"]`);
  if (!part || rendered[name] === html) return;
  rendered[name] = html;
  const fresh = document.createElement("template");
  fresh.innerHTML = html;
  if (hasPlots(part) && places(fresh.content) === places(part)) renewTables(part, fresh.content);
  else replacePart(part, fresh.content);
  const section = document.getElementById(name), link = document.querySelector(`nav a[href="#${name}"]`);
  if (section && link) section.hidden = link.hidden = !html;
}

function hasPlots(node) {
  return node.querySelector(".plot") !== null;
}

function places(node) {
  return [...node.querySelectorAll(".plot, details")].map((element) => element.id).join();
}

// The plots stay, with their zoom and what is hovered.
function renewTables(part, fresh) {
  for (const details of fresh.querySelectorAll("details")) document.getElementById(details.id).replaceChildren(...details.childNodes);
}

function replacePart(part, fresh) {
  const open = new Set([...part.querySelectorAll("details[open]")].map((details) => details.id));
  const closed = new Set([...part.querySelectorAll("details:not([open])")].map((details) => details.id));
  part.querySelectorAll(".js-plotly-plot").forEach((plot) => Plotly.purge(plot));
  part.replaceChildren(fresh);
  for (const details of part.querySelectorAll("details")) {
    if (open.has(details.id)) details.open = true;
    else if (closed.has(details.id)) details.open = false;
  }
}

function connection(message) {
  const note = document.getElementById("connection");
  note.textContent = message;
  note.hidden = !message;
}

setTheme(remembered("artel-theme") || "auto");
setUp();
draw();
if (page.live) listen();
