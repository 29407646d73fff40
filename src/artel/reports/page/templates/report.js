// The plots of a report: Plotly draws them from the data in the page, or, in a live report, from the server.
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

// Exponential moving average: weights fall by the factor `weight` from each point to the one before, and sum to one.
function smooth(values, weight) {
  let sum = 0, weightSum = 0;
  return values.map((value) => {
    sum = sum * weight + value;
    weightSum = weightSum * weight + 1;
    return sum / weightSum;
  });
}

// The unit of time that suits the longest run.
function chooseTimeUnit() {
  const last = Math.max(0, ...plots.charts.flatMap((chart) => chart.traces.map((trace) => trace.seconds.at(-1) || 0)));
  if (last >= 7200) return { name: "hours", seconds: 3600 };
  return last >= 240 ? { name: "minutes", seconds: 60 } : { name: "seconds", seconds: 1 };
}

function xValues(points) {
  if (view.axis === "seconds") {
    const unit = chooseTimeUnit().seconds;
    return points.seconds.map((value) => (value === null ? null : value / unit));
  }
  return points[view.axis];
}

function axisTitle() {
  return view.axis === "seconds" ? page.words[chooseTimeUnit().name] : page.words[view.axis];
}

// Metrics of one run in a plot differ in color; with several runs, color is the run's and they differ in dashes.
const DASHES = ["solid", "dash", "dashdot", "longdash"];
function lineStyle(chart, trace) {
  const isSingle = chart.traces.every((other) => other.run === trace.run);
  const dash = isSingle ? "solid" : DASHES[trace.style % DASHES.length];
  return { color: runColor(isSingle ? trace.run + trace.style : trace.run), width: 1.8, dash: trace.validation ? "dot" : dash };
}

// Two invisible lines with the area between them filled.
function bandTraces(trace, line) {
  if (!trace.band) return [];
  const shared = { type: "scatter", mode: "lines", x: xValues(trace), line: { width: 0, color: line.color }, showlegend: false, hoverinfo: "skip" };
  return [
    { ...shared, y: trace.value.map((value, index) => value + trace.band[index]) },
    { ...shared, y: trace.value.map((value, index) => value - trace.band[index]), fill: "tonexty", fillcolor: `${line.color}22` },
  ];
}

function lineTraces(chart) {
  const traces = [];
  for (const trace of chart.traces) {
    const line = lineStyle(chart, trace);
    traces.push(...bandTraces(trace, line));
    const shared = {
      type: "scatter", x: xValues(trace), hoverlabel: { namelength: -1 }, line,
      hovertemplate: `%{y:.5~g}<extra>${trace.label}</extra>`,
    };
    const mode = trace.validation || trace.value.length < 3 ? "lines+markers" : "lines";
    if (view.smoothing > 0 && !trace.validation && trace.value.length > 2) {
      traces.push({ ...shared, y: trace.value, mode, name: trace.label, showlegend: false, hoverinfo: "skip",
        hovertemplate: null, opacity: 0.25, line: { ...shared.line, width: 1 } });
      traces.push({ ...shared, y: smooth(trace.value, view.smoothing), mode, name: trace.label });
    } else {
      traces.push({ ...shared, y: trace.value, mode, name: trace.label, marker: { size: 6, symbol: "circle" } });
    }
  }
  return traces;
}

const SYMBOLS = { checkpoint: "diamond", best: "star", restart: "triangle-right", bad: "x" };

function markTraces(chart) {
  if (!view.marks) return [];
  const first = new Map(chart.marks.map((mark, index) => [mark.kind, index]).reverse());
  return chart.marks.map((mark, index) => ({
    type: "scatter", mode: "markers", x: xValues(mark), y: mark.value, name: mark.label, text: mark.text,
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
  Plotly.react(element, [...lineTraces(chart), ...markTraces(chart)], lineLayout(chart, element), CONFIG);
  if (isNew) {
    element.on("plotly_relayout", (change) => syncZoom(element, change));
    element.addEventListener("keydown", (event) => zoomByKey(element, event));
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

// All plots share their x axis, so a zoom applies to all of them.
let isSyncing = false;
function syncZoom(source, change) {
  if (isSyncing) return;
  const start = change["xaxis.range[0]"], range = change["xaxis.range"];
  if (start !== undefined) view.range = [start, change["xaxis.range[1]"]];
  else if (range) view.range = range;
  else if (change["xaxis.autorange"]) view.range = null;
  else return;
  isSyncing = true;
  const others = plots.charts.map((chart) => document.getElementById(`plot-${chart.id}`)).filter((plot) => plot && plot !== source);
  const update = view.range ? { "xaxis.range": [...view.range], "xaxis.autorange": false } : { "xaxis.autorange": true };
  Promise.all(others.map((plot) => Plotly.relayout(plot, update))).finally(() => { isSyncing = false; });
}

function zoomByKey(element, event) {
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
function saveSetting(name, value) {
  try { localStorage.setItem(name, value); } catch { /* some browsers have no storage for files */ }
}

function loadSetting(name) {
  try { return localStorage.getItem(name); } catch { return null; }
}

function setUp() {
  for (const input of document.querySelectorAll("input[name=axis]")) {
    input.addEventListener("change", () => { view.axis = input.value; view.range = null; draw(); });
  }
  const smoothing = document.getElementById("smoothing"), label = document.getElementById("smoothing-value");
  smoothing.addEventListener("input", () => {
    view.smoothing = Number(smoothing.value);
    label.textContent = smoothing.value === "0" ? page.words.off : Number(smoothing.value).toLocaleString(root.lang);
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
    input.addEventListener("change", () => { setTheme(input.value); saveSetting("artel-theme", input.value); draw(); });
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("beforeprint", () => { const theme = root.dataset.theme; setTheme("light"); draw(); setTheme(theme || "auto"); });
  addEventListener("afterprint", draw);
  document.addEventListener("click", copy);
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-sort]");
    if (button) sortByButton(button);
  });
}

// Tables of answers: a click on a column sorts by it, highest first; a second click reverses. Rows without a value come
// last.
const sorting = {};
function sortByButton(button) {
  const table = button.closest("table"), isDescending = button.closest("th").ariaSort === "descending";
  sorting[table.id] = [Number(button.dataset.sort), isDescending ? "ascending" : "descending"];
  sortTable(table);
}

function sortTable(table) {
  const [column, direction] = sorting[table.id], sign = direction === "ascending" ? 1 : -1;
  const body = table.tBodies[0], value = (row) => row.cells[column].dataset.value;
  const compare = (a, b) => (!value(a) - !value(b)) || sign * (value(a) - value(b));
  body.replaceChildren(...[...body.rows].sort(compare));
  [...table.tHead.rows[0].cells].forEach((cell, index) => { cell.ariaSort = index === column ? direction : null; });
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

// A live report: the server sends the sections of the page and the data of the plots when they change. Only the newest
// data is drawn, and drawing takes at most a third of the time, so that the page stays responsive on a slow machine.
let newest = null, drawingTime = 0;
function listen() {
  const source = new EventSource("events");
  source.addEventListener("report", (event) => {
    if (newest === null) setTimeout(update, 2 * drawingTime);
    newest = event.data;
  });
  source.onerror = () => showConnection(page.words.lost);
}

function update() {
  const started = performance.now(), report = JSON.parse(newest);
  newest = null;
  if (report.problem) return showConnection(report.problem);
  for (const [name, html] of Object.entries(report.parts)) updateSection(name, html);
  for (const input of document.querySelectorAll("input[name=axis]")) input.disabled = !report.axes.includes(input.value);
  plots = report.plots;
  draw();
  showConnection("");
  drawingTime = performance.now() - started;
}

const rendered = {};
function updateSection(name, html) {
  const section = document.querySelector(`[data-part="${name}"]`);
  if (!section || rendered[name] === html) return;
  rendered[name] = html;
  const template = document.createElement("template");
  template.innerHTML = html;
  if (hasPlots(section) && listIds(template.content) === listIds(section)) updateTables(template.content);
  else replaceSection(section, template.content);
  const container = document.getElementById(name), link = document.querySelector(`nav a[href="#${name}"]`);
  if (container && link) container.hidden = link.hidden = !html;
}

function hasPlots(node) {
  return node.querySelector(".plot") !== null;
}

function listIds(node) {
  return [...node.querySelectorAll(".plot, details")].map((element) => element.id).join();
}

// Update only the tables: the plots keep their zoom and hovered point.
function updateTables(content) {
  for (const details of content.querySelectorAll("details")) document.getElementById(details.id).replaceChildren(...details.childNodes);
}

function replaceSection(section, content) {
  const open = new Set([...section.querySelectorAll("details[open]")].map((details) => details.id));
  const closed = new Set([...section.querySelectorAll("details:not([open])")].map((details) => details.id));
  section.querySelectorAll(".js-plotly-plot").forEach((plot) => Plotly.purge(plot));
  section.replaceChildren(content);
  for (const table of section.querySelectorAll("table.sortable")) if (sorting[table.id]) sortTable(table);
  for (const details of section.querySelectorAll("details")) {
    if (open.has(details.id)) details.open = true;
    else if (closed.has(details.id)) details.open = false;
  }
}

function showConnection(message) {
  const note = document.getElementById("connection");
  note.textContent = message;
  note.hidden = !message;
}

setTheme(loadSetting("artel-theme") || "auto");
setUp();
draw();
if (page.live) listen();
